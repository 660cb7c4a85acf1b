"""Predictions as pictures: where a round's time goes, and curves over a sweep."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from hetero_pp.program.simulation.prediction import Prediction


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


def draw_sweep(key: str, predictions: Mapping[str, Prediction], path: Path) -> None:
    """Utilization and the time of a round against the swept value."""
    from matplotlib.figure import Figure

    values: list[float] | list[str]
    try:
        values = [float(value.partition(" ")[0]) for value in predictions]
    except ValueError:
        values = list(predictions)
    unit = next(iter(predictions)).partition(" ")[2]
    figure = Figure(figsize=(13, 5), layout="constrained")
    left, right = figure.subplots(1, 2)
    for kind in ("absolute", "relative"):
        left.plot(values, [100 * one.utilization[kind] for one in predictions.values()], marker="o", label=kind)
    left.set(ylabel="utilization, %", ylim=(0, 105))
    left.legend()
    for kind in ("step", "round"):
        times = [getattr(one, f"{kind}_seconds") for one in predictions.values()]
        right.plot(values, times, marker="o", label=f"a {kind}")
    right.set(ylabel="seconds", yscale="log")
    right.legend()
    for axes in (left, right):
        axes.set_xlabel(f"{key}, {unit}" if unit else key)
        if unit:
            axes.set_xscale("log")
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=90)
