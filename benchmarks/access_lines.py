"""A group whose machines have one line each: the kernel's, those that `launch` shapes, and those that `simulate` knows.

    python benchmarks/access_lines.py [--only NAME ...] [--json FILE]

The kernel's run is one on several hosts (docs/three_hosts.md): the exchange and every stage in a network namespace of
its own (benchmarks/namespaces.py), and nothing of lines in the YAML. A step is the median time between two steps of the
first stage; links decide it, so that it is the time that a stage in the middle needs to send to both of its neighbours.

A provider's rate is one of packets, the program's one of what gRPC hands to TCP. So the kernel counts in two ways: the
bytes in the packets, which is what is compared, and whole packets, which shows what headers and acknowledgements take.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from command_line import parse, save
from namespaces import HEADERS, Counted, Line, Machine, Network, network
from simulator import measured_step, words

from hetero_pp.program.experiments.provenance import commit, machine
from hetero_pp.topology import EXCHANGE

PORT = 47600
STEPS = 5
SMOKE = {"only": ["200/200"], "steps": 2, "ways": ["kernel"]}

YAML = """\
name: measured
model: {{preset: micro, width: 128, heads: 4, feed_forward: 128}}
data: {{corpus: {corpus}, sequence_length: {sequence}, validation_share: 0.2, validation_sequences: 2}}
inner: {{steps: {steps}}}
outer: {{rounds: 1}}
exchange: {{listen: '{exchange}'}}
replicas:
  - name: home
    kind: participants
    stages: [{stages}]
    batch_size: 32
    micro_batches: 32
    boundary: {{dtype: fp32}}
"""


@dataclass(frozen=True)
class Group:
    """Stages with a line of the same kind each: Mbit/s, and ms that it adds to what crosses it, either way."""

    up: float
    down: float
    latency: float = 0
    stages: int = 4
    sequence: int = 256

    @property
    def name(self) -> str:
        latency = f", {self.latency:g} ms" if self.latency else ""
        return f"{self.up:g}/{self.down:g} Mbit/s{latency}, {self.stages} stages"

    @property
    def line(self) -> Line:
        return Line(self.up * 1e6, self.down * 1e6, self.latency / 1e3)

    @property
    def members(self) -> list[str]:
        return [f"home.{stage}" for stage in range(self.stages)]

    def yaml(self, corpus: Path, steps: int, hosts: Sequence[str]) -> str:
        """The group, with the exchange listening on the first host and the stages on the others."""
        exchange, *addresses = hosts
        stages = ", ".join(f"{{layers: {4 // self.stages}, listen: '{address}'}}" for address in addresses)
        return YAML.format(corpus=corpus, sequence=self.sequence, steps=steps, exchange=exchange, stages=stages)


GROUPS = [
    Group(20, 100),
    Group(10, 10),
    Group(20, 20, latency=15),
    Group(200, 200, stages=2, sequence=64),
]


class Watch:
    """What the kernel counts on all lines, again and again, until it is left."""

    def __init__(self, watched: Network) -> None:
        self._network, self._samples = watched, [(time.time(), watched.counted())]
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._go_on, daemon=True)

    def _go_on(self) -> None:
        while not self._over.wait(0.1):
            self._samples.append((time.time(), self._network.counted()))

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *cause: object) -> None:
        self._over.set()
        self._thread.join()

    def rates(self, member: str, begin: float, end: float, counts_headers: bool) -> tuple[float, float]:
        """Bit/s up and down between two times, as a bucket counts them."""
        first = max((sample for sample in self._samples if sample[0] <= begin), key=_time)
        last = min((sample for sample in self._samples if sample[0] >= end), key=_time, default=self._samples[-1])
        before, after = (_bits(counted[member], counts_headers) for _, counted in (first, last))
        return (after[0] - before[0]) / (last[0] - first[0]), (after[1] - before[1]) / (last[0] - first[0])


def _time(sample: tuple[float, object]) -> float:
    return sample[0]


def _bits(counted: Counted, counts_headers: bool) -> tuple[int, int]:
    headers = 0 if counts_headers else HEADERS
    up = counted.up_bytes - headers * counted.up_packets
    return 8 * up, 8 * (counted.down_bytes - headers * counted.down_packets)


def by_the_kernel(group: Group, steps: int, counts_headers: bool) -> dict[str, Any]:
    """The group in namespaces: a step, and how full each line was from the first to the last."""
    lines = {EXCHANGE: None} | dict.fromkeys(group.members, group.line)
    with _folder() as folder, network(lines, counts_headers) as made:
        (folder / "token").write_text("known to all of them\n")
        hosts = [f"{made.machines[name].address}:{PORT}" for name in lines]
        (folder / "run.yaml").write_text(group.yaml(folder / "corpus.txt", steps, hosts))
        with Watch(made) as watch:
            launch_on_hosts(made, folder)
        events = _events(folder / EXCHANGE)
        times = [event["time"] for event in events if event["event"] == "inner_step" and event["member"] == "home.0"]
        used = {name: watch.rates(name, min(times), max(times), counts_headers) for name in group.members}
    return {
        "step_seconds": measured_step(events),
        "used": {name: {"up": up / group.line.up, "down": down / group.line.down} for name, (up, down) in used.items()},
    }


def launch_on_hosts(made: Network, folder: Path) -> None:
    """`launch --only` on every machine, until all have ended. Raises SystemExit with what the first to fail said."""
    processes = {name: _launch(one, name, made, folder) for name, one in made.machines.items()}
    try:
        while any(process.poll() is None for process in processes.values()):
            for name, process in processes.items():
                if process.poll() not in (None, 0):
                    raise SystemExit(f"{name} ended with {process.returncode}: {(folder / f'{name}.txt').read_text()}")
            time.sleep(0.1)
    finally:
        for process in processes.values():
            process.terminate()
        for process in processes.values():
            process.wait()


def _launch(host: Machine, only: str, made: Network, folder: Path) -> subprocess.Popen[bytes]:
    command = [*host.inside, sys.executable, "-m", "hetero_pp", "launch", str(folder / "run.yaml"), "--only", only]
    command += ["--token-file", str(folder / "token"), "--runs", str(folder / only)]
    if only != EXCHANGE:
        command += ["--exchange", f"{made.machines[EXCHANGE].address}:{PORT}"]
    with (folder / f"{only}.txt").open("wb") as said:
        return subprocess.Popen(command, stdout=said, stderr=said, stdin=subprocess.DEVNULL)


@contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="hetero-pp-access-lines-") as name:
        (Path(name) / "corpus.txt").write_text(words())
        yield Path(name)


def _events(runs: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (runs / "measured" / "metrics.jsonl").open()]


WAYS: dict[str, Callable[[Group, int], dict[str, Any]]] = {
    "kernel": partial(by_the_kernel, counts_headers=False),
    "kernel, headers too": partial(by_the_kernel, counts_headers=True),
}


def why_not() -> str | None:
    """Why there can be no such network here; None if there can."""
    try:
        with network({"alone": Line(1e6, 1e6)}, counts_headers=False):
            return None
    except OSError as error:
        return str(error)


def busiest(found: dict[str, Any]) -> str:
    """Whose upload was most used, and how much of it."""
    share, member = max((used["up"], member) for member, used in found["used"].items())
    return f"{share:.1%} of {member}'s"


def main() -> None:
    """Run and print; write JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", help="parts of names of groups")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), metavar="WAY", help=f"of {list(WAYS)}")
    parser.add_argument("--steps", type=int, default=STEPS)
    arguments = parse(parser, SMOKE)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # as Ctrl-C does, leaving nothing behind
    lacks = why_not()
    if lacks is not None:
        print(f"no machines in namespaces, which need Linux, `ip`, `tc`, and root or user namespaces: {lacks}")
        sys.exit(0 if arguments.smoke else 1)
    groups = [one for one in GROUPS if not arguments.only or any(part in one.name for part in arguments.only)]
    results: list[dict[str, Any]] = []
    print(f"{'seconds a step':<32}" + "".join(f"{way:>21}" for way in arguments.ways) + "  busiest upload")
    for group in groups:
        found = {way: WAYS[way](group, arguments.steps) for way in arguments.ways}
        results.append({"group": group.name, "ways": found})
        cells = "".join(f"{one['step_seconds']:>21.3f}" for one in found.values())
        print(f"{group.name:<32}{cells}  {busiest(found['kernel'])}", flush=True)
    save({"machine": machine(), "commit": commit(), "groups": results}, arguments.json)


if __name__ == "__main__":
    main()
