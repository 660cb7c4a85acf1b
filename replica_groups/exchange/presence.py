"""Presence of members: heartbeats, connections, and the ends of their processes."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping

from hetero_pp.messages import messages_pb2 as pb
from hetero_pp.rpc.exchange_service import Caller
from replica_groups.exchange.exchange_state import ExchangeState
from replica_groups.rounds import events as e


class Presence:
    """Signs of life of a run's members. Thread-safe."""

    def __init__(self, state: ExchangeState) -> None:
        self._state = state
        self._incarnations_before = {
            slot.name: slot.incarnation for slot in state.coordinator.view().slots if slot.incarnation
        }
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

    def heard(self, member: str, incarnation: int | None = None) -> None:
        """Note a sign of life of a member, and the incarnation that it says it has.

        A member from before this exchange started shows that the run is under way: its slots are presumed held.
        """
        state = self._state
        if member not in state.roster.members:
            return
        with self._hearing:
            self._heard[member] = time.monotonic()
        if (
            incarnation is None
            or incarnation != self._incarnations_before.get(member)
            or state.goes_on
            or state.has_begun
        ):
            return
        with state.changed:
            is_current = incarnation == state.coordinator.slot(member).incarnation
            if is_current and not state.goes_on and not state.has_begun:
                state.goes_on = True
                state.runner.assume_present()

    def heartbeat(self, request: pb.HeartbeatRequest, caller: Caller) -> pb.HeartbeatReply:
        """Take a heartbeat, and return whether the member has to stop what it trains."""
        incarnation, runner = self._state.incarnation(caller), self._state.runner
        self.heard(caller.name)
        round_ = request.round if request.HasField("round") else None
        runner.tell(e.Heard(caller.name, incarnation, round_, request.generation, request.progress, request.computes))
        runner.require_alive()
        found = runner.suspension(caller.name, incarnation)
        reply = pb.HeartbeatReply(is_over=not self._state.coordinator.holds(caller.name, incarnation))
        if found is not None:
            reply.suspended, reply.cause = found.generation, found.cause
        return reply

    def died(self, request: pb.DiedRequest, caller: Caller) -> pb.Nothing:
        """End the incarnation of a member after its process has ended."""
        self.end(request.member, request.cause, request.incarnation if request.HasField("incarnation") else None)
        return pb.Nothing()

    def end(self, member: str, cause: str, incarnation: int | None) -> None:
        """End an incarnation of a member, by default the current one."""
        self._state.expect_member(member)
        self._state.runner.tell(e.Died(member, incarnation, cause))

    def stay(self, member: str) -> None:
        """Note that a member is there. Wait until it has left, or every member is through all its rounds."""
        self._state.expect_member(member)
        with self._state.changed:
            self.here.add(member)
            self._state.runner.notifier.wait_for(
                member, lambda: member not in self.here or self._state.coordinator.is_through
            )

    def left(self, member: str, node: str = "", incarnation: int | None = None) -> None:
        """Note that the connection of a member, or of one of its nodes, has ended: it may be gone, or come back."""
        with self._state.changed:
            self.here.discard(member)
            self._state.runner.wake(member)
        if member in self._state.roster.members:
            self._state.runner.tell(e.Lost(member, self._state.incarnation(Caller(member, incarnation))))

    def wait_until_left(self, seconds: float) -> None:
        """Give members that are still there time to learn why the run has ended."""
        with self._state.changed:
            self._state.changed.wait_for(lambda: not self.here, seconds)
