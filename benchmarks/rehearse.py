"""Rehearse topologies and the papers' claims, and compare each with what `simulate` predicts.

    python benchmarks/rehearse.py [NAME ...] [--json FILE]
    python benchmarks/rehearse.py --json FILE --chart FILE      # draws the results in FILE

`rehearse.yaml` lists them. Without names all are rehearsed, one at a time. FILE keeps its results of other names, and
of several attempts the one that other work disturbed least. Members share two processes, because a rehearsal needs its
processors promptly. A thread that sleeps beside each rehearsal measures how late this machine wakes threads.

If other work occupies the machine, give the rehearsal real-time priority: `chrt --rr 20 python benchmarks/rehearse.py`.
Or use `--stretch 4`: everything of a topology then takes four times as long, and so does its prediction. The delays of
this machine, some milliseconds a message if it is busy, count a quarter.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import yaml
from command_line import earlier, parse, parser_of, save
from processes import meanwhile

from hetero_pp.config.predictions import CATALOG, Hardware
from hetero_pp.config.yaml_file import ConfigFile, spec_of
from hetero_pp.core.units import parse_any
from hetero_pp.program.launch.command import Invocation, run_topology
from hetero_pp.program.rehearse import AsRehearsal
from hetero_pp.research.experiments.outcomes import commit, machine
from hetero_pp.simulator.prediction import predict

LIST = Path(__file__).with_suffix(".yaml")
ROUNDS, STEPS = 3, 4
NAP_SECONDS = 0.005
OURS = {"kind", "chosen", "says", "rounds", "steps"}
"""Keys of an entry that are not those of a run."""
TIMES = ("step_seconds", "round_seconds", "inner_seconds", "outer_seconds")
SMOKE = {"names": ["smallest"]}


def listed() -> dict[str, dict[str, Any]]:
    """Return the entries of the list by name, each with the keys of `base` that it does not replace."""
    content = yaml.safe_load(LIST.read_text())
    every = [{"kind": kind, **content["base"], **one} for kind in ("topologies", "claims") for one in content[kind]]
    return {one["name"]: one for one in every}


def stretched(entry: Mapping[str, Any], factor: float) -> dict[str, Any]:
    """Return an entry in which everything takes `factor` times as long: bits, latencies and computation."""
    own = {name: Hardware.model_validate(one) for name, one in entry.get("simulate", {}).get("hardware", {}).items()}
    every = {**CATALOG, **own}
    stages = [stage for one in entry["replicas"] if isinstance(one.get("stages"), list) for stage in one["stages"]]
    used = {one["hardware"] for one in (*entry["replicas"], *stages) if "hardware" in one}
    slower = {
        name: {
            **every[name].model_dump(mode="json"),
            "mfu": every[name].mfu / factor,
            "memory_bandwidth": f"{every[name].memory_bandwidth / factor} bit/s",
        }
        for name in used
    }

    def slowed(key: str, value: Any) -> Any:
        if isinstance(value, dict):
            return {name: slowed(name, one) for name, one in value.items()}
        by, unit = (factor, "s") if key in ("latency", "jitter") else (1 / factor, "bit/s")
        return f"{parse_any(value) * by} {unit}"

    paths = {key: slowed(key, entry[key]) for key in ("links", "lines") if key in entry}
    return {**entry, **paths, "simulate": {"hardware": slower}}


def as_yaml(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return an entry as the YAML of a run."""
    return {key: value for key, value in entry.items() if key not in OURS}


def nap(late: list[float], is_over: threading.Event) -> None:
    """Collect by how many seconds this machine wakes a thread late, until the event is set."""
    while not is_over.is_set():
        until = time.monotonic() + NAP_SECONDS
        time.sleep(NAP_SECONDS)
        late.append(time.monotonic() - until)


def rehearse(folder: Path, entry: Mapping[str, Any], rounds: int, steps: int) -> dict[str, Any]:
    """Rehearse one entry of the list, and return both sides."""
    path, found = folder / f"{entry['name']}.yaml", folder / "found.json"
    path.write_text(yaml.safe_dump(as_yaml(entry)))
    load, late = os.getloadavg()[0], list[float]()
    with meanwhile(partial(nap, late)), redirect_stdout(StringIO()):
        invocation = Invocation(mode=AsRehearsal(rounds, steps, found))
        run_topology(path, [], folder / "runs", False, invocation=invocation)
    both = json.loads(found.read_text())
    return {
        **{key: entry[key] for key in ("name", "kind", "chosen", "says") if key in entry},
        "rounds": rounds,
        "steps": steps,
        "members": len(both["members"]),
        "load": [load, os.getloadavg()[0]],
        "real_time": os.sched_getscheduler(0) in (os.SCHED_RR, os.SCHED_FIFO),
        "processors_busy": both["busy"],
        "woken_late_seconds": {"mean": statistics.fmean(late), "99_of_100": statistics.quantiles(late, n=100)[-1]},
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d %H:%M"),
        **{key: both[key] for key in ("measured", "predicted", "difference", "whole_run")},
    }


def least_disturbed(found: dict[str, Any], sooner: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the rehearsal in which threads were woken less late, with a line about each attempt."""
    late = ("woken_late_seconds", "mean")
    tried = {"date": found["date"], "woken_late_seconds": found[late[0]][late[1]]}
    tried |= {name: found["difference"][name] for name in ("step_seconds", "round_seconds")}
    if sooner is None or late[0] not in sooner:  # an earlier version did not measure it
        return {**found, "attempts": [tried]}
    attempts = [*sooner["attempts"], tried]
    best = found if found[late[0]][late[1]] <= sooner[late[0]][late[1]] else sooner
    return {**best, "attempts": attempts}


def differences(found: Mapping[str, Any]) -> dict[str, float]:
    """Return by how much a step, a round, and the run that is rehearsed take longer than predicted, relative to it."""
    run = found["whole_run"]["predicted"]["relative"] / found["whole_run"]["utilization"]["relative"] - 1
    return {name: found["difference"][f"{name}_seconds"] or 0.0 for name in ("step", "round")} | {"run": run}


def summary(results: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return how far measurements and predictions of the topologies are apart, by their stretch."""
    found: dict[str, Any] = {}
    for stretch in sorted({one["stretch"] for one in results.values()}):
        own = [differences(one) for one in results.values() if is_topology(one) and one["stretch"] == stretch]
        parts = {name: [abs(one[name]) for one in own] for name in ("step", "round", "run")}
        apart = {name: {"median": statistics.median(one), "worst": max(one)} for name, one in parts.items() if one}
        found[f"{stretch:g}"] = {"topologies": len(own), **apart}
    return found


def is_topology(found: Mapping[str, Any]) -> bool:
    """Return whether a result is one of the ten topologies."""
    return found["kind"] == "topologies" and found["chosen"] in ("before", "later")


def of_free_links(found: Mapping[str, Any], replica: str, side: str) -> float:
    """Return the share of the inner steps with free links that a replica takes. `side`: `measured` or `predicted`."""
    step, predicted = f"replicas.{replica}.step_seconds", found["predicted"]
    free = predicted[step] * (1 - predicted[f"replicas.{replica}.exposed_communication"])
    return float(free / found[side][step])


def replicas_of(found: Mapping[str, Any]) -> list[str]:
    return [key.split(".")[1] for key in found["predicted"] if key.endswith(".bubble")]


def curve(entry: Mapping[str, Any], rates: Sequence[float]) -> list[float]:
    """Return the predicted share of the steps with free links, at some bandwidths of a hop in Mbit/s."""
    shares = []
    for rate in rates:
        one = {**entry["replicas"][0], "name": "one", "link": "hop"}
        links = {**entry["links"], "hop": {"bandwidth": f"{rate} Mbit/s", "latency": "20 ms"}}
        with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
            file.write(yaml.safe_dump(as_yaml({**entry, "links": links, "replicas": [one]})))
            file.flush()
            shares.append(1 - predict(spec_of(ConfigFile(Path(file.name), []))).replicas[0].exposed_communication)
    return shares


def draw(results: Mapping[str, Mapping[str, Any]], entries: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """Draw how far predictions are off, the measured claims, and Figure 2's curve with its measured points."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (off, claims, figure2) = plt.subplots(1, 3, figsize=(15, 4.6), width_ratios=(3, 2, 3))
    names = [name for name, one in entries.items() if is_topology(one)]
    for stretch, color in ((1, "tab:orange"), (4, "tab:blue")):
        for what, marker in (("step", "o"), ("run", "+")):
            own = [one for one in results.values() if is_topology(one) and one["stretch"] == stretch]
            at, values = [names.index(one["name"]) for one in own], [100 * differences(one)[what] for one in own]
            if not own:
                continue
            off.plot(values, at, marker, color=color, label=f"a {what}" + (", stretched" if stretch > 1 else ""))
    off.set_yticks(range(len(names)), names)
    off.axvspan(-8, 8, alpha=0.08)
    off.axvspan(-3, 3, alpha=0.12)
    off.set_xlabel("measured time beyond the prediction, %")
    off.legend(loc="center left", fontsize=8)
    said = {one["says"]: one["whole_run"] for name, one in results.items() if name.startswith("1b-")}
    for shift, side, label in ((-0.2, "predicted", "predicted"), (0.2, "utilization", "measured")):
        shares, places = [100 * one[side]["relative"] for one in said.values()], [at + shift for at in range(len(said))]
        claims.bar_label(claims.barh(places, shares, 0.38, label=label), fmt="%.1f", padding=2)
    claims.set_xlim(0, 110)
    claims.set_yticks(range(len(said)), [one.removeprefix("1b, ").replace(", ", ",\n") for one in said])
    claims.set_xlabel("1b, rounds of 50 steps, % of free links")
    claims.legend(fontsize=8)
    for name in ("figure2", "figure2-256"):
        if name in results:
            rates = [10 * 1.25**power for power in range(27)]
            [line] = figure2.semilogx(rates, [100 * share for share in curve(entries[name], rates)])
            points = [
                (int(one[3:]), 100 * of_free_links(results[name], one, "measured"))
                for one in replicas_of(results[name])
            ]
            figure2.plot(*zip(*points, strict=True), "o", color=line.get_color(), label=results[name]["says"])
    figure2.axhline(97, color="gray", linewidth=0.8, linestyle="--")
    figure2.set_xlabel("Mbit/s of a hop (line: predicted)")
    figure2.set_ylabel("% of free links")
    figure2.legend(loc="lower right", fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def show(name: str, found: Mapping[str, Any]) -> None:
    for quantity in TIMES:
        ours, theirs, by = (found[key][quantity] for key in ("measured", "predicted", "difference"))
        share = "" if by is None else f"{by:+.1%}"
        print(f"{name:<24} {quantity:<14} {ours:>9.3f} s {theirs:>9.3f} s {share:>8}")
    whole, late = found["whole_run"], found["woken_late_seconds"]["mean"]
    trains = f"{whole['utilization']['relative']:.1%} of free links, predicted {whole['predicted']['relative']:.1%}"
    print(f"{name:<24} the run: {trains}; woken {late * 1e3:.1f} ms late, load {found['load'][1]:.1f}", flush=True)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("names", nargs="*", help="entries of the list; by default all but the smallest")
    entries = listed()
    parser.add_argument("--stretch", type=float, default=1.0, help="let everything take this many times as long")
    parser.add_argument("--rounds", type=int, help=f"by default those of the list, or {ROUNDS}")
    parser.add_argument("--steps", type=int, help=f"inner steps of a round, by default those of the list, or {STEPS}")
    parser.add_argument("--chart", type=Path, help="rehearse nothing, and draw the results of --json to this file")
    arguments = parse(parser, SMOKE)
    if arguments.chart is not None:
        draw(json.loads(arguments.json.read_text())["results"], entries, arguments.chart)
        return
    names: Sequence[str] = arguments.names or [name for name in entries if name != "smallest"]
    results: dict[str, Any] = earlier(arguments.json).get("results", {})
    for name in names:
        entry = stretched(entries[name], arguments.stretch) if arguments.stretch != 1 else entries[name]
        rounds, steps = arguments.rounds or entry.get("rounds", ROUNDS), arguments.steps or entry.get("steps", STEPS)
        with tempfile.TemporaryDirectory(prefix="hetero-pp-rehearse-") as folder:
            found = rehearse(Path(folder), entry, rounds, steps) | {"stretch": arguments.stretch}
        key = name if arguments.stretch == 1 else f"{name} x {arguments.stretch:g}"
        results[key] = least_disturbed(found, results.get(key))
        show(key, results[key])
        save({"machine": machine(), "summary": summary(results), "results": results}, arguments.json)


if __name__ == "__main__":
    main()
