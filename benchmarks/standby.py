"""Measure how long a run stands still after the host of its exchange was killed, if another host waits to take over.

    python benchmarks/standby.py [--kills 20] [--rounds 1000] [--store folder s3] [--takeover 10] [--json FILE]

A datacenter replica and a group of two stages train one run. Two hosts share its store: a folder, or SeaweedFS. The one
that serves, with all its processes, gets SIGKILL in one phase of a round after the other. Then it starts again as the
standby, and the next kill follows once it waits. Seconds count from the kill to the next record in the store. After
the last kill, its hash must be that of a run in one process.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from command_line import origin, parse, parser_of, save
from fault_injection.dying_host import PHASES
from object_service import KEY, SECRET, free_ports, object_service

from hetero_pp.store.folder import FolderStore
from hetero_pp.store.opening import open_store
from replica_groups.exchange.audits import audit_key, read_audit
from replica_groups.exchange.log import ContributionLog

SERVE_AND_DIE = Path(__file__).with_name("serve_and_die.py")
SMOKE = {"kills": 1, "rounds": 100, "store": ["folder"], "takeover": 3.0}
SECONDS_BETWEEN_LOOKS = 0.05
MOST_SECONDS = 600.0
MEMBERS = ("dc", "home.0", "home.1")
RUN = "standby"
YAML = """\
name: standby
seed: 1
model: {preset: micro, width: 32, heads: 2, feed_forward: 64, layers: 2}
data: {corpus: docstrings, sequence_length: 32, validation_sequences: 4, repeat: true}
inner: {steps: 2, learning_rate: 6e-3}
outer: {rounds: ROUNDS}
checkpoints: {every: 1}
exchange: {hosts: ["127.0.0.1:FIRST", "127.0.0.1:SECOND"], takeover: TAKEOVER s, quorum: 1}
store: {url: "STORE"}
links: {far: {latency: 100 ms}}
replicas:
  - {name: dc, kind: datacenter, batch_size: 4, uplink: far}
  - {name: home, kind: participants, stages: 2, batch_size: 4, micro_batches: 2, boundary: {rank: 1/4}, link: far,
     uplink: far}
"""


class StandbyRun:
    """One run on processes of its own: its members, and two hosts of its exchange."""

    def __init__(self, folder: Path, url: str, arguments: argparse.Namespace) -> None:
        folder.mkdir()
        self.folder, self.ports = folder, free_ports(2)
        text = YAML.replace("STORE", url).replace("TAKEOVER", f"{arguments.takeover:g}")
        text = text.replace("FIRST", str(self.ports[0])).replace("SECOND", str(self.ports[1]))
        (folder / "run.yaml").write_text(text.replace("ROUNDS", str(arguments.rounds)))
        (folder / "token").write_text("the token of a benchmark of two hosts\n")
        self.log, self._processes = ContributionLog(open_store(url, name=RUN)), dict[str, subprocess.Popen[bytes]]()

    def own(self, host: int) -> Path:
        """Return the run's folder of a host of the exchange."""
        return self.folder / str(host) / RUN

    def serve(self, host: int, phase: str, standby: bool) -> None:
        """Start a host of the exchange, which may die in this phase later."""
        for name in ("died", "may-die"):
            (self.own(host) / name).unlink(missing_ok=True)
        listen = ["--set", f"exchange.listen=127.0.0.1:{self.ports[host]}"]
        program = [str(SERVE_AND_DIE), phase, "0", "KILL", "serve"]
        self._start(f"host-{host}", program, str(host), *listen, *(["--standby"] if standby else []))

    def start_members(self) -> None:
        for member in MEMBERS:
            self._start(member, ["-P", "-m", "hetero_pp", "launch"], "members", "--only", member)

    def _start(self, name: str, program: Sequence[str], runs: str, *more: str) -> None:
        own = [str(self.folder / "run.yaml"), "--token-file", str(self.folder / "token")]
        command = [sys.executable, *program, *own, "--runs", str(self.folder / runs), *more]
        with self.output(name).open("wb") as file:
            self._processes[name] = subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True)

    def output(self, name: str) -> Path:
        return self.folder / f"{name}.txt"

    def wait_for(self, is_so: Callable[[], bool], *needed: str) -> None:
        """Wait until a condition holds. Exits with the output of a needed process that ends before."""
        until = time.monotonic() + MOST_SECONDS
        while not is_so():
            for name in (one for one in needed if one in self._processes):
                if self._processes[name].poll() is not None or time.monotonic() > until:
                    raise SystemExit(f"{name}: {self.output(name).read_text()[-3000:]}")
            time.sleep(SECONDS_BETWEEN_LOOKS)

    def wait_until_standby(self, name: str) -> None:
        """Wait until a host waits for the other one to stop."""
        self.wait_for(lambda: "takes over if it stops" in self.output(name).read_text(), name, *MEMBERS)

    def kill_active(self, active: int, phase: str) -> dict[str, Any]:
        """Let the host that serves die in its phase. Return the round, and the seconds until the run continued."""
        (self.own(active) / "may-die").touch()
        died = self.own(active) / "died"
        self.wait_for(died.exists, *MEMBERS)
        killed, round_ = died.stat().st_mtime, int(died.read_text())
        next_ = round_ + 1 if phase in ("record", "checkpoint") else round_
        self.wait_for(lambda: self.log.has_record(next_), *MEMBERS)
        return {"phase": phase, "round": round_, "seconds": time.time() - killed}

    def end(self) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait()


def kills(folder: Path, url: str, arguments: argparse.Namespace, tell: Callable[[Any], None]) -> None:
    """Kill the host that serves again and again, and compare the hashes at the end of the run."""
    run, rows, active = StandbyRun(folder, url, arguments), list[dict[str, Any]](), 0
    phases = [PHASES[number % len(PHASES)] for number in range(arguments.kills + 1)]
    try:
        run.serve(0, phases[0], standby=False)
        for number in range(arguments.kills):
            other = f"host-{1 - active}"
            run.serve(1 - active, phases[number + 1], standby=True)
            run.wait_until_standby(other)
            if number == 0:
                run.start_members()
                run.wait_for(lambda: run.log.has_record(1), "host-0", *MEMBERS)
            rows.append(run.kill_active(active, phases[number]))
            active = 1 - active
            tell({"kills": len(rows), "seconds": figures(rows), "rows": rows})
        last = rows[-1]["round"] + 1
        run.wait_for(lambda: audit_key(last).partition("/")[2] in run.log.store.names("audited"), f"host-{active}")
        found = read_audit(run.log.store, last).parameters_sha256
    finally:
        run.end()
    equal = found == in_process(folder, last)
    tell({"kills": len(rows), "seconds": figures(rows), "last_round": last, "equal": equal, "rows": rows})


def figures(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    took = [row["seconds"] for row in rows]
    return {"median": median(took), "max": max(took)}


def in_process(folder: Path, round_: int) -> str:
    """Return the hash after a round of the same run in one process, without hosts."""
    text = (folder / "run.yaml").read_text()
    (folder / "alone.yaml").write_text(re.sub(r"^store: .*\n|hosts: \[.*?\], ", "", text, flags=re.MULTILINE))
    command = [sys.executable, "-P", "-m", "hetero_pp", "launch", str(folder / "alone.yaml"), "--in-process"]
    subprocess.run([*command, "--runs", str(folder / "alone")], check=True, stdout=subprocess.DEVNULL)
    return read_audit(FolderStore(folder / "alone" / RUN / "log"), round_).parameters_sha256


@contextmanager
def store_of(kind: str, folder: Path) -> Iterator[str]:
    """Yield the URL of a new store of this kind."""
    if kind == "folder":
        yield str(folder / "store")
        return
    os.environ |= {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET}
    (folder / "service").mkdir()
    with object_service(folder / "service") as address:
        url = f"s3://standby/runs?endpoint={address}"
        open_store(url).put("first", b"")  # the service makes a bucket with its first object
        open_store(url).delete(["first"])
        yield url


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--kills", type=int, default=20, help="kills with each store")
    parser.add_argument("--rounds", type=int, default=1000, help="rounds for which the run is planned")
    parser.add_argument("--store", nargs="+", default=["folder", "s3"], choices=["folder", "s3"])
    parser.add_argument("--takeover", type=float, default=10.0, help="seconds without a heartbeat")
    arguments = parse(parser, SMOKE)
    results: dict[str, Any] = origin() | {"takeover_seconds": arguments.takeover, "rounds": arguments.rounds}
    for kind in arguments.store:

        def tell(found: dict[str, Any], kind: str = kind) -> None:
            results[kind] = found
            row = found["rows"][-1]
            print(f"{kind}: {row['phase']} of round {row['round']}: continued after {row['seconds']:.1f} s", flush=True)
            save(results, arguments.json)

        with tempfile.TemporaryDirectory(prefix="hetero-pp-standby-") as name, store_of(kind, Path(name)) as url:
            kills(Path(name) / "run", url, arguments, tell)
        took, equal = results[kind]["seconds"], "an equal" if results[kind]["equal"] else "another"
        print(f"{kind}: {arguments.kills} kills, {equal} hash; {took['median']:.1f} s, at most {took['max']:.1f} s")


if __name__ == "__main__":
    main()
