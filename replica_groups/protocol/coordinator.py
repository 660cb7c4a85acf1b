"""The coordinator of a run: rounds, slots and failures as a pure state machine.

  effects = coordinator.step(event, now)

The coordinator uses no clock, thread, socket or file: `now` is an argument from a monotonic clock, and every action is
returned as an effect. The exchange runs it over gRPC and in process; the simulator runs it on a simulated clock. Its
state can be reconstructed: rounds from the records in the store, incarnations from the claims there, and presence from
heartbeats. So it may crash at any instruction, restart, or run twice at once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from replica_groups.protocol import events as e
from replica_groups.protocol.learnt import Lateness
from replica_groups.protocol.places import Place, Replica
from replica_groups.protocol.rounds import OpenRound
from replica_groups.protocol.rules import Rules
from replica_groups.protocol.view import OpenRoundView, SlotView, View

RETRY_SECONDS = 1.0
"""Pause before a failed write to a store is retried."""

LOOK_SECONDS = 10.0
"""Interval at which a coordinator without a quorum checks whether another one has closed the round."""

REMEMBERED_HASHES = 4
"""Number of rounds whose hashes are kept until replay reaches them."""

LATE_IN_A_ROW = 3
"""Consecutive rounds that a replica may miss before rounds close without waiting for it."""

UNAWAITED_FACTOR = 10.0
"""Ratio of the time without waiting for such a replica to the time that was lost by waiting for it."""

WRONG_AGAIN_WITHIN = 16
"""Rounds after a recovery in which a member's bits may not differ again."""

EXCLUDED_ROUNDS = 16
"""Rounds from which a replica is barred after a member's bits differed again, or after MOST_MALFORMED messages."""

MOST_MALFORMED = 3
"""Malformed messages in one round, between two members without tickets, after which their replica is excluded.

The replica diverged or one of its machines is damaged, so the failure would repeat forever.
"""

REMEMBERED_LATE = 16
"""Number of recent rounds whose late replicas are remembered, to learn from their delay."""


class Late(NamedTuple):
    """Replicas that a round did not include."""

    quorum_at: float | None
    replicas: set[str]
    """Replicas that have not contributed since."""
    unawaited: frozenset[str]
    """Replicas that the round did not wait for, because they had missed several in a row."""


class Coordinator:
    """The state of a run, and its transitions."""

    def __init__(
        self, rules: Rules, now: float = 0.0, terms: Mapping[str, int] | None = None, goes_on: bool = False
    ) -> None:
        """`terms`: the highest claimed incarnation of each slot.

        With `goes_on`, another coordinator ran a moment ago: the holders of these incarnations are presumed present.
        """
        self.rules = rules
        self.places = {name: Place(name, replica) for name, replica in rules.places.items()}
        self.replicas = {
            name: Replica(name, [self.places[place] for place in rules.places_of(name)]) for name in rules.replicas
        }
        for name, term in (terms or {}).items():
            self.places[name].term = term
        if goes_on:
            self.presume(now)
        self.open: OpenRound | None = None
        """The open round; None before the run begins and after its last round."""
        self.last_round = 0
        """The last decided round."""
        self.rounds: int | None = None
        """Number of the last round; None before the run begins."""
        self.lateness = Lateness(rules.grace)
        self._finish_by: float | None = None
        """Time by which members have to leave; None before the last round is decided."""
        self._finishing: set[str] = set()
        """Once every round is decided: the replicas that took part in the last one and are still complete."""
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
        self._handlers: Mapping[type, Callable[[Any, float], Iterator[e.Effect]]] = {
            e.Began: self._began,
            e.Applied: self._applied,
            e.Claimed: self._claimed,
            e.NotClaimed: self._not_claimed,
            e.Noted: self._noted,
            e.Heard: self._heard,
            e.Lost: self._lost,
            e.Died: self._died,
            e.Asked: self._asked,
            e.Broken: self._broken,
            e.Deposited: self._deposited,
            e.Recorded: self._recorded,
            e.NotRecorded: self._not_recorded,
            e.Confirmed: self._confirmed,
            e.Audited: self._audit,
            e.Left: self._left,
            e.Tick: self._tick,
            e.Woke: self._woke,
        }

    def presume(self, now: float) -> None:
        """Take the holders of slots under an earlier coordinator as present until their heartbeats fail."""
        for place in self.places.values():
            if place.term and not place.held:
                place.take(place.term, None, now, self.rules)
                place.presumed = True

    def step(self, event: e.Event, now: float) -> list[e.Effect]:
        """Return the effects of an event at time `now`."""
        effects = list(self._handlers[type(event)](event, now))
        if self.open is not None:
            self.open.is_overdue = now - self.open.opened_at >= self.rules.limit
            self.open.count(self._needed, now)
        effects += self._close_if_due(now)
        effects += self._tell_of_quorum()
        return effects

    def deadline(self) -> float | None:
        """Return when to send Tick if no other event comes before; None if there is no deadline."""
        times = [place.ends_at() for place in self.places.values() if place.held]
        times += [place.claim_at for place in self.places.values() if place.claim_at is not None]
        if self.open is not None and not self.open.writing:
            times += [time for time in (self._closes_at(), self._look_at) if time is not None]
        if self._finish_by is not None and not self.is_through:
            times.append(self._finish_by)
        return min(times, default=None)

    @property
    def waited_for(self) -> list[str]:
        """The replicas that the open round waits for."""
        return [] if self.open is None else self.open.waited_for(self.alive)

    @property
    def alive(self) -> list[str]:
        """The replicas whose slots are all held."""
        return [name for name, replica in self.replicas.items() if replica.alive]

    @property
    def _needed(self) -> int:
        """The quorum of the open round.

        An optional replica counts if it takes part. If it missed its last round, or the open round is overdue, it
        counts only once it has contributed. Otherwise a replica that takes every round and never contributes would keep
        rounds open forever.
        """
        if self.open is None:
            return self.rules.needed_of(())
        there = {name for name in self.open.taking_part if not self.replicas[name].missed and not self.open.is_overdue}
        return self.rules.needed_of({*there, *self.open.whole}, self.open.number)

    @property
    def is_through(self) -> bool:
        """Whether every round is decided, and all members of the replicas in the last round have left."""
        return self.is_over and not any(p.held for p in self.places.values() if p.replica in self._finishing)

    @property
    def is_over(self) -> bool:
        """Whether every round is decided."""
        return self.rounds is not None and self.open is None

    def holds(self, place: str, term: int) -> bool:
        """Return whether an incarnation of a slot is current."""
        return self.places[place].held and self.places[place].term == term

    def view(self) -> View:
        """Return the state of the run at this moment, which later steps do not change."""
        slots = tuple(
            SlotView(
                place.name,
                place.replica,
                place.term,
                place.held,
                self.replicas[place.replica].round or 0,
                place.held and place.computes,
            )
            for place in self.places.values()
        )
        return View(
            last_round=self.last_round,
            has_begun=self.rounds is not None,
            is_over=self.is_over,
            open=None if self.open is None else self._view_of(self.open),
            paused=self.paused,
            slots=slots,
            replicas=len(self.replicas),
            optional=frozenset(self.rules.optional),
        )

    def _view_of(self, opened: OpenRound) -> OpenRoundView:
        awaited = self.rules.due(opened.number) - self.rules.optional.difference(self.alive)
        deposited = {replica: frozenset(own.blobs) for replica, own in opened.deposits.items()}
        return OpenRoundView(opened.number, frozenset(awaited), deposited)

    # ---- the beginning ----

    def _began(self, event: e.Began, now: float) -> Iterator[e.Effect]:
        self.last_round, self.rounds = event.round, event.rounds
        self.rules = replace(self.rules, examples_since=event.examples_since)
        self._finishing = set(self.alive)
        yield from self._open_next(now, set(self.alive))

    # ---- places ----

    def _applied(self, event: e.Applied, now: float) -> Iterator[e.Effect]:
        place = self.places[event.place]
        if place.held and place.process == event.process:
            yield e.Welcome(place.name, event.process, place.term)
        elif place.held and not place.presumed and now - place.silence.since < place.silence.lease / 3:
            yield e.Refused(place.name, f"found a second process of `{place.name}`", event.process)
        else:
            place.applicant, place.applies_as_guest = event.process, event.is_guest
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

    def _has_contributed(self, replica: Replica, round_: int, epoch: int) -> bool:
        """Return whether the replica's contribution is complete.

        A member then waits for the record and evaluates, for which it needs no member that has finished.
        """
        if round_ == self.last_round and self._in_step.get(replica.name) == epoch:
            return True
        return self.open is not None and round_ == self.open.number and self._is_whole(replica)

    def _trains_ahead_of(self, round_: int) -> bool:
        """Return whether a replica that has contributed to a round trains the next one."""
        return self.rules.overlap and self.rounds is not None and round_ < self.rounds

    def _admits(self, place: Place, term: int, now: float) -> Generator[e.Effect, None, bool]:
        """Note that the holder of an incarnation is present, and return whether the incarnation is current.

        The holder of an old incarnation is fenced.
        """
        if term > place.term:
            yield e.LookUp(place.name)
        elif not self.holds(place.name, term):
            yield e.Fenced(place.name, term)
        else:
            place.is_there(now)
        return self.holds(place.name, term)

    def _is_whole(self, replica: Replica) -> bool:
        """Return whether the replica's contribution to the open round is complete."""
        return self.open is not None and replica.name in self.open.whole

    def _adopt(self, place: Place, round_: int, has_trained: bool = False) -> Iterator[e.Effect]:
        """Take over an assignment of another coordinator, of which some members may not have heard."""
        replica = self.replicas[place.replica]
        if not replica.alive or self._is_whole(replica) or round_ <= max(self.last_round, replica.round or 0):
            return
        replica.round, replica.trained = round_, None
        if self.open is not None and round_ == self.open.number:
            self.open.taking_part.add(replica.name)
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

    def _end_term(self, place: Place, cause: str, silent: bool = False) -> Iterator[e.Effect]:
        """End the incarnation of a slot, and void its replica's incomplete contribution."""
        place.vacate()
        yield e.Fenced(place.name, place.term, cause, silent)
        if self.is_over:
            self._finishing.discard(place.replica)  # the other members of its group would wait forever
        yield from self._suspend(self.replicas[place.replica], f"{place.name}: {cause}")
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
        """End the incarnation of a member that cannot reach a neighbour, so that its replica reforms."""
        place = self.places[event.place]
        replica = self.replicas[place.replica]
        if not (yield from self._admits(place, event.term, now)):
            return
        if event.blames:
            yield from self._count_malformed(event)
        if event.epoch == replica.epoch and replica.alive:
            yield from self._end_term(place, event.cause)

    def _count_malformed(self, event: e.Broken) -> Iterator[e.Effect]:
        """Count a malformed message between two trusted members. The last of MOST_MALFORMED excludes their replica.

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
        if len(others) < (needed := self.rules.needed_of(others, number)):
            left = f"without {place.replica}, {len(others)} of {needed} needed replicas are left"
            yield e.Stop(f"{cause}; {left}: check whether training diverged, and the memory of both machines")
            return
        yield self._exclude(place, number, number + EXCLUDED_ROUNDS, cause)

    def _exclude(self, place: Place, round_: int, until: int, cause: str) -> e.Excluded:
        """Bar a replica from rounds before `until`, and from the open round unless it trains or has contributed."""
        replica = self.replicas[place.replica]
        replica.excluded_until = until = max(until, replica.excluded_until)
        if self.open is not None and replica.round != self.open.number:
            self.open.taking_part.discard(replica.name)
        return e.Excluded(place.name, place.term, round_, until, cause)

    # ---- work ----

    def _asked(self, event: e.Asked, now: float) -> Iterator[e.Effect]:
        place = self.places[event.place]
        replica = self.replicas[place.replica]
        if not (yield from self._admits(place, event.term, now)):
            return
        place.presumed = False
        place.rests(now)
        if replica.round is not None and event.holds < replica.round and not self._is_whole(replica):
            # it was assigned this round already, and has not received the answer
            trained = event.trained if replica.trained in (None, event.trained) else 0
            yield e.Assign(place.name, place.term, replica.round, replica.epoch, trained=trained)
            return
        place.asked, place.trained = event.holds, event.trained
        if event.holds > self.last_round:
            yield e.Look(self.last_round + 1)
        yield from self._form(replica, now)

    def _form(self, replica: Replica, now: float) -> Iterator[e.Effect]:
        """Assign the open round to a replica, if all its members wait and it may join."""
        if self.rounds is None:
            return
        if self.open is None:
            yield from self._let_go(replica)
        elif not replica.waits or max(place.asked or 0 for place in replica.places) > self.last_round:
            return  # or another coordinator closed rounds that are unknown here
        elif self._may_join(replica.name, now):
            self.open.taking_part.add(replica.name)
            yield from self._assign(replica, self.open.number)

    def _let_go(self, replica: Replica) -> Iterator[e.Effect]:
        """Tell waiting members that the run is over, even if their replica is incomplete."""
        replica.round = None
        for place in replica.places:
            if place.held and place.asked is not None:
                place.asked = None
                yield e.Assign(place.name, place.term, 0, replica.epoch)

    def _may_join(self, replica: str, now: float) -> bool:
        """Return whether a replica may take part in the open round. A late one waits for the next, to stay in step."""
        assert self.open is not None
        if replica not in self.rules.due(self.open.number):
            return False
        if self._is_excluded(replica, self.open.number) and replica not in self.open.taking_part:
            return self.open.is_overdue or self._others_there(replica) < self._needed
        if replica in self.open.taking_part or replica in self.open.whole:
            return replica not in self.open.whole
        in_time = now - self.open.opened_at <= self.lateness.grace
        at_once = self.rules.joins_at_once or in_time or self.open.is_overdue  # those that took it may never contribute
        return at_once or self._others_there(replica) < self._needed

    def _others_there(self, replica: str) -> int:
        """Return how many other replicas have contributed to the open round or are waited for."""
        assert self.open is not None
        return len(self.open.whole) + len([one for one in self.waited_for if one != replica])

    def _is_excluded(self, replica: str, round_: int) -> bool:
        """Return whether a replica is barred, because its bits differed again or its links had malformed messages.

        Callers let it join if a quorum needs it.
        """
        return round_ < self.replicas[replica].excluded_until

    def _assign(self, replica: Replica, round_: int) -> Iterator[e.Effect]:
        replica.round = round_
        trained = {0 if place.differs else place.trained for place in replica.places}
        replica.trained = trained.pop() if len(trained) == 1 else 0
        for place in replica.places:
            place.asked = None
            yield e.Assign(place.name, place.term, round_, replica.epoch, place.differs, replica.trained)
            if place.differs:
                place.differs, place.healed_for = False, round_

    def _open_next(self, now: float, taking_part: set[str]) -> Iterator[e.Effect]:
        """Open the round after the last decided one, for these replicas and those that wait."""
        assert self.rounds is not None
        self.open, self._look_at = None, None
        if self.last_round < self.rounds:
            number = self.last_round + 1
            taking_part = {name for name in taking_part if not self._is_excluded(name, number)}
            unawaited = frozenset(name for name, one in self.replicas.items() if now < one.awaited_from)
            self.open = OpenRound(number, now, taking_part & self.rules.due(number), unawaited=unawaited)
            self._look_at = now + self.rules.limit
        else:
            self._finish_by = now + self.rules.grace.most
            yield e.Over(self.last_round, self.rounds, tuple(sorted(self._finishing)))
        for replica in self.replicas.values():
            yield from self._form(replica, now)

    def _left(self, event: e.Left, now: float) -> Iterator[e.Effect]:
        place = self.places[event.place]
        if self.holds(event.place, event.term):
            place.vacate()
        yield from ()

    # ---- rounds ----

    def _deposited(self, event: e.Deposited, now: float) -> Iterator[e.Effect]:
        place = self.places[event.place]
        replica = self.replicas[place.replica]
        if not (yield from self._admits(place, event.term, now)):
            return
        place.rests(now)
        if event.round <= self.last_round:
            yield from self._too_late(event, now)
            return
        if event.epoch == replica.epoch:
            yield from self._adopt(place, event.round, has_trained=True)
        found, expected = (event.round, event.epoch), (replica.round, replica.epoch)
        if self.open is None or event.round != self.open.number or found != expected:
            reason = f"found (round, generation) {found}, expected {expected}"
            yield e.Refused(place.name, reason, term=event.term, is_over=True)
            return
        self.open.taking_part.add(replica.name)
        complaint = self.open.deposit(replica.name, event.epoch, event.block, event.entry, event.steps, self.rules, now)
        if complaint is not None:
            yield e.Refused(place.name, complaint, term=event.term)

    def _too_late(self, event: e.Deposited, now: float) -> Iterator[e.Effect]:
        """Learn from the delay of a late contribution, once, and exclude it."""
        replica, late = self.places[event.place].replica, self._late.get(event.round)
        if late is not None and replica in late.replicas:
            late.replicas.discard(replica)
            if late.quorum_at is not None and replica not in late.unawaited:
                self.lateness.came(now - late.quorum_at)
            yield e.TooLate(replica, event.round)

    def _closes_at(self) -> float | None:
        """Return when the open round closes if nothing more comes; None while a quorum is missing."""
        assert self.open is not None
        closes = self.open.closes_at(bool(self.waited_for), self.lateness.grace, self.rules.limit)
        return closes if closes is None or self.open.retry_at is None else max(closes, self.open.retry_at)

    def _close_if_due(self, now: float) -> Iterator[e.Effect]:
        """Decide the open round, if it is due."""
        if self.open is None or self.open.writing:
            return
        closes = self._closes_at()
        if closes is not None and now >= closes:
            self.open.writing = True
            yield e.Write(self.open.record(self.rules))

    def _recorded(self, event: e.Recorded, now: float) -> Iterator[e.Effect]:
        record = event.record
        if self.open is None or record.round != self.open.number:
            return
        closed, self.last_round = self.open, record.round
        self._malformed.clear()
        self._learn(closed)
        yield e.Closed(record)
        counted = {one.replica for one in record.contributions}
        self._in_step = {replica: closed.deposits[replica].epoch for replica in closed.whole}
        self._in_step |= {one.replica: one.epoch for one in record.contributions}
        missing = closed.taking_part - self._in_step.keys()
        self._late[record.round] = Late(closed.quorum_at, set(missing), closed.unawaited)
        _keep_newest(self._late, REMEMBERED_LATE)
        yield from (e.Bounded(one.replica, record.round, one.scale) for one in record.contributions if one.scale != 1)
        yield from (e.Bounded(replica, record.round, 0.0) for replica in record.left_out)
        uncounted = closed.whole.keys() - counted - set(record.left_out)
        yield from (e.TooLate(replica, record.round) for replica in sorted(uncounted))
        yield from self._note_missed(closed, missing, now)
        self._finishing = (closed.taking_part | closed.whole.keys()).intersection(self.alive)
        ahead = {name for name, replica in self.replicas.items() if replica.round == record.round + 1}
        yield from self._open_next(now, {name for name in self.alive if name in self._in_step or name in ahead})
        is_behind = any(place.asked is not None and place.asked > self.last_round for place in self.places.values())
        if is_behind or not closed.writing:
            yield e.Look(record.round + 1)  # another coordinator decides rounds, and may be ahead

    def _learn(self, closed: OpenRound) -> None:
        """Learn from the delays of contributions that came after the quorum."""
        if closed.quorum_at is not None:
            for came in list(closed.whole.values())[closed.quorum :]:
                self.lateness.came(came - closed.quorum_at)

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
                yield e.NotAwaited(name, closed.number, replica.missed, UNAWAITED_FACTOR * waited)

    def _not_recorded(self, event: e.NotRecorded, now: float) -> Iterator[e.Effect]:
        if self.open is not None and event.round == self.open.number:
            self.open.writing, self.open.retry_at = False, now + RETRY_SECONDS
        yield from ()

    def _tell_of_quorum(self) -> Iterator[e.Effect]:
        """Report once that no round can close, and once that rounds can close again."""
        if self.open is None:
            return
        there, needed = self._there(self.open), self._needed
        if not self._paused and len(there) < needed:
            self._paused = True
            yield e.Paused(self.open.number, there, needed)
        elif self._paused and len(there) >= needed:
            self._paused = False
            yield e.WentOn(self.open.number)

    def _there(self, opened: OpenRound) -> tuple[str, ...]:
        """Return the replicas that a round can include."""
        alive = self.rules.due(opened.number).intersection(self.alive)
        return tuple(sorted(alive | opened.whole.keys()))

    @property
    def paused(self) -> e.Paused | None:
        """The number of present replicas, if they are too few to close the open round; else None."""
        if self.open is None or not self._paused:
            return None
        return e.Paused(self.open.number, self._there(self.open), self._needed)

    # ---- agreement ----

    def _confirmed(self, event: e.Confirmed, now: float) -> Iterator[e.Effect]:
        if self.holds(event.place, event.term):
            self._hashes.setdefault(event.round, {})[event.place] = event.hashes
            _keep_newest(self._hashes, REMEMBERED_HASHES)
            yield from self._compare(event.round)

    def _audit(self, event: e.Audited, now: float) -> Iterator[e.Effect]:
        self._audited[event.round] = event.hashes
        _keep_newest(self._audited, REMEMBERED_HASHES)
        yield from self._compare(event.round)

    def _compare(self, round_: int) -> Iterator[e.Effect]:
        """Compare the hashes that members confirmed with those of replay, each once."""
        right = self._audited.get(round_)
        if right is None:
            return
        for name, hashes in self._hashes.pop(round_, {}).items():
            wrong = [parameter for parameter in sorted(hashes) if hashes[parameter] != right.get(parameter)]
            if wrong:
                yield from self._found_wrong(self.places[name], round_, wrong[0])

    def _found_wrong(self, place: Place, round_: int, parameter: str) -> Iterator[e.Effect]:
        """Recover a member whose bits differ from the run log; bar its replica if they differ again.

        The log decides, however many members differ. Only if at least two replicas are the operator's own, and all of
        these differ, the machine that replays the log is in doubt. Replicas with members admitted by a ticket do not
        count for that.
        """
        differing = self._differing.setdefault(round_, set())
        _keep_newest(self._differing, REMEMBERED_HASHES)
        differing.add(place.replica)
        own = {name for name in {*self.alive, *differing} if not self.replicas[name].has_guests}
        if len(own) > 1 and own <= differing:
            yield e.Stop(
                f"after round {round_}, {', '.join(sorted(own))} hold a {parameter} that differs from the run log"
            )
            return
        if not place.differs:  # told once until it recovers: a member may confirm one round again and again
            place.differs = True
            yield e.Heal(place.name, place.term, round_, parameter)
        replica, healed = self.replicas[place.replica], place.healed_for
        if healed is not None and healed <= round_ < healed + WRONG_AGAIN_WITHIN and round_ >= replica.excluded_until:
            cause = f"after round {round_}, {place.name} again held parameters that differ from the run log"
            yield self._exclude(place, round_, round_ + 1 + EXCLUDED_ROUNDS, cause)

    # ---- time ----

    def _tick(self, event: e.Tick, now: float) -> Iterator[e.Effect]:
        for place in self.places.values():
            if place.held and now >= place.ends_at():
                yield from self._end_term(place, place.why_it_ends(), silent=True)
            if place.claim_at is not None and now >= place.claim_at:
                place.claim_at = None
                yield from self._let_in(place)
        if self._finish_by is not None and now >= self._finish_by:
            for place in self.places.values():
                if place.held and place.replica in self._finishing:
                    yield from self._end_term(
                        place, f"it did not leave within {self.rules.grace.most:.0f} s of the end"
                    )
        if self._look_at is not None and now >= self._look_at and self.open is not None and not self.open.writing:
            self._look_at = now + LOOK_SECONDS
            yield e.Look(self.open.number)

    def _woke(self, event: e.Woke, now: float) -> Iterator[e.Effect]:
        for place in self.places.values():
            place.silence.restart(now)
            place.stillness.restart(now)
        yield from ()


def _keep_newest(by_round: dict[int, Any], count: int) -> None:
    while len(by_round) > count:
        del by_round[min(by_round)]
