"""Picture of an experiment: curves along rounds, steps or hours, and final losses against sizes and settings."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hetero_pp.core.units import format_bytes, format_ratio
from hetero_pp.research.experiments.outcomes import Outcome, Outcomes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LOGARITHMIC = 8  # ratio of the largest value to the smallest from which a horizontal axis is logarithmic
OF_A_LETTER = 0.02  # width of one letter as a share of the axis; labels also keep a gap of one letter

_FINAL_LOSS = "final validation loss, nats per token\n(mean over seeds; bars: standard deviation)"
_MEANINGS = {
    "inner.steps": "H: inner steps per round (inner.steps)",
    "outer.compression.density": "density: share of the values that is sent (outer.compression.density)",
    "k/d": "k/d: share of the dimensions that cross a boundary",
}
"""Labels of axes along settings, where they are not the setting's key."""

Row = Mapping[str, Any]
Panel = Callable[["Axes", Mapping[str, Any], Outcomes], None]
"""Draws on axes what it needs of a result and its outcomes."""


class Place(NamedTuple):
    """Position and label of a value on the horizontal axis."""

    x: float
    name: str


def draw(result: Mapping[str, Any], outcomes: Outcomes, path: Path) -> None:
    """Write the picture of a result."""
    from matplotlib.figure import Figure

    rows, panels = [row for row, _ in _known(result)], list[Panel]([_draw_curves])
    if any(outcome.get("similarity") for _, _, outcome in _firsts(result, outcomes)):
        panels.append(_draw_similarity)
    if "clock" in result:
        panels = [partial(_draw_curves, hours=hours, title=at) for at, hours in result["clock"]["hours"].items()]
    elif timed := {row["name"]: row["hours"] for row in result["rows"] if "hours" in row}:
        panels.append(partial(_draw_curves, hours=timed))
    elif result["trends"]:
        panels.append(_draw_trends)
    elif sum("gather" in row for row in rows) > 1:
        for way, said in (("ring", "in a ring"), ("gather", "gathered, or to a parameter server")):
            places = {row["name"]: _size(1e6 * row[way]["mean"]) for row in rows if way in row}
            panels.append(partial(_draw_final, label=f"a replica sends in all rounds, {said}", places=places))
    else:
        for key, lines in result.get("varied", {}).items():
            panels.append(partial(_draw_final, label=_MEANINGS.get(key, key), places=_along(key, lines), lines=lines))
        sizes = {row["name"]: _size(row["bytes_per_token"]) for row in rows if row["bytes_per_token"] > 0}
        if len({place.name for place in sizes.values()}) > 1:  # else the axis names one value
            panels.append(partial(_draw_final, label="bytes a token, hop and direction", places=sizes))

    columns = 1 + sum(row["name"] in outcomes for row in result["rows"]) // 30  # of the legend
    shares = "clock" in result  # panels of several deployments have equal axes, two panels a line
    along = min(2, len(panels)) if shares else len(panels)
    lines = -(-len(panels) // along)
    figure = Figure(figsize=(6.5 * along + 2.5 * columns, 6 * lines), layout="constrained")
    grid = figure.subplots(lines, along, squeeze=False, sharex=shares, sharey=shares)
    for axes in grid.flat[len(panels) :]:
        axes.remove()
    for axes, panel in zip(grid.flat, panels, strict=False):
        panel(axes, result, outcomes)
        axes.grid(alpha=0.3)
    figure.suptitle(f"{result['name']} at scale {result['scale']}")
    # The legend of rows lies beside the panels, where it hides nothing.
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", fontsize=9, ncols=1 + len(labels) // 30, title="rows")
    figure.savefig(path, dpi=80, format="png")


def _size(count: float) -> Place:
    return Place(count, format_bytes(count))


def _along(key: str, lines: Sequence[Sequence[tuple[str, float]]]) -> dict[str, Place]:
    """Return the place of each row on the axis along a setting."""

    def named(value: float) -> str:
        if key == "k/d":
            return str(Fraction(value).limit_denominator(1000))
        return format_ratio(value) if key.endswith(".density") else f"{value:g}"

    return {name: Place(value, named(value)) for line in lines for name, value in line}


def lay_out(axes: Axes, places: Sequence[Place]) -> None:
    """Scale the axis to the places, leave a margin at both ends, and label the places that have room."""
    known = sorted({place.x: place for place in places}.values())
    if not known:
        axes.set_xticks([])
        return
    low, high = known[0].x, known[-1].x
    is_logarithmic = low > 0 and high >= LOGARITHMIC * low
    if is_logarithmic:
        axes.set_xscale("log")
        axes.set_xlim(low * (low / high) ** 0.06, high * (high / low) ** 0.06)
    else:
        room = 0.06 * (high - low) or 0.5 * abs(high) or 0.5
        axes.set_xlim(low - room, high + room)
    axes.minorticks_off()
    # Both ends have labels, then the places with the shortest labels that overlap no other.
    along = [math.log(place.x) if is_logarithmic else place.x for place in known]
    width, ends = (along[-1] - along[0]) or 1.0, {0, len(known) - 1}
    chosen: list[int] = []
    for index in sorted(range(len(known)), key=lambda one: (one not in ends, len(known[one].name), one)):
        gaps = [
            (abs(along[index] - along[one]) / width, (len(known[index].name) + len(known[one].name)) / 2 + 1)
            for one in chosen
        ]
        if all(gap >= OF_A_LETTER * letters for gap, letters in gaps):
            chosen.append(index)
    named = [known[index] for index in sorted(chosen)]
    axes.set_xticks([place.x for place in named], [place.name for place in named])


def _style(number: int) -> dict[str, Any]:
    """Return a row's colour; every ten rows the line style and the marker change."""
    turn = number // 10 % 3
    return {"color": f"C{number % 10}", "linestyle": ["-", "--", ":"][turn], "marker": "os^"[turn]}


def _known(result: Mapping[str, Any]) -> list[tuple[Row, dict[str, Any]]]:
    """Return the rows that have a loss, with their styles."""
    return [(row, _style(number)) for number, row in enumerate(result["rows"]) if row["ours"] is not None]


def _firsts(result: Mapping[str, Any], outcomes: Outcomes) -> Iterator[tuple[Row, dict[str, Any], Outcome]]:
    """Yield each trained row with its style and the outcome of its first seed."""
    for number, row in enumerate(result["rows"]):
        if seeds := outcomes.get(row["name"]):
            yield row, _style(number), seeds[min(seeds)]


def _rounds(axes: Axes, result: Mapping[str, Any]) -> Callable[[Row], int]:
    """Label an axis along a run, and return the length of a round of a row on it.

    The axis counts inner steps if rows have rounds of different lengths, because such rounds cannot share an axis.
    """
    steps: Mapping[str, int] = result.get("inner_steps", {})
    axes.set_xlabel("inner step" if steps else "outer round")
    return lambda row: steps.get(row["name"], 1)


def _draw_curves(
    axes: Axes, result: Mapping[str, Any], outcomes: Outcomes, hours: Mapping[str, float] | None = None, title: str = ""
) -> None:
    """Draw the loss of each row's first seed; against predicted `hours` of rows if given, as Het-PP's Figure 3.

    A `title` names the one of several deployments that predicts the hours, whose axes are logarithmic.
    """
    steps_of = _rounds(axes, result)
    for row, style, outcome in _firsts(result, outcomes):
        losses = outcome["validation_loss"]
        length = steps_of(row) if hours is None else hours.get(row["name"], math.nan) / max(1, len(losses))
        along = [round_ * length for round_ in range(1, len(losses) + 1)]
        axes.plot(along, losses, **style, markevery=[len(losses) - 1], label=row["name"])
    axes.set_ylabel("validation loss of the first seed, nats per token")
    if hours is not None:
        axes.set_xlabel("predicted hours")
    if title:
        axes.set(title=title, xscale="log")


def _draw_similarity(axes: Axes, result: Mapping[str, Any], outcomes: Outcomes) -> None:
    """Draw the cosines of each row's first seed, with the deviation over pairs: the papers' Figures 10 and 11."""
    steps_of = _rounds(axes, result)
    for row, style, outcome in _firsts(result, outcomes):
        if measured := outcome.get("similarity"):
            along = [one[0] * steps_of(row) for one in measured]
            axes.plot(along, [one[1] for one in measured], **style, markevery=[len(along) - 1])
            low, high = ([one[1] + sign * one[2] for one in measured] for sign in (-1, 1))
            axes.fill_between(along, low, high, color=style["color"], alpha=0.15)
    axes.set_ylabel("cosine of two contributions of the first seed\n(band: standard deviation over pairs)")


def _draw_final(
    axes: Axes,
    result: Mapping[str, Any],
    outcomes: Outcomes,
    label: str,
    places: Mapping[str, Place],
    lines: Sequence[Sequence[tuple[str, float]]] = (),
) -> None:
    """Draw final losses at the places of rows, by name; a row without a place is a dashed horizontal line.

    Rows of one of `lines` (name, value), which differ only in the setting of the axis, are joined in grey.
    """
    losses, is_dashed = {row["name"]: row["ours"]["mean"] for row, _ in _known(result)}, False
    for line in lines:
        known = [(places[name].x, losses[name]) for name, _ in line if name in losses]
        axes.plot([x for x, _ in known], [loss for _, loss in known], color="gray", zorder=0)
    for row, style in _known(result):
        name, spread = row["name"], row["ours"]["spread"] or 0.0
        if name in places:
            x = places[name].x
            axes.errorbar(x, losses[name], spread, color=style["color"], marker=style["marker"], capsize=3)
        elif not lines or name == result["baseline"]:
            axes.axhline(losses[name], color=style["color"], linestyle="--")
            is_dashed = True
    lay_out(axes, [place for name, place in places.items() if name in losses])
    axes.set(xlabel=label + (" (dashed: rows without)" if is_dashed else ""), ylabel=_FINAL_LOSS)


def _draw_trends(axes: Axes, result: Mapping[str, Any], outcomes: Outcomes) -> None:
    """Draw gaps against widths, with each law and its interval; the paper's gaps are stars."""
    from matplotlib.ticker import LogLocator, NullFormatter

    all_widths: set[int] = set()
    for number, trend in enumerate(result["trends"]):
        colour, law = f"C{number % 10}", trend["law"]
        for point in trend["points"]:
            gaps = [gap for gap in point["percent"].values() if gap > 0]
            axes.plot([point["width"]] * len(gaps), gaps, ".", color=colour)
        papers = {int(width): gap for width, gap in trend["paper"].items()}
        axes.plot(list(papers), list(papers.values()), "*", color=colour, markersize=12)
        widths = [one["width"] for one in law]
        axes.plot(widths, [one["percent"] for one in law], color=colour, label=trend["name"])
        lows, highs = [one["interval"][0] for one in law], [one["interval"][1] for one in law]
        axes.fill_between(widths, lows, highs, color=colour, alpha=0.1)
        all_widths |= {*(point["width"] for point in trend["points"]), *papers}
    axes.set(yscale="log", xlabel="width of the model (dots: seeds; stars: the paper)")
    axes.set_ylabel("final loss above no compression\n(lines: fitted laws; bands: their intervals)")
    lay_out(axes, [Place(width, f"{width:g}") for width in all_widths])
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g} %")
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.legend(fontsize=9, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, frameon=False)
