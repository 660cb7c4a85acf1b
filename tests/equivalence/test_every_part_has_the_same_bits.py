"""Every feature that can be launched gives the same bits over gRPC and in one process."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import pytest
from started import run_program

from hetero_pp.config.topology import ParticipantsReplica
from hetero_pp.messages.messages_pb2 import Report
from hetero_pp.outer.methods import OuterSettings
from hetero_pp.program.launch.in_process import run_in_process
from hetero_pp.run.config import RunConfig
from hetero_pp.run.folder import RunFolder
from hetero_pp.run.read import read_run
from hetero_pp.run.yaml_file import ConfigFile
from hetero_pp.store.folder import FolderStore
from replica_groups.exchange.log import ContributionLog

HERE = Path(__file__).parent
ROUNDS = 2
ADAM = (
    "{method: diloco, rounds: 2, optimizer: adam, momentum: 0, nesterov: false, aggregation: sign, "
    "learning_rate: 0.01, final_learning_rate_share: 0.1}"
)
RUNS: Mapping[str, tuple[Path, Sequence[str]]] = {
    "quickstart": (HERE.parents[1] / "configs" / "quickstart.yaml", ["inner.steps=2", "data.validation_sequences=8"]),
    "DiLoCo": (HERE / "mixed.yaml", ["outer={method: diloco, rounds: 2, aggregation: geometric_median}"]),
    "2-bit levels": (HERE / "mixed.yaml", ["outer={method: sparseloco_paper, rounds: 2, aggregation: trimmed_mean}"]),
    "inner Muon": (
        HERE / "mixed.yaml",
        ["inner.optimizer=muon", "outer.compression.value_bits=2", "outer.aggregation=centred_clipping"],
    ),
    "outer Adam": (HERE / "mixed.yaml", [f"outer={ADAM}"]),
    "DeMo": (
        HERE / "mixed.yaml",
        ["inner.optimizer=sgd", "inner.learning_rate=0.1", "outer={method: demo, rounds: 2}"],
    ),
    "DiLoCo-LOM in bf16": (
        HERE / "mixed.yaml",
        [
            "outer={method: diloco_lom, rounds: 2}",
            *(f"replicas.{index}.{change}" for index in (0, 1) for change in ("precision=bf16", "recompute=layers")),
        ],
    ),
}
"""A YAML for each run, with its changes apart from rounds and corpus."""


def _changes(run: str, corpus: Path) -> list[str]:
    return [f"outer.rounds={ROUNDS}", f"data.corpus={corpus}", *RUNS[run][1]]


@dataclass(frozen=True)
class Both:
    """A launched run, and the same run in threads of this process."""

    launched: Path
    in_process: Path
    reports: Sequence[Report]
    """Reports of the run in this process."""

    def config(self) -> RunConfig:
        return ConfigFile(self.launched / "config.yaml").config


@pytest.fixture(scope="module", params=RUNS)
def both(request: pytest.FixtureRequest, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Both:
    folder = tmp_path_factory.mktemp("runs")
    yaml, _ = RUNS[request.param]
    sets = [f"--set={change}" for change in _changes(request.param, corpus)]
    done = run_program("launch", str(yaml), "--runs", str(folder), *sets)
    assert done.returncode == 0, done.stdout + done.stderr
    [launched] = folder.glob("*/config.yaml")
    reports: list[Report] = []
    in_process = tmp_path_factory.mktemp("in_process")
    run_in_process(read_run(RunFolder(launched.parent)), RunFolder(in_process), reports.append)
    return Both(launched.parent, in_process, reports)


def _events(run: Path, kind: str) -> list[dict[str, object]]:
    events = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [event for event in events if event["event"] == kind]


@pytest.mark.starts_processes
def test_every_loss(both: Both) -> None:
    """Compares the loss of each inner step and evaluation of each replica."""
    config = both.config()
    steps = [report.inner_step for report in both.reports if report.HasField("inner_step")]
    losses = {(step.replica, step.round, step.step): step.loss for step in steps if step.HasField("loss")}
    told = {
        (event["replica"], event["round"], event.get("step", 0)): event["loss"]
        for event in _events(both.launched, "inner_step")
        if "loss" in event
    }
    assert len(told) == ROUNDS * config.inner.require_steps("") * len(config.replicas)
    assert told == losses
    evaluations = [report.evaluation for report in both.reports if report.HasField("evaluation")]
    evaluated = {(event["replica"], event["round"]): event["loss"] for event in _events(both.launched, "evaluation")}
    assert len(evaluated) == (ROUNDS + 1) * len(config.replicas)
    assert evaluated == {(one.replica, one.round): one.loss for one in evaluations}


@pytest.mark.starts_processes
def test_every_contribution(both: Both) -> None:
    """Compares the digest of each replica's contribution."""
    logs = [ContributionLog(FolderStore(run / "log")) for run in (both.launched, both.in_process)]
    for round_ in range(1, ROUNDS + 1):
        digests = [{one.replica: one.digest for one in log.read_record(round_).contributions} for log in logs]
        assert set(digests[0]) == {replica.name for replica in both.config().replicas}
        assert digests[0] == digests[1], f"round {round_}"


@pytest.mark.starts_processes
def test_parameters_and_outer_momentum(both: Both) -> None:
    """Compares the snapshots of the last round, and the hash of each replica."""
    logs = [ContributionLog(FolderStore(run / "log")) for run in (both.launched, both.in_process)]
    launched, in_process = (log.read_snapshot(ROUNDS) for log in logs)
    outer = both.config().outer
    assert bool(launched.momentum) == (outer.momentum > 0 or outer.optimizer == "adam")
    assert set(launched.tensors()) == set(in_process.tensors())
    for name, tensor in launched.tensors().items():
        assert tensor.equal(in_process.tensors()[name]), name
    hashes = {one["parameters_sha256"] for one in _events(both.launched, "round_verified") if one["round"] == ROUNDS}
    verified = [report.round_verified for report in both.reports if report.HasField("round_verified")]
    assert hashes == {one.parameters_sha256.hex() for one in verified if one.round == ROUNDS}
    assert len(hashes) == 1


def test_the_runs_have_all_parts_that_can_be_launched(corpus: Path) -> None:
    """The features are 4-bit boundaries, outer momentum, levels of 2 bits and every aggregation."""
    configs = {run: ConfigFile(yaml, _changes(run, corpus)).config for run, (yaml, _) in RUNS.items()}
    [home] = [one for one in configs["quickstart"].replicas if isinstance(one, ParticipantsReplica)]
    assert home.boundary.bits == 4
    assert configs["DiLoCo"].outer.momentum == 0.9
    compression = configs["2-bit levels"].outer.compression
    assert (compression.quantiser, compression.value_bits) == ("levels", 2)
    aggregations = OuterSettings.model_fields["aggregation"].annotation
    assert {config.outer.aggregation for config in configs.values()} == set(get_args(aggregations))
