"""A run whose hosts join by tickets: each host has its own folder, and no host has the YAML."""

from __future__ import annotations

import json
import re
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from started import Started, start_program
from typer.testing import CliRunner, Result

from hetero_pp.config.yaml_file import ConfigFile
from hetero_pp.data.settings import DataSettings
from hetero_pp.program.cli import app

CONFIG = """
name: homes
model: {preset: micro, width: 32, heads: 2, feed_forward: 64, layers: 2}
data: {corpus: CORPUS, sequence_length: 32, validation_share: 0.2, validation_sequences: 8}
inner: {steps: 2, learning_rate: 1e-2, warmup_steps: 2}
outer: {rounds: ROUNDS, compression: {density: 1/32}}
exchange: {listen: "127.0.0.1:PORT", grace: {least: 5 min, most: 5 min}, lease: {least: LEASE}}
links: {far: {latency: 50 ms}}
replicas:
  - {name: dc, kind: datacenter, batch_size: 4, uplink: far}
  - {name: home, kind: participants, stages: 2, batch_size: 4, micro_batches: 2, boundary: {rank: 8}, link: far,
     uplink: far}
"""
"""A run that needs no whole core, because its messages take a while: a test may do something else meanwhile."""
SLOTS = ("dc", "home.0", "home.1")


class Run:
    """A run with one folder and one process per host. The first host serves the run."""

    def __init__(
        self, folder: Path, corpus: Path, rounds: int, lease: str = "1 min", groups: str = "name: home"
    ) -> None:
        self.folder, self.corpus = folder, corpus
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = str(free.getsockname()[1])
        self.address = f"localhost:{port}"
        text = CONFIG.replace("ROUNDS", str(rounds)).replace("PORT", port).replace("LEASE", lease)
        text = text.replace("name: home,", f"{groups},")
        (folder / "run.yaml").write_text(text.replace("CORPUS", str(corpus)))
        self.processes: dict[str, Started] = {}

    def serve(self, *more: str, waits: bool = True) -> None:
        """Start the exchange.

        With `waits`, return once it waits for members, which it never does if all are present.
        """
        self.processes["exchange"] = start_program(
            "serve", str(self.folder / "run.yaml"), "--runs", str(self.runs("exchange")), *more
        )
        if waits:
            self.wait_for('"event": "waiting"')

    def runs(self, host: str) -> Path:
        return self.folder / host / "runs"

    def ask(self, command: str, *more: str, host: str = "exchange") -> Result:
        """Run a command of a host that starts no process, in this process."""
        return CliRunner().invoke(app, [command, "homes", *more, "--runs", str(self.runs(host))])

    def invite(self, *more: str) -> str:
        done = self.ask("invite", *more)
        assert done.exit_code == 0, done.stderr
        named = more[more.index("--slot") + 1] if "--slot" in more else "a stage of group"
        assert re.search(rf"^homes: this ticket is for .*{re.escape(named)}", done.stderr)
        return done.stdout.strip()

    def join(self, host: str, ticket: str, data: Path | None = None) -> None:
        own = ["--data", str(data or self.corpus)]
        self.processes[host] = start_program("join", ticket, *own, "--runs", str(self.runs(host)))

    def said(self, host: str) -> str:
        """Return what the host has printed so far."""
        path = self.processes[host].files[0]
        return path.read_text() if path.exists() else ""

    def wait(self, host: str, seconds: float = 150) -> tuple[int, str, str]:
        """Wait for a host's process. Return its exit code, stdout and stderr."""
        said, errors = self.processes[host].communicate(timeout=seconds)
        return self.processes[host].wait(seconds), said, errors

    def wait_for(self, event: str) -> None:
        """Wait until the exchange has recorded this text in its metrics."""
        self.wait_until(lambda: event in self.metrics())

    def wait_for_round(self, replica: str, round_: int) -> None:
        """Wait until a replica has evaluated this round or a later one."""
        self.wait_until(lambda: max(self.evaluated(replica), default=-1) >= round_)

    def evaluated(self, replica: str) -> list[int]:
        """Return the rounds that a replica has evaluated."""
        pattern = rf'"event": "evaluation", "replica": "{replica}", "round": (\d+)'
        return [int(round_) for round_ in re.findall(pattern, self.metrics())]

    def wait_until(self, is_so: Callable[[], bool]) -> None:
        """Wait until a condition holds. Fail if the exchange ends before."""
        while not is_so():
            with suppress(subprocess.TimeoutExpired):
                self.processes["exchange"].wait(0.1)
                pytest.fail(str(self.processes["exchange"].communicate()))

    def metrics(self) -> str:
        """Return the metrics of the exchange so far."""
        path = self.runs("exchange") / "homes" / "metrics.jsonl"
        return path.read_text() if path.exists() else ""

    def data(self, corpus: Path) -> DataSettings:
        """Return the run's data settings with another corpus."""
        return ConfigFile(self.folder / "run.yaml").config.data.model_copy(update={"corpus": str(corpus)})

    def summary(self, host: str = "exchange") -> dict:
        return json.loads((self.runs(host) / "homes" / "summary.json").read_text())

    def status(self) -> dict[str, Any]:
        """Return what `status` writes as JSON."""
        path = self.folder / "status.json"
        assert self.ask("status", "--json", str(path)).exit_code == 0
        found: dict[str, Any] = json.loads(path.read_text())
        return found

    def held(self) -> dict[str, bool]:
        """Return the slots -> whether a host holds them."""
        return {name: slot["held"] for name, slot in self.status()["slots"].items()}


def ending() -> Iterator[list[Run]]:
    """Yield a list for the runs of a test, and end their processes afterwards."""
    made: list[Run] = []
    yield made
    for run in made:
        for host, process in run.processes.items():
            process.kill()  # at SIGTERM, members would save states that nobody needs
            run.wait(host)


def written(process: psutil.Process) -> str:
    """Return the file to which a process writes its errors."""
    return str((Path("/proc") / str(process.pid) / "fd" / "2").resolve())
