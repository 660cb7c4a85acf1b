"""Launches in the background of a test, and the processes of their members."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from preloading import forked_processes
from started import Started


class Background:
    """A launch and the folder of its run."""

    def __init__(self, process: Started | subprocess.Popen[str], folder: Path) -> None:
        self.process, self.folder = process, folder

    def rounds(self) -> int:
        """Return the number of closed rounds."""
        metrics = self.folder / "metrics.jsonl"
        return metrics.read_text(encoding="utf-8").count('"round_closed"') if metrics.exists() else 0

    def wait_until(self, is_so: Callable[[], object]) -> None:
        """Wait until a condition holds. Fail if the launch ends before."""
        deadline = time.monotonic() + 120
        while not is_so():
            assert time.monotonic() < deadline, "the run did not get that far"
            with suppress(subprocess.TimeoutExpired):  # leaves the CPU to the processes that are waited for
                self.process.wait(0.05)
                pytest.fail(str(self.process.communicate()))

    def writers(self, log: str = "*.log", of: Iterable[psutil.Process] | None = None) -> list[psutil.Process]:
        """Return the processes that write to logs of the run: of all that tests have forked, or of these."""
        logs = [path.resolve() for path in (self.folder / "logs").glob(log)]
        found = []
        for process in forked_processes() if of is None else of:
            with suppress(OSError, psutil.Error):  # it has ended
                if Path(f"/proc/{process.pid}/fd/2").resolve() in logs:
                    found.append(process)
        return found


def still_running(processes: Sequence[psutil.Process], seconds: float) -> list[psutil.Process]:
    """Return the processes that still run after so many seconds.

    One that only waits for its exit code to be read has ended.
    """
    deadline = time.monotonic() + seconds
    left = [process for process in processes if _runs(process)]
    while left and time.monotonic() < deadline:
        psutil.wait_procs(left, timeout=0.1)
        left = [process for process in left if _runs(process)]
    return left


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
