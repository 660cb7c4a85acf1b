"""Every feature that can be launched gives the same bits over gRPC and without it. All members are threads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import pytest
from grpc_threads import run_over_grpc

from hetero_pp.config.checkpoint import RunCheckpoint
from hetero_pp.config.folder import RunFolder
from hetero_pp.config.run_config import RunConfig
from hetero_pp.config.topology import ParticipantsReplica
from hetero_pp.config.yaml_file import ConfigFile, read_run, save_config, spec_of
from hetero_pp.core.device import CPU
from hetero_pp.messages.messages_pb2 import Report, RoundRecord
from hetero_pp.outer.methods import OuterSettings
from hetero_pp.program.launch.in_process import run_in_process
from hetero_pp.store.folder import FolderStore
from replica_groups.exchange.log import ContributionLog

HERE = Path(__file__).parent
ROUNDS = 2
SMALL = ("model.width=32", "model.feed_forward=64", "data.sequence_length=32", "data.validation_sequences=4")
QUICKSTART = (
    HERE.parents[1] / "configs" / "quickstart.yaml",
    (*SMALL, "inner.steps=2", "replicas.0.batch_size=4", "replicas.1.batch_size=4"),
)
UNEVEN = "replicas.1.stages=[{layers: 2}, {layers: 1}]"
MIXED = (HERE / "mixed.yaml", (*SMALL, UNEVEN, "inner.steps=2"))
ADAM = "optimizer: adam, learning_rate: 0.01, final_learning_rate_share: 0.1"
RUNS: Mapping[str, tuple[tuple[Path, Sequence[str]], Sequence[str]]] = {
    "quickstart": (QUICKSTART, []),
    "DiLoCo, inner Muon": (
        MIXED,
        ["inner.optimizer=muon", "outer={method: diloco, rounds: 2, aggregation: geometric_median}"],
    ),
    "2-bit levels": (MIXED, ["outer={method: sparseloco, rounds: 2, aggregation: trimmed_mean}"]),
    "DeMo, outer Adam": (
        MIXED,
        ["inner.optimizer=sgd", "inner.learning_rate=0.1", f"outer={{method: demo, rounds: 2, {ADAM}}}"],
    ),
    "DiLoCo-LOM in bf16": (
        MIXED,
        [
            "outer={method: diloco_lom, rounds: 2, aggregation: centred_clipping}",
            "inner.steps=1",
            *(f"replicas.{index}.{change}" for index in (0, 1) for change in ("precision=bf16", "recompute=layers")),
        ],
    ),
}
"""A YAML for each run with changes that runs share, and its own changes apart from rounds and corpus."""


def _file(run: str, corpus: Path) -> ConfigFile:
    (yaml, shared), own = RUNS[run]
    return ConfigFile(yaml, [f"outer.rounds={ROUNDS}", f"data.corpus={corpus}", *shared, *own])


@dataclass(frozen=True)
class Both:
    """A run whose members talk over gRPC, and the same run without it, both in threads of this process."""

    config: RunConfig
    folders: tuple[RunFolder, RunFolder]
    reports: tuple[Sequence[Report], Sequence[Report]]

    def checkpoints(self) -> Iterator[RunCheckpoint]:
        """Yield the run checkpoint of each run's last round."""
        for folder in self.folders:
            yield ContributionLog(FolderStore(folder.log)).read_checkpoint(ROUNDS)

    def records(self, round_: int) -> Iterator[RoundRecord]:
        """Yield each run's record of a round."""
        for folder in self.folders:
            yield ContributionLog(FolderStore(folder.log)).read_record(round_)


@pytest.fixture(scope="module", params=RUNS)
def both(request: pytest.FixtureRequest, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Both:
    """Train both runs from the configuration that a launch writes for its members.

    `test_in_process_equals_grpc.py` compares a run whose members are processes.
    """
    over_grpc, in_process = (RunFolder(tmp_path_factory.mktemp(name)) for name in ("grpc", "in_process"))
    asked = spec_of(_file(request.param, corpus))
    save_config(asked.config, over_grpc.config)
    spec = read_run(over_grpc)
    assert spec.config == asked.config
    ran = run_over_grpc(spec, over_grpc.path, dict.fromkeys(spec.members, CPU))
    assert not ran.errors
    reports: list[Report] = []
    run_in_process(spec, in_process, reports.append)
    return Both(spec.config, (over_grpc, in_process), (ran.reports, reports))


def test_every_loss(both: Both) -> None:
    """Compares the loss of each inner step and evaluation of each replica."""
    losses, evaluations = [], []
    for reports in both.reports:
        steps = [one.inner_step for one in reports if one.HasField("inner_step")]
        losses.append({(one.replica, one.round, one.step): one.loss for one in steps if one.HasField("loss")})
        evaluated = [one.evaluation for one in reports if one.HasField("evaluation")]
        evaluations.append({(one.replica, one.round): one.loss for one in evaluated})
    assert len(losses[0]) == ROUNDS * both.config.inner.require_steps("") * len(both.config.replicas)
    assert losses[0] == losses[1]
    assert len(evaluations[0]) == (ROUNDS + 1) * len(both.config.replicas)
    assert evaluations[0] == evaluations[1]


def test_every_contribution(both: Both) -> None:
    """Compares the digest of each replica's contribution."""
    for round_ in range(1, ROUNDS + 1):
        digests = [{one.replica: one.digest for one in record.contributions} for record in both.records(round_)]
        assert set(digests[0]) == {replica.name for replica in both.config.replicas}
        assert digests[0] == digests[1], f"round {round_}"


def test_parameters_and_outer_momentum(both: Both) -> None:
    """Compares the run checkpoints of the last round, and the hash of each replica."""
    over_grpc, in_process = both.checkpoints()
    outer = both.config.outer
    assert bool(over_grpc.momentum) == (outer.momentum > 0 or outer.optimizer == "adam")
    assert set(over_grpc.tensors()) == set(in_process.tensors())
    for name, tensor in over_grpc.tensors().items():
        assert tensor.equal(in_process.tensors()[name]), name
    verified = [[one.round_verified for one in reports if one.HasField("round_verified")] for reports in both.reports]
    hashes = [{one.parameters_sha256 for one in own if one.round == ROUNDS} for own in verified]
    assert hashes[0] == hashes[1]
    assert len(hashes[0]) == 1


def test_the_runs_have_all_parts_that_can_be_launched(corpus: Path) -> None:
    """The features are 4-bit boundaries, every optimizer, outer momentum, levels of 2 bits and every aggregation."""
    configs = {run: _file(run, corpus).config for run in RUNS}
    [home] = [one for one in configs["quickstart"].replicas if isinstance(one, ParticipantsReplica)]
    assert home.boundary.bits == 4
    assert {config.inner.optimizer for config in configs.values()} == {"adamw", "muon", "sgd"}
    assert {config.outer.optimizer for config in configs.values()} == {"sgd", "adam"}
    assert configs["DiLoCo, inner Muon"].outer.momentum == 0.9
    compression = configs["2-bit levels"].outer.compression
    assert (compression.quantiser, compression.value_bits) == ("levels", 2)
    aggregations = OuterSettings.model_fields["aggregation"].annotation
    assert {config.outer.aggregation for config in configs.values()} == set(get_args(aggregations))
