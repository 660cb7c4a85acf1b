"""Rehearse topologies and the papers' claims, and compare each with what `simulate` predicts.

    python benchmarks/rehearse.py [NAME ...] [--json FILE] [--chart FILE] [--draw]

`rehearse.yaml` lists them. Without names all are rehearsed, one at a time. Results of others that FILE already has stay.
Members share two processes, because a rehearsal needs its processors promptly. A thread that sleeps beside each
rehearsal says how late this machine wakes its processes: that is the load of other work.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import yaml
from command_line import parse, save

from hetero_pp.program.launch.command import run_topology
from hetero_pp.program.launch.together import launch_rehearsal
from hetero_pp.program.rehearse.command import AsRehearsal
from hetero_pp.research.experiments.provenance import commit, machine

LIST = Path(__file__).with_suffix(".yaml")
ROUNDS, STEPS = 3, 4
NAP_SECONDS = 0.005
TIMES = ("step_seconds", "round_seconds", "inner_seconds", "outer_seconds")
SMOKE = {"names": ["smallest"]}


def listed() -> dict[str, dict[str, Any]]:
    """Return the entries of the list by name, each with the keys of `base` that it does not replace."""
    content = yaml.safe_load(LIST.read_text())
    own = {one["name"]: {"kind": kind, **one} for kind in ("topologies", "claims") for one in content[kind]}
    bases = {"topologies": content["base"], "claims": content["base"]}
    return {name: {**bases[one["kind"]], **one} for name, one in own.items()}


@contextmanager
def lateness() -> Iterator[list[float]]:
    """Collect by how many seconds this machine wakes a thread late, until the block ends."""
    late, over = list[float](), threading.Event()

    def nap() -> None:
        while not over.is_set():
            until = time.monotonic() + NAP_SECONDS
            time.sleep(NAP_SECONDS)
            late.append(time.monotonic() - until)

    thread = threading.Thread(target=nap, daemon=True)
    thread.start()
    try:
        yield late
    finally:
        over.set()
        thread.join()


def rehearse(folder: Path, entry: Mapping[str, Any]) -> dict[str, Any]:
    """Rehearse one entry of the list, and return both sides."""
    ours = {"kind", "chosen", "rounds", "steps", "says", "in_figure"}
    path, found = folder / f"{entry['name']}.yaml", folder / "found.json"
    path.write_text(yaml.safe_dump({key: value for key, value in entry.items() if key not in ours}))
    rounds, steps = entry.get("rounds", ROUNDS), entry.get("steps", STEPS)
    start, mode = partial(launch_rehearsal, most_alone=0), AsRehearsal(rounds, steps, found)
    load = os.getloadavg()[0]
    with lateness() as late, redirect_stdout(StringIO()):
        run_topology(path, [], folder / "runs", False, start=start, mode=mode)
    both = json.loads(found.read_text())
    return {
        **{key: entry[key] for key in ("kind", "chosen", "says") if key in entry},
        "rounds": rounds,
        "steps": steps,
        "members": len(both["members"]),
        "load": [load, os.getloadavg()[0]],
        "processors_busy": both["busy"],
        "woken_late_seconds": {"mean": statistics.fmean(late), "99_of_100": statistics.quantiles(late, n=100)[-1]},
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d %H:%M"),
        **{key: both[key] for key in ("measured", "predicted", "difference", "whole_run")},
    }


def apart(found: Mapping[str, Any], quantity: str) -> float:
    """Return the relative difference of a prediction from a measurement, without its sign."""
    return abs(found["difference"][quantity] or 0.0)


def summary(results: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Return how far measurements and predictions of the topologies are apart, by quantity."""
    own = [one for one in results.values() if one["kind"] == "topologies" and one["chosen"] != "smoke"]
    times = {name: [apart(one, name) for one in own] for name in ("step_seconds", "round_seconds")}
    return {name: {"median": statistics.median(one), "worst": max(one)} for name, one in times.items() if one}


def show(name: str, found: Mapping[str, Any]) -> None:
    """Print one result."""
    for quantity in TIMES:
        ours, theirs, by = (found[key][quantity] for key in ("measured", "predicted", "difference"))
        share = "" if by is None else f"{by:+.1%}"
        print(f"{name:<24} {quantity:<14} {ours:>9.3f} s {theirs:>9.3f} s {share:>8}")
    whole, late = found["whole_run"], found["woken_late_seconds"]["mean"]
    trains = f"{whole['utilization']['relative']:.1%} of free links, predicted {whole['predicted']['relative']:.1%}"
    print(f"{name:<24} the run: {trains}; woken {late * 1e3:.1f} ms late, load {found['load'][1]:.1f}", flush=True)


def main() -> None:
    """Rehearse, print, and write files if asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="entries of the list; by default all but the smallest")
    entries = listed()
    arguments = parse(parser, SMOKE)
    names: Sequence[str] = arguments.names or [name for name in entries if name != "smallest"]
    known = json.loads(arguments.json.read_text()) if arguments.json and arguments.json.exists() else {}
    results: dict[str, Any] = known.get("results", {})
    for name in names:
        with tempfile.TemporaryDirectory(prefix="hetero-pp-rehearse-") as folder:
            results[name] = rehearse(Path(folder), entries[name])
        show(name, results[name])
        save({"machine": machine(), "summary": summary(results), "results": results}, arguments.json)


if __name__ == "__main__":
    main()
