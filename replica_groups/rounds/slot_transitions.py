"""Transitions of slots: claims, heartbeats, broken links, and the ends of incarnations."""

from __future__ import annotations

from collections.abc import Generator, Iterator

from replica_groups.rounds import events as e
from replica_groups.rounds.slot import Replica, Slot, with_name
from replica_groups.rounds.state import State

RETRY_SECONDS = 1.0
"""Pause before a failed write to a store is retried."""

BARRED_ROUNDS = 16
"""Rounds from which a replica is barred after differing bits, MOST_MALFORMED messages, or a failed recomputation."""

MOST_MALFORMED = 3
"""Malformed messages in one round, between two members without tickets, after which their replica is barred.

The replica diverged or one of its machines is damaged, so the failure would repeat forever.
"""


class SlotTransitions(State):
    """Transitions that give a slot to a process, keep it, and free it."""

    def _applied(self, event: e.Applied, now: float) -> Iterator[e.Effect]:
        slot = self.slots[event.slot]
        if slot.held and slot.process == event.process:
            yield e.Welcome(slot.name, event.process, slot.incarnation)
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
            yield e.Welcome(slot.name, event.process, slot.incarnation)
        elif not event.won:
            yield from self._noted(e.Noted(slot.name, event.incarnation), now)
        else:
            yield from self._let_in(slot)

    def _not_claimed(self, event: e.NotClaimed, now: float) -> Iterator[e.Effect]:
        slot = self.slots[event.slot]
        slot.claiming, slot.claim_at = False, now + RETRY_SECONDS
        yield from ()

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
        if event.round is not None:
            yield from self._heard_training(slot, event.round, event.generation)
        slot.hear(now, event.progress, event.computes)

    def _heard_training(self, slot: Slot, round_: int, generation: int) -> Iterator[e.Effect]:
        """Check the round that a member trains: known here, void, or assigned by another coordinator."""
        replica = self.replicas[slot.replica]
        if generation > replica.generation:
            yield from (e.LookUp(other.name) for other in replica.slots)
        elif generation == replica.generation and replica.alive:
            yield from self._adopt(slot, round_)
        elif replica.round is not None or slot.asked is not None:
            return  # the member has returned since; this heartbeat is older
        elif self._trains_ahead_of(round_) or not self._has_contributed(replica, round_, generation):
            yield e.Suspend(slot.name, slot.incarnation, generation, "a stage of its replica is missing")

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

    def _left(self, event: e.Left, now: float) -> Iterator[e.Effect]:
        slot = self.slots[event.slot]
        if self.holds(event.slot, event.incarnation):
            slot.vacate()
            self._note_holder(slot)
            if not any(other.held for other in self.replicas[slot.replica].slots):
                self._finishing.discard(slot.replica)
        yield from ()

    def _adopt(self, slot: Slot, round_: int, has_trained: bool = False) -> Iterator[e.Effect]:
        """Take over an assignment of another coordinator, of which some members may not have heard."""
        replica = self.replicas[slot.replica]
        if not replica.alive or self._is_whole(replica) or round_ <= max(self.last_round, replica.round or 0):
            return
        if self.rounds is None or round_ > self.rounds:  # not begun here: a later heartbeat will tell. Or it is a lie
            return
        replica.round, replica.trained = round_, None
        if self.open is not None and round_ == self.open.number:
            self.open.join(replica.name, replica.alive)
        elif self.open is not None:
            yield e.Look(self.open.number)  # it is closed, because training a round requires the one before
        for other in replica.slots:
            if other.asked is not None and other.asked < round_ and not (has_trained and other is slot):
                other.asked = None
                yield e.Assign(other.name, other.incarnation, round_, replica.generation, trained=other.trained)

    def _lost(self, event: e.Lost, now: float) -> Iterator[e.Effect]:
        slot = self.slots[event.slot]
        if self.holds(event.slot, event.incarnation):
            slot.lost = True
        yield from ()

    def _died(self, event: e.Died, now: float) -> Iterator[e.Effect]:
        slot = self.slots[event.slot]
        if slot.held and event.incarnation in (None, slot.incarnation):
            yield from self._end_incarnation(slot, event.cause)

    def _expire(self, slot: Slot) -> Iterator[e.Effect]:
        """Wait no more for a silent member. Its incarnation lasts for a while longer if its round goes on."""
        trains = self.open is not None and (self.replicas[slot.replica].round or 0) >= self.open.number
        if trains and not slot.silent and slot.applicant is None and slot.is_only_silent:
            slot.silent = True
            self._note_holder(slot)
        else:
            yield from self._end_incarnation(slot, slot.why_it_ends(), silent=True)

    def _end_silent(self, slot: Slot) -> Iterator[e.Effect]:
        """End the incarnation of a silent member before its time, because its round does not go on."""
        slot.silent = False
        yield from self._end_incarnation(slot, slot.why_it_ends(), silent=True)

    def _end_incarnation(self, slot: Slot, cause: str, silent: bool = False) -> Iterator[e.Effect]:
        """End the incarnation of a slot, and void its replica's incomplete contribution."""
        slot.vacate()
        self._note_holder(slot)
        yield e.Fenced(slot.name, slot.incarnation, cause, silent)
        if self.is_over:
            self._finishing.discard(slot.replica)  # the other members of its group would wait forever
        yield from self._suspend(self.replicas[slot.replica], with_name(slot.name, cause))
        yield from self._let_in(slot)

    def _suspend(self, replica: Replica, cause: str) -> Iterator[e.Effect]:
        """Make a replica reform.

        Members that wait for the record of a complete contribution continue to wait, unless they train the next round
        meanwhile.
        """
        round_, replica.round = replica.round, None
        if self._is_whole(replica) and not self._trains_ahead_of(self.last_round + 1):
            return
        if self.open is not None and not self._is_whole(replica):
            self.open.withdraw(replica.name)
        for slot in replica.slots:
            if slot.held and slot.asked is None and (round_ is not None or slot.assumed_present):
                yield e.Suspend(slot.name, slot.incarnation, replica.generation, cause)

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

    def _bar(self, slot: Slot, round_: int, until: int, cause: str) -> e.Barred:
        """Bar a replica from rounds before `until`, and from the open round unless it trains or has contributed."""
        replica = self.replicas[slot.replica]
        replica.barred_until = until = max(until, replica.barred_until)
        if self.open is not None and replica.round != self.open.number:
            self.open.leave(replica.name)
        return e.Barred(slot.name, slot.incarnation, round_, until, cause)
