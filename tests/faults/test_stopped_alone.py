"""A member that is stopped after its exchange has died ends by itself, with its state saved."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import CodeType, FrameType

import pytest

from hetero_pp.config.lines import EXCHANGE, LAUNCHER
from hetero_pp.config.yaml_file import ConfigFile
from hetero_pp.program.launch.command import begin_folder
from hetero_pp.program.launch.inputs import prepare
from hetero_pp.program.launch.supervisor import Supervisor
from hetero_pp.rpc.identities import Secret, SecretKeys
from hetero_pp.store.faults import FaultPhase, Faults
from replica_groups.member.reporter import Reporter

pytestmark = pytest.mark.starts_processes

CONFIG = """
name: alone
model: {preset: micro, width: 32, heads: 2, feed_forward: 64, layers: 2}
data: {corpus: CORPUS, sequence_length: 32, validation_share: 0.2, validation_sequences: 8}
inner: {steps: 2, learning_rate: 1e-2, warmup_steps: 2}
outer: {rounds: 100, compression: {density: 1/32}}
states: {every: 1}
replicas:
  - {name: dc, kind: datacenter, batch_size: 4}
"""
LAST = 2
"""Round after which the exchange dies."""
SECONDS_BETWEEN_LOOKS = 0.01


@dataclass(frozen=True)
class ExchangeDies(Faults):
    """Kills the exchange after a round, and creates a file once the member waits for another exchange."""

    exchange: int
    """Process id of the exchange."""
    waits: Path

    def reached(self, phase: FaultPhase, round_: int) -> None:
        if (phase, round_) == (FaultPhase.EVALUATING, LAST):
            os.kill(self.exchange, signal.SIGKILL)
            threading.Thread(target=self._tell, daemon=True).start()

    def _tell(self) -> None:
        main = threading.main_thread().ident
        assert main is not None
        while not _runs(Reporter.flush.__code__, sys._current_frames()[main]):
            threading.Event().wait(SECONDS_BETWEEN_LOOKS)
        self.waits.touch()


def _runs(code: CodeType, frame: FrameType | None) -> bool:
    """Return whether a thread with this frame runs a function."""
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame is not None


class FaultySupervisor(Supervisor):
    """A supervisor of a member whose exchange dies."""

    waits: Path

    def faults_of(self, member: str) -> Callable[[], Faults]:
        exchange = self._processes[EXCHANGE].pid if member != EXCHANGE else None
        return Faults if exchange is None else partial(ExchangeDies, exchange, self.waits)


def test_a_member_that_is_stopped_after_its_exchange_has_died_ends_by_itself(corpus: Path, tmp_path: Path) -> None:
    """The launcher would kill it after a minute. The reports of the last round are lost with the exchange."""
    path = tmp_path / "alone.yaml"
    path.write_text(CONFIG.replace("CORPUS", str(corpus)))
    spec = prepare(ConfigFile(path), tmp_path / "runs").spec
    folder = begin_folder(spec, tmp_path / "runs")
    keys = SecretKeys(Secret("a secret"), encrypted=False)
    supervisor = FaultySupervisor(spec, folder, lambda _: None, LAUNCHER, keys)
    supervisor.waits = tmp_path / "waits"
    with pytest.raises(KeyboardInterrupt), supervisor:
        supervisor.start([EXCHANGE])
        address = supervisor.open_exchange()
        supervisor.start(["dc"])
        supervisor.join_exchange(["dc"], address)
        while not supervisor.waits.exists():
            assert supervisor._processes["dc"].is_alive()
            supervisor._processes["dc"].join(SECONDS_BETWEEN_LOOKS)
        raise KeyboardInterrupt
    assert supervisor._processes["dc"].exitcode == -signal.SIGTERM
    saved = {int(state.name[-6:]) for state in folder.state("dc").glob("round-*")}
    assert max(saved) == LAST
