"""However a run ends, its processes end with it, and the cause is reported in one line."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest
from asking import sets
from background import Background, still_running
from listening import listening
from mixed_run import MIXED
from started import start_program

pytestmark = pytest.mark.starts_processes

SECONDS_TO_END = 90
BY_A_USER, FORKED = "as by a user", "forked"


class Launched(Background):
    """A run long enough never to end by itself. The death of any process ends it.

    It is started as by a user, or forked from the tests' fork server, which then forks the members, too.
    """

    def __init__(self, corpus: Path, runs: Path, forked: bool) -> None:
        settings = sets(f"data.corpus={corpus}", "outer.rounds=100000", "restarts.count=0", "exchange.quorum=1")
        self.command = ["launch", str(MIXED), "--runs", str(runs), *settings]
        super().__init__(start_program(*self.command) if forked else _start(self.command), runs / "mixed")
        self._is_forked = forked
        self.seen: list[psutil.Process] = []

    def wait_for_training(self) -> None:
        """Wait until a round is closed, so that every link is in use."""
        self.wait_until(self.rounds)
        self.seen = self.writers() if self._is_forked else psutil.Process(self.process.pid).children(recursive=True)
        assert len(self.seen) >= 5  # the exchange and four members

    def member(self, name: str) -> int:
        """Return the process that writes logs/<name>.log."""
        return self.writers(f"{name}.log", self.seen)[0].pid

    def assert_all_end(self) -> None:
        """Require that every process ends. On a busy machine, drawing the run's pictures takes several seconds."""
        deadline = time.monotonic() + SECONDS_TO_END
        self.process.wait(SECONDS_TO_END)
        assert not still_running(self.seen, max(0.0, deadline - time.monotonic()))


def _start(command: Sequence[str]) -> subprocess.Popen[str]:
    program, pipe = [sys.executable, "-m", "hetero_pp", *command], subprocess.PIPE
    return subprocess.Popen(program, stdout=pipe, stderr=pipe, text=True, preexec_fn=_hears_interrupts)


def _hears_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's background jobs, and their children, ignore it


@pytest.fixture
def launched(request: pytest.FixtureRequest, corpus: Path, tmp_path: Path) -> Iterator[Launched]:
    run = Launched(corpus, tmp_path, forked=request.param == FORKED)
    try:
        run.wait_for_training()
        yield run
    finally:
        for process in run.seen:
            if process.is_running():
                process.kill()
        run.process.kill()


@pytest.mark.parametrize(
    ("launched", "numbers"),
    [(BY_A_USER, [signal.SIGINT, signal.SIGINT]), (FORKED, [signal.SIGTERM])],
    indirect=["launched"],
)
def test_interrupt_ends_everything(launched: Launched, numbers: Sequence[signal.Signals]) -> None:
    """Members ignore SIGUSR1 and SIGHUP, which Slurm and terminals may send to every process of a step."""
    if signal.SIGTERM in numbers:
        for process in launched.seen:
            process.send_signal(signal.SIGUSR1)
            process.send_signal(signal.SIGHUP)
        closed = launched.rounds()
        launched.wait_until(lambda: launched.rounds() > closed + 1)  # a round that began after that
        assert still_running(launched.seen, 0) == launched.seen
    for number in numbers:
        launched.process.send_signal(number)
    launched.assert_all_end()
    said, errors = launched.process.communicate()
    assert launched.process.returncode == 130
    assert shlex.join(launched.command) in said.splitlines()[-1]
    told = [line for line in errors.strip().splitlines() if "to save the state after" not in line]  # on a slow disk
    assert told == ["hetero-pp: interrupted; all processes of this command have ended"]


@pytest.mark.parametrize("launched", [FORKED], indirect=True)
def test_a_killed_stage_is_named(launched: Launched) -> None:
    psutil.Process(launched.member("home.1")).kill()
    launched.assert_all_end()
    errors = launched.process.communicate()[1]
    assert launched.process.returncode == 1
    assert errors.strip().splitlines() == ["hetero-pp: home.1 was killed by SIGKILL"]
    summary = json.loads((launched.folder / "summary.json").read_text())
    assert "home.1 was killed by SIGKILL" in summary["failed"]
    assert summary["rounds"] >= 1


@pytest.mark.parametrize("launched", [BY_A_USER], indirect=True)
def test_a_killed_launcher_leaves_no_orphan(launched: Launched) -> None:
    """Before that, no process listens beyond this machine."""
    found = listening([psutil.Process(launched.process.pid), *launched.seen])
    assert launched.member("exchange") in found
    assert {host for listens in found.values() for host, _ in listens} == {"127.0.0.1"}
    launched.process.kill()
    launched.assert_all_end()
