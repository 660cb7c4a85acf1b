"""Measure how long two replicas behind slow lines wait for the exchange, with overlapping rounds and without.

    python benchmarks/overlap.py [--bandwidth "1 Mbit/s"] [--rounds 30] [--json FILE]

Each run uses processes and gRPC, and its links to the exchange are shaped. A member is blocked while it only waits for
the exchange: to upload its contribution, for the round record, or for other contributions. The result is the blocked
share of its time. No round overlaps with the last one, so the share is given with and without it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from command_line import origin, parse, parser_of, save
from launched import events_of, run_quietly, summary_of

YAML = """\
name: overlap
seed: 1
model: {preset: micro, width: 128, heads: 4, feed_forward: 384}
data: {corpus: docstrings, sequence_length: 128, validation_sequences: 16}
inner: {steps: 20, learning_rate: 6e-3, warmup_steps: 10}
outer: {rounds: 30, compression: {density: 1/8, value_bits: 2}}
links: {slow: {bandwidth: 1 Mbit/s, latency: 20 ms}}
replicas:
  - {name: one, kind: datacenter, batch_size: 8, uplink: slow}
  - {name: two, kind: datacenter, batch_size: 8, uplink: slow}
"""
PARTS = ("compute_seconds", "wait_seconds", "outer_seconds", "evaluation_seconds")
SMOKE = {"rounds": 2, "bandwidth": "10 Mbit/s", "steps": 1}


def measure(folder: Path, overlap: int, rounds: int, steps: int, bandwidth: str) -> dict[str, Any]:
    yaml = folder / "run.yaml"
    yaml.write_text(YAML)
    changes = [f"outer.overlap={overlap}", f"outer.rounds={rounds}", f"inner.steps={steps}"]
    run = run_quietly(yaml, [*changes, f"links.slow.bandwidth={bandwidth}"], folder / f"overlap-{overlap}")
    told, summary = [one for one in events_of(run) if one["event"] == "member_round"], summary_of(run)
    return {
        "overlap": overlap,
        "blocked": _blocked(told),
        "blocked_before_the_last": _blocked([one for one in told if one["round"] < rounds]),
        "tokens_per_second": summary["tokens_per_second"],
        "loss": summary["validation_loss"][-1],
    }


def _blocked(told: Sequence[Mapping[str, Any]]) -> float:
    """Return the share of the rounds' time in which members are blocked."""
    return sum(one["blocked_seconds"] for one in told) / sum(one[part] for one in told for part in PARTS)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument(
        "--bandwidth", default="1 Mbit/s", help="bandwidth of a member's link to the exchange, in each direction"
    )
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--steps", type=int, default=20)
    arguments = parse(parser, SMOKE)
    with tempfile.TemporaryDirectory() as folder:
        own = (arguments.rounds, arguments.steps, arguments.bandwidth)
        rows = [measure(Path(folder), overlap, *own) for overlap in (0, 1)]
    print(f"{'overlap':<9}{'blocked':>9}{'before the last':>17}{'tokens/s':>10}{'loss':>8}")
    for row in rows:
        shares = f"{row['blocked']:>9.2%}{row['blocked_before_the_last']:>17.2%}"
        print(f"{row['overlap']:<9}{shares}{row['tokens_per_second']:>10,.0f}{row['loss']:>8.3f}")
    speed = rows[1]["tokens_per_second"] / rows[0]["tokens_per_second"]
    print(f"tokens a second with overlap over without: {speed:.2f}")
    save(origin() | {"rounds": own[0], "bandwidth": own[2], "rows": rows}, arguments.json)


if __name__ == "__main__":
    main()
