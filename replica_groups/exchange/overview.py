"""Overview of a run: what the exchange waits for, the holders of slots, and free slots."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from hetero_pp.core.errors import RunOver
from hetero_pp.messages.messages_pb2 import CONTRIBUTING, FINISHING, JOINING, StatusReply
from replica_groups.exchange.assignments import Addresses
from replica_groups.exchange.exchange_state import ExchangeState
from replica_groups.exchange.joining import Joining
from replica_groups.exchange.presence import Presence
from replica_groups.exchange.reports import Reports, why_paused
from replica_groups.exchange.stall_detector import Expected


class Overview:
    """Views of one run. Thread-safe; changes nothing."""

    def __init__(
        self, state: ExchangeState, presence: Presence, joining: Joining, addresses: Addresses, reports: Reports
    ) -> None:
        self._state, self._presence, self._joining = state, presence, joining
        self._addresses, self._reports = addresses, reports

    def expected(self) -> Expected:
        """Return what the exchange waits for. While no blob of a round has come, inner steps are progress, too."""
        return replace(self._expected_of_members(), store_error=self._state.runner.store_errors.oldest())

    def _expected_of_members(self) -> Expected:
        state, heard = self._state, self._presence.last_heard
        with state.changed:
            view = state.coordinator.view()
            if not view.has_begun:
                absent = self._joining.lacking(self._addresses.known)
                return Expected(JOINING, 0, absent, len(absent), heard)
            if view.open is None:
                left = [slot.name for slot in view.slots if slot.held]
                return Expected(FINISHING, state.rounds, left, len(left), heard, is_bounded=False)
            deposited, blocks = view.open.deposited, state.roster.blocks
            missing = [
                member
                for member, replica in state.roster.members.items()
                if replica in view.open.awaited and not blocks[member] <= deposited.get(replica, frozenset())
            ]
            blobs = sum(map(len, deposited.values()))
            progress = (view.open.number, blobs, None if blobs else self._reports.steps_told)
            computing = [slot.name for slot in view.slots if slot.computes]
            return Expected(CONTRIBUTING, view.open.number, missing, progress, heard, False, computing)

    def vacant(self) -> list[str]:
        """Return the free slots: first those of required replicas, then those of the most complete replica."""
        with self._state.changed:
            view = self._state.coordinator.view()
        free = [slot for slot in view.slots if not slot.held]
        lacks = Counter(slot.replica for slot in free)
        free.sort(key=lambda slot: (slot.replica in view.optional, lacks[slot.replica]))
        return [slot.name for slot in free]

    def require_going_on(self) -> None:
        """Raise RunOver if every round is closed, RunFailed if the run has failed."""
        self._state.runner.require_alive()
        if self._state.coordinator.is_over:
            raise RunOver.after(self._state.coordinator.last_round, self._state.rounds)

    def status(self) -> StatusReply:
        """Return the run's progress, and the holder and the addresses of each slot."""
        expected, state, so_far = self.expected(), self._state, self._reports.watchers.so_far()[-1].so_far
        with state.changed:
            view = state.coordinator.view()
            reply = StatusReply(
                last_round=view.last_round,
                rounds=state.rounds,
                refusals=state.refusals.counts.total(),
                missing=expected.missing,
                has_begun=view.has_begun,
                is_over=view.is_over,
                credits=so_far.credits,
                training_seconds=so_far.training_seconds,
            )
            if view.paused is not None:
                reply.paused = why_paused(view.paused.there, view.replicas, view.paused.needed)
            if expected.store_error is not None:
                reply.store_error, reply.store_error_seconds = expected.store_error
            for slot in view.slots:
                address = self._addresses.of(slot.name)
                dials = self._addresses.to_dial(slot.name)[0] if address else ""
                seconds, cause = self._reports.watchers.last_change(slot.name) or (None, "")
                reply.slots.add(
                    name=slot.name,
                    replica=slot.replica,
                    held=slot.held,
                    incarnation=slot.incarnation,
                    round=slot.round,
                    address=address,
                    dials=dials,
                    device=self._reports.devices.get(slot.name, ""),
                    seconds=seconds,
                    cause=cause,
                )
            return reply
