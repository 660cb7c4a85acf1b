"""Prints a rehearsal beside its prediction: times, replicas, members, links, and where both part."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console

from hetero_pp.config.lines import DIRECTIONS
from hetero_pp.core.units import (
    format_bits_per_second,
    format_bytes,
    format_count,
    format_duration,
    format_percent,
    format_seconds,
)
from hetero_pp.program.rehearse.comparison import APART, RehearsalComparison, relative
from hetero_pp.program.report.output import say
from hetero_pp.program.report.tables import PlainTable

_ROUND = {
    "round_seconds": "a round",
    "inner_seconds": "  inner loop",
    "outer_seconds": "  outer round",
    "rest_seconds": "  the rest",
    "step_seconds": "a step",
    "tokens_per_second": "tokens per second",
    "utilization.absolute": "members train",
    "utilization.relative": "of free links",
}
_REPLICA = {
    "step_seconds": "a step",
    "inner_seconds": "inner loop",
    "bubble": "bubble",
    "exposed_communication": "waits",
}
MARK = "<<"
"""Sign beside a quantity that was measured differently from its prediction."""


def print_comparison(console: Console, found: RehearsalComparison) -> None:
    """Print everything that was measured, beside what was predicted."""
    title = f"{found.name}: a rehearsal, which trained nothing."
    steps = "of a given time" if found.steps is None else f"{format_count(found.steps, 'inner step')} each"
    rounds = f"{format_count(found.rounds, 'round')} ({found.timed} timed), {steps}"
    say(console, f"{title} Links, messages and rounds were real, and compute was timed waits: {rounds}.", bold=title)
    _print_times(console, found)
    _print_replicas(console, found)
    _print_members(console, found)
    _print_links(console, found)
    for line in closing_lines(found):
        say(console, line)


def closing_lines(found: RehearsalComparison) -> Iterator[str]:
    """Yield what parts, then what follows for the whole run."""
    for one in found.parts:
        measured, predicted = (_shown(one.what, value) for value in (one.measured, one.predicted))
        apart = _difference(relative(one.measured, one.predicted))
        inside = f"; most of it is {one.component}" if one.component else ""
        yield f"{MARK} {one.what}: measured {measured}, predicted {predicted} ({apart}){inside}."
    if not found.parts:
        yield f"All measured times and bytes are within {APART:.0%} of the prediction."
    run = found.whole_run
    rounds = format_count(run.rounds, "round")
    steps = f"{rounds} of {run.steps} inner steps" if run.steps is not None else rounds
    least = "at least " if run.is_bound else ""
    absolute, relative_ = (f"{least}{format_percent(run.utilization[kind])}" for kind in ("absolute", "relative"))
    predicted = " and ".join(format_percent(run.predicted[kind]) for kind in ("absolute", "relative"))
    shares = f"{absolute} of the time, {relative_} of the share that free links allow (predicted: {predicted})"
    lasts = format_duration(86400 * run.days)
    yield f"The run itself ({steps}) would take {lasts}. Its members would train {shares}."


def _shown(what: str, value: float) -> str:
    if what.endswith("_seconds"):
        return format_seconds(value)
    if what.endswith("_bytes"):
        return format_bytes(value)
    if what == "tokens_per_second":
        return f"{value:,.0f}"
    return format_percent(value)


def _difference(apart: float | None) -> str:
    return "not predicted" if apart is None else f"{100 * apart:+.1f} %"


def _marked(found: RehearsalComparison, what: str) -> str:
    return MARK if any(one.what == what for one in found.parts) else ""


def _print_times(console: Console, found: RehearsalComparison) -> None:
    table = PlainTable(["all replicas"], ["measured", "predicted", "difference"], [""])
    for name, label in _ROUND.items():
        both = (_shown(name, side[name]) for side in (found.measured, found.predicted))
        table.add_row(label, *both, _difference(found.differences[name]), _marked(found, name))
    console.print(table)


def _names(found: RehearsalComparison, section: str) -> list[str]:
    """Return the names of a section's entries, such as the replicas. Names of links contain dots."""
    keys = (name.removeprefix(f"{section}.").rpartition(".")[0] for name in found.measured if name.startswith(section))
    return list(dict.fromkeys(keys))


def _print_replicas(console: Console, found: RehearsalComparison) -> None:
    table = PlainTable(["replica", ""], list(_REPLICA.values()))
    for name in _names(found, "replicas"):
        for index, side in enumerate((found.measured, found.predicted)):
            cells = (_shown(key, side[f"replicas.{name}.{key}"]) for key in _REPLICA)
            table.add_row("" if index else name, ("measured", "predicted")[index], *cells)
    console.print(table)
    say(console, "bubble: what stages would be idle with free links; waits: what links add", style="dim", indent="  ")


def _print_members(console: Console, found: RehearsalComparison) -> None:
    heads = ["computes", "waits for previous", "waits for next", "outer round", "evaluates"]
    table = PlainTable(["member, in a round"], heads)
    for name, seconds in found.members.items():
        parts = ("compute", "wait_previous", "wait_next", "outer", "evaluation")
        table.add_row(name, *(format_seconds(seconds[part]) for part in parts))
    console.print(table)


def _print_links(console: Console, found: RehearsalComparison) -> None:
    table = PlainTable(["link", ""], ["measured", "predicted", "difference"], [" "])
    for name in _names(found, "links"):
        keys = [f"links.{name}.{way}_bytes" for way in DIRECTIONS]
        measured, predicted = ([format_bytes(side[key]) for key in keys] for side in (found.measured, found.predicted))
        differences = [_difference(found.differences[key]) for key in keys]
        table.add_both(name, DIRECTIONS, measured, predicted, differences, [_marked(found, key) for key in keys])
    console.print(table)
    if not found.lines:
        return
    table = PlainTable(["line of a host"], ["up", "down"])
    for member, rates in found.lines.items():
        table.add_row(member, *(format_bits_per_second(rates[way]) for way in ("up", "down")))
    console.print(table)
    say(console, "as each host measured it before it joined", style="dim", indent="  ")
