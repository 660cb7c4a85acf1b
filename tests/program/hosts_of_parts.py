"""A run over several hosts, each with its copy of the YAML. Loopback addresses of this machine stand for the hosts."""

from __future__ import annotations

from pathlib import Path

from host_processes import HostProcesses
from started import Started, start_program

from hetero_pp.config.folder import RunFolder
from hetero_pp.config.yaml_file import ConfigFile
from replica_groups.exchange.log import open_log

CONFIG = """
name: hosts
model: {preset: micro, width: 32, heads: 2, feed_forward: 64, layers: 2}
data: {corpus: CORPUS, sequence_length: 32, validation_share: 0.2, validation_sequences: 8}
inner: {steps: 2, learning_rate: 1e-2, warmup_steps: 2}
outer: {rounds: ROUNDS, compression: {density: 1/32}}
checkpoints: {every: 1}
exchange: {listen: "127.0.0.1:PORT", grace: {least: 5 min, most: 5 min}, lease: {least: 1 min}}
links:
  dsl: {bandwidth: 100 Mbit/s, latency: 5 ms}
  fibre: {bandwidth: 1 Gbit/s, latency: 1 ms}
replicas:
  - {name: dc, kind: datacenter, batch_size: 4, uplink: fibre}
  - name: home
    kind: participants
    stages: [{layers: 1, listen: "127.0.0.2:0"}, {layers: 1, listen: "127.0.0.3:0"}]
    batch_size: 4
    micro_batches: 2
    link: dsl
    uplink: dsl
    boundary: {rank: 1/4}
"""
PARTS = ("exchange", "dc", "home.0", "home.1")


class Hosts(HostProcesses):
    """A run with one copy of the YAML per host."""

    def __init__(self, folder: Path, corpus: Path, rounds: int) -> None:
        super().__init__(folder, "hosts")
        text = CONFIG.replace("ROUNDS", str(rounds)).replace("PORT", str(self.port))
        self.text = text.replace("CORPUS", str(corpus))
        (folder / "token").write_text("a-secret-of-this-test-of-two-hosts\n")

    def start(self, part: str, *more: str) -> Started:
        own = self.folder / part
        own.mkdir(exist_ok=True)
        (own / "run.yaml").write_text(self.text)
        reach = [] if part == "exchange" else ["--exchange", f"127.0.0.1:{self.port}"]
        shared = ["--token-file", str(self.folder / "token"), "--runs", str(self.runs(part))]
        self.processes[part] = start_program("launch", str(own / "run.yaml"), "--only", part, *reach, *shared, *more)
        return self.processes[part]

    def said(self, part: str) -> str:
        """Return the whole stdout of a host's process, once it has ended."""
        return self.wait(part)[1]

    def ended(self, part: str) -> tuple[int, str]:
        """Wait for a host's process. Return its exit code and stderr."""
        return self.wait(part)[::2]

    def rounds_closed(self) -> int:
        return len(self.told('"round_closed"'))

    def rounds_recorded(self) -> int:
        """Return the number of the last record in the log."""
        config = ConfigFile(self.folder / "exchange" / "run.yaml").config
        return open_log(config, RunFolder(self.runs() / "hosts")).last_record()

    def wait_for_round(self, round_: int) -> None:
        self.wait_for(f'"evaluation", "replica": "home", "round": {round_}')

    def wait_for_contribution(self, round_: int, replica: str) -> None:
        """Wait until a round has closed that includes a replica."""

        def contributed() -> set[tuple[int, str]]:
            closed = self.told('"round_closed"')
            return {(one["round"], sent["replica"]) for one in closed for sent in one.get("contributions", ())}

        self.wait_until(lambda: (round_, replica) in contributed())
