"""Simulate some rounds of a topology, and derive times, utilization, bytes and memory.

A round is what `launch` runs: the inner loop of every replica, contributions to the exchange, contributions of others,
and an evaluation. If a round lasts a given time, the inner loop has the steps that fit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from statistics import fmean
from typing import Any

from hetero_pp.config.alike import alike, label_of
from hetero_pp.config.lines import EXCHANGE, WAYS, Direction, exchange_link_name, stage_link_name
from hetero_pp.config.run_config import RunConfig
from hetero_pp.config.spec import RunSpec
from hetero_pp.config.topology import ReplicaSettings
from hetero_pp.core.errors import ConfigError, dotted
from hetero_pp.core.units import ROUND_TIMES, format_count, format_duration, format_percent, parse_any
from hetero_pp.simulator.exchange_load import ExchangeLoad, exchange_load
from hetero_pp.simulator.rounds import Fleet, TimedPeriod, Watch, fleets_of, time_period
from hetero_pp.simulator.traffic import BoundaryCrossing


@dataclass(frozen=True)
class StagePrediction:
    """Prediction for one member of a replica, or the mean if its name stands for many replicas."""

    member: str
    utilization: float  # share of a round that it trains: forward, backward, optimizer
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
    members: Sequence[str]  # if a name stands for many replicas, each of them has such a line
    up_bytes: float
    down_bytes: float
    up_busy: float
    down_busy: float


@dataclass(frozen=True)
class ReplicaPrediction:
    """Prediction for a replica, or the mean of the many that its name stands for."""

    name: str
    count: int
    lost: int  # number of these replicas that a member left during the round, so that their contribution is missing
    steps: float  # inner steps of a round
    tokens: float  # tokens that one replica trains on in a round
    step_seconds: float
    inner_seconds: float
    training: float  # share of a round that is its inner loop
    bubble: float  # share of the inner loop that stages would be idle even with links that cost nothing
    exposed_communication: float  # share of the inner loop that links add to that
    sent_bytes: float  # bytes of all members of one replica, in an outer round
    received_bytes: float
    stages: list[StagePrediction]
    links: list[LinkPrediction]


@dataclass(frozen=True)
class FragmentPrediction:
    """Prediction for the rounds of one fragment."""

    round_seconds: float
    outer_seconds: float
    sent_bytes: float  # bytes of one replica (the largest) in such an outer round
    received_bytes: float


@dataclass(frozen=True)
class PublishedComparison:
    """Published number and its prediction, in base units."""

    what: str
    where: str
    bound: str
    published: float
    predicted: float

    @property
    def ratio(self) -> float:
        """Predicted over published."""
        return self.predicted / self.published

    @property
    def holds(self) -> bool | None:
        """Whether the prediction keeps a published bound; None if the paper gives the number itself."""
        if self.bound == "equal":
            return None
        return self.predicted >= self.published if self.bound == "at least" else self.predicted <= self.published

    def as_json(self) -> dict[str, Any]:
        """Return both numbers with their ratio and whether the bound holds."""
        return asdict(self) | {"ratio": self.ratio, "holds": self.holds}


@dataclass(frozen=True)
class Prediction:
    """Prediction for a topology."""

    step_seconds: float  # seconds of the slowest replica
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
    rounds: float  # rounds to reach `tokens`
    days: float
    accelerator_hours: float
    sent_bytes: float  # bytes of one replica (the mean over all) in all outer rounds: the communication volume
    received_bytes: float
    members: int
    replicas: list[ReplicaPrediction]
    exchange: ExchangeLoad
    fragments: Sequence[FragmentPrediction]
    """One for each fragment. Times and bytes of a round are elsewhere means over the rounds of all fragments."""
    lines: Sequence[LinePrediction] = ()
    published: Sequence[PublishedComparison] = ()  # published numbers beside the predicted ones

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


def predict(spec: RunSpec, watch: Watch | None = None, *, stage_links: bool = True) -> Prediction:
    """Predict the times, bytes and memory of a run's topology.

    `watch` maps the label of a replica to the callback that receives the spans of its members and links. Without
    `stage_links` messages between stages cost nothing, and only the exchange takes time.

    Raises ConfigError for unknown hardware, for members whose part does not fit their memory, and for published numbers
    of unpredicted quantities.
    """
    simulate = spec.config.simulate
    period = [list(fleets_of(spec, number)) for number in range(1, spec.fragments.count + 1)]
    if not stage_links:
        period = [[replace(one, group=one.group.without_communication()) for one in fleets] for fleets in period]
    timed, ideal = time_period(spec, period, True, watch), time_period(spec, period, False)
    if spec.config.outer.overlap:  # a round lasts at least as long as each line needs for all of its bytes
        unlimited = (_lines(spec, _replicas(spec, fleets, timed, ideal), 1.0) for fleets in period)
        full = ([max(line.up_busy, line.down_busy) for line in lines] for lines in unlimited)
        longest = [max([own, *needed]) for own, needed in zip(timed.by_fragment, full, strict=True)]
        timed = replace(timed, by_fragment=longest)
    fleets = [
        replace(same[0], up=_means(one.up for one in same), down=_means(one.down for one in same))
        for same in zip(*period, strict=True)
    ]
    replicas = _replicas(spec, fleets, timed, ideal)
    length, members, accelerators, trained = spec.config.data.sequence_length, 0, 0, 0.0
    tokens_per_round, included, free_included = 0.0, 0.0, 0.0
    for fleet, own, free in zip(fleets, timed.fleets, ideal.fleets, strict=True):
        tokens_per_step = fleet.replica.batch_size * length * fleet.count
        tokens_per_round += tokens_per_step * own.steps
        included += fleet.stays * tokens_per_step * own.steps
        free_included += fleet.stays * tokens_per_step * free.steps
        members += fleet.count * len(fleet.members)
        accelerators += fleet.count * sum(map(fleet.replica.devices_of, range(len(fleet.members))))
        trained += fleet.count * sum(_training_seconds(fleet, own.steps))
    total = simulate.tokens or spec.latest.outer.tokens or round(tokens_per_round * spec.latest.rounds)
    rate, rounds = included / timed.round_seconds, total / tokens_per_round
    count = sum(replica.count for replica in replicas)
    found = Prediction(
        step_seconds=max(one.step_seconds for one in timed.fleets),
        round_seconds=timed.round_seconds,
        outer_seconds=timed.outer_seconds,
        utilization={
            "absolute": trained / members / timed.round_seconds,
            "relative": ideal.round_seconds / timed.round_seconds * (included / free_included),
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
        fragments=[
            FragmentPrediction(
                round_seconds=seconds,
                outer_seconds=outer,
                sent_bytes=max(sum(one.n_bytes for one in fleet.up) for fleet in own),
                received_bytes=max(sum(one.n_bytes for one in fleet.down) for fleet in own),
            )
            for seconds, outer, own in zip(timed.by_fragment, timed.outer_by_fragment, period, strict=True)
        ],
        lines=list(_lines(spec, replicas, timed.round_seconds)),
    )
    if not simulate.published:
        return found
    return replace(found, published=list(compared(spec.config, found.as_json())))


def _means(rounds: Iterable[Sequence[BoundaryCrossing]]) -> list[BoundaryCrossing]:
    """Return the mean of what each member sends or receives in some rounds."""
    each = ([astuple(one) for one in same] for same in zip(*rounds, strict=True))
    return [BoundaryCrossing(*map(fmean, zip(*same, strict=True))) for same in each]


def _training_seconds(fleet: Fleet, steps: float) -> list[float]:
    """Return the seconds of a round of that number of steps that each member trains."""
    group = fleet.group
    each = zip(group.forward, group.backward, group.update, strict=True)
    return [steps * (group.micro_batches * (forward + backward) + update) for forward, backward, update in each]


def _replicas(
    spec: RunSpec, fleets: Sequence[Fleet], timed: TimedPeriod, ideal: TimedPeriod
) -> list[ReplicaPrediction]:
    """Return the prediction of every replica that the topology names, in its order."""
    found: dict[str, ReplicaPrediction] = {}
    for fleet, own, free in zip(fleets, timed.fleets, ideal.fleets, strict=True):
        trained, round_seconds = _training_seconds(fleet, own.steps), timed.round_seconds
        count = fleet.count // len(fleet.replicas)
        share = fmean(_training_seconds(fleet, free.steps)) / free.inner_seconds
        for replica in fleet.replicas:
            stages = [
                StagePrediction(
                    member=member,
                    utilization=trained[stage] / round_seconds,
                    memory_bytes=fleet.memory[stage].held(fleet.memory[stage].computing_place),
                    memory_capacity_bytes=fleet.memory_capacity[stage],
                    sent_seconds=fleet.up[stage].alone,
                    received_seconds=fleet.down[stage].alone,
                    sent_bytes=fleet.up[stage].n_bytes,
                    received_bytes=fleet.down[stage].n_bytes,
                )
                for stage, member in enumerate(replica.members)
            ]
            found[replica.name] = ReplicaPrediction(
                name=replica.name,
                count=count,
                lost=round(count * (1 - fleet.stays)),
                steps=float(own.steps),
                tokens=float(own.steps * replica.batch_size * spec.config.data.sequence_length),
                step_seconds=own.step_seconds,
                inner_seconds=own.inner_seconds,
                training=own.inner_seconds / round_seconds,
                bubble=1 - share,
                exposed_communication=1 - free.inner_seconds / own.inner_seconds * (own.steps / free.steps),
                sent_bytes=sum(one.sent_bytes for one in stages),
                received_bytes=sum(one.received_bytes for one in stages),
                stages=stages,
                links=list(_links(fleet, replica, own.steps, round_seconds)),
            )
    return [found[replica.name] for replica in spec.config.replicas]


def _links(fleet: Fleet, replica: ReplicaSettings, steps: float, round_seconds: float) -> Iterator[LinkPrediction]:
    """Yield the links between neighbouring stages, in a round of `steps` steps, then those to the exchange."""
    group, size = fleet.group, fleet.message_bytes
    messages, batches = steps * group.micro_batches, group.evaluation_batches
    for hop in range(group.stages - 1):
        forward = messages * group.activations[hop].seconds + batches * group.evaluations[hop].seconds
        yield LinkPrediction(
            name=stage_link_name(replica.name, hop),
            forward_bytes=messages * size["activation"] + batches * size["evaluation"],
            backward_bytes=messages * size["gradient"],
            forward_busy=forward / round_seconds,
            backward_busy=messages * group.gradients[hop].seconds / round_seconds,
        )
    for member, up, down in zip(replica.members, fleet.up, fleet.down, strict=True):
        busy = up.alone / round_seconds, down.alone / round_seconds
        yield LinkPrediction(exchange_link_name(member), up.n_bytes, down.n_bytes, *busy)


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
            way: 0.0 if (rate := line.bandwidth_of(way)) is None else 8 * carried[way] / rate / round_seconds
            for way in WAYS
        }
        yield LinePrediction(
            line.name, line.kind, line.members, carried["up"], carried["down"], busy["up"], busy["down"]
        )


# ---- published numbers, which the YAML lists by their names in the JSON ----

_NAMES = ("name", "member")  # keys whose value may stand for the index of a list entry


def compared(config: RunConfig, prediction: Mapping[str, Any]) -> Iterator[PublishedComparison]:
    """Yield the comparisons that apply to this configuration.

    Raises ConfigError for numbers that are not predicted.
    """
    tree = config.model_dump(mode="json")
    for index, number in enumerate(config.simulate.published):
        key = ("simulate", "published", index)

        def applies(name: str, wanted: Any, key: Sequence[str | int] = key) -> bool:
            there = _at(tree, name, (*key, "when", name), "a key of this file such as `links.home.bandwidth`")
            try:  # `1/8` equals 0.125, and `1 Gbit/s` equals 1000 Mbit/s
                return math.isclose(parse_any(there), parse_any(wanted), rel_tol=1e-6)
            except ValueError:
                return bool(there == wanted)

        if not all(applies(name, wanted) for name, wanted in number.when.items()):
            continue
        found = _at(prediction, number.what, (*key, "what"), "a number of `--json` such as `outer_seconds`")
        if isinstance(found, bool) or not isinstance(found, int | float):
            expected = "expected the path of a number in the output of `simulate --json`"
            raise ConfigError((*key, "what"), f"found `{number.what}`, {expected}")
        yield PublishedComparison(number.what, number.where, number.bound, number.value, float(found))


def _at(tree: Any, name: str, key: Sequence[str | int], expected: str) -> Any:
    """Return the value at a path such as `replicas.0.count`, or `replicas.home.count`."""
    node = tree
    for part in name.split("."):
        if isinstance(node, list):
            named = {str(place): one for place, one in enumerate(node)}
            named |= {one[by]: one for one in node if isinstance(one, dict) for by in _NAMES if by in one}
            node = named
        if not isinstance(node, dict) or part not in node:
            known = f" ({', '.join(node)})" if isinstance(node, dict) and len(node) < 20 else ""
            raise ConfigError(key, f"found `{dotted(name.split('.'))}`, expected {expected}{known}")
        node = node[part]
    return node


# ---- replicas that wait for a slower one: what each does alone, and rounds of a given time, in which none waits ----

WORTH_TELLING = 0.1
"""Smallest share of a round that a replica has to wait for another, and smallest gain of rounds of a given time."""

MOST_COMPARED = 3  # most classes of replicas that are predicted alone, beside the slowest: those that wait the longest

_GOOD_ENOUGH = 0.97  # share of the tokens per second with long rounds that shorter rounds of a given time have to reach
_LONGEST_ROUND = 86400.0
_MOST_STEPS = 2000  # most steps of a replica in a round of a given time: the largest H in DiLoCo's paper


@dataclass(frozen=True)
class TimedRounds:
    """Rounds of a given time in place of a number of steps."""

    seconds: float
    rounds: int | None  # rounds in which the run trains about as many tokens as before; None if tokens end the run
    warmup_rounds: float  # the same share of the run as before
    tokens_per_second: float
    steps: Mapping[str, float]  # steps of a round, by replica


@dataclass(frozen=True)
class ReplicaWaits:
    """Replicas that wait in each round."""

    slowest: str  # label of the replicas that the others wait for
    shares: Mapping[str, float]  # share of a round for which replicas wait, by their label; the longest first
    more: int  # number of other classes of replicas
    alone: Mapping[str, float]  # tokens per second of one replica without all others, by label
    together: float  # tokens per second of the run
    named: Sequence[str]  # the first replica of each label
    timed: TimedRounds | None
    """None if rounds of a given time gain little, or are too few, or if another setting needs a number of steps."""

    def told(self) -> Iterator[str]:
        """Yield a sentence on the replicas that wait, and one on rounds of a given time."""
        waits = [f"{label} ({format_percent(share)} of each round)" for label, share in self.shares.items()]
        waits += [format_count(self.more, "other class", "other classes")] if self.more else []
        verb = "waits" if len(waits) == 1 and " .. " not in waits[0] else "wait"
        each = " each" if any(" (" in label for label in self.alone) else ""
        alone = ", ".join(f"{label} {rate:,.0f}" for label, rate in self.alone.items())
        yield (
            f"{', '.join(waits)} {verb} for {self.slowest}: {self.together:,.0f} tokens per second. Alone, they would "
            f"train{each}: {alone}."
        )
        if self.timed is not None:
            steps = ", ".join(f"{name} {count:,.0f}" for name, count in self.timed.steps.items() if name in self.named)
            rounds = self.timed.rounds
            as_many = "" if rounds is None else f", and `outer.rounds: {rounds}` for as many tokens"
            yield (
                f"Rounds of {format_duration(self.timed.seconds)} would give {self.timed.tokens_per_second:,.0f} "
                f"tokens per second (steps a round: {steps}): write `inner: {{seconds: "
                f"{format_duration(self.timed.seconds)}, warmup_rounds: {self.timed.warmup_rounds:g}}}` in place of "
                f"`steps` and `warmup_steps`{as_many}."
            )


def waiting(spec: RunSpec, prediction: Prediction) -> ReplicaWaits | None:
    """Return which replicas wait for a slower one; None if none waits for WORTH_TELLING of a round.

    Raises ConfigError as `predict` does.
    """
    if spec.config.inner.steps is None:
        return None
    found = {replica.name: replica for replica in prediction.replicas}
    inner = [(max(found[one.name].inner_seconds for one in same), same) for same in alike(spec)]
    inner.sort(key=lambda one: one[0])
    (longest, slowest), others = inner[-1], inner[:-1]
    shares = {label_of(same): (longest - seconds) / prediction.round_seconds for seconds, same in others}
    if not shares or max(shares.values()) < WORTH_TELLING:
        return None
    compared = [same for _, same in others[:MOST_COMPARED]] + [slowest]
    apart = {label_of(same): predict(RunSpec(alone(spec.config, same[0]), spec.shape.vocabulary)) for same in compared}
    shortest = min(one.round_seconds for one in apart.values())
    longest = _MOST_STEPS * min(one.step_seconds for one in apart.values())
    return ReplicaWaits(
        slowest=label_of(slowest),
        shares=dict(list(shares.items())[:MOST_COMPARED]),
        more=len(others[MOST_COMPARED:]),
        alone={label: one.tokens_per_second / one.replicas[0].count for label, one in apart.items()},
        together=prediction.tokens_per_second,
        named=[same[0].name for same in compared],
        timed=_timed(spec, prediction, shortest, min(longest, _LONGEST_ROUND)),
    )


def alone(config: RunConfig, replica: ReplicaSettings) -> RunConfig:
    """Return the configuration with only this replica, for predictions: without all that names others."""
    here, simulate = {replica.name, *replica.members, EXCHANGE}, config.simulate
    sites = {
        name: site.model_copy(update={"members": members})
        for name, site in config.sites.items()
        if (members := [one for one in site.members if one in here])
    }
    own = {
        "fleets": {name: fleet for name, fleet in simulate.fleets.items() if name in here},
        "measured": {name: cost for name, cost in simulate.measured.items() if name in here},
        "published": [],
    }
    return config.model_copy(
        update={"replicas": [replica], "sites": sites, "simulate": simulate.model_copy(update=own)}
    )


def _timed(spec: RunSpec, prediction: Prediction, shortest: float, longest: float) -> TimedRounds | None:
    """Return the shortest rounds of a given time whose tokens per second are close to those of long ones.

    They last `shortest` to `longest` seconds, and at most about as long as a round of the run. Short ones are better,
    because replicas then take fewer steps between two exchanges.
    """
    upper = next((one for one in ROUND_TIMES if one >= prediction.round_seconds), longest)
    lengths = [one for one in ROUND_TIMES if shortest <= one <= min(upper, longest)]
    found: dict[float, Prediction] = {}

    def predicted(seconds: float) -> float:
        config = with_rounds_of(spec.config, seconds)
        config.check()
        found[seconds] = predict(RunSpec(config, spec.shape.vocabulary))
        return found[seconds].tokens_per_second

    try:
        best = predicted(lengths[-1]) if lengths else 0.0
        if best < (1 + WORTH_TELLING) * prediction.tokens_per_second:
            return None
        seconds = next(one for one in lengths if predicted(one) >= _GOOD_ENOUGH * best)
    except ConfigError:  # another setting needs a number of steps, or steps take no time
        return None
    then, before = found[seconds], spec.latest.rounds
    rounds = max(1, round(before * (prediction.tokens / prediction.rounds) / (then.tokens / then.rounds)))
    if rounds < spec.fragments.count:
        return None
    inner = spec.config.inner
    warmup = float(f"{(inner.warmup_steps or 0) / (inner.steps or 1) * rounds / before:.2g}")
    steps = {replica.name: replica.steps for replica in then.replicas}
    asked = None if spec.config.outer.tokens is not None else rounds
    return TimedRounds(seconds, asked, warmup, then.tokens_per_second, steps)


def with_rounds_of(config: RunConfig, seconds: float, rounds: int | None = None, warmup: float = 1.0) -> RunConfig:
    """Return the configuration with rounds of a given time."""
    inner = {"steps": None, "seconds": seconds, "warmup_steps": None, "warmup_rounds": warmup}
    outer = {} if rounds is None else {"rounds": rounds}
    return config.model_copy(
        update={"inner": config.inner.model_copy(update=inner), "outer": config.outer.model_copy(update=outer)}
    )
