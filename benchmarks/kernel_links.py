"""Links shaped in process beside links shaped by the kernel: the same launched group, the same bandwidth.

    sudo python benchmarks/kernel_links.py [--json FILE]

The kernel's run has links without limits in its YAML and lives in a network namespace of its own, where `tc` gives each
direction of each hop on the loopback a token bucket of its own (tbf). Needs root, `ip` and `tc`. Compared are the
median times between steps of the first stage.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from simulator import ROUNDS, STEPS, measured_step, words

from hetero_pp.program.experiments.report import commit, machine

NAMESPACE = "hetero-pp-links"
FIRST_PORT = 47600
MTU = 1500
HEADERS = MTU / (MTU - 52)
"""The kernel's rate includes TCP and IP headers, which shaping in process does not see."""
BURST = 1600
"""Bytes: hardly more than a packet, as real links save nothing while they are idle."""

YAML = """\
name: measured
model: {{preset: micro, width: 128, heads: 4, feed_forward: 384}}
data: {{corpus: {corpus}, sequence_length: 128, validation_share: 0.2, validation_sequences: 8}}
inner: {{steps: {steps}}}
outer: {{rounds: {rounds}}}
links:
  hop: {link}
replicas:
  - name: home
    kind: participants
    stages: [{stages}]
    batch_size: 16
    micro_batches: 8
    link: hop
    boundary: {{rank: {rank}}}
"""


@dataclass(frozen=True)
class Topology:
    """One group; Mbit/s."""

    bandwidth: float
    stages: int
    rank: str

    @property
    def name(self) -> str:
        return f"{self.bandwidth:g} Mbit/s, {self.stages} stages, rank {self.rank}"

    def yaml(self, corpus: Path, in_process: bool) -> str:
        """The group with links of this shape, or without any."""
        link = f"{{bandwidth: {self.bandwidth} Mbit/s}}" if in_process else "{}"
        stages = ", ".join(
            f"{{layers: {4 // self.stages}, listen: '127.0.0.1:{FIRST_PORT + stage}'}}" for stage in range(self.stages)
        )
        return YAML.format(corpus=corpus, steps=STEPS, rounds=ROUNDS, link=link, stages=stages, rank=self.rank)


TOPOLOGIES = [
    Topology(2, 2, "1/8"),
    Topology(2, 4, "1/8"),
    Topology(10, 2, "full"),
    Topology(10, 4, "full"),
    Topology(50, 2, "full"),
]


@contextmanager
def kernel_links(topology: Topology) -> Iterator[list[str]]:
    """A namespace whose loopback shapes every direction of every hop; what to put before a command to run in it."""

    def ip(*arguments: str) -> None:
        subprocess.run(["ip", *arguments], check=True)

    inside = ["ip", "netns", "exec", NAMESPACE]

    def tc(text: str) -> None:
        subprocess.run([*inside, "tc", *text.split()], check=True, stderr=subprocess.DEVNULL)

    ip("netns", "add", NAMESPACE)
    try:
        subprocess.run([*inside, "ip", "link", "set", "lo", "up", "mtu", str(MTU)], check=True)
        tc("qdisc add dev lo root handle 1: htb default 999")  # only sorts: its classes are as good as unlimited
        tc("class add dev lo parent 1: classid 1:999 htb rate 10gbit burst 1m")
        rate = f"{round(topology.bandwidth * 1e6 * HEADERS)}bit"
        for hop in range(topology.stages - 1):
            for direction, side in enumerate(("dport", "sport")):
                number = 10 * (hop + 1) + direction
                tc(f"class add dev lo parent 1: classid 1:{number} htb rate 10gbit burst 1m")
                tc(f"qdisc add dev lo parent 1:{number} tbf rate {rate} burst {BURST} limit 64mb")
                port = FIRST_PORT + hop + 1  # the later stage listens
                match = f"match ip {side} {port} 0xffff flowid 1:{number}"
                tc(f"filter add dev lo parent 1: protocol ip prio 1 u32 {match}")
        yield inside
    finally:
        ip("netns", "delete", NAMESPACE)


def launch(topology: Topology, in_process: bool) -> float:
    """The median time of a step."""
    with tempfile.TemporaryDirectory(prefix="hetero-pp-links-") as name:
        folder = Path(name)
        (folder / "corpus.txt").write_text(words())
        (folder / "topology.yaml").write_text(topology.yaml(folder / "corpus.txt", in_process))
        command = [sys.executable, "-m", "hetero_pp", "launch", str(folder / "topology.yaml")]
        command += ["--runs", str(folder / "runs")]
        if in_process:
            _run(topology, command)
        else:
            with kernel_links(topology) as inside:
                _run(topology, [*inside, *command])
        events = [json.loads(line) for line in (folder / "runs" / "measured" / "metrics.jsonl").open()]
        return measured_step(events)


def _run(topology: Topology, command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if done.returncode != 0:
        raise SystemExit(f"{topology.name}: {done.stdout}{done.stderr}")


def main() -> None:
    """Run and print; write JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    results: list[dict[str, Any]] = []
    print(f"{'topology':<44} {'in process':>11} {'kernel':>10} {'ratio':>7}")
    for topology in TOPOLOGIES:
        own, kernel = launch(topology, True), launch(topology, False)
        results.append({"topology": topology.name, "in_process_seconds": own, "kernel_seconds": kernel})
        print(f"{topology.name:<44} {own:>10.3f}s {kernel:>9.3f}s {own / kernel:>7.3f}", flush=True)
    off = median(abs(one["in_process_seconds"] / one["kernel_seconds"] - 1) for one in results)
    print(f"off by {off:.2%} in the median")
    if arguments.json is not None:
        content = {"machine": machine(), "commit": commit(), "median_error": off, "topologies": results}
        arguments.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
