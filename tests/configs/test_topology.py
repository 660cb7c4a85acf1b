"""Numbers that follow from ranks of boundaries and kinds of links, computed by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hetero_pp.config.lines import LinkSettings
from hetero_pp.config.run_config import RunConfig
from hetero_pp.config.spec import RunSpec
from hetero_pp.config.topology import ExchangeSettings, ParticipantsReplica
from hetero_pp.config.yaml_file import ConfigFile
from hetero_pp.core.errors import ConfigError
from hetero_pp.model.part_settings import BoundarySettings
from hetero_pp.outer.methods import METHODS


@pytest.mark.parametrize(
    ("rank", "width", "dimensions"),
    [
        ("1/24", 64, 3),  # 2.67
        ("1/24", 1024, 43),  # 42.67
        ("1/3", 64, 21),  # 21.33
        ("1/2", 64, 32),
        ("1/1000", 64, 1),
        (3, 64, 3),
        ("full", 64, None),
    ],
)
def test_a_share_of_the_width_is_rounded_to_dimensions(rank: Any, width: int, dimensions: int | None) -> None:
    assert BoundarySettings.model_validate({"rank": rank}).dimensions(width) == dimensions


def _group(name: str, rank: Any, stages: int = 2) -> dict[str, Any]:
    return {"name": name, "kind": "participants", "stages": stages, "batch_size": 2, "boundary": {"rank": rank}}


@pytest.mark.parametrize(
    ("groups", "largest"),
    [
        ([_group("a", "1/8"), _group("b", "1/4"), _group("c", "1/16")], 16),
        ([_group("a", 5), _group("b", "full")], 5),
        ([_group("a", "1/2", stages=1), _group("b", "1/8")], 8),  # a group of one stage has no boundary
        ([_group("a", "full")], None),
    ],
)
def test_the_basis_has_as_many_columns_as_the_largest_rank(groups: list[dict[str, Any]], largest: int | None) -> None:
    config = {"name": "ranks", "model": {"preset": "micro", "width": 64}, "outer": {"rounds": 1}, "replicas": groups}
    assert RunSpec(RunConfig.model_validate(config), 100).largest_rank == largest


def test_a_method_says_how_groups_train_their_embedding_unless_the_group_does() -> None:
    """Het-PP, section 2.4, keeps T_S in the subspace; a group may override it, and other methods do not."""
    counted = {**_group("b", "1/8"), "count": 2}
    free = {**_group("c", "1/8"), "boundary": {"rank": "1/8", "embedding": "free"}}
    plain = {"name": "d", "kind": "participants", "stages": 2}
    replicas = [{"name": "dc", "kind": "datacenter"}, _group("a", "1/8"), counted, free, plain]

    def found(**outer: Any) -> dict[str, str]:
        config = RunConfig.model_validate({"name": "m", "outer": {"rounds": 1, **outer}, "replicas": replicas})
        again = RunConfig.model_validate(config.model_dump(mode="json"))
        assert again == config
        return {one.name: one.boundary.embedding for one in config.replicas if isinstance(one, ParticipantsReplica)}

    inside = "coefficients"
    assert found(method="het_pp") == {"a": inside, "b-1": inside, "c": "free", "d": inside, "b-2": inside}
    for other in METHODS.keys() - {"het_pp"}:
        assert set(found(method=other).values()) == {"free"}
    assert set(found().values()) == {"free"}


def test_with_overlap_a_compressed_group_of_het_pp_has_to_say_that_it_is_free() -> None:
    def check(boundary: dict[str, Any]) -> None:
        group = {**_group("a", "full"), "boundary": boundary}
        outer = {"rounds": 1, "method": "het_pp", "overlap": 1}
        RunConfig.model_validate({"name": "m", "outer": outer, "replicas": [group]}).check()

    check({"rank": "full"})
    check({"rank": "1/8", "embedding": "free"})
    with pytest.raises(ConfigError, match=r"found `coefficients` with `outer\.overlap: 1`, expected `free`") as error:
        check({"rank": "1/8"})
    assert error.value.key == ("replicas", 0, "boundary", "embedding")


def test_a_direction_overrides_what_it_names_and_nothing_else() -> None:
    link = LinkSettings.model_validate(
        {
            "bandwidth": "100 Mbit/s",
            "latency": "15 ms",
            "forward": {"bandwidth": "20 Mbit/s"},
            "backward": {"latency": "40 ms", "jitter": "1 ms"},
        }
    )
    forward, backward = link.shape("forward"), link.shape("backward")
    assert (forward.bandwidth, forward.latency, forward.jitter) == (20e6, 0.015, 0)
    assert (backward.bandwidth, backward.latency, backward.jitter) == (100e6, 0.040, 0.001)


@pytest.mark.parametrize(
    ("engine", "setting", "told"),
    [
        (
            "torchtitan",
            {"precision": "bf16"},
            "found `bf16` with the engine `torchtitan`, expected `torchtitan.precision`",
        ),
        ("deepspeed", {"precision": "fp32"}, "found `fp32` with the engine `deepspeed`, expected `deepspeed.bf16`"),
        (
            "torchtitan",
            {"recompute": "layers"},
            "found `layers` with the engine `torchtitan`, expected `torchtitan.activation_checkpointing`",
        ),
        ("deepspeed", {"recompute": "layers"}, "found `layers` with the engine `deepspeed`, expected `none`"),
        ("deepspeed", {"compile": True}, "found `true` with the engine `deepspeed`, expected `false`"),
    ],
)
def test_engines_with_keys_of_their_own_refuse_those_of_torch(engine: str, setting: dict[str, str], told: str) -> None:
    replica = {"name": "dc", "kind": "datacenter", "engine": engine}
    [key] = setting
    for given in (setting, {}):
        config = RunConfig.model_validate({"name": "r", "outer": {"rounds": 1}, "replicas": [replica | given]})
        if not given:
            config.check()
            continue
        with pytest.raises(ConfigError) as refused:
            config.check()
        assert (refused.value.key, refused.value.message) == (("replicas", 0, key), told)


@pytest.mark.parametrize(
    ("listen", "relay", "found"),
    [
        ("0.0.0.0:47600", None, "0.0.0.0:47601"),
        ("[::]:47600", None, "[::]:47601"),
        ("host.example:65535", None, "host.example:65534"),
        ("0.0.0.0:0", None, "0.0.0.0:0"),
        ("127.0.0.1:47600", None, "127.0.0.1:0"),
        ("0.0.0.0:47600", "10.0.0.1:443", "10.0.0.1:443"),
    ],
)
def test_where_the_relay_listens(listen: str, relay: str | None, found: str) -> None:
    """By default beside the exchange. On loopback nobody has to open the port, so that any free one does."""
    assert ExchangeSettings(listen=listen, relay=relay).relays_at == found


@pytest.mark.parametrize(
    ("outer", "told"),
    [
        ("{rounds: 9, fragments: 6}", "outer.fragments: found 6, expected at most 5: each of them needs a layer"),
        ("{rounds: 2, fragments: 3}", "outer.fragments: found 3, expected at most 2: each of them needs a layer"),
        ("{rounds: 9, fragments: 0}", "outer.fragments: found `0`, expected"),
        ("{rounds: 9, fragments: 2, mixing: 1}", "outer.mixing: found `1.0`, expected less than 1"),
        ("{rounds: 9, fragments: 2, mixing: -0.1}", "outer.mixing: found `-0.1`, expected"),
        ("{rounds: 9, fragments: 2, pattern: odd}", "outer.pattern: found `odd`, expected"),
        (
            "{rounds: 9, method: adamw_ddp, fragments: 2}",
            "outer: adamw_ddp: found `fragments: 2` with averaged gradients",
        ),
        (
            "{rounds: 9, method: adamw_ddp, mixing: 1/2}",
            "outer: adamw_ddp: found `mixing: 0.5` with averaged gradients",
        ),
        ("{rounds: 9, overlap: 1, mixing: 1/2}", "outer: sparseloco_signs: found `mixing: 0.5` with `overlap: 1`"),
    ],
)
def test_an_error_about_fragments_names_its_line(outer: str, told: str, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(f"name: m\nouter: {outer}\nreplicas:\n  - {{name: dc, kind: datacenter, batch_size: 2}}\n")
    with pytest.raises(ConfigError) as error:
        ConfigFile(path)
    [line] = str(error.value).splitlines()
    assert line.startswith(f"{path}:2: {told}")
