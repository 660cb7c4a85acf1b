"""Compare access lines shaped by the kernel, shaped by `launch`, and predicted by `simulate`, for one group.

    python benchmarks/access_lines.py [--only NAME ...] [--json FILE]

In the kernel's run, the exchange and each stage have a network namespace of their own (benchmarks/namespaces.py), as in
a run on several hosts (docs/hosts.md). Its YAML has no lines. A step is the median time between two steps of the first
stage. Links decide it, so it is the time in which a middle stage sends to both of its neighbours.

A provider limits the rate of packets; the program limits the rate of what gRPC hands to TCP. So the kernel counts in
two ways. Only the bytes in the packets are comparable with the program. Whole packets show the cost of headers and
acknowledgements.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from command_line import exit_on_sigterm, origin, parse, parser_of, save
from launched import events_of, run_quietly, start_program, words
from namespaces import HEADERS, Counted, Line, Machine, Network, network
from processes import meanwhile
from simulator import calibrated_prediction, measured_step

from hetero_pp.config.folder import RunFolder
from hetero_pp.config.lines import EXCHANGE

PORT = 47600
STEPS = 6
SMOKE = {"steps": 2, "ways": ["kernel", "launch", "simulate"]}

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
    """Stages that each have a line of the same kind: `up` and `down` in Mbit/s, `latency` in ms each way."""

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
    def line_settings(self) -> list[str]:
        """Return the settings that give every stage its line, in the form of `--set`."""
        line = {"up": f"{self.up} Mbit/s", "down": f"{self.down} Mbit/s", "latency": f"{self.latency} ms"}
        return [f"lines={json.dumps({'own': line})}", "replicas.0.line=own"]

    @property
    def members(self) -> list[str]:
        return [f"home.{stage}" for stage in range(self.stages)]

    def yaml(self, corpus: Path, steps: int, hosts: Sequence[str]) -> str:
        """Return the group's YAML. The exchange listens on the first host, and the stages on the others."""
        exchange, *addresses = hosts
        stages = ", ".join(f"{{layers: {4 // self.stages}, listen: '{address}'}}" for address in addresses)
        return YAML.format(corpus=corpus, sequence=self.sequence, steps=steps, exchange=exchange, stages=stages)


GROUPS = [Group(20, 100), Group(10, 10), Group(20, 20, latency=15)]
SMALLEST = Group(200, 200, stages=2, sequence=64)


class Watch:
    """Samples of the kernel's counts on all lines."""

    def __init__(self, watched: Network) -> None:
        self._network, self._samples = watched, [(time.time(), watched.counted())]

    def go_on(self, is_over: threading.Event) -> None:
        """Take samples until the event is set."""
        while not is_over.wait(0.1):
            self._samples.append((time.time(), self._network.counted()))

    def used(self, member: str, begin: float, end: float, line: Line, counts_headers: bool) -> dict[str, float]:
        """Return the used shares of a line between two times, and the share of its upload in the fullest second."""
        up, down = self._rates(member, begin, end, counts_headers)
        second = min(1.0, end - begin)
        starts = [begin, *(time_ for time_, _ in self._samples if begin <= time_ <= end - second)]
        fullest = max(self._rates(member, start, start + second, counts_headers)[0] for start in starts)
        return {"up": up / line.up, "down": down / line.down, "up in the fullest second": fullest / line.up}

    def _rates(self, member: str, begin: float, end: float, counts_headers: bool) -> tuple[float, float]:
        """Return the mean bit/s up and down."""
        first = max((sample for sample in self._samples if sample[0] <= begin), key=itemgetter(0))
        last = next((sample for sample in self._samples if sample[0] >= end), self._samples[-1])
        before, after = (_bits(counted[member], counts_headers) for _, counted in (first, last))
        return (after[0] - before[0]) / (last[0] - first[0]), (after[1] - before[1]) / (last[0] - first[0])


def _bits(counted: Counted, counts_headers: bool) -> tuple[int, int]:
    headers = 0 if counts_headers else HEADERS
    up = counted.up_bytes - headers * counted.up_packets
    return 8 * up, 8 * (counted.down_bytes - headers * counted.down_packets)


def by_the_kernel(group: Group, steps: int, counts_headers: bool) -> dict[str, Any]:
    """Run the group in namespaces.

    Returns the time of a step, and the used share of each line from the first step to the last.
    """
    lines = {EXCHANGE: None} | dict.fromkeys(group.members, group.line)
    with _folder() as folder, network(lines, counts_headers) as made:
        (folder / "token").write_text("known to all of them, and to nobody else\n")
        hosts = [f"{made.machines[name].address}:{PORT}" for name in lines]
        (folder / "run.yaml").write_text(group.yaml(folder / "corpus.txt", steps, hosts))
        watch = Watch(made)
        with meanwhile(watch.go_on):
            launch_on_hosts(made, folder)
        events = events_of(RunFolder(folder / EXCHANGE / "measured"))
        times = [event["time"] for event in events if event["event"] == "inner_step" and event["member"] == "home.0"]
        span = min(times), max(times)
        used = {name: watch.used(name, *span, group.line, counts_headers) for name in group.members}
    return {"step_seconds": measured_step(events), "used": used}


def launch_on_hosts(made: Network, folder: Path) -> None:
    """Run `launch --only` on every machine until all have ended.

    Raises SystemExit with the output of the first machine that fails.
    """
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
    own = ["--only", only, "--token-file", str(folder / "token"), "--runs", str(folder / only)]
    if only != EXCHANGE:
        own += ["--exchange", f"{made.machines[EXCHANGE].address}:{PORT}"]
    return start_program("launch", str(folder / "run.yaml"), *own, to=folder / f"{only}.txt", inside=host.inside)


@contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="hetero-pp-access-lines-") as name:
        (Path(name) / "corpus.txt").write_text(words())
        yield Path(name)


def by_launch(group: Group, steps: int) -> dict[str, Any]:
    """Run the group on this host's loopback, with lines that `launch` shapes."""
    with _folder() as folder:
        run = run_quietly(_on_loopback(group, steps, folder), group.line_settings, folder / "runs")
        return {"step_seconds": measured_step(events_of(run))}


def by_simulate(group: Group, steps: int) -> dict[str, Any]:
    """Predict the group from its stages' costs on this machine, measured now."""
    with _folder() as folder:
        [home] = calibrated_prediction(_on_loopback(group, steps, folder), group.line_settings).replicas
        return {"step_seconds": home.step_seconds}


def _on_loopback(group: Group, steps: int, folder: Path) -> Path:
    yaml = folder / "run.yaml"
    yaml.write_text(group.yaml(folder / "corpus.txt", steps, ["127.0.0.1:0"] * (1 + group.stages)))
    return yaml


WAYS: dict[str, Callable[[Group, int], dict[str, Any]]] = {
    "kernel": partial(by_the_kernel, counts_headers=False),
    "kernel, packets": partial(by_the_kernel, counts_headers=True),
    "launch": by_launch,
    "simulate": by_simulate,
}


def why_not() -> str | None:
    """Return why such a network is not possible here; None if it is."""
    try:
        with network({"alone": Line(1e6, 1e6)}, counts_headers=False):
            return None
    except OSError as error:
        return str(error)


def show(way: str, found: dict[str, Any], kernel: float | None) -> None:
    """Print a line: seconds per step, their ratio to the kernel's, and the share used of the fullest upload."""
    seconds = found["step_seconds"]
    ratio = "" if kernel is None else f"{seconds / kernel:.3f}"
    full = ""
    if "used" in found:
        name, used = max(found["used"].items(), key=lambda item: item[1]["up"])
        full = f"  upload of {name}: {used['up']:.1%}, at most {used['up in the fullest second']:.1%}"
    print(f"  {way:<16}{seconds:>8.3f} s{ratio:>8}{full}", flush=True)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--only", nargs="*", help="run groups whose names contain one of these")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), metavar="WAY", help=", ".join(WAYS))
    parser.add_argument("--steps", type=int, default=STEPS)
    arguments = parse(parser, SMOKE)
    exit_on_sigterm()
    torch.set_num_threads(1)
    lacks = why_not()
    if lacks is not None:
        print(f"no machines in namespaces, which need Linux, `ip`, `tc`, and root or user namespaces: {lacks}")
        sys.exit(0 if arguments.smoke else 1)
    results: list[dict[str, Any]] = []
    for group in [SMALLEST] if arguments.smoke else GROUPS:
        if arguments.only and not any(part in group.name for part in arguments.only):
            continue
        print(f"{group.name}: seconds per step, and their ratio to the kernel's", flush=True)
        ways: dict[str, dict[str, Any]] = {}
        for way in arguments.ways:
            ways[way] = WAYS[way](group, arguments.steps)
            show(way, ways[way], ways.get("kernel", {}).get("step_seconds"))
        results.append({"group": group.name, "ways": ways})
    save(origin() | {"groups": results}, arguments.json)


if __name__ == "__main__":
    main()
