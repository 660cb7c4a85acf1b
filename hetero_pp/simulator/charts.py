"""Sweeps of a key, pictures of predictions (shares of a round, curves, a timeline), and the style of all pictures."""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from hetero_pp.config.alike import alike, each_alike, range_of
from hetero_pp.config.lines import DIRECTIONS
from hetero_pp.config.overrides import Override
from hetero_pp.config.spec import RunSpec
from hetero_pp.core.errors import ConfigError
from hetero_pp.core.files import whole, write_whole
from hetero_pp.core.units import (
    BITS_PER_SECOND,
    BYTES,
    FORMATS,
    ROUND_TIMES,
    SECONDS,
    format_bytes,
    format_duration,
    format_number,
    parse_quantity,
)
from hetero_pp.simulator.events import OnSpan
from hetero_pp.simulator.prediction import Prediction

POINTS = 13  # points of a range, evenly spaced on a logarithmic scale

_UNITS = ((BITS_PER_SECOND, "bit/s", "100 Mbit/s"), (SECONDS, "s", "20 ms"), (BYTES, "B", "512 MiB"))
_NAMES = {"bit/s": "bandwidth", "s": "seconds", "B": "bytes"}


@dataclass(frozen=True)
class Sweep:
    """Key and the values that it takes, as in the YAML."""

    key: str
    values: Sequence[str]
    rows: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Keys and values that each row stands for, by the name of the row."""
    option: str = "--sweep"  # command-line option that set the key

    @classmethod
    def of_rows(cls, rows: Mapping[str, Mapping[str, Any]]) -> Sweep:
        """Return a sweep over the rows of the YAML, by name."""
        return cls("row", list(rows), rows)

    def overrides(self, value: str) -> list[Override]:
        """Return the changes of the YAML that a value stands for."""
        if not self.rows:
            return [Override.parse(f"{self.key}={value}", self.option)]
        option = f"simulate.rows.{value}:"
        return [Override.parse(f"{key}={json.dumps(changed)}", option) for key, changed in self.rows[value].items()]

    @classmethod
    def parse(cls, text: str, option: str = "--sweep") -> Sweep:
        """Parse KEY=FROM..TO or KEY=A,B,C. Raises ConfigError."""
        return cls(*parse_sweep(option, text), option=option)

    @property
    def title(self) -> str:
        """Description of the swept key, for use in a sentence."""
        return "The choice of a row" if self.rows else f"`{self.key}`"

    def number(self, value: str) -> tuple[float, str] | None:
        """Return a value in base units, and the unit; None if it is no quantity."""
        return None if self.rows else quantity_of(value)

    def point(self, value: str) -> dict[str, Any]:
        """Return the value as JSON: as it was given, and as a number under the name of its quantity."""
        found = self.number(value)
        return {"value": value} | ({} if found is None else {_NAMES[found[1]]: found[0]})


def parse_sweep(option: str, text: str) -> tuple[str, list[str]]:
    """Return the key, and its values as in the YAML: those of KEY=A,B,C or of KEY=FROM..TO.

    Raises ConfigError that names the `option` of the text.
    """
    key, _, values = (part.strip() for part in text.partition("="))
    low, dots, high = values.partition("..")
    if dots and key:
        first, last = quantity_of(low), quantity_of(high)
        if first is None or last is None or first[1] != last[1]:
            expected = "expected both ends in units of one kind, such as `10Mbit/s..10Gbit/s`"
            raise ConfigError((), f"{option} {text}: {expected}")
        if not 0 < first[0] < last[0]:
            raise ConfigError((), f"{option} {text}: expected a range from a value above 0 to a larger one")
        ratio = (last[0] / first[0]) ** (1 / (POINTS - 1))
        return key, [f"{first[0] * ratio**index!r} {first[1]}" for index in range(POINTS)]
    found = [value.strip() for value in values.split(",")]
    if not key or not all(found):
        raise ConfigError((), f"{option} {text}: expected KEY=FROM..TO or KEY=A,B,C")
    return key, found


def changes_nothing(outcomes: Iterable[object]) -> bool:
    """Return whether several values of a key all had the same outcome."""
    first, *others = outcomes
    return bool(others) and all(one == first for one in others)


def quantity_of(value: str) -> tuple[float, str] | None:
    """Return a bandwidth, a time or a size in base units, and the unit; None if it is none of them."""
    spaced = re.sub(r"^\s*([0-9._]+)\s*", r"\1 ", value)
    for units, base, example in _UNITS:
        with suppress(ValueError):
            return parse_quantity(spaced, units, example), base
    return None


# ---- pictures in one style; matplotlib is imported once something is drawn ----

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK = "#333333"
STYLE: Any = {
    "font.size": 13,
    "axes.titlesize": 16,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 14,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#888888",
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": "#e3e3e3",
    "axes.axisbelow": True,
    "legend.edgecolor": "none",
    "legend.framealpha": 0.9,
}
WIDTH, HEIGHT, DPI = 16.0, 10.0, 100  # inches, inches and dots per inch: 1600 x 1000 pixels


def new_figure(height: float) -> Figure:
    """Return an empty figure of the usual width. `height`: in inches."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    return Figure(figsize=(WIDTH, height), dpi=DPI, layout=ConstrainedLayoutEngine(w_pad=0.2, h_pad=0.15))


def palette(count: int) -> list[Any]:
    """Return a colour for each of `count` curves; they repeat after 20."""
    from matplotlib import colormaps

    colours = colormaps["tab10" if count <= 10 else "tab20"]
    return [colours(index % colours.N) for index in range(count)]


def draw_curve(axes: Axes, points: Iterable[tuple[float, float]], most_marks: int, **style: Any) -> None:
    """Draw a curve, with a mark at each point if there are at most `most_marks`."""
    x, y = zip(*points, strict=True)
    axes.plot(x, y, marker="o" if len(x) <= most_marks else "", **style)


PICTURE_FORMATS = (".png", ".svg", ".pdf", ".jpg", ".webp")


def require_format(path: Path | None) -> None:
    """Raise ConfigError for a picture whose format is not known; a name without a suffix is a PNG."""
    if path is not None and path.suffix.lower() not in ("", *PICTURE_FORMATS):
        raise ConfigError((), f"{path}: found the format `{path.suffix}`, expected one of {', '.join(PICTURE_FORMATS)}")


def save_figure(figure: Figure, path: Path, dpi: int = DPI) -> None:
    """Write a figure to a file. The suffix of its name selects the format; by default PNG."""
    content = io.BytesIO()
    figure.savefig(content, dpi=dpi, format=path.suffix.lower().removeprefix(".") or "png")
    write_whole(path, content.getvalue())


# ---- charts of predictions ----

_MARKERS: Mapping[str, dict[str, Any]] = {
    "equal": {"marker": "x"},
    "at least": {"marker": "^"},
    "at most": {"marker": "v"},
}
"""Markers of published numbers, by kind of bound."""


MOST_ROWS = 32  # Largest number of members, and of links with lines, in a picture. A note below counts the others.

_ROW_INCHES, _EDGE_INCHES, _DPI = 0.42, 1.8, 90
_MOST_TICKS = 6


_ChartRow = tuple[str, Sequence[float], str]
"""Name, shares of a round (empty without a bandwidth limit), and text. Equal members, links or lines share a row."""


def draw_prediction(spec: RunSpec, prediction: Prediction, path: Path) -> None:
    """Draw the share of a round that members train and that links and lines are busy, with the bytes of a round."""
    from matplotlib.figure import Figure

    replica_of = {replica.name: replica for replica in prediction.replicas}
    members, links = list[_ChartRow](), list(_link_rows(spec, prediction))
    for replicas in alike(spec):
        for same in zip(*(replica_of[replica.name].stages for replica in replicas), strict=True):
            share = fmean(stage.utilization for stage in same)
            members.append((range_of([stage.member for stage in same]), [share], f"{share:.1%}"))
    rows = max(min(len(one), MOST_ROWS) for one in (members, links))
    figure = Figure(figsize=(15, _EDGE_INCHES + _ROW_INCHES * rows), layout="constrained")
    left, right = figure.subplots(1, 2)
    _draw_bars(left, members, [""], rows)
    left.set(title="members", xlabel="share of a round that it trains")
    both = ("→ forward, ↑ up", "← backward, ↓ down") if prediction.lines else ("→ forward", "← backward")
    _draw_bars(right, links, both, rows)
    title = "links and lines" if prediction.lines else "links"
    right.set(title=f"{title}: bytes of a round", xlabel="share of a round that it is busy")
    right.legend(loc="upper center", bbox_to_anchor=(0.5, -0.9 / rows - 0.06), ncols=2, frameon=False)
    save_figure(figure, path, _DPI)


def _link_rows(spec: RunSpec, prediction: Prediction) -> Iterator[_ChartRow]:
    """Yield lines first, because they limit most, then links. Unlimited links show only bytes."""

    def means(rows: Sequence[Any], *keys: str) -> list[float]:
        return [fmean(getattr(row, key) for row in rows) for key in keys]

    for lines in each_alike(spec, prediction.lines):
        up, down = map(format_bytes, means(lines, "up_bytes", "down_bytes"))
        name = f"line of {range_of([one.name for one in lines])}"
        yield name, means(lines, "up_busy", "down_busy"), f"↑ {up}  ↓ {down}"
    for same in each_alike(spec, (link for replica in prediction.replicas for link in replica.links)):
        link = spec.links[same[0].name]
        forward, backward = map(format_bytes, means(same, "forward_bytes", "backward_bytes"))
        name, text = range_of([one.name for one in same]), f"→ {forward}  ← {backward}"
        if any(link.shape(way).bandwidth is not None for way in DIRECTIONS):
            yield name, means(same, "forward_busy", "backward_busy"), text
        else:
            yield name, [], f"{text} ({'limited by its access lines' if link.has_lines else 'no limit'})"


def _draw_bars(axes: Axes, rows: Sequence[_ChartRow], labels: Sequence[str], height_of_all: int) -> None:
    """Draw a bar for each label in every row, and the row's text behind the longest bar. `height_of_all` is in rows."""
    shown, height = rows[:MOST_ROWS], 0.76 / len(labels)
    for number, label in enumerate(labels):
        places = [place + (number - (len(labels) - 1) / 2) * height for place in range(len(shown))]
        widths = [shares[number] if shares else 0.0 for _, shares, _ in shown]
        axes.barh(places, widths, height, color=f"C{number}", label=label or None)
    for place, (_, shares, text) in enumerate(shown):
        axes.annotate(text, (max(shares, default=0), place), (4, 0), textcoords="offset points", va="center")
    axes.set_yticks(range(len(shown)), [name for name, _, _ in shown])
    axes.set_xlim(0, 1.35)
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "25%", "50%", "75%", "100%"])
    if len(rows) > MOST_ROWS:
        axes.annotate(f"and {len(rows) - MOST_ROWS:,} more", (0, 0), (0, -34), "axes fraction", "offset points")
    axes.set_ylim(height_of_all - 0.5, -0.6)
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _scale(axis: Any, unit: str, values: Sequence[float]) -> None:
    """Format the ticks of an axis as quantities with units. A log scale must be set before."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator

    shown = FORMATS.get(unit, format_number)
    axis.set_major_formatter(FuncFormatter(lambda value, _: shown(value)))
    axis.set_minor_formatter(NullFormatter())
    is_log = axis.get_scale() == "log"
    if unit == "s":  # on a log scale times between the extreme values, else equal steps from 0
        low, high = min(values), max(values)
        step = next((one for one in ROUND_TIMES if high / one < _MOST_TICKS), high)
        ticks = [step * number for number in range(_MOST_TICKS) if step * number <= high]
        if is_log:
            inside = [one for one in ROUND_TIMES if low / 1.1 <= one <= high * 1.1]
            ticks = inside[:: -(-len(inside) // _MOST_TICKS)] if len(inside) > 1 else [low, high]
        axis.set_major_locator(FixedLocator(ticks))
        axis.set_minor_locator(NullLocator())
    elif not is_log:
        axis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
    else:
        decades = math.log10(max(values) / min(values)) if values and min(values) > 0 else 1.0
        subs = (1.0,) if decades > 4 else (1.0, 3.0) if decades > 1.5 else (1.0, 2.0, 3.0, 5.0, 7.0)
        axis.set_major_locator(LogLocator(subs=subs, numticks=12))
        axis.set_minor_locator(NullLocator())


def draw_sweep(sweep: Sweep, curves: Sweep | None, found: Mapping[str, Mapping[str, Prediction]], path: Path) -> None:
    """Draw utilization and the time of a round against the swept value, a line for each curve; rows become bars."""
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
        left.plot(places, relative, marker=".", label=name or "relative to free links")
        for place, prediction in zip(places, predictions.values(), strict=True):
            for one in prediction.published:
                if one.what == "utilization.relative":
                    left.plot([place], [100 * one.published], color="black", **_MARKERS[one.bound])
                    published[one.bound] = one.where
        if curves is None:
            absolute = [100 * one.utilization["absolute"] for one in predictions.values()]
            left.plot(places, absolute, marker=".", label="of the total time")
        right.plot(places, [one.round_seconds for one in predictions.values()], marker=".", label=name or None)
    left.set(ylabel="members train, % relative to free links" if curves is not None else "members train, %")
    left.set_ylim(0, 105)
    right.set(ylabel="time of a round", yscale="log")
    rounds = [one.round_seconds for of in found.values() for one in of.values()]
    _scale(right.yaxis, "s", rounds)
    for axes in (left, right):
        axes.set_xlabel(sweep.key)
        if unit:
            axes.set_xscale("log")
            _scale(axes.xaxis, unit, [number[0] for value in sweep.values if (number := sweep.number(value))])
        axes.grid(alpha=0.3)
    for bound, where in published.items():
        left.plot([], [], color="black", linestyle="", label=f"{where}: {bound}", **_MARKERS[bound])
    left.legend()
    save_figure(figure, path, _DPI)


def _draw_rows(found: Mapping[str, Mapping[str, Prediction]], path: Path) -> None:
    """Draw a row for each prediction.

    It shows the time of a round and of all rounds, the bytes that a replica sends and receives, and ratios to published
    numbers.
    """
    from matplotlib.figure import Figure

    rows = {f"{row}, {curve}" if curve else row: one for curve, of in found.items() for row, one in of.items()}
    predictions, places = list(rows.values()), range(len(rows))
    has_published = any(one.published for one in predictions)
    figure = Figure(figsize=(18 if has_published else 15, 1.5 + 0.4 * len(rows)), layout="constrained")
    a_round, in_all, volumes, *others = figure.subplots(1, 4 if has_published else 3, sharey=True)
    for axes, factors in (a_round, [1.0] * len(rows)), (in_all, [one.rounds for one in predictions]):
        outer = [one.outer_seconds * factor for one, factor in zip(predictions, factors, strict=True)]
        both = [one.round_seconds * factor for one, factor in zip(predictions, factors, strict=True)]
        axes.barh(places, both, label="inner steps and evaluation")
        axes.barh(places, outer, left=[a - b for a, b in zip(both, outer, strict=True)], label="outer round")
        for place, seconds in enumerate(both):
            text = (format_duration(seconds), (seconds, place), (3, 0), "data", "offset points")
            axes.annotate(*text, va="center", fontsize="small")
        _scale(axes.xaxis, "s", both)
        axes.set_xlim(0, 1.25 * max(both))
    a_round.set(xlabel="time of a round")
    in_all.set(xlabel="time of all rounds")
    volumes.barh([row - 0.2 for row in places], [one.sent_bytes for one in predictions], 0.4, label="sent")
    volumes.barh([row + 0.2 for row in places], [one.received_bytes for one in predictions], 0.4, label="received")
    least = min(min(one.sent_bytes, one.received_bytes) for one in predictions)
    volumes.set(xlabel="per replica in all rounds", xscale="log", xlim=(least / 3 or 1, None))
    _scale(volumes.xaxis, "B", [size for one in predictions for size in (one.sent_bytes, one.received_bytes) if size])
    for axes in others:
        _draw_ratios(axes, predictions)
    a_round.set_yticks(list(places), list(rows))
    a_round.invert_yaxis()
    for axes in (a_round, in_all, volumes, *others):
        axes.grid(axis="x", alpha=0.3)
        axes.set_axisbelow(True)
        axes.legend(fontsize="small", loc="lower center", bbox_to_anchor=(0.5, 1.0))
    save_figure(figure, path, _DPI)


def _draw_ratios(axes: Any, predictions: Sequence[Prediction]) -> None:
    """Draw predicted over published numbers, one colour for each number.

    Bounds are arrows into the range where they hold.
    """
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


# ---- the timeline as a Perfetto trace: a process for each replica, a track for each stage and hop ----

NANOSECONDS = 1e9


@dataclass(frozen=True)
class Span:
    """Activity on one track of a replica. Times are in seconds."""

    replica: str
    track: str
    name: str
    start: float
    end: float


class Timeline:
    """Collects spans of the first replica behind each name."""

    def __init__(self) -> None:
        self.spans: list[Span] = []

    def of(self, replica: str) -> OnSpan:
        """Return the callback that records a replica's spans."""

        def on_span(track: str, what: str, micro_batch: int, start: float, end: float) -> None:
            name = f"{what} {micro_batch}" if what in ("forward", "backward", "activation", "gradient") else what
            self.spans.append(Span(replica, track, name, start, end))

        return on_span

    def write(self, path: Path) -> None:
        """Write a trace that ui.perfetto.dev opens."""
        from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import TrackEvent
        from perfetto.trace_builder.proto_builder import StreamingTraceProtoBuilder

        tracks: dict[tuple[str, str], int] = {}
        with whole(path) as part, part.open("wb") as file:
            builder = StreamingTraceProtoBuilder(file)
            for span in self.spans:
                for key in ((span.replica, ""), (span.replica, span.track)):
                    if key not in tracks:
                        tracks[key] = len(tracks) + 1
                        packet = builder.create_packet()
                        packet.track_descriptor.uuid = tracks[key]
                        packet.track_descriptor.name = span.track if key[1] else span.replica
                        if key[1]:
                            packet.track_descriptor.parent_uuid = tracks[span.replica, ""]
                        builder.write_packet(packet)
                for time, kind in ((span.start, TrackEvent.TYPE_SLICE_BEGIN), (span.end, TrackEvent.TYPE_SLICE_END)):
                    packet = builder.create_packet()
                    packet.timestamp = round(time * NANOSECONDS)
                    packet.trusted_packet_sequence_id = 1
                    packet.track_event.type = kind
                    packet.track_event.track_uuid = tracks[span.replica, span.track]
                    packet.track_event.name = span.name
                    builder.write_packet(packet)
