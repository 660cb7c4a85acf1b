"""Times of a round: inner loops, the outer round (contribute, exchange, apply) and an evaluation.

The exchange closes the round when the last contribution has arrived. With `outer.overlap` the next inner loop runs
while contributions are in transit. A member's own links transfer one message after the other. Lines that several
members share are never idle while a member could use them. So the last byte arrives at the time that their total needs
(`all_sent`). Latency is the exception: it adds the longest one of those that share.

Rounds overlap a little in any case, because a stage goes on as soon as it can. So a round comes before those that are
timed. Those are one for each fragment, because their bytes differ; the rounds after them are the same.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import partial
from itertools import accumulate, pairwise
from math import floor
from statistics import fmean

import numpy as np

from hetero_pp.config.alike import alike, equal_replicas, label_of
from hetero_pp.config.lines import DIRECTIONS, WAYS, Direction, exchange_link_name, require, stage_link_name
from hetero_pp.config.predictions import FleetSettings
from hetero_pp.config.spec import MemberSpec, RunSpec
from hetero_pp.config.topology import ParticipantsReplica, ReplicaSettings
from hetero_pp.core.errors import ConfigError
from hetero_pp.model.transformer import block_of
from hetero_pp.simulator.costs import cost_of, hardware_of
from hetero_pp.simulator.events import GroupClock, GroupOfEvents, Hop, LineWay, OnSpan, inner_loops
from hetero_pp.simulator.memory import Memory, memory_of_member, require_memory
from hetero_pp.simulator.traffic import (
    BoundaryCrossing,
    blob_sizes,
    crossing,
    exchange_bandwidth,
    is_at_site_of_exchange,
    is_ring,
    message_bytes,
    rules_of_predictions,
    site_bandwidths,
    site_of,
    wanted_blocks,
)

# ---- fleets: equal replicas of a run, each simulated once ----


@dataclass(frozen=True)
class Fleet:
    """Equal replicas. Sequences have one entry for each member of a replica, stage by stage."""

    replicas: Sequence[ReplicaSettings]  # replicas of the run with equal settings and names of equal length
    count: int  # number of replicas, with those that a name stands for
    members: Sequence[MemberSpec]  # members of the first replica
    group: GroupOfEvents
    message_bytes: dict[str, float]
    """Bytes on the wire of one message between stages, by kind: `activation`, `gradient` and `evaluation`."""
    up: Sequence[BoundaryCrossing]  # contributions that members send in an outer round
    down: Sequence[BoundaryCrossing]
    sites: Sequence[str | None]  # name of the site whose uplink each member shares
    at_site_of_exchange: Sequence[bool]
    """Whether each member reaches the exchange without a line, because both are at one site."""
    contribute: Sequence[float]  # seconds of compute
    apply: Sequence[float]
    stays: float  # share of the replicas whose members all stay until the end of the round
    memory: Sequence[Memory]
    memory_capacity: Sequence[float]

    @property
    def replica(self) -> ReplicaSettings:
        """First replica; all have its settings."""
        return self.replicas[0]


def fleets_of(spec: RunSpec, round_: int = 1) -> Iterator[Fleet]:
    """Yield a fleet for every set of equal replicas of the run, with the contributions to a round.

    Raises ConfigError for unknown hardware, costs or fleets of unknown names, and impossible sites or rings. Also
    raises it for too little memory, and says how much is missing.
    """
    require(rules_of_predictions(spec))
    for replicas in equal_replicas(spec):
        fleet = _fleet_of(spec, replicas, round_)
        for member, held, capacity in zip(fleet.members, fleet.memory, fleet.memory_capacity, strict=True):
            require_memory(spec, member, held, capacity)
        yield fleet


def _fleet_of(spec: RunSpec, replicas: Sequence[ReplicaSettings], round_: int) -> Fleet:
    replica = replicas[0]
    settings = spec.config.simulate.fleets.get(replica.name, FleetSettings(count=len(replicas)))
    members = [spec.members[name] for name in replica.members]
    costs, hardware = [cost_of(spec, member) for member in members], [hardware_of(spec, member) for member in members]
    sizes = message_bytes(spec, replica)
    passed = [line for line in spec.lines.values() if set(line.members) & set(replica.members)]
    every = {(line.name, way): line.bandwidth_of(way) for line in passed for way in WAYS}
    capacities = {line_way: bandwidth for line_way, bandwidth in every.items() if bandwidth is not None}

    def hops(direction: Direction, kind: str) -> list[Hop]:
        found = []
        for hop in range(len(members) - 1):
            link = spec.links[stage_link_name(replica.name, hop)]
            shape = link.shape(direction)
            ways = zip(link.lines(direction), WAYS, strict=True)
            lines = [(line.name, way) for line, way in ways if line is not None and (line.name, way) in capacities]
            bandwidth = float("inf") if shape.bandwidth is None else shape.bandwidth
            found.append(Hop(8.0 * sizes[kind], bandwidth, shape.latency, shape.jitter, tuple(lines)))
        return found

    return Fleet(
        replicas=replicas,
        count=settings.count,
        members=members,
        group=GroupOfEvents(
            micro_batches=replica.micro_batches,
            extra_in_flight=replica.extra_in_flight if isinstance(replica, ParticipantsReplica) else 0,
            forward=[cost.forward for cost in costs],
            backward=[cost.backward for cost in costs],
            update=[cost.update for cost in costs],
            activations=hops("forward", "activation"),
            gradients=hops("backward", "gradient"),
            evaluate=[cost.evaluate for cost in costs],
            evaluations=hops("forward", "evaluation"),
            evaluation_batches=-(
                -spec.config.data.validation_sequences // (replica.batch_size // replica.micro_batches)
            ),
            capacities=capacities,
        ),
        message_bytes=sizes,
        up=[crossing(spec, member, "forward", round_) for member in members],
        down=[crossing(spec, member, "backward", round_) for member in members],
        sites=[site_of(spec, member) for member in members],
        at_site_of_exchange=[is_at_site_of_exchange(spec, member) for member in members],
        contribute=[c.contribute * outer_share(spec, one, round_)[0] for c, one in zip(costs, members, strict=True)],
        apply=[c.apply * outer_share(spec, one, round_)[1] for c, one in zip(costs, members, strict=True)],
        stays=(1 - settings.churn) ** len(members),
        memory=[memory_of_member(spec, one, own.is_accelerator) for one, own in zip(members, hardware, strict=True)],
        memory_capacity=[own.memory * replica.devices_of(stage) for stage, own in enumerate(hardware)],
    )


def outer_share(spec: RunSpec, member: MemberSpec, round_: int) -> tuple[float, float]:
    """Return a round's share of a member's work on the outer rounds of all fragments: to contribute, and to apply."""
    sizes = blob_sizes(spec)[member.replica.name]

    def share(blocks: Collection[str]) -> float:
        return sum(sizes[one] for one in spec.fragments.among(blocks, round_)) / sum(sizes[one] for one in blocks)

    return share(set(map(block_of, member.owned))), share(wanted_blocks(spec, member))


# ---- the rounds of all fleets ----

PROBED = 17  # steps of the simulation that decides how many fit into a round of a given time

Watch = Callable[[str], OnSpan]
"""Maps the label of equal replicas to the callback that receives the spans of one of them."""


@dataclass(frozen=True)
class TimedFleet:
    """Mean times of a replica of a fleet in a round."""

    inner_seconds: float
    step_seconds: float
    steps: float


@dataclass(frozen=True)
class TimedPeriod:
    """Times of one round of each fragment, and their means."""

    by_fragment: Sequence[float]  # seconds of each round
    outer_by_fragment: Sequence[float]
    """Seconds from the end of the slowest inner loop until the last member goes on, without the evaluation."""
    fleets: Sequence[TimedFleet]

    @property
    def round_seconds(self) -> float:
        return fmean(self.by_fragment)

    @property
    def outer_seconds(self) -> float:
        return fmean(self.outer_by_fragment)


def time_period(
    spec: RunSpec, rounds: Sequence[Sequence[Fleet]], communicates: bool, watch: Watch | None = None
) -> TimedPeriod:
    """Return the times of rounds, one of each fragment, whose fleets are in `rounds`.

    Without `communicates`, links cost nothing. Raises ConfigError as `round_lengths`.

    With `outer.overlap` a round begins once the one before was applied, with its inner loop already trained. Training
    shares lines with the contributions in transit (`longer_by_turns`). Contributions have the full bandwidth of every
    line, so such a round may be shorter than its lines need for all bytes.
    """
    overlaps, fleets = bool(spec.config.outer.overlap), rounds[-1]
    lengths = round_lengths(spec, fleets, communicates)
    clocks = _clocks(spec, fleets, communicates, watch)
    gathers = communicates and not is_ring(spec.config.simulate)
    opened, ends, spent, timed = 0.0, list[float](), 0.0, list[TimedFleet]()
    outer, every = list[float](), list[list[TimedFleet]]()
    longer = [0.0] * len(fleets)  # seconds that an inner loop waits for contributions

    def last() -> float:
        return max(max(clock.free) for clock in clocks)

    def until(what: str, ends: Sequence[Sequence[float]], track: str = "stage {}") -> None:
        """Keep every member busy until its end."""
        for clock, own in zip(clocks, ends, strict=True):
            if clock.on_span is not None:
                for stage, (start, end) in enumerate(zip(clock.free, own, strict=True)):
                    clock.on_span(track.format(stage), what, 0, start, end)
            clock.free[:] = own

    def train() -> None:
        nonlocal timed, spent
        began, starts = last(), [clock.free[0] for clock in clocks]
        steps = list[int]()
        for fleet, start, length, waits in zip(fleets, starts, lengths, longer, strict=True):
            # What the first stage does in the round's time beside its steps; with overlap that happens meanwhile.
            closing = fleet.contribute[0] + (fleet.up[0].alone if gathers else 0.0)
            steps.append(length(waits if overlaps else start - opened + closing))
        times = inner_loops(clocks, steps)
        for clock, waits in zip(clocks, longer, strict=True):
            clock.free[:] = [end + waits for end in clock.free]
        inner = [max(clock.free) - start for clock, start in zip(clocks, starts, strict=True)]
        each = [
            one.each + waits / n if n > 1 else own
            for own, one, n, waits in zip(inner, times, steps, longer, strict=True)
        ]
        timed = list(map(TimedFleet, inner, each, steps))
        spent = last() - began

    if overlaps:
        train()
        alone = timed
    for fleets in [rounds[-1], *rounds]:
        if not overlaps:
            train()
        began = last()
        until("contribute", [_sums(clock.free, fleet.contribute) for clock, fleet in zip(clocks, fleets, strict=True)])
        ready = [list(clock.free) for clock in clocks]
        track = "stage {} exchange" if overlaps else "stage {}"
        if gathers:
            sent, opened = _sent(spec, fleets, ready)
            until("send contribution", sent, track)
            what, received = "receive contributions", _received(spec, fleets, opened)
        else:
            opened, what, passed = last(), "pass contributions on", 0.0
            if communicates:  # every step around a ring takes as long as its slowest link
                crossings = [both for fleet in fleets for both in zip(fleet.up, fleet.down, strict=True)]
                passed = max(max(up.seconds, down.seconds) for up, down in crossings)
                passed += max(up.delay for up, _ in crossings) + max(down.delay for _, down in crossings)
            received = [[opened + passed] * len(clock.free) for clock in clocks]
        for clock in clocks:  # all wait until the round has closed
            clock.free[:] = [opened] * len(clock.free)
        until(what, received, track)
        if overlaps:
            carried = [list(clock.free) for clock in clocks]
            for clock, own in zip(clocks, ready, strict=True):
                clock.free[:] = own
            longer = longer_by_turns(spec, fleets, alone) if gathers else longer
            train()
            both = [
                [max(pair) for pair in zip(c.free, own, strict=True)] for c, own in zip(clocks, carried, strict=True)
            ]
            until("wait", both)
        until("apply", [_sums(clock.free, fleet.apply) for clock, fleet in zip(clocks, fleets, strict=True)])
        outer.append(last() - began - (spent if overlaps else 0.0))
        for clock in clocks:
            clock.evaluate()
            clock.free[:] = [max(clock.free)] * len(clock.free)  # a replica gets its next task when all members ask
        ends.append(last())
        every.append(timed)
    means = [
        TimedFleet(*(fmean(getattr(one, key.name) for one in same) for key in fields(TimedFleet)))
        for same in zip(*every[1:], strict=True)
    ]
    return TimedPeriod([end - start for start, end in pairwise(ends)], outer[1:], means)


def longer_by_turns(spec: RunSpec, fleets: Sequence[Fleet], alone: Sequence[TimedFleet]) -> list[float]:
    """Return by how many seconds each inner loop is longer than alone if contributions cross lines meanwhile.

    Contributions and messages between stages take turns, so that each have half of a line while both need it. Let
    contributions need a line for c seconds, and messages for a share u > 1/2 of an inner loop of T seconds. The inner
    loop is longer by c (2 - 1/u), or by T (2u - 1) if the contributions take longer than all of it.
    """
    trained, carried = defaultdict[LineWay, float](float), defaultdict[LineWay, float](float)
    capacities: dict[LineWay, float] = {}
    for fleet, own in zip(fleets, alone, strict=True):
        capacities |= fleet.group.capacities
        for hop in (*fleet.group.activations, *fleet.group.gradients):
            for passed in hop.lines:
                trained[passed] += hop.bits * fleet.group.micro_batches * own.steps / own.inner_seconds
        for member, *both in zip(fleet.members, fleet.up, fleet.down, strict=True):
            link = spec.links[exchange_link_name(member.name)]
            for outer, direction in zip(both, DIRECTIONS, strict=True):
                for line, way in zip(link.lines(direction), WAYS, strict=True):
                    if line is not None:
                        carried[line.name, way] += 8 * outer.n_bytes

    def longer(line: LineWay, seconds: float) -> float:
        share, takes = trained[line] / capacities[line], carried[line] / capacities[line]
        return max(0.0, min(takes * (2 - 1 / share), seconds * (2 * share - 1))) if share else 0.0

    return [
        max([0.0, *(longer(line, own.inner_seconds) for line in fleet.group.capacities)])
        for fleet, own in zip(fleets, alone, strict=True)
    ]


def round_lengths(spec: RunSpec, fleets: Sequence[Fleet], communicates: bool) -> list[Callable[[float], int]]:
    """Return for each fleet a function from the seconds beside its inner loop to the steps of a round.

    They are the number in the YAML, or as many as fit into its time, and at least one. Raises ConfigError if steps take
    no time, because then any number fits.
    """
    given, seconds = spec.config.inner.steps, spec.config.inner.seconds
    if given is not None:
        numbers = (spec.steps_of(fleet.replica.name) or given for fleet in fleets)
        return [partial(lambda steps, beside: steps, number) for number in numbers]
    assert seconds is not None

    def steps_within(seconds: float, each: float, beside: float) -> int:
        return max(1, 1 + floor((seconds - beside) / each + 1e-9))

    found = list[Callable[[float], int]]()
    for times in inner_loops(_clocks(spec, fleets, communicates, None), [PROBED] * len(fleets)):
        if not times.each > 0:
            expected = "expected a machine with a finite speed: `inner.seconds` has to give a number of steps"
            raise ConfigError(("inner", "seconds"), f"found steps that take 0 s, {expected}")
        found.append(partial(steps_within, seconds - times.first, times.each))
    return found


def _clocks(spec: RunSpec, fleets: Sequence[Fleet], communicates: bool, watch: Watch | None) -> list[GroupClock]:
    random = np.random.default_rng(spec.config.simulate.seed + 1) if communicates else None
    shown = {} if watch is None else {replicas[0].name: watch(label_of(replicas)) for replicas in alike(spec)}
    return [
        GroupClock(
            fleet.group if communicates else fleet.group.without_communication(), random, shown.get(fleet.replica.name)
        )
        for fleet in fleets
    ]


def _sums(starts: Sequence[float], seconds: Sequence[float]) -> list[float]:
    return [start + own for start, own in zip(starts, seconds, strict=True)]


Times = Sequence[Sequence[float]]  # times of the members of each fleet


def _sent(spec: RunSpec, fleets: Sequence[Fleet], ready: Times) -> tuple[list[list[float]], float]:
    """Return when members have sent their contributions, alone or with the others of their site; and all of them."""
    ends = [_sums(own, [one.alone for one in fleet.up]) for own, fleet in zip(ready, fleets, strict=True)]
    for site, bandwidth in site_bandwidths(spec, "forward").items():
        here = _members_at(fleets, site)
        sizes = [(ready[one][stage], fleets[one].up[stage].n_bytes * fleets[one].count) for one, stage in here]
        end = all_sent(sizes, bandwidth) + max(fleets[one].up[stage].delay for one, stage in here)
        for one, stage in here:
            ends[one][stage] = max(ends[one][stage], end)
    last, shared, here = max(map(max, ends)), exchange_bandwidth(spec, "forward"), _members_elsewhere(fleets)
    if shared is not None and here:  # the exchange's own line has to bring it all contributions
        sizes = [(ready[one][stage], fleets[one].up[stage].n_bytes * fleets[one].count) for one, stage in here]
        last = max(last, all_sent(sizes, shared) + max(one.delay for fleet in fleets for one in fleet.up))
    return ends, last


def _received(spec: RunSpec, fleets: Sequence[Fleet], opened: float) -> list[list[float]]:
    """Return when members have the contributions of all. All begin together, because the round has just closed."""
    ends = [[opened + one.alone for one in fleet.down] for fleet in fleets]
    for site, bandwidth in site_bandwidths(spec, "backward").items():
        here = _members_at(fleets, site)
        sizes = [(fleets[one].down[stage].n_bytes, fleets[one].count) for one, stage in here]
        for (one, stage), seconds in zip(here, fair_ends(sizes, bandwidth), strict=True):
            ends[one][stage] = max(ends[one][stage], opened + seconds + fleets[one].down[stage].delay)
    shared = exchange_bandwidth(spec, "backward")
    if shared is None:
        return ends
    here = _members_elsewhere(fleets)
    total = sum(fleets[one].down[stage].n_bytes * fleets[one].count for one, stage in here)
    delay = max(one.delay for fleet in fleets for one in fleet.down)
    late = max(0.0, opened + total * 8 / shared + delay - max(map(max, ends)))
    return [[end + late for end in own] for own in ends]


Members = list[tuple[int, int]]  # members, as indices of a fleet and of a stage


def _members_at(fleets: Sequence[Fleet], site: str) -> Members:
    return [(one, stage) for one, fleet in enumerate(fleets) for stage, own in enumerate(fleet.sites) if own == site]


def _members_elsewhere(fleets: Sequence[Fleet]) -> Members:
    """Return the members that reach the exchange over its line."""
    every = [(one, stage) for one, fleet in enumerate(fleets) for stage in range(len(fleet.members))]
    return [(one, stage) for one, stage in every if not fleets[one].at_site_of_exchange[stage]]


def all_sent(starts: Sequence[tuple[float, float]], bandwidth: float) -> float:
    """Return the seconds when the last one is done, in whatever order they send.

    Args: (start, bytes) of each; bandwidth in bits per second.

    It is the largest of (start + all bytes that start then or later), as the link works without a pause from some start
    on.
    """
    latest = sorted(starts, reverse=True)
    totals = accumulate(n_bytes for _, n_bytes in latest)
    return max(start + total * 8 / bandwidth for (start, _), total in zip(latest, totals, strict=True))


def fair_ends(sizes: Sequence[tuple[float, int]], bandwidth: float) -> list[float]:
    """Return the seconds until each has its bytes, if all begin together and share the link evenly.

    Args: (bytes, number of members with so many) of each; bandwidth in bits per second.

    While the smallest is in transit, all get as much as it does: end_i = sum_j min(bytes_i, bytes_j) over the
    bandwidth.
    """
    order = sorted(range(len(sizes)), key=lambda one: sizes[one][0])
    ends, done, left = [0.0] * len(sizes), 0.0, sum(count for _, count in sizes)
    for index in order:
        n_bytes, count = sizes[index]
        ends[index] = (done + left * n_bytes) * 8 / bandwidth
        done, left = done + count * n_bytes, left - count
    return ends
