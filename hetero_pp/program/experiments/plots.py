"""An experiment as a picture: loss curves, final loss against bytes, and against k/d, where rows differ in them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes


Outcomes = Mapping[str, Mapping[int, Mapping[str, Any]]]
"""row -> seed -> outcome"""


def draw(result: Mapping[str, Any], outcomes: Outcomes, path: Path) -> None:
    """Write the picture."""
    from matplotlib.figure import Figure

    lines = _by_rank(result)
    panels: list[Callable[[Axes], None]] = [lambda axes: _draw_curves(axes, result, outcomes)]
    if len({row["bytes_per_token"] for row in result["rows"] if row["ours"] is not None}) > 1:
        panels.append(lambda axes: _draw_bytes(axes, result))
    if any(len(points) > 1 for points in lines.values()):
        panels.append(lambda axes: _draw_ranks(axes, result, lines))
    figure = Figure(figsize=(7 * len(panels), 6), layout="constrained")
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        panel(axes)
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=80, format="png")


def _style(number: int) -> dict[str, Any]:
    return {"color": f"C{number % 10}", "linestyle": ["-", "--", ":"][number // 10 % 3]}


def _draw_curves(
    axes: Axes, result: Mapping[str, Any], outcomes: Mapping[str, Mapping[int, Mapping[str, Any]]]
) -> None:
    """The first seed of each row."""
    for number, row in enumerate(result["rows"]):
        if seeds := outcomes.get(row["name"]):
            losses = seeds[min(seeds)]["validation_loss"]
            axes.plot(range(1, len(losses) + 1), losses, **_style(number), label=row["name"])
    axes.set(title=f"{result['name']}, {result['scale']}", xlabel="outer round", ylabel="validation loss, nats")
    axes.legend(fontsize=8)


def _draw_bytes(axes: Axes, result: Mapping[str, Any]) -> None:
    for number, row in enumerate(result["rows"]):
        if row["ours"] is not None:
            size, loss = max(row["bytes_per_token"], 1.0), row["ours"]["mean"]
            axes.errorbar(size, loss, row["ours"]["spread"] or 0.0, fmt="o", color=_style(number)["color"])
            axes.annotate(row["name"], (size, loss), (6, 3), textcoords="offset points", size=8)
    axes.set(xlabel="bytes a token, hop and direction (1: none)", ylabel="final loss, nats", xscale="log")


Points = list[tuple[float, float, float]]
"""(k/d, mean loss, spread)"""


def _by_rank(result: Mapping[str, Any]) -> Mapping[str, Points]:
    """The rows of each share of compressed replicas and number of bits."""
    lines: dict[str, Points] = defaultdict(list)
    for row in result["rows"]:
        if row["ours"] is not None and row["k_over_d"] is not None:
            kind = f"{row['compressed_share']:.0%} compressed" + (f", {row['bits']} bits" if row["bits"] else "")
            ours = row["ours"]
            lines[kind].append((row["k_over_d"], ours["mean"], ours["spread"] or 0.0))
    return {kind: sorted(points) for kind, points in lines.items() if len({point[0] for point in points}) > 1}


def _draw_ranks(axes: Axes, result: Mapping[str, Any], lines: Mapping[str, Points]) -> None:
    """Final loss against k/d, with the loss of the baseline as a line."""
    for kind, points in lines.items():
        ranks, losses, spreads = zip(*points, strict=True)
        axes.errorbar(ranks, losses, spreads, marker="o", capsize=3, label=kind)
    base = next(row["ours"] for row in result["rows"] if row["name"] == result["baseline"])
    if base is not None:
        axes.axhline(base["mean"], color="gray", linestyle="--", label=result["baseline"])
    axes.set(xlabel="k/d", ylabel="final loss, nats", xscale="log")
    shares = sorted({share for points in lines.values() for share, _, _ in points})
    axes.set_xticks(shares, [str(Fraction(share).limit_denominator(1000)) for share in shares])
    axes.minorticks_off()
    axes.legend(fontsize=8)
