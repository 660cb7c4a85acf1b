"""Compares what a rehearsal measured with what `simulate` predicts, and says where both part.

Pure: every time comes from a report. Both sides split a round into three parts. The inner loop is that of the slowest
replica. The outer round lasts from the end of that loop until the last member goes on. The rest is the evaluation, less
what it shares with the next round.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from rich.console import Console

from hetero_pp.config.lines import DIRECTIONS, Direction
from hetero_pp.config.spec import RunSpec
from hetero_pp.core.units import (
    format_bits_per_second,
    format_bytes,
    format_count,
    format_duration,
    format_percent,
    format_seconds,
)
from hetero_pp.messages.messages_pb2 import MeasuredLine, MemberRound, Report
from hetero_pp.program.report.output import say
from hetero_pp.program.report.tables import PlainTable
from hetero_pp.simulator.prediction import Prediction

APART = 0.03  # relative difference beyond which a measurement and its prediction part
NOTHING_TIMED = "no round of the rehearsal was complete, so nothing is known of the group"
"""Line in place of a comparison, if members left or did not report."""

Quantities = Mapping[str, float]  # quantity, such as `round_seconds` or `replicas.home.step_seconds` -> value


class Timings:
    """Times and bytes of the rounds of one run, from its reports.

    The first round contains the start of the connections, and with `outer.overlap` nothing overlaps with the last one.
    So the means are over the others if there are any.
    """

    def __init__(self, spec: RunSpec) -> None:
        self._spec = spec
        self._rounds: dict[str, dict[int, MemberRound]] = defaultdict(dict)
        self._steps: dict[str, dict[int, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
        self._closed: dict[int, float] = {}
        self._bytes: dict[tuple[str, str], dict[int, int]] = defaultdict(dict)
        self.lines: dict[str, MeasuredLine] = {}  # lines that hosts measured before they joined, by member

    def apply(self, report: Report) -> None:
        """Take in one report. A later report on the same round replaces an earlier one."""
        match report.WhichOneof("event"):
            case "member_round":
                self._rounds[report.member][report.member_round.round] = report.member_round
            case "inner_step":
                step = report.inner_step
                self._steps[report.member][step.round][step.step] = report.time
            case "round_closed":
                self._closed[report.round_closed.round] = report.time
            case "link_use":
                use = report.link_use
                self._bytes[use.link, use.direction][use.round] = use.wire_bytes
            case "measured_line":
                self.lines[report.member] = report.measured_line

    @property
    def timed(self) -> Sequence[int]:
        """Rounds that all members have finished, without the first and, with overlap, the last if there are others."""
        known = [set(self._rounds[member]) for member in self._spec.needed]
        rounds = sorted(set.intersection(*known) & self._closed.keys()) if known else []
        later = rounds[1:] or rounds
        return (later[:-1] or later) if self._spec.config.outer.overlap else later

    @property
    def round_seconds(self) -> float:
        """Seconds from the close of a round to the next close. For a single round: all that a member did in it."""
        pairs = [(round_ - 1, round_) for round_ in self.timed if round_ - 1 in self._closed]
        if pairs:
            return fmean(self._closed[later] - self._closed[sooner] for sooner, later in pairs)
        whole = ("compute_seconds", "wait_seconds", "outer_seconds", "evaluation_seconds")
        return max(sum(self.of_member(name, part) for part in whole) for name in self._spec.needed)

    def of_member(self, member: str, field: str) -> float:
        """Return the mean over the timed rounds of a field of MemberRound."""
        return fmean(float(getattr(self._rounds[member][round_], field)) for round_ in self.timed)

    def step_seconds(self, member: str) -> float | None:
        """Return the mean time between two inner steps of a member; None if its rounds have only one."""
        times = [sorted(own.values()) for round_, own in self._steps[member].items() if round_ in self.timed]
        means = [(own[-1] - own[0]) / (len(own) - 1) for own in times if len(own) > 1]
        return fmean(means) if means else None

    def steps(self, member: str) -> float:
        """Return the mean number of inner steps that a member took in a timed round."""
        return fmean(len(self._steps[member][round_]) for round_ in self.timed)

    def wire_bytes(self, link: str, way: Direction) -> float:
        """Return the mean bytes that a link carried in a timed round."""
        return fmean(self._bytes[link, way].get(round_, 0) for round_ in self.timed)


@dataclass(frozen=True)
class Parting:
    """A quantity that was measured differently from its prediction."""

    what: str
    measured: float
    predicted: float
    component: str  # the part of it that differs most, in words


@dataclass(frozen=True)
class WholeRun:
    """Conclusions for the run that was rehearsed: its rounds have more inner steps than those of the rehearsal."""

    rounds: int
    steps: int | None
    round_seconds: float
    utilization: Mapping[str, float]  # as of a prediction
    predicted: Mapping[str, float]
    days: float
    is_bound: bool
    """Whether the utilization is a lower bound: with `outer.overlap`, longer inner loops hide more of a round."""


@dataclass(frozen=True)
class RehearsalComparison:
    """A rehearsal beside its prediction."""

    name: str
    rounds: int
    steps: int | None
    timed: int  # number of rounds that are measured
    measured: Quantities
    predicted: Quantities
    parts: list[Parting]
    whole_run: WholeRun
    members: Mapping[str, Mapping[str, float]]
    """Seconds of each member in a round, by part. `blocked`, waiting for the exchange, is a part of `outer`."""
    lines: Mapping[str, Mapping[str, float]]
    """Line of each host that joined, in bits per second `up` and `down`, as the host measured it."""
    costs: Mapping[str, Any]  # costs and hardware of the section `simulate` from which compute was emulated
    busy: float = 0.0  # share of the time of this machine's processors that was in use, by whatever process

    def as_json(self) -> dict[str, Any]:
        """Return the object that `--json` writes."""
        return {"rehearsal": True} | asdict(self) | {"difference": self.differences}

    @property
    def differences(self) -> dict[str, float | None]:
        """Relative difference of each quantity; None if nothing is predicted."""
        return {name: relative(self.measured[name], self.predicted[name]) for name in self.measured}


def relative(measured: float, predicted: float) -> float | None:
    """Return by how much a measurement exceeds its prediction, relative to it; None if that is 0."""
    return measured / predicted - 1 if predicted else (0.0 if not measured else None)


def share(part: float, whole: float) -> float:
    """Return a share, 0 of nothing: members may report that they took no time, or no step."""
    return part / whole if whole else 0.0


def compare(spec: RunSpec, timings: Timings, prediction: Prediction, whole: Prediction) -> RehearsalComparison:
    """Return the measurements of `timings` beside the prediction for the same rounds.

    `whole`: the prediction for the rehearsed run, which has longer rounds. `timings` must have a timed round.
    """
    measured, predicted = _quantities(spec, timings, prediction)
    parts = ("compute", "wait_previous", "wait_next", "outer", "blocked", "evaluation")
    simulate = spec.config.simulate.model_dump(mode="json")
    return RehearsalComparison(
        name=spec.config.name,
        rounds=spec.config.outer.rounds,
        steps=spec.config.inner.steps,
        timed=len(timings.timed),
        measured=measured,
        predicted=predicted,
        parts=list(_parts(timings, prediction, measured, predicted)),
        whole_run=_whole_run(spec, whole, measured),
        members={name: {part: timings.of_member(name, f"{part}_seconds") for part in parts} for name in spec.needed},
        lines={member: {"up": one.up, "down": one.down} for member, one in sorted(timings.lines.items())},
        costs={key: simulate[key] for key in ("hardware", "measured")},
    )


def _quantities(spec: RunSpec, timings: Timings, prediction: Prediction) -> tuple[dict[str, float], dict[str, float]]:
    """Return both sides as quantities with the same names: what was measured, and what is predicted."""
    measured, predicted = dict[str, float](), dict[str, float]()
    inner, outer, tokens = list[float](), list[float](), 0.0
    compute = {name: timings.of_member(name, "compute_seconds") for name in spec.needed}
    for found, replica in zip(prediction.replicas, spec.config.replicas, strict=True):
        loops = [compute[one] + timings.of_member(one, "wait_seconds") for one in replica.members]
        outer.append(max(timings.of_member(one, "outer_seconds") for one in replica.members))
        inner.append(max(loops))
        steps = timings.steps(replica.members[0])
        tokens += steps * replica.batch_size * spec.config.data.sequence_length
        # The inner loop with free links is the predicted one for the same number of steps: no link affects it.
        free = found.inner_seconds * (1 - found.exposed_communication) * steps / found.steps
        own = {
            "step_seconds": timings.step_seconds(replica.members[0]) or inner[-1] / max(steps, 1.0),
            "inner_seconds": inner[-1],
            "bubble": 1 - share(fmean(compute[one] for one in replica.members), free),
            "exposed_communication": 1 - share(free, inner[-1]),
        }
        measured |= {f"replicas.{replica.name}.{name}": value for name, value in own.items()}
        predicted |= {f"replicas.{replica.name}.{name}": getattr(found, name) for name in own}
        for link in found.links:
            for way in DIRECTIONS:
                measured[f"links.{link.name}.{way}_bytes"] = timings.wire_bytes(link.name, way)
                predicted[f"links.{link.name}.{way}_bytes"] = getattr(link, f"{way}_bytes")
    round_seconds = timings.round_seconds
    rate = share(tokens, round_seconds)
    free_rate = prediction.tokens_per_second / prediction.utilization["relative"]
    longest = max(one.inner_seconds for one in prediction.replicas)
    of_round = {
        "round_seconds": (round_seconds, prediction.round_seconds),
        "inner_seconds": (max(inner), longest),
        "outer_seconds": (min(outer), prediction.outer_seconds),
        "rest_seconds": (
            max(round_seconds - max(inner) - min(outer), 0.0),
            max(prediction.round_seconds - longest - prediction.outer_seconds, 0.0),
        ),
        "step_seconds": (
            max(measured[f"replicas.{one.name}.step_seconds"] for one in prediction.replicas),
            prediction.step_seconds,
        ),
        "tokens_per_second": (rate, prediction.tokens_per_second),
        "utilization.absolute": (share(fmean(compute.values()), round_seconds), prediction.utilization["absolute"]),
        "utilization.relative": (rate / free_rate, prediction.utilization["relative"]),
    }
    both = [{name: pair[side] for name, pair in of_round.items()} for side in (0, 1)]
    return both[0] | measured, both[1] | predicted


def _parts(timings: Timings, prediction: Prediction, measured: Quantities, predicted: Quantities) -> Iterator[Parting]:
    """Yield the times and bytes that part. Other quantities follow from these.

    The parts of a round part if they differ by a share of the whole round.
    """
    words = {"inner_seconds": "the inner loop", "outer_seconds": "the outer round", "rest_seconds": "the rest"}
    for name, value in measured.items():
        wanted, difference = predicted[name], abs(value - predicted[name])
        if name == "round_seconds" or name in words:
            if difference > APART * predicted["round_seconds"]:
                largest = max(words, key=lambda part: abs(measured[part] - predicted[part]))
                yield Parting(name, value, wanted, words[largest] if name == "round_seconds" else "")
        elif name.endswith(".step_seconds") and difference > APART * wanted:
            replica = next(one for one in prediction.replicas if one.name == name.split(".")[1])
            apart = dict[str, float]()  # what differs in the inner loop: the compute of a member, or its waits
            for stage in replica.stages:
                trained = stage.utilization * prediction.round_seconds
                compute, waits = (timings.of_member(stage.member, f"{part}_seconds") for part in ("compute", "wait"))
                apart[f"compute of {stage.member}"] = abs(compute - trained)
                apart[f"waits of {stage.member} for messages"] = abs(waits - (replica.inner_seconds - trained))
            yield Parting(name, value, wanted, max(apart, key=lambda one: apart[one]))
        elif name.endswith("_bytes") and difference > APART * wanted:
            yield Parting(name, value, wanted, "")


def _whole_run(spec: RunSpec, whole: Prediction, measured: Quantities) -> WholeRun:
    """Return the times of the rehearsed run: its rounds have further steps, each as long as the measured ones."""
    run, config = spec.config.rehearsal, spec.config
    assert run is not None, "not a rehearsal"
    short = config.inner.steps or 1
    more = 0 if config.inner.steps is None or run.steps is None else run.steps - short
    seconds = measured["round_seconds"] + more * measured["step_seconds"]
    trained = measured["utilization.absolute"] * measured["round_seconds"] * (short + more) / short
    relative_ = measured["utilization.relative"]
    if more:
        relative_ = share(whole.utilization["relative"] * whole.round_seconds, seconds)
    return WholeRun(
        rounds=run.rounds,
        steps=run.steps,
        round_seconds=seconds,
        utilization={"absolute": share(trained, seconds), "relative": relative_},
        predicted=whole.utilization,
        days=run.rounds * seconds / 86400,
        is_bound=bool(config.outer.overlap and more),
    )


# ---- the comparison as text ----

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
MARK = "<<"  # sign beside a quantity that was measured differently from its prediction


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
