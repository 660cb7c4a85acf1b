"""Train groups of homes that no process can dial: compare bits, time joins, and count the bytes of the relay.

    python benchmarks/homes.py [--joins N] [--json FILE]

Each home is a network namespace that is connected to the exchange's host and to nothing else
(benchmarks/namespaces.py). It reaches no other home. Nothing listens in it, so no process dials it. A home is given
only a ticket. Where namespaces are not possible, homes are processes of this machine, and the benchmark checks that
they listen nowhere.

A join is timed in a run under way. A home with an empty folder takes a slot that was returned just before. The time is
that from typing `join` to the end of the first inner step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import psutil
from command_line import exit_on_sigterm, origin, parse, parser_of, save
from launched import HETERO_PP, events_of, start_program, summary_of, words
from namespaces import Machine, apart, gateway
from processes import cpu_seconds

from hetero_pp.config.folder import RunFolder
from hetero_pp.config.lines import EXCHANGE
from hetero_pp.program.join.invite import invite

PORT = 47690
SMOKE = {"groups": 1, "stages": 2, "rounds": 2, "joins": 1, "between": 1}
FOR_EVER = 100_000
PATIENCE = 1200.0
LISTENS = "0A"
"""State of a listening socket in /proc/net/tcp."""

YAML = """\
name: homes
model: {{preset: micro, width: 64, heads: 4, feed_forward: 128, layers: 6}}
data: {{corpus: {corpus}, sequence_length: 64, validation_share: 0.2, validation_sequences: 4}}
inner: {{steps: 5, learning_rate: 1e-2, warmup_steps: 5}}
outer: {{rounds: {rounds}, compression: {{density: 1/32}}}}
exchange: {{listen: '0.0.0.0:{port}', grace: {{least: 10 min, most: 10 min}}, lease: {{least: 1 min}}}}
replicas:
{replicas}
"""
GROUP = """\
  - name: {name}
    kind: participants
    stages: {stages}
    batch_size: 8
    micro_batches: 4
    boundary: {{rank: 1/4}}
"""


@dataclass(frozen=True)
class Site:
    """Place where commands run: their prefix, and the address of the exchange as seen from there."""

    inside: Sequence[str]
    exchange: str
    holder: int | None = None
    """Process id of the holder of the namespace, if there is one."""

    def ask(self, *command: str) -> str:
        """Run `hetero-pp COMMAND`, and return its output. Raises SystemExit if it fails."""
        done = subprocess.run([*self.inside, *HETERO_PP, *command], capture_output=True, text=True)
        if done.returncode != 0:
            raise SystemExit(f"{' '.join(command[:1])} ended with {done.returncode}: {done.stderr}")
        return done.stdout

    def listening(self, process: subprocess.Popen[bytes]) -> int:
        """Return the number of listening TCP sockets in the namespace, or else of a process and its children."""
        if self.holder is not None:
            tables = [Path(f"/proc/{self.holder}/net/{name}").read_text() for name in ("tcp", "tcp6")]
            return sum(line.split()[3] == LISTENS for table in tables for line in table.splitlines()[1:])
        own = psutil.Process(process.pid)
        found = [one for each in (own, *own.children(recursive=True)) for one in each.net_connections("tcp")]
        return sum(one.status == psutil.CONN_LISTEN for one in found)


@contextmanager
def sites(names: Sequence[str]) -> Iterator[tuple[Site, dict[str, Site], str]]:
    """Yield the exchange's site, the homes' sites by name, and why namespaces are not possible (empty if they are)."""
    here = Site([], f"127.0.0.1:{PORT}")
    with ExitStack() as stack:
        try:
            middle, homes = stack.enter_context(apart(names))
        except OSError as error:
            lacks = f"homes are processes of this machine, because namespaces are not possible: {error}"
            yield here, dict.fromkeys(names, here), lacks
            return
        require_apart(homes)
        found = {name: Site(home.inside, f"{gateway(home)}:{PORT}", home.holder) for name, home in homes.items()}
        yield Site(middle.inside, f"127.0.0.1:{PORT}", middle.holder), found, ""


def require_apart(homes: Mapping[str, Machine]) -> None:
    """Raise SystemExit if a home has a route to another one."""
    for name, home in homes.items():
        for other, there in homes.items():
            if name != other:
                try:
                    home.call(f"ip route get {there.address}")
                except OSError:
                    continue
                raise SystemExit(f"{name} reaches {other}")


class Run:
    """Run that is served at one site and joined from others."""

    def __init__(self, folder: Path, groups: int, stages: int, rounds: int, exchange: Site) -> None:
        self.folder, self.exchange = folder, exchange
        folder.mkdir()
        (folder / "corpus.txt").write_text(words())
        names = [f"group-{number + 1}" for number in range(groups)]
        self.slots = [f"{name}.{stage}" for name in names for stage in range(stages)]
        replicas = "\n".join(GROUP.format(name=name, stages=stages) for name in names)
        text = YAML.format(corpus=folder / "corpus.txt", rounds=rounds, port=PORT, replicas=replicas)
        (folder / "run.yaml").write_text(text)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._joined = 0
        self._runs = str(folder / EXCHANGE)
        self._own = RunFolder(folder / EXCHANGE / "homes")

    def __enter__(self) -> Run:
        own = ["serve", str(self.folder / "run.yaml"), "--runs", self._runs]
        to = self.folder / f"{EXCHANGE}.txt"
        self.processes[EXCHANGE] = start_program(*own, to=to, inside=self.exchange.inside)
        self.wait(lambda: any(event["event"] == "waiting" for event in self.events()))
        return self

    def __exit__(self, *cause: object) -> None:
        for process in self.processes.values():
            process.terminate()
        for process in self.processes.values():
            process.wait()

    def join(self, slot: str, site: Site) -> Joined:
        """Start a home with an empty folder that takes a slot."""
        self._joined += 1
        runs = self.folder / f"{slot}-{self._joined}"
        with redirect_stdout(StringIO()) as ticket:
            invite(Path(self._runs), "homes", slot, 3600.0, site.exchange)
        own = ["--data", str(self.folder / "corpus.txt"), "--runs", str(runs)]
        command, to = ["join", ticket.getvalue().strip(), *own], self.folder / f"{slot}.txt"
        typed = time.time()
        self.processes[slot] = start_program(*command, to=to, inside=site.inside)
        return Joined(slot, typed)

    def leave(self, joined: Joined) -> None:
        """Have a home return its slot."""
        self.processes[joined.slot].terminate()  # as Ctrl-C and `leave` do
        self.processes[joined.slot].wait()

    def events(self) -> list[dict[str, Any]]:
        return events_of(self._own)

    def wait(self, is_so: Callable[[], bool]) -> None:
        """Wait until the condition holds. Raises SystemExit if a process ends first or the wait is too long."""
        until = time.monotonic() + PATIENCE
        while not is_so():
            for name, process in self.processes.items():
                if process.poll() is not None:
                    raise SystemExit(f"{name} ended with {process.poll()}: {(self.folder / f'{name}.txt').read_text()}")
            if time.monotonic() > until:
                raise SystemExit(f"nothing happened for {PATIENCE:g} s")
            time.sleep(0.05)

    def first_step(self, joined: Joined) -> tuple[float, float]:
        """Return seconds from typing `join` to the end of the first inner step, and CPU seconds of its processes."""

        def steps() -> list[float]:
            own = (one for one in self.events() if (one["event"], one["member"]) == ("inner_step", joined.slot))
            return [one["time"] - joined.typed for one in own if one["time"] > joined.typed]

        self.wait(lambda: bool(steps()))
        return steps()[0], cpu_seconds(self.processes[joined.slot].pid)

    def rounds(self) -> int:
        """Return the number of closed rounds."""
        return sum(event["event"] == "round_closed" for event in self.events())

    def carried(self) -> tuple[int, int]:
        """Return the bytes that the relay has carried, and the wire bytes in the ledgers of the stage links."""
        path = self.folder / "status.json"
        self.exchange.ask("status", "homes", "--runs", self._runs, "--json", str(path))
        told = {
            (event["link"], event["direction"], event["round"]): event["wire_bytes"]
            for event in self.events()
            if event["event"] == "link_use" and EXCHANGE not in event["link"]
        }
        slots = json.loads(path.read_text())["slots"].values()
        return sum(slot["relayed_bytes"] for slot in slots) // 2, sum(told.values())  # both ends report each link

    def summary(self) -> dict[str, Any]:
        return summary_of(self._own)


@dataclass(frozen=True)
class Joined:
    """Home that has asked for a slot."""

    slot: str
    typed: float
    """Unix time at which `join` was typed."""


def to_the_bits(
    folder: Path, arguments: argparse.Namespace, exchange: Site, homes: Mapping[str, Site]
) -> dict[str, Any]:
    """Train a run over all homes, and train the same run in one process. Return whether their bits are equal."""
    with Run(folder / "whole", arguments.groups, arguments.stages, arguments.rounds, exchange) as run:
        for slot, site in homes.items():
            run.join(slot, site)
        listening: list[int] = []
        run.wait(lambda: run.rounds() >= 1)
        for slot, site in homes.items():
            listening.append(site.listening(run.processes[slot]))
        ended = {name: process.wait(PATIENCE) for name, process in run.processes.items()}
        if any(ended.values()):
            raise SystemExit(f"ended with {ended}: {(run.folder / 'exchange.txt').read_text()}")
        together = run.summary()
    alone = [*HETERO_PP, "launch", "--in-process", str(run.folder / "run.yaml"), "--runs", str(folder / "alone")]
    subprocess.run(alone, check=True, stdout=subprocess.DEVNULL)
    expected = summary_of(RunFolder(folder / "alone" / "homes"))
    return {
        "rounds": together["rounds"],
        "parameters_sha256": together["parameters_sha256"],
        "same_bits": together["parameters_sha256"] == expected["parameters_sha256"],
        "same_losses": together["validation_loss"] == expected["validation_loss"],
        "listening_at_homes": sum(listening),
    }


def under_way(folder: Path, arguments: argparse.Namespace, exchange: Site, homes: Mapping[str, Site]) -> dict[str, Any]:
    """Measure the bytes that the relay carries, and the time until a returned slot trains again."""
    with Run(folder / "under_way", arguments.groups, arguments.stages, FOR_EVER, exchange) as run:
        joined = {slot: run.join(slot, site) for slot, site in homes.items()}
        run.wait(lambda: run.rounds() >= 2)
        before = run.carried()
        first = run.rounds()
        run.wait(lambda: run.rounds() >= first + arguments.between)
        relayed, ledgers = (later - sooner for sooner, later in zip(before, run.carried(), strict=True))
        seconds: list[dict[str, Any]] = []
        for slot in islice(cycle(reversed(list(homes))), arguments.joins):
            run.leave(joined[slot])
            joined[slot] = run.join(slot, homes[slot])
            load = psutil.getloadavg()[0]
            taken, cpu = run.first_step(joined[slot])
            seconds.append({"slot": slot, "seconds": taken, "cpu_seconds": cpu, "load": load})
            closed = run.rounds()
            run.wait(lambda closed=closed: run.rounds() > closed)  # type: ignore[misc]
    return {
        "relayed_bytes": relayed,
        "ledger_wire_bytes": ledgers,
        "relayed_over_ledger": relayed / ledgers,
        "join_to_first_step": seconds,
        "median_seconds": statistics.median(one["seconds"] for one in seconds),
        "longest_seconds": max(one["seconds"] for one in seconds),
        "median_cpu_seconds": statistics.median(one["cpu_seconds"] for one in seconds),
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--groups", type=int, default=2)
    parser.add_argument("--stages", type=int, default=3, help="stages of each group")
    parser.add_argument("--rounds", type=int, default=6, help="rounds of the run that is compared with one process")
    parser.add_argument("--joins", type=int, default=12, help="number of times that a slot is returned and taken again")
    parser.add_argument("--between", type=int, default=60, help="rounds during which the relay's bytes are counted")
    arguments = parse(parser, SMOKE)
    exit_on_sigterm()
    names = [f"group-{group + 1}.{stage}" for group in range(arguments.groups) for stage in range(arguments.stages)]
    with tempfile.TemporaryDirectory(prefix="hetero-pp-homes-") as name, sites(names) as (exchange, homes, lacks):
        if lacks:
            print(lacks)
        load = psutil.getloadavg()[0]
        whole = to_the_bits(Path(name), arguments, exchange, homes)
        bits = "the bits of one process" if whole["same_bits"] and whole["same_losses"] else "OTHER BITS"
        listens = f"they listen at {whole['listening_at_homes']} ports"
        print(f"{len(names)} homes, {whole['rounds']} rounds: {bits}; {listens}", flush=True)
        joining = under_way(Path(name), arguments, exchange, homes)
    print(f"relayed over the ledgers' bytes: {joining['relayed_over_ledger']:.3f}")
    spread = f"median {joining['median_seconds']:.1f} s, at most {joining['longest_seconds']:.1f} s"
    cpu = f"{joining['median_cpu_seconds']:.1f} s of CPU"
    print(f"from typing join to the first inner step: {spread}; {cpu}")
    kind = "processes" if lacks else "network namespaces"
    save(origin() | {"homes": kind, "load": load, "whole": whole, "under_way": joining}, arguments.json)
    if not (whole["same_bits"] and whole["same_losses"]) or whole["listening_at_homes"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
