"""Picture of an experiment: loss curves, and final loss against a swept cell, a varied setting, bytes or k/d."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hetero_pp.core.units import format_bytes, format_ratio, parse_any
from hetero_pp.research.experiments.outcomes import Outcome, Outcomes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LOGARITHMIC = 8
"""Ratio of the largest value to the smallest from which a horizontal axis is logarithmic."""
OF_A_LETTER = 0.02
"""Width of one letter as a share of the axis; labels also keep a gap of one letter."""

_FINAL_LOSS = "final validation loss, nats per token\n(mean over seeds; bars: standard deviation)"
_MEANINGS = {
    "inner.steps": "H: inner steps per round",
    "outer.compression.density": "density: share of the values that is sent",
}
"""Meanings of settings that are an axis of several tables."""
_WAYS = {"ring": "in a ring", "gather": "gathered, or to a parameter server"}

Row = Mapping[str, Any]
Panel = Callable[["Axes", Mapping[str, Any], Outcomes], None]
"""Draws on axes what it needs of a result and its outcomes."""


class Place(NamedTuple):
    """Position and label of a value on the horizontal axis."""

    x: float
    name: str


Point = tuple[Place, float, float]
"""Position on the horizontal axis, mean loss, standard deviation over seeds."""


def draw(result: Mapping[str, Any], outcomes: Outcomes, path: Path) -> None:
    """Write the picture of a result."""
    from matplotlib.figure import Figure

    rows = [row for row, _ in _known(result)]
    panels: list[Panel] = [_draw_curves]
    if any(outcome.get("similarity") for _, _, outcome in _firsts(result, outcomes)):
        panels.append(_draw_similarity)
    if any("momentum" in row for row in rows):
        panels.append(_draw_momentum)
    if len({row["replicas"] for row in rows if "norm" in row}) > 1:
        panels.append(_draw_norm)
    swept = dict.fromkeys(cell for row in result["rows"] for cell in row.get("swept", {}))
    if any("hours" in row for row in result["rows"]):
        panels.append(_draw_by_time)
    elif result["trends"]:
        panels.append(_draw_trends)
    elif sum("gather" in row for row in rows) > 1:
        panels += [partial(_draw_volume, way="ring"), partial(_draw_volume, way="gather")]
    elif swept:
        panels += [partial(_draw_sweep, cell=cell) for cell in swept]
    else:
        panels += [partial(_draw_varied, key=key) for key in result.get("varied", {})]
        sizes = {format_bytes(row["bytes_per_token"]) for row in rows if row["bytes_per_token"] > 0}
        panels += [_draw_bytes] if len(sizes) > 1 else []  # else the axis names one value
        panels += [_draw_ranks] if _by_rank(result) else []

    def columns_of(rows: int) -> int:
        return 1 + rows // 30

    legend_columns = columns_of(sum(row["name"] in outcomes for row in result["rows"]))
    figure = Figure(figsize=(6.5 * len(panels) + 2.5 * legend_columns, 6), layout="constrained")
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        panel(axes, result, outcomes)
        axes.grid(alpha=0.3)
    figure.suptitle(f"{result['name']} at scale {result['scale']}")
    # The legend of rows lies beside the panels, where it hides nothing. Its title says to which panels it belongs if
    # some have a legend of their own, which gives colours other meanings.
    handles, labels = figure.axes[0].get_legend_handles_labels()
    some_have_own = any(axes.get_legend() is not None for axes in figure.axes)
    title = "rows (panels without an own legend)" if some_have_own else "rows"
    columns = columns_of(len(labels))
    figure.legend(handles, labels, loc="outside right upper", fontsize=9, ncols=columns, title=title)
    figure.savefig(path, dpi=80, format="png")


def places_of(values: Sequence[str]) -> list[Place]:
    """Return the position of each value as the user wrote it.

    Numbers, ratios and quantities are placed by size. If any value is none of these, all are placed in their order.
    """
    try:
        return [Place(parse_any(value), value) for value in values]
    except ValueError:
        return [Place(float(index), value) for index, value in enumerate(values)]


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


def _steps_of(result: Mapping[str, Any], row: Row) -> int:
    """Return the length of one of the row's rounds on the axis along a run.

    The axis counts inner steps if rows have rounds of different lengths, because such rounds cannot share an axis.
    """
    steps: Mapping[str, int] = result.get("inner_steps", {})
    return steps.get(row["name"], 1)


def _draw_curves(axes: Axes, result: Mapping[str, Any], outcomes: Outcomes) -> None:
    """Draw the loss of each row's first seed; its end has the row's marker in the other panels."""
    for row, style, outcome in _firsts(result, outcomes):
        losses = outcome["validation_loss"]
        along = [round_ * _steps_of(result, row) for round_ in range(1, len(losses) + 1)]
        axes.plot(along, losses, **style, markevery=[len(losses) - 1], label=row["name"])
    progress = "inner step" if "inner_steps" in result else "outer round"
    axes.set(xlabel=progress, ylabel="validation loss of the first seed, nats per token")


def _draw_by_time(axes: Axes, result: Mapping[str, Any], outcomes: Outcomes) -> None:
    """Draw the loss of each row's first seed against predicted hours: Het-PP's Figure 3."""
    for row, style, outcome in _firsts(result, outcomes):
        if "hours" in row:
            losses = outcome["validation_loss"]
            along = [row["hours"] * round_ / len(losses) for round_ in range(1, len(losses) + 1)]
            axes.plot(along, losses, **style, markevery=[len(losses) - 1])
    axes.set(xlabel="predicted hours", ylabel="validation loss of the first seed, nats per token")


def _draw_momentum(axes: Axes, result: Mapping[str, Any], outcomes: Outcomes) -> None:
    """Draw the cosine of the replicas' memories and the reference momentum by round: SparseLoCo, A.1."""
    for _, style, outcome in _firsts(result, outcomes):
        for place, width in ((3, 1.5), (4, 0.7)):
            rounds = [(one[0], one[place]) for one in outcome.get("outer_gradients", ()) if one[place] is not None]
            axes.plot(*zip(*rounds, strict=True), **style | {"marker": ""}, linewidth=width)
    for bound in {claim["bound"] for claim in result["claims"] if "bound" in claim}:
        axes.axhline(bound, color="gray", linestyle=":")
    axes.set(xlabel="outer round", ylim=(0, 1))
    axes.set_ylabel("cosine with the momentum of all, first seed\n(thin: what is kept; dotted: the paper's bounds)")


def _draw_norm(axes: Axes, result: Mapping[str, Any], outcomes: Outcomes) -> None:
    """Draw the norm of the outer gradient against the number of replicas, beside 1 / sqrt(k): DiLoCo, 6.2."""
    known = [(row["replicas"], row["norm"]["mean"], row) for row, _ in _known(result) if "norm" in row]
    for count, norm, row in known:
        _draw_point(axes, (count, norm, row["norm"]["spread"] or 0.0), _style(result["rows"].index(row)))
    counts = sorted(count for count, *_ in known)
    for base, norm in [(count, norm) for count, norm, row in known if row["name"] == result["baseline"]]:
        formula = [norm * (base / count) ** 0.5 for count in counts]
        axes.plot(counts, formula, color="gray", linestyle="--", label="the baseline's / sqrt(k)")
    orthogonal = sorted((count, row["uncorrelated"]["mean"]) for count, _, row in known)
    axes.plot(*zip(*orthogonal, strict=True), color="gray", linestyle=":", label="if contributions were uncorrelated")
    axes.set(ylim=(0, None), xlabel="replicas (k)", ylabel="norm of the outer gradient, mean over rounds")
    lay_out(axes, [Place(count, str(count)) for count, *_ in known])
    _name_lines(axes)


def _draw_similarity(axes: Axes, result: Mapping[str, Any], outcomes: Outcomes) -> None:
    """Draw the cosines of each row's first seed, with the deviation over pairs: the papers' Figures 10 and 11."""
    for row, style, outcome in _firsts(result, outcomes):
        if measured := outcome.get("similarity"):
            rounds, means, spreads = zip(*measured, strict=True)
            along = [round_ * _steps_of(result, row) for round_ in rounds]
            axes.plot(along, means, **style, markevery=[len(along) - 1])
            low, high = (
                [mean + sign * spread for mean, spread in zip(means, spreads, strict=True)] for sign in (-1, 1)
            )
            axes.fill_between(along, low, high, color=style["color"], alpha=0.15)
    axes.set_xlabel("inner step" if "inner_steps" in result else "outer round")
    axes.set_ylabel("cosine of two contributions of the first seed\n(band: standard deviation over pairs)")


def _draw_volume(axes: Axes, result: Mapping[str, Any], outcomes: Outcomes, way: str) -> None:
    """Draw final loss against what a replica sends over the run, with the Pareto frontier: SparseLoCo's Figure 2."""
    known = [(row[way]["mean"], row, style) for row, style in _known(result) if way in row]
    for volume, row, style in known:
        _draw_point(axes, (volume, row["ours"]["mean"], row["ours"]["spread"] or 0.0), style)
    front: list[tuple[float, float]] = []
    for volume, row, _ in sorted(known, key=lambda one: (one[0], one[1]["ours"]["mean"])):
        if not front or row["ours"]["mean"] < front[-1][1]:
            front.append((volume, row["ours"]["mean"]))
    axes.plot(*zip(*front, strict=True), color="gray", linestyle=":", zorder=0)
    lay_out(axes, [Place(volume, format_bytes(1e6 * volume)) for volume, _, _ in known])
    axes.set(xlabel=f"a replica sends in all rounds, {_WAYS[way]}", ylabel=_FINAL_LOSS)


def _draw_bytes(axes: Axes, result: Mapping[str, Any], outcomes: Outcomes) -> None:
    """Draw final loss against bytes; rows without a compressed boundary are horizontal lines."""
    sizes = set()
    for row, style in _known(result):
        size, loss = row["bytes_per_token"], row["ours"]["mean"]
        if size > 0:
            _draw_point(axes, (size, loss, row["ours"]["spread"] or 0.0), style)
            sizes.add(size)
        else:
            axes.axhline(loss, color=style["color"], linestyle="--")
    lay_out(axes, [Place(size, format_bytes(size)) for size in sorted(sizes)])
    axes.set(xlabel="bytes a token, hop and direction (dashed: not compressed)", ylabel=_FINAL_LOSS)


def _draw_point(axes: Axes, point: tuple[float, float, float], style: Mapping[str, Any]) -> None:
    x, loss, spread = point
    axes.errorbar(x, loss, spread, color=style["color"], marker=style["marker"], capsize=3)


def _by_rank(result: Mapping[str, Any]) -> Mapping[str, Sequence[Point]]:
    """Return groups of several rows that differ only in the rank, by name."""
    groups: dict[int, list[Row]] = defaultdict(list)
    for row, _ in _known(result):
        if row["k_over_d"] is not None:
            groups[row["but_for_rank"]].append(row)
    several = [rows for rows in groups.values() if len({row["k_over_d"] for row in rows}) > 1]

    def kind_of(row: Row) -> str:
        return f"{row['compressed_share']:.0%} compressed" + (f", {row['bits']} bits" if row["bits"] else "")

    kinds, named = Counter(kind_of(rows[0]) for rows in several), {}
    for rows in several:
        kind = kind_of(rows[0])
        share = [Place(row["k_over_d"], str(Fraction(row["k_over_d"]).limit_denominator(1000))) for row in rows]
        points = sorted(_point(place, row) for place, row in zip(share, rows, strict=True))
        named[kind if kinds[kind] == 1 else _words_of_all(rows)] = points
    return named


def _words_of_all(rows: Sequence[Row]) -> str:
    """Return the words that all their names share, without a key whose values differ (`H =`)."""
    first, *others = (row["name"].replace(",", "").split() for row in rows)
    words = " ".join(word for word in first if all(word in other for other in others))
    return re.sub(r"\S+ =(?=$| \S+ =)", "", words).strip()


def _point(place: Place, row: Row) -> Point:
    return place, row["ours"]["mean"], row["ours"]["spread"] or 0.0


def _draw_ranks(axes: Axes, result: Mapping[str, Any], outcomes: Outcomes) -> None:
    """Draw final loss against k/d; the baseline and rows without compression are horizontal lines."""
    _draw_lines(axes, _by_rank(result))
    for row, _ in _known(result):
        loss, name = row["ours"]["mean"], row["name"]
        if name == result["baseline"]:
            axes.axhline(loss, color="gray", linestyle="--", label=f"{name} (baseline)")
        elif row["bytes_per_token"] == 0:
            axes.axhline(loss, color="gray", linestyle=":", label=name)
    axes.set(xlabel="k/d: share of the dimensions that cross a boundary", ylabel=_FINAL_LOSS)
    _name_lines(axes)


def _draw_lines(axes: Axes, lines: Mapping[str, Sequence[Point]]) -> None:
    for number, (kind, points) in enumerate(lines.items()):
        x, losses, spreads = ([point[0].x for point in points], *zip(*[point[1:] for point in points], strict=True))
        axes.errorbar(x, losses, spreads, **_style(number), capsize=3, label=kind)
    lay_out(axes, [point[0] for points in lines.values() for point in points])


def _name_lines(axes: Axes) -> None:
    """Add a legend above the panel, where it hides nothing."""
    axes.legend(fontsize=9, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, frameon=False)


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
    _name_lines(axes)


def _draw_varied(axes: Axes, result: Mapping[str, Any], outcomes: Outcomes, key: str) -> None:
    """Draw final loss against a setting, with lines of rows that differ only in it; a baseline on no line is dashed."""
    known, lines = {row["name"]: row for row, _ in _known(result)}, result["varied"][key]
    named: dict[str, list[Point]] = {}
    for line in lines:
        rows = [(known[name], value) for name, value in line if name in known]
        if len(rows) > 1:
            words = _words_of_all([row for row, _ in rows]) or f"{rows[0][0]['name']} ... {rows[-1][0]['name']}"
            words = words if words not in named else f"{words} ({len(named) + 1})"
            form = format_ratio if key.endswith(".density") else "{:g}".format
            named[words] = [_point(Place(value, form(value)), row) for row, value in rows]
    _draw_lines(axes, named)
    baseline = result["baseline"]
    if baseline in known and all(baseline != name for line in lines for name, _ in line):
        loss = known[baseline]["ours"]["mean"]
        axes.axhline(loss, color="gray", linestyle="--", label=f"{baseline} (baseline)")
    axes.set(xlabel=_meaning(key), ylabel=_FINAL_LOSS)
    if len(axes.get_legend_handles_labels()[1]) > 1:
        _name_lines(axes)


def _meaning(key: str) -> str:
    """Return the label of an axis along a setting."""
    return f"{_MEANINGS[key]} ({key})" if key in _MEANINGS else key


def _draw_sweep(axes: Axes, result: Mapping[str, Any], outcomes: Outcomes, cell: str) -> None:
    """Draw final loss against the values of a cell, with a line for each row and combination of other values.

    A row that does not have the cell is a dashed horizontal line.
    """
    known = [row for row, _ in _known(result)]
    said = dict.fromkeys(row["swept"][cell] for row in result["rows"] if cell in row.get("swept", {}))
    places = dict(zip(said, places_of(list(said)), strict=True))
    lines: dict[str, list[Point]] = defaultdict(list)
    for row in known:
        if cell in row.get("swept", {}):
            others = [f"{other}={value}" for other, value in row["swept"].items() if other != cell]
            lines[", ".join([row["of"], *others])].append(_point(places[row["swept"][cell]], row))
    _draw_lines(axes, {kind: sorted(points) for kind, points in lines.items()})
    for number, row in enumerate(row for row in known if cell not in row.get("swept", {})):
        axes.axhline(row["ours"]["mean"], color=f"C{(len(lines) + number) % 10}", linestyle="--", label=row["name"])
    axes.set(xlabel=_meaning(cell), ylabel=_FINAL_LOSS)
    _name_lines(axes)
