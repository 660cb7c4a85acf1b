"""Draws loss.png and links.png: losses over training, and bytes over each link and line."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from hetero_pp.config.alike import each_alike, range_of
from hetero_pp.config.lines import EXCHANGE
from hetero_pp.core.units import format_bits_per_second, format_bytes, format_count, format_share
from hetero_pp.program.report.state import LineState, LinkState, RunState
from hetero_pp.program.report.tables import ARROWS
from hetero_pp.simulator.charts import HEIGHT, STYLE, draw_curve, new_figure, palette, save_figure

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
        per_round = state.inner_steps or 1  # the axis is in inner steps, or in rounds if their steps vary
        figure = new_figure(HEIGHT)
        above, below = figure.subplots(2, 1, sharex=True, height_ratios=[3, 2])
        for colour, (name, replica) in zip(palette(len(state.replicas)), state.replicas.items(), strict=True):
            if losses := list(replica.training_losses()):
                width = 1.8 if len(losses) <= 500 else 0.9
                draw_curve(above, losses, 60, color=colour, lw=width, ms=4, label=f"{name} ({replica.kind})")
            told = [(round_ * per_round, loss) for round_, loss in sorted(replica.validation_loss.items())]
            if told:
                draw_curve(below, told, MOST_MARKS, color=colour, lw=1.5, ms=5, label=name)
        means = [(round_ * per_round, mean) for round_, mean in state.mean_validation_losses().items()]
        if means and len(state.replicas) > 1:
            below.plot(*zip(*means, strict=True), color="black", lw=2.5, ls="--", label="mean", zorder=3)
        if means and math.isfinite(means[-1][1]):
            below.annotate(f"{means[-1][1]:.3f}", means[-1], (8, 8), textcoords="offset points", weight="bold")
        above.set_title(f"{state.spec.config.name}: training loss")
        below.set_title("validation loss of the synced model, in each replica's own forward")
        every = next(n for n in (1, 2, 5, 10, 20, 50, 100, 10**9) if state.rounds_planned <= n * MOST_MARKS)
        for axes in (above, below):
            axes.grid(axis="y")
            axes.set_ylabel("nats per token")
            # The legend names the mean, the first replicas, and the number of others.
            named = list(zip(*axes.get_legend_handles_labels(), strict=True))
            last, named = [one for one in named if one[1] == "mean"], [one for one in named if one[1] != "mean"]
            if len(named) > MOST_NAMED:
                more = f"and {len(named) - MOST_NAMED:,} more"
                named = [*named[:MOST_NAMED], (axes.plot([], [], color="none", label=more)[0], more)]
            if shown := [*named, *last]:
                axes.legend(*zip(*shown, strict=True), loc="upper right", ncols=1 + (len(shown) > 9))
            for round_ in (closed for closed in sorted(state.closed) if closed % every == 0):
                axes.axvline(round_ * per_round, color="#b5b5b5", lw=1, ls=":", zorder=0)
        what = f"inner steps of each replica; dotted: outer rounds of {state.inner_steps} steps"
        if state.inner_steps is None:
            what = "outer rounds, dotted; between them the inner steps of each replica"
        below.set_xlabel(what if every == 1 else f"{what}, one line in {every} rounds")
        below.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
        save_figure(figure, path)


# ---- links ----


class _Bar(NamedTuple):
    """One direction of one link or line, or the mean of equal ones."""

    label: str
    kind: str  # one of KINDS
    way: str
    size: float  # payload bytes since the first inner step
    text: str


def _bars(state: RunState) -> Iterator[_Bar]:
    groups: list[tuple[str, str, Sequence[LinkState] | Sequence[LineState]]] = []
    for links in each_alike(state.spec, state.links.values()):
        spec = links[0].spec
        ends = f"{spec.source} – {spec.target}" if len(links) == 1 else range_of([link.name for link in links])
        groups.append(("exchange link" if spec.target == EXCHANGE else "stage link", ends, links))
    groups.sort(key=lambda group: group[0] == "exchange link")
    for lines in each_alike(state.spec, state.lines.values()):
        groups.append(("line", f"{range_of([line.name for line in lines])} ({lines[0].spec.kind})", lines))
    for kind, name, alike in groups:
        limits = {way: traffic.bandwidth for way, traffic in alike[0].ways.items()}
        there, back = (f"{ARROWS[way]} {format_bits_per_second(limit)}" for way, limit in limits.items())
        limit = f"{there}, {back}" if there[2:] != back[2:] else there[2:]
        is_limited = not (isinstance(alike[0], LinkState) and alike[0].spec.has_lines and not any(limits.values()))
        for way in limits:
            traffics = [traffic for each in alike for other, traffic in each.ways.items() if other == way]
            first = fmean(traffic.of_round(0).payload_bytes for traffic in traffics)
            size = fmean(traffic.payload_bytes - traffic.of_round(0).payload_bytes for traffic in traffics)
            busy = [share for each in traffics if (share := each.busy_share(state.training_seconds())) is not None]
            text = f"{ARROWS[way]} {format_bytes(size)}" + (f", busy {format_share(fmean(busy))}" if busy else "")
            text += f"   (+ {format_bytes(first)} before the first step)" if first else ""
            yield _Bar(f"{name}\n{limit}" if is_limited else name, kind, way, size, text)


def draw_links(state: RunState, path: Path) -> None:
    """Draw the payload bytes of every link and line, by direction, in a taller figure if there are many."""
    from matplotlib import rc_context
    from matplotlib.patches import Patch
    from matplotlib.ticker import FuncFormatter, LogLocator

    with state.lock, rc_context(STYLE):
        bars = list(_bars(state))
        if not any(bar.size for bar in bars):
            return
        more, bars = max(0, len(bars) - MOST_BARS) // 2, bars[:MOST_BARS]
        figure = new_figure(max(HEIGHT, 1.5 + 0.3 * len(bars)))
        axes = figure.subplots()
        # Two bars per link or line, the first on top, with a gap between the kinds.
        ticks: dict[float, str] = {}
        for index, bar in enumerate(bars):
            row, second = divmod(index, 2)
            centre = row + 0.6 * list(KINDS).index(bar.kind)
            place = centre + (0.2 if second else -0.2)
            axes.barh(place, bar.size, height=0.38, color=KINDS[bar.kind][bar.way])
            axes.annotate(bar.text, (bar.size, place), (6, 0), textcoords="offset points", va="center", fontsize=11)
            ticks[centre] = bar.label
        axes.set_yticks(list(ticks), list(ticks.values()), fontsize=11)
        axes.margins(y=0.02)
        axes.invert_yaxis()
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="x")
        kinds = dict.fromkeys((bar.kind, bar.way) for bar in bars)
        handles = [Patch(color=KINDS[kind][way], label=f"{kind}, {way} {ARROWS[way]}") for kind, way in kinds]
        axes.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, -0.08), ncols=6)
        rounds = format_count(state.rounds, "outer round")
        what = "link and line" if state.lines else "link"
        axes.set_title(f"{state.spec.config.name}: what crossed each {what} in {rounds}")
        hidden = f"; {more:,} more are not shown" if more else ""
        label = f"payload since the first inner step (tensors and contributions, without headers){hidden}"
        # Sizes that differ by more than 100 times need a log axis. Room at the right is left for the texts.
        low, high = min(bar.size for bar in bars if bar.size) / 3, max(bar.size for bar in bars)
        if high > 300 * low:
            label += ", on a log axis"
            axes.set_xscale("log")
            axes.set_xlim(low, high * (high / low) ** 0.5)
            axes.xaxis.set_major_locator(LogLocator(numticks=12))
            axes.xaxis.set_minor_locator(LogLocator(numticks=1))
        else:
            axes.set_xlim(0, high * 1.35)
        axes.set_xlabel(label)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_bytes(value)))
        save_figure(figure, path)
