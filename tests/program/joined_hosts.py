"""A run whose hosts join by tickets: each host has its own folder, and no host has the YAML."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
from host_processes import HostProcesses
from started import start_program
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


class Run(HostProcesses):
    """A run whose first host serves it. No other host has the YAML."""

    def __init__(
        self, folder: Path, corpus: Path, rounds: int, lease: str = "1 min", groups: str = "name: home"
    ) -> None:
        super().__init__(folder, "homes")
        self.corpus, self.address = corpus, f"localhost:{self.port}"
        text = CONFIG.replace("ROUNDS", str(rounds)).replace("PORT", str(self.port)).replace("LEASE", lease)
        text = text.replace("name: home,", f"{groups},")
        (folder / "run.yaml").write_text(text.replace("CORPUS", str(corpus)))

    def serve(self, *more: str, waits: bool = True) -> None:
        """Start the exchange.

        With `waits`, return once it waits for members, which it never does if all are present.
        """
        self.processes["exchange"] = start_program(
            "serve", str(self.folder / "run.yaml"), "--runs", str(self.runs()), *more
        )
        if waits:
            self.wait_for('"event": "waiting"')

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

    def wait_for_round(self, replica: str, round_: int) -> None:
        """Wait until a replica has evaluated this round or a later one."""
        self.wait_until(lambda: max(self.evaluated(replica), default=-1) >= round_)

    def evaluated(self, replica: str) -> list[int]:
        """Return the rounds that a replica has evaluated."""
        pattern = rf'"event": "evaluation", "replica": "{replica}", "round": (\d+)'
        return [int(round_) for round_ in re.findall(pattern, self.metrics())]

    def data(self, corpus: Path) -> DataSettings:
        """Return the run's data settings with another corpus."""
        return ConfigFile(self.folder / "run.yaml").config.data.model_copy(update={"corpus": str(corpus)})

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
        run.kill()


def written(process: psutil.Process) -> str:
    """Return the file to which a process writes its errors."""
    return str((Path("/proc") / str(process.pid) / "fd" / "2").resolve())
