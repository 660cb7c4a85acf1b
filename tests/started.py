"""Real processes for tests, forked from a server that has already imported PyTorch.

This saves the seconds of CPU that each `python -m hetero_pp` or `python rank.py` takes to import. A launch forks its
members from the same kind of server. A forked process shares nothing with the test's process but arguments and
environment.
"""

from __future__ import annotations

import multiprocessing.forkserver
import os
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path

from preloading import INTERFACE
from rendering import DRAWS, draw_placeholder
from torch.distributed import TCPStore

from hetero_pp.program.launch.fork_server import UNHEARD, fork_server
from hetero_pp.program.report import recorder

TIMEOUT = 240.0
"""Seconds in which a program of a test ends, even on a busy machine."""


class Started:
    """A Python program in a separate process, with the interface of subprocess.Popen."""

    def __init__(
        self, what: str | Path, arguments: Sequence[str], environment: Mapping[str, str] | None = None
    ) -> None:
        """`what` is a module, as for `python -m`, or the path of a script."""
        context = fork_server()
        said = Path(tempfile.mkdtemp(prefix="said-"))
        weakref.finalize(self, shutil.rmtree, said, ignore_errors=True)
        self.files = [said / name for name in ("stdout", "stderr")]
        settings = dict(os.environ) | dict(environment or {})
        settings.pop(INTERFACE, None)  # a launch's ranks do not inherit this process's environment
        told = (what, list(arguments), settings, Path.cwd(), self.files)
        self._process = context.Process(target=_main, args=told)
        self._process.start()
        assert self._process.pid is not None
        self.pid, self.sentinel = self._process.pid, self._process.sentinel

    @property
    def returncode(self) -> int | None:
        """Exit code; None until the process is known to have ended."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """Return the exit code, or None while the process runs."""
        return self._process.exitcode

    def wait(self, timeout: float) -> int:
        """Return the exit code once the process has ended. Raises subprocess.TimeoutExpired."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout)
        return self._process.exitcode

    def communicate(self, timeout: float = TIMEOUT) -> tuple[str, str]:
        """Return all output to stdout and to stderr. Raises subprocess.TimeoutExpired."""
        self.wait(timeout)
        stdout, stderr = (path.read_text() if path.exists() else "" for path in self.files)
        return stdout, stderr

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal if the process still runs."""
        if self.poll() is None:
            with suppress(ProcessLookupError):  # it has ended since, and was reaped elsewhere
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


def start_program(*arguments: str) -> Started:
    """Start `python -m hetero_pp` with these arguments."""
    return Started("hetero_pp", arguments)


def run_program(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `python -m hetero_pp` with these arguments to its end."""
    return _run("hetero_pp", arguments)


def run_script(script: Path, *arguments: str, timeout: float = TIMEOUT) -> subprocess.CompletedProcess[str]:
    """Run `python SCRIPT` with these arguments to its end."""
    return _run(script, arguments, timeout)


def _run(what: str | Path, arguments: Sequence[str], timeout: float = TIMEOUT) -> subprocess.CompletedProcess[str]:
    program = Started(what, arguments)
    try:
        stdout, stderr = program.communicate(timeout)
        return subprocess.CompletedProcess(arguments, program.wait(0), stdout, stderr)
    finally:
        program.kill()


def run_on_ranks(world: int, what: str | Path, *arguments: str, timeout: float = 280) -> list[str]:
    """Run a module or a script on `world` local ranks, which find each other as with torchrun. One runs alone.

    Return what each rank printed to stdout.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    alike = {
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    own = [alike | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world)] if world > 1 else [{}]
    ranks = [Started(what, arguments, environment) for environment in own]
    try:
        left, deadline = list(ranks), time.monotonic() + timeout
        while left:
            ended = wait([rank.sentinel for rank in left], max(0.0, deadline - time.monotonic()))
            assert ended, f"{len(left)} of {world} ranks did not end"
            for rank in [rank for rank in left if rank.sentinel in ended]:
                left.remove(rank)
                assert rank.wait(timeout) == 0, rank.communicate()[1]
        return [rank.communicate()[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()


def _main(
    what: str | Path, arguments: list[str], environment: dict[str, str], cwd: Path, files: Sequence[Path]
) -> None:
    """Set up a started process and run the program."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore it
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # `nohup make test` ignores it
    signal.pthread_sigmask(signal.SIG_UNBLOCK, UNHEARD)  # a launch in the test's process may start the server
    os.chdir(cwd)
    for path, descriptor in zip(files, (1, 2), strict=True):
        opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(opened, descriptor)
        os.close(opened)
    server = multiprocessing.forkserver._forkserver  # a forked process knows the server, but would start another one
    server.ensure_running = lambda: None  # type: ignore[method-assign]
    os.environ.clear()
    os.environ.update(environment)
    for name in DRAWS:
        setattr(recorder, name, draw_placeholder)
    try:
        if isinstance(what, Path):
            sys.path.insert(0, str(what.parent))
            sys.argv = [str(what), *arguments]
            runpy.run_path(str(what), run_name="__main__")
        else:
            sys.argv = [what, *arguments]
            runpy.run_module(what, run_name="__main__", alter_sys=True)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
