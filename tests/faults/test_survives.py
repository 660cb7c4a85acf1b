"""A run continues whatever dies, freezes or breaks: real processes and connections, up to three faults per test.

In every case, rounds are consecutive, and all replicas hold the same weights. A replay of the log gives them too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from asking import sets
from mixed_run import MIXED
from started import run_script
from typer.testing import CliRunner

from hetero_pp.config.folder import RunFolder
from hetero_pp.config.yaml_file import read_run
from hetero_pp.messages.messages_pb2 import (
    HEALED,
    INCARNATION_OVER,
    INJECTED,
    RESTARTED,
    SILENT,
    SUSPENDED,
    MembershipEventKind,
    Report,
)
from hetero_pp.program.cli import app
from hetero_pp.program.launch.in_process import run_in_process

pytestmark = pytest.mark.starts_processes

LAUNCH_WITH_FAULTS = Path(__file__).parents[2] / "benchmarks/launch_with_faults.py"
ROUNDS = 5

ON_RANKS = """
name: ranks
model: {preset: micro, width: 32, heads: 2, feed_forward: 64, layers: 2}
data: {corpus: CORPUS, sequence_length: 32, validation_share: 0.2, validation_sequences: 10}
inner: {steps: 2, learning_rate: 1e-2, warmup_steps: 2}
outer: {rounds: 3, compression: {density: 1/32}}
replicas:
  - {name: zero, kind: datacenter, engine: deepspeed, ranks: 2, batch_size: 4, device: cpu}
  - {name: plain, kind: datacenter, batch_size: 4, device: cpu}
"""


class Survived:
    """A run with faults, trained to its end."""

    def __init__(
        self, config: Path, faults: str, corpus: Path, runs: Path, settings: Sequence[str], rounds: int
    ) -> None:
        self._faults = faults.count("at: ")
        path = runs / "faults.yaml"
        path.write_text(f"faults: [{faults}]")
        command = [str(config), "--runs", str(runs), "--faults", str(path)]
        short = [f"data.corpus={corpus}", f"outer.rounds={rounds}", "inner.steps=2", "data.validation_sequences=4"]
        settings = sets(*short, "checkpoints.every=1", "exchange.quorum=1", *settings)
        done = run_script(LAUNCH_WITH_FAULTS, *command, *settings)
        (folder,) = (path.parent for path in runs.glob("*/summary.json"))
        self.folder, self.rounds, self.code, self.errors = folder, rounds, done.returncode, done.stderr
        self.summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        self.membership_event = [one for line in lines if (one := json.loads(line)).get("event") == "membership_event"]

    def happened(self, what: MembershipEventKind, slot: str | None = None) -> list[str]:
        """Return the reported events of this kind, for all slots or one, as `slot: cause`."""
        name = MembershipEventKind.Name(what).lower()
        found = [one for one in self.membership_event if one["what"] == name and slot in (None, one["slot"])]
        return [f"{one['slot']}: {one['cause']}" for one in found]

    def generations(self, round_: int) -> dict[str, int]:
        """Return the replicas that a round includes -> their generations."""
        record = json.loads((self.folder / f"log/round-{round_:06d}/record.json").read_text())
        return {one["replica"]: int(one["generation"]) for one in record["contributions"]}

    def assert_sound(self) -> None:
        """Require that the run reached its last round with one set of weights, which replay gives too."""
        assert self.code == 0, self.errors
        assert len(self.happened(INJECTED)) == self._faults
        assert self.summary["rounds"] == self.rounds
        numbers = sorted(int(path.parent.name.removeprefix("round-")) for path in self.folder.glob("log/*/record.json"))
        assert numbers == list(range(1, self.rounds + 1))
        (sha256,) = set(self.summary["parameters_sha256"].values())
        replayed = CliRunner().invoke(app, ["log", "replay", str(self.folder)])
        assert replayed.exit_code == 0, replayed.stderr
        assert replayed.stdout.split()[-1] == sha256

    def restarts(self, round_: int) -> list[tuple[str, int]]:
        """Return the slots whose holders began within a round, and the steps at which they did."""
        record = json.loads((self.folder / f"log/round-{round_:06d}/record.json").read_text())
        found = [one for entry in record["contributions"] for one in entry.get("restarts", [])]
        return [(one["slot"], int(one.get("step", 0))) for one in found]

    def assert_same_in_process(self, folder: Path) -> None:
        """Require the weights of a run in this process without faults, in which the same slots restart."""
        restarts: dict[str, list[tuple[int, int]]] = {}
        for round_ in range(1, self.rounds + 1):
            for slot, step in self.restarts(round_):
                restarts.setdefault(slot, []).append((round_, step))
        reports: list[Report] = []
        run_in_process(read_run(RunFolder(self.folder)), RunFolder(folder), reports.append, restarts=restarts)
        verified = [one.round_verified for one in reports if one.HasField("round_verified")]
        found = {one.replica: one.parameters_sha256.hex() for one in verified if one.round == self.rounds}
        assert found == self.summary["parameters_sha256"]


@pytest.fixture
def survive(corpus: Path, tmp_path: Path) -> Any:
    def run(faults: str, *settings: str, config: Path = MIXED, rounds: int = ROUNDS) -> Survived:
        return Survived(config, faults, corpus, tmp_path, settings, rounds)

    return run


def test_a_datacenter_a_stage_and_the_exchange_that_are_killed_are_replaced(survive: Any, tmp_path: Path) -> None:
    """The stage's group resumes after its first step. The exchange, with contributions in it, takes over from its log.

    The datacenter dies once its contribution is complete: it returns to the state after the round that includes it.
    """
    run = survive(
        "{kill: dc, at: {round: 2, phase: waiting}}, {kill: home.1, at: {round: 3, phase: training}}, "
        "{kill: exchange, at: {round: 4, phase: waiting}}",
        "states.every=1",
    )
    run.assert_sound()
    run.assert_same_in_process(tmp_path / "in process")
    assert run.restarts(3) in ([("home.1", 1)], [])  # its last gradient of the step may have been lost with it
    # The datacenter dies as round 2 closes, so the stage of round 3 may be back before it.
    assert sorted(one.partition(":")[0] for one in run.happened(RESTARTED)) == ["dc", "exchange", "home.1"]
    assert any("killed by SIGKILL; restarting it (attempt 1 of 3" in one for one in run.happened(RESTARTED, "home.1"))
    assert run.happened(INCARNATION_OVER, "dc")
    assert run.happened(SUSPENDED)
    assert run.generations(3)["home"] > 3  # a new incarnation


def test_a_stage_killed_while_its_group_trains_ahead_has_lost_that(survive: Any) -> None:
    """No saved state has it, so the whole group starts the next round where the others do."""
    run = survive(
        "{kill: home.1, at: {round: 2, phase: training}}, {kill: home.1, at: {round: 4, phase: waiting}}",
        "outer.overlap=1",
        "states.every=100",
        "checkpoints.every=100",
    )
    run.assert_sound()
    assert run.happened(SUSPENDED)
    assert all(run.generations(round_).keys() == {"dc", "home"} for round_ in range(1, ROUNDS + 1))


def test_a_stage_that_is_frozen_continues_its_round_or_is_replaced_after_three_leases(survive: Any) -> None:
    lease = 'exchange.lease={"factor": 1, "least": "3 s", "most": "3 s"}'
    run = survive(
        "{freeze: home.1, lasts: 5 s, at: {round: 1}}, {freeze: home.1, lasts: 10 min, at: {round: 3}}", lease, rounds=4
    )
    run.assert_sound()
    assert run.generations(2) == {"dc": 1, "home": 3}
    assert len(run.happened(SILENT, "home.1")) == len(run.happened(RESTARTED, "home.1")) == 1
    assert len(run.happened(RESTARTED)) == 1
    assert run.generations(3)["home"] > 3


def test_a_killed_rank_has_its_replica_started_again(survive: Any, tmp_path: Path) -> None:
    config = tmp_path / "ranks.yaml"
    config.write_text(ON_RANKS)
    run = survive("{kill: zero, rank: 1, at: {round: 2}}", config=config, rounds=3)
    run.assert_sound()
    assert any("killed by SIGKILL" in one for one in run.happened(RESTARTED, "zero"))


def test_links_that_were_cut_are_there_again_and_other_bits_of_theta_are_healed(survive: Any) -> None:
    run = survive(
        "{cut: home.0-1, lasts: 2 s, at: {round: 1}}, {corrupt: home.1, at: {round: 2}}, "
        "{cut: dc-exchange, lasts: 2 s, at: {round: 3}}",
        rounds=5,  # it may be noticed once round 4 has begun, and is then mended before round 5
    )
    run.assert_sound()
    assert not run.happened(RESTARTED)
    (healed,) = run.happened(HEALED)
    assert re.fullmatch(r"home\.1: held a layers\.1\.\S+ that differs from the run log", healed)


def test_above_a_quorum_a_run_goes_on_without_who_has_used_up_its_restarts(survive: Any) -> None:
    run = survive("{kill: home.1, at: {round: 2}}", "restarts.count=0", "exchange.quorum=0.5", rounds=3)
    assert run.code == 0, run.errors
    assert [[*run.generations(n)] for n in (1, 2, 3)] == [["dc", "home"], ["dc"], ["dc"]]
