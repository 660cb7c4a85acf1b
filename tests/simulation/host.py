"""A coordinator's process: the coordinator, its own clock, the store and an auditor."""

from __future__ import annotations

from typing import TYPE_CHECKING

from simulation.stores import StoreFailed

from hetero_pp.messages import messages_pb2 as pb
from replica_groups.rounds import events as e
from replica_groups.rounds.coordinator import Coordinator

if TYPE_CHECKING:
    from simulation.member import Member
    from simulation.world import World

MEETING_SECONDS = 60.0
"""Seconds after which a coordinator that was started by hand begins, if no earlier member contacts it."""
OVERSLEPT = 3.0
"""Seconds of inactivity after which the coordinator is told that it was inactive."""


class Host:
    """Passes events to its coordinator and carries out the effects. All its lasting state is in the store."""

    def __init__(self, world: World, number: int, goes_on: bool, meets: bool = False) -> None:
        """Start a coordinator.

        With `meets` it was started by hand and does not know whether members are present, as in
        `begin_run`.
        """
        dice = world.dice
        self.world, self.number, self.dead, self.frozen_until = world, number, False, 0.0
        self.started_at = world.timeline.now
        self._offset, self._rate = dice.uniform(0.0, 1e5), dice.uniform(0.999, 1.001)
        self._callers: dict[str, Member] = {}
        self._holders: dict[tuple[str, int], Member] = {}
        self._inbox: list[tuple[Member | None, e.Event]] = []
        self._tick_at: float | None = None
        self._ticks = 0
        self._has_slept = False
        self.coordinator = Coordinator(world.rules, self.now, dict(world.store.incarnations), goes_on and not meets)
        self._incarnations_before, self._has_met, self._has_begun = dict(world.store.incarnations), False, False
        world.invariants.started(self)
        if meets:
            world.timeline.after(MEETING_SECONDS, self._begin_without)
        else:
            self._begin()

    def _begin_without(self) -> None:
        """Begin once no member of the previous coordinator is left, as a user would decide after a look."""
        if not self._has_begun and not self.dead:
            if any(
                one.incarnation and one.incarnation == self._incarnations_before.get(one.slot)
                for one in self.world.members
            ):
                self.world.timeline.after(MEETING_SECONDS, self._begin_without)
            else:
                self._begin()

    def _begin(self) -> None:
        if self.is_away and not self.dead:
            self.world.timeline.after(1.0, self._begin)
        elif not self._has_begun and not self.dead:
            self._has_begun = True
            self._tell(e.Began(self.world.store.last, self.world.rounds))

    def _meet(self, event: e.Event) -> bool:
        """Return whether a coordinator that has not begun handles this event.

        The coordinator begins soon once it has met an earlier member, or all members have joined.
        """
        if isinstance(event, e.OfMember | e.Claimed) and not self._has_met:
            slot = event.slot
            if event.incarnation == self._incarnations_before.get(slot) == self.coordinator.slots[slot].incarnation:
                self._has_met = True
                self.coordinator.assume_present(self.now)
        if self._has_met or all(one.held for one in self.coordinator.slots.values()):
            self.world.timeline.after(self.world.dice.uniform(0.0, 2.0), self._begin)
        return not isinstance(event, e.Deposited | e.Confirmed)  # these have to wait

    @property
    def now(self) -> float:
        """The time of the host's own clock. Each host's clock differs."""
        return self._offset + self._rate * self.world.timeline.now

    @property
    def is_away(self) -> bool:
        """Whether the host answers no messages."""
        return self.dead or self.world.timeline.now < self.frozen_until

    def receive(self, member: Member | None, event: e.Event) -> None:
        """Receive a message of a member or a launcher."""
        if self.dead:
            return
        if self.is_away:
            self._inbox.append((member, event))
            return
        if not self._has_begun and not self._meet(event):
            return
        if member is not None:
            self._callers[member.process] = member
            incarnation = getattr(event, "incarnation", None)
            if incarnation is not None:
                self._holders[member.slot, incarnation] = member
        self._tell(event)
        if isinstance(event, e.Heard) and member is not None and self.coordinator.slots[event.slot].differs:
            self.world.network.send(member.fire, member.told_that_it_differs, ())
        if isinstance(event, e.Deposited) and event.round <= self.coordinator.last_round and member is not None:
            self.world.network.send(member.fire, member.told_of_record, (self, event.round))

    def asked_for_record(self, member: Member) -> None:
        """Tell a member of its round's record, if there is one."""
        if not self.is_away and self._has_begun and member.round <= self.coordinator.last_round:
            self.world.network.send(member.fire, member.told_of_record, (self, member.round))

    def freeze(self, seconds: float) -> None:
        """Do nothing for so many seconds."""
        self.frozen_until = max(self.frozen_until, self.world.timeline.now + seconds)
        self._has_slept |= seconds > OVERSLEPT
        self.world.timeline.after(seconds, self._thaw)

    def _thaw(self) -> None:
        if self.is_away:
            return
        inbox, self._inbox = self._inbox, []
        is_first = self.world.dice.random() < 0.5
        if is_first:
            self._wake()
        for member, event in inbox:
            self.receive(member, event)
        if not is_first:
            self._wake()

    def _wake(self) -> None:
        has_slept, self._has_slept = self._has_slept, False
        self._tell(e.Woke() if has_slept else e.Tick())

    def jump(self, seconds: float) -> None:
        """Move the clock forward, as if the machine had been suspended for a moment."""
        self._offset += seconds
        self._has_slept = seconds > OVERSLEPT
        self._wake()

    def _tell(self, event: e.Event) -> None:
        world = self.world
        before = world.invariants.before(self, event)
        effects = self.coordinator.step(event, self.now)
        if world.tells is not None:
            world.tell(f"coordinator {self.number}: {event}" + "".join(f"\n{'':>14}-> {one}" for one in effects))
        world.invariants.after(self, event, effects, before)
        for effect in effects:
            self._do(effect)
        if effects or not isinstance(event, e.Heard | e.Asked | e.Confirmed):
            self._plan_tick()

    def _plan_tick(self) -> None:
        deadline = self.coordinator.deadline()
        if deadline is None:
            return
        seconds = max(0.0, deadline - self.now) / self._rate + 1e-3
        at = self.world.timeline.now + seconds
        if self._tick_at is None or at < self._tick_at - 1e-6:
            self._tick_at = at
            self._ticks += 1
            self.world.timeline.after(seconds, self._tick, self._ticks)

    def _tick(self, number: int) -> None:
        if number != self._ticks:
            return
        self._tick_at = None
        if not self.is_away:
            self._tell(e.Tick())

    # ---- carrying out effects ----

    def _do(self, effect: e.Effect) -> None:
        match effect:
            case e.Assign() | e.Suspend() | e.Fenced():
                self._answer(self._holders.get((effect.slot, effect.incarnation)), effect)
            case pb.MembershipEvent(what=pb.INCARNATION_OVER | pb.SILENT, slot=slot, incarnation=incarnation):
                self._answer(self._holders.get((slot, incarnation)), e.Fenced(slot, incarnation))
            case e.Reject(incarnation=None) | e.Welcome():
                assert effect.process is not None
                member = self._callers.get(effect.process)
                self._answer(member, effect)
                if isinstance(effect, e.Welcome) and member is not None:
                    self._holders[effect.slot, effect.incarnation] = member
            case e.Reject(slot=slot, incarnation=incarnation):
                assert incarnation is not None
                self._answer(self._holders.get((slot, incarnation)), effect)
            case e.Closed(record):
                for member in self.world.members:
                    if member.host is self:
                        self.world.network.send(member.fire, member.told_of_record, (self, record.round))
                self.world.timeline.after(self.world.dice.uniform(0.5, 5.0), self._audit, record.round)
            case e.ClaimSlot() | e.LookUp() | e.Write() | e.Look():
                self.world.timeline.after(self.world.dice.uniform(0.01, 0.5), self._ask_store, effect)

    def _answer(self, member: Member | None, effect: e.Effect) -> None:
        if member is not None:
            self.world.network.send(member.fire, member.told, (self, effect))

    def _ask_store(self, effect: e.Effect) -> None:
        if self.is_away:
            if not self.dead:
                self.world.timeline.after(self.frozen_until - self.world.timeline.now + 1e-3, self._ask_store, effect)
            return
        event = self._answer_of_store(effect)
        if event is not None:
            self._tell(event)

    def _answer_of_store(self, effect: e.Effect) -> e.Event | None:
        store, leases = self.world.store, self.world.leases
        try:
            if leases is not None:
                if not leases.holds(self):
                    raise StoreFailed
                if isinstance(effect, e.ClaimSlot | e.Write):
                    leases.wrote(self)
            match effect:
                case e.ClaimSlot(slot, incarnation, process):
                    return e.Claimed(slot, incarnation, process, store.claim(slot, incarnation))
                case e.LookUp(slot):
                    return e.Noted(slot, store.incarnations.get(slot, 0))
                case e.Write(record):
                    return e.Recorded(store.create(record))
                case e.Look(round_):
                    kept = store.read(round_)
                    return None if kept is None else e.Recorded(kept.record)
        except StoreFailed:
            if isinstance(effect, e.ClaimSlot):
                return e.NotClaimed(effect.slot)
            if isinstance(effect, e.Write):
                return e.NotRecorded(effect.record.round)
        return None

    def _audit(self, round_: int) -> None:
        if not self.is_away:
            self._tell(e.Audited(round_, {"theta": self.world.invariants.theta(round_)}))
