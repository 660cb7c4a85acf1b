"""Transitions of slots: claims, heartbeats, broken links, and the ends of incarnations."""

from __future__ import annotations

from collections.abc import Generator, Iterator

from replica_groups.rounds import events as e
from replica_groups.rounds.places import Place, Replica, with_name
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
        place = self.places[event.place]
        if place.held and place.process == event.process:
            yield e.Welcome(place.name, event.process, place.term)
        elif place.held and not place.presumed and now - place.silence.since < place.silence.lease / 3:
            yield e.Refused(place.name, f"found a second process of `{place.name}`", event.process)
        else:
            place.applicant, place.applies_as_guest = event.process, event.is_guest
            if place.silent:
                yield from self._end_silent(place)
            else:
                yield from self._let_in(place)

    def _let_in(self, place: Place) -> Iterator[e.Effect]:
        """Claim a free slot for the process that waits for it."""
        if place.applicant is not None and not place.held and not place.claiming:
            place.claiming, place.claim_at = True, None
            yield e.Claim(place.name, place.term + 1, place.applicant)

    def _claimed(self, event: e.Claimed, now: float) -> Iterator[e.Effect]:
        place = self.places[event.place]
        place.claiming = False
        if event.won and event.term > place.term and not place.held:
            place.take(event.term, event.process, now, self.rules)
            self._note_holder(place)
            place.is_guest = place.applies_as_guest
            if place.applicant == event.process:
                place.applicant = None
            yield e.Welcome(place.name, event.process, place.term)
        elif not event.won:
            yield from self._noted(e.Noted(place.name, event.term), now)
        else:
            yield from self._let_in(place)

    def _not_claimed(self, event: e.NotClaimed, now: float) -> Iterator[e.Effect]:
        place = self.places[event.place]
        place.claiming, place.claim_at = False, now + RETRY_SECONDS
        yield from ()

    def _noted(self, event: e.Noted, now: float) -> Iterator[e.Effect]:
        """End a known incarnation if the store has a later one."""
        place = self.places[event.place]
        if event.term > place.term:
            if place.held:
                yield from self._end_term(place, "another exchange has given this slot to another process")
            place.take(event.term, None, now, self.rules)
            place.presumed = True
            self._note_holder(place)

    def _heard(self, event: e.Heard, now: float) -> Iterator[e.Effect]:
        place = self.places[event.place]
        if not (yield from self._admits(place, event.term, now)):
            return
        if event.round is not None:
            yield from self._heard_training(place, event.round, event.epoch)
        place.hear(now, event.progress, event.computes)

    def _heard_training(self, place: Place, round_: int, epoch: int) -> Iterator[e.Effect]:
        """Check the round that a member trains: known here, void, or assigned by another coordinator."""
        replica = self.replicas[place.replica]
        if epoch > replica.epoch:
            yield from (e.LookUp(other.name) for other in replica.places)
        elif epoch == replica.epoch and replica.alive:
            yield from self._adopt(place, round_)
        elif replica.round is not None or place.asked is not None:
            return  # the member has returned since; this heartbeat is older
        elif self._trains_ahead_of(round_) or not self._has_contributed(replica, round_, epoch):
            yield e.Suspended(place.name, place.term, epoch, "a stage of its replica is missing")

    def _admits(self, place: Place, term: int, now: float) -> Generator[e.Effect, None, bool]:
        """Note that the holder of an incarnation is present, and return whether the incarnation is current.

        The holder of an old incarnation is fenced.
        """
        if term > place.term:
            yield e.LookUp(place.name)
        elif not self.holds(place.name, term):
            yield e.Fenced(place.name, term)
        else:
            was_silent = place.silent
            place.is_there(now)
            if was_silent:
                self._note_holder(place)
        return self.holds(place.name, term)

    def _left(self, event: e.Left, now: float) -> Iterator[e.Effect]:
        place = self.places[event.place]
        if self.holds(event.place, event.term):
            place.vacate()
            self._note_holder(place)
            if not any(other.held for other in self.replicas[place.replica].places):
                self._finishing.discard(place.replica)
        yield from ()

    def _adopt(self, place: Place, round_: int, has_trained: bool = False) -> Iterator[e.Effect]:
        """Take over an assignment of another coordinator, of which some members may not have heard."""
        replica = self.replicas[place.replica]
        if not replica.alive or self._is_whole(replica) or round_ <= max(self.last_round, replica.round or 0):
            return
        if self.rounds is None or round_ > self.rounds:  # not begun here: a later heartbeat will tell. Or it is a lie
            return
        replica.round, replica.trained = round_, None
        if self.open is not None and round_ == self.open.number:
            self.open.join(replica.name, replica.alive)
        elif self.open is not None:
            yield e.Look(self.open.number)  # it is closed, because training a round requires the one before
        for other in replica.places:
            if other.asked is not None and other.asked < round_ and not (has_trained and other is place):
                other.asked = None
                yield e.Assign(other.name, other.term, round_, replica.epoch, trained=other.trained)

    def _lost(self, event: e.Lost, now: float) -> Iterator[e.Effect]:
        place = self.places[event.place]
        if self.holds(event.place, event.term):
            place.lost = True
        yield from ()

    def _died(self, event: e.Died, now: float) -> Iterator[e.Effect]:
        place = self.places[event.place]
        if place.held and event.term in (None, place.term):
            yield from self._end_term(place, event.cause)

    def _expire(self, place: Place) -> Iterator[e.Effect]:
        """Wait no more for a silent member. Its incarnation lasts for a while longer if its round goes on."""
        trains = self.open is not None and (self.replicas[place.replica].round or 0) >= self.open.number
        if trains and not place.silent and place.applicant is None and place.is_only_silent:
            place.silent = True
            self._note_holder(place)
        else:
            yield from self._end_term(place, place.why_it_ends(), silent=True)

    def _end_silent(self, place: Place) -> Iterator[e.Effect]:
        """End the incarnation of a silent member before its time, because its round does not go on."""
        place.silent = False
        yield from self._end_term(place, place.why_it_ends(), silent=True)

    def _end_term(self, place: Place, cause: str, silent: bool = False) -> Iterator[e.Effect]:
        """End the incarnation of a slot, and void its replica's incomplete contribution."""
        place.vacate()
        self._note_holder(place)
        yield e.Fenced(place.name, place.term, cause, silent)
        if self.is_over:
            self._finishing.discard(place.replica)  # the other members of its group would wait forever
        yield from self._suspend(self.replicas[place.replica], with_name(place.name, cause))
        yield from self._let_in(place)

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
        for place in replica.places:
            if place.held and place.asked is None and (round_ is not None or place.presumed):
                yield e.Suspended(place.name, place.term, replica.epoch, cause)

    def _broken(self, event: e.Broken, now: float) -> Iterator[e.Effect]:
        """End the incarnation of a member that cannot reach a neighbour, so that its replica reforms.

        If members of the replica are silent, theirs end: the one that is there has given the round up.
        """
        place = self.places[event.place]
        replica = self.replicas[place.replica]
        if not (yield from self._admits(place, event.term, now)):
            return
        if event.blames:
            yield from self._count_malformed(event)
        if event.epoch != replica.epoch:
            return
        if replica.alive:
            yield from self._end_term(place, event.cause)
        for other in replica.places:
            if other.silent:
                yield from self._end_silent(other)

    def _count_malformed(self, event: e.Broken) -> Iterator[e.Effect]:
        """Count a malformed message between two trusted members. The last of MOST_MALFORMED bars their replica.

        The run stops only if no quorum is left without the replica.
        """
        if self.open is None:
            return
        pair = frozenset((event.place, event.blames))
        self._malformed[pair] = self._malformed.get(pair, 0) + 1
        if self._malformed[pair] < MOST_MALFORMED:
            return
        del self._malformed[pair]
        first, second = sorted(pair)
        place, number = self.places[event.blames], self.open.number
        cause = f"round {number}: {first} and {second} exchanged {MOST_MALFORMED} malformed messages ({event.cause})"
        others = {*self._there(self.open)} - {place.replica}
        if len(others) < (needed := self.rules.needed_of(others)):
            left = f"without {place.replica}, {len(others)} of {needed} needed replicas are left"
            yield e.Stop(f"{cause}; {left}: check whether training diverged, and the memory of both machines")
            return
        yield self._bar(place, number, number + BARRED_ROUNDS, cause)

    def _bar(self, place: Place, round_: int, until: int, cause: str) -> e.Barred:
        """Bar a replica from rounds before `until`, and from the open round unless it trains or has contributed."""
        replica = self.replicas[place.replica]
        replica.barred_until = until = max(until, replica.barred_until)
        if self.open is not None and replica.round != self.open.number:
            self.open.leave(replica.name)
        return e.Barred(place.name, place.term, round_, until, cause)
