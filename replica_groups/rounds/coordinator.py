"""The coordinator of a run: rounds, slots and failures as a pure state machine.

  effects = coordinator.step(event, now)

The coordinator uses no clock, thread, socket or file: `now` is an argument from a monotonic clock, and every action is
returned as an effect. The exchange runs it over gRPC and in process; the tests simulate it. Its state can be
reconstructed: rounds from the records in the store, incarnations from the claims there, and presence from heartbeats.
So it may crash at any instruction, restart, or run twice at once.

A slot is claimed, kept by heartbeats, and freed; a round is opened, trained, contributed to, and closed by its record.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Generator, Iterator, Mapping
from typing import Any, NamedTuple

from hetero_pp.core.units import format_seconds
from hetero_pp.messages import messages_pb2 as pb
from replica_groups.rounds import events as e
from replica_groups.rounds.rules import Rules
from replica_groups.rounds.state import Lateness, OpenRound, Replica, Slot, with_name

RETRY_SECONDS = 1.0  # pause before a failed write to a store is retried

BARRED_ROUNDS = 16
"""Rounds from which a replica is barred after differing bits, MOST_MALFORMED messages, or a failed recomputation."""

MOST_MALFORMED = 3
"""Malformed messages in one round, between two members without tickets, after which their replica is barred.

The replica diverged or one of its machines is damaged, so the failure would repeat forever.
"""

LOOK_SECONDS = 10.0  # interval at which a coordinator without a quorum checks whether another one has closed the round

REMEMBERED_HASHES = 4  # number of rounds whose hashes are kept until replay reaches them

LATE_IN_A_ROW = 3  # consecutive rounds that a replica may miss before rounds close without waiting for it

UNAWAITED_FACTOR = 10.0
"""Ratio of the time without waiting for such a replica to the time that was lost by waiting for it."""

WRONG_AGAIN_WITHIN = 16  # rounds after a recovery in which a member's bits may not differ again

REFORM_SECONDS = 15.0
"""Time for which a round that only lacks replicas without a stage waits for new holders of their slots.

A process starts again within it. Once the slot has a holder, the replica is waited for as others are.
"""

GAVE_UP = "it has left the links of its group"

MOST_RESTARTS = 32
"""Holders that may begin within one round of a replica, so that a flapping stage makes no long records.

After these the replica trains the round from its start.
"""

REMEMBERED_LATE = 16  # number of recent rounds whose late replicas are remembered, to learn from their delay


class Late(NamedTuple):
    """Replicas that a round did not include."""

    quorum_at: float | None
    replicas: set[str]  # replicas that have not contributed since
    unawaited: frozenset[str]  # replicas that the round did not wait for, because they had missed several in a row


class Coordinator:
    """The state of a run, and its transitions."""

    def __init__(
        self, rules: Rules, now: float = 0.0, incarnations: Mapping[str, int] | None = None, goes_on: bool = False
    ) -> None:
        """`incarnations`: the highest claimed incarnation of each slot.

        With `goes_on`, another coordinator ran a moment ago: the holders of these incarnations are presumed present.
        """
        self.rules = rules
        self.alive: set[str] = set()  # the replicas whose slots are all held by members that are heard
        self._slots_due = math.inf
        """No slot is due before this time, at which it is found out anew. Events cost no look at every slot."""
        self.slots = {name: Slot(name, replica) for name, replica in rules.slots.items()}
        self.replicas = {
            name: Replica(name, [self.slots[slot] for slot in rules.slots_of(name)]) for name in rules.replicas
        }
        for name, incarnation in (incarnations or {}).items():
            self.slots[name].incarnation = incarnation
        self.open: OpenRound | None = None  # the open round; None before the run begins and after its last round
        self.last_round = 0  # the last decided round
        self.rounds: int | None = None  # number of the last round; None before the run begins
        self._tokens: int | None = None  # tokens with which the run ends, before the round `rounds`
        self.lateness = Lateness(rules.grace)
        self._finish_by: float | None = None
        """Time by which members have to leave; None before the last round is decided."""
        self._finishing: set[str] = set()
        """Once every round is decided: the replicas of the last one of which a member is still there."""
        self._paused = False
        self._look_at: float | None = None
        self._late: dict[int, Late] = {}
        self._in_step: dict[str, int] = {}
        """Replicas whose contribution to the last round came in time -> generation of the contribution."""
        self._malformed: dict[frozenset[str], int] = {}
        """Pair of neighbouring slots -> malformed messages between them in the open round, up to MOST_MALFORMED."""
        self._hashes: dict[int, dict[str, Mapping[str, bytes]]] = {}
        self._audited: dict[int, Mapping[str, bytes]] = {}
        self._differing: dict[int, set[str]] = {}
        if goes_on:
            self.assume_present(now)

    def assume_present(self, now: float) -> None:
        """Take the holders of slots under an earlier coordinator as present until their heartbeats fail."""
        for slot in self.slots.values():
            if slot.incarnation and not slot.held:
                slot.take(slot.incarnation, None, now, self.rules)
                slot.assumed_present = True
                self._note_holder(slot)

    def step(self, event: e.Event, now: float) -> list[e.Effect]:
        """Return the effects of an event at time `now`."""
        effects = list(self._transition(event, now))
        if (slot := self.slots.get(getattr(event, "slot", ""))) is not None:
            self._slots_due = min(self._slots_due, slot.due_at())
        if self.open is not None:
            if not self.open.is_overdue and now - self.open.opened_at >= self.rules.limit:
                self.open.is_overdue = True  # an optional replica counts from now on only once it has contributed
                self.open.counting &= self.open.whole.keys()
            for name, until in self.open.reforming.items():
                self.open.reforming[name] = min(until, now + REFORM_SECONDS)
            self.open.count(self._needed, now)
            if not self.open.writing and (closes := self._closes_at()) is not None and now >= closes:
                self.open.writing = True
                effects.append(e.Write(self.open.record(self.rules)))
            effects += self._tell_of_quorum(self.open)
        return effects

    def _transition(self, event: e.Event, now: float) -> Iterator[e.Effect]:
        """Yield the effects of the event itself. Events of every second come first."""
        match event:
            case e.Heard():
                yield from self._heard(event, now)
            case e.Deposited():
                yield from self._deposited(event, now)
            case e.Tick():
                yield from self._tick(now)
            case e.Asked():
                yield from self._asked(event, now)
            case e.Confirmed() if self.holds(event.slot, event.incarnation):
                self._hashes.setdefault(event.round, {})[event.slot] = event.hashes
                _keep_newest(self._hashes, REMEMBERED_HASHES)
                yield from self._compare(event.round)
            case e.Audited():
                self._audited[event.round] = event.hashes
                _keep_newest(self._audited, REMEMBERED_HASHES)
                yield from self._compare(event.round)
            case e.Recorded():
                yield from self._recorded(event.record, now)
            case e.NotRecorded() if self.open is not None and event.round == self.open.number:
                self.open.writing, self.open.retry_at = False, now + RETRY_SECONDS
            case e.Applied():
                yield from self._applied(event, now)
            case e.Claimed():
                yield from self._claimed(event, now)
            case e.NotClaimed():
                self.slots[event.slot].claiming, self.slots[event.slot].claim_at = False, now + RETRY_SECONDS
            case e.Noted():
                yield from self._noted(event, now)
            case e.Lost() if self.holds(event.slot, event.incarnation):
                self.slots[event.slot].lost = True
            case e.Died():
                slot = self.slots[event.slot]
                if slot.held and event.incarnation in (None, slot.incarnation):
                    yield from self._end_incarnation(slot, event.cause, has_left=event.has_left)
            case e.Broken():
                yield from self._broken(event, now)
            case e.Condemned():
                first = self.replicas[event.replica].slots[0]
                yield self._bar(first, event.round, event.until, event.cause)
            case e.Left() if self.holds(event.slot, event.incarnation):
                slot = self.slots[event.slot]
                slot.vacate()
                self._note_holder(slot)
                if not any(other.held for other in self.replicas[slot.replica].slots):
                    self._finishing.discard(slot.replica)
            case e.Began():
                self.last_round, self.rounds, self._tokens = event.round, event.rounds, event.tokens
                self._finishing = set(self.alive)
                yield from self._open_next(now, set(self.alive))
                for name, replica in self.replicas.items():
                    if self.open is not None and not replica.alive and self._may_resume(replica):
                        self.open.join(name, False)
                        self.open.reforming[name] = math.inf
            case e.Woke():
                for slot in self.slots.values():
                    slot.silence.restart(now)
                    slot.stillness.restart(now)
                    if slot.silent:
                        slot.silent = False
                        self._note_holder(slot)

    def deadline(self) -> float | None:
        """Return when to send Tick if no other event comes before; None if there is no deadline."""
        times = [] if math.isinf(self._slots_due) else [self._slots_due]
        if self.open is not None and not self.open.writing:
            times += [time for time in (self._closes_at(), self._look_at) if time is not None]
        if self._finish_by is not None and not self.is_through:
            times.append(self._finish_by)
        return min(times, default=None)

    # ---- slots ----

    def _note_holder(self, slot: Slot) -> None:
        """Note that a slot was taken or freed, or that its holder became silent or is heard again."""
        replica = self.replicas[slot.replica]
        (self.alive.add if replica.alive else self.alive.discard)(replica.name)
        if self.open is not None:
            self.open.is_heard(replica.name, replica.alive)
        self._slots_due = min(self._slots_due, slot.due_at())

    def _applied(self, event: e.Applied, now: float) -> Iterator[e.Effect]:
        slot = self.slots[event.slot]
        if slot.held and slot.process == event.process:
            yield e.Welcome(slot.name, slot.incarnation, event.process)
        elif slot.held and not slot.assumed_present and now - slot.silence.since < slot.silence.lease / 3:
            yield e.Reject(slot.name, f"found a second process of `{slot.name}`", event.process)
        else:
            slot.applicant, slot.applies_as_guest = event.process, event.is_guest
            if slot.silent:
                yield from self._end_silent(slot)
            else:
                yield from self._let_in(slot)

    def _let_in(self, slot: Slot) -> Iterator[e.Effect]:
        """Claim a free slot for the process that waits for it."""
        if slot.applicant is not None and not slot.held and not slot.claiming:
            slot.claiming, slot.claim_at = True, None
            yield e.ClaimSlot(slot.name, slot.incarnation + 1, slot.applicant)

    def _claimed(self, event: e.Claimed, now: float) -> Iterator[e.Effect]:
        slot = self.slots[event.slot]
        slot.claiming = False
        if event.won and event.incarnation > slot.incarnation and not slot.held:
            slot.take(event.incarnation, event.process, now, self.rules)
            self._note_holder(slot)
            slot.is_guest = slot.applies_as_guest
            if slot.applicant == event.process:
                slot.applicant = None
            yield e.Welcome(slot.name, slot.incarnation, event.process)
        elif not event.won:
            yield from self._noted(e.Noted(slot.name, event.incarnation), now)
        else:
            yield from self._let_in(slot)

    def _noted(self, event: e.Noted, now: float) -> Iterator[e.Effect]:
        """End a known incarnation if the store has a later one."""
        slot = self.slots[event.slot]
        if event.incarnation > slot.incarnation:
            if slot.held:
                yield from self._end_incarnation(slot, "another exchange has given this slot to another process")
            slot.take(event.incarnation, None, now, self.rules)
            slot.assumed_present = True
            self._note_holder(slot)

    def _heard(self, event: e.Heard, now: float) -> Iterator[e.Effect]:
        slot = self.slots[event.slot]
        if not (yield from self._admits(slot, event.incarnation, now)):
            return
        replica, round_ = self.replicas[slot.replica], event.round
        # The round that the member trains is known here, or void, or was assigned by another coordinator.
        if round_ is not None and event.generation > replica.generation:
            yield from (e.LookUp(other.name) for other in replica.slots)
        elif round_ is not None and event.generation == replica.generation and replica.alive:
            yield from self._adopt(slot, round_, event.resumption)
        elif round_ is not None and event.generation < replica.generation and replica.round and replica.trained is None:
            # Another coordinator assigned the present generation, and one that knew less an earlier one to this member.
            yield e.Suspend(slot.name, slot.incarnation, event.generation, "its replica has a new generation")
        elif round_ is not None and replica.round is None and slot.asked is None:
            # Otherwise the member has returned since, and this heartbeat is older. A member whose replica's
            # contribution is complete waits for the record and evaluates, for which it needs no member that is gone.
            is_decided = round_ == self.last_round and self._in_step.get(replica.name) == event.generation
            is_open = self.open is not None and round_ == self.open.number and self._is_whole(replica)
            if self._trains_ahead_of(round_) or not (is_decided or is_open):
                yield e.Suspend(slot.name, slot.incarnation, event.generation, "a stage of its replica is missing")
        slot.hear(now, event.progress, event.computes)

    def _admits(self, slot: Slot, incarnation: int, now: float) -> Generator[e.Effect, None, bool]:
        """Note that the holder of an incarnation is present, and return whether the incarnation is current.

        The holder of an old incarnation is fenced.
        """
        if incarnation > slot.incarnation:
            yield e.LookUp(slot.name)
        elif not self.holds(slot.name, incarnation):
            yield e.Fenced(slot.name, incarnation)
        else:
            was_silent = slot.silent
            slot.is_there(now)
            if was_silent:
                self._note_holder(slot)
        return self.holds(slot.name, incarnation)

    def _adopt(
        self, slot: Slot, round_: int, resumption: pb.Resumption | None, has_trained: bool = False
    ) -> Iterator[e.Effect]:
        """Take over an assignment of another coordinator, of which some members may not have heard."""
        replica = self.replicas[slot.replica]
        if resumption is not None and not self._is_possible(resumption, replica):
            return
        if not replica.alive or self._is_whole(replica) or round_ <= max(self.last_round, replica.round or 0):
            return
        if self.rounds is None or round_ > self.rounds:  # not begun here: a later heartbeat will tell. Or it is a lie
            return
        replica.round, replica.trained, replica.resumption = round_, None, resumption
        if self.open is not None and round_ == self.open.number:
            self.open.join(replica.name, replica.alive)
        elif self.open is not None:
            yield e.Look(self.open.number)  # it is closed, because training a round requires the one before
        for other in replica.slots:
            if has_trained and (other is slot or not self.rules.contributes(other.name, round_)):
                continue  # it waits for the record: what it asked before came late
            if other.asked is not None and other.asked < round_:
                if self._gave_up(other):
                    yield from self._end_incarnation(other, GAVE_UP)
                    return
                other.asked = other.kept = None
                yield self._assign(other, other.trained)

    def _end_silent(self, slot: Slot) -> Iterator[e.Effect]:
        """End the incarnation of a silent member before its time, because its round does not go on."""
        slot.silent = False
        yield from self._end_incarnation(slot, slot.why_it_ends(), silent=True)

    def _end_incarnation(
        self, slot: Slot, cause: str, silent: bool = False, has_left: bool = False
    ) -> Iterator[e.Effect]:
        """End the incarnation of a slot, and void its replica's incomplete contribution."""
        slot.vacate()
        self._note_holder(slot)
        ended = _about(slot, pb.SILENT if silent else pb.INCARNATION_OVER, 0, cause)
        ended.has_left = has_left
        yield ended
        if self.is_over:
            self._finishing.discard(slot.replica)  # the other members of its group would wait forever
        yield from self._suspend(self.replicas[slot.replica], slot, with_name(slot.name, cause))
        yield from self._let_in(slot)

    def _suspend(self, replica: Replica, lacks: Slot, cause: str) -> Iterator[e.Effect]:
        """Make a replica reform, which lacks the holder of a slot.

        Members that wait for the record of a complete contribution continue to wait, unless they train the next round
        meanwhile.
        """
        round_, replica.round = replica.round, None
        if self._is_whole(replica) and not self._trains_ahead_of(self.last_round + 1):
            return
        if self.open is not None and not self._is_whole(replica):
            if replica.name in self.open.missing and self._may_resume(replica, round_):
                self.open.reforming.setdefault(replica.name, math.inf)  # it may resume, so its round is kept for it
            elif replica.name not in self.open.reforming:
                self.open.leave(replica.name)
            self.open.deposits.pop(replica.name, None)
        left = [one for one in replica.slots if one.held and one.asked is None]
        left = [one for one in left if round_ is not None or one.assumed_present]
        for slot in left:
            yield e.Suspend(slot.name, slot.incarnation, replica.generation, cause)
        if left:
            yield _about(lacks, pb.SUSPENDED, 0, cause)

    def _may_resume(self, replica: Replica, trained: int | None = None) -> bool:
        """Return whether a group that lacks a stage may resume in the open round, as it `trained` that round until now.

        None: another coordinator may have assigned it, if members were not heard since, or keep steps of it.
        """
        number = self.open.number if self.open else 0
        resumes = self.rules.resumes and len(replica.slots) > 1 and not self._is_barred(replica.name, number)
        has_steps = (one.assumed_present or (one.kept and one.kept.round == number) for one in replica.slots)
        return resumes and (trained == number or (trained is None and any(has_steps)))

    def _broken(self, event: e.Broken, now: float) -> Iterator[e.Effect]:
        """End the incarnation of a member that cannot reach a neighbour, so that its replica reforms.

        If members of the replica are silent, theirs end: the one that is there has given the round up.
        """
        slot = self.slots[event.slot]
        replica = self.replicas[slot.replica]
        if not (yield from self._admits(slot, event.incarnation, now)):
            return
        if event.blames:
            yield from self._count_malformed(event)
        if event.generation != replica.generation:
            return
        if replica.alive:
            yield from self._end_incarnation(slot, event.cause)
        for other in replica.slots:
            if other.silent:
                yield from self._end_silent(other)

    def _count_malformed(self, event: e.Broken) -> Iterator[e.Effect]:
        """Count a malformed message between two trusted members. The last of MOST_MALFORMED bars their replica.

        The run stops only if no quorum is left without the replica.
        """
        if self.open is None:
            return
        pair = frozenset((event.slot, event.blames))
        self._malformed[pair] = self._malformed.get(pair, 0) + 1
        if self._malformed[pair] < MOST_MALFORMED:
            return
        del self._malformed[pair]
        first, second = sorted(pair)
        slot, number = self.slots[event.blames], self.open.number
        cause = f"round {number}: {first} and {second} exchanged {MOST_MALFORMED} malformed messages ({event.cause})"
        others = {*self._there(self.open)} - {slot.replica}
        if len(others) < (needed := self.rules.needed_of(others)):
            left = f"without {slot.replica}, {len(others)} of {needed} needed replicas are left"
            yield e.Stop(f"{cause}; {left}: check whether training diverged, and the memory of both machines")
            return
        yield self._bar(slot, number, number + BARRED_ROUNDS, cause)

    def _bar(self, slot: Slot, round_: int, until: int, cause: str) -> pb.MembershipEvent:
        """Bar a replica from rounds before `until`, and from the open round unless it trains or has contributed.

        It takes part nevertheless if a quorum needs it. If an audit bars it, `slot` is the replica's first slot.
        """
        replica = self.replicas[slot.replica]
        replica.barred_until = until = max(until, replica.barred_until)
        if self.open is not None and replica.round != self.open.number:
            self.open.leave(replica.name)
        cause = f"{cause}: {replica.name} takes part in no round before {until}, unless a quorum needs it"
        return _about(slot, pb.EXCLUDED, round_, cause)

    # ---- work ----

    def _asked(self, event: e.Asked, now: float) -> Iterator[e.Effect]:
        slot = self.slots[event.slot]
        replica = self.replicas[slot.replica]
        if not (yield from self._admits(slot, event.incarnation, now)):
            return
        slot.assumed_present = False
        slot.rests(now)
        slot.differs |= event.differs  # the coordinator that has found it out may be gone
        if replica.round is not None and event.holds < replica.round and not self._is_whole(replica):
            # it was assigned this round already, and has not received the answer
            slot.kept = event.kept
            if self._gave_up(slot):
                yield from self._end_incarnation(slot, GAVE_UP)
                return
            slot.kept = None
            yield self._assign(slot, event.trained if replica.trained in (None, event.trained) else 0)
            return
        slot.asked, slot.trained = event.holds, event.trained
        if event.kept is not None and (slot.kept is None or event.kept.generation >= slot.kept.generation):
            slot.kept = event.kept  # no older request that comes late takes it away
        if event.holds > self.last_round:
            yield e.Look(self.last_round + 1)
        yield from self._form(replica, now)

    def _form(self, replica: Replica, now: float) -> Iterator[e.Effect]:
        """Assign the open round to a replica, if all its members wait and it may join."""
        if self.rounds is None:
            return
        if self.open is None:
            # The run is over, which waiting members are told even if their replica is incomplete.
            replica.round = None
            for slot in replica.slots:
                if slot.held and slot.asked is not None:
                    slot.asked = None
                    yield e.Assign(slot.name, slot.incarnation, 0, replica.generation)
        elif not replica.waits or max(slot.asked or 0 for slot in replica.slots) > self.last_round:
            return  # or another coordinator closed rounds that are unknown here
        else:
            resumption = self._resumption(replica)
            if resumption is None and replica.name in self.open.reforming:
                self.open.leave(replica.name)  # it may be too late to begin this round anew
            if not self._may_join(replica.name, now):
                return
            self.open.join(replica.name, replica.alive)
            replica.round, replica.resumption = self.open.number, resumption
            trained = {0 if slot.differs else slot.trained for slot in replica.slots}
            replica.trained = trained.pop() if len(trained) == 1 else 0
            for slot in replica.slots:
                if slot.differs:
                    slot.kept = None
                keeps = slot.kept is not None and slot.kept.generation == (resumption or pb.Resumption()).generation
                slot.asked = slot.kept = None
                yield self._assign(slot, replica.trained)
                if resumption is not None and not keeps:
                    told = _about(slot, pb.RESUMED, replica.round, "")
                    told.step = resumption.step
                    yield told

    def _assign(self, slot: Slot, trained: int) -> e.Assign:
        """Return what a member of a replica is told that has a round. It recovers first if its bits differ."""
        replica = self.replicas[slot.replica]
        assert replica.round is not None
        if slot.differs:
            slot.differs, slot.healed_for = False, replica.round
        heals = slot.healed_for == replica.round  # also if it is told again, as an answer may not have arrived
        name, incarnation, generation = slot.name, slot.incarnation, replica.generation
        return e.Assign(name, incarnation, replica.round, generation, heals, trained, replica.resumption)

    def _gave_up(self, slot: Slot) -> bool:
        """Return whether a waiting member has left the present generation, in which others may still train."""
        replica = self.replicas[slot.replica]
        return slot.kept is not None and (slot.kept.round, slot.kept.generation) == (replica.round, replica.generation)

    def _resumption(self, replica: Replica) -> pb.Resumption | None:
        """Return where a waiting replica resumes within the open round; None if it begins the round.

        The first stage applies a step first, and the others within the next step. So members that trained together
        differ by at most one step. One that lacks a step has its gradients, and needs only the norm, which the first
        of those that keep steps repeats. All others begin from theta before the round. They are new holders, those
        whose bits differ, and members that were not there when the replica last resumed.
        """
        assert self.open is not None
        waiting = [slot for slot in replica.slots if not slot.differs]
        kept = {slot.name: slot.kept for slot in waiting if slot.kept and slot.kept.round == self.open.number}
        newest = max((one.generation for one in kept.values()), default=0)
        kept = {name: one for name, one in kept.items() if one.generation == newest}
        first = next(iter(kept.values()), pb.KeptSteps())
        if any(not first.applied - one.has_next <= one.applied <= first.applied for one in kept.values()):
            return None
        # A restart at a later step is void: whoever had applied that step is gone.
        restarts = [one for one in first.restarts if one.step <= first.applied]
        resumption = pb.Resumption(step=first.applied, generation=newest, restarts=restarts)
        resumption.restarts.extend(
            pb.Restart(slot=slot.name, step=first.applied) for slot in replica.slots if slot.name not in kept
        )
        return resumption if self._is_possible(resumption, replica) else None

    def _is_possible(self, resumption: pb.Resumption, replica: Replica) -> bool:
        """Return whether members of a replica may resume so, as far as the rules know."""
        slots, restarts = {slot.name for slot in replica.slots}, resumption.restarts
        is_within = 0 < resumption.step < self.rules.steps_of(replica.name).stop  # all H, if it was contributing
        is_known = all(one.slot in slots and one.step <= resumption.step for one in restarts)
        return self.rules.resumes and is_within and is_known and len(restarts) <= MOST_RESTARTS

    def _open_next(self, now: float, taking_part: set[str]) -> Iterator[e.Effect]:
        """Open the round after the last decided one, for these replicas and those that wait."""
        assert self.rounds is not None
        self.open, self._look_at = None, None
        if self.last_round < self.rounds:
            number = self.last_round + 1
            taking_part = {name for name in taking_part if not self._is_barred(name, number)}
            unawaited = frozenset(name for name, one in self.replicas.items() if now < one.awaited_from)
            reliable = frozenset(name for name in self.rules.optional if not self.replicas[name].missed)
            self.open = OpenRound(number, now, taking_part, unawaited=unawaited, optional=reliable)
            self._look_at = now + self.rules.limit
        else:
            self._finish_by = now + self.rules.grace.most
            yield pb.Over(round=self.last_round, rounds=self.rounds, finishing=sorted(self._finishing))
        for replica in self.replicas.values():
            yield from self._form(replica, now)

    # ---- rounds ----

    def _deposited(self, event: e.Deposited, now: float) -> Iterator[e.Effect]:
        slot = self.slots[event.slot]
        replica = self.replicas[slot.replica]
        if not (yield from self._admits(slot, event.incarnation, now)):
            return
        slot.rests(now)
        if event.round <= self.last_round:
            # A late contribution is not included. Its delay is added to the learned lateness, at most once.
            late = self._late.get(event.round)
            if late is not None and replica.name in late.replicas:
                late.replicas.discard(replica.name)
                if late.quorum_at is not None and replica.name not in late.unawaited:
                    self.lateness.came(now - late.quorum_at)
                yield pb.MembershipEvent(what=pb.LATE, replica=replica.name, round=event.round)
            return
        if event.generation == replica.generation:
            yield from self._adopt(slot, event.round, event.resumption, has_trained=True)
        found, expected = (event.round, event.generation), (replica.round, replica.generation)
        if self.open is None or event.round != self.open.number or found != expected:
            reason = f"found (round, generation) {found}, expected {expected}"
            yield e.Reject(slot.name, reason, incarnation=event.incarnation, is_over=True)
            return
        self.open.join(replica.name, replica.alive)
        if (complaint := self.open.deposit(replica, event, self.rules, now)) is not None:
            yield e.Reject(slot.name, complaint, incarnation=event.incarnation)

    def _recorded(self, record: pb.RoundRecord, now: float) -> Iterator[e.Effect]:
        if self.open is None or record.round != self.open.number:
            return
        closed, self.last_round = self.open, record.round
        if self._tokens is not None and record.tokens >= self._tokens:
            self.rounds = record.round
        self._malformed.clear()
        if closed.quorum_at is not None:  # learn from the delays of contributions that came after the quorum
            for came in list(closed.whole.values())[closed.quorum :]:
                self.lateness.came(came - closed.quorum_at)
        yield e.Closed(record)
        counted = {one.replica for one in record.contributions}
        self._in_step = {replica: closed.deposits[replica].generation for replica in closed.whole}
        self._in_step |= {one.replica: one.generation for one in record.contributions}
        missing = closed.taking_part - self._in_step.keys()
        self._late[record.round] = Late(closed.quorum_at, set(missing), closed.unawaited)
        _keep_newest(self._late, REMEMBERED_LATE)
        for one in record.contributions:
            if one.scale not in (0, 1):
                yield pb.MembershipEvent(what=pb.SCALED, replica=one.replica, round=record.round, scale=one.scale)
        for replica in record.left_out:
            yield pb.MembershipEvent(what=pb.LEFT_OUT, replica=replica, round=record.round)
        for replica in sorted(closed.whole.keys() - counted - set(record.left_out)):
            yield pb.MembershipEvent(what=pb.LATE, replica=replica, round=record.round)
        yield from self._note_missed(closed, missing, now)
        self._finishing = (closed.taking_part | closed.whole.keys()).intersection(self.alive)
        ahead = {name for name, replica in self.replicas.items() if replica.round == record.round + 1}
        yield from self._open_next(now, {name for name in self.alive if name in self._in_step or name in ahead})
        is_behind = any(slot.asked is not None and slot.asked > self.last_round for slot in self.slots.values())
        if is_behind or not closed.writing:
            yield e.Look(record.round + 1)  # another coordinator decides rounds, and may be ahead

    def _note_missed(self, closed: OpenRound, missing: Collection[str], now: float) -> Iterator[e.Effect]:
        """Count the consecutive rounds that each replica took part in without contributing in time.

        After LATE_IN_A_ROW rounds, rounds close without waiting for it, so that in the long run at most a tenth of the
        time is lost.
        """
        for name in self._in_step:
            self.replicas[name].missed, self.replicas[name].awaited_from = 0, 0.0
        waited = self.lateness.grace if closed.quorum_at is None else max(0.0, now - closed.quorum_at)
        for name in sorted(missing):
            replica = self.replicas[name]
            replica.missed += 1
            if replica.missed >= LATE_IN_A_ROW and name not in closed.unawaited:
                replica.awaited_from = now + UNAWAITED_FACTOR * waited
                seconds = format_seconds(round(UNAWAITED_FACTOR * waited))
                cause = f"missed {replica.missed} rounds in a row: rounds of the next {seconds}"
                yield pb.MembershipEvent(what=pb.NOT_AWAITED, replica=name, round=closed.number, cause=cause)

    def _tell_of_quorum(self, opened: OpenRound) -> Iterator[e.Effect]:
        """Report once that no round can close, and once that rounds can close again."""
        needed = self._needed
        if not self._paused and len(self.alive) >= needed:
            return  # as usual, which is found out without a look at every replica
        there = self._there(opened)
        if not self._paused and len(there) < needed:
            self._paused = True
            yield pb.MembershipEvent(what=pb.PAUSED, round=opened.number, cause=self.why_paused)
        elif self._paused and len(there) >= needed:
            self._paused = False
            yield pb.MembershipEvent(what=pb.WENT_ON, round=opened.number)

    # ---- agreement ----

    def _compare(self, round_: int) -> Iterator[e.Effect]:
        """Compare the hashes that members confirmed with those of replay, each once."""
        right = self._audited.get(round_)
        if right is None:
            return
        for name, hashes in self._hashes.pop(round_, {}).items():
            wrong = [parameter for parameter in sorted(hashes) if hashes[parameter] != right.get(parameter)]
            if wrong:
                yield from self._found_wrong(self.slots[name], round_, wrong[0])

    def _found_wrong(self, slot: Slot, round_: int, parameter: str) -> Iterator[e.Effect]:
        """Recover a member whose bits differ from the run log; bar its replica if they differ again.

        The log decides, however many members differ. Only if at least two replicas are the operator's own, and all of
        these differ, the machine that replays the log is in doubt. Replicas with members admitted by a ticket do not
        count for that.
        """
        differing = self._differing.setdefault(round_, set())
        _keep_newest(self._differing, REMEMBERED_HASHES)
        differing.add(slot.replica)
        candidates = {*self.alive, *differing}
        own = {name for name in candidates if not any(one.is_guest for one in self.replicas[name].slots)}
        if len(own) > 1 and own <= differing:
            yield e.Stop(
                f"after round {round_}, {', '.join(sorted(own))} hold a {parameter} that differs from the run log"
            )
            return
        if not slot.differs:  # told once until it recovers: a member may confirm one round again and again
            slot.differs = True
            yield _about(slot, pb.HEALED, round_, f"held a {parameter} that differs from the run log")
        replica, healed = self.replicas[slot.replica], slot.healed_for
        if healed is not None and healed <= round_ < healed + WRONG_AGAIN_WITHIN and round_ >= replica.barred_until:
            cause = f"after round {round_}, {slot.name} again held parameters that differ from the run log"
            yield self._bar(slot, round_, round_ + 1 + BARRED_ROUNDS, cause)

    # ---- time ----

    def _tick(self, now: float) -> Iterator[e.Effect]:
        for slot in self.slots.values():
            if slot.held and now >= slot.ends_at():
                # Nobody waits for a silent member. Its incarnation lasts for a while longer if its round goes on.
                trains = self.open is not None and (self.replicas[slot.replica].round or 0) >= self.open.number
                if trains and not slot.silent and slot.applicant is None and slot.is_only_silent:
                    slot.silent = True
                    self._note_holder(slot)
                else:
                    yield from self._end_incarnation(slot, slot.why_it_ends(), silent=True)
            if slot.claim_at is not None and now >= slot.claim_at:
                slot.claim_at = None
                yield from self._let_in(slot)
        self._slots_due = min((slot.due_at() for slot in self.slots.values()), default=math.inf)
        if self._finish_by is not None and now >= self._finish_by:
            for slot in self.slots.values():
                if slot.held and slot.replica in self._finishing:
                    yield from self._end_incarnation(
                        slot, f"it did not leave within {self.rules.grace.most:.0f} s of the end"
                    )
        if self._look_at is not None and now >= self._look_at and self.open is not None and not self.open.writing:
            self._look_at = now + LOOK_SECONDS
            yield e.Look(self.open.number)

    # ---- questions ----

    @property
    def waited_for(self) -> list[str]:
        """The replicas that the open round waits for."""
        return [] if self.open is None else sorted(self.open.waited_for(self.alive))

    @property
    def _needed(self) -> int:
        """The quorum of the open round.

        An optional replica counts if it takes part. If it missed its last round, or the open round is overdue, it
        counts only once it has contributed. Otherwise a replica that takes every round and never contributes would keep
        rounds open forever.
        """
        return self.rules.needed_with(0 if self.open is None else len(self.open.counting))

    @property
    def is_through(self) -> bool:
        """Whether every round is decided, and all members of the replicas in the last round have left."""
        return self.is_over and not self._finishing

    @property
    def is_over(self) -> bool:
        """Whether every round is decided."""
        return self.rounds is not None and self.open is None

    def holds(self, slot: str, incarnation: int) -> bool:
        """Return whether an incarnation of a slot is current."""
        return self.slots[slot].held and self.slots[slot].incarnation == incarnation

    def applies(self, process: str, slot: str) -> bool:
        """Return whether a process waits for a slot, or the slot is being claimed."""
        return self.slots[slot].applicant == process or self.slots[slot].claiming

    def generation_of(self, slot: str) -> int:
        """Return the generation of a slot's replica."""
        return self.replicas[self.slots[slot].replica].generation

    def deposited(self, replica: str, generation: int, block: str) -> pb.BlobEntry | None:
        """Return the entry of a blob that a generation of a replica has deposited for the open round."""
        own = None if self.open is None else self.open.deposits.get(replica)
        return None if own is None or own.generation != generation else own.blobs.get(block)

    def _there(self, opened: OpenRound) -> tuple[str, ...]:
        """Return the replicas that a round can include."""
        return tuple(sorted({*self.alive, *opened.whole}))

    @property
    def why_paused(self) -> str:
        """How few replicas are present, while they are too few to close the open round; empty otherwise."""
        if self.open is None or not self._paused:
            return ""
        there = len(self._there(self.open))
        return f"{there} of {len(self.replicas)} replicas are present, {self._needed} are required"

    # ---- questions of the transitions ----

    def _trains_ahead_of(self, round_: int) -> bool:
        """Return whether a replica that has contributed to a round trains the next one."""
        return self.rules.overlap and self.rounds is not None and round_ < self.rounds

    def _is_whole(self, replica: Replica) -> bool:
        """Return whether the replica's contribution to the open round is complete."""
        return self.open is not None and replica.name in self.open.whole

    def _may_join(self, replica: str, now: float) -> bool:
        """Return whether a replica may take part in the open round. A late one waits for the next, to stay in step."""
        assert self.open is not None
        if replica in self.open.whole:
            return False
        if self._is_barred(replica, self.open.number) and replica not in self.open.taking_part:
            return self.open.is_overdue or self._others_there(replica) < self._needed
        if replica in self.open.taking_part:
            return True
        in_time = now - self.open.opened_at <= self.lateness.grace
        at_once = self.rules.joins_at_once or in_time or self.open.is_overdue  # those that took it may never contribute
        return at_once or self._others_there(replica) < self._needed

    def _others_there(self, replica: str) -> int:
        """Return how many other replicas have contributed to the open round or are waited for."""
        assert self.open is not None
        return len(self.open.whole) + len([one for one in self.waited_for if one != replica])

    def _is_barred(self, replica: str, round_: int) -> bool:
        """Return whether a replica is barred: for differing bits, malformed messages on its links, or by an audit.

        Callers let it join if a quorum needs it.
        """
        return round_ < self.replicas[replica].barred_until

    def _closes_at(self) -> float | None:
        """Return when the open round closes if nothing more comes; None while a quorum is missing."""
        assert self.open is not None
        waits = self.open.quorum_at is not None and next(self.open.waited_for(self.alive), None) is not None
        closes = self.open.closes_at(waits, self.lateness.grace, self.rules.limit)
        if not waits and closes is not None and (reforming := self.open.reforming.keys() - self.open.unawaited):
            latest = self.open.closes_at(True, self.lateness.grace, self.rules.limit)
            closes = min(max(closes, *(self.open.reforming[name] for name in reforming)), latest or math.inf)
        return closes if closes is None or self.open.retry_at is None else max(closes, self.open.retry_at)


def _keep_newest(by_round: dict[int, Any], count: int) -> None:
    while len(by_round) > count:
        del by_round[min(by_round)]


def _about(slot: Slot, what: pb.MembershipEventKind, round_: int, cause: str) -> pb.MembershipEvent:
    event = pb.MembershipEvent(what=what, slot=slot.name, replica=slot.replica, round=round_, cause=cause)
    event.incarnation = slot.incarnation
    return event
