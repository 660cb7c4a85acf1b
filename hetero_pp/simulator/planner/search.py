"""Search for a topology that reaches a target: groups, then H and density, then boundaries; the result is predicted.

The utilization is that of the whole run: its tokens per second over those of the fastest schedules with free links, for
rounds of the same length. A run that reaches the target as it is stays as it is.

The exchange may take half of the time that the target leaves, and the boundaries get the rest. A replica that would
wait for a slower one may spend that time on a less lossy boundary. In rounds of a given time no replica waits, and the
least lossy boundaries with which the whole run reaches the target are chosen.

Without a target the aim is AIM, but no boundary costs a point of loss for less than a point of utilization.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TypeGuard

from hetero_pp.config.alike import alike, label_of
from hetero_pp.config.lines import DIRECTIONS, Line, LinkSpec, Way, exchange_link_name
from hetero_pp.config.run_config import RunConfig
from hetero_pp.config.spec import RunSpec
from hetero_pp.config.topology import DatacenterReplica, ParticipantsReplica, ReplicaSettings
from hetero_pp.core.errors import ConfigError
from hetero_pp.core.units import format_bits_per_second, format_duration, format_ratio, format_seconds
from hetero_pp.model.part_settings import BoundarySettings
from hetero_pp.simulator.planner.grouping import LARGEST_LINK, Grouped, group_participants
from hetero_pp.simulator.planner.schedules import (
    OuterChoice,
    Penalty,
    Rung,
    Schedule,
    bits_per_token,
    choose_outer,
    describe,
    is_measured,
    ladder,
    penalty_of,
    rung_of,
    schedules_of,
    with_outer,
)
from hetero_pp.simulator.prediction import Prediction, ReplicaWaits, predict, waiting, with_rounds_of
from hetero_pp.simulator.traffic import count_behind

AIM, CLOSE_TO_AIM = 0.97, 0.965  # utilization to reach without a target, and what is accepted for it

ATTEMPTS = 6  # attempts to meet the target, because the whole run takes a little longer than its parts predict

HALVINGS = 8  # predictions in the search for the slowest boundaries that rounds of a given time allow

WORTH_A_ROW = 1.01  # smallest factor between the tokens per second of two rows of the table of boundaries

CLOSE = 1.01  # If the target is out of reach: accepted time of a round, as a multiple of the fastest. Limits the loss.


@dataclass(frozen=True)
class Choice:
    """One line of the explanation."""

    what: str
    chosen: str
    why: str


@dataclass(frozen=True)
class BoundaryChoice:
    """Boundary and schedule that were chosen for a group."""

    schedule: Schedule
    rung: Rung | None  # None if the group has no boundary
    seconds: float  # seconds of its inner loop and evaluation
    spurned: Rung | None = None  # next rung that would lose less

    @property
    def replica(self) -> ReplicaSettings:
        return self.schedule.with_boundary(self.rung)


@dataclass(frozen=True)
class SearchRow:
    """The run with one boundary for all groups, and what it costs."""

    rung: Rung
    bytes_per_token: float  # bytes that cross a boundary for a token, in each direction
    tokens_per_second: float
    utilization: float
    penalty: Penalty
    chosen_by: Sequence[str]  # labels of the groups for which the plan has this boundary


@dataclass(frozen=True)
class Result:
    """Planned run, and the reasons."""

    config: RunConfig
    before: float | None  # utilization of the YAML before planning; None if it cannot run
    prediction: Prediction
    utilization: float
    reached: bool
    limit: str  # largest remaining cost, in words
    slowest: str  # label of the slowest replicas, which is `what` of their choices
    choices: list[Choice]
    groups: dict[str, list[str]]  # participants of each new replica, stage by stage
    left_out: list[str]
    penalty: Penalty | None  # expected penalty of the whole run; None if nothing is compressed
    compressed_share: float
    predict_rows: Callable[[], Iterator[SearchRow]]  # predicts each of `rows`, which takes a while
    wanted: str = ""  # without a target: what AIM would have cost, if the plan stays below it
    waits: ReplicaWaits | None = None
    """Replicas that wait in the planned run; with rounds of a given time, in the run that these replaced."""

    @cached_property
    def rows(self) -> Sequence[SearchRow]:
        """Boundaries to choose from, the least lossy first; empty without groups that have boundaries."""
        return list(self.predict_rows())


def search(config: RunConfig, vocabulary: int | None, target: float) -> Result:
    """Plan a run. Raises ConfigError if it cannot run at all: unknown hardware, or too little memory."""
    return _search(config, vocabulary, target, _grouped(config, vocabulary))


def search_all(config: RunConfig, vocabulary: int | None, target: float | None) -> Result:
    """Plan a run as `search` does, with its waits. Without a target, loss counts; `plan.timed_rounds` counts, too."""
    grouped = _grouped(config, vocabulary)
    found = _worth_its_loss(config, vocabulary, target, grouped)
    waits = waiting(RunSpec(found.config, vocabulary), found.prediction)
    if waits is None or waits.timed is None or not config.plan.timed_rounds:
        return replace(found, waits=waits)
    rounds = waits.timed

    def with_rounds(own: RunConfig) -> RunConfig:
        return with_rounds_of(own, rounds.seconds, rounds.rounds, rounds.warmup_rounds)

    if grouped is not None:
        grouped = replace(grouped, config=with_rounds(grouped.config))
    timed = _worth_its_loss(with_rounds(config), vocabulary, target, grouped)
    length = f"{'' if rounds.rounds is None else f'{rounds.rounds:,} '}of {format_duration(rounds.seconds)}"
    chosen = Choice("rounds", length, "replicas would wait, and `plan.timed_rounds` is true")
    return replace(timed, waits=replace(waits, timed=None), choices=[chosen, *timed.choices])


def _grouped(config: RunConfig, vocabulary: int | None) -> Grouped | None:
    return group_participants(config, vocabulary) if config.plan.participants else None


def _worth_its_loss(config: RunConfig, vocabulary: int | None, target: float | None, grouped: Grouped | None) -> Result:
    """Plan for the target; without one, for AIM or the best of the less lossy boundaries."""
    found = _search(config, vocabulary, AIM if target is None else target, grouped)
    if target is not None:
        return found
    found = replace(found, reached=found.utilization >= CLOSE_TO_AIM)
    if found.penalty is None or not found.reached:
        return found
    # A point of utilization may cost at most a point of loss, by the table of the larger model.
    best = max(found.rows, key=lambda row: min(row.utilization, AIM) - row.penalty.paper)
    if best.penalty.paper >= found.penalty.paper or best.utilization >= found.utilization:
        return found
    cheaper = _search(config, vocabulary, best.utilization * (1 - 1e-6), grouped)
    less = Penalty(0.0, 0.0) if cheaper.penalty is None else cheaper.penalty
    if less.paper >= found.penalty.paper:
        return found
    more = f"{describe_penalty(found.penalty)}, instead of {describe_penalty(less)}"
    told = f"{found.utilization:.1%} would cost more than it gains: {more}; `--target-utilization {AIM}` plans it."
    return replace(cheaper, wanted=told)


class _Planned:
    """A run with its classes of equal replicas, which are planned alike, and the schedules of each class."""

    def __init__(self, config: RunConfig, vocabulary: int | None) -> None:
        self.config, self.vocabulary = config, vocabulary
        places = {replica.name: index for index, replica in enumerate(config.replicas)}
        self.classes = [[places[one.name] for one in same] for same in alike(RunSpec(config, vocabulary))]
        self.schedules = [schedules_of(config, vocabulary, indices[0]) for indices in self.classes]
        self.quickest = [min(ways, key=lambda one: one.free_seconds) for ways in self.schedules]

    def with_replicas(self, replicas: Sequence[ReplicaSettings]) -> RunConfig:
        """Return the run with each replica of a class replaced by the one that was planned for the class."""
        found = list(self.config.replicas)
        for indices, planned in zip(self.classes, replicas, strict=True):
            for index in indices:
                own = self.config.replicas[index]
                found[index] = planned.model_copy(update={"name": own.name, "optional": own.optional})
        return self.config.model_copy(update={"replicas": found})

    def predicted(self, replicas: Sequence[ReplicaSettings], stage_links: bool = True) -> Prediction:
        return predict(RunSpec(self.with_replicas(replicas), self.vocabulary), stage_links=stage_links)

    @property
    def free_rate(self) -> float:
        """Tokens per second of the fastest schedules with free links."""
        found = self.predicted([one.replica for one in self.quickest], stage_links=False)
        return found.tokens_per_second / found.utilization["relative"]

    def labels(self, config: RunConfig) -> list[str]:
        return [label_of([config.replicas[one] for one in indices]) for indices in self.classes]


def _search(config: RunConfig, vocabulary: int | None, target: float, grouped: Grouped | None) -> Result:
    """Plan a run for a target: it stays as it is, or H and density are chosen first, then boundaries."""
    run = _Planned(config if grouped is None else grouped.config, vocabulary)
    fastest, before, was = run.free_rate, None, None
    if grouped is None:
        with suppress(ConfigError):
            before = predict(RunSpec(config, vocabulary))
            fastest = max(fastest, before.tokens_per_second / before.utilization["relative"])
            was = before.tokens_per_second / fastest
    if before is not None and was is not None and was >= target:
        planned, prediction, utilization, limit = config, before, was, ""
        boundaries = []
        for indices, ways in zip(run.classes, run.schedules, strict=True):
            replica, rung = config.replicas[indices[0]], None
            if _has_boundary(replica):
                rung = rung_of(replica.boundary, ways[0].spec.shape.width)
            boundaries.append(
                BoundaryChoice(ways[0], rung, ways[0].free_seconds if rung is None else ways[0].seconds(rung))
            )
        choices = [Choice("the YAML", "unchanged", "it reaches the target as it is")]
    else:
        base = run.with_replicas([one.replica for one in run.quickest])
        outer, own_outer = choose_outer(base, vocabulary, (1 - target) / 2)
        run = _Planned(with_outer(run.config, outer.length, outer.density), vocabulary)
        if outer is not own_outer:
            fastest = run.free_rate
        free = max(one.free_seconds for one in run.quickest)
        boundaries = _fit_boundaries(run, outer, free, target, fastest)
        planned = run.with_replicas([one.replica for one in boundaries])
        prediction = predict(RunSpec(planned, vocabulary))
        utilization, limit = prediction.tokens_per_second / fastest, _limit(boundaries, outer, free)
        choices = [
            *(_grouping_choices(grouped) if grouped is not None else ()),
            _outer_choice(config, planned, vocabulary, outer, own_outer),
            *_replica_choices(run, planned, boundaries, outer, free, fastest),
        ]
    share = _compressed_share(planned)
    slowest = max(range(len(boundaries)), key=lambda one: boundaries[one].seconds)
    worst = min((one.rung.equivalent for one in boundaries if one.rung is not None), default=1.0)
    return Result(
        config=planned,
        before=was,
        prediction=prediction,
        utilization=utilization,
        reached=utilization >= target,
        limit=limit,
        slowest=run.labels(planned)[slowest],
        choices=choices,
        groups={} if grouped is None else dict(zip(grouped.names, grouped.members, strict=True)),
        left_out=[] if grouped is None else grouped.left_out,
        penalty=penalty_of(worst, share) if worst < 1 else None,
        compressed_share=share,
        predict_rows=partial(_rows, run, planned, boundaries, fastest),
    )


def _has_boundary(replica: ReplicaSettings) -> TypeGuard[ParticipantsReplica]:
    return isinstance(replica, ParticipantsReplica) and replica.stage_count > 1


def _compressed_share(config: RunConfig) -> float:
    counts = {one.name: count_behind(config, one.name) for one in config.replicas}
    compressed = [one.name for one in config.replicas if _has_boundary(one) and one.boundary.rank != "full"]
    return sum(counts[name] for name in compressed) / sum(counts.values())


def _rows(
    run: _Planned, planned: RunConfig, boundaries: Sequence[BoundaryChoice], fastest: float
) -> Iterator[SearchRow]:
    """Yield the run with each boundary for all groups, and without those that are hardly faster than the one before."""
    groups = [one.rung for one in boundaries if one.rung is not None]
    if not groups:
        return
    own = [planned.replicas[indices[0]] for indices in run.classes]
    counts = [count_behind(planned, one.name) * len(same) for one, same in zip(own, run.classes, strict=True)]
    share = sum(n for n, one in zip(counts, boundaries, strict=True) if one.rung is not None) / sum(counts)
    chosen_by = {label: one.rung for label, one in zip(run.labels(planned), boundaries, strict=True)}
    width, last = boundaries[0].schedule.spec.shape.width, 0.0
    least = min(rung.equivalent for rung in groups)
    every = {str(rung): rung for rung in (*ladder(groups[0].boundary, width, planned.plan.few_bits), *groups)}
    for text, rung in sorted(every.items(), key=lambda one: -one[1].equivalent):
        chosen = [label for label, one in chosen_by.items() if str(one) == text]
        changed = [
            replica if one.rung is None else replica.model_copy(update={"boundary": _like(one.rung, rung)})
            for replica, one in zip(own, boundaries, strict=True)
        ]
        rate = run.predicted(changed).tokens_per_second
        if chosen or rate >= WORTH_A_ROW * last:
            penalty = penalty_of(rung.equivalent, share)
            yield SearchRow(rung, bits_per_token(rung, width) / 8, rate, rate / fastest, penalty, chosen)
        last = max(last, rate)
        if last * WORTH_A_ROW >= fastest and rung.equivalent <= least:
            return


def _like(own: Rung, other: Rung) -> BoundarySettings:
    """Return another boundary with the settings of `own` that do not change its bytes."""
    return own.boundary.model_copy(update={key: getattr(other.boundary, key) for key in ("rank", "bits", "dtype")})


def _fit_boundaries(
    run: _Planned, outer: OuterChoice, free: float, target: float, fastest: float
) -> list[BoundaryChoice]:
    """Return the least lossy boundary of each class with which the run meets the target, or comes close to it."""
    few_bits = run.config.plan.few_bits

    def fitted(allowed: float) -> tuple[list[BoundaryChoice], float]:
        found = [_choose_boundary(ways, allowed, few_bits) for ways in run.schedules]
        return found, run.predicted([one.replica for one in found]).tokens_per_second

    if run.config.inner.steps is None:  # the seconds of a class are those of the steps that fit with free links
        slowest = free
        for ways in run.schedules:
            if _has_boundary(ways[0].replica):
                least_lossy = ladder(ways[0].replica.boundary, ways[0].spec.shape.width)[0]
                slowest = max(slowest, *(way.seconds(least_lossy) for way in ways))
        low, high = free, 2 * slowest
        best, rate = fitted(high)
        if rate >= target * fastest:
            return best
        best, _ = fitted(low)
        for _ in range(HALVINGS):
            found, rate = fitted(middle := (low * high) ** 0.5)
            if rate >= target * fastest:
                best, low = found, middle
            else:
                high = middle
        return best
    aim = outer.free_seconds / target
    left = aim - outer.free_seconds - outer.exchange_seconds
    allowed = free + (left if left > 0 else (aim - outer.free_seconds) / 2)
    for _ in range(ATTEMPTS):
        found, rate = fitted(allowed)
        if left <= 0 or rate >= target * fastest or any(one.seconds > allowed for one in found):
            break
        taken = outer.free_seconds * fastest / rate
        allowed -= 1.05 * max(taken - aim, 0.001 * (allowed - free))
    return found


def _choose_boundary(ways: Sequence[Schedule], allowed: float, few_bits: bool) -> BoundaryChoice:
    """Return the least lossy boundary whose round ends in time, with the first schedule that achieves it."""
    replica = ways[0].replica
    if not _has_boundary(replica):
        return BoundaryChoice(ways[0], None, ways[0].free_seconds)
    rungs = ladder(replica.boundary, ways[0].spec.shape.width, few_bits)
    tried: list[BoundaryChoice] = []
    for rung, spurned in zip(rungs, (None, *rungs), strict=False):
        for way in ways:
            if way.least_seconds(rung) <= allowed:
                tried.append(BoundaryChoice(way, rung, way.seconds(rung), spurned))
                if tried[-1].seconds <= allowed:
                    return tried[-1]
    tried = tried or [BoundaryChoice(way, rungs[-1], way.seconds(rungs[-1]), rungs[-2]) for way in ways]
    fastest = min(one.seconds for one in tried)
    return next(one for one in tried if one.seconds <= CLOSE * fastest)


# ---- the reasons, in words ----


def _grouping_choices(grouped: Grouped) -> Iterator[Choice]:
    found = grouped.grouping
    quality = "proven best" if found.proven else "the best found, not proven"
    for name, members, seconds, link in zip(grouped.names, grouped.members, found.seconds, found.links, strict=True):
        why = f"slowest stage {format_seconds(seconds)} per micro-batch, slowest hop {_link(link)}"
        yield Choice(name, " - ".join(members), f"{why} ({quality} of {found.considered:,} paths)")
    if grouped.left_out:
        why = "with these participants, groups would be slower in total, or too few remain for another group"
        yield Choice("not used", ", ".join(grouped.left_out), why)


def _outer_choice(
    asked: RunConfig, planned: RunConfig, vocabulary: int | None, outer: OuterChoice, own: OuterChoice
) -> Choice:
    def told(choice: OuterChoice) -> str:
        is_time = asked.inner.steps is None
        length = f"rounds of {format_seconds(choice.length)}" if is_time else f"H = {choice.length:g}"
        return f"{length}, density {format_ratio(choice.density)}"

    link = RunSpec(planned, vocabulary).links[exchange_link_name(outer.slowest)]
    up, down = (_link(link.bottleneck(way)) for way in DIRECTIONS)
    uplink = f"{link.name} ({up} up, {down} down)"
    why = f"{uplink} is the bottleneck: the exchange adds {outer.share:.2%} to a round"
    if outer is not own:
        why += f"; {told(own)} would add {own.share:.2%}"
    more = f", {planned.rounds} rounds" if planned.outer.rounds != asked.outer.rounds else ""
    return Choice("outer round", told(outer) + more, why)


def _replica_choices(
    run: _Planned,
    config: RunConfig,
    boundaries: Sequence[BoundaryChoice],
    outer: OuterChoice,
    free: float,
    fastest: float,
) -> Iterator[Choice]:
    spec, planned = RunSpec(config, run.vocabulary), [config.replicas[indices[0]] for indices in run.classes]
    for place, (label, replica, found) in enumerate(zip(run.labels(config), planned, boundaries, strict=True)):
        if isinstance(replica, DatacenterReplica):
            continue
        layers = "+".join(str(len(own)) for own in replica.layer_ranges(spec.shape.layers))
        if is_measured(config, replica):
            yield Choice(label, f"layers {layers}", "unchanged: its costs were measured for this split")
        else:
            yield Choice(label, f"layers {layers}", describe(replica, spec))
            rows = replica.batch_size // replica.micro_batches
            chosen = f"{replica.micro_batches} micro-batches of {rows}, {replica.extra_in_flight} extra in flight"
            why = "smallest bubble, with the fewest micro-batches in flight that hide the links as far as required"
            yield Choice(label, chosen, why)
        if found.rung is None:
            continue
        slowest = found.schedule.slowest(found.rung)
        if slowest is None:
            yield Choice(label, str(found.rung), "links between its stages cost no time")
            continue
        why = f"{_described(slowest)} decides"
        if found.spurned is not None:  # the utilization with the less lossy boundary that was not chosen
            if config.inner.steps is None:  # others do not wait for this group
                own = list(planned)
                own[place] = replica.model_copy(update={"boundary": _like(found.rung, found.spurned)})
                utilization = run.predicted(own).tokens_per_second / fastest
            else:
                later = max(0.0, found.schedule.seconds(found.spurned) - free)
                utilization = outer.free_seconds / (outer.free_seconds + outer.exchange_seconds + later)
            why += f"; {found.spurned} would reduce utilization to {utilization:.1%}"
        if found.rung.equivalent < 1:
            why += f"; {describe_penalty(penalty_of(found.rung.equivalent, _compressed_share(config)))}"
        yield Choice(label, str(found.rung), why)


def describe_penalty(penalty: Penalty) -> str:
    """Return the rise of the loss as text, with the tables that it comes from."""
    ours = "not measured here" if penalty.measured is None else f"+{penalty.measured:.1%} measured at 0.34M"
    return f"loss +{penalty.paper:.1%} (Het-PP Table 2, 512M; {ours})"


def _limit(boundaries: Sequence[BoundaryChoice], outer: OuterChoice, free: float) -> str:
    """Return, as text, what costs most of the time that free links would save."""
    worst = max(boundaries, key=lambda one: one.seconds)
    exposed = max(0.0, worst.seconds - free)
    if outer.exchange_seconds >= exposed:
        seconds = format_seconds(outer.exchange_seconds)
        return f"the exchange ({seconds} per round, through {exchange_link_name(outer.slowest)})"
    slowest = None if worst.rung is None else worst.schedule.slowest(worst.rung)
    if slowest is None:
        return f"the stages of {worst.schedule.replica.name}"
    return f"{_described(slowest, with_latency=True)}, which adds {format_seconds(exposed)} per round"


def _described(slowest: LinkSpec | tuple[Line, Way], with_latency: bool = False) -> str:
    """Return a text such as `home.1-2 (30 Mbit/s)`, or `the line of home.1 (20 Mbit/s up)`."""
    if isinstance(slowest, LinkSpec):  # the slower direction, for a single message
        slower = min((one for way in DIRECTIONS if (one := slowest.bottleneck(way)) is not None), default=None)
        name, bandwidth, latency = slowest.name, _link(slower), slowest.forward.latency
    else:
        line, way = slowest
        name, bandwidth, latency = f"the line of {line.name}", f"{_link(line.bandwidth_of(way))} {way}", line.latency
    return f"{name} ({bandwidth}, {format_seconds(latency)})" if with_latency else f"{name} ({bandwidth})"


def _link(bandwidth: float | None) -> str:
    return format_bits_per_second(None if bandwidth is None or bandwidth >= LARGEST_LINK else bandwidth)
