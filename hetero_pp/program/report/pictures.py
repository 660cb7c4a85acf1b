"""Draws loss.png and links.png: losses over training, and bytes over each link and line."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from hetero_pp.config.alike import lines_alike, links_alike, range_of
from hetero_pp.config.lines import DIRECTIONS, WAYS, Direction, Way
from hetero_pp.core.drawing import HEIGHT, STYLE, draw_curve, new_figure, palette, save_figure
from hetero_pp.core.units import format_bits_per_second, format_bytes, format_count, format_share
from hetero_pp.program.report.state import ReplicaState, RunState
from hetero_pp.program.report.tables import ARROWS
from hetero_pp.program.report.traffic import DirectionState

if TYPE_CHECKING:
    from matplotlib.axes import Axes

KINDS: Mapping[str, Mapping[str, str]] = {
    "stage link": {"forward": "#1f6fb2", "backward": "#8fc1e3"},
    "exchange link": {"forward": "#d9731a", "backward": "#f4bf8b"},
    "line": {"up": "#3a8550", "down": "#a3d3ae"},
}
"""Colours of the bars, by kind from top to bottom and by direction."""
MOST_BARS = 64  # most bars that are drawn; each link or line has two
MOST_NAMED = 12  # most replicas in a legend
MOST_MARKS = 40  # most marked outer rounds; runs with more mark every second, fifth, tenth, ... one


def draw_losses(state: RunState, path: Path) -> None:
    """Draw training loss per inner step above, and validation loss per outer round below.

    Nothing is drawn before the first inner step.
    """
    from matplotlib import rc_context
    from matplotlib.ticker import MaxNLocator

    with state.lock, rc_context(STYLE):
        if state.first_step is None:
            return
        figure = new_figure(HEIGHT)
        above, below = figure.subplots(2, 1, sharex=True, height_ratios=[3, 2])
        _draw_curves(state, above, below)
        every = next(n for n in (1, 2, 5, 10, 20, 50, 100, 10**9) if state.rounds_planned <= n * MOST_MARKS)
        for axes in (above, below):
            axes.grid(axis="y")
            axes.set_ylabel("nats per token")
            if axes.lines:
                _name_lines(axes)
            for round_ in (one for one in sorted(state.closed) if one % every == 0):
                axes.axvline(_after(state, round_), color="#b5b5b5", lw=1, ls=":", zorder=0)
        what = f"inner steps of each replica; dotted: outer rounds of {state.inner_steps} steps"
        if state.inner_steps is None:
            what = "outer rounds, dotted; between them the inner steps of each replica"
        below.set_xlabel(what if every == 1 else f"{what}, one line in {every} rounds")
        below.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
        save_figure(figure, path)


def _after(state: RunState, round_: int) -> int:
    """Return where a round ends on the axis: in inner steps, or in rounds if their steps vary."""
    return round_ * (state.inner_steps or 1)


def training_losses(replica: ReplicaState) -> Iterator[tuple[float, float]]:
    """Yield (axis position at which a step ends, training loss) in the order of steps."""
    for round_, losses in replica.losses():
        for number, loss in enumerate(losses):
            if not math.isnan(loss):
                steps = replica.inner_steps
                part = (number + 1) / len(losses) if steps is None else number + 1
                yield (round_ - 1) * (steps or 1) + part, loss


def _draw_curves(state: RunState, above: Axes, below: Axes) -> None:
    """Draw the losses of each replica; below also their mean. Round 0 is the initial weights."""
    for colour, (name, replica) in zip(palette(len(state.replicas)), state.replicas.items(), strict=True):
        if losses := list(training_losses(replica)):
            width = 1.8 if len(losses) <= 500 else 0.9
            draw_curve(above, losses, 60, color=colour, lw=width, ms=4, label=f"{name} ({replica.kind})")
        told = [(_after(state, round_), loss) for round_, loss in sorted(replica.validation_loss.items())]
        if told:
            draw_curve(below, told, MOST_MARKS, color=colour, lw=1.5, ms=5, label=name)
    means = [(_after(state, round_), mean) for round_, mean in state.mean_validation_losses().items()]
    if means and len(state.replicas) > 1:
        below.plot(*zip(*means, strict=True), color="black", lw=2.5, ls="--", label="mean", zorder=3)
    if means and math.isfinite(means[-1][1]):
        where, last = means[-1]
        below.annotate(f"{last:.3f}", (where, last), (8, 8), textcoords="offset points", weight="bold")
    above.set_title(f"{state.spec.config.name}: training loss")
    below.set_title("validation loss of the synced model, in each replica's own forward")


def _name_lines(axes: Axes) -> None:
    """Draw the legend: the mean, the first replicas, and the number of others."""
    all_named = list(zip(*axes.get_legend_handles_labels(), strict=True))
    last = [(handle, label) for handle, label in all_named if label == "mean"]
    named = [(handle, label) for handle, label in all_named if label != "mean"]
    if len(named) > MOST_NAMED:
        more = f"and {len(named) - MOST_NAMED:,} more"
        named = [*named[:MOST_NAMED], (axes.plot([], [], color="none", label=more)[0], more)]
    shown, names = zip(*named, *last, strict=True)
    axes.legend(shown, names, loc="upper right", ncols=1 + (len(names) > 9))


@dataclass(frozen=True)
class _Bar:
    """One direction of one link or line."""

    label: str
    kind: str  # one of KINDS
    way: Direction | Way
    size: float  # payload bytes since the first inner step; for equal links or lines, their mean
    first: float  # payload bytes before it: the first run checkpoint and evaluation
    busy: float | None

    @property
    def colour(self) -> str:
        return KINDS[self.kind][self.way]

    @property
    def text(self) -> str:
        busy = "" if self.busy is None else f", busy {format_share(self.busy)}"
        first = f"   (+ {format_bytes(self.first)} before the first step)" if self.first else ""
        return f"{ARROWS[self.way]} {format_bytes(self.size)}{busy}{first}"


def _bars(state: RunState) -> Iterator[_Bar]:
    seconds = state.training_seconds()
    by_kind = sorted(links_alike(state.spec, state.links.values()), key=lambda links: links[0].reaches_exchange)
    for links in by_kind:
        spec, kind = links[0].spec, "exchange link" if links[0].reaches_exchange else "stage link"
        ends = f"{spec.source} – {spec.target}" if len(links) == 1 else range_of([one.name for one in links])
        there, back = (spec.shape(way).bandwidth for way in DIRECTIONS)
        label = ends if spec.has_lines and there is back is None else f"{ends}\n{_both(there, back, '→←')}"
        for direction in DIRECTIONS:
            carried = [link.directions[direction] for link in links]
            busy = [one.busy_share(seconds) for one in carried]
            yield _bar(label, kind, direction, [[one] for one in carried], busy)
    for lines in lines_alike(state.spec, state.lines.values()):
        line = lines[0].spec
        label = f"{range_of([line.name for line in lines])} ({line.kind})\n{_both(line.up, line.down, '↑↓')}"
        for way in WAYS:
            busy = [line.busy_share(way, seconds) for line in lines]
            yield _bar(label, "line", way, [line.carried[way] for line in lines], busy)


def _bar(
    label: str,
    kind: str,
    way: Direction | Way,
    carried: Sequence[Sequence[DirectionState]],
    busy: Sequence[float | None],
) -> _Bar:
    """Return the means over equal links or lines. `carried`: the directions whose traffic each of them adds up."""
    firsts = [sum(one.rounds[0].payload_bytes for one in of if 0 in one.rounds) for of in carried]
    sizes = [sum(one.payload_bytes for one in of) - first for of, first in zip(carried, firsts, strict=True)]
    known = [share for share in busy if share is not None]
    return _Bar(label, kind, way, fmean(sizes), fmean(firsts), fmean(known) if known else None)


def draw_links(state: RunState, path: Path) -> None:
    """Draw the payload bytes of every link and line, by direction, in a taller figure if there are many."""
    from matplotlib import rc_context

    with state.lock, rc_context(STYLE):
        bars = list(_bars(state))
        if not any(bar.size for bar in bars):
            return
        more, bars = max(0, len(bars) - MOST_BARS) // 2, bars[:MOST_BARS]
        figure = new_figure(max(HEIGHT, 1.5 + 0.3 * len(bars)))
        axes = figure.subplots()
        _draw_bars(axes, bars)
        _legend(axes, bars)
        what = "link and line" if state.lines else "link"
        rounds = format_count(state.rounds, "outer round")
        axes.set_title(f"{state.spec.config.name}: what crossed each {what} in {rounds}")
        hidden = f"; {more:,} more are not shown" if more else ""
        axes.set_xlabel(f"payload since the first inner step (tensors and contributions, without headers){hidden}")
        _scale(axes, [bar.size for bar in bars if bar.size])
        save_figure(figure, path)


def _draw_bars(axes: Axes, bars: list[_Bar]) -> None:
    """Draw two bars per link or line, the first on top, with a gap between the kinds."""
    ticks: dict[float, str] = {}
    for index, bar in enumerate(bars):
        row, second = divmod(index, 2)
        centre = row + 0.6 * list(KINDS).index(bar.kind)
        place = centre + (0.2 if second else -0.2)
        axes.barh(place, bar.size, height=0.38, color=bar.colour)
        axes.annotate(bar.text, (bar.size, place), (6, 0), textcoords="offset points", va="center", fontsize=11)
        ticks[centre] = bar.label
    axes.set_yticks(list(ticks), list(ticks.values()), fontsize=11)
    axes.margins(y=0.02)
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x")


def _both(there: float | None, back: float | None, arrows: str) -> str:
    first, second = format_bits_per_second(there), format_bits_per_second(back)
    return first if first == second else f"{arrows[0]} {first}, {arrows[1]} {second}"


def _scale(axes: Axes, sizes: list[float]) -> None:
    """Use a log axis if the sizes differ by more than 100 times, and leave room at the right for texts."""
    from matplotlib.ticker import FuncFormatter, LogLocator

    if max(sizes) > 100 * min(sizes):
        low, high = min(sizes) / 3, max(sizes)
        axes.set_xscale("log")
        axes.set_xlabel(f"{axes.get_xlabel()}, on a log axis")
        axes.set_xlim(low, high * (high / low) ** 0.5)
        axes.xaxis.set_major_locator(LogLocator(numticks=12))
        axes.xaxis.set_minor_locator(LogLocator(numticks=1))
    else:
        axes.set_xlim(0, max(sizes) * 1.35)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_bytes(value)))


def _legend(axes: Axes, bars: list[_Bar]) -> None:
    from matplotlib.patches import Patch

    kinds = {(bar.kind, bar.way): bar.colour for bar in bars}
    handles = [Patch(color=colour, label=f"{kind}, {way} {ARROWS[way]}") for (kind, way), colour in kinds.items()]
    axes.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, -0.08), ncols=6)
