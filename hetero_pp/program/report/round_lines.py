"""Lines about a run's start, its rounds, and what it waits for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from hetero_pp.config.topology import DatacenterReplica
from hetero_pp.core.units import format_bytes, format_count, format_number, format_seconds, format_share
from hetero_pp.messages.messages_pb2 import CONTRIBUTING, FINISHING, JOINING, STORING, Waiting
from hetero_pp.model.inner import REMEDIES
from hetero_pp.program.report.state import Divergence, RunState
from hetero_pp.program.report.tables import format_loss
from hetero_pp.rpc.exchange_service import FIRST_TOLD
from hetero_pp.run.hardware import hardware_of
from hetero_pp.simulator.costs import step_flops
from replica_groups.exchange.stall_detector import listed, whom

STALL_SECONDS = 60.0
"""Seconds without an inner step after which a member that trains, and sends heartbeats, is shown as stalled."""


def start_line(state: RunState) -> str:
    """Return a line on the run that is about to start."""
    spec = state.spec
    replicas = format_count(sum(not replica.optional for replica in spec.config.replicas), "replica")
    members = format_count(len(spec.needed), "member")
    rounds = format_count(state.rounds_planned, "outer round")
    return f"{spec.config.name}: {replicas}, {members}, {rounds} of {spec.config.inner.length}"


def joined_line(state: RunState, since: float | None = None) -> str:
    """Return how many members have joined, and which have not; with `since`, how long it took for all to join."""
    members = list(state.spec.needed)
    missing = [member for member in members if member not in state.joined]
    noun = "member" if len(members) == len(state.spec.members) else "required member"
    count = f"{format_count(len(members), noun)} {'has' if len(members) == 1 else 'have'} joined"
    if not missing:
        after = ""
        if since is not None and state.joined_at is not None:
            after = f", {format_seconds(max(0.0, state.joined_at - since))} after the start"
        return f"{'all ' if len(members) > 1 else ''}{count}{after}"
    return f"{len(members) - len(missing)} of {count}, missing: {listed([_with_nodes(state, one) for one in missing])}"


def _with_nodes(state: RunState, member: str) -> str:
    """Return a member's name, with a note if it joins only once all of its nodes have met."""
    replica = state.spec.members[member].replica
    if isinstance(replica, DatacenterReplica) and replica.nodes > 1:
        return f"{member} (joins when its {replica.nodes} nodes have met)"
    return member


def waiting_line(state: RunState, now: float | None = None, sees_all: bool = True) -> str:
    """Return what the exchange waits for, and since when there was no progress.

    `now`: seconds since the epoch, by default when the exchange reported it. `sees_all`: whether `state` is given the
    reports of all members, so that it knows how many inner steps the slowest replica has done.
    """
    assert state.waiting is not None and state.waiting_told is not None
    now = state.waiting_told if now is None else max(now, state.waiting_told)
    seconds = round(state.waiting.seconds + now - state.waiting_told)
    if state.waiting.awaited == CONTRIBUTING:
        return _contributing(state, state.waiting, now, seconds, sees_all)
    if state.waiting.awaited == STORING:
        return f"{whom(state.waiting)}; retrying for {format_seconds(max(1, seconds))} so far"
    what = joined_line(state) if state.waiting.awaited == JOINING else whom(state.waiting)
    missing = state.waiting.missing
    heard = [one for one in missing if one.HasField("silent_seconds") and one.silent_seconds < FIRST_TOLD]
    if state.waiting.awaited == FINISHING and len(heard) == len(missing):  # they apply and evaluate the last round
        return f"{what}; for {format_seconds(seconds)} so far"
    return f"{what}; no progress for {format_seconds(seconds)}"


def _contributing(state: RunState, waiting: Waiting, now: float, seconds: float, sees_all: bool) -> str:
    """Return the line for a round that waits for contributions.

    It is of the form `round 1: training (2 of 50 inner steps; waiting for 5 of 5 contributions)`. It names the late
    members, and the `seconds` for which the round has stalled. A long step is no stall: while a member computes, the
    line names it instead, and both are left out of the first minute of training.
    """
    missing = [one.member for one in waiting.missing]
    total = len({*state.contributing_members(waiting.round), *missing})
    names = f" from {listed(missing)}" if len(missing) < total else ""
    waits = f"waiting for {len(missing)} of {format_count(total, 'contribution')}{names}"
    silent = [
        f"{one.member} for {format_seconds(round(one.silent_seconds))}" if one.silent_seconds else one.member
        for one in waiting.missing
        if not one.HasField("silent_seconds") or one.silent_seconds >= FIRST_TOLD
    ]
    heard = f"; no heartbeat from {listed(silent)}" if silent else ""
    computing = [one.member for one in waiting.missing if one.computes and one.silent_seconds < FIRST_TOLD]
    stalled = f"; no progress for {format_seconds(seconds)}"
    if computing:
        stalled = f"; computing for {format_seconds(seconds)}: {listed(computing)}"
    if not sees_all or waiting.round != state.rounds + 1:
        return f"round {waiting.round}: {waits}{heard}{stalled}"
    done, planned = state.progress_of_open_round(now)
    is_training = done < planned
    if is_training and not silent and seconds < STALL_SECONDS:
        stalled = ""
    what = "training" if is_training else "trained"
    unit = "s" if state.inner_steps is None else "inner steps"
    steps = f"{format_amount(done)} of {format_amount(planned)} {unit}"
    return f"round {waiting.round}: {what} ({steps}; {waits}){heard}{stalled}"


def format_amount(value: float) -> str:
    """Format inner steps, or seconds of a round."""
    return format_number(round(value, 1), 6)


def earlier_line(state: RunState) -> str:
    """Return a line on earlier rounds: `rounds 1 to 12 were closed earlier; last validation loss 4.3100`."""
    last = state.closed_earlier
    rounds = "round 1 was" if last == 1 else f"rounds 1 to {last} were"
    losses = (state.mean_validation_loss(round_) for round_ in range(last, -1, -1))
    loss = next((loss for loss in losses if loss is not None), None)
    return f"{rounds} closed earlier" + ("" if loss is None else f"; last validation loss {format_loss(loss)}")


def round_line(state: RunState, round_: int) -> str:
    """Return the line of a closed round: losses, seconds, excluded replicas, and missing losses with reasons."""
    replicas = state.of_round(round_)
    losses = ", ".join(f"{name} {format_loss(replica.round_loss(round_))}" for name, replica in replicas.items())
    uncounted = state.membership_state.not_counted(round_)
    unevaluated = {name: why for name, why in state.missing_losses(round_).items() if name not in uncounted}
    without = {"excluded": uncounted, "not evaluated": unevaluated}
    what = f"validation loss {_validation(state, round_)}, training loss {losses}"
    if state.spec.config.rehearsal is not None:
        what = "rehearsed"
    seconds, counted = state.round_seconds(round_), state.membership_state.rounds[round_]
    included = [replica for replica in state.spec.replicas_ever if replica.name in counted.counted]
    members = [member for replica in included for member in replica.members]
    speed = speeds(state, round_, members, counted.tokens, seconds)
    told = ", ".join([what, format_seconds(seconds), *speed])
    return f"round {round_}/{state.rounds_planned}: {told}" + "".join(
        f"; {what}: {_reasons(why)}" for what, why in without.items() if why
    )


def speeds(state: RunState, round_: int, members: Sequence[str], tokens: int, seconds: float) -> Iterator[str]:
    """Yield what some members reached in a round: tokens per second, and on accelerators MFU and memory.

    The MFU is over the whole round, exchange and evaluation included, and only of devices whose peak is known.
    """
    if state.spec.config.rehearsal is not None or not tokens or seconds <= 0:
        return
    yield f"{tokens / seconds:,.0f} tokens/s"
    done = peak = 0.0
    for name in members:
        member, hardware = state.spec.members[name], hardware_of(state.devices.get(name, ""))
        known = state.replicas.get(member.replica.name)  # reports on an optional replica may have been missed
        steps = (known and known.steps(round_)) or state.inner_steps or 0
        if hardware is not None and steps:
            done += steps * step_flops(state.spec, member)
            peak += hardware.flops * (member.replica.world if isinstance(member.replica, DatacenterReplica) else 1)
    if peak:
        yield f"MFU {format_share(done / seconds / peak)}"
    if used := max((state.device_bytes.get(name, 0) for name in members), default=0):
        yield f"{format_bytes(used)} of GPU memory"


def divergence_line(found: Sequence[Divergence]) -> str:
    """Return a line on replicas that have diverged, with the settings that help."""
    losses = listed([f"{one.replica} {format_loss(one.loss)} in round {one.round}" for one in found])
    untrained = format_loss(max(one.untrained_loss for one in found))
    return f"Training diverged: loss of the untrained model {untrained}, of {losses}; {REMEDIES}"


def _validation(state: RunState, round_: int) -> str:
    """Format the mean validation loss; if some replicas could not report theirs, the losses of the others by name."""
    mean = state.mean_validation_loss(round_)
    if mean is not None or not (state.membership_state.not_counted(round_) or state.missing_losses(round_)):
        return format_loss(mean)
    told = {name: replica.validation_loss.get(round_) for name, replica in state.of_round(round_).items()}
    return ", ".join(f"{name} {format_loss(loss)}" for name, loss in told.items())


def _reasons(why: Mapping[str, str]) -> str:
    """Join replicas and reasons: `home (home.1 was killed by SIGKILL), dc was late`."""
    return ", ".join(_reason(replica, cause) for replica, cause in why.items())


def _reason(replica: str, cause: str) -> str:
    return cause if cause.startswith(f"{replica} ") else f"{replica} ({cause.removeprefix(f'{replica}: ')})"
