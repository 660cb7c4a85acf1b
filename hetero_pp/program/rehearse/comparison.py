"""Compares what a rehearsal measured with what `simulate` predicts, and says where both part.

Both sides split a round into three parts. The inner loop is that of the slowest replica. The outer round lasts from the
end of that loop until the last member goes on. The rest is the evaluation, less what it shares with the next round.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from hetero_pp.config.links import DIRECTIONS
from hetero_pp.config.topology import ReplicaSettings
from hetero_pp.program.rehearse.timings import Timings
from hetero_pp.run.spec import RunSpec
from hetero_pp.simulator.prediction import Prediction, ReplicaPrediction

APART = 0.03
"""Relative difference beyond which a measurement and its prediction part."""

_ROUND = "round_seconds"
_OF_A_ROUND = (_ROUND, "inner_seconds", "outer_seconds", "rest_seconds")

Quantities = Mapping[str, float]
"""Quantity, such as `round_seconds` or `replicas.home.step_seconds` -> value."""


@dataclass(frozen=True)
class Parting:
    """A quantity that was measured differently from its prediction."""

    what: str
    measured: float
    predicted: float
    component: str
    """The part of it that differs most, in words."""


@dataclass(frozen=True)
class WholeRun:
    """Conclusions for the run that was rehearsed: its rounds have more inner steps than those of the rehearsal."""

    rounds: int
    steps: int | None
    round_seconds: float
    utilization: Mapping[str, float]
    """As of a prediction."""
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
    timed: int
    """Number of rounds that are measured."""
    measured: Quantities
    predicted: Quantities
    parts: list[Parting]
    whole_run: WholeRun
    members: Mapping[str, Mapping[str, float]]
    """Seconds of each member in a round: compute, waits for both neighbours, the outer round, the evaluation."""
    lines: Mapping[str, Mapping[str, float]]
    """Line of each host that joined, in bits per second `up` and `down`, as the host measured it."""
    costs: Mapping[str, Any]
    """Costs and hardware of the section `simulate` from which compute was emulated."""

    busy: float = 0.0
    """Share of the time of this machine's processors that was in use, by whatever process."""

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
    measured, predicted = dict(_measured(spec, timings, prediction)), dict(_predicted(prediction))
    members = {name: _seconds_of(timings, name) for name in spec.needed}
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
        members=members,
        lines={member: {"up": one.up, "down": one.down} for member, one in sorted(timings.lines.items())},
        costs={key: simulate[key] for key in ("hardware", "measured")},
    )


def _seconds_of(timings: Timings, member: str) -> dict[str, float]:
    """Return the seconds of a member in a round, by part. `blocked`, waiting for the exchange, is a part of `outer`."""
    parts = ("compute", "wait_previous", "wait_next", "outer", "blocked", "evaluation")
    return {part: timings.of_member(member, f"{part}_seconds") for part in parts}


# ---- both sides as quantities with the same names ----


def _predicted(found: Prediction) -> Iterator[tuple[str, float]]:
    inner = max(replica.inner_seconds for replica in found.replicas)
    yield "round_seconds", found.round_seconds
    yield "inner_seconds", inner
    yield "outer_seconds", found.outer_seconds
    yield "rest_seconds", max(found.round_seconds - inner - found.outer_seconds, 0.0)
    yield "step_seconds", found.step_seconds
    yield "tokens_per_second", found.tokens_per_second
    for kind, share in found.utilization.items():
        yield f"utilization.{kind}", share
    for replica in found.replicas:
        for name in ("step_seconds", "inner_seconds", "bubble", "exposed_communication"):
            yield f"replicas.{replica.name}.{name}", getattr(replica, name)
        for link in replica.links:
            yield f"links.{link.name}.forward_bytes", link.forward_bytes
            yield f"links.{link.name}.backward_bytes", link.backward_bytes


def _measured(spec: RunSpec, timings: Timings, prediction: Prediction) -> Iterator[tuple[str, float]]:
    replicas = list(zip(spec.config.replicas, prediction.replicas, strict=True))
    own = {one.name: _of_replica(timings, replica, one) for replica, one in replicas}
    inner, round_seconds = max(one["inner_seconds"] for one in own.values()), timings.round_seconds
    outer = min(max(timings.of_member(name, "outer_seconds") for name in replica.members) for replica, _ in replicas)
    compute = [timings.of_member(name, "compute_seconds") for name in spec.needed]
    tokens = sum(
        timings.steps(replica.members[0]) * replica.batch_size * spec.config.data.sequence_length
        for replica, _ in replicas
    )
    rate = share(tokens, round_seconds)
    yield "round_seconds", round_seconds
    yield "inner_seconds", inner
    yield "outer_seconds", outer
    yield "rest_seconds", max(round_seconds - inner - outer, 0.0)
    yield "step_seconds", max(one["step_seconds"] for one in own.values())
    yield "tokens_per_second", rate
    yield "utilization.absolute", share(fmean(compute), round_seconds)
    yield "utilization.relative", rate / (prediction.tokens_per_second / prediction.utilization["relative"])
    for _, one in replicas:
        for name, value in own[one.name].items():
            yield f"replicas.{one.name}.{name}", value
        for link in one.links:
            for way in DIRECTIONS:
                yield f"links.{link.name}.{way}_bytes", timings.wire_bytes(link.name, way)


def _of_replica(timings: Timings, replica: ReplicaSettings, found: ReplicaPrediction) -> dict[str, float]:
    """Return what was measured of a replica.

    The inner loop with free links is the predicted one for the same number of steps, because no link affects it.
    """
    inner = max(
        timings.of_member(one, "compute_seconds") + timings.of_member(one, "wait_seconds") for one in replica.members
    )
    steps = timings.steps(replica.members[0])
    free = found.inner_seconds * (1 - found.exposed_communication) * steps / found.steps
    trained = fmean(timings.of_member(member, "compute_seconds") for member in replica.members)
    return {
        "step_seconds": timings.step_seconds(replica.members[0]) or inner / max(steps, 1.0),
        "inner_seconds": inner,
        "bubble": 1 - share(trained, free),
        "exposed_communication": 1 - share(free, inner),
    }


# ---- where they part, and what follows ----


def _parts(timings: Timings, prediction: Prediction, measured: Quantities, predicted: Quantities) -> Iterator[Parting]:
    """Yield the times and bytes that part. Other quantities follow from these.

    The parts of a round part if they differ by a share of the whole round.
    """
    for name, value in measured.items():
        wanted, difference = predicted[name], abs(value - predicted[name])
        if name in _OF_A_ROUND and difference > APART * predicted[_ROUND]:
            yield Parting(name, value, wanted, _component_of_round(measured, predicted) if name == _ROUND else "")
        elif name.endswith(".step_seconds") and difference > APART * wanted:
            yield Parting(name, value, wanted, _component_of_step(timings, prediction, name.split(".")[1]))
        elif name.endswith("_bytes") and difference > APART * wanted:
            yield Parting(name, value, wanted, "")


def _component_of_round(measured: Quantities, predicted: Quantities) -> str:
    words = {"inner_seconds": "the inner loop", "outer_seconds": "the outer round", "rest_seconds": "the rest"}
    return words[max(words, key=lambda name: abs(measured[name] - predicted[name]))]


def _component_of_step(timings: Timings, prediction: Prediction, replica: str) -> str:
    """Return what differs most in a replica's inner loop: the compute of a member, or its waits for messages."""
    own, apart = next(one for one in prediction.replicas if one.name == replica), dict[str, float]()
    for stage in own.stages:
        compute = timings.of_member(stage.member, "compute_seconds")
        trained = stage.utilization * prediction.round_seconds
        waits = timings.of_member(stage.member, "wait_seconds")
        apart[f"compute of {stage.member}"] = abs(compute - trained)
        apart[f"waits of {stage.member} for messages"] = abs(waits - (own.inner_seconds - trained))
    return max(apart, key=lambda one: apart[one])


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
