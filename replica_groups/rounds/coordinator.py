"""The coordinator of a run: rounds, slots and failures as a pure state machine.

  effects = coordinator.step(event, now)

The coordinator uses no clock, thread, socket or file: `now` is an argument from a monotonic clock, and every action is
returned as an effect. The exchange runs it over gRPC and in process; the simulator runs it on a simulated clock. Its
state can be reconstructed: rounds from the records in the store, incarnations from the claims there, and presence from
heartbeats. So it may crash at any instruction, restart, or run twice at once.

The state is in protocol.state, and the transitions of slots are in protocol.slots. Here are those of rounds and hashes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cached_property
from typing import Any

from replica_groups.rounds import events as e
from replica_groups.rounds.rounds import OpenRound
from replica_groups.rounds.slot import Replica, Slot
from replica_groups.rounds.slot_transitions import BARRED_ROUNDS, RETRY_SECONDS, SlotTransitions
from replica_groups.rounds.state import Late

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

REMEMBERED_LATE = 16
"""Number of recent rounds whose late replicas are remembered, to learn from their delay."""


class Coordinator(SlotTransitions):
    """The state of a run, and its transitions."""

    @cached_property
    def _handlers(self) -> Mapping[type, Callable[[Any, float], Iterator[e.Effect]]]:
        """Transition of each type of event."""
        return {
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
            e.Condemned: self._condemned,
            e.Left: self._left,
            e.Tick: self._tick,
            e.Woke: self._woke,
        }

    def step(self, event: e.Event, now: float) -> list[e.Effect]:
        """Return the effects of an event at time `now`."""
        effects = list(self._handlers[type(event)](event, now))
        if (slot := self.slots.get(getattr(event, "slot", ""))) is not None:
            self._slots_due = min(self._slots_due, slot.due_at())
        if self.open is not None:
            if not self.open.is_overdue and now - self.open.opened_at >= self.rules.limit:
                self.open.becomes_overdue()
            self.open.count(self._needed, now)
        effects += self._close_if_due(now)
        effects += self._tell_of_quorum()
        return effects

    def deadline(self) -> float | None:
        """Return when to send Tick if no other event comes before; None if there is no deadline."""
        times = [] if math.isinf(self._slots_due) else [self._slots_due]
        if self.open is not None and not self.open.writing:
            times += [time for time in (self._closes_at(), self._look_at) if time is not None]
        if self._finish_by is not None and not self.is_through:
            times.append(self._finish_by)
        return min(times, default=None)

    def _began(self, event: e.Began, now: float) -> Iterator[e.Effect]:
        self.last_round, self.rounds = event.round, event.rounds
        self._finishing = set(self.alive)
        yield from self._open_next(now, set(self.alive))

    # ---- work ----

    def _asked(self, event: e.Asked, now: float) -> Iterator[e.Effect]:
        slot = self.slots[event.slot]
        replica = self.replicas[slot.replica]
        if not (yield from self._admits(slot, event.incarnation, now)):
            return
        slot.assumed_present = False
        slot.rests(now)
        if replica.round is not None and event.holds < replica.round and not self._is_whole(replica):
            # it was assigned this round already, and has not received the answer
            trained = event.trained if replica.trained in (None, event.trained) else 0
            yield e.Assign(slot.name, slot.incarnation, replica.round, replica.generation, trained=trained)
            return
        slot.asked, slot.trained = event.holds, event.trained
        if event.holds > self.last_round:
            yield e.Look(self.last_round + 1)
        yield from self._form(replica, now)

    def _form(self, replica: Replica, now: float) -> Iterator[e.Effect]:
        """Assign the open round to a replica, if all its members wait and it may join."""
        if self.rounds is None:
            return
        if self.open is None:
            yield from self._let_go(replica)
        elif not replica.waits or max(slot.asked or 0 for slot in replica.slots) > self.last_round:
            return  # or another coordinator closed rounds that are unknown here
        elif self._may_join(replica.name, now):
            self.open.join(replica.name, replica.alive)
            yield from self._assign(replica, self.open.number)

    def _let_go(self, replica: Replica) -> Iterator[e.Effect]:
        """Tell waiting members that the run is over, even if their replica is incomplete."""
        replica.round = None
        for slot in replica.slots:
            if slot.held and slot.asked is not None:
                slot.asked = None
                yield e.Assign(slot.name, slot.incarnation, 0, replica.generation)

    def _assign(self, replica: Replica, round_: int) -> Iterator[e.Effect]:
        replica.round = round_
        trained = {0 if slot.differs else slot.trained for slot in replica.slots}
        replica.trained = trained.pop() if len(trained) == 1 else 0
        for slot in replica.slots:
            slot.asked = None
            yield e.Assign(slot.name, slot.incarnation, round_, replica.generation, slot.differs, replica.trained)
            if slot.differs:
                slot.differs, slot.healed_for = False, round_

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
            yield e.EndRun(self.last_round, self.rounds, tuple(sorted(self._finishing)))
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
            yield from self._too_late(event, now)
            return
        if event.generation == replica.generation:
            yield from self._adopt(slot, event.round, has_trained=True)
        found, expected = (event.round, event.generation), (replica.round, replica.generation)
        if self.open is None or event.round != self.open.number or found != expected:
            reason = f"found (round, generation) {found}, expected {expected}"
            yield e.Reject(slot.name, reason, incarnation=event.incarnation, is_over=True)
            return
        self.open.join(replica.name, replica.alive)
        complaint = self.open.deposit(
            replica.name, event.generation, event.block, event.entry, event.steps, self.rules, now
        )
        if complaint is not None:
            yield e.Reject(slot.name, complaint, incarnation=event.incarnation)

    def _too_late(self, event: e.Deposited, now: float) -> Iterator[e.Effect]:
        """Exclude a late contribution, and add its delay to the learned lateness, at most once."""
        replica, late = self.slots[event.slot].replica, self._late.get(event.round)
        if late is not None and replica in late.replicas:
            late.replicas.discard(replica)
            if late.quorum_at is not None and replica not in late.unawaited:
                self.lateness.came(now - late.quorum_at)
            yield e.TooLate(replica, event.round)

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
        self._in_step = {replica: closed.deposits[replica].generation for replica in closed.whole}
        self._in_step |= {one.replica: one.generation for one in record.contributions}
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
        is_behind = any(slot.asked is not None and slot.asked > self.last_round for slot in self.slots.values())
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
        needed = self._needed
        if not self._paused and len(self.alive) >= needed:
            return  # as usual, which is found out without a look at every replica
        there = self._there(self.open)
        if not self._paused and len(there) < needed:
            self._paused = True
            yield e.Paused(self.open.number, there, needed)
        elif self._paused and len(there) >= needed:
            self._paused = False
            yield e.WentOn(self.open.number)

    # ---- agreement ----

    def _confirmed(self, event: e.Confirmed, now: float) -> Iterator[e.Effect]:
        if self.holds(event.slot, event.incarnation):
            self._hashes.setdefault(event.round, {})[event.slot] = event.hashes
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
        own = {name for name in {*self.alive, *differing} if not self.replicas[name].has_guests}
        if len(own) > 1 and own <= differing:
            yield e.Stop(
                f"after round {round_}, {', '.join(sorted(own))} hold a {parameter} that differs from the run log"
            )
            return
        if not slot.differs:  # told once until it recovers: a member may confirm one round again and again
            slot.differs = True
            yield e.Heal(slot.name, slot.incarnation, round_, parameter)
        replica, healed = self.replicas[slot.replica], slot.healed_for
        if healed is not None and healed <= round_ < healed + WRONG_AGAIN_WITHIN and round_ >= replica.barred_until:
            cause = f"after round {round_}, {slot.name} again held parameters that differ from the run log"
            yield self._bar(slot, round_, round_ + 1 + BARRED_ROUNDS, cause)

    def _condemned(self, event: e.Condemned, now: float) -> Iterator[e.Effect]:
        yield self._bar(self.replicas[event.replica].slots[0], event.round, event.until, event.cause)

    # ---- time ----

    def _tick(self, event: e.Tick, now: float) -> Iterator[e.Effect]:
        for slot in self.slots.values():
            if slot.held and now >= slot.ends_at():
                yield from self._expire(slot)
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

    def _woke(self, event: e.Woke, now: float) -> Iterator[e.Effect]:
        for slot in self.slots.values():
            slot.silence.restart(now)
            slot.stillness.restart(now)
            if slot.silent:
                slot.silent = False
                self._note_holder(slot)
        yield from ()


def _keep_newest(by_round: dict[int, Any], count: int) -> None:
    while len(by_round) > count:
        del by_round[min(by_round)]
