"""Predict, and rehearse, what outer rounds cost if a round has the whole model or one of four fragments.

    python benchmarks/fragments.py [--rehearse CONFIG] [--period 48] [--json FILE]

Models are those of configs/paper, on RTX 4090 behind home lines of 20 Mbit/s up and 100 Mbit/s down. A layer is
synchronised every 48 or 8 inner steps: with four fragments, a round has a quarter of them, and of the sequences of an
evaluation. Coefficients between stages have 4 bits. The share of a row is the tokens per second over those with outer
rounds that take no time and no bytes. FILE keeps its rehearsals of other rows, which have `overlap: 1`. They need
their processors promptly (benchmarks/rehearse.py).
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from itertools import product
from pathlib import Path
from typing import Any

from command_line import earlier, origin, parse, parser_of, save

from hetero_pp.config.overrides import Given
from hetero_pp.config.spec import RunSpec
from hetero_pp.config.yaml_file import ConfigFile, spec_of
from hetero_pp.program.launch.command import Invocation, run_topology
from hetero_pp.program.rehearse import AsRehearsal
from hetero_pp.simulator.prediction import predict
from hetero_pp.simulator.rounds import fleets_of, time_period
from hetero_pp.simulator.traffic import BoundaryCrossing

CONFIGS = Path(__file__).parents[1] / "configs" / "paper"
NAMES, PERIODS = ("512m", "1b"), (48, 8)
NOTHING = BoundaryCrossing(0.0, 0.0, 0.0)


def changes(name: str, fragments: int, overlap: int, period: int) -> list[Given]:
    """Return the keys that a row sets. With overlap, compressed groups train a free embedding."""
    boundary = {"embedding": "free", "bits": 4}
    groups = [
        f"replicas.home{one}.boundary.{key}={value}"
        for one in range(4 if name == "512m" else 2)
        for key, value in boundary.items()
    ]
    return [
        "lines.home={up: 20 Mbit/s, down: 100 Mbit/s, latency: 15 ms}",
        "simulate.machine=rtx-4090",
        f"outer.fragments={fragments}",
        f"outer.overlap={overlap}",
        f"inner.steps={period // fragments}",
        f"data.validation_sequences={64 // fragments}",
        *groups,
    ]


def free_seconds(spec: RunSpec) -> float:
    """Return the seconds of a round whose outer round takes no time and no bytes."""

    def free(fleet: Any) -> Any:
        none = [0.0] * len(fleet.members)
        return replace(fleet, up=[NOTHING] * len(none), down=[NOTHING] * len(none), contribute=none, apply=none)

    return time_period(spec, [[free(fleet) for fleet in fleets_of(spec)]], True).round_seconds


def row(name: str, fragments: int, overlap: int, period: int) -> dict[str, Any]:
    """Return the prediction of one row."""
    given = changes(name, fragments, overlap, period)
    spec = spec_of(ConfigFile(CONFIGS / f"{name}.yaml", given))
    found, free = predict(spec), free_seconds(spec)
    return {
        "config": name,
        "fragments": fragments,
        "overlap": overlap,
        "steps": period // fragments,
        "round_seconds": found.round_seconds,
        "longest_round_seconds": max(one.round_seconds for one in found.fragments),
        "free_round_seconds": free,
        "share_of_free_outer_rounds": free / found.round_seconds,
        "largest_sent_bytes_of_a_replica": max(one.sent_bytes for one in found.fragments),
    }


def rehearse(name: str, fragments: int, period: int) -> dict[str, Any]:
    """Rehearse a row with overlap, one timed round of each fragment, and return it with what was measured."""
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(StringIO()):
        path = Path(folder) / "found.json"
        given = changes(name, fragments, 1, period)
        mode = AsRehearsal(3, period // fragments, path)
        run_topology(CONFIGS / f"{name}.yaml", given, Path(folder) / "runs", False, invocation=Invocation(mode=mode))
        both = json.loads(path.read_text())
    expected, measured = row(name, fragments, 1, period), both["measured"]["round_seconds"]
    return {
        **expected,
        "measured_round_seconds": measured,
        "measured_share_of_free_outer_rounds": expected["free_round_seconds"] / measured,
        "measured": both["measured"],
        "processors_busy": both["busy"],
        "load": [load, os.getloadavg()[0]],
        "date": time.strftime("%Y-%m-%d %H:%M"),
    }


def main() -> None:
    parser = parser_of(__doc__ or "")
    parser.add_argument("--rehearse", choices=NAMES)
    parser.add_argument("--period", type=int, choices=PERIODS, default=PERIODS[0], help="inner steps of a rehearsal")
    parser.set_defaults(names=NAMES)
    arguments = parse(parser, {"names": NAMES[1:]})
    rows = [row(*one) for one in product(arguments.names, (1, 4), (0, 1), PERIODS)]
    for one in rows:
        told = f"{one['config']}, {one['fragments']} fragments, overlap {one['overlap']}, {one['steps']} steps"
        print(f"{told}: a round takes {one['round_seconds']:.1f} s, {one['share_of_free_outer_rounds']:.1%} of free")
    rehearsed = earlier(arguments.json).get("rehearsed", {})
    if arguments.rehearse:
        for fragments in (1, 4):
            key = f"{arguments.rehearse}, {fragments} fragments, a period of {arguments.period} steps"
            rehearsed[key] = found = rehearse(arguments.rehearse, fragments, arguments.period)
            print(f"{key}: measured {found['measured_share_of_free_outer_rounds']:.1%} of free outer rounds")
            save({**origin(), "predicted": rows, "rehearsed": rehearsed}, arguments.json)
    save({**origin(), "predicted": rows, "rehearsed": rehearsed}, arguments.json)


if __name__ == "__main__":
    main()
