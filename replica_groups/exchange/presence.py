"""Presence of members: heartbeats, connections, and the ends of their processes."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping

from hetero_pp.messages import messages_pb2 as pb
from hetero_pp.rpc.exchange_service import Caller
from replica_groups.exchange.run_state import RunState
from replica_groups.rounds import events as e


class Presence:
    """Signs of life of a run's members. Thread-safe."""

    def __init__(self, state: RunState) -> None:
        self._state = state
        self._terms_before = {slot.name: slot.term for slot in state.coordinator.view().slots if slot.term}
        self.here: set[str] = set()
        """Members whose connection is open."""
        self._hearing = threading.Lock()
        """A lock of its own, because with the state's lock each frame of a member would wait for all other members."""
        self._heard: dict[str, float] = {}

    @property
    def last_heard(self) -> Mapping[str, float]:
        """Member -> time of its last sign of life, by the monotonic clock."""
        with self._hearing:
            return dict(self._heard)

    def heard(self, member: str, term: int | None = None) -> None:
        """Note a sign of life of a member, and the incarnation that it says it has.

        A member from before this exchange started shows that the run is under way: its slots are presumed held.
        """
        state = self._state
        if member not in state.roster.members:
            return
        with self._hearing:
            self._heard[member] = time.monotonic()
        if term is None or term != self._terms_before.get(member) or state.goes_on or state.has_begun:
            return
        with state.changed:
            is_current = term == state.coordinator.slot(member).term
            if is_current and not state.goes_on and not state.has_begun:
                state.goes_on = True
                state.decisions.presume()

    def beat(self, request: pb.BeatRequest, caller: Caller) -> pb.BeatReply:
        """Take a heartbeat, and return whether the member has to stop what it trains."""
        term, decisions = self._state.term(caller), self._state.decisions
        self.heard(caller.name)
        round_ = request.round if request.HasField("round") else None
        decisions.tell(e.Heard(caller.name, term, round_, request.epoch, request.progress, request.computes))
        decisions.require_alive()
        found = decisions.suspension(caller.name, term)
        reply = pb.BeatReply(is_over=not self._state.coordinator.holds(caller.name, term))
        if found is not None:
            reply.suspended, reply.cause = found.epoch, found.cause
        return reply

    def died(self, request: pb.DiedRequest, caller: Caller) -> pb.DiedReply:
        """End the incarnation of a member after its process has ended."""
        self.end(request.member, request.cause, request.term if request.HasField("term") else None)
        return pb.DiedReply()

    def end(self, member: str, cause: str, term: int | None) -> None:
        """End an incarnation of a member, by default the current one."""
        self._state.expect_member(member)
        self._state.decisions.tell(e.Died(member, term, cause))

    def stay(self, member: str) -> None:
        """Note that a member is there. Wait until it has left, or every member is through all its rounds."""
        self._state.expect_member(member)
        with self._state.changed:
            self.here.add(member)
            self._state.decisions.waits.wait_for(
                member, lambda: member not in self.here or self._state.coordinator.is_through
            )

    def left(self, member: str, node: str = "", term: int | None = None) -> None:
        """Note that the connection of a member, or of one of its nodes, has ended: it may be gone, or come back."""
        with self._state.changed:
            self.here.discard(member)
            self._state.decisions.wake(member)
        if member in self._state.roster.members:
            self._state.decisions.tell(e.Lost(member, self._state.term(Caller(member, term))))

    def wait_until_left(self, seconds: float) -> None:
        """Give members that are still there time to learn why the run has ended."""
        with self._state.changed:
            self._state.changed.wait_for(lambda: not self.here, seconds)
