"""Compare links shaped in process with links shaped by the kernel, for the same launched group and bandwidth.

    sudo python benchmarks/kernel_links.py [--runs N] [--json FILE]

In the kernel's run, the links have no limits in the YAML. The run has its own network namespace, in which `tc` gives
each direction of each hop on the loopback a token bucket (tbf). Needs root, `ip` and `tc`. With --smoke,
the kernel's run is skipped where these are missing. The benchmark compares median times between steps of the first
stage, over interleaved runs of all kinds.

A token bucket differs from a link of the same rate. These are the differences and their remedies:

- Acknowledgements of one direction would take room from the other direction, so they bypass the bucket.
- A packet has headers, including the Ethernet header that `tc` counts on the loopback. So the rate is that of packets.
- BBR sends below the rate of a bucket while it estimates the rate, so the congestion control is reno.
- A bucket that was idle sends a burst at once, which a link would not. So it is too fast by up to a burst per message.
  A bucket of hardly more than a packet is too slow, because it loses rate whenever the kernel's timer is late. So two
  buckets are measured, of 1 ms and of 4 ms, with packets small enough for the former. A link lies between them.

Latency is not compared. It needs netem, a module that not every kernel has.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

from command_line import parse, save
from kernel_namespace import call, namespace
from simulator import ROUNDS, STEPS, measured_step, words

from hetero_pp.research.experiments.provenance import commit, machine

FIRST_PORT = 47600
MTU = 1500
SMALLEST_MTU = 250
TCP_AND_IP, ETHERNET = 52, 14
"""Bytes of headers per packet. The kernel's rate includes them, and shaping in process does not see them."""
BURSTS = (0.001, 0.004)
"""Sizes of the kernel's bucket, in seconds of its rate."""
ACKNOWLEDGEMENT = "match u16 0x0000 0xffc0 at 2"
"""Filter of u32 for packets of less than 64 bytes."""

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
    """One group. `bandwidth` is in Mbit/s."""

    bandwidth: float
    stages: int
    rank: str

    @property
    def name(self) -> str:
        return f"{self.bandwidth:g} Mbit/s, {self.stages} stages, rank {self.rank}"

    def burst_bytes(self, seconds: float) -> int:
        """Return the bytes that a bucket holds."""
        return max(SMALLEST_MTU + TCP_AND_IP, round(self.bandwidth * 1e6 / 8 * seconds))

    @property
    def mtu(self) -> int:
        """MTU with which two packets fit into the smallest bucket, where possible."""
        return min(MTU, max(SMALLEST_MTU, self.burst_bytes(min(BURSTS)) // 2))

    @property
    def packet_rate(self) -> int:
        """Rate in bit/s of packets that carry the bandwidth."""
        return round(self.bandwidth * 1e6 * (self.mtu + ETHERNET) / (self.mtu - TCP_AND_IP))

    def yaml(self, corpus: Path, steps: int, rounds: int, burst: float | None) -> str:
        """Return the group's YAML: with shaped links, or without limits and at the ports of the kernel's buckets."""
        link = f"{{bandwidth: {self.bandwidth} Mbit/s}}" if burst is None else "{}"
        ports = [0 if burst is None else FIRST_PORT + stage for stage in range(self.stages)]
        stages = ", ".join(f"{{layers: {4 // self.stages}, listen: '127.0.0.1:{port}'}}" for port in ports)
        return YAML.format(corpus=corpus, steps=steps, rounds=rounds, link=link, stages=stages, rank=self.rank)


TOPOLOGIES = [
    Topology(2, 2, "1/8"),
    Topology(2, 4, "1/8"),
    Topology(10, 2, "full"),
    Topology(10, 4, "full"),
    Topology(50, 2, "full"),
]
SMOKE = {"only": ["50 Mbit/s"], "runs": 1, "steps": 2, "rounds": 1, "bursts": [0.004]}


@contextmanager
def kernel_links(topology: Topology, burst: float) -> Iterator[list[str]]:
    """Shape every direction of every hop on the loopback of a namespace. Yields the command prefix that enters it.

    Raises OSError with the system's message where that is not possible.
    """
    with namespace(topology.mtu) as (inside, tc):
        call([*inside, "sysctl", "-qw", "net.ipv4.tcp_congestion_control=reno"])
        bucket = f"rate {topology.packet_rate}bit burst {topology.burst_bytes(burst)}"
        for hop in range(topology.stages - 1):
            for direction, side in enumerate(("dport", "sport")):
                number = 10 * (hop + 1) + direction
                tc(f"class add dev lo parent 1: classid 1:{number} htb rate 10gbit burst 1m")
                tc(f"qdisc add dev lo parent 1:{number} tbf {bucket} limit 64mb")
                match = f"match ip {side} {FIRST_PORT + hop + 1} 0xffff"  # the later stage listens
                tc(f"filter add dev lo parent 1: protocol ip prio 1 u32 {match} {ACKNOWLEDGEMENT} flowid 1:999")
                tc(f"filter add dev lo parent 1: protocol ip prio 2 u32 {match} flowid 1:{number}")
        yield inside


def why_not() -> str | None:
    """Return why the kernel cannot shape links here; None if it can."""
    try:
        with kernel_links(TOPOLOGIES[0], max(BURSTS)):
            return None
    except OSError as error:
        return str(error)


def launch(topology: Topology, steps: int, rounds: int, burst: float | None) -> float:
    """Return the median time of a step, with kernel buckets that hold `burst` seconds, or (None) shaped in process."""
    with tempfile.TemporaryDirectory(prefix="hetero-pp-links-") as name:
        folder = Path(name)
        (folder / "corpus.txt").write_text(words())
        (folder / "topology.yaml").write_text(topology.yaml(folder / "corpus.txt", steps, rounds, burst))
        command = [sys.executable, "-m", "hetero_pp", "launch", str(folder / "topology.yaml")]
        command += ["--runs", str(folder / "runs")]
        if burst is None:
            _run(topology, command)
        else:
            with kernel_links(topology, burst) as inside:
                _run(topology, [*inside, *command])
        events = [json.loads(line) for line in (folder / "runs" / "measured" / "metrics.jsonl").open()]
        return measured_step(events)


def _run(topology: Topology, command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if done.returncode != 0:
        raise SystemExit(f"{topology.name}: {done.stdout}{done.stderr}")


def compare(topology: Topology, steps: int, rounds: int, bursts: Sequence[float], runs: int) -> dict[str, Any]:
    """Run all kinds in turn.

    Return the ratios of shaping in process to each kernel bucket, and to the mean of the buckets.
    """
    turns = [[launch(topology, steps, rounds, burst) for burst in (None, *bursts)] for _ in range(runs)]
    own, *kernels = ([turn[kind] for turn in turns] for kind in range(1 + len(bursts)))
    return {
        "topology": topology.name,
        "in_process_seconds": own,
        "kernel_seconds": {
            f"burst of {burst * 1000:g} ms": kernel for burst, kernel in zip(bursts, kernels, strict=True)
        },
        "ratios": [median(own) / median(kernel) for kernel in kernels],
        "ratio": median(own) / mean(median(kernel) for kernel in kernels) if kernels else None,
    }


def main() -> None:
    """Run, print, and write JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=3, help="runs of each kind")
    parser.add_argument("--only", nargs="*", help="run topologies whose names contain one of these")
    parser.add_argument("--steps", type=int, default=STEPS, help="inner steps of a round")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument(
        "--bursts", type=float, nargs="+", default=BURSTS, help="sizes of the kernel's buckets, in seconds"
    )
    arguments = parse(parser, SMOKE)
    lacks = why_not()
    if lacks is not None and not arguments.smoke:
        raise SystemExit(f"benchmarks/kernel_links.py needs root, `ip` and `tc`: {lacks}")
    bursts = arguments.bursts if lacks is None else []
    topologies = [one for one in TOPOLOGIES if not arguments.only or any(part in one.name for part in arguments.only)]
    results: list[dict[str, Any]] = []
    columns = ["in process", *(f"kernel, {burst * 1000:g} ms" for burst in bursts)]
    print(f"{'median (least, most), seconds':<32}" + "".join(f"{column:>24}" for column in columns) + f"{'ratio':>8}")
    for topology in topologies:
        result = compare(topology, arguments.steps, arguments.rounds, bursts, arguments.runs)
        results.append(result)
        cells = [_spread(seconds) for seconds in (result["in_process_seconds"], *result["kernel_seconds"].values())]
        ratio = "" if result["ratio"] is None else f"{result['ratio']:.3f}"
        print(f"{topology.name:<32}" + "".join(f"{cell:>24}" for cell in cells) + f"{ratio:>8}", flush=True)
    if lacks is not None:
        print(f"not shaped by the kernel, which needs root, `ip` and `tc`: {lacks}")
        return
    found = {
        f"burst of {burst * 1000:g} ms": _off(one["ratios"][at] for one in results) for at, burst in enumerate(bursts)
    }
    found["between them"] = _off(one["ratio"] for one in results)
    for name, off in found.items():
        print(f"{name}: off by {off:.2%} in the median")
    content = {"machine": machine(), "commit": commit(), "median_errors": found, "topologies": results}
    save(content, arguments.json)


def _off(ratios: Iterable[float]) -> float:
    return median(abs(ratio - 1) for ratio in ratios)


def _spread(seconds: Sequence[float]) -> str:
    return f"{median(seconds):.3f} ({min(seconds):.3f}, {max(seconds):.3f})"


if __name__ == "__main__":
    main()
