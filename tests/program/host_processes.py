"""The processes of a run over several hosts. Each has its own folder, and loopback addresses stand for the hosts."""

from __future__ import annotations

import json
import random
import socket
import subprocess
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from started import Started


def free_port() -> int:
    """Return a port on which nothing listens, below those that the system gives to connections of other tests."""
    for port in random.sample(range(20_000, 32_000), 100):
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise AssertionError("found no free port")


class HostProcesses:
    """One process for each host. The host `exchange` has the record of the run."""

    def __init__(self, folder: Path, run: str) -> None:
        self.folder, self.run, self.port = folder, run, free_port()
        self.processes: dict[str, Started] = {}

    def runs(self, host: str = "exchange") -> Path:
        return self.folder / host / "runs"

    def said(self, host: str) -> str:
        """Return what the host has printed so far."""
        path = self.processes[host].files[0]
        return path.read_text() if path.exists() else ""

    def wait(self, host: str, seconds: float = 240) -> tuple[int, str, str]:
        """Wait for a host's process. Return its exit code, stdout and stderr."""
        said, errors = self.processes[host].communicate(timeout=seconds)
        return self.processes[host].wait(seconds), said, errors

    def kill(self) -> None:
        """End all processes at once: at SIGTERM, members would save states that nobody needs."""
        for host, process in self.processes.items():
            process.kill()
            self.wait(host)

    def metrics(self, host: str = "exchange") -> str:
        """Return the metrics that a host of the exchange has so far."""
        path = self.runs(host) / self.run / "metrics.jsonl"
        return path.read_text() if path.exists() else ""

    def told(self, event: str, host: str = "exchange") -> list[dict[str, Any]]:
        """Return the metrics that contain this text."""
        return [json.loads(line) for line in self.metrics(host).split("\n")[:-1] if event in line]

    def summary(self, host: str = "exchange") -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.runs(host) / self.run / "summary.json").read_text())
        return found

    def wait_for(self, event: str) -> None:
        """Wait until the exchange has recorded this text in its metrics."""
        self.wait_until(lambda: event in self.metrics())

    def wait_until(self, is_so: Callable[[], bool]) -> None:
        """Wait until a condition holds. Fail if the exchange ends before."""
        while not is_so():
            with suppress(subprocess.TimeoutExpired):  # leaves the CPU to the processes that are waited for
                self.processes["exchange"].wait(0.1)
                pytest.fail(str(self.processes["exchange"].communicate()))
