"""State of a run as the coordinator knows it, the questions that transitions ask, and frozen views for readers."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from replica_groups.rounds import events as e
from replica_groups.rounds.rounds import OpenRound
from replica_groups.rounds.rules import Rules
from replica_groups.rounds.slot import Lateness, Replica, Slot


class Late(NamedTuple):
    """Replicas that a round did not include."""

    quorum_at: float | None
    replicas: set[str]
    """Replicas that have not contributed since."""
    unawaited: frozenset[str]
    """Replicas that the round did not wait for, because they had missed several in a row."""


@dataclass(frozen=True)
class SlotView:
    """A slot and the round of its replica."""

    name: str
    replica: str
    incarnation: int
    """Highest claimed incarnation."""
    generation: int
    """Generation of its replica."""
    held: bool
    round: int
    """Round that its replica trains or has contributed to; 0: none."""
    computes: bool
    """Whether its holder is busy and waits for no other member, by its last heartbeat."""


@dataclass(frozen=True)
class OpenRoundView:
    """The undecided round."""

    number: int
    awaited: frozenset[str]
    """Replicas that take part, without the optional ones that are not complete."""
    deposited: Mapping[str, frozenset[str]]
    """Replica -> blocks that it has deposited."""


@dataclass(frozen=True)
class View:
    """State of a run at one moment."""

    last_round: int
    """The last decided round."""
    has_begun: bool
    is_over: bool
    """Whether every round is decided."""
    open: OpenRoundView | None
    """None before the run begins and after its last round."""
    paused: e.Paused | None
    """Present replicas, if they are too few to close the open round."""
    slots: tuple[SlotView, ...]
    replicas: int
    optional: frozenset[str]
    """Replicas without which the run begins."""


class State:
    """The state of a run. Readers outside the protocol use the frozen views and the public questions."""

    def __init__(
        self, rules: Rules, now: float = 0.0, incarnations: Mapping[str, int] | None = None, goes_on: bool = False
    ) -> None:
        """`incarnations`: the highest claimed incarnation of each slot.

        With `goes_on`, another coordinator ran a moment ago: the holders of these incarnations are presumed present.
        """
        self.rules = rules
        self.alive: set[str] = set()
        """The replicas whose slots are all held by members that are heard."""
        self._slots_due = math.inf
        """No slot is due before this time, at which it is found out anew. Events cost no look at every slot."""
        self.slots = {name: Slot(name, replica) for name, replica in rules.slots.items()}
        self.replicas = {
            name: Replica(name, [self.slots[slot] for slot in rules.slots_of(name)]) for name in rules.replicas
        }
        for name, incarnation in (incarnations or {}).items():
            self.slots[name].incarnation = incarnation
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

    def _note_holder(self, slot: Slot) -> None:
        """Note that a slot was taken or freed, or that its holder became silent or is heard again."""
        replica = self.replicas[slot.replica]
        (self.alive.add if replica.alive else self.alive.discard)(replica.name)
        if self.open is not None:
            self.open.is_heard(replica.name, replica.alive)
        self._slots_due = min(self._slots_due, slot.due_at())

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

    def view(self) -> View:
        """Return the state of the run at this moment, which later steps do not change."""
        return View(
            last_round=self.last_round,
            has_begun=self.rounds is not None,
            is_over=self.is_over,
            open=None if self.open is None else self._view_of(self.open),
            paused=self.paused,
            slots=tuple(map(self.slot, self.slots)),
            replicas=len(self.replicas),
            optional=frozenset(self.rules.optional),
        )

    def slot(self, name: str) -> SlotView:
        """Return the state of a slot at this moment."""
        slot = self.slots[name]
        replica, computes = self.replicas[slot.replica], slot.held and slot.computes
        is_held = slot.held and not slot.silent
        return SlotView(name, slot.replica, slot.incarnation, replica.generation, is_held, replica.round or 0, computes)

    def applies(self, process: str, slot: str) -> bool:
        """Return whether a process waits for a slot, or the slot is being claimed."""
        return self.slots[slot].applicant == process or self.slots[slot].claiming

    def opened_at(self, round_: int) -> float | None:
        """Return when a round was opened; None if it is not the open one."""
        return self.open.opened_at if self.open is not None and self.open.number == round_ else None

    def deposited(self, replica: str, generation: int, block: str) -> Hashable | None:
        """Return the entry of a blob that a generation of a replica has deposited for the open round."""
        own = None if self.open is None else self.open.deposits.get(replica)
        return None if own is None or own.generation != generation else own.blobs.get(block)

    def _view_of(self, opened: OpenRound) -> OpenRoundView:
        awaited = set(self.rules.replicas) - self.rules.optional.difference(self.alive)
        deposited = {replica: frozenset(own.blobs) for replica, own in opened.deposits.items()}
        return OpenRoundView(opened.number, frozenset(awaited), deposited)

    def _there(self, opened: OpenRound) -> tuple[str, ...]:
        """Return the replicas that a round can include."""
        return tuple(sorted({*self.alive, *opened.whole}))

    @property
    def paused(self) -> e.Paused | None:
        """The number of present replicas, if they are too few to close the open round; else None."""
        if self.open is None or not self._paused:
            return None
        return e.Paused(self.open.number, self._there(self.open), self._needed)

    # ---- questions of the transitions ----

    def _has_contributed(self, replica: Replica, round_: int, generation: int) -> bool:
        """Return whether the replica's contribution is complete.

        A member then waits for the record and evaluates, for which it needs no member that has finished.
        """
        if round_ == self.last_round and self._in_step.get(replica.name) == generation:
            return True
        return self.open is not None and round_ == self.open.number and self._is_whole(replica)

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
        return closes if closes is None or self.open.retry_at is None else max(closes, self.open.retry_at)
