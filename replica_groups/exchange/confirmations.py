"""Confirmations: hashes of the parameters that members, and the auditor, hold after a round."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Set

from hetero_pp.config.lines import EXCHANGE
from hetero_pp.messages import messages_pb2 as pb
from hetero_pp.messages.refusals import Kind
from hetero_pp.model.transformer import block_of
from hetero_pp.outer.step import parameters_sha256
from hetero_pp.rpc.exchange_service import Caller
from replica_groups.exchange.contribution_inbox import DIGEST_BYTES
from replica_groups.exchange.exchange_state import ExchangeState
from replica_groups.exchange.reports import Reports
from replica_groups.rounds import events as e

_REMEMBERED_CONFIRMATIONS = 4
"""Number of recent rounds whose confirmations are kept."""


class Confirmations:
    """Confirmations of one run. Thread-safe."""

    def __init__(self, state: ExchangeState, reports: Reports) -> None:
        self._state, self._reports = state, reports
        self._confirmed: dict[int, dict[str, Mapping[str, bytes]]] = defaultdict(dict)

    def confirm(self, request: pb.HashReport, caller: Caller) -> pb.Nothing:
        """Take the hashes of a member, which the rules compare with the auditor's, or those of the auditor."""
        member, round_, sha256, state = caller.name, request.round, dict(request.sha256), self._state
        if member != EXCHANGE:
            state.expect_member(member)
        state.require_begun(member)
        if not 1 <= round_ <= state.rounds or not sha256.keys() <= state.names:
            raise state.refused(member, f"hashes of unknown parameters, or of the unknown round {round_}")
        if member != EXCHANGE and not {block_of(name) for name in sha256} <= state.roster.holds(member):
            raise state.refused(member, "hashes of another member's parameters", Kind.FORBIDDEN)
        if any(len(digest) != DIGEST_BYTES for digest in sha256.values()):
            raise state.refused(member, f"a hash that does not have {DIGEST_BYTES} bytes", Kind.MALFORMED)
        if member == EXCHANGE:
            state.runner.tell(e.Audited(round_, sha256))
        elif round_ <= state.coordinator.last_round:  # later ones would take the place of those that wait
            state.runner.tell(e.Confirmed(member, state.incarnation(caller), round_, sha256))
            self._note(member, round_, sha256)
        state.runner.require_alive()
        return pb.Nothing()

    def wait_for(self, record: pb.RoundRecord, here: Set[str], seconds: float) -> None:
        """Wait until the members in `here` of the replicas that a round includes have confirmed it.

        Returns after `seconds` at the latest.
        """
        included, state = {one.replica for one in record.contributions}, self._state
        members = {member for member, replica in state.roster.members.items() if replica in included}
        with state.changed:
            confirmed = self._confirmed[record.round]
            state.changed.wait_for(lambda: here & members <= confirmed.keys(), seconds)

    def _note(self, member: str, round_: int, sha256: Mapping[str, bytes]) -> None:
        """Report a replica's hash once all its members have confirmed."""
        state = self._state
        replica = state.roster.members[member]
        with state.changed:
            confirmed = self._confirmed[round_]
            confirmed[member] = sha256
            state.changed.notify_all()
            while len(self._confirmed) > _REMEMBERED_CONFIRMATIONS:
                del self._confirmed[min(self._confirmed)]
            members = [one for one, owner in state.roster.members.items() if owner == replica]
            if not all(one in confirmed for one in members):
                return
            hashes = {name: value for one in members for name, value in confirmed[one].items()}
        missing = state.names - hashes.keys()
        if missing:
            raise state.refused(member, f"no member of {replica} confirmed {sorted(missing)} in round {round_}")
        complaint = self._reports.check_verified(member)
        if complaint is not None:
            raise state.refused(member, complaint)
        verified = pb.RoundVerified(round=round_, replica=replica, parameters_sha256=parameters_sha256(hashes))
        self._reports.tell_own(round_verified=verified)
