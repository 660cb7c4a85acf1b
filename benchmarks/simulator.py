"""What `simulate` predicts beside what `launch` measures, for one group at several bandwidths, latencies, sizes, ranks.

    python benchmarks/simulator.py [--json FILE] [--only NAME ...]

Each topology is calibrated, predicted, and launched as real processes over gRPC with links shaped in process. Bytes
are those on the wire in a round, by link and direction; a step is the median time between two steps of the first stage.
Stages share this machine's cores, so where compute decides, a prediction that knows of no sharing is too low: such
topologies are reported apart from those where links decide.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch

from hetero_pp.program.experiments.report import commit, machine
from hetero_pp.program.simulation.calibrate import measure_all
from hetero_pp.program.simulation.command import plan_of
from hetero_pp.program.simulation.prediction import Prediction, predict
from hetero_pp.program.yaml_file import ConfigFile

STEPS, ROUNDS = 8, 2
LINK_BOUND = 0.5
"""Share of the inner loop that links add, from which on a topology counts as link-bound."""

YAML = """\
name: measured
model: {{preset: micro, width: 128, heads: 4, feed_forward: 384}}
data: {{corpus: {corpus}, sequence_length: 128, validation_share: 0.2, validation_sequences: 8}}
inner: {{steps: {steps}}}
outer: {{rounds: {rounds}}}
links:
  hop: {{bandwidth: {bandwidth} Mbit/s, latency: {latency} ms}}
replicas:
  - {{name: home, kind: participants, stages: {stages}, batch_size: 16, micro_batches: 8, link: hop,
     boundary: {{rank: {rank}}}}}
"""


@dataclass(frozen=True)
class Topology:
    """One group."""

    bandwidth: float
    latency: float
    stages: int
    rank: str

    @property
    def name(self) -> str:
        return f"{self.bandwidth:g} Mbit/s, {self.latency:g} ms, {self.stages} stages, rank {self.rank}"


TOPOLOGIES = [
    Topology(2, 0, 2, "1/8"),
    Topology(2, 40, 4, "1/8"),
    Topology(2, 10, 3, "1/32"),
    Topology(2, 0, 2, "full"),
    Topology(10, 0, 2, "full"),
    Topology(10, 20, 4, "full"),
    Topology(10, 0, 3, "1/8"),
    Topology(10, 40, 4, "1/8"),
    Topology(10, 40, 2, "1/32"),
    Topology(50, 0, 2, "full"),
    Topology(50, 40, 4, "full"),
    Topology(50, 10, 3, "1/8"),
    Topology(100, 0, 2, "full"),
    Topology(100, 40, 4, "full"),
    Topology(100, 40, 4, "1/8"),
    Topology(100, 0, 3, "1/32"),
]


def compare(topology: Topology, folder: Path) -> dict[str, Any]:
    """Calibrate, predict, launch."""
    (folder / "corpus.txt").write_text(words())
    yaml = folder / "topology.yaml"
    changes = asdict(topology) | {"corpus": folder / "corpus.txt", "steps": STEPS, "rounds": ROUNDS}
    yaml.write_text(YAML.format(**changes))
    plan = plan_of(ConfigFile(yaml))
    costs = {member: cost.model_dump(mode="json") for member, cost in measure_all(plan)}
    prediction = predict(plan_of(ConfigFile(yaml, [f"simulate.measured={json.dumps(costs)}"])))
    command = [sys.executable, "-m", "hetero_pp", "launch", str(yaml), "--runs", str(folder / "runs")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if done.returncode != 0:
        raise SystemExit(f"{topology.name}: {done.stdout}{done.stderr}")
    events = [json.loads(line) for line in (folder / "runs" / "measured" / "metrics.jsonl").open()]
    [replica] = prediction.replicas
    return {
        "topology": topology.name,
        "link_bound": replica.exposed_communication >= LINK_BOUND,
        "predicted": {"step_seconds": replica.step_seconds, "bytes": _predicted_bytes(prediction)},
        "measured": {"step_seconds": measured_step(events), "bytes": _measured_bytes(events)},
    }


def words() -> str:
    """Text enough for any of these runs."""
    return " ".join(f"word{number % 97} stage{number % 13}" for number in range(40_000))


def measured_step(events: list[dict[str, Any]]) -> float:
    """The median over steps that follow one another in a round, as the first stage tells them."""
    times = defaultdict(list)
    for event in events:
        if event["event"] == "inner_step" and event["member"] == "home.0":
            times[event["round"]].append(event["time"])
    return median(later - sooner for own in times.values() for sooner, later in pairwise(sorted(own)))


def _measured_bytes(events: list[dict[str, Any]]) -> dict[str, float]:
    """Of the last round, on links between stages."""
    found: dict[str, float] = {}
    for event in events:
        if event["event"] == "link_use" and event["round"] == ROUNDS and "exchange" not in event["link"]:
            found[f"{event['link']} {event['direction']}"] = event["wire_bytes"]
    return dict(sorted(found.items()))


def _predicted_bytes(prediction: Prediction) -> dict[str, float]:
    found = {}
    for link in (link for replica in prediction.replicas for link in replica.links if "exchange" not in link.name):
        found[f"{link.name} forward"], found[f"{link.name} backward"] = link.forward_bytes, link.backward_bytes
    return dict(sorted(found.items()))


def errors(results: list[dict[str, Any]]) -> dict[str, float]:
    """Predicted over measured, less 1: the worst of bytes; the median of steps, where links decide and elsewhere."""
    bytes_off = [
        abs(result["predicted"]["bytes"][link] / measured - 1)
        for result in results
        for link, measured in result["measured"]["bytes"].items()
    ]
    found = {"bytes, worst": max(bytes_off)}
    for name, wanted in (("step, link-bound, median", True), ("step, others, median", False)):
        off = [abs(step_ratio(result) - 1) for result in results if result["link_bound"] == wanted]
        if off:
            found[name] = median(off)
    return found


def step_ratio(result: dict[str, Any]) -> float:
    """Predicted over measured."""
    return result["predicted"]["step_seconds"] / result["measured"]["step_seconds"]


def main() -> None:
    """Run and print; write JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", nargs="*", help="parts of names")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results = []
    print(f"{'topology':<44} {'predicted':>10} {'measured':>10} {'ratio':>7}  bound by")
    for topology in TOPOLOGIES:
        if arguments.only and not any(part in topology.name for part in arguments.only):
            continue
        with tempfile.TemporaryDirectory(prefix="hetero-pp-simulator-") as folder:
            result = compare(topology, Path(folder))
        results.append(result)
        steps = [result[kind]["step_seconds"] for kind in ("predicted", "measured")]
        bound = "links" if result["link_bound"] else "compute"
        print(
            f"{topology.name:<44} {steps[0]:>9.3f}s {steps[1]:>9.3f}s {step_ratio(result):>7.3f}  {bound}", flush=True
        )
    for name, value in errors(results).items():
        print(f"{name}: off by {value:.2%}")
    if arguments.json is not None:
        content = {"machine": machine(), "commit": commit(), "errors": errors(results), "topologies": results}
        arguments.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
