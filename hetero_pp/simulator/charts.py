"""Predictions as pictures: where a round's time goes, and curves over a sweep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hetero_pp.simulator.prediction import Prediction
from hetero_pp.simulator.sweep import Sweep

_MARKERS: Mapping[str, dict[str, Any]] = {
    "equal": {"marker": "x"},
    "at least": {"marker": "^"},
    "at most": {"marker": "v"},
}
"""Of published numbers."""


def draw_prediction(prediction: Prediction, path: Path) -> None:
    """Share of a round that every member trains, and that every link and every line is busy."""
    from matplotlib.figure import Figure

    stages = [stage for replica in prediction.replicas for stage in replica.stages]
    links = [link for replica in prediction.replicas for link in replica.links]
    busy = {link.name: (link.forward_busy, link.backward_busy) for link in links}
    busy |= {f"line of {line.name}": (line.up_busy, line.down_busy) for line in prediction.lines}
    height = 1.5 + 0.3 * max(len(stages), 2 * len(busy))
    figure = Figure(figsize=(13, height), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.barh([stage.member for stage in stages], [100 * stage.utilization for stage in stages], color="C0")
    left.set(title="members", xlabel="share of a round that it trains, %", xlim=(0, 100))
    rows = range(len(busy))
    both = "forward, or up" if prediction.lines else "forward", "backward, or down" if prediction.lines else "backward"
    right.barh([row - 0.2 for row in rows], [100 * first for first, _ in busy.values()], 0.4, label=both[0])
    right.barh([row + 0.2 for row in rows], [100 * second for _, second in busy.values()], 0.4, label=both[1])
    right.set_yticks(list(rows), list(busy))
    right.set(title="links" + " and lines" * bool(prediction.lines), xlim=(0, 100))
    right.set_xlabel("share of a round that it is busy, %")
    right.legend()
    for axes in (left, right):
        axes.invert_yaxis()
        axes.grid(axis="x", alpha=0.3)
    figure.savefig(path, dpi=90)


def draw_sweep(sweep: Sweep, curves: Sweep | None, found: Mapping[str, Mapping[str, Prediction]], path: Path) -> None:
    """Utilization and the time of a round against the swept value, a line for each curve; of rows, bars."""
    if sweep.rows:
        _draw_rows(found, path)
        return
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 5), layout="constrained")
    left, right = figure.subplots(1, 2)
    published: dict[str, str] = {}
    units = {number[1] if (number := sweep.number(value)) else "" for value in sweep.values}
    unit = units.pop() if len(units) == 1 else ""
    for curve, predictions in found.items():
        name = f"{curves.key.rpartition('.')[2]} {curve}" if curves is not None else ""
        numbers = [sweep.number(value) for value in predictions]
        places = [number[0] if number and unit else value for number, value in zip(numbers, predictions, strict=True)]
        relative = [100 * one.utilization["relative"] for one in predictions.values()]
        left.plot(places, relative, marker=".", label=name or "of what free links allow")
        for place, prediction in zip(places, predictions.values(), strict=True):
            for one in prediction.published:
                if one.what == "utilization.relative":
                    left.plot([place], [100 * one.published], color="black", **_MARKERS[one.bound])
                    published[one.bound] = one.where
        if curves is None:
            absolute = [100 * one.utilization["absolute"] for one in predictions.values()]
            left.plot(places, absolute, marker=".", label="of all time")
        right.plot(places, [one.round_seconds for one in predictions.values()], marker=".", label=name or None)
    left.set(ylabel="members train, % of what free links allow" if curves is not None else "members train, %")
    left.set_ylim(0, 105)
    right.set(ylabel="a round, seconds", yscale="log")
    for axes in (left, right):
        axes.set_xlabel(f"{sweep.key}, {unit}" if unit else sweep.key)
        if unit:
            axes.set_xscale("log")
        axes.grid(alpha=0.3)
    for bound, where in published.items():
        left.plot([], [], color="black", linestyle="", label=f"{where}: {bound}", **_MARKERS[bound])
    left.legend()
    figure.savefig(path, dpi=90)


def _draw_rows(found: Mapping[str, Mapping[str, Prediction]], path: Path) -> None:
    """Of every row where a round's time goes, how long all of them take, what a replica sends and receives, and how all
    this compares with what papers publish."""
    from matplotlib.figure import Figure

    rows = {f"{row}, {curve}" if curve else row: one for curve, of in found.items() for row, one in of.items()}
    predictions, places = list(rows.values()), range(len(rows))
    has_published = any(one.published for one in predictions)
    figure = Figure(figsize=(18 if has_published else 15, 1.5 + 0.4 * len(rows)), layout="constrained")
    a_round, in_all, volumes, *others = figure.subplots(1, 4 if has_published else 3, sharey=True)
    for axes, factors in (a_round, [1.0] * len(rows)), (in_all, [one.rounds / 3600 for one in predictions]):
        outer = [one.outer_seconds * factor for one, factor in zip(predictions, factors, strict=True)]
        whole = [one.round_seconds * factor for one, factor in zip(predictions, factors, strict=True)]
        axes.barh(places, whole, label="inner steps and evaluation")
        axes.barh(places, outer, left=[a - b for a, b in zip(whole, outer, strict=True)], label="outer round")
    a_round.set(xlabel="a round, seconds")
    in_all.set(xlabel="all rounds, hours")
    volumes.barh([row - 0.2 for row in places], [one.sent_bytes for one in predictions], 0.4, label="sent")
    volumes.barh([row + 0.2 for row in places], [one.received_bytes for one in predictions], 0.4, label="received")
    least = min(min(one.sent_bytes, one.received_bytes) for one in predictions)
    volumes.set(xlabel="a replica in all rounds, bytes", xscale="log", xlim=(least / 3 or 1, None))
    for axes in others:
        _draw_ratios(axes, predictions)
    a_round.set_yticks(list(places), list(rows))
    a_round.invert_yaxis()
    for axes in (a_round, in_all, volumes, *others):
        axes.grid(axis="x", alpha=0.3)
        axes.set_axisbelow(True)
        axes.legend(fontsize="small", loc="lower center", bbox_to_anchor=(0.5, 1.0))
    figure.savefig(path, dpi=90)


def _draw_ratios(axes: Any, predictions: Sequence[Prediction]) -> None:
    """Predicted over published, a colour for each number; bounds as arrows to where they hold."""
    names = dict.fromkeys(one.what for prediction in predictions for one in prediction.published)
    ratios = [one.ratio for prediction in predictions for one in prediction.published]
    for color, name in enumerate(names):
        label: str | None = name
        for row, prediction in enumerate(predictions):
            for one in prediction.published:
                if one.what == name:
                    axes.plot([one.ratio], [row], color=f"C{color}", linestyle="", label=label, **_MARKERS[one.bound])
                    label = None
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set(xlabel="predicted / published", xscale="log")
    ends = min(0.5, *ratios) / 1.2, max(2.0, *ratios) * 1.2
    ticks = [tick for tick in _TICKS if ends[0] <= tick <= ends[1]]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlim(ends)


_TICKS = [digit * 10.0**exponent for exponent in range(-6, 7) for digit in (1, 2, 5)]
