"""Search for a topology that reaches a target: groups, then H and density, then boundaries; the result is predicted.

The utilization is the relative one of `simulate`: the time of a round with free links over its time. If a round lasts a
given time, it is its tokens over the tokens with free links.

The exchange may take half of the time that the target leaves, and the boundaries get the rest. A replica that would
wait for a slower one may spend that time on a less lossy boundary. No replica waits in rounds of a given time: each
must do, in the time that the target allows, the steps that fit into a round with free links.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hetero_pp.config.lines import LineSpec, Way
from hetero_pp.config.links import DIRECTIONS, LinkSpec, exchange_link_name
from hetero_pp.config.topology import DatacenterReplica, ParticipantsReplica, ReplicaSettings
from hetero_pp.core.errors import ConfigError
from hetero_pp.core.units import format_bits_per_second, format_ratio, format_seconds
from hetero_pp.planner.grouping import LARGEST_LINK
from hetero_pp.planner.outer import OuterChoice, choose_outer, with_outer
from hetero_pp.planner.participants import Grouped, group_participants
from hetero_pp.planner.penalty import Penalty, Rung, ladder, penalty_of
from hetero_pp.planner.schedules import Schedule, describe, is_measured, schedules_of
from hetero_pp.run.alike import alike, label_of
from hetero_pp.run.config import RunConfig
from hetero_pp.run.spec import RunSpec
from hetero_pp.simulator.prediction import Prediction, predict

ATTEMPTS = 6
"""Attempts to meet the target, because the whole run takes a little longer than its parts predict."""

CLOSE = 1.01
"""If the target is out of reach: accepted time of a round, as a multiple of the fastest. Limits the loss."""


@dataclass(frozen=True)
class Choice:
    """One line of the explanation."""

    what: str
    chosen: str
    why: str


@dataclass(frozen=True)
class Boundary:
    """Boundary and schedule that were chosen for a group."""

    schedule: Schedule
    rung: Rung | None
    """None if the group has no boundary."""
    seconds: float
    """Seconds of its inner loop and evaluation."""
    spurned: Rung | None
    """Next rung that would lose less."""


Classes = Sequence[Sequence[int]]
"""Replicas with equal settings, as indices into `config.replicas`. All of a class are planned alike."""


@dataclass(frozen=True)
class Result:
    """Planned run, and the reasons."""

    config: RunConfig
    before: float | None
    """Relative utilization of the YAML before planning; None if it cannot run."""
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


def search(config: RunConfig, vocabulary: int | None, target: float) -> Result:
    """Plan a run. Raises ConfigError if it cannot run at all: unknown hardware, or too little memory."""
    before = _utilization_before(config, vocabulary)
    grouped = group_participants(config, vocabulary) if config.plan.participants else None
    asked = config if grouped is None else grouped.config
    classes = _classes(asked, vocabulary)
    schedules = [schedules_of(asked, vocabulary, indices[0]) for indices in classes]
    base = _with_replicas(asked, classes, [_quickest(ways).replica for ways in schedules])
    outer, own_outer = choose_outer(base, vocabulary, (1 - target) / 2)
    asked = with_outer(asked, outer.length, outer.density)
    schedules = [schedules_of(asked, vocabulary, indices[0]) for indices in classes]
    free = max(_quickest(ways).free_seconds for ways in schedules)
    boundaries = _fit_boundaries(asked, vocabulary, classes, schedules, outer, free, target)
    planned = _with_boundaries(asked, classes, boundaries)
    prediction = predict(RunSpec(planned, vocabulary))
    utilization = _utilization(prediction, outer)
    share = _compressed_share(planned)
    slowest = max(range(len(boundaries)), key=lambda one: boundaries[one].seconds)
    worst = min(one.rung.equivalent for one in boundaries if one.rung is not None) if share else 1.0
    return Result(
        config=planned,
        before=before,
        prediction=prediction,
        utilization=utilization,
        reached=utilization >= target,
        limit=_limit(boundaries, outer, free),
        slowest=label_of([planned.replicas[one] for one in classes[slowest]]),
        choices=[
            *(_grouping_choices(grouped) if grouped is not None else ()),
            *_outer_choices(config, planned, vocabulary, outer, own_outer),
            *_replica_choices(planned, vocabulary, classes, boundaries, outer, free, share),
        ],
        groups={} if grouped is None else dict(zip(grouped.names, grouped.members, strict=True)),
        left_out=[] if grouped is None else grouped.left_out,
        penalty=penalty_of(worst, share) if worst < 1 else None,
        compressed_share=share,
    )


def _fit_boundaries(
    config: RunConfig,
    vocabulary: int | None,
    classes: Classes,
    schedules: Sequence[Sequence[Schedule]],
    outer: OuterChoice,
    free: float,
    target: float,
) -> list[Boundary]:
    """Return the least lossy boundary of each class with which the run meets the target, or comes close to it."""
    aim = outer.free_seconds / target
    left = aim - outer.free_seconds - outer.exchange_seconds
    allowed = free + (left if left > 0 else (aim - outer.free_seconds) / 2)
    for _ in range(ATTEMPTS):
        found = [_choose_boundary(ways, allowed, config.plan.few_bits) for ways in schedules]
        prediction = predict(RunSpec(_with_boundaries(config, classes, found), vocabulary))
        if left <= 0 or _utilization(prediction, outer) >= target or any(one.seconds > allowed for one in found):
            break
        taken = prediction.round_seconds  # a round of given time did fewer steps: convert to the time for all of them
        if config.inner.steps is None:
            taken = outer.free_seconds / _utilization(prediction, outer)
        allowed -= 1.05 * max(taken - aim, 0.001 * (allowed - free))
    return found


def _utilization(prediction: Prediction, outer: OuterChoice) -> float:
    """Return the smaller of two utilizations: against this plan with free links, and against the fastest plan."""
    return min(prediction.utilization["relative"], outer.free_seconds / prediction.round_seconds)


def _with_boundaries(config: RunConfig, classes: Classes, found: Sequence[Boundary]) -> RunConfig:
    return _with_replicas(config, classes, [one.schedule.with_boundary(one.rung) for one in found])


def _utilization_before(config: RunConfig, vocabulary: int | None) -> float | None:
    if config.plan.participants:
        return None
    try:
        return predict(RunSpec(config, vocabulary)).utilization["relative"]
    except ConfigError:
        return None


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


def _choose_boundary(ways: Sequence[Schedule], allowed: float, few_bits: bool) -> Boundary:
    """Return the least lossy boundary whose round ends in time, with the first schedule that achieves it."""
    replica = ways[0].replica
    if isinstance(replica, DatacenterReplica) or replica.stage_count == 1:
        return Boundary(ways[0], None, ways[0].free_seconds, None)
    rungs = ladder(replica.boundary, ways[0].spec.shape.width, few_bits)
    tried: list[Boundary] = []
    for rung, spurned in zip(rungs, (None, *rungs), strict=False):
        for way in ways:
            if way.least_seconds(rung) <= allowed:
                tried.append(Boundary(way, rung, way.seconds(rung), spurned))
                if tried[-1].seconds <= allowed:
                    return tried[-1]
    tried = tried or [Boundary(way, rungs[-1], way.seconds(rungs[-1]), rungs[-2]) for way in ways]
    fastest = min(one.seconds for one in tried)
    return next(one for one in tried if one.seconds <= CLOSE * fastest)


def _compressed_share(config: RunConfig) -> float:
    compressed = total = 0
    for replica in config.replicas:
        count = fleet.count if (fleet := config.simulate.fleets.get(replica.name)) else 1
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
    boundaries: Sequence[Boundary],
    outer: OuterChoice,
    free: float,
    share: float,
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
        if found.rung is not None:
            yield _boundary_choice(label, found, outer, free, share)


def _boundary_choice(label: str, found: Boundary, outer: OuterChoice, free: float, share: float) -> Choice:
    assert found.rung is not None
    slowest = found.schedule.slowest(found.rung)
    if slowest is None:
        return Choice(label, str(found.rung), "links between its stages cost no time")
    why = f"{_described(slowest)} decides"
    if found.spurned is not None:
        later = max(0.0, found.schedule.seconds(found.spurned) - free)
        lossier = outer.free_seconds + outer.exchange_seconds + later
        why += f"; {found.spurned} would reduce utilization to {outer.free_seconds / lossier:.1%}"
    if found.rung.equivalent < 1:
        why += f"; {describe_penalty(penalty_of(found.rung.equivalent, share))}"
    return Choice(label, str(found.rung), why)


def describe_penalty(penalty: Penalty) -> str:
    """Return the rise of the loss as text, with the tables that it comes from."""
    ours = "not measured here" if penalty.measured is None else f"+{penalty.measured:.1%} measured at 0.34M"
    return f"loss +{penalty.paper:.1%} (Het-PP Table 2, 512M; {ours})"


def _limit(boundaries: Sequence[Boundary], outer: OuterChoice, free: float) -> str:
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
