"""Invariants that hold after every event, whatever fault happens.

1. Each round has one record, and records are consecutive. A record names only complete contributions whose digests are
   in the store.
2. A contribution is included at most once.
3. Included contributions and error feedback together are exactly what was trained.
4. A member that confirms theta has the bits that replay gives, or is told to recover.
5. Only one incarnation of a slot acts, and messages of older ones change nothing. It does not end without a reason.
6. With a quorum present, rounds close. No replica is waited for longer or shorter than the rules say, or left out.
7. The state of a coordinator is bounded.
8. The counts that a coordinator keeps from event to event equal those of a look at all slots and replicas.
9. Steps that a group has applied never fall within a round, and a record says how many steps each block has.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from simulation.member import ASKING
from simulation.stores import THETA, Path, Units, digests, included, replayed
from simulation.violation import Violation

from hetero_pp.messages import messages_pb2 as pb
from hetero_pp.messages.messages_pb2 import ContributionEntry, RoundRecord
from replica_groups.rounds import events as e
from replica_groups.rounds.coordinator import GAVE_UP, LATE_IN_A_ROW, REMEMBERED_HASHES, UNAWAITED_FACTOR, Coordinator

if TYPE_CHECKING:
    from simulation.host import Host
    from simulation.member import Contributed, Member
    from simulation.world import World

_OF_INCARNATIONS = (e.Heard, e.Asked, e.Deposited, e.Confirmed, e.Broken, e.Lost, e.Left, e.Died)
SLACK_SECONDS = 5.0
"""Seconds by which a coordinator may be late."""
HEALED_AFTER = 8
"""Rounds for which a member may hold wrong parameters, as its confirmations may be lost."""


@dataclass
class Watched:
    """Messages and answers of a coordinator, recorded beside it. Times are those of its own clock."""

    since: float
    number: int = 0
    """Number of the open round."""
    opened_at: float = 0.0
    deposits: dict[tuple[str, int], set[str]] = field(default_factory=dict)
    """Blocks that arrived for the open round, by (replica, generation)."""
    whole: set[str] = field(default_factory=set)
    """Replicas with a complete contribution to the open round."""
    quorum_at: float | None = None
    assigned: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    """Incarnation, round and generation that were assigned, by slot."""
    trains: dict[str, set[str]] = field(default_factory=dict)
    """Slots that were assigned the open round or report that they train it, by replica."""
    keeps: dict[str, pb.KeptSteps] = field(default_factory=dict)
    """The steps that a slot's newest request with some told of."""
    ended: dict[str, int] = field(default_factory=dict)
    """The newest incarnation that the coordinator has ended, by slot."""
    in_step: set[str] = field(default_factory=set)
    """Replicas for which the open round was opened."""
    heard: dict[str, float] = field(default_factory=dict)
    """Time of the last message, by slot."""
    unawaited_until: dict[str, float] = field(default_factory=dict)
    """Time by replica: rounds that open before it do not wait for the replica, which has missed several in a row."""
    finish_by: float | None = None
    """Time by which members must have left, once all rounds are decided."""
    hangs_until: dict[str, float] = field(default_factory=dict)
    """Time until which a process that hung may be ended for that, by slot."""


class Invariants:
    """Checks a history against the invariants. Raises Violation."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._thetas = [THETA]
        self._counted: dict[str, dict[tuple[int, int], int]] = {}
        """The round that included a (position, unit), by slot."""
        self._first: dict[int, RoundRecord] = {}
        self._watched: dict[Host, Watched] = {}

    def theta(self, round_: int) -> bytes:
        """Return theta after a round, as replay computes it."""
        return self._thetas[round_]

    # ---- records, contributions, parameters: 1 to 4 ----

    def decided(self, record: RoundRecord) -> None:
        """Check a record that was added to the store."""
        rules, last = self._world.rules, len(self._thetas) - 1
        if record.round in self._first:
            raise Violation(1, f"round {record.round} has another record than before")
        if record.round != last + 1:
            raise Violation(1, f"round {record.round} was decided after round {last}")
        names = [one.replica for one in record.contributions]
        if names != sorted(set(names)):
            raise Violation(2, f"round {record.round} counts {names}")
        if len(names) < (least := rules.needed):
            raise Violation(6, f"round {record.round} counts {names}, fewer than {least}")
        for one in record.contributions:
            self._require_whole(record.round, one)
        if set(names) & set(record.late):
            raise Violation(1, f"round {record.round} names {names} as counted and {record.late} as late")
        self._first[record.round] = record
        self._thetas.append(replayed(self._thetas[-1], self._world.store.records[record.round]))

    def _require_whole(self, round_: int, one: ContributionEntry) -> None:
        blobs = {
            block: self._world.store.blobs.get(Path(round_, one.replica, one.generation, block, own))
            for block, own in digests(one).items()
        }
        if blobs.keys() != self._world.rules.blocks_of(one.replica, round_):
            raise Violation(1, f"round {round_} counts {sorted(blobs)} of {one.replica}")
        for block, blob in blobs.items():
            if blob is None or blob.digest != digests(one)[block]:
                raise Violation(1, f"round {round_} names a blob {block} of {one.replica} that is not in the store")
        if (steps := [restart.step for restart in one.restarts]) != sorted(steps):
            raise Violation(9, f"round {round_} names restarts of {one.replica} at steps {steps}")
        for entry in one.blobs:
            blob = blobs[entry.block]
            assert blob is not None
            if (entry.steps or one.steps) != blob.steps:
                raise Violation(9, f"round {round_} names {entry.steps} steps of {entry.block}, which has {blob.steps}")
        trainings = {blob.training for blob in blobs.values() if blob is not None}
        if len(trainings) != 1:
            raise Violation(1, f"round {round_} counts parts of {len(trainings)} trainings of {one.replica} as one")
        for blob in blobs.values():
            assert blob is not None
            self._count(round_, blob.slot, blob.sent)

    def _count(self, round_: int, slot: str, sent: dict[int, Units]) -> None:
        counted = self._counted.setdefault(slot, {})
        for position, units in sent.items():
            for unit in units:
                if (position, unit) in counted:
                    before = counted[position, unit]
                    raise Violation(2, f"{slot}: what was counted in round {before} is counted in {round_} again")
                counted[position, unit] = round_

    def settled(self, member: Member, record: RoundRecord, before: Sequence[Units], own: Contributed | None) -> None:
        """Check a member that has applied a record. `before` is its error feedback together with what it had sent."""
        named = included(record, member.replica)
        counted = self._counted.get(member.slot, {})
        lost_to: set[int] = set()
        if named is not None and (own is None or any(digests(named)[b] != own.blobs[b].digest for b in own.blobs)):
            for block in member.blocks_in(record.round):  # another process has continued from the slot's state
                path = Path(record.round, member.replica, named.generation, block, digests(named)[block])
                lost_to |= self._world.store.blobs[path].sent.keys()
        for position, units in enumerate(member.owed):
            if not units <= before[position]:
                raise Violation(3, f"{member.process} has lost error feedback on the way to round {record.round}")
        member.owed = list(member.error)
        for position, units in enumerate(before):
            for unit in units - member.error[position]:
                if (position, unit) not in counted and position not in lost_to:
                    raise Violation(3, f"{member.process} has lost what it produced, at round {record.round}")
        if not member.is_corrupt and member.theta != self._thetas[record.round]:
            raise Violation(4, f"{member.process} holds other bits after round {record.round} than replay gives")

    def confirms(self, member: Member) -> None:
        """Check a member that confirms its parameters."""
        member.wrong_rounds += member.is_corrupt
        if member.wrong_rounds > HEALED_AFTER:
            raise Violation(4, f"{member.process} has said {member.wrong_rounds} times that it holds other bits")

    # ---- what a coordinator does: 5 to 7 ----

    def started(self, host: Host) -> None:
        """Note that a coordinator begins."""
        self._watched[host] = Watched(host.now)

    def ended(self, host: Host) -> None:
        """Note that a coordinator has ended."""
        del self._watched[host]

    def before(self, host: Host, event: e.Event) -> Any:
        """Return the state before an event that `after` compares with."""
        coordinator, watched = host.coordinator, self._watched[host]
        if not isinstance(event, _OF_INCARNATIONS):
            if isinstance(event, e.Recorded) and self._first.get(event.record.round) != event.record:
                found = f"a coordinator was given a record of round {event.record.round} that is not the first"
                raise Violation(1, found)
            if isinstance(event, e.Woke):
                watched.since = host.now
            return None
        slot = coordinator.slots[event.slot]
        acts = slot.held and event.incarnation in (None, slot.incarnation)
        if acts and isinstance(event, e.Heard | e.Asked | e.Deposited | e.Broken):
            watched.heard[event.slot] = host.now
        if acts and isinstance(event, e.Asked) and event.kept is not None:
            watched.keeps[event.slot] = event.kept
        if acts and isinstance(event, e.Heard):
            for one in self._world.members:
                if one.training is not None and one.slot == event.slot and one.training.is_stuck:
                    watched.hangs_until[event.slot] = host.now + coordinator.rules.hang.most
            self._note_training(watched, event, coordinator)
        if isinstance(event, e.Deposited):
            acts = acts and event.generation == coordinator.replicas[slot.replica].generation
        return None if acts else _acted_on(coordinator)

    def _note_training(self, watched: Watched, event: e.Heard, coordinator: Coordinator) -> None:
        replica = coordinator.rules.slots[event.slot]
        if event.round == watched.number and event.generation == coordinator.replicas[replica].generation:
            watched.trains.setdefault(replica, set()).add(event.slot)

    def after(self, host: Host, event: e.Event, effects: Sequence[e.Effect], before: Any) -> None:
        """Check the effects of an event that a coordinator has handled."""
        coordinator, watched = host.coordinator, self._watched[host]
        if before is not None and before != _acted_on(coordinator):
            raise Violation(5, f"{event} was acted on, though its incarnation or its generation is over")
        if isinstance(event, e.Deposited) and before is None:
            self._note_deposit(watched, event, effects, host)
        if coordinator.open is not None and coordinator.open.number == watched.number and watched.quorum_at is None:
            is_overdue = host.now - watched.opened_at >= coordinator.rules.limit
            there = {
                one
                for one in coordinator.open.taking_part
                if coordinator.replicas[one].alive and not (coordinator.replicas[one].missed or is_overdue)
            }
            there |= watched.whole
            needed = coordinator.rules.needed_of(there)
            watched.quorum_at = host.now if len(watched.whole) >= needed else None
        if isinstance(event, e.Left):
            watched.ended[event.slot] = max(event.incarnation, watched.ended.get(event.slot, 0))
        for effect in effects:
            self._look_at(host, watched, event, effect)
        if coordinator.open is not None and coordinator.open.number != watched.number:
            self._opened(watched, host)
        self._require_order(host, watched)
        if effects or not isinstance(event, e.Heard):  # wrong counts stay, and most events are heartbeats
            _require_counts(coordinator)

    def _opened(self, watched: Watched, host: Host) -> None:
        assert host.coordinator.open is not None
        watched.number, watched.opened_at = host.coordinator.open.number, host.now
        watched.deposits, watched.whole, watched.quorum_at = {}, set(), None
        watched.trains, watched.in_step = {}, set(host.coordinator.open.taking_part)
        for slot, (_, round_, _) in watched.assigned.items():
            if round_ == watched.number:
                watched.trains.setdefault(host.coordinator.rules.slots[slot], set()).add(slot)

    def _note_deposit(self, watched: Watched, event: e.Deposited, effects: Sequence[e.Effect], host: Host) -> None:
        if event.round != watched.number or any(isinstance(one, e.Reject | e.Fenced) for one in effects):
            return
        rules = host.coordinator.rules
        watched.trains.setdefault(rules.slots[event.slot], set()).add(event.slot)
        watched.deposits.setdefault((rules.slots[event.slot], event.generation), set()).add(event.block)
        whole = {one for (one, _), blocks in watched.deposits.items() if blocks >= rules.blocks_of(one, event.round)}
        watched.whole = whole

    def _look_at(self, host: Host, watched: Watched, event: e.Event, effect: e.Effect) -> None:
        slots = host.coordinator.rules.slots
        match effect:
            case e.Write(record):
                self._require_waited(host, watched, record)
            case e.Assign():
                self._require_phase(host, watched, event, effect)
                watched.assigned[effect.slot] = effect.incarnation, effect.round, effect.generation
                if effect.round == watched.number:
                    watched.trains.setdefault(slots[effect.slot], set()).add(effect.slot)
            case e.Suspend(slot, incarnation, generation) if (
                watched.assigned.get(slot, (0, 0, 0))[2] > generation
                and host.coordinator.replicas[slots[slot]].round is not None
                and host.coordinator.replicas[slots[slot]].trained is not None  # otherwise another one assigned it
            ):
                raise Violation(
                    5, f"incarnation {incarnation} of {slot} is to return from generation {generation}, as it has"
                )
            case e.Suspend(slot) if not isinstance(event, e.Heard):  # otherwise the answer is a repetition
                self._out_of_step(watched, slots[slot])
            case e.Fenced(slot, incarnation):
                self._note_end(host, watched, event, slot, incarnation, "")
            case pb.MembershipEvent(what=pb.INCARNATION_OVER | pb.SILENT, slot=slot, incarnation=incarnation):
                self._note_end(host, watched, event, slot, incarnation, effect.cause)
                self._out_of_step(watched, slots[slot])
            case e.Closed(record):
                for one in record.contributions:
                    watched.unawaited_until.pop(one.replica, None)
            case pb.MembershipEvent(what=pb.NOT_AWAITED, replica=name):
                replica = host.coordinator.replicas[name]
                self._require_missed(name, effect.round, replica.missed)
                since_quorum = 0.0 if watched.quorum_at is None else host.now - watched.quorum_at
                longest = host.now + UNAWAITED_FACTOR * max(since_quorum, host.coordinator.lateness.grace)
                watched.unawaited_until[name] = min(replica.awaited_from, longest)
            case pb.Over():
                watched.finish_by = host.now + host.coordinator.rules.grace.most
            case pb.MembershipEvent(what=pb.HEALED, slot=slot) if slot not in self._world.corrupted:
                raise Violation(4, f"{slot} holds the bits of replay, and is told that it does not")
            case pb.MembershipEvent(what=pb.EXCLUDED, slot=slot, replica=name):
                if not {slot, name} & (self._world.corrupted | self._world.condemned):
                    raise Violation(4, f"{slot} holds the bits of replay, and is told that it does not")
                self._world.barred_until[name] = host.coordinator.replicas[name].barred_until
            case e.Stop(cause):
                raise Violation(4, f"the run ends: {cause}")

    def _require_missed(self, replica: str, round_: int, missed: int) -> None:
        """Require that a replica which is not waited for is in none of the last records."""
        rounds = range(max(1, round_ - LATE_IN_A_ROW + 1), round_ + 1)
        counted = [one for one in rounds if included(self._first[one], replica)]
        if missed < LATE_IN_A_ROW or counted:
            raise Violation(6, f"{replica} is not waited for, and was counted in rounds {counted}")

    def _out_of_step(self, watched: Watched, replica: str) -> None:
        watched.trains.pop(replica, None)
        watched.in_step.discard(replica)

    def _require_waited(self, host: Host, watched: Watched, record: RoundRecord) -> None:
        """Require that the coordinator waits for each replica that is present and trains."""
        rules, coordinator = host.coordinator.rules, host.coordinator
        if record.round != watched.number or watched.quorum_at is None:
            raise Violation(6, f"the record of round {record.round} is written without a quorum")
        if host.now >= min(watched.quorum_at + rules.grace.least, watched.opened_at + rules.limit) - 1e-6:
            return
        assert coordinator.open is not None
        reforming = {name for name, until in coordinator.open.reforming.items() if until > host.now}
        if reforming := reforming - coordinator.open.unawaited:
            raise Violation(6, f"round {record.round} does not wait for {sorted(reforming)}, which may resume")
        for replica, slots in watched.trains.items():
            if watched.opened_at < watched.unawaited_until.get(replica, 0.0):
                continue
            is_there = coordinator.replicas[replica].alive
            if is_there and len(slots) == len(self._world.slots_of[replica]) and included(record, replica) is None:
                raise Violation(6, f"round {record.round} does not wait for {replica}, which is there and trains")

    def _require_phase(self, host: Host, watched: Watched, event: e.Event, effect: e.Assign) -> None:
        """Require that a member that is assigned a round may train it, and is in step with the others."""
        coordinator, rules = host.coordinator, host.coordinator.rules
        replica = coordinator.replicas[rules.slots[effect.slot]]
        if effect.round == 0:
            if self._world.store.last < self._world.rounds:
                raise Violation(6, f"{effect.slot} is told that the run is over, and it is not")
            return
        if effect.round > self._world.store.last + 1:
            raise Violation(1, f"{effect.slot} is told to train round {effect.round}, which cannot be open")
        self._require_steps(host, watched, effect)
        if effect.generation != sum(coordinator.slots[slot].incarnation for slot in self._world.slots_of[replica.name]):
            raise Violation(
                5, f"{effect.slot} is told to train in generation {effect.generation}, which is not its replica's"
            )
        if watched.assigned.get(effect.slot) == (effect.incarnation, effect.round, effect.generation):
            return
        if coordinator.open is None or effect.round != coordinator.open.number:
            return
        if replica.name in coordinator.open.whole:
            raise Violation(6, f"{replica.name} is assigned round {effect.round} after it has contributed to it")
        is_late = effect.round == watched.number and host.now - watched.opened_at > rules.grace.most + 1e-6
        is_in_step = replica.name in watched.in_step or replica.name in watched.trains
        is_overdue = host.now - watched.opened_at >= rules.limit
        if not is_late or is_overdue or rules.joins_at_once or is_in_step or not isinstance(event, e.Asked):
            return
        if effect.resumption is not None:
            return
        others = set(coordinator.open.whole) | {
            name
            for name, slots in watched.trains.items()
            if len(slots) == len(self._world.slots_of[name])
            and coordinator.replicas[name].alive
            and watched.opened_at >= watched.unawaited_until.get(name, 0.0)
            and effect.round >= self._world.barred_until.get(name, 0)
        }
        if len(others - {replica.name}) >= rules.needed_of(others - {replica.name}):
            raise Violation(6, f"{replica.name} begins round {effect.round} long after the others")

    def _require_steps(self, host: Host, watched: Watched, effect: e.Assign) -> None:
        """Require that a group resumes with all steps that its waiting members keep, as far as they could tell of them.

        An earlier request of a member may arrive late, and before the one that tells what it keeps.
        """
        replica = host.coordinator.rules.slots[effect.slot]
        there = {one.slot: one for one in self._world.members if one.replica == replica and one.phase == ASKING}
        if not host.coordinator.rules.resumes or there.keys() != set(self._world.slots_of[replica]):
            return
        slots = host.coordinator.slots
        told = [one for one in there.values() if one.kept is not None and watched.keeps.get(one.slot) == one.kept]
        keep = [one for one in told if slots[one.slot].healed_for != effect.round]
        kept = {one.slot: one.kept for one in keep if one.kept and one.kept.round == effect.round}
        newest = max((one.generation for one in kept.values()), default=0)
        applied = max((one.applied for one in kept.values() if one.generation == newest), default=0)
        step = 0 if effect.resumption is None else effect.resumption.step
        if step < applied:
            raise Violation(9, f"{replica} has applied {applied} steps of round {effect.round}, and begins at {step}")

    def _note_end(self, host: Host, watched: Watched, event: e.Event, slot: str, incarnation: int, cause: str) -> None:
        """Note the end of an incarnation, or with an empty cause an answer to its holder that it has ended.

        Require a reason for the end: a death, a message of its holder, a new incarnation or silence.
        """
        if watched.assigned.get(slot, (0,))[0] == incarnation:
            del watched.assigned[slot]
        is_new = watched.ended.get(slot, 0) < incarnation == self._world.store.incarnations.get(slot)
        watched.ended[slot] = max(incarnation, watched.ended.get(slot, 0))
        if not is_new or (isinstance(event, e.Died | e.Broken | e.Noted) and event.slot == slot) or cause == GAVE_UP:
            return
        if not cause:
            raise Violation(5, f"incarnation {incarnation} of {slot} is refused, and has not ended")
        if watched.finish_by is not None and host.now >= watched.finish_by:
            return
        silent = host.now - max(watched.heard.get(slot, watched.since), watched.since)
        hangs = host.now < watched.hangs_until.get(slot, 0.0)
        if silent < host.coordinator.rules.lease.least - 1e-6 and not hangs:
            raise Violation(5, f"incarnation {incarnation} of {slot} ends after {silent:.1f} s: {cause}")

    def _require_order(self, host: Host, watched: Watched) -> None:
        coordinator, rules = host.coordinator, host.coordinator.rules
        open_ = coordinator.open
        if open_ is not None:
            if open_.number != coordinator.last_round + 1 or coordinator.last_round > self._world.store.last:
                raise Violation(1, f"round {open_.number} is open after {self._world.store.last} are decided")
            overdue = watched.quorum_at is not None and host.now > (
                max(watched.quorum_at + rules.grace.most, watched.since, (open_.retry_at or 0.0)) + SLACK_SECONDS
            )
            if overdue and not open_.writing:
                raise Violation(6, f"round {open_.number} has a quorum, and does not close")
            if len(open_.deposits) > len(coordinator.replicas):
                raise Violation(7, "deposits of an open round grow")
        kept = len(coordinator._hashes), len(coordinator._audited), len(coordinator._differing)
        if max(kept) > REMEMBERED_HASHES:
            raise Violation(7, "what is remembered of hashes grows")


def _require_counts(coordinator: Coordinator) -> None:
    """Compare what a coordinator keeps with a look at everything."""
    slots, replicas, opened = coordinator.slots.values(), coordinator.replicas, coordinator.open
    alive = {name for name, one in replicas.items() if one.alive}
    _require_equal("alive", coordinator.alive, alive)
    if opened is not None:
        _require_equal("missing", opened.missing, opened.taking_part - opened.whole.keys())
        optional = coordinator.rules.optional
        counting = optional & opened.whole.keys() if optional else set()
        if optional and not opened.is_overdue:
            counting |= {name for name in optional & opened.taking_part & alive if not replicas[name].missed}
        _require_equal("counting", opened.counting, counting)
    if coordinator.is_over:
        held = {slot.replica for slot in slots if slot.held}
        _require_equal("finishing", coordinator._finishing, coordinator._finishing & held)
    until = coordinator._slots_due
    for slot in slots:
        if (slot.held or slot.claim_at is not None) and until > (due := slot.due_at()):
            raise Violation(8, f"a coordinator sleeps until {until}, and a slot is due at {due}")


def _require_equal(name: str, kept: AbstractSet[str], found: AbstractSet[str]) -> None:
    if kept != found:
        raise Violation(8, f"a coordinator keeps {sorted(kept)} as {name}, and they are {sorted(found)}")


def _acted_on(coordinator: Coordinator) -> Any:
    """Return the state of a coordinator that a refused message must not change."""
    open_ = coordinator.open
    return (
        [(slot.incarnation, slot.held, slot.asked, slot.progress) for slot in coordinator.slots.values()],
        [replica.round for replica in coordinator.replicas.values()],
        None if open_ is None else (open_.number, sorted(open_.taking_part), sorted(open_.whole)),
        None if open_ is None else {name: (one.generation, sorted(one.blobs)) for name, one in open_.deposits.items()},
    )
