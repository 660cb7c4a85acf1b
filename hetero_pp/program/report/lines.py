"""A run in sentences: its start and rounds, membership events, what it waits for, and the lines of a host's members."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

from hetero_pp.config.lines import DIRECTIONS, EXCHANGE
from hetero_pp.config.predictions import hardware_of
from hetero_pp.config.spec import RunSpec
from hetero_pp.config.topology import DatacenterReplica
from hetero_pp.core.errors import RunOver
from hetero_pp.core.units import format_bytes, format_count, format_names, format_number, format_seconds, format_share
from hetero_pp.messages import messages_pb2 as pb
from hetero_pp.messages.messages_pb2 import MembershipEventKind, Report
from hetero_pp.model.inner import REMEDIES
from hetero_pp.program.report.output import now_and_then, reading_line
from hetero_pp.program.report.state import Divergence, MemberPresence, News, RunState, sender
from hetero_pp.program.report.tables import format_loss
from hetero_pp.rpc.exchange_service import FIRST_TOLD
from hetero_pp.simulator.costs import step_flops
from replica_groups.exchange.stall_detector import listed, whom
from replica_groups.rounds.state import with_name

ROWS_OF_TROUBLE = 3  # most lines of vacant slots, and of excluded replicas
_SHOWN = 4  # largest number of replicas that a line names
STALL_SECONDS = 60.0
"""Seconds without an inner step after which a member that trains, and sends heartbeats, is shown as stalled."""


def start_line(state: RunState) -> str:
    """Return a line on the run that is about to start."""
    spec = state.spec
    replicas = format_count(sum(not replica.optional for replica in spec.config.replicas), "replica")
    members = format_count(len(spec.needed), "member")
    rounds = spec.latest.in_rounds(state.rounds_planned)
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
    waiting = state.waiting
    assert waiting is not None
    now = state.waiting_told if now is None else max(now, state.waiting_told)
    seconds = round(waiting.seconds + now - state.waiting_told)
    if waiting.awaited == pb.CONTRIBUTING:
        return _contributing(state, waiting, now, seconds, sees_all)
    if waiting.awaited == pb.STORING:
        return f"{whom(waiting)}; retrying for {format_seconds(max(1, seconds))} so far"
    what = joined_line(state) if waiting.awaited == pb.JOINING else whom(waiting)
    heard = [each.HasField("silent_seconds") and each.silent_seconds < FIRST_TOLD for each in waiting.missing]
    if waiting.awaited == pb.FINISHING and all(heard):  # they apply and evaluate the last round
        return f"{what}; for {format_seconds(seconds)} so far"
    return f"{what}; no progress for {format_seconds(seconds)}"


def _contributing(state: RunState, waiting: pb.Waiting, now: float, seconds: float, sees_all: bool) -> str:
    """Return `round 1: training (2 of 50 inner steps; waiting for 5 of 5 contributions); no progress for 2 min`."""
    # A long step is no stall: while a member computes, the line names it instead, and both are left out of the first
    # minute of training.
    missing = [one.member for one in waiting.missing]
    # A round waits for an optional replica only while that is complete.
    complete = state.replicas.keys() - {state.members[slot].replica for slot in state.vacant}
    replicas = [one for one in state.changed.replicas_in(waiting.round) if not one.optional or one.name in complete]
    asked = (member for one in replicas for member in one.members)
    total = len({*(one for one in asked if state.changed.roster.contributes(one, waiting.round)), *missing})
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
        return f"round {waiting.round}{_fragment(state, waiting.round)}: {waits}{heard}{stalled}"
    done, planned = state.progress_of_open_round(now)
    is_training = done < planned
    if is_training and not silent and seconds < STALL_SECONDS:
        stalled = ""
    what = "training" if is_training else "trained"
    unit = "s" if state.inner_steps is None else "inner steps"
    steps = f"{format_amount(done)} of {format_amount(planned)} {unit}"
    return f"round {waiting.round}{_fragment(state, waiting.round)}: {what} ({steps}; {waits}){heard}{stalled}"


def _fragment(state: RunState, round_: int) -> str:
    """Return what follows the number of a round: ` (fragment 2 of 4)`, or nothing."""
    told = state.spec.fragments.describe(round_)
    return told and f" ({told})"


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
    replicas, missing = state.of_round(round_), state.missing_losses(round_)
    losses = ", ".join(f"{name} {format_loss(replica.round_loss(round_))}" for name, replica in replicas.items())
    uncounted = {name: (why.slot, why.cause) for name, why in state.not_counted(round_).items()}
    mean = state.mean_validation_loss(round_)
    validation = format_loss(mean)
    if mean is None and (uncounted or missing):  # some could not report theirs
        known = {name: replica.validation_loss.get(round_) for name, replica in replicas.items()}
        validation = ", ".join(f"{name} {format_loss(loss)}" for name, loss in known.items())
    what = f"validation loss {validation}, training loss {losses}"
    if state.spec.config.rehearsal is not None:
        what = "rehearsed"
    seconds, counted = state.round_seconds(round_), state.closed[round_]
    included = [replica for replica in state.spec.replicas_ever if replica.name in counted.sizes]
    members = [member for replica in included for member in replica.members]
    speed = speeds(state, round_, members, counted.tokens, seconds)
    parts = ", ".join([what, format_seconds(seconds), *speed])
    line = f"round {round_}/{state.rounds_planned}{_fragment(state, round_)}: {parts}"
    unevaluated = {name: why for name, why in missing.items() if name not in uncounted}
    for what, reasons in (("excluded", uncounted), ("not evaluated", unevaluated)):
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
        steps = (known and known.steps(round_)) or state.changed.steps_of(member.replica.name) or 0
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


# ---- membership events ----


def kind_of(news: News) -> str:
    """Return the name of a membership event, such as `restarted`."""
    event = str(news.report.WhichOneof("event"))
    if event == "membership_event":
        told = news.report.membership_event
        return "left" if told.has_left else MembershipEventKind.Name(told.what).lower()
    return event


def words_of(news: News, spec: RunSpec) -> str:
    """Return a membership event in words."""
    report = news.report
    match report.WhichOneof("event"):
        case "begun":
            note = f"; {report.begun.note}" if report.begun.note else ""
            return f"resuming after round {report.begun.last_round}{note}"
        case "failure":
            return report.failure.cause if report.member == EXCHANGE else f"{report.member}: {report.failure.cause}"
        case "joined":
            incarnation = report.joined.incarnation
            return f"{report.member} has joined{f' again (incarnation {incarnation})' if incarnation > 1 else ''}"
        case "waiting":
            seconds = format_seconds(max(1, round(report.waiting.seconds)))
            return f"resuming after {seconds}: reads and writes succeed again"
        case "state_saving":
            failure, which = report.state_saving.failure, f"its state after round {report.state_saving.round}"
            if not failure:
                return f"{report.member} saved {which}; saving works again"
            lost = "it continues training, and saves its next state on schedule"
            return f"{report.member} could not save {which}: {failure}; {lost}"
    event, outer = report.membership_event, spec.config.outer
    of_round = f"its contribution to round {event.round}"
    share = "" if outer.returned == 1 else f"{format_number(100 * outer.returned)} % of "
    restored = f"{share}its contribution is restored to its error feedback"
    became = restored if outer.returned else "its contribution is discarded"
    match event.what:
        case MembershipEventKind.INCARNATION_OVER | MembershipEventKind.SILENT:
            told = with_name(event.slot, event.cause)
            return f"{told}; its slot is vacant" if news.is_line else told
        case MembershipEventKind.SUSPENDED:
            return f"{event.replica} stops training and waits for {event.slot}"
        case MembershipEventKind.RESUMED:
            where = f"inner step {event.step + 1} of round {event.round}"
            return f"{event.replica} resumes at {where}, where {event.slot} begins"
        case MembershipEventKind.INJECTED:
            return f"injected fault: {event.cause}"
        case MembershipEventKind.LATE:
            after = "it continues from its own parameters" if outer.keep_local else became
            return f"{event.replica} was too late for round {event.round}: {after}"
        case MembershipEventKind.LEFT_OUT:
            why = f"is excluded ({event.cause})" if event.cause else "is far larger than expected and is excluded"
            return f"{event.replica}: {of_round} {why}: {became}"
        case MembershipEventKind.SCALED:
            return f"{event.replica}: {of_round} is larger than expected and is scaled by {event.scale:.3g}"
        case MembershipEventKind.PAUSED:
            return f"round {event.round} is paused: {event.cause}; it continues when more replicas join"
        case MembershipEventKind.WENT_ON:
            return f"round {event.round} continues after {format_seconds(news.paused)}"
        case MembershipEventKind.HEALED:
            return f"after round {event.round}, {event.slot} {event.cause}; it recovers from the run log"
        case MembershipEventKind.UNAUDITED:
            return f"unaudited: {event.cause}"
        case MembershipEventKind.NOT_AWAITED:
            included = "its contributions are included if they arrive in time"
            return f"{event.replica} {event.cause} do not wait for it; {included}"
    return event.cause  # restarted, given up, excluded, audited


# ---- trouble ----


def status_lines(state: RunState, now: float) -> Iterator[tuple[str, bool]]:
    """Yield lines on members that are gone, and on what the run waits for; each with whether it is trouble."""
    yield from ((line, True) for line in trouble_lines(state, now))
    if state.waiting is not None:
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
    excluded = [f"{one.replica} is excluded: {one.excluded}" for one in state.scores.values() if one.excluded]
    for lines, more, are in ((causes, "more slot", "without a member"), (excluded, "more replica", "excluded")):
        yield from lines[:ROWS_OF_TROUBLE]
        if len(lines) > ROWS_OF_TROUBLE:
            yield f"and {format_count(len(lines) - ROWS_OF_TROUBLE, more)} {are}"
    if state.unaudited is not None:
        yield f"unaudited: {state.unaudited}"


# ---- a host with some members ----


class OwnRoundLines:
    """Turns reports of this host's members, and reports about the whole run, into lines.

    Needs no reports of other members.
    """

    def __init__(self, spec: RunSpec, members: Sequence[str], say: Callable[[str], None]) -> None:
        self.state = RunState(spec)  # state of the run, as far as this host gets reports
        self._members = members
        self._replicas = list(dict.fromkeys(spec.members[member].replica.name for member in members))
        self.say = say
        self._is_told = False
        self._diverged_told: set[str] = set()
        self._reading = now_and_then(say, time.monotonic)

    def on_report(self, report: Report) -> None:
        """Take in one report, and print what is new. Reports before the first state of the run are not new."""
        state, lines = self.state, list[str]()
        had_joined, had_opened = state.joined_at is not None, state.has_opened
        if state.apply(report) and state.news is not None and state.news.is_line:
            lines.append(words_of(state.news, state.spec))
        if not had_joined and state.joined_at is not None:
            lines.append(joined_line(state))
        match report.WhichOneof("event"):
            case "waiting" if state.waiting is not None:
                lines.append(waiting_line(state, sees_all=False))
            case "begun" if report.begun.last_round and not had_opened:
                lines.append(f"resuming after round {report.begun.last_round}")
            case "member_round" if report.member in self._members:
                lines.append(self._line(report.member, report.member_round))
            case "so_far" if not self._is_told:
                self._is_told, lines = True, [*self._present(report.time)]
            case "over" if not set(self._replicas) & set(report.over.finishing):
                # None of them took part in the last round.
                self.say(f"{state.spec.config.name}: {RunOver.after(report.over.round, report.over.rounds)}")
            case "reading" if self._is_told:
                self._reading(report.reading.what, report.reading.share)
        due = [
            own for name, own in state.diverged.items() if name in self._replicas and name not in self._diverged_told
        ]
        if self._is_told and due:
            self._diverged_told |= {own.replica for own in due}
            lines.append(divergence_line(due))
        for line in lines if self._is_told else ():
            self.say(line)

    def _present(self, now: float) -> Iterator[str]:
        """Yield lines on the state of the run as this host comes."""
        state = self.state
        if not (state.has_opened or state.rounds):
            yield joined_line(state) if state.waiting is None else waiting_line(state, now, sees_all=False)
        elif not state.has_closed_all_rounds:
            members = state.spec.needed.keys() | state.joined
            there = [state.presence(member) in (MemberPresence.PRESENT, MemberPresence.FINISHED) for member in members]
            here = (
                f"{sum(there)} of {format_count(len(members), 'member')} {'is' if sum(there) == 1 else 'are'} present"
            )
            number = state.rounds + 1
            yield f"round {number} of {state.rounds_planned}{_fragment(state, number)} is open; {here}"
            yield from trouble_lines(state, now)
            if state.waiting is not None:
                yield waiting_line(state, now, sees_all=False)

    def farewell(self) -> str:
        """Return what this host's replicas added to a run that is over, and where its model is; empty otherwise."""
        config, credits = self.state.spec.config, self.state.tally.credits
        if self.state.over is None or config.rehearsal is not None:
            return ""
        whole = sum(credit.tokens for credit in credits.values())
        own = {name: credits[name] for name in self._replicas if name in credits and credits[name].tokens}
        added = [
            f"{name} added {credit.tokens:,} tokens in {credit.included:,} rounds, "
            f"{format_share(credit.tokens / whole)} of all"
            for name, credit in own.items()
        ] or [f"no round includes {format_names(self._replicas, _SHOWN)}"]
        model = f"the exchange's host has the model, and writes it with: hetero-pp export {config.name} --to FOLDER"
        return f"{'; '.join(added)}; {model}"

    def _line(self, member: str, told: pb.MemberRound) -> str:
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
        steps = state.changed.steps_of(replica.name) or (0 if known is None else known.steps(told.round))
        tokens = steps * replica.batch_size * state.spec.config.data.sequence_length
        whole = told.compute_seconds + told.wait_seconds + told.outer_seconds + told.evaluation_seconds
        shares = {"waiting for neighbours": told.wait_seconds, "exchange with other replicas": told.outer_seconds}
        within = ", ".join(f"{what} {format_seconds(seconds)}" for what, seconds in shares.items() if seconds)
        sent = sum(
            link.ways[way].of_round(told.round).wire_bytes
            for link in state.links.values()
            for way in DIRECTIONS
            if sender(link.spec, way) == member
        )
        speed = speeds(state, told.round, [member], tokens, whole)
        parts = [*losses, f"{format_seconds(whole)} ({within})", *speed, f"sent {format_bytes(sent)}"]
        return f"round {told.round}/{state.rounds_planned}: {member}: {', '.join(parts)}"
