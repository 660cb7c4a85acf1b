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

from hetero_pp.config.lines import LineSpec, Way
from hetero_pp.config.links import DIRECTIONS, LinkSpec, exchange_link_name
from hetero_pp.config.topology import BoundarySettings, DatacenterReplica, ParticipantsReplica, ReplicaSettings
from hetero_pp.core.errors import ConfigError
from hetero_pp.core.units import format_bits_per_second, format_duration, format_ratio, format_seconds
from hetero_pp.run.alike import alike, label_of
from hetero_pp.run.config import RunConfig
from hetero_pp.run.spec import RunSpec
from hetero_pp.simulator.planner.grouping import LARGEST_LINK
from hetero_pp.simulator.planner.outer import OuterChoice, choose_outer, with_outer
from hetero_pp.simulator.planner.participants import Grouped, group_participants
from hetero_pp.simulator.planner.penalty import Penalty, Rung, bits_per_token, ladder, penalty_of, rung_of
from hetero_pp.simulator.planner.schedules import Schedule, describe, is_measured, schedules_of
from hetero_pp.simulator.prediction import Prediction, predict
from hetero_pp.simulator.waiting import ReplicaWaits, waiting, with_rounds_of

AIM, CLOSE_TO_AIM = 0.97, 0.965
"""Utilization to reach without a target, and what is accepted for it."""

ATTEMPTS = 6
"""Attempts to meet the target, because the whole run takes a little longer than its parts predict."""

HALVINGS = 8
"""Predictions in the search for the slowest boundaries that rounds of a given time allow."""

WORTH_A_ROW = 1.01
"""Smallest factor between the tokens per second of two rows of the table of boundaries."""

CLOSE = 1.01
"""If the target is out of reach: accepted time of a round, as a multiple of the fastest. Limits the loss."""


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
    rung: Rung | None
    """None if the group has no boundary."""
    seconds: float
    """Seconds of its inner loop and evaluation."""
    spurned: Rung | None
    """Next rung that would lose less."""


@dataclass(frozen=True)
class SearchRow:
    """The run with one boundary for all groups, and what it costs."""

    rung: Rung
    bytes_per_token: float
    """Bytes that cross a boundary for a token, in each direction."""
    tokens_per_second: float
    utilization: float
    penalty: Penalty
    chosen_by: Sequence[str]
    """Labels of the groups for which the plan has this boundary."""


Classes = Sequence[Sequence[int]]
"""Replicas with equal settings, as indices into `config.replicas`. All of a class are planned alike."""


@dataclass(frozen=True)
class Result:
    """Planned run, and the reasons."""

    config: RunConfig
    before: float | None
    """Utilization of the YAML before planning; None if it cannot run."""
    prediction: Prediction
    utilization: float
    reached: bool
    limit: str
    """Largest remaining cost, in words."""
    slowest: str
    """Label of the slowest replicas, which is `what` of their choices."""
    choices: list[Choice]
    groups: dict[str, list[str]]
    """Participants of each new replica, stage by stage."""
    left_out: list[str]
    penalty: Penalty | None
    """Expected penalty of the whole run; None if nothing is compressed."""
    compressed_share: float
    predict_rows: Callable[[], Iterator[SearchRow]]
    """Predicts each of `rows`, which takes a while."""
    wanted: str = ""
    """Without a target: what AIM would have cost, if the plan stays below it."""
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
    length = f"{rounds.rounds:,} of {format_duration(rounds.seconds)}"
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


def _search(config: RunConfig, vocabulary: int | None, target: float, grouped: Grouped | None) -> Result:
    asked = config if grouped is None else grouped.config
    classes = _classes(asked, vocabulary)
    schedules = [schedules_of(asked, vocabulary, indices[0]) for indices in classes]
    fastest = _free_rate(asked, vocabulary, classes, schedules)
    before: Prediction | None = None
    if grouped is None:
        with suppress(ConfigError):
            before = predict(RunSpec(asked, vocabulary))
            fastest = max(fastest, before.tokens_per_second / before.utilization["relative"])
    was = None if before is None else before.tokens_per_second / fastest
    if before is not None and was is not None and was >= target:
        planned, prediction, utilization, limit = asked, before, was, ""
        boundaries = [_as_it_is(asked.replicas[one[0]], ways) for one, ways in zip(classes, schedules, strict=True)]
        choices = [Choice("the YAML", "unchanged", "it reaches the target as it is")]
    else:
        base = _with_replicas(asked, classes, [_quickest(ways).replica for ways in schedules])
        outer, own_outer = choose_outer(base, vocabulary, (1 - target) / 2)
        asked = with_outer(asked, outer.length, outer.density)
        schedules = [schedules_of(asked, vocabulary, indices[0]) for indices in classes]
        if outer is not own_outer:
            fastest = _free_rate(asked, vocabulary, classes, schedules)
        free = max(_quickest(ways).free_seconds for ways in schedules)
        boundaries = _fit_boundaries(asked, vocabulary, classes, schedules, outer, free, target, fastest)
        planned = _with_boundaries(asked, classes, boundaries)
        prediction = predict(RunSpec(planned, vocabulary))
        utilization = prediction.tokens_per_second / fastest
        limit = _limit(boundaries, outer, free)
        choices = [
            *(_grouping_choices(grouped) if grouped is not None else ()),
            *_outer_choices(config, planned, vocabulary, outer, own_outer),
            *_replica_choices(
                planned, vocabulary, classes, boundaries, outer, free, _compressed_share(planned), fastest
            ),
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
        slowest=label_of([planned.replicas[one] for one in classes[slowest]]),
        choices=choices,
        groups={} if grouped is None else dict(zip(grouped.names, grouped.members, strict=True)),
        left_out=[] if grouped is None else grouped.left_out,
        penalty=penalty_of(worst, share) if worst < 1 else None,
        compressed_share=share,
        predict_rows=partial(_rows, planned, vocabulary, classes, boundaries, fastest),
    )


def _free_rate(
    config: RunConfig, vocabulary: int | None, classes: Classes, schedules: Sequence[Sequence[Schedule]]
) -> float:
    """Return the tokens per second of the fastest schedules with free links."""
    fastest = _with_replicas(config, classes, [_quickest(ways).replica for ways in schedules])
    found = predict(RunSpec(fastest, vocabulary), stage_links=False)
    return found.tokens_per_second / found.utilization["relative"]


def _as_it_is(replica: ReplicaSettings, ways: Sequence[Schedule]) -> BoundaryChoice:
    """Return the boundary that a replica has, for a run that stays as it is."""
    if isinstance(replica, DatacenterReplica) or replica.stage_count == 1:
        return BoundaryChoice(ways[0], None, ways[0].free_seconds, None)
    rung = rung_of(replica.boundary, ways[0].spec.shape.width)
    return BoundaryChoice(ways[0], rung, ways[0].seconds(rung), None)


def _rows(
    config: RunConfig, vocabulary: int | None, classes: Classes, boundaries: Sequence[BoundaryChoice], fastest: float
) -> Iterator[SearchRow]:
    """Yield the run with each boundary for all groups, and without those that are hardly faster than the one before."""
    groups = [one for one in boundaries if one.rung is not None]
    if not groups:
        return
    counts = [_count(config, config.replicas[indices[0]].name) * len(indices) for indices in classes]
    share = sum(count for count, one in zip(counts, boundaries, strict=True) if one.rung is not None) / sum(counts)
    labels = {
        label_of([config.replicas[one] for one in indices]): found.rung
        for indices, found in zip(classes, boundaries, strict=True)
        if found.rung is not None
    }
    width, last = groups[0].schedule.spec.shape.width, 0.0
    worst = min(one.rung.equivalent for one in groups if one.rung is not None)
    own = [config.replicas[indices[0]] for indices in classes]
    ladders = [ladder(one.rung.boundary, width, config.plan.few_bits) if one.rung else [] for one in boundaries]
    every = {str(rung): rung for rung in [*next(filter(None, ladders)), *labels.values()] if rung is not None}
    for text, rung in sorted(every.items(), key=lambda one: -one[1].equivalent):
        chosen = [label for label, one in labels.items() if str(one) == text]
        changed = [
            replica if found.rung is None else replica.model_copy(update={"boundary": _like(found.rung, rung)})
            for replica, found in zip(own, boundaries, strict=True)
        ]
        rate = predict(RunSpec(_with_replicas(config, classes, changed), vocabulary)).tokens_per_second
        if chosen or rate >= WORTH_A_ROW * last:
            yield SearchRow(
                rung,
                bits_per_token(rung, width) / 8,
                rate,
                rate / fastest,
                penalty_of(rung.equivalent, share),
                chosen,
            )
        last = max(last, rate)
        if last * WORTH_A_ROW >= fastest and rung.equivalent <= worst:
            return


def _like(own: Rung, other: Rung) -> BoundarySettings:
    """Return another boundary with the settings of `own` that do not change its bytes."""
    taken = {key: getattr(other.boundary, key) for key in ("rank", "bits", "dtype")}
    return own.boundary.model_copy(update=taken)


def _fit_boundaries(
    config: RunConfig,
    vocabulary: int | None,
    classes: Classes,
    schedules: Sequence[Sequence[Schedule]],
    outer: OuterChoice,
    free: float,
    target: float,
    fastest: float,
) -> list[BoundaryChoice]:
    """Return the least lossy boundary of each class with which the run meets the target, or comes close to it."""

    def fitted(allowed: float) -> tuple[list[BoundaryChoice], float]:
        found = [_choose_boundary(ways, allowed, config.plan.few_bits) for ways in schedules]
        prediction = predict(RunSpec(_with_boundaries(config, classes, found), vocabulary))
        return found, prediction.tokens_per_second

    if config.inner.steps is None:  # the seconds of a class are those of the steps that fit with free links
        low, high = free, 2 * max(_least_lossy_seconds(ways) for ways in schedules)
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


def _least_lossy_seconds(ways: Sequence[Schedule]) -> float:
    replica = ways[0].replica
    if isinstance(replica, DatacenterReplica) or replica.stage_count == 1:
        return ways[0].free_seconds
    return max(way.seconds(ladder(replica.boundary, way.spec.shape.width)[0]) for way in ways)


def _with_boundaries(config: RunConfig, classes: Classes, found: Sequence[BoundaryChoice]) -> RunConfig:
    return _with_replicas(config, classes, [one.schedule.with_boundary(one.rung) for one in found])


def _quickest(ways: Sequence[Schedule]) -> Schedule:
    return min(ways, key=lambda one: one.free_seconds)


def _classes(config: RunConfig, vocabulary: int | None) -> Classes:
    places = {replica.name: index for index, replica in enumerate(config.replicas)}
    return [[places[one.name] for one in replicas] for replicas in alike(RunSpec(config, vocabulary))]


def _with_replicas(config: RunConfig, classes: Classes, replicas: Sequence[ReplicaSettings]) -> RunConfig:
    """Return the run with each replica of a class replaced by the one that was planned for the class."""
    found = list(config.replicas)
    for indices, planned in zip(classes, replicas, strict=True):
        for index in indices:
            own = config.replicas[index]
            found[index] = planned.model_copy(update={"name": own.name, "optional": own.optional})
    return config.model_copy(update={"replicas": found})


def _choose_boundary(ways: Sequence[Schedule], allowed: float, few_bits: bool) -> BoundaryChoice:
    """Return the least lossy boundary whose round ends in time, with the first schedule that achieves it."""
    replica = ways[0].replica
    if isinstance(replica, DatacenterReplica) or replica.stage_count == 1:
        return BoundaryChoice(ways[0], None, ways[0].free_seconds, None)
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


def _count(config: RunConfig, name: str) -> int:
    """Return the number of replicas that a name stands for."""
    fleet = config.simulate.fleets.get(name)
    return 1 if fleet is None else fleet.count


def _compressed_share(config: RunConfig) -> float:
    compressed = total = 0
    for replica in config.replicas:
        count = _count(config, replica.name)
        total += count
        if isinstance(replica, ParticipantsReplica) and replica.stage_count > 1 and replica.boundary.rank != "full":
            compressed += count
    return compressed / total


def _grouping_choices(grouped: Grouped) -> Iterator[Choice]:
    found = grouped.grouping
    quality = "proven best" if found.proven else "the best found, not proven"
    for name, members, seconds, link in zip(grouped.names, grouped.members, found.seconds, found.links, strict=True):
        why = f"slowest stage {format_seconds(seconds)} per micro-batch, slowest hop {_link(link)}"
        yield Choice(name, " - ".join(members), f"{why} ({quality} of {found.considered:,} paths)")
    if grouped.left_out:
        why = "with these participants, groups would be slower in total, or too few remain for another group"
        yield Choice("not used", ", ".join(grouped.left_out), why)


def _outer_choices(
    asked: RunConfig, planned: RunConfig, vocabulary: int | None, outer: OuterChoice, own: OuterChoice
) -> Iterator[Choice]:
    link = RunSpec(planned, vocabulary).links[exchange_link_name(outer.slowest)]
    up, down = (_link(link.bottleneck(way)) for way in DIRECTIONS)
    uplink = f"{link.name} ({up} up, {down} down)"
    why = f"{uplink} is the bottleneck: the exchange adds {outer.share:.2%} to a round"
    if outer is not own:
        why += f"; {_length(asked, own)}, density {format_ratio(own.density)} would add {own.share:.2%}"
    chosen = f"{_length(asked, outer)}, density {format_ratio(outer.density)}"
    if planned.outer.rounds != asked.outer.rounds:
        chosen += f", {planned.outer.rounds} rounds"
    yield Choice("outer round", chosen, why)


def _length(config: RunConfig, choice: OuterChoice) -> str:
    is_time = config.inner.steps is None
    return f"rounds of {format_seconds(choice.length)}" if is_time else f"H = {choice.length:g}"


def _replica_choices(
    config: RunConfig,
    vocabulary: int | None,
    classes: Classes,
    boundaries: Sequence[BoundaryChoice],
    outer: OuterChoice,
    free: float,
    share: float,
    fastest: float,
) -> Iterator[Choice]:
    for indices, found in zip(classes, boundaries, strict=True):
        index, replica = indices[0], config.replicas[indices[0]]
        if isinstance(replica, DatacenterReplica):
            continue
        label = label_of([config.replicas[one] for one in indices])
        layers = "+".join(str(len(own)) for own in replica.layer_ranges(found.schedule.spec.shape.layers))
        if is_measured(config, replica):
            yield Choice(label, f"layers {layers}", "unchanged: its costs were measured for this split")
        else:
            yield Choice(label, f"layers {layers}", describe(replica, config, vocabulary, index))
            rows = replica.batch_size // replica.micro_batches
            chosen = f"{replica.micro_batches} micro-batches of {rows}, {replica.extra_in_flight} extra in flight"
            why = "smallest bubble, with the fewest micro-batches in flight that hide the links as far as required"
            yield Choice(label, chosen, why)
        if found.rung is None:
            continue
        later = 0.0 if found.spurned is None else max(0.0, found.schedule.seconds(found.spurned) - free)
        spurned = outer.free_seconds / (outer.free_seconds + outer.exchange_seconds + later)
        if config.inner.steps is None and found.spurned is not None:  # others do not wait for this group
            own = [config.replicas[one[0]] for one in classes]
            own[classes.index(indices)] = replica.model_copy(update={"boundary": _like(found.rung, found.spurned)})
            lossier = predict(RunSpec(_with_replicas(config, classes, own), vocabulary))
            spurned = lossier.tokens_per_second / fastest
        yield _boundary_choice(label, found, spurned, share)


def _boundary_choice(label: str, found: BoundaryChoice, spurned: float, share: float) -> Choice:
    """Describe a boundary; `spurned` is the utilization with the less lossy one that was not chosen."""
    assert found.rung is not None
    slowest = found.schedule.slowest(found.rung)
    if slowest is None:
        return Choice(label, str(found.rung), "links between its stages cost no time")
    why = f"{_described(slowest)} decides"
    if found.spurned is not None:
        why += f"; {found.spurned} would reduce utilization to {spurned:.1%}"
    if found.rung.equivalent < 1:
        why += f"; {describe_penalty(penalty_of(found.rung.equivalent, share))}"
    return Choice(label, str(found.rung), why)


def describe_penalty(penalty: Penalty) -> str:
    """Return the rise of the loss as text, with the tables that it comes from."""
    ours = "not measured here" if penalty.measured is None else f"+{penalty.measured:.1%} measured at 0.34M"
    return f"loss +{penalty.paper:.1%} (Het-PP Table 2, 512M; {ours})"


def _limit(boundaries: Sequence[BoundaryChoice], outer: OuterChoice, free: float) -> str:
    """Return, as text, what costs most of the time that free links would save."""
    exposed = [max(0.0, one.seconds - free) for one in boundaries]
    worst = max(range(len(exposed)), key=exposed.__getitem__)
    if outer.exchange_seconds >= exposed[worst]:
        seconds = format_seconds(outer.exchange_seconds)
        return f"the exchange ({seconds} per round, through {exchange_link_name(outer.slowest)})"
    found = boundaries[worst]
    slowest = None if found.rung is None else found.schedule.slowest(found.rung)
    if slowest is None:
        return f"the stages of {found.schedule.replica.name}"
    return f"{_described(slowest, with_latency=True)}, which adds {format_seconds(exposed[worst])} per round"


def _described(slowest: LinkSpec | tuple[LineSpec, Way], with_latency: bool = False) -> str:
    """Return a text such as `home.1-2 (30 Mbit/s)`, or `the line of home.1 (20 Mbit/s up)`."""
    if isinstance(slowest, LinkSpec):
        name, bandwidth, latency = slowest.name, _link(_slower(slowest)), slowest.forward.latency
    else:
        line, way = slowest
        name, bandwidth, latency = f"the line of {line.name}", f"{_link(line.bandwidth(way))} {way}", line.latency
    return f"{name} ({bandwidth}, {format_seconds(latency)})" if with_latency else f"{name} ({bandwidth})"


def _slower(link: LinkSpec) -> float | None:
    """Return the bandwidth of the slower direction, for a single message."""
    return min((one for way in DIRECTIONS if (one := link.bottleneck(way)) is not None), default=None)


def _link(bandwidth: float | None) -> str:
    return format_bits_per_second(None if bandwidth is None or bandwidth >= LARGEST_LINK else bandwidth)
