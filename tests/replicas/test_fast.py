"""The trainer of tables: AdamW DDP against one model, and rows against staged runs. Fixtures have every method."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import pytest
import torch
from table_config import table_config, tiny
from torch import Tensor

from hetero_pp.config.folder import RunFolder
from hetero_pp.config.run_config import RunConfig
from hetero_pp.config.spec import RunSpec
from hetero_pp.core.errors import ConfigError
from hetero_pp.data.batches import StoreBatches, validation_batches
from hetero_pp.data.tokens import TokenStore, prepare_tokens
from hetero_pp.messages.messages_pb2 import Report
from hetero_pp.model.inner import InnerSettings
from hetero_pp.model.transformer import Transformer, initialise
from hetero_pp.program.launch.in_process import run_in_process
from hetero_pp.program.launch.inputs import require_launchable
from hetero_pp.pseudo_gradient.compression import CompressionSettings
from hetero_pp.research.trainer import contributions
from hetero_pp.research.trainer.contributions import WORTH_NUMBA, fastest
from hetero_pp.research.trainer.train import AllReplicas, FastResult, train_fast
from replica_groups.engines.plain import WholeReplica

needs_numba = pytest.mark.skipif(importlib.util.find_spec("numba") is None, reason="numba is not installed")

HOME = {"name": "home", "kind": "participants", "stages": 2, "batch_size": 4}
DC = {"name": "dc", "kind": "datacenter", "batch_size": 4}


def _config(
    corpus: Path,
    outer: dict[str, object],
    replicas: list[dict[str, object]],
    inner: Mapping[str, object] = MappingProxyType({}),
) -> RunConfig:
    compression = {"density": 1 / 16, "value_bits": 32} if "method" not in outer else {}
    own = outer.get("compression", {})
    assert isinstance(own, dict)
    return table_config(
        {
            **tiny(corpus, 32, 2, seed=2),
            "inner": {"steps": 4, "warmup_steps": 3, "learning_rate": 0.01, **inner},
            "outer": {"rounds": 3, **outer, "compression": {**compression, **own}},
            "replicas": replicas,
        }
    )


def _train(config: RunConfig, folder: Path) -> tuple[FastResult, RunSpec, TokenStore]:
    torch.set_num_threads(1)
    spec, store = RunSpec(config, 256), prepare_tokens(config.data, folder)
    return train_fast(spec, store), spec, store


def test_adamw_ddp_is_one_model_on_the_joined_batch(corpus: Path, tmp_path: Path) -> None:
    replicas = [{**DC, "name": name} for name in ("a", "b", "c")]
    result, spec, store = _train(_config(corpus, {"method": "adamw_ddp"}, replicas), tmp_path)
    model = Transformer(spec.shape)
    initialise(model, 2)
    one = WholeReplica("one", model, InnerSettings(steps=4, warmup_steps=3, learning_rate=0.01), spec.total_steps)
    data = [
        StoreBatches(store=store, sequence_length=32, seed=2, replica=index, replicas=3, batch_size=4)
        for index in range(3)
    ]
    losses = []
    for step in range(spec.total_steps or 0):
        one.inner_step(torch.cat([batches.train(step) for batches in data]), step)
        if step % 4 == 3:
            losses.append(one.evaluate(validation_batches(store, 32, 8, 4)))
    assert result.validation_loss == pytest.approx(losses, abs=2e-4)


@pytest.mark.parametrize(
    ("first", "anchors"),
    [("home", {"anchors": {"rank": 4}}), ("dc", {"embedding": "coefficients"})],
)
def test_averaged_gradients_end_where_the_staged_run_ends(
    first: str, anchors: dict[str, object], corpus: Path, tmp_path: Path
) -> None:
    """With AdamW DDP, every step is a round. In both trainers, the embedding moves by the mean of all own steps."""
    home = {**HOME, "micro_batches": 2, "boundary": {"rank": "1/4", **anchors}}
    config = _config(corpus, {"method": "adamw_ddp", "rounds": 4}, [DC, home] if first == "dc" else [home, DC])
    config = config.model_copy(update={"inner": config.inner.model_copy(update={"steps": 1})})
    require_launchable(config)
    fast, spec, _ = _train(config, tmp_path)
    reports: list[Report] = []
    run_in_process(spec, RunFolder(tmp_path / "run"), reports.append)
    for round_ in range(1, 5):
        told = [r.evaluation.loss for r in reports if r.HasField("evaluation") and r.evaluation.round == round_]
        assert len(told) == 2
        assert fast.validation_loss[round_ - 1] == pytest.approx(sum(told) / 2, abs=2e-3)


@pytest.mark.parametrize(
    ("outer", "boundary"),
    [
        ({}, {"rank": "1/4", "embedding": "coefficients"}),
        ({"overlap": 1, "divides_by": "senders"}, {"rank": "1/4"}),
        ({"compression": {"selection": "random_k"}}, {"rank": "1/2", "bits": 4, "anchors": {"rank": 4}}),
        (
            {"compression": {"quantiser": "signs", "value_bits": 1}},
            {"rank": "1/2", "bits": 4, "anchors": {"rank": 4, "fade": [0.3, 1.0]}},
        ),
    ],
)
def test_it_ends_where_the_staged_run_ends(
    outer: dict[str, object], boundary: dict[str, object], corpus: Path, tmp_path: Path
) -> None:
    """Results differ in the last bits, because sums are grouped differently and Adam amplifies small differences."""
    config = _config(corpus, outer, [DC, {**HOME, "micro_batches": 2, "boundary": boundary}])
    fast, spec, _ = _train(config, tmp_path)
    reports: list[Report] = []
    run_in_process(spec, RunFolder(tmp_path / "run"), reports.append)
    for round_ in (1, 2, 3):
        told = [r.evaluation.loss for r in reports if r.HasField("evaluation") and r.evaluation.round == round_]
        assert len(told) == 2
        assert fast.validation_loss[round_ - 1] == pytest.approx(sum(told) / 2, abs=2e-2)


@pytest.mark.parametrize(
    "outer",
    [
        {"compression": {"value_bits": 2}, "aggregation": "trimmed_mean", "trim": 0.3},
        {"method": "diloco", "aggregation": "centred_clipping"},
        {"aggregation": "geometric_median", "overlap": 1},
        {"method": "diloco", "overlap": 1, "optimizer": "adam", "momentum": 0.0, "nesterov": False},
        {"mixing": 0.5},
        {"fragments": 2, "presumed": 0.25, "mixing": 0.5},
        {"fragments": 2, "overlap": 1, "mixing": 0.25},
        {"fragments": 2, "overlap": 1, "pattern": "sequential", "compression": {"quantiser": "signs", "value_bits": 1}},
        {"method": "diloco", "fragments": 3, "overlap": 1, "mixing": 0.5},
        {"method": "diloco", "fragments": 2},
    ],
)
def test_without_a_group_it_has_the_bits_of_the_run_in_process(
    outer: dict[str, object], corpus: Path, tmp_path: Path
) -> None:
    """Nothing is cut into stages, so no sum is grouped differently. Decoded contributions equal the selected values."""
    config = _config(corpus, outer, [{**DC, "name": name} for name in ("a", "b", "c")])
    fast, spec, _ = _train(config, tmp_path)
    reports: list[Report] = []
    run_in_process(spec, RunFolder(tmp_path / "run"), reports.append)
    told = [r.evaluation for r in reports if r.HasField("evaluation")]
    losses = [sum(one.loss for one in told if one.round == round_) / 3 for round_ in (1, 2, 3)]
    assert fast.validation_loss == losses


def test_who_sends_a_zero_is_a_sender(corpus: Path, tmp_path: Path) -> None:
    """If contributions are dense, a mean over senders is one over replicas, although they saw different tokens."""
    results = []
    for divides_by in ("senders", "replicas"):
        dense = {"density": 1.0, "value_bits": 32, "quantiser": "levels"}
        outer: dict[str, object] = {"divides_by": divides_by, "compression": dense}
        config = _config(corpus, outer, [{**DC, "name": name, "batch_size": 1} for name in ("a", "b")])
        still = config.inner.model_copy(update={"weight_decay": 0.0, "steps": 1})
        results.append(_train(config.model_copy(update={"inner": still}), tmp_path)[0])
    assert results[0].validation_loss == results[1].validation_loss


@pytest.mark.parametrize("method", ["resbm", "mapl"])
def test_what_anothers_boundaries_learn_is_a_part_of_the_model(method: str, corpus: Path, tmp_path: Path) -> None:
    """After a round all replicas have the same learned tensors, which differ from those at the start."""
    boundary = {"rank": 4, "ablations": {"peer": {"method": method}}}
    homes = [{**HOME, "name": name, "boundary": boundary} for name in ("a", "b")]
    config = _config(corpus, {}, [*homes, DC])
    store = prepare_tokens(config.data, tmp_path)
    group = AllReplicas(RunSpec(config, store.vocabulary), store)
    first = {name: one.detach().clone() for name, one in _learned(group, 0).items()}
    assert group.round(1)
    assert all(one.equal(_learned(group, 1)[name]) for name, one in _learned(group, 0).items())
    assert not any(one.equal(first[name]) for name, one in _learned(group, 0).items() if "table.0" not in name)


def _learned(group: AllReplicas, index: int) -> Mapping[str, Tensor]:
    [own] = group.replicas[index].own
    return own.parameters


def test_slices_are_of_the_same_validation_rows(corpus: Path, tmp_path: Path) -> None:
    """Eight rows in batches of four make two slices. The mean of their losses is the loss over all rows."""
    config = _config(corpus, {}, [{**HOME, "boundary": {"rank": "1/4"}}, DC])
    result, _, _ = _train(config, tmp_path)
    wholes = {"own": result.validation_loss[-1], "uncompressed": result.uncompressed, "compressed": result.compressed}
    assert set(result.slices) == set(wholes)
    for forward, losses in result.slices.items():
        assert len(set(losses)) == len(losses) == 2
        assert sum(losses) / 2 == pytest.approx(wholes[forward], abs=1e-6)


def test_a_run_that_diverges_says_so(corpus: Path, tmp_path: Path) -> None:
    config = _config(corpus, {"learning_rate": 1e6}, [DC])
    result, _, _ = _train(config, tmp_path)
    assert result.diverged
    assert len(result.validation_loss) < 3


def test_averaged_gradients_are_launched_only_with_rounds_of_one_step(corpus: Path) -> None:
    with pytest.raises(ConfigError) as error:
        require_launchable(_config(corpus, {"method": "adamw_ddp"}, [HOME]))
    assert error.value.key == ("inner", "steps")


@pytest.mark.parametrize(
    ("outer", "embedding", "told"),
    [
        (
            {"method": "adamw_ddp"},
            "projected",
            "found `projected`, expected `free` or `coefficients` with method adamw",
        ),
        ({"overlap": 1}, "coefficients", "found `coefficients` with `outer.overlap: 1`, expected `free`"),
    ],
)
def test_embeddings_that_a_path_cannot_train_are_refused(
    outer: dict[str, object], embedding: str, told: str, corpus: Path
) -> None:
    home = {**HOME, "boundary": {"rank": "1/4", "embedding": embedding}}
    config = _config(corpus, outer, [DC, home], {"steps": 1})
    with pytest.raises(ConfigError, match=re.escape(told)) as error:
        config.check()
        require_launchable(config)
    assert error.value.key == ("replicas", 1, "boundary", "embedding")


def test_a_launched_run_ignores_no_settings_of_tables(corpus: Path, tmp_path: Path) -> None:
    home = {**HOME, "boundary": {"rank": "1/4", "ablations": {"weight_projection": "both"}}}
    spec = RunSpec(_config(corpus, {}, [DC, home]), 256)
    with pytest.raises(ConfigError, match=r"^research: found settings of a row of a table, expected none"):
        run_in_process(spec, RunFolder(tmp_path / "run"), lambda report: None)


# ---- selection with numba ----


@needs_numba
@pytest.mark.parametrize("outer", [{"compression": {"value_bits": 2}}, {"method": "diloco_lom", "memory_drops": 0.25}])
def test_a_row_has_the_same_bits_with_numba(
    outer: dict[str, object], corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = _config(corpus, outer, [DC, {**HOME, "boundary": {"rank": "1/4"}}])
    first = _train(config, tmp_path)[0]
    monkeypatch.setattr(contributions, "WORTH_NUMBA", 0)
    second = _train(config, tmp_path)[0]
    assert (first.validation_loss, first.compressed) == (second.validation_loss, second.compressed)


def test_only_long_rows_select_with_numba(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its import would take longer than a short one saves. A choice of the user stays."""
    plain = CompressionSettings.model_validate({})
    chosen = plain.model_copy(update={"accelerator": "compile"})
    monkeypatch.setattr(contributions.importlib.util, "find_spec", lambda name: object())
    assert fastest(plain, WORTH_NUMBA).accelerator == "numba"
    assert fastest(plain, WORTH_NUMBA - 1).accelerator == "torch"
    assert fastest(chosen, WORTH_NUMBA).accelerator == "compile"
    monkeypatch.setattr(contributions.importlib.util, "find_spec", lambda name: None)
    assert fastest(plain, WORTH_NUMBA).accelerator == "torch"
