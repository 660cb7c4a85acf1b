"""Rehearsals: what `rehearse` starts and prints, what a joined host is told, and what `plan --measured` takes.

The comparison with `simulate` is pure: every time comes from a report. Both sides split a round into three parts. The
inner loop is that of the slowest replica. The outer round lasts from the end of that loop until the last member goes
on. The rest is the evaluation, less what it shares with the next round.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import psutil
from pydantic import TypeAdapter, ValidationError
from rich.console import Console

from hetero_pp.config.folder import RunFolder
from hetero_pp.config.lines import DIRECTIONS, EXCHANGE, WAYS, Direction, LineSettings, Way
from hetero_pp.config.predictions import SimulateSettings
from hetero_pp.config.run_config import RunConfig
from hetero_pp.config.spec import RunSpec
from hetero_pp.config.topology import DatacenterReplica, ReplicaSettings, StageSettings
from hetero_pp.config.yaml_file import ConfigFile
from hetero_pp.core.bounded import read_json_object
from hetero_pp.core.errors import ConfigError, RunFailed
from hetero_pp.core.files import write_json
from hetero_pp.core.units import (
    format_bits_per_second,
    format_bytes,
    format_count,
    format_duration,
    format_percent,
    format_seconds,
)
from hetero_pp.messages.messages_pb2 import MeasuredLine, MemberRound, Report
from hetero_pp.program.launch.command import Mode
from hetero_pp.program.report.output import announce, say
from hetero_pp.program.report.state import RunState
from hetero_pp.program.report.tables import PlainTable
from hetero_pp.program.simulate import print_assumption
from hetero_pp.rpc.admission_client import Rate
from hetero_pp.simulator.costs import assumed_in
from hetero_pp.simulator.prediction import Prediction, predict

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
        """Rounds that all members have finished, without the first and, with overlap, the last if there are others.

        Each fragment has equally many of them, because their rounds differ, if there is one of each.
        """
        known = [set(self._rounds[member]) for member in self._spec.needed]
        rounds = sorted(set.intersection(*known) & self._closed.keys()) if known else []
        later = rounds[1:] or rounds
        later = (later[:-1] or later) if self._spec.config.outer.overlap else later
        return later[len(later) % self._spec.fragments.count :] or later

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
        rounds=spec.config.rounds,
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
    table = PlainTable(["all replicas"], ["measured", "predicted", "difference"], [""])
    for name, label in _ROUND.items():
        both = (_shown(name, side[name]) for side in (found.measured, found.predicted))
        table.add_row(label, *both, _difference(found.differences[name]), _marked(found, name))
    console.print(table)
    table = PlainTable(["replica", ""], list(_REPLICA.values()))
    for name in _names(found, "replicas"):
        for index, side in enumerate((found.measured, found.predicted)):
            cells = (_shown(key, side[f"replicas.{name}.{key}"]) for key in _REPLICA)
            table.add_row("" if index else name, ("measured", "predicted")[index], *cells)
    console.print(table)
    say(console, "bubble: what stages would be idle with free links; waits: what links add", style="dim", indent="  ")
    table = PlainTable(
        ["member, in a round"], ["computes", "waits for previous", "waits for next", "outer round", "evaluates"]
    )
    for name, seconds in found.members.items():
        parts = ("compute", "wait_previous", "wait_next", "outer", "evaluation")
        table.add_row(name, *(format_seconds(seconds[part]) for part in parts))
    console.print(table)
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


def _names(found: RehearsalComparison, section: str) -> list[str]:
    """Return the names of a section's entries, such as the replicas. Names of links contain dots."""
    keys = (name.removeprefix(f"{section}.").rpartition(".")[0] for name in found.measured if name.startswith(section))
    return list(dict.fromkeys(keys))


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


# ---- what `rehearse` starts and prints ----


BUSY = 0.8  # share of the processors' time in use from which they may have delayed members, which need them promptly
ROUNDS, STEPS = 3, 4  # Most rounds, and inner steps of each, that are rehearsed. The first round is not timed.


@dataclass(frozen=True)
class Predictions:
    """Predictions for the rounds of a rehearsal, and for the rounds of the run that it stands for."""

    rehearsed: Prediction
    whole: Prediction

    @classmethod
    def of(cls, spec: RunSpec) -> Predictions:
        """Raises ConfigError for what `predict` refuses, such as unknown hardware."""
        run, config = spec.config.rehearsal, spec.config
        assert run is not None, "not a rehearsal"
        rehearsed = predict(spec)
        if run.steps == config.inner.steps:
            return cls(rehearsed, rehearsed)
        longer = config.model_copy(update={"inner": config.inner.model_copy(update={"steps": run.steps})})
        return cls(rehearsed, predict(RunSpec(longer, spec.shape.vocabulary)))


class AsRehearsal(Mode):
    """The rehearsal of a run: its rounds are few and short, and nothing is trained."""

    resumes = False

    def __init__(self, rounds: int, steps: int, json_path: Path | None = None) -> None:
        """`json_path`: file for the comparison, beside `rehearsal.json` in the folder."""
        self._rounds, self._steps, self._json = rounds, steps, json_path
        self._located: Callable[[ConfigError], ConfigError] = lambda error: error
        self._processors: Any = None  # times of all processors when the first step ended
        self._left_out: Sequence[str] = ()

    def of(self, file: ConfigFile) -> ConfigFile:
        self._located, self._left_out = file.located, list(not_rehearsed(file.config))
        return file.as_rehearsal(self._rounds, self._steps)

    def begin(self, spec: RunSpec) -> None:
        try:
            self._predictions = Predictions.of(spec)
        except ConfigError as error:
            raise self._located(error) from None
        self._spec, self._timings = spec, Timings(spec)
        lasts = spec.config.rounds * self._predictions.rehearsed.round_seconds
        name, until = spec.config.name, format_duration(lasts)
        announce(f"{name}: a rehearsal, which trains nothing; its rounds should take {until}")
        for line in self._left_out:
            announce(f"{name}: {line}")

    def on_report(self, report: Report) -> None:
        self._timings.apply(report)
        if report.HasField("inner_step") and self._processors is None:
            self._processors = psutil.cpu_times()

    def conclude(self, console: Console, state: RunState, folder: RunFolder) -> None:
        if not self._timings.timed:
            raise RunFailed(f"{self._spec.config.name}: {NOTHING_TIMED}")
        found = compare(self._spec, self._timings, self._predictions.rehearsed, self._predictions.whole)
        if self._processors is not None:
            passed = [now - then for now, then in zip(psutil.cpu_times(), self._processors, strict=True)]
            idle = passed[self._processors._fields.index("idle")]
            found = replace(found, busy=1 - idle / sum(passed) if sum(passed) else 0.0)
        print_comparison(console, found)
        if found.busy > BUSY:
            busy = f"The processors of this machine were busy for {format_percent(found.busy)} of the rehearsal"
            say(console, f"{MARK} {busy}, so members may have been late: repeat it while nothing else runs here.")
        print_assumption(console, assumed_in(self._spec))
        for path in (folder.rehearsal, self._json):
            write_json(path, found.as_json())
        say(console, f"Files: {folder.path} (rehearsal.json, metrics.jsonl)")


def not_rehearsed(config: RunConfig) -> Iterator[str]:
    """Yield lines about what a rehearsal leaves out."""
    simulate, optional = config.simulate, [replica.name for replica in config.replicas if replica.optional]
    for name in simulate.fleets:
        yield f"simulate.fleets.{name} is not rehearsed: one replica {name} takes part"
    if simulate.exchange != "gather":
        yield f"simulate.exchange: {simulate.exchange} is not rehearsed: a run gathers contributions"
    if optional:
        how = "to rehearse some, set their number, as with `--set replicas.home.count=2`"
        yield f"{format_count(len(optional), 'optional replica')} left out: {how}"


# ---- a host that joined a rehearsal: whether its line is good enough for the run ----

ENOUGH = 0.05  # share of a step up to which a line may hold its neighbours up


class OwnLine(Mode):
    """A host in a rehearsal. It follows all members, because it compares its neighbours' waits with the prediction."""

    resumes = False

    def __init__(self, spec: RunSpec, member: str, rates: Mapping[Way, Rate]) -> None:
        """`rates`: what the host measured of its line; empty if it could not. Raises ConfigError as `predict` does."""
        self._spec, self._member, self._rates = spec, member, rates
        self._predictions, self._timings = Predictions.of(spec), Timings(spec)

    def watched(self, spec: RunSpec, members: Sequence[str]) -> Sequence[str]:
        return [EXCHANGE, *(name for name in spec.needed if name not in members)]

    def on_report(self, report: Report) -> None:
        self._timings.apply(report)

    def lines(self) -> Iterator[str]:
        """Yield one or two lines: what the line reached, and whether it is good enough."""
        if self._rates:
            shown, slow = shown_rates(self._rates), too_slow(self._spec, self._member, self._rates)
            yield f"the line of this host reached {shown}" + (f"; the run's YAML expects {slow}" if slow else "")
        if not self._timings.timed:
            yield NOTHING_TIMED
            return
        found = compare(self._spec, self._timings, self._predictions.rehearsed, self._predictions.whole)
        yield verdict(self._spec, self._member, found)


def verdict(spec: RunSpec, member: str, found: RehearsalComparison) -> str:
    """Return one line: how long others waited for a member, and the utilization that its group would have."""
    held_share, other = held_up(spec, member, found)
    own = spec.members[member].replica
    trained = fmean(found.members[name]["compute"] for name in own.members)
    absolute = found.whole_run.utilization["absolute"] * share(
        trained, fmean(one["compute"] for one in found.members.values())
    )
    free = share(absolute, found.whole_run.utilization["relative"])
    group = f"{own.name} would train {format_percent(absolute)} of the time ({format_percent(free)} with free links)"
    if not other:
        return f"{member} has no neighbours to hold up; {group}"
    # What the member's links to its neighbours carried in a step, evaluations included.
    carried: dict[Way, float] = dict.fromkeys(WAYS, 0.0)
    inner, step = (found.measured[f"replicas.{own.name}.{key}"] for key in ("inner_seconds", "step_seconds"))
    timed = share(inner, step)
    steps = spec.config.inner.steps or max(round(timed), 1)
    for link in spec.links.values():
        if member in (link.source, link.target) and spec.members.keys() >= {link.source, link.target}:
            up, down = ("forward", "backward") if link.source == member else ("backward", "forward")
            carried["up"] += found.measured[f"links.{link.name}.{up}_bytes"] / steps
            carried["down"] += found.measured[f"links.{link.name}.{down}_bytes"] / steps
    sizes = ", ".join(f"{format_bytes(size)} {way}" for way, size in carried.items())
    held = f"{other} waited {format_percent(held_share)} of a step for {member}, beyond what free links leave idle"
    enough = "good enough" if held_share <= ENOUGH else "too slow for this boundary"
    return f"the line is {enough} ({sizes} a step): {held}; {group}"


def held_up(spec: RunSpec, member: str, found: RehearsalComparison) -> tuple[float, str]:
    """Return the share of a step for which a neighbour waited for a member, and that neighbour; 0 and "" without one.

    The wait counts as far as the neighbour was idle for longer than free links would leave it. It cannot tell a late
    member from a late line, so a member behind this one may have caused it.
    """
    own, held = spec.members[member], (0.0, "")
    if own.stage is None or own.stage.count == 1:
        return held
    names, index = own.replica.members, own.stage.index
    inner = found.measured[f"replicas.{own.replica.name}.inner_seconds"]
    exposed = max(found.measured[f"replicas.{own.replica.name}.exposed_communication"], 0.0)
    for neighbour, part in ((index - 1, "wait_next"), (index + 1, "wait_previous")):
        if 0 <= neighbour < len(names):
            waited = found.members[names[neighbour]][part]
            held = max(held, (min(share(waited, inner), exposed), names[neighbour]))
    return held


# ---- measured rates of an access line beside those of the YAML ----

SHORT = 0.9  # share of the YAML's line that a measured line has to reach: a measurement is short, and includes headers


def shown_rates(rates: Mapping[Way, Rate]) -> str:
    return ", ".join(f"{rates[way]} {way}" for way in WAYS)


def too_slow(spec: RunSpec, member: str, rates: Mapping[Way, Rate]) -> str:
    """Return the rates of the YAML that a member's line does not reach: `20 Mbit/s up`; empty if it reaches them."""
    line = next((one for one in spec.lines.values() if member in one.members), None)
    wanted = {} if line is None else {way: line.bandwidth_of(way) for way in WAYS}
    return " and ".join(
        f"{format_bits_per_second(rate)} {way}"
        for way, rate in wanted.items()
        if rate is not None and rates[way].is_limited and rates[way].bits_per_second < SHORT * rate
    )


# ---- what plan --measured takes from a rehearsal: lines that hosts measured, and costs of compute ----

_RATES = TypeAdapter(dict[str, dict[str, float]])


class MeasuredInput:
    """The file that `rehearse` or `serve --rehearse` wrote."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError for any other file."""
        self._path = path
        try:
            found = read_json_object(path)
            self._lines = _RATES.validate_python(found["lines"])
            self._members = list(_RATES.validate_python(found["members"]))
            costs: Any = found["costs"]
            self._costs = SimulateSettings.model_validate({key: costs[key] for key in ("hardware", "measured")})
            for rates in self._lines.values():
                LineSettings.model_validate({way: f"{rates[way]} bit/s" for way in WAYS})
        except (OSError, ValueError, KeyError, TypeError, ValidationError) as error:
            reason = f"`{error.args[0]}` is missing" if isinstance(error, KeyError) else str(error).splitlines()[0]
            expected = "expected the rehearsal.json of `hetero-pp rehearse` or `serve --rehearse`"
            raise ConfigError((), f"--measured {path}: found no rehearsal ({reason}), {expected}") from None

    def told(self) -> str:
        """Return a line on what is taken."""
        lines = ", ".join(
            f"{name} {' and '.join(f'{format_bits_per_second(rates[way])} {way}' for way in WAYS)}"
            for name, rates in self._lines.items()
        )
        costs = format_count(len(self._costs.measured), "member")
        taken = f"lines of {lines}" if lines else "no lines, because no host joined and measured one"
        return f"Measured by a rehearsal: {taken}; measured costs of {costs}."

    def applied(self, config: RunConfig, layers: int) -> RunConfig:
        """Return the configuration with measured lines and costs.

        Latencies remain as in the YAML. Raises ConfigError for a member of another run, and for one at a site, because
        the line belongs to the site.
        """
        own = {member: replica for replica in config.replicas for member in replica.members}
        if strange := [name for name in self._members if name not in own]:
            raise ConfigError((), f"--measured {self._path}: found {strange[0]}, which is not a member of this run")
        sites = {member: name for name, site in config.sites.items() for member in site.members}
        for name in self._lines:
            if (site := sites.get(name) or sites.get(own[name].name)) is not None:
                raise ConfigError((), f"--measured {self._path}: found a line of {name}, expected one of site {site}")
        kinds = dict(config.lines)
        for name, rates in self._lines.items():
            replica = own[name]
            before, _ = replica.setting(replica.members.index(name), "line")
            was = LineSettings() if before is None else config.lines[before]
            kinds[_kind(name)] = was.model_copy(update={"bandwidth": None, **rates})
        replicas = [self._with_lines(replica, layers) for replica in config.replicas]
        simulate = config.simulate
        costs = {
            "hardware": {**simulate.hardware, **self._costs.hardware},
            "measured": {**simulate.measured, **self._costs.measured},
        }
        changed = {"lines": kinds, "replicas": replicas, "simulate": simulate.model_copy(update=costs)}
        return config.model_copy(update=changed)

    def _with_lines(self, replica: ReplicaSettings, layers: int) -> ReplicaSettings:
        measured = [name for name in replica.members if name in self._lines]
        if not measured:
            return replica
        if isinstance(replica, DatacenterReplica):
            return replica.model_copy(update={"line": _kind(replica.name)})
        stages = replica.stages
        if not isinstance(stages, list):
            ranges = replica.layer_ranges(layers)
            line, _ = replica.setting(0, "line")  # stages without a list have one kind of line
            stages = [StageSettings(layers=len(own), line=line) for own in ranges]
        named = zip(replica.members, stages, strict=True)
        own = [one.model_copy(update={"line": _kind(name)}) if name in measured else one for name, one in named]
        return replica.model_copy(update={"stages": own})


def _kind(member: str) -> str:
    return f"measured-{member}"
