"""Compare predictions of `simulate` with measurements of `launch`, for many kinds of links or lines and the quickstart.

    python benchmarks/simulator.py [--json FILE] [--only NAME ...]

Each topology is calibrated, predicted, and launched as processes over gRPC, with links shaped in process. Bytes are
those on the wire in a round, by link and direction. A step is the median time between two steps of the first stage.

Stages share this machine's cores. So where compute decides, a prediction that does not know of the sharing is too low.
These topologies are reported apart from those where links decide.

Bytes of the quickstart include the links to the exchange.
"""

from __future__ import annotations

import json
import tempfile
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from command_line import origin, parse, parser_of, save
from launched import events_of, run_quietly, words

from hetero_pp.config.lines import exchange_link_name
from hetero_pp.config.yaml_file import ConfigFile, spec_of
from hetero_pp.program.calibrate import measure_all
from hetero_pp.simulator.prediction import Prediction, predict

STEPS, ROUNDS = 8, 2
SMOKE = {
    "only": ["50 Mbit/s, 0 ms, 2 stages", "100 Mbit/s, 0 ms, 3 stages, rank full, lines", "quickstart"],
    "steps": 2,
    "rounds": 1,
    "quickstart": ["outer.rounds=1", "inner.steps=2", "replicas.1.stages.count=2", "data.sequence_length=32"],
}
QUICKSTART = Path(__file__).parents[1] / "configs" / "quickstart.yaml"
LINK_BOUND = 0.5
"""Share of the inner loop that links add, from which a topology counts as link-bound."""

YAML = """\
name: measured
model: {{preset: micro, width: 128, heads: 4, feed_forward: 384}}
data: {{corpus: {corpus}, sequence_length: 128, validation_share: 0.2, validation_sequences: 8}}
inner: {{steps: {steps}}}
outer: {{rounds: {rounds}}}
{kinds}:
  hop: {{bandwidth: {bandwidth} Mbit/s, latency: {latency} ms}}
replicas:
  - {{name: home, kind: participants, stages: {stages}, batch_size: 16, micro_batches: 8, {kind}: hop,
     boundary: {{rank: {rank}}}}}
"""


@dataclass(frozen=True)
class Topology:
    """One group."""

    bandwidth: float
    latency: float
    stages: int
    rank: str
    kind: str = "link"
    """Whether each hop's link or each machine's line has the bandwidth and the latency."""

    @property
    def name(self) -> str:
        name = f"{self.bandwidth:g} Mbit/s, {self.latency:g} ms, {self.stages} stages, rank {self.rank}"
        return name if self.kind == "link" else f"{name}, {self.kind}s"


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
    Topology(2, 10, 3, "1/8", "line"),
    Topology(10, 0, 3, "full", "line"),
    Topology(10, 20, 4, "full", "line"),
    Topology(20, 0, 4, "1/8", "line"),
    Topology(100, 0, 3, "full", "line"),
]


def compare(topology: Topology, steps: int, rounds: int, folder: Path) -> dict[str, Any]:
    """Calibrate, predict and launch one group."""
    (folder / "corpus.txt").write_text(words())
    yaml = folder / "topology.yaml"
    changes = asdict(topology) | {"corpus": folder / "corpus.txt", "steps": steps, "rounds": rounds}
    changes["kinds"] = f"{topology.kind}s"
    yaml.write_text(YAML.format(**changes))
    return measured_and_predicted(yaml, [], folder)


def measured_and_predicted(yaml: Path, overrides: list[str], folder: Path) -> dict[str, Any]:
    """Calibrate, predict and launch a run."""
    prediction = calibrated_prediction(yaml, overrides)
    events = events_of(run_quietly(yaml, overrides, folder / "runs"))
    [replica] = [one for one in prediction.replicas if one.name == "home"]
    measured = _measured_bytes(events)
    predicted = {link: size for link, size in _predicted_bytes(prediction).items() if link in measured}
    return {
        "link_bound": replica.exposed_communication >= LINK_BOUND,
        "predicted": {"step_seconds": replica.step_seconds, "bytes": predicted},
        "measured": {"step_seconds": measured_step(events), "bytes": measured},
    }


def calibrated_prediction(yaml: Path, overrides: list[str]) -> Prediction:
    """Predict a run from the costs of its members on this machine, measured now."""
    costs = {member: cost.model_dump(mode="json") for member, cost in measure_all(spec_of(ConfigFile(yaml, overrides)))}
    return predict(spec_of(ConfigFile(yaml, [*overrides, f"simulate.measured={json.dumps(costs)}"])))


def measured_step(events: list[dict[str, Any]]) -> float:
    """Return the median time between consecutive steps of a round, as reported by the first stage."""
    times = defaultdict(list)
    for event in events:
        if event["event"] == "inner_step" and event["member"] == "home.0":
            times[event["round"]].append(event["time"])
    return median(later - sooner for own in times.values() for sooner, later in pairwise(sorted(own)))


def _measured_bytes(events: list[dict[str, Any]]) -> dict[str, float]:
    """Return the bytes of the last round by link and direction."""
    uses = [event for event in events if event["event"] == "link_use"]
    last = max(use["round"] for use in uses)
    found = {f"{use['link']} {use['direction']}": use["wire_bytes"] for use in uses if use["round"] == last}
    return dict(sorted(found.items()))


def _predicted_bytes(prediction: Prediction) -> dict[str, float]:
    found = {}
    for link in (link for replica in prediction.replicas for link in replica.links):
        found[f"{link.name} forward"], found[f"{link.name} backward"] = link.forward_bytes, link.backward_bytes
    return dict(sorted(found.items()))


def errors(results: list[dict[str, Any]]) -> dict[str, float]:
    """Return predicted over measured, less 1: the worst of bytes, and the median of steps.

    Steps of link-bound topologies are separate from others. Messages to the exchange have lengths that depend on their
    values. Those on stage links are known in advance.
    """
    found: dict[str, float] = {}
    for kind, is_exchange in (("stage links", False), ("links to the exchange", True)):
        off = [
            abs(result["predicted"]["bytes"][link] - measured) / max(measured, 1)
            for result in results
            for link, measured in result["measured"]["bytes"].items()
            if (exchange_link_name("") in link) == is_exchange
        ]
        found |= {f"bytes of {kind}, worst": max(off)} if off else {}
    for name, wanted in (("step, link-bound, median", True), ("step, others, median", False)):
        off = [abs(step_ratio(result) - 1) for result in results if result["link_bound"] == wanted]
        if off:
            found[name] = median(off)
    return found


def step_ratio(result: dict[str, Any]) -> float:
    """Return predicted over measured time of a step."""
    return result["predicted"]["step_seconds"] / result["measured"]["step_seconds"]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--only", nargs="*", help="run topologies whose names contain one of these")
    parser.add_argument("--steps", type=int, default=STEPS, help="inner steps of a round")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--quickstart", nargs="*", default=[f"outer.rounds={ROUNDS}"], metavar="KEY=VALUE")
    arguments = parse(parser, SMOKE)
    torch.set_num_threads(1)
    results = []
    print(f"{'topology':<44} {'predicted':>10} {'measured':>10} {'ratio':>7}  bound by")
    parts: dict[str, Callable[[Path], dict[str, Any]]] = {
        one.name: partial(compare, one, arguments.steps, arguments.rounds) for one in TOPOLOGIES
    }
    parts["quickstart"] = partial(measured_and_predicted, QUICKSTART, arguments.quickstart)
    for name, part in parts.items():
        if arguments.only and not any(wanted in name for wanted in arguments.only):
            continue
        with tempfile.TemporaryDirectory(prefix="hetero-pp-simulator-") as folder:
            result = {"topology": name} | part(Path(folder))
        results.append(result)
        steps = [result[kind]["step_seconds"] for kind in ("predicted", "measured")]
        bound = "links" if result["link_bound"] else "compute"
        print(f"{name:<44} {steps[0]:>9.3f}s {steps[1]:>9.3f}s {step_ratio(result):>7.3f}  {bound}", flush=True)
    for error, value in errors(results).items():
        print(f"{error}: off by {value:.2%}")
    save(origin() | {"errors": errors(results), "topologies": results}, arguments.json)


if __name__ == "__main__":
    main()
