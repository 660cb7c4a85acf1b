"""Measure the goodput and the recovery of a run whose processes are killed or frozen and whose links are cut.

    python benchmarks/chaos.py [--json FILE] [--minutes 30] [--rate 125] [--seed 0] [--parts PART ...]

A datacenter replica, a group of two stages and a group of three train on one machine, as separate processes.

Except in `matrix` and `soak`, rounds have a fixed duration, and `rate` faults an hour come at random. They are equally
likely for each member and for the exchange. One third are kills. One third are freezes and cuts of 2 seconds. One third
are freezes and cuts of 10 seconds, which end a lease.

- `matrix`: inject each kind of fault into each role in each phase of a round, one fault per round. Every round waits
  for all replicas.
- `goodput`: measure tokens of included contributions per second under faults. Two baselines without faults are measured
  right before and right after. `share_of_untouched` compares with rounds in between that no fault touched, because a
  shared machine may change its speed by a factor of two. Losses are reported by kind of fault. `growth` reports memory
  and file descriptors.
- `all_or_nothing`: the same, but each death ends the run, which is then started again with `--resume`.
- `soak`: train without faults, with rounds as short as possible. Measure how the memory and the descriptors of each
  process grow in the second half of the time.

With --json, results are written as they come. Parts that the file contains are not measured again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from chaos_run import REPLICAS, ChaosRun, role_of, tokens_a_second, tokens_of
from command_line import earlier, parse, parser_of, save

from hetero_pp.research.experiments.outcomes import commit, machine

SMOKE = {"cells": 1, "parts": ["matrix"]}
PHASES = ("training", "contributing", "waiting", "evaluating", "saving")
MOST_SECONDS_A_CELL = 120.0
LASTS = (2.0, 10.0)
SAME_MINUTES = 200.0
SECONDS_AFTER = 15.0  # a fault may have effects for so long after it has ended
SECONDS_BETWEEN_TELLS = 120.0  # writing the figures takes CPU time from the run

Samples = dict[tuple[str, int], list[tuple[float, int, int]]]
"""Samples (seconds, bytes of memory, descriptors) by member and process id."""


# ---- one fault of every kind ----


def cells() -> list[tuple[str, str, str]]:
    """Return the cells of the matrix: (kind, target, phase)."""
    killed = itertools.product(["kill"], ["far.1", "dc", "exchange", "far.0", "far.2"], PHASES)
    frozen = itertools.product(["freeze"], ["far.1", "dc", "exchange"], PHASES)
    cut = itertools.product(["cut"], ["far.0-1", "dc-exchange", "far.1-exchange"], PHASES)
    rest = [("corrupt", "dc", "training"), ("corrupt", "far.1", "training"), ("fill", "exchange", "training")]
    found = [list(killed), list(frozen), list(cut), rest]
    return [one for row in itertools.zip_longest(*found) for one in row if one is not None]


def entry(cell: tuple[str, str, str], round_: int) -> str:
    """Return a cell as an entry of a fault file."""
    kind, whom, phase = cell
    lasts = "" if kind in ("kill", "corrupt") else ", lasts: 2 s"
    return f"{{{kind}: {whom}{lasts}, at: {{round: {round_}, phase: {phase}}}}}"


def matrix(folder: Path, arguments: argparse.Namespace, tell: Callable[[Any], None]) -> None:
    """Inject one fault per round, from the second on. If a round stalls, try the remaining cells in another run."""
    left, rows, runs = cells()[: arguments.cells], list[dict[str, Any]](), list[dict[str, Any]]()
    while left:
        run = ChaosRun(folder / f"matrix-{len(runs)}", ["exchange.quorum=1", f"outer.rounds={len(left) + 3}"])
        run.start([entry(cell, number) for number, cell in enumerate(left, start=2)])
        begun, done = time.monotonic(), 0
        while run.runs:
            run.wait(MOST_SECONDS_A_CELL, done + 1)
            if (now := max(run.closed(), default=0)) == done and run.runs:
                break
            done = now
        ended = not run.runs
        run.stop()
        injected = {one["round"]: one for one in run.events() if one.get("what") == "injected"}
        survived = {round_ for round_, one in run.records().items() if len(one["contributions"]) == len(REPLICAS)}
        tried = len(left) if ended else min(len(left), done)
        for number, (kind, whom, phase) in enumerate(left[:tried], start=2):
            role = "link" if "-" in whom else role_of(whom)
            own = {"kind": kind, "whom": whom, "role": role, "phase": phase, "was_done": number in injected}
            rows.append(own | {"survived": number in survived and number + 1 in survived})
        runs.append({"seconds": time.monotonic() - begun, "to_its_end": ended, "replay": run.replay()})
        left = left[tried:]
        tell({"cells": rows, "survived": sum(row["survived"] for row in rows), "runs": runs})


# ---- faults at random ----


def at_random(arguments: argparse.Namespace, seed: int) -> list[str]:
    """Return the entries of a fault file with random faults."""
    rate = f"rate: {arguments.rate / 3:g}/h"
    short, long = (f"of: [freeze, cut], lasts: {seconds:g} s" for seconds in LASTS)
    return [f"{{{rate}, {what}, seed: {3 * seed + i}}}" for i, what in enumerate(("of: [kill]", short, long))]


def timed(arguments: argparse.Namespace, *more: str) -> list[str]:
    """Return settings for rounds of a fixed duration."""
    return [f"inner={{seconds: {arguments.seconds:g}, learning_rate: 6e-3}}", *more]


def baseline(folder: Path, name: str, arguments: argparse.Namespace) -> float:
    """Return the tokens per second of a run without faults."""
    with ChaosRun(folder / name, timed(arguments)) as run:
        run.start()
        run.wait(MOST_SECONDS_A_CELL, 1)
        run.wait(60 * arguments.stretch)
    return tokens_a_second(run)


def goodput(folder: Path, arguments: argparse.Namespace, tell: Callable[[Any], None]) -> None:
    """Measure the goodput under faults, between two baselines without faults."""
    baseline(folder, "warm", arguments)  # a machine may be fast only in its first minute
    found: dict[str, Any] = {"baseline_goodput": [baseline(folder, "before", arguments)]}
    with ChaosRun(folder / "goodput", timed(arguments)) as run:
        _follow(run, found, arguments, tell)
    found |= {"replay": run.replay()}
    found["baseline_goodput"].append(baseline(folder, "after", arguments))
    tell(found | figures(run, found))


def _follow(run: ChaosRun, found: dict[str, Any], arguments: argparse.Namespace, tell: Callable[[Any], None]) -> None:
    """Run under faults, and write the figures now and then."""
    run.start(at_random(arguments, arguments.seed))
    run.wait(MOST_SECONDS_A_CELL, 1)
    begin, told = time.monotonic(), 0.0
    samples: Samples = defaultdict(list)
    for seconds in sample(run, 60 * arguments.minutes, samples):
        if seconds > told + SECONDS_BETWEEN_TELLS:
            told = seconds
            tell(found | figures(run, found) | {"minutes": seconds / 60, "growth": growth(samples)})
    found["ended_by_itself"] = None if run.runs else run.said()
    found |= {"minutes": (time.monotonic() - begin) / 60, "growth": growth(samples)}


def sample(run: ChaosRun, most: float, samples: Samples) -> Iterator[float]:
    """Record the size of every process every five seconds, for `most` seconds or until the run ends.

    Yields the seconds so far.
    """
    begin = time.monotonic()
    while (seconds := time.monotonic() - begin) < most and run.wait(5.0):
        for member, pid, memory, descriptors in run.sizes():
            samples[member, pid].append((seconds, memory, descriptors))
        yield seconds


def figures(run: ChaosRun, found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures of a run so far. A fault whose outcome is not known yet has `survived: null`."""
    events, records, closed = run.events(), run.records(), run.closed()
    own, usual = tokens_a_second(run), float(np.mean(found["baseline_goodput"]))
    hashes = defaultdict(set)
    for one in events:
        if one["event"] == "round_verified":
            hashes[one["round"]].add(one["parameters_sha256"])
    steps = defaultdict(list)
    for one in events:
        if one["event"] == "inner_step":
            steps[one["replica"]].append(one["time"])
    faults = [_fault(one, events, steps, records, closed) for one in events if one.get("what") == "injected"]
    between = untouched(spans(run, [one for one in events if one.get("what") == "injected"]))
    resumed = [one["resume_seconds"] for one in faults if one["resume_seconds"] is not None]
    counted = sum(len(record["contributions"]) for record in records.values())
    return {
        "goodput": own,
        "fault_free_share": own / usual if usual else None,
        "untouched": between,
        "share_of_untouched": None if between["lost"] is None else 1 - between["lost"],
        "rounds": len(records),
        "rounds_are_consecutive": sorted(records) == list(range(1, len(records) + 1)),
        "hashes_are_equal": all(len(one) == 1 for one in hashes.values()),
        "participation": counted / (len(REPLICAS) * len(records)) if records else None,
        "resume_seconds": {"median": median(resumed), "worst": max(resumed), "of": len(resumed)} if resumed else None,
        "taken_by_faults": taken(faults, max(closed.values()) - min(closed.values())) if closed else None,
        "faults": faults,
    }


def taken(faults: Sequence[Mapping[str, Any]], seconds: float) -> float:
    """Return the share of the replicas' time in which one was frozen, cut from a neighbour, or dead.

    Replicas train on without the exchange, so its faults take nothing.
    """
    lasted = [re.search(r"for (\d+) s", one["whom"]) for one in faults if "exchange" not in one["whom"]]
    dead = [one["resume_seconds"] or 0.0 for one in faults if one["kind"] == "kill" and one["role"] != "exchange"]
    return (sum(float(found[1]) for found in lasted if found) + sum(dead)) / (len(REPLICAS) * max(seconds, 1.0))


@dataclass(frozen=True)
class RoundSpan:
    """A round, from the close of the round before to its own close, and the faults that may have cost it tokens."""

    begin: float
    end: float
    tokens: int
    faults: Sequence[str]
    """Causes of faults that were injected in the round, or had just ended."""

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / (self.end - self.begin)


def spans(run: ChaosRun, injected: Sequence[Mapping[str, Any]]) -> list[RoundSpan]:
    """Return the spans of all rounds but the first."""
    closed, found = run.closed(), []
    over = [(one["time"], one["time"] + SECONDS_AFTER + lasts(one["cause"]), one["cause"]) for one in injected]
    for round_, record in sorted(run.records().items()):
        if round_ - 1 in closed:
            begin, end = closed[round_ - 1], closed[round_]
            faults = [cause for since, until, cause in over if since < end and until > begin]
            found.append(RoundSpan(begin, end, tokens_of(record), faults))
    return found


def untouched(rounds: Sequence[RoundSpan]) -> dict[str, Any]:
    """Return the goodput of rounds that no fault touched, and the share of tokens that faults of each kind have cost.

    Each round is compared with untouched rounds of the same minutes. If several faults touched a round, its loss is
    divided equally among them.
    """
    whole = [one for one in rounds if not one.faults]
    if not whole:
        return {"goodput": None, "rounds": 0, "lost": None, "lost_by_kind": {}}
    expected, lost, by_kind = 0.0, 0.0, defaultdict[str, float](float)
    for one in rounds:
        beside = [other.rate for other in whole if abs(other.begin - one.begin) < SAME_MINUTES]
        usual = float(np.mean(beside or [other.rate for other in whole])) * (one.end - one.begin)
        expected, lost = expected + usual, lost + usual - one.tokens
        for cause in one.faults:
            by_kind[kind_of(cause)] += (usual - one.tokens) / len(one.faults)
    seconds = sum(one.end - one.begin for one in whole)
    return {
        "goodput": sum(one.tokens for one in whole) / seconds,
        "rounds": len(whole),
        "lost": lost / expected,
        "lost_by_kind": {kind: tokens / expected for kind, tokens in sorted(by_kind.items())},
    }


def kind_of(cause: str) -> str:
    """Return the kind of a fault and its duration: "freeze of dc for 10 s (training)" gives "freeze, 10 s"."""
    kind, seconds = cause.split()[0], lasts(cause)
    return f"{kind}, {seconds:g} s" if seconds else kind


def lasts(cause: str) -> float:
    """Return the seconds that a fault lasts, from a cause such as "freeze of dc for 10 s (training)"."""
    found = re.search(r" for (\d+(?:\.\d+)?) s\b", cause)
    return float(found[1]) if found else 0.0


def _fault(
    told: Mapping[str, Any],
    events: Sequence[Mapping[str, Any]],
    steps: Mapping[str, Sequence[float]],
    records: Mapping[int, Any],
    closed: Mapping[int, float],
) -> dict[str, Any]:
    """Return one fault, and what became of its target."""
    slot, when, cause = told["slot"], told["time"], told["cause"]
    replica, kind = slot.partition(".")[0], cause.split()[0]
    later = [records[round_] for round_, time_ in closed.items() if time_ > when and round_ in records]
    counted = [one for one in later if slot == "exchange" or replica in [c["replica"] for c in one["contributions"]]]
    again = None
    if kind == "kill" and slot != "exchange":
        joined = [one["time"] for one in events if one["event"] == "joined" and one["member"] == slot]
        back = min((time_ for time_ in joined if time_ > when), default=None)
        again = None if back is None else min((time_ - when for time_ in steps[replica] if time_ > back), default=None)
    elif kind == "kill":
        again = min((time_ - when for time_ in closed.values() if time_ > when), default=None)
    return {
        "kind": kind,
        "whom": cause,
        "role": role_of(slot),
        "phase": cause.rpartition("(")[2].rstrip(")"),
        "survived": True if counted else None if len(later) < len(REPLICAS) else False,
        "resume_seconds": again,
    }


def without_faults(folder: Path, arguments: argparse.Namespace, tell: Callable[[Any], None]) -> None:
    """Train many short rounds without faults."""
    samples: Samples = defaultdict(list)
    with ChaosRun(folder / "soak", ["inner.steps=1"]) as run:
        run.start()
        run.wait(MOST_SECONDS_A_CELL, 1)
        half = 30 * arguments.minutes
        for _ in sample(run, 2 * half, samples):
            pass
        ended, rounds = not run.runs, run.closed()
    late = sum(time_ > max(rounds.values()) - half for time_ in rounds.values())
    found = {"minutes": arguments.minutes, "rounds": len(rounds), "rounds_of_second_half": late}
    tell(found | {"ended_by_itself": run.said() if ended else None, "growth": growth(samples, half)})


def growth(samples: Samples, first: float = 60.0) -> list[dict[str, Any]]:
    """Return how memory and descriptors of each process grow per hour, with standard errors.

    Processes that lived for less than two minutes after their `first` seconds are left out.
    """
    rows = []
    for (member, _), taken in samples.items():
        kept = np.array([one for one in taken if one[0] > taken[0][0] + first])
        if len(kept) > 2 and kept[-1, 0] - kept[0, 0] > 120:
            row: dict[str, Any] = {"member": member, "seconds": float(kept[-1, 0] - kept[0, 0])}
            row["megabytes_an_hour"] = slope(kept[:, 0] / 3600, kept[:, 1] / 1e6)
            row["descriptors_an_hour"] = slope(kept[:, 0] / 3600, kept[:, 2])
            rows.append(row | {"megabytes": float(kept[-1, 1] / 1e6), "descriptors": int(kept[-1, 2])})
    return rows


def slope(x: Any, y: Any) -> list[float]:
    """Return the slope of a line fitted to points, with its standard error."""
    line = np.polyfit(x, y, 1)
    left, spread = y - np.polyval(line, x), x - x.mean()
    return [float(line[0]), float(np.sqrt((left @ left) / (len(x) - 2) / (spread @ spread)))]


def all_or_nothing(folder: Path, arguments: argparse.Namespace, tell: Callable[[Any], None]) -> None:
    """Measure a run that ends with each death and is resumed at once.

    A fault costs all members the work that was not saved.
    """
    usual = baseline(folder, "before-all", arguments)
    run = ChaosRun(folder / "all", timed(arguments, "restarts.count=0", "exchange.quorum=1"))
    begin, starts, since = time.monotonic(), 0, None
    while (seconds := time.monotonic() - begin) < 60 * arguments.minutes:
        run.start(at_random(arguments, arguments.seed + 1000 + starts), resume=starts > 0)
        starts += 1
        run.wait(60 * arguments.minutes - seconds)
        since = since or next(iter(run.closed().values()), None)
    run.stop()
    own = tokens_a_second(run, since, time.time())
    found = {"goodput": own, "baseline_goodput": usual, "fault_free_share": own / usual, "starts": starts}
    tell(found | {"minutes": (time.monotonic() - begin) / 60, "rounds": len(run.records()), "replay": run.replay()})


PARTS: dict[str, Callable[[Path, argparse.Namespace, Callable[[Any], None]], None]] = {
    "matrix": matrix,
    "goodput": goodput,
    "all_or_nothing": all_or_nothing,
    "soak": without_faults,
}


def show(name: str, found: Mapping[str, Any]) -> None:
    """Print a few lines for a part."""
    if name == "matrix":
        lost = [row for row in found["cells"] if not row["survived"]]
        print(f"matrix: {found['survived']} of {len(found['cells'])} survived", *lost, sep="\n  ")
    else:
        kept = {key: value for key, value in found.items() if key not in ("faults", "growth")}
        print(f"{name}: {json.dumps(kept)}")
        for row in found.get("growth", []) if name == "soak" else ():
            print(f"  {row['member']}: {row['megabytes']:.0f} MB, {row['megabytes_an_hour'][0]:+.2f} MB an hour")


def main() -> None:
    """Measure the missing parts, and print."""
    parser = parser_of(__doc__)
    parser.add_argument("--minutes", type=float, default=30.0, help="minutes under faults")
    parser.add_argument("--stretch", type=float, default=2.0, help="minutes of each baseline without faults")
    parser.add_argument("--rate", type=float, default=125.0, help="faults per hour")
    parser.add_argument("--seconds", type=float, default=10.0, help="seconds of a round's inner loop")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cells", type=int, default=1000, help="largest number of cells of the matrix")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART", help=", ".join(PARTS))
    arguments = parse(parser, SMOKE)
    found = earlier(arguments.json) | {"machine": machine(), "rate": arguments.rate, "seed": arguments.seed}
    with tempfile.TemporaryDirectory(prefix="hetero-pp-chaos-") as folder:
        for name in arguments.parts:
            if found.get(name, {}).get("is_whole"):
                continue

            def tell(result: Any, name: str = name) -> None:
                found[name] = result | {"commit": commit()}
                save(found, arguments.json)

            PARTS[name](Path(folder), arguments, tell)
            tell(found[name] | {"is_whole": True})
            show(name, found[name])


if __name__ == "__main__":
    main()
