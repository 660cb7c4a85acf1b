"""Lines about a run: its start, its rounds, what it waits for, and those of a host with some of its members."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

from hetero_pp.config.lines import DIRECTIONS, LinkSpec
from hetero_pp.config.predictions import hardware_of
from hetero_pp.config.spec import RunSpec
from hetero_pp.config.topology import DatacenterReplica
from hetero_pp.core.errors import RunOver
from hetero_pp.core.units import (
    format_bytes,
    format_count,
    format_names,
    format_number,
    format_seconds,
    format_share,
)
from hetero_pp.messages.messages_pb2 import CONTRIBUTING, FINISHING, JOINING, STORING, MemberRound, Report, Waiting
from hetero_pp.model.inner import REMEDIES
from hetero_pp.program.report.membership_event_lines import words_of
from hetero_pp.program.report.output import now_and_then, reading_line
from hetero_pp.program.report.state import Divergence, MemberPresence, RunState
from hetero_pp.program.report.tables import format_loss
from hetero_pp.rpc.exchange_service import FIRST_TOLD
from hetero_pp.simulator.costs import step_flops
from replica_groups.exchange.stall_detector import listed, whom

ROWS_OF_TROUBLE = 3  # most lines of vacant slots, and of excluded replicas
_SHOWN = 4  # largest number of replicas that a line names
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
    names = []
    for member in missing:
        replica = state.spec.members[member].replica
        nodes = replica.nodes if isinstance(replica, DatacenterReplica) else 1
        names.append(member if nodes == 1 else f"{member} (joins when its {nodes} nodes have met)")
    return f"{len(members) - len(missing)} of {count}, missing: {listed(names)}"


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
    uncounted = {name: (why.slot, why.cause) for name, why in state.not_counted(round_).items()}
    unevaluated = {name: why for name, why in state.missing_losses(round_).items() if name not in uncounted}
    without = {"excluded": uncounted, "not evaluated": unevaluated}
    mean = state.mean_validation_loss(round_)
    validation = format_loss(mean)
    if mean is None and (uncounted or state.missing_losses(round_)):  # some could not report theirs
        told_losses = {name: replica.validation_loss.get(round_) for name, replica in replicas.items()}
        validation = ", ".join(f"{name} {format_loss(loss)}" for name, loss in told_losses.items())
    what = f"validation loss {validation}, training loss {losses}"
    if state.spec.config.rehearsal is not None:
        what = "rehearsed"
    seconds, counted = state.round_seconds(round_), state.closed[round_]
    included = [replica for replica in state.spec.replicas_ever if replica.name in counted.sizes]
    members = [member for replica in included for member in replica.members]
    speed = speeds(state, round_, members, counted.tokens, seconds)
    told = ", ".join([what, format_seconds(seconds), *speed])
    line = f"round {round_}/{state.rounds_planned}: {told}"
    for what, reasons in without.items():
        # Of the form `home (home.1 was killed by SIGKILL), dc was late`.
        words = [cause if slot == name else f"{name} ({cause})" for name, (slot, cause) in reasons.items()]
        line += f"; {what}: {', '.join(words)}" if words else ""
    return line


def speeds(state: RunState, round_: int, members: Sequence[str], tokens: int, seconds: float) -> Iterator[str]:
    """Yield what some members reached in a round: tokens per second, and on accelerators MFU and memory.

    The MFU is over the whole round, exchange and evaluation included, and only of devices whose peak is known.
    """
    if state.spec.config.rehearsal is not None or not tokens or seconds <= 0:
        return
    yield f"{tokens / seconds:,.0f} tokens/s"
    done = peak = 0.0
    for name in members:
        member, hardware = state.spec.members[name], hardware_of(state.members[name].device)
        known = state.replicas.get(member.replica.name)  # reports on an optional replica may have been missed
        steps = (known and known.steps(round_)) or state.inner_steps or 0
        if hardware is not None and steps:
            done += steps * step_flops(state.spec, member)
            peak += hardware.flops * (member.replica.world if isinstance(member.replica, DatacenterReplica) else 1)
    if peak:
        yield f"MFU {format_share(done / seconds / peak)}"
    if used := max((state.members[name].device_bytes for name in members), default=0):
        yield f"{format_bytes(used)} of GPU memory"


def divergence_line(found: Sequence[Divergence]) -> str:
    """Return a line on replicas that have diverged, with the settings that help."""
    losses = listed([f"{one.replica} {format_loss(one.loss)} in round {one.round}" for one in found])
    untrained = format_loss(max(one.untrained_loss for one in found))
    return f"Training diverged: loss of the untrained model {untrained}, of {losses}; {REMEDIES}"


# ---- trouble ----


def status_lines(state: RunState, now: float) -> Iterator[tuple[str, bool]]:
    """Yield lines on members that are gone, and on what the run waits for; each with whether it is trouble."""
    yield from ((line, True) for line in trouble_lines(state, now))
    if state.waiting is not None and state.waiting_told is not None:
        yield waiting_line(state, now), True
    elif state.reading is not None:
        yield reading_line(state.reading.what, state.reading.share), False
    elif not state.has_all_needed:
        yield joined_line(state), False


def trouble_lines(state: RunState, now: float) -> Iterator[str]:
    """Yield lines about a pause, vacant slots, excluded replicas and the end of audits; none if there is no trouble.

    An optional replica in which nobody is any more is no trouble.
    """
    pause = state.pause
    if pause is not None:
        seconds = format_seconds(round(max(0.0, now - pause.start)))
        yield f"round {pause.round} pauses for {seconds}: {pause.cause}"
    nobody = (MemberPresence.VACANT, MemberPresence.MISSING)
    optional = [replica for replica in state.spec.replicas_ever if replica.optional]
    left = [one for one in optional if all(state.presence(name) in nobody for name in one.members)]
    empty = {slot for replica in left for slot in replica.members}
    away = {slot: cause for slot, cause in state.vacant.items() if slot not in empty}
    vacant = {slot: f"{cause}; its slot is vacant" for slot, cause in away.items()}
    causes = list((vacant | state.given_up).values())
    yield from causes[:ROWS_OF_TROUBLE]
    if len(causes) > ROWS_OF_TROUBLE:
        yield f"and {format_count(len(causes) - ROWS_OF_TROUBLE, 'more slot')} without a member"
    if state.unaudited is not None:
        yield f"unaudited: {state.unaudited}"
    excluded = [f"{one.replica} is excluded: {one.excluded}" for one in state.scores.values() if one.excluded]
    yield from excluded[:ROWS_OF_TROUBLE]
    if len(excluded) > ROWS_OF_TROUBLE:
        yield f"and {format_count(len(excluded) - ROWS_OF_TROUBLE, 'more replica')} excluded"


# ---- a host with some members ----


class OwnRoundLines:
    """Turns reports of this host's members, and reports about the whole run, into lines.

    Needs no reports of other members.
    """

    def __init__(self, spec: RunSpec, members: Sequence[str], say: Callable[[str], None]) -> None:
        self.state = RunState(spec)  # state of the run, as far as this host gets reports
        self._members = members
        self.say = say
        self._is_told = self._has_begun = self._is_over = False
        self._diverged_told: set[str] = set()
        self._reading = now_and_then(say, time.monotonic)

    def on_report(self, report: Report) -> None:
        """Take in one report, and print what is new. Reports before the first state of the run are not new."""
        had_joined = self.state.joined_at is not None
        is_possible, lines = self.state.apply(report), list[str]()
        if is_possible and self.state.news is not None and self.state.news.is_line:
            lines.append(words_of(self.state.news, self.state.spec))
        if not had_joined and self.state.joined_at is not None:
            lines.append(joined_line(self.state))
        if report.HasField("waiting") and self.state.waiting is not None:
            lines.append(waiting_line(self.state, sees_all=False))
        if report.HasField("begun"):
            if report.begun.last_round and not self._has_begun:
                lines.append(f"resuming after round {report.begun.last_round}")
            self._has_begun = True
        if report.HasField("member_round") and report.member in self._members:
            lines.append(self._line(report.member, report.member_round))
        if report.HasField("so_far") and not self._is_told:
            self._is_told, lines = True, [*self._present(report.time)]
        self._is_over |= report.HasField("over")
        own = {self.state.spec.members[member].replica.name for member in self._members}
        if report.HasField("over") and own.isdisjoint(
            report.over.finishing
        ):  # none of them took part in the last round
            self.say(f"{self.state.spec.config.name}: {RunOver.after(report.over.round, report.over.rounds)}")
        if self._is_told and report.HasField("reading"):
            self._reading(report.reading.what, report.reading.share)
        if self._is_told and (due := [one for name, one in self.state.diverged.items() if name in own]):
            due = [one for one in due if one.replica not in self._diverged_told]
            self._diverged_told |= {one.replica for one in due}
            lines += [divergence_line(due)] if due else []
        for line in lines if self._is_told else ():
            self.say(line)

    def _present(self, now: float) -> Iterator[str]:
        """Yield lines on the state of the run as this host comes."""
        state = self.state
        if not (self._has_begun or state.rounds):
            yield joined_line(state) if state.waiting is None else waiting_line(state, now, sees_all=False)
            return
        if state.has_closed_all_rounds:
            return
        members = state.spec.needed.keys() | state.joined
        there = sum(state.presence(one) in (MemberPresence.PRESENT, MemberPresence.FINISHED) for one in members)
        here = f"{there} of {format_count(len(members), 'member')} {'is' if there == 1 else 'are'} present"
        yield f"round {state.rounds + 1} of {state.rounds_planned} is open; {here}"
        yield from trouble_lines(state, now)
        if state.waiting is not None:
            yield waiting_line(state, now, sees_all=False)

    def farewell(self) -> str:
        """Return what this host's replicas added to a run that is over, and where its model is; empty otherwise."""
        spec, credits = self.state.spec, self.state.tally.credits
        if not self._is_over or spec.config.rehearsal is not None:
            return ""
        own = dict.fromkeys(spec.members[one].replica.name for one in self._members)
        whole = sum(one.tokens for one in credits.values())
        added = [
            f"{name} added {one.tokens:,} tokens in {one.included:,} rounds, {format_share(one.tokens / whole)} of all"
            for name in own
            if (one := credits.get(name)) is not None and one.tokens
        ] or [f"no round includes {format_names(list(own), _SHOWN)}"]
        model = (
            f"the exchange's host has the model, and writes it with: hetero-pp export {spec.config.name} --to FOLDER"
        )
        return f"{'; '.join(added)}; {model}"

    def _line(self, member: str, told: MemberRound) -> str:
        """Return the line of a member's round.

        It is of the form `round 3/16: home.1: training loss 4.2, 12 s (waiting for neighbours 3 s, exchange with other
        replicas 2 s), 1,700 tokens/s, sent 1.2 MB`.
        """
        state, replica = self.state, self.state.spec.members[member].replica
        known = state.replicas.get(replica.name)
        losses = list[str]()  # those that are known on this host; a rehearsal has none
        if known is not None and state.spec.config.rehearsal is None:
            if told.round in known.validation_loss:
                losses.append(f"validation loss {known.validation_loss[told.round]:.4f}")
            if (loss := known.round_loss(told.round)) is not None:
                losses.append(f"training loss {loss:.4f}")
        steps = state.inner_steps or (0 if known is None else known.steps(told.round))
        tokens = steps * replica.batch_size * state.spec.config.data.sequence_length
        whole = told.compute_seconds + told.wait_seconds + told.outer_seconds + told.evaluation_seconds
        shares = {"waiting for neighbours": told.wait_seconds, "exchange with other replicas": told.outer_seconds}
        within = ", ".join(f"{what} {format_seconds(seconds)}" for what, seconds in shares.items() if seconds)
        sent = sum(
            link.directions[way].wire_bytes_of_round(told.round)
            for link in state.links.values()
            for way in DIRECTIONS
            if sender(link.spec, way) == member
        )
        speed = speeds(state, told.round, [member], tokens, whole)
        parts = [*losses, f"{format_seconds(whole)} ({within})", *speed, f"sent {format_bytes(sent)}"]
        return f"round {told.round}/{state.rounds_planned}: {member}: {', '.join(parts)}"


def sender(link: LinkSpec, way: str) -> str:
    """Return the member, or the exchange, that sends in a direction of a link."""
    return link.source if way == "forward" else link.target
