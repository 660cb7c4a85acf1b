"""Assignments of work to members: which of two neighbours dials the other, and which neighbour a member blames."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import NamedTuple

from hetero_pp.config.lines import RELAYED, is_loopback
from hetero_pp.messages import messages_pb2 as pb
from hetero_pp.messages.refusals import Kind
from hetero_pp.rpc.exchange_service import Caller, HeldBy
from replica_groups.exchange.commitments import Commitments
from replica_groups.exchange.exchange_state import ExchangeState
from replica_groups.exchange.showing import Showing
from replica_groups.rounds import events as e


class Listens(NamedTuple):
    """Where a stage says that it listens."""

    address: str = ""
    """HOST:PORT; empty or `relay`: nowhere."""
    is_reached: bool | None = None
    """Whether the exchange has reached the stage there; None: not known."""

    @property
    def hope(self) -> int:
        """Likelihood that the stage is reached: higher is better."""
        if self.address in ("", RELAYED):
            return 0
        if is_loopback(self.address):  # a stage on the same machine also reaches its other addresses
            return 1
        return {False: 2, None: 3, True: 4}[self.is_reached]


def is_before_dialled(before: Listens, after: Listens) -> bool:
    """Return whether the stage before is dialled by the one after, because it is more likely to be reached.

    In doubt the stage after is dialled. A stage that the exchange does not reach may still be reached by a neighbour
    beside it.
    """
    return before.hope > after.hope


class Addresses:
    """Where the members of a run listen. Thread-safe, except `note`."""

    def __init__(self, state: ExchangeState) -> None:
        self._state = state
        self._addresses: dict[str, str] = {}
        self._dialled: dict[str, Listens] = {}
        """Result of dialling each member, which may not be where the member listens by the time it joins."""

    @property
    def known(self) -> Set[str]:
        """Members that have joined this exchange."""
        return self._addresses.keys()

    def note(self, member: str, address: str) -> None:
        """Note where a member listens. The caller holds the lock of the run's state."""
        self._addresses[member] = address

    def dialled(self, member: str, address: str, is_reached: bool | None) -> None:
        """Note whether a member was reached at an address; None: it was not dialled."""
        with self._state.changed:
            self._dialled[member] = Listens(address, is_reached)

    def of(self, member: str) -> str:
        """Return where the holder of a slot listens; empty if the slot is free or the holder does not listen."""
        return self._addresses.get(member, "") if self._state.coordinator.slot(member).held else ""

    def to_dial(self, member: str) -> tuple[str, str]:
        """Return where a stage dials the one before it and the one after.

        An address is empty if that neighbour dials, or does not exist.
        """
        before, after = self._state.neighbours(member)
        with self._state.changed:
            own = self._listens(member)
            up, down = (self._listens(one) if one else Listens() for one in (before, after))
            upstream = up.address if is_before_dialled(up, own) else ""
            return upstream, "" if is_before_dialled(own, down) else down.address

    def _listens(self, member: str) -> Listens:
        address, dialled = self.of(member), self._dialled.get(member)
        return dialled if dialled is not None and dialled.address == address else Listens(address)


class _Formed(NamedTuple):
    """A group as one of its members was told of it."""

    generation: int
    members: Mapping[str, HeldBy]
    """By slot: the member that was told, and its neighbours as far as they were known."""


class Assignments:
    """Assigns work to the members of one run. Thread-safe."""

    def __init__(self, state: ExchangeState, addresses: Addresses) -> None:
        self._state, self._addresses = state, addresses
        self.showing: Showing | None = None
        self.commitments: Commitments | None = None
        """Draws rounds that are computed again, and knows members' states, if the run is audited so."""
        self._holders: dict[str, HeldBy] = {}
        """By slot, the member that joined or asked for work last."""
        self._formed: dict[str, _Formed] = {}
        """By member, the group of its newest assignment, until the member blames a neighbour."""

    def assign(self, request: pb.AssignRequest, caller: Caller) -> pb.AssignReply:
        """Return a member's next task, once all members of its replica ask for one."""
        member, state = caller.name, self._state
        incarnation, runner = state.incarnation(caller), state.runner
        own = HeldBy(member, caller.holder, incarnation)
        with state.changed:
            if state.coordinator.holds(member, incarnation):
                self._addresses.note(member, request.address)
                self._holders[member] = own
        runner.asks(member, incarnation)
        runner.tell(e.Asked(member, incarnation, request.holds, request.trained))
        work = runner.wait_for_work(member, incarnation, caller.is_asked)
        shows = None if self.showing is None else self.showing.asks(member, caller.holder, incarnation)
        upstream, downstream = self._addresses.to_dial(member)
        with state.changed:
            before, after = map(self.held_by, state.neighbours(member))
            self._formed[member] = _Formed(work.generation, {one.slot: one for one in (own, before, after) if one})
            return pb.AssignReply(
                round=work.round,
                generation=work.generation,
                downstream=downstream,
                heals=work.heal,
                is_first=work.round == state.begun_after + 1,
                elapsed=runner.elapsed(work.round),
                upstream=upstream,
                trained=work.trained,
                upstream_holder=None if before is None else before.holder,
                downstream_holder=None if after is None else after.holder,
                changed=state.changes.mark,
                shows=shows,
                committed=b"" if self.commitments is None else self.commitments.expected(member),
            )

    def broken(self, request: pb.BrokenRequest, caller: Caller) -> pb.Nothing:
        """Note that a member cannot reach a neighbour."""
        self.link_broke(request, caller)
        return pb.Nothing()

    def link_broke(self, request: pb.BrokenRequest, caller: Caller) -> Sequence[HeldBy]:
        """Note that a member cannot reach a neighbour.

        Return the two ends of a link with a malformed message; empty if none is to be blamed. Nobody can know which of
        the two ends lies, so both answer for it. A member blames once in each generation.
        """
        incarnation = self._state.incarnation(caller)
        ends = self._ends(caller.name, request.generation, incarnation, request.blames) if request.blames else ()
        trusted = request.blames if ends and not any(end.holder for end in ends) else ""
        self._state.runner.tell(e.Broken(caller.name, incarnation, request.generation, request.cause, trusted))
        return ends

    def _ends(self, member: str, generation: int, incarnation: int, blamed: str) -> Sequence[HeldBy]:
        """Return the ends of the link between a member and one that it blames, as its group was formed."""
        if blamed not in self._state.neighbours(member):
            raise self._state.refused(member, f"blames {blamed}, which is not a neighbouring stage", Kind.FORBIDDEN)
        with self._state.changed:
            formed = self._formed.get(member)
            if formed is None or formed.generation != generation or formed.members[member].incarnation != incarnation:
                return ()
            del self._formed[member]
        return [formed.members[slot] for slot in (member, blamed) if slot in formed.members]

    def neighbouring_guests(self, member: str) -> Sequence[HeldBy]:
        """Return the other members of a member's group that have a ticket."""
        with self._state.changed:
            found = [self.held_by(slot) for slot in self._state.group_of(member) if slot != member]
        return [one for one in found if one is not None and one.holder]

    def joined(self, caller: Caller, incarnation: int) -> None:
        """Note the holder of a slot, before it asks for work."""
        with self._state.changed:
            if self._state.coordinator.holds(caller.name, incarnation):
                self._holders[caller.name] = HeldBy(caller.name, caller.holder, incarnation)

    def held_by(self, slot: str) -> HeldBy | None:
        """Return the holder of a slot, if it has joined this exchange or asked it for work."""
        found = self._holders.get(slot)
        return found if found is not None and self._state.coordinator.holds(slot, found.incarnation) else None
