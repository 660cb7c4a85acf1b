"""However a run ends, its processes end with it, and the cause is reported in one line."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from ended import still_running
from listening import listening

pytestmark = pytest.mark.starts_processes

YAML = Path(__file__).parents[1] / "equivalence" / "mixed.yaml"
MEMBERS = {"exchange", "dc", "home.0", "home.1", "home.2"}
SECONDS_TO_END = 90


class Launched:
    """A run started as by a user, long enough never to end by itself. The death of any process ends it."""

    def __init__(self, corpus: Path, runs: Path) -> None:
        command = [sys.executable, "-m", "hetero_pp", "launch", str(YAML), "--runs", str(runs)]
        settings = [f"data.corpus={corpus}", "outer.rounds=100000", "restarts.count=0", "exchange.quorum=1"]
        command += [part for setting in settings for part in ("--set", setting)]
        self.command = command
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=_hears_interrupts
        )
        self.metrics = runs / "mixed" / "metrics.jsonl"
        self.seen: list[psutil.Process] = []

    def wait_for_training(self) -> None:
        """Wait until a round is closed, so that every link is in use."""
        for _ in _until(time.monotonic() + 120):
            with suppress(subprocess.TimeoutExpired):  # leaves the CPU to the processes that are waited for
                self.process.wait(0.05)
                pytest.fail(str(self.process.communicate()))
            if self.metrics.exists() and '"round_closed"' in self.metrics.read_text():
                break
        self.seen = psutil.Process(self.process.pid).children(recursive=True)
        assert len(self.seen) >= len(MEMBERS)

    def wait_for_another_round(self) -> None:
        """Wait until a round is closed that began after this call."""
        closed = self.metrics.read_text().count('"round_closed"')
        for _ in _until(time.monotonic() + 120):
            assert self.process.poll() is None
            if self.metrics.read_text().count('"round_closed"') > closed + 1:
                return

    def member(self, name: str) -> int:
        """Return the process that writes logs/<name>.log."""
        log = self.metrics.parent / "logs" / f"{name}.log"
        return next(p.pid for p in self.seen if _writes(p, log))

    def assert_all_end(self) -> None:
        """Require that every process ends. On a busy machine, drawing the run's pictures takes several seconds."""
        deadline = time.monotonic() + SECONDS_TO_END
        self.process.wait(SECONDS_TO_END)
        assert not still_running(self.seen, max(0.0, deadline - time.monotonic()))


def _until(deadline: float) -> Iterator[None]:
    while time.monotonic() < deadline:
        yield
    pytest.fail("the run did not get that far")


def _writes(process: psutil.Process, log: Path) -> bool:
    return (Path("/proc") / str(process.pid) / "fd" / "2").resolve() == log.resolve()


def _hears_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's background jobs, and their children, ignore it


@pytest.fixture
def launched(corpus: Path, tmp_path: Path) -> Iterator[Launched]:
    run = Launched(corpus, tmp_path)
    try:
        run.wait_for_training()
        yield run
    finally:
        for process in [*run.seen, psutil.Process(run.process.pid)] if run.process.poll() is None else run.seen:
            if process.is_running():
                process.kill()


@pytest.mark.parametrize("numbers", [[signal.SIGINT, signal.SIGINT], [signal.SIGTERM], [signal.SIGUSR1]])
def test_interrupt_ends_everything(launched: Launched, numbers: Sequence[signal.Signals]) -> None:
    if signal.SIGUSR1 in numbers:  # Slurm may send it to every process of a step
        for process in launched.seen:
            process.send_signal(signal.SIGUSR1)
        launched.wait_for_another_round()
        assert still_running(launched.seen, 0) == launched.seen
    for number in numbers:
        launched.process.send_signal(number)
    launched.assert_all_end()
    said, errors = launched.process.communicate()
    assert launched.process.returncode == 130
    assert shlex.join(launched.command[3:]) in said.splitlines()[-1]
    assert errors.strip().splitlines() == ["hetero-pp: interrupted; all processes of the run have ended"]


def test_a_killed_stage_is_named(launched: Launched) -> None:
    psutil.Process(launched.member("home.1")).kill()
    launched.assert_all_end()
    errors = launched.process.communicate()[1]
    assert launched.process.returncode == 1
    assert errors.strip().splitlines() == ["hetero-pp: home.1 was killed by SIGKILL"]
    summary = json.loads((launched.metrics.parent / "summary.json").read_text())
    assert "home.1 was killed by SIGKILL" in summary["failed"]
    assert summary["rounds"] >= 1


def test_a_killed_launcher_leaves_no_orphan(launched: Launched) -> None:
    """Before that, no process listens beyond this machine."""
    found = listening([psutil.Process(launched.process.pid), *launched.seen])
    assert launched.member("exchange") in found
    assert {host for listens in found.values() for host, _ in listens} == {"127.0.0.1"}
    launched.process.kill()
    launched.assert_all_end()
