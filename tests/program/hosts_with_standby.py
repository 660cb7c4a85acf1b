"""A run whose exchange two hosts may serve, over one store. Loopback addresses of this machine stand for the hosts."""

from __future__ import annotations

import signal
from pathlib import Path

import psutil
from host_processes import free_port
from hosts_of_parts import PARTS, Hosts
from started import Started, start_program

from hetero_pp.config.folder import RunFolder
from hetero_pp.config.yaml_file import ConfigFile
from replica_groups.exchange.log import ContributionLog, open_log

SERVE_AND_DIE = Path(__file__).parents[2] / "benchmarks" / "serve_and_die.py"
MEMBERS = PARTS[1:]


class HostsWithStandby(Hosts):
    """A run whose exchange is on the host `exchange`, and may move to the host `standby`."""

    def __init__(self, folder: Path, corpus: Path, rounds: int, store: str, takeover: str = "3 s") -> None:
        super().__init__(folder, corpus, rounds)
        self.ports = {"exchange": self.port, "standby": free_port()}
        hosts = ", ".join(f'"127.0.0.1:{port}"' for port in self.ports.values())
        self.text = self.text.replace("exchange: {", f"exchange: {{hosts: [{hosts}], takeover: {takeover}, ", 1)
        self.text += f"store: {{url: '{store}'}}\n"

    def start(self, part: str, *more: str) -> Started:
        if part not in MEMBERS:
            return self.serve(part, *more)
        own = self.folder / part
        own.mkdir(exist_ok=True)
        (own / "run.yaml").write_text(self.text)  # it says where the exchange is
        shared = ["--token-file", str(self.folder / "token"), "--runs", str(self.runs(part))]
        self.processes[part] = start_program("launch", str(own / "run.yaml"), "--only", part, *shared, *more)
        return self.processes[part]

    def serve(self, host: str, *more: str, dies: tuple[str, int, str] | None = None) -> Started:
        """Start a host of the exchange. `dies`: phase and round in which it dies, and by which signal."""
        own = self.folder / host
        own.mkdir(exist_ok=True)
        (own / "run.yaml").write_text(self.text)
        arguments = ["serve", str(own / "run.yaml"), "--runs", str(self.runs(host))]
        arguments += ["--token-file", str(self.folder / "token")]
        arguments += ["--set", f"exchange.listen=127.0.0.1:{self.ports[host]}", *more]
        arguments += ["--standby"] if host == "standby" and "--standby" not in more else []
        if dies is None:
            self.processes[host] = start_program(*arguments)
        else:
            self.processes[host] = Started(SERVE_AND_DIE, [*map(str, dies), *arguments])
        return self.processes[host]

    @property
    def log(self) -> ContributionLog:
        config = ConfigFile(self.folder / "standby" / "run.yaml").config
        return open_log(config, RunFolder(self.runs("standby") / "hosts"))

    def printed(self, host: str) -> str:
        """Return what a host has printed so far, on both streams."""
        return "".join(path.read_text() for path in self.processes[host].files if path.exists())

    def of_host(self, host: str) -> list[psutil.Process]:
        """Return the launcher of a host, and then all of its processes."""
        launcher = psutil.Process(self.processes[host].pid)
        own = str((self.runs(host) / "hosts").resolve())
        return [launcher, *(one for one in psutil.process_iter() if _writes_below(one, own))]

    def stop_host(self, host: str, by: signal.Signals) -> list[psutil.Process]:
        """Send a signal to the launcher of a host, and to all of its processes. Return them."""
        for one in (found := self.of_host(host)):
            one.send_signal(by)
        return found


def _writes_below(process: psutil.Process, folder: str) -> bool:
    try:
        return (Path("/proc") / str(process.pid) / "fd" / "2").resolve().is_relative_to(folder)
    except OSError:
        return False
