"""Simulate some rounds of a topology, and derive times, utilization, bytes and memory.

A round is what `launch` runs: the inner loop of every replica, contributions to the exchange, contributions of others,
and an evaluation. If a round lasts a given time, the inner loop has the steps that fit. The exchange closes the round
when the last contribution has arrived. With `outer.overlap` the next inner loop runs while contributions are in
transit.

Rounds overlap a little in any case, because a stage goes on as soon as it can. So the times are those of a later round,
not of the first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from hetero_pp.config.lines import WAYS
from hetero_pp.config.links import EXCHANGE, Direction, exchange_link_name, stage_link_name
from hetero_pp.config.topology import ReplicaSettings
from hetero_pp.run.alike import alike, label_of
from hetero_pp.run.spec import RunSpec
from hetero_pp.simulator.exchange_load import ExchangeLoad, exchange_load
from hetero_pp.simulator.fleets import Fleet, fleets_of
from hetero_pp.simulator.inner_loops import RoundSteps, inner_loops, round_lengths
from hetero_pp.simulator.outer_round import run_outer_round, run_overlapped_round, seconds_to_contribute
from hetero_pp.simulator.pipeline import Array, GroupClock, OnSpan
from hetero_pp.simulator.published import Comparison, compared

ROUNDS = 2
"""Rounds that are timed. Only the last counts, because those after it are the same."""


@dataclass(frozen=True)
class StagePrediction:
    """Prediction for one member of a replica, or the mean if its name stands for many replicas."""

    member: str
    utilization: float
    """Share of a round that it trains: forward, backward, optimizer."""
    memory_bytes: dict[str, float]
    memory_capacity_bytes: float
    sent_seconds: float
    """Seconds of an outer round on its link to the exchange; on a site's shared link, as if no other member used it."""
    received_seconds: float
    sent_bytes: float
    received_bytes: float


@dataclass(frozen=True)
class LinkPrediction:
    """Prediction for a link: bytes of a round on the wire, and the share of the round that it is busy, each way."""

    name: str
    forward_bytes: float
    backward_bytes: float
    forward_busy: float
    backward_busy: float


@dataclass(frozen=True)
class LinePrediction:
    """Prediction for a line: bytes of a round on the wire, and the share of the round that it is busy, each way."""

    name: str
    kind: str
    members: Sequence[str]
    """If a name stands for many replicas, each of them has such a line."""
    up_bytes: float
    down_bytes: float
    up_busy: float
    down_busy: float


@dataclass(frozen=True)
class ReplicaPrediction:
    """Prediction for a replica, or the mean of the many that its name stands for."""

    name: str
    count: int
    lost: int
    """Number of these replicas that a member left during the round, so that their contribution is missing."""
    steps: float
    """Inner steps of a round."""
    tokens: float
    """Tokens that one replica trains on in a round."""
    step_seconds: float
    inner_seconds: float
    training: float
    """Share of a round that is its inner loop."""
    bubble: float
    """Share of the inner loop that stages would be idle even with links that cost nothing."""
    exposed_communication: float
    """Share of the inner loop that links add to that."""
    sent_bytes: float
    """Bytes of all members of one replica, in an outer round."""
    received_bytes: float
    stages: list[StagePrediction]
    links: list[LinkPrediction]


@dataclass(frozen=True)
class Prediction:
    """Prediction for a topology."""

    step_seconds: float
    """Seconds of the slowest replica."""
    round_seconds: float
    outer_seconds: float
    """Seconds from the end of the slowest inner loop until the last member goes on, without the evaluation."""
    utilization: dict[str, float]
    """Utilization by kind.

    `absolute` is the share of a round that members train, over all of them. `relative` is the tokens per second over
    those with links that cost nothing.
    """
    tokens_per_second: float
    tokens: int
    rounds: float
    """Rounds to reach `tokens`."""
    days: float
    accelerator_hours: float
    sent_bytes: float
    """Bytes of one replica (the mean over all) in all outer rounds: the communication volume."""
    received_bytes: float
    members: int
    replicas: list[ReplicaPrediction]
    exchange: ExchangeLoad
    lines: Sequence[LinePrediction] = ()
    published: Sequence[Comparison] = ()
    """Published numbers beside the predicted ones."""

    def as_json(self) -> dict[str, Any]:
        """Return the object that `--json` writes: it repeats `stages` and `links` of all replicas at the top level."""
        stages = [asdict(stage) for replica in self.replicas for stage in replica.stages]
        links = [asdict(link) for replica in self.replicas for link in replica.links]
        published = [one.as_json() for one in self.published]
        return asdict(self) | {"stages": stages, "links": links, "published": published}

    def as_point(self) -> dict[str, Any]:
        """Return the object that a sweep writes; `utilization` is the relative one."""
        times = ("step_seconds", "round_seconds", "tokens_per_second", "days", "outer_seconds")
        return {
            "utilization": self.utilization["relative"],
            "absolute_utilization": self.utilization["absolute"],
            **{name: getattr(self, name) for name in (*times, "sent_bytes", "received_bytes")},
            "published": [one.as_json() for one in self.published],
        }


@dataclass(frozen=True)
class _Timed:
    """Times of the last round. Per fleet: [G] or [S, G]."""

    round_seconds: float
    outer_seconds: float
    inner_seconds: list[Array]
    step_seconds: list[Array]
    steps: list[RoundSteps]


def predict(spec: RunSpec, watch: Callable[[str], OnSpan] | None = None, *, stage_links: bool = True) -> Prediction:
    """Predict the times, bytes and memory of a run's topology.

    `watch` maps the label of a replica to the callback that receives the spans of its members and links. Without
    `stage_links` messages between stages cost nothing, and only the exchange takes time.

    Raises ConfigError for unknown hardware, for members whose part does not fit their memory, and for published numbers
    of unpredicted quantities.
    """
    simulate = spec.config.simulate
    fleets = list(fleets_of(spec, np.random.default_rng(simulate.seed)))
    if not stage_links:
        fleets = [fleet.without_stage_links() for fleet in fleets]
    timed = _run(spec, fleets, True, watch)
    ideal = _run(spec, fleets, False, None)
    if spec.config.outer.overlap:
        timed = _within_lines(spec, fleets, timed, ideal)
    tokens_per_round = _tokens(spec, fleets, timed, only_counted=True)
    all_tokens_per_round = _tokens(spec, fleets, timed)
    total = simulate.tokens or all_tokens_per_round * spec.latest.outer.rounds
    rate = tokens_per_round / timed.round_seconds
    members = sum(len(fleet.members) * fleet.count for fleet in fleets)
    accelerators = sum(sum(fleet.accelerators) * fleet.count for fleet in fleets)
    trained = sum(
        float(_training_seconds(fleet, own.counts).sum()) for fleet, own in zip(fleets, timed.steps, strict=True)
    )
    ideal_tokens = _tokens(spec, fleets, ideal, only_counted=True)
    replicas = _replicas(spec, fleets, timed, ideal)
    rounds = total / all_tokens_per_round
    count = sum(replica.count for replica in replicas)
    found = Prediction(
        step_seconds=max(float(steps.max()) for steps in timed.step_seconds),
        round_seconds=timed.round_seconds,
        outer_seconds=timed.outer_seconds,
        utilization={
            "absolute": trained / members / timed.round_seconds,
            "relative": ideal.round_seconds / timed.round_seconds * (tokens_per_round / ideal_tokens),
        },
        tokens_per_second=rate,
        tokens=total,
        rounds=rounds,
        days=total / rate / 86400,
        accelerator_hours=accelerators * total / rate / 3600,
        sent_bytes=rounds * sum(one.sent_bytes * one.count for one in replicas) / count,
        received_bytes=rounds * sum(one.received_bytes * one.count for one in replicas) / count,
        members=members,
        replicas=replicas,
        exchange=exchange_load(spec, {replica.name: replica.steps for replica in replicas}),
        lines=list(_lines(spec, replicas, timed.round_seconds)),
    )
    if not simulate.published:
        return found
    return replace(found, published=list(compared(spec.config, found.as_json())))


def _within_lines(spec: RunSpec, fleets: Sequence[Fleet], timed: _Timed, ideal: _Timed) -> _Timed:
    """Lengthen the round to the time in which each line can carry all bytes, of stage links and of the exchange."""
    replicas = _replicas(spec, fleets, timed, ideal)
    full = [max(line.up_busy, line.down_busy) for line in _lines(spec, replicas, 1.0)]
    return replace(timed, round_seconds=max([timed.round_seconds, *full]))


def _run(spec: RunSpec, fleets: Sequence[Fleet], communicates: bool, watch: Callable[[str], OnSpan] | None) -> _Timed:
    if spec.config.outer.overlap:
        return _run_overlapped(spec, fleets, communicates, watch)
    lengths = round_lengths(spec, fleets, _clocks(spec, fleets, communicates, None))
    to_contribute = [seconds_to_contribute(spec, fleet, communicates) for fleet in fleets]
    clocks, ends, opened = _clocks(spec, fleets, communicates, watch), [0.0], 0.0
    for _ in range(ROUNDS):
        starts = [clock.free[0].copy() for clock in clocks]
        spent = [start - opened + after for start, after in zip(starts, to_contribute, strict=True)]
        steps = [length(seconds) for length, seconds in zip(lengths, spent, strict=True)]
        step_ends = inner_loops(spec, fleets, clocks, [own.timed for own in steps])
        for own, clock in zip(steps, clocks, strict=True):
            own.finish(clock)
        inner = [clock.free.max(axis=0) - start for clock, start in zip(clocks, starts, strict=True)]
        trained = _last_of(clocks)
        opened = run_outer_round(spec, list(zip(fleets, clocks, strict=True)), communicates)
        outer = _last_of(clocks) - trained
        _evaluate(fleets, clocks, communicates)
        ends.append(_last_of(clocks))
    step_seconds = [_step_seconds(*one) for one in zip(steps, step_ends, inner, strict=True)]
    return _Timed(ends[-1] - ends[-2], outer, inner, step_seconds, steps)


def _run_overlapped(
    spec: RunSpec, fleets: Sequence[Fleet], communicates: bool, watch: Callable[[str], OnSpan] | None
) -> _Timed:
    """Time rounds that overlap.

    Every round begins once the one before was applied, with its inner loop already trained.
    """
    lengths = round_lengths(spec, fleets, _clocks(spec, fleets, communicates, None))
    clocks, ends = _clocks(spec, fleets, communicates, watch), [0.0]
    steps = [length(np.zeros(fleet.count)) for length, fleet in zip(lengths, fleets, strict=True)]
    spent, inner, step_ends = 0.0, list[Array](), list[list[Array]]()

    def train() -> None:
        nonlocal spent, inner, step_ends
        starts, began = [clock.free[0].copy() for clock in clocks], _last_of(clocks)
        step_ends = inner_loops(spec, fleets, clocks, [own.timed for own in steps])
        inner = [clock.free.max(axis=0) - start for clock, start in zip(clocks, starts, strict=True)]
        spent = _last_of(clocks) - began

    train()
    for _ in range(ROUNDS):
        began = _last_of(clocks)
        run_overlapped_round(spec, list(zip(fleets, clocks, strict=True)), communicates, train)
        outer = _last_of(clocks) - began - spent
        _evaluate(fleets, clocks, communicates)
        ends.append(_last_of(clocks))
    step_seconds = [_step_seconds(*one) for one in zip(steps, step_ends, inner, strict=True)]
    return _Timed(ends[-1] - ends[-2], outer, inner, step_seconds, steps)


def _evaluate(fleets: Sequence[Fleet], clocks: Sequence[GroupClock], communicates: bool) -> None:
    for fleet, clock in zip(fleets, clocks, strict=True):
        hops = fleet.evaluation_hops if communicates else clock.groups.activations
        clock.evaluate(fleet.evaluation_batches, fleet.evaluation_forward, hops)
        clock.free[:] = clock.free.max(axis=0)  # a replica gets its next task when all its members ask for one


def _last_of(clocks: Sequence[GroupClock]) -> float:
    """Return when the last member is free."""
    return max(float(clock.free.max()) for clock in clocks)


def _clocks(
    spec: RunSpec, fleets: Sequence[Fleet], communicates: bool, watch: Callable[[str], OnSpan] | None
) -> list[GroupClock]:
    """Return clocks at 0. `watch` receives the spans of one group of each class of equal replicas."""
    random = np.random.default_rng(spec.config.simulate.seed + 1) if communicates else None
    shown = {} if watch is None else {replicas[0].name: watch(label_of(replicas)) for replicas in alike(spec)}
    return [
        GroupClock(
            fleet.groups if communicates else fleet.without_communication(), random, shown.get(fleet.replica.name)
        )
        for fleet in fleets
    ]


def _step_seconds(steps: RoundSteps, ends: Sequence[Array], inner: Array) -> Array:
    """Return the seconds of a step of each group, from the times when its first stage completed each optimizer step."""
    if steps.a_step is not None:
        return steps.a_step
    return inner if len(ends) == 1 else (ends[-1] - ends[0]) / (len(ends) - 1)


def _tokens(spec: RunSpec, fleets: Sequence[Fleet], timed: _Timed, only_counted: bool = False) -> int:
    """Return the tokens that groups train on in a round; with `only_counted`, without groups that a member leaves."""
    return sum(
        _tokens_per_step(spec, fleet) * int(own.counts[fleet.stays if only_counted else slice(None)].sum())
        for fleet, own in zip(fleets, timed.steps, strict=True)
    )


def _tokens_per_step(spec: RunSpec, fleet: Fleet) -> int:
    return fleet.replica.batch_size * spec.config.data.sequence_length


def _training_seconds(fleet: Fleet, steps: Array) -> Array:
    """Return the training seconds [S, G] of a round of that number of steps, [G]."""
    groups = fleet.groups
    return steps * (groups.micro_batches * (groups.forward + groups.backward) + groups.update)


def _replicas(spec: RunSpec, fleets: Sequence[Fleet], timed: _Timed, ideal: _Timed) -> list[ReplicaPrediction]:
    """Return the prediction of every replica that the topology names, in its order."""
    found: dict[str, ReplicaPrediction] = {}
    for index, fleet in enumerate(fleets):
        for column, replica in enumerate(fleet.replicas):
            own = slice(column, column + 1) if len(fleet.replicas) > 1 else slice(None)
            found[replica.name] = _replica(spec, fleet, replica, own, timed, ideal, index)
    return [found[replica.name] for replica in spec.config.replicas]


def _replica(
    spec: RunSpec, fleet: Fleet, replica: ReplicaSettings, own: slice, timed: _Timed, ideal: _Timed, index: int
) -> ReplicaPrediction:
    """Return the prediction of one replica: the mean of its own columns of the fleet."""
    steps, free_steps = timed.steps[index].counts[own], ideal.steps[index].counts[own]
    trained = _training_seconds(fleet, timed.steps[index].counts)[:, own]
    free_trained = _training_seconds(fleet, ideal.steps[index].counts)[:, own]
    inner, free = timed.inner_seconds[index][own], ideal.inner_seconds[index][own]
    return ReplicaPrediction(
        name=replica.name,
        count=len(inner),
        lost=len(inner) - int(fleet.stays[own].sum()),
        steps=float(steps.mean()),
        tokens=float(steps.mean()) * _tokens_per_step(spec, fleet),
        step_seconds=float(timed.step_seconds[index][own].mean()),
        inner_seconds=float(inner.mean()),
        training=float(inner.mean()) / timed.round_seconds,
        bubble=float((1 - free_trained.mean(axis=0) / free).mean()),
        exposed_communication=float((1 - free / inner * (steps / free_steps)).mean()),
        sent_bytes=float(fleet.up.n_bytes.sum()),
        received_bytes=float(fleet.down.n_bytes.sum()),
        stages=[
            StagePrediction(
                member=member,
                utilization=float(trained[stage].mean()) / timed.round_seconds,
                memory_bytes=fleet.memory[stage].held(fleet.memory[stage].computing_place),
                memory_capacity_bytes=fleet.memory_capacity[stage],
                sent_seconds=float(fleet.up.alone[stage, own].mean()),
                received_seconds=float(fleet.down.alone[stage, own].mean()),
                sent_bytes=float(fleet.up.n_bytes[stage]),
                received_bytes=float(fleet.down.n_bytes[stage]),
            )
            for stage, member in enumerate(replica.members)
        ],
        links=list(_links(fleet, replica, own, float(steps.mean()), timed.round_seconds)),
    )


def _links(
    fleet: Fleet, replica: ReplicaSettings, own: slice, steps: float, round_seconds: float
) -> Iterator[LinkPrediction]:
    """Yield the links between neighbouring stages, in a round of `steps` steps, then those to the exchange."""
    groups, size = fleet.groups, fleet.message_bytes
    messages = steps * groups.micro_batches
    for hop in range(groups.stages - 1):
        evaluation = fleet.evaluation_batches * float(fleet.evaluation_hops.seconds[hop, own].mean())
        yield LinkPrediction(
            name=stage_link_name(replica.name, hop),
            forward_bytes=messages * size["activation"] + fleet.evaluation_batches * size["evaluation"],
            backward_bytes=messages * size["gradient"],
            forward_busy=(messages * float(groups.activations.seconds[hop, own].mean()) + evaluation) / round_seconds,
            backward_busy=messages * float(groups.gradients.seconds[hop, own].mean()) / round_seconds,
        )
    for stage, member in enumerate(replica.members):
        yield LinkPrediction(
            name=exchange_link_name(member),
            forward_bytes=float(fleet.up.n_bytes[stage]),
            backward_bytes=float(fleet.down.n_bytes[stage]),
            forward_busy=float(fleet.up.alone[stage, own].mean()) / round_seconds,
            backward_busy=float(fleet.down.alone[stage, own].mean()) / round_seconds,
        )


def _lines(spec: RunSpec, replicas: Sequence[ReplicaPrediction], round_seconds: float) -> Iterator[LinePrediction]:
    """Yield what all links of each line carry together."""
    every = {name: dict.fromkeys(WAYS, 0.0) for name in spec.lines}
    for replica in replicas:
        for link in replica.links:
            ways: dict[Direction, float] = {"forward": link.forward_bytes, "backward": link.backward_bytes}
            for direction, n_bytes in ways.items():
                for way, line in zip(WAYS, spec.links[link.name].lines(direction), strict=True):
                    if line is not None:
                        every[line.name][way] += n_bytes * (replica.count if EXCHANGE in line.members else 1)
    for line in spec.lines.values():
        carried = every[line.name]
        busy = {
            way: 0.0 if (rate := line.bandwidth(way)) is None else 8 * carried[way] / rate / round_seconds
            for way in WAYS
        }
        yield LinePrediction(
            line.name, line.kind, line.members, carried["up"], carried["down"], busy["up"], busy["down"]
        )
