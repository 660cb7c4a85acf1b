"""Predictions as pictures: where a round's time goes, and curves over a sweep."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from hetero_pp.program.simulation.prediction import Prediction
from hetero_pp.program.simulation.sweep import Sweep


def draw_prediction(prediction: Prediction, path: Path) -> None:
    """Share of a round that every member trains, and that every link is busy."""
    from matplotlib.figure import Figure

    stages = [stage for replica in prediction.replicas for stage in replica.stages]
    links = [link for replica in prediction.replicas for link in replica.links]
    height = 1.5 + 0.3 * max(len(stages), 2 * len(links))
    figure = Figure(figsize=(13, height), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.barh([stage.member for stage in stages], [100 * stage.utilization for stage in stages], color="C0")
    left.set(title="members", xlabel="share of a round that it trains, %", xlim=(0, 100))
    rows = range(len(links))
    right.barh([row - 0.2 for row in rows], [100 * link.forward_busy for link in links], 0.4, label="forward")
    right.barh([row + 0.2 for row in rows], [100 * link.backward_busy for link in links], 0.4, label="backward")
    right.set_yticks(list(rows), [link.name for link in links])
    right.set(title="links", xlabel="share of a round that it is busy, %", xlim=(0, 100))
    right.legend()
    for axes in (left, right):
        axes.invert_yaxis()
        axes.grid(axis="x", alpha=0.3)
    figure.savefig(path, dpi=90)


def draw_sweep(sweep: Sweep, curves: Sweep | None, found: Mapping[str, Mapping[str, Prediction]], path: Path) -> None:
    """Utilization and the time of a round against the swept value, a line for each curve."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 5), layout="constrained")
    left, right = figure.subplots(1, 2)
    units = {number[1] if (number := sweep.number(value)) else "" for value in sweep.values}
    unit = units.pop() if len(units) == 1 else ""
    for curve, predictions in found.items():
        name = f"{curves.key.rpartition('.')[2]} {curve}" if curves is not None else ""
        numbers = [sweep.number(value) for value in predictions]
        places = [number[0] if number and unit else value for number, value in zip(numbers, predictions, strict=True)]
        relative = [100 * one.utilization["relative"] for one in predictions.values()]
        left.plot(places, relative, marker=".", label=name or "of what free links allow")
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
    left.legend()
    figure.savefig(path, dpi=90)
