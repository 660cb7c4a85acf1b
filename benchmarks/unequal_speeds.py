"""Compare rounds of a fixed number of steps with rounds of a fixed time, for two replicas of unequal speed.

    python benchmarks/unequal_speeds.py [--json FILE]

The fast replica is a datacenter. The slow one is a group of two stages. Their link is shaped in both directions, so
that a step takes ten times as long. The datacenter's steps are timed first. All messages of a group's step, one after
the other, then take about nine of them. Boundaries are not compressed, and both replicas read as many tokens per step.
All runs are in process, on one core.

Rounds of time are run first, with equal weights and with weights by tokens. Rounds of steps follow. They have as many
steps as the slow replica took in the first runs, so that they take as long. Shares are of the time from the first inner
loop to the last outer round. A replica is in training during its own inner steps; the rest is outer rounds, evaluation
and waiting. The loss is that of the synced model: at the end, and at the time when the first run of the repeat ended.
With --json, rows that the file contains are not run again.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
from command_line import earlier, origin, parse, parser_of, save
from launched import events_of, run_quietly, summary_of

from hetero_pp.config.spec import RunSpec
from hetero_pp.config.topology import ParticipantsReplica
from hetero_pp.config.yaml_file import ConfigFile, spec_of
from hetero_pp.simulator.traffic import stage_link_loads

RATIO = 10
SMOKE = {"seconds": 1.0, "rounds": 1, "repeats": 1, "ways": ["time", "steps"]}
WAYS = ("time", "time, weights by tokens", "steps")

YAML = """\
name: unequal
data: {corpus: docstrings, sequence_length: 64, validation_sequences: 4}
inner: {learning_rate: 6e-3}
outer: {rounds: 2}
links: {slow: {}}
replicas:
  - {name: fast, kind: datacenter, batch_size: 8}
  - {name: slow, kind: participants, stages: 2, batch_size: 8, micro_batches: 1, link: slow, boundary: {dtype: fp32}}
"""


def run(folder: Path, changes: Sequence[str]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Train a run, and return its events and its summary."""
    yaml = folder / "run.yaml"
    yaml.write_text(YAML)
    done = run_quietly(yaml, changes, folder / "runs", in_process=True)
    return events_of(done), summary_of(done)


def slow_link(folder: Path) -> str:
    """Return the bandwidth, as a `--set` value, with which a step of the group takes RATIO steps of the datacenter."""
    events, _ = run(folder, ["inner.steps=10", "outer.rounds=2", "links.slow={bandwidth: 1 Gbit/s}"])
    told = [event for event in events if event["event"] == "member_round" and event["round"] == 2]
    a_step = {event["member"]: event["compute_seconds"] / 10 for event in told}
    (folder / "run.yaml").write_text(YAML)
    spec: RunSpec = spec_of(ConfigFile(folder / "run.yaml"))
    [group] = [one for one in spec.config.replicas if isinstance(one, ParticipantsReplica)]
    n_bytes = sum(load.step for load in stage_link_loads(spec, group).values())
    seconds = RATIO * a_step["fast"] - a_step["slow.0"] - a_step["slow.1"]
    return f"links.slow={{bandwidth: {8 * n_bytes / seconds:.0f} bit/s}}"


def measure(folder: Path, link: str, way: str, repeat: int, length: float, rounds: int) -> dict[str, Any]:
    """Train one run. `length` is in seconds or in steps."""
    inner = f"{{steps: {length:g}, warmup_steps: {length:g}" if way == "steps" else f"{{seconds: {length:g}"
    changes = [link, f"inner={inner}, learning_rate: 6e-3}}", f"outer.rounds={rounds}", f"seed={repeat}"]
    if "tokens" in way:
        changes.append("outer.weights=tokens")
    events, summary = run(folder, changes)
    steps = {replica["name"]: replica["steps"] for replica in summary["replicas"]}
    return {
        "way": way,
        "repeat": repeat,
        "length": length,
        "steps": steps,
        "ratio": sum(steps["fast"]) / sum(steps["slow"]),
        "in_training": {"fast": _in_training(events, "fast"), "slow": _in_training(events, "slow.0")},
        "seconds": summary["training_seconds"],
        "tokens": {replica["name"]: replica["tokens"] for replica in summary["replicas"]},
        "loss": summary["validation_loss"],
        "loss_after": list(_loss_after(events, summary)),
    }


def _in_training(events: Sequence[Mapping[str, Any]], member: str) -> float:
    """Return the share of a member's rounds in inner loops. Waiting for neighbours is part of a step."""
    told = [event for event in events if event["event"] == "member_round" and event["member"] == member]
    parts = [
        (one["compute_seconds"] + one["wait_seconds"], one["outer_seconds"], one["evaluation_seconds"]) for one in told
    ]
    return sum(own[0] for own in parts) / sum(map(sum, parts))


def _loss_after(events: Sequence[Mapping[str, Any]], summary: Mapping[str, Any]) -> Iterator[tuple[float, float]]:
    """Yield (seconds since the first inner step, mean validation loss) of every round."""
    began = min(event["time"] for event in events if event["event"] == "inner_step")
    for round_, loss in enumerate(summary["validation_loss"], start=1):
        told = (one["time"] for one in events if one["event"] == "evaluation" and one["round"] == round_)
        yield max(told) - began, loss


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print a line for each way: medians over repeats."""
    print(f"{'rounds of':<25}{'ratio':>7}{'fast trains':>13}{'slow trains':>13}{'seconds':>9}{'loss':>8}{'by then':>9}")
    for way in WAYS:
        own = [row for row in rows if row["way"] == way]
        if own:
            fast, slow = (median(row["in_training"][name] for row in own) for name in ("fast", "slow"))
            ratio, seconds = median(row["ratio"] for row in own), median(row["seconds"] for row in own)
            loss, then = median(row["loss"][-1] for row in own), median(_loss_by_then(row, rows) for row in own)
            print(f"{way:<25}{ratio:>7.1f}{fast:>13.1%}{slow:>13.1%}{seconds:>9.1f}{loss:>8.3f}{then:>9.3f}")


def _loss_by_then(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> float:
    """Return the loss when the first run of the repeat ended.

    It is that of the last round closed by then, or of the first round if there is none.
    """
    end = min(one["loss_after"][-1][0] for one in rows if one["repeat"] == row["repeat"])
    over = [loss for seconds, loss in row["loss_after"] if seconds <= end]
    return over[-1] if over else row["loss_after"][0][1]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--seconds", type=float, default=20.0, help="seconds of a round's inner loop")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), metavar="WAY", help=", ".join(WAYS))
    arguments = parse(parser, SMOKE)
    torch.set_num_threads(1)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    found = earlier(arguments.json) or origin() | {"link": None, "rows": []}
    with tempfile.TemporaryDirectory(prefix="hetero-pp-unequal-") as name:
        found["link"] = found["link"] or slow_link(Path(name))
        print(found["link"], flush=True)
        for repeat in range(arguments.repeats):
            for way in arguments.ways:
                if any((row["way"], row["repeat"]) == (way, repeat) for row in found["rows"]):
                    continue
                length = arguments.seconds
                if way == "steps":
                    timed = next(row for row in found["rows"] if (row["way"], row["repeat"]) == ("time", repeat))
                    length = max(1, round(mean(timed["steps"]["slow"])))
                found["rows"].append(measure(Path(name), found["link"], way, repeat, length, arguments.rounds))
                save(found, arguments.json)
                show(found["rows"][-1:])
    print("\nmedians over repeats")
    show(found["rows"])


if __name__ == "__main__":
    main()
