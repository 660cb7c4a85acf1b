"""Ctrl-C, SIGTERM, SIGHUP and SIGUSR1 end a command in one line and with exit code 130, even during its imports."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from made_up_run import made_up_spec

from hetero_pp.config.folder import RunFolder
from hetero_pp.config.lines import EXCHANGE, LAUNCHER
from hetero_pp.program import interrupts
from hetero_pp.program.interrupts import interruptible
from hetero_pp.program.launch import supervisor
from hetero_pp.program.launch.fork_server import unheard
from hetero_pp.rpc.identities import Secret, SecretKeys

TIMEOUT = 120.0
INTERRUPTED_BY_AN_IMPORT = """
import os, sys
from hetero_pp.__main__ import main

module, number, *sys.argv[1:] = sys.argv[1:]

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == module:
            os.kill(os.getpid(), int(number))

sys.meta_path.insert(0, Finder())
main()
"""
"""A program that gets a signal in the middle of its imports. Its arguments are a module, a number and a command."""


def _hears_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's background jobs, and their children, ignore it


def _started(command: Sequence[str]) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, stdout=pipe, stderr=pipe, text=True, start_new_session=True, preexec_fn=_hears_interrupts
    )


@pytest.mark.starts_processes
@pytest.mark.parametrize(
    ("module", "number", "command"),
    [
        ("pydantic", signal.SIGUSR1, "check"),
        ("torch._C", signal.SIGINT, "launch"),
    ],
)
def test_a_signal_while_a_command_is_imported(module: str, number: signal.Signals, command: str) -> None:
    arguments = ["no.yaml"] if command == "launch" else []
    program = [sys.executable, "-c", INTERRUPTED_BY_AN_IMPORT, module, str(int(number)), command, *arguments]
    out, errors = (process := _started(program)).communicate(timeout=TIMEOUT)
    assert (process.returncode, out, errors) == (130, "", "hetero-pp: interrupted\n")


def _imports_torch(process: psutil.Process) -> bool:
    """Return whether a process is the fork server and has begun to import Torch."""
    if "forkserver" not in " ".join(process.cmdline()):
        return False
    return "libtorch" in (Path("/proc") / str(process.pid) / "maps").read_text()


@pytest.mark.starts_processes
def test_ctrl_c_while_the_fork_server_imports(corpus: Path, tmp_path: Path) -> None:
    """A terminal sends Ctrl-C to the fork server too, which imports while the launcher does and ends with it."""
    yaml = Path(__file__).parents[1] / "equivalence" / "mixed.yaml"
    settings = ["--set", f"data.corpus={corpus}", "--set", "outer.rounds=100000", "--runs", str(tmp_path)]
    process = _started([sys.executable, "-m", "hetero_pp", "launch", str(yaml), *settings])
    try:
        started = psutil.Process(process.pid)
        while not (servers := [one for one in started.children() if _imports_torch(one)]):
            assert process.poll() is None
        os.killpg(process.pid, signal.SIGINT)
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=TIMEOUT)
    finally:
        process.kill()
    assert (process.returncode, errors.count("\n")) == (130, 1)
    assert errors.startswith("hetero-pp: interrupted")  # how it goes on depends on how far the launcher was
    assert psutil.wait_procs(servers, TIMEOUT)[1] == []


def test_a_second_interrupt_leaves_the_end_alone_unless_it_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(interrupts.time, "monotonic", lambda: now[0])
    before = signal.getsignal(signal.SIGUSR1)
    with pytest.raises(KeyboardInterrupt), interruptible():
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGTERM)
        now[0] = 6.0
        signal.raise_signal(signal.SIGUSR1)
    assert signal.getsignal(signal.SIGUSR1) is before


class _Interrupted:
    """Is interrupted in its destructor, where Python drops exceptions."""

    def __del__(self) -> None:
        signal.raise_signal(signal.SIGUSR1)


def test_an_interrupt_that_python_drops_is_repeated() -> None:
    repeated = threading.Event()
    with pytest.raises(KeyboardInterrupt), interruptible():
        one = _Interrupted()
        del one
        repeated.wait(TIMEOUT)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_what_is_ignored_stays_so(number: signal.Signals) -> None:
    """A shell's background jobs ignore Ctrl-C, and `nohup` the end of a terminal. Otherwise both interrupt."""
    before = signal.signal(number, signal.SIG_IGN)
    try:
        with interruptible():
            signal.raise_signal(number)
        signal.signal(number, signal.SIG_DFL)
        with pytest.raises(KeyboardInterrupt), interruptible():
            signal.raise_signal(number)
    finally:
        signal.signal(number, before)


@pytest.mark.starts_processes
def test_a_process_whose_start_is_interrupted_ends_with_the_supervisor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal that arrives while a process starts takes effect as soon as it has started."""

    @contextmanager
    def interrupted() -> Iterator[None]:
        with unheard():
            yield
        raise KeyboardInterrupt

    monkeypatch.setattr(supervisor, "unheard", interrupted)
    before, keys = set(multiprocessing.active_children()), SecretKeys(Secret("0" * 32), encrypted=False)
    with (
        pytest.raises(KeyboardInterrupt),
        supervisor.Supervisor(made_up_spec(), RunFolder(tmp_path), lambda _: None, LAUNCHER, keys) as started,
    ):
        started.start([EXCHANGE])
    assert set(multiprocessing.active_children()) == before
