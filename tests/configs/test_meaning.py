"""Marks of fields determine which part of a configuration identifies the run, and which determines its outcome."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import pytest
from pydantic import Field

from hetero_pp.config.run_config import RunConfig
from hetero_pp.config.spec import RunSpec
from hetero_pp.config.yaml_file import ConfigFile
from hetero_pp.core.settings import NotPartOf, Settings, meaning

CONFIGS = Path(__file__).parents[2] / "configs"
RUNS = {
    "quickstart": "ae9f0da3b5384c91a7c376210d2726ce",
    "mixed_engines": "edf4b5612b11967255db30a7a58a5fa6",
    "unequal_groups": "311855fcea3455d695a256b1b1cbd7ec",
    "plan/unequal": "8361c18d7ae616b3ea4f45532878af9c",
    "paper/1b": "60d57f68a00fa473144cdc0be7d3cbbf",
    "paper/het_pp_97_percent": "b1352007279fc4830e80f9f63af5fbe0",
    "simulate/million": "db27889ffcdd22964d7eb50c2008b010",
}
"""Identities of runs. A change of one means that a run that was started before it cannot be resumed."""

RUN = """\
name: one
outer: {rounds: 2}
links: {dsl: {bandwidth: 10 Mbit/s}}
replicas:
  - {name: dc, kind: datacenter, engine: torchtitan, rendezvous: '127.0.0.1:47500'}
  - {name: home, kind: participants, link: dsl, stages: [{layers: 2}, {layers: 2}]}
"""
OF_A_HOST = [
    "threads=2",
    "data.corpus=docstrings",
    "data.tokenizer=elsewhere/tokenizer.json",
    "outer.compression.accelerator=numba",
    "exchange.listen=127.0.0.1:47501",
    "simulate.tokens=7",
    "plan.stages=2",
    "replicas.0.device=cpu",
    "replicas.1.recompute=layers",
    "replicas.0.hardware=h100",
    "replicas.0.accelerators=8",
    "replicas.0.ranks=2",
    "replicas.0.nodes=2",
    "replicas.0.rendezvous=127.0.0.1:47502",
    "replicas.1.hardware=h100",
    "replicas.1.stages.0.listen=127.0.0.1:47503",
]
"""Changes that keep the run's identity and its outcome."""
AROUND_A_RUN = [
    "name=two",
    "links.dsl.bandwidth=1 Mbit/s",
    "links={dsl: {bandwidth: 10 Mbit/s}, adsl: {}}",
    "checkpoints.every=1",
    "data.repeat=false",
    "data.stream.shuffle_buffer=1",
    "replicas.0.uplink=dsl",
    "replicas.0.torchtitan.compile=true",
    "replicas.0.deepspeed={zero_optimization: {stage: 3}}",
    "replicas.1.link=null",
    "replicas.1.stages.1.uplink=dsl",
    "replicas.1.stages.1.hardware=h100",
    "outer={rounds: 2, method: sparseloco, compression: {density: 1/32, quantiser: signs, value_bits: 1}}",
]
"""Changes that make another run with the same outcome."""
OF_A_RUN = [
    "seed=1",
    "model.width=32",
    "data.sequence_length=64",
    "data.validation_share=0.1",
    "inner.steps=5",
    "inner={seconds: 5 min}",
    "inner.clip_norm=null",
    "outer.rounds=3",
    "outer.divides_by=senders",
    "outer.weights=tokens",
    "outer.returned=0.25",
    "outer.compression.density=0.5",
    "replicas.0.name=site",
    "replicas.0.engine=deepspeed",
    "replicas.0.batch_size=4",
    "replicas.0.micro_batches=2",
    "replicas.1.stages=2",
    "replicas.1.boundary.rank=8",
    "replicas.1.precision=bf16",
    "replicas.1.precision=fp32",
]
"""Changes that make another run with another outcome."""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(RUN)
    return path


@pytest.mark.parametrize(("name", "run"), RUNS.items(), ids=RUNS)
def test_a_run_keeps_its_name(name: str, run: str) -> None:
    config = ConfigFile(CONFIGS / f"{name}.yaml").config
    assert RunSpec(config, config.model.vocabulary or 256).run == run


def _same(before: Path, change: str) -> dict[NotPartOf, bool]:
    """Return whether a change keeps the run's identity, and whether it keeps its outcome."""
    one, other = ConfigFile(before).config, ConfigFile(before, [change]).config
    assert one != other
    return {
        mark: meaning(one, mark, defaults) == meaning(other, mark, defaults)
        for mark, defaults in ((NotPartOf.RUN, True), (NotPartOf.OUTCOME, False))
    }


@pytest.mark.parametrize("change", OF_A_HOST)
def test_hosts_of_a_run_may_differ(change: str, run: Path) -> None:
    assert _same(run, change) == {NotPartOf.RUN: True, NotPartOf.OUTCOME: True}


def test_where_weights_lie_is_a_hosts_own_and_what_they_are_decides() -> None:
    one = RunConfig.model_validate({"name": "one", "outer": {"rounds": 1}})
    other = one.model_copy(update={"model": one.model.model_copy(update={"weights": "some/folder"})})
    assert meaning(one, NotPartOf.RUN) == meaning(other, NotPartOf.RUN)
    assert meaning(one, NotPartOf.OUTCOME, defaults=False) != meaning(other, NotPartOf.OUTCOME, defaults=False)


@pytest.mark.parametrize("change", AROUND_A_RUN)
def test_another_run_may_come_to_the_same(change: str, run: Path) -> None:
    assert _same(run, change) == {NotPartOf.RUN: False, NotPartOf.OUTCOME: True}


@pytest.mark.parametrize("change", OF_A_RUN)
def test_all_else_decides(change: str, run: Path) -> None:
    assert _same(run, change) == {NotPartOf.RUN: False, NotPartOf.OUTCOME: False}


class _Before(Settings):
    size: int
    rate: float = 0.5
    path: Annotated[str, NotPartOf.RUN] = "here"


class _After(_Before):
    """The same section after fields were added."""

    method: str = "as ever"
    more: _Before = Field(default_factory=lambda: _Before(size=1, rate=2.0))


def test_what_says_the_default_is_left_out() -> None:
    assert meaning(_Before(size=1, rate=0.5), NotPartOf.RUN, defaults=False) == {"size": 1}
    assert meaning(_Before(size=1, rate=0.5), NotPartOf.RUN) == {"size": 1, "rate": 0.5}
    assert meaning(_Before(size=1, path="there"), NotPartOf.OUTCOME, defaults=False) == {"size": 1, "path": "there"}


def test_a_field_that_is_added_changes_no_meaning() -> None:
    before, after = _Before(size=1), _After(size=1)
    assert meaning(after, NotPartOf.RUN, defaults=False) == meaning(before, NotPartOf.RUN, defaults=False)
    moved = _After(size=1, more=_Before(size=1, rate=2.0, path="there"))
    assert meaning(moved, NotPartOf.RUN, defaults=False) == {"size": 1}
