"""Joining: agreement on the configuration and the text, slots for processes, and waiting for required members."""

from __future__ import annotations

import json
import secrets
import threading
from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path

from hetero_pp.messages import messages_pb2 as pb
from hetero_pp.messages.refusals import Kind
from hetero_pp.outer.exchange_service import AvailableStates, Caller
from hetero_pp.run.same import Agreement
from replica_groups.exchange.addresses import Addresses
from replica_groups.exchange.presence import Presence
from replica_groups.exchange.reports import Reports
from replica_groups.exchange.run_state import RunState
from replica_groups.exchange.text import Text, is_digest
from replica_groups.protocol import events as e


class Joining:
    """Admits members to the slots of one run. Thread-safe."""

    def __init__(
        self,
        state: RunState,
        presence: Presence,
        reports: Reports,
        addresses: Addresses,
        agreement: Agreement | None,
        text: Path | None,
    ) -> None:
        """Without an agreement, members are not asked what they were started with.

        `text`: the file that says which text the run is trained on.
        """
        self._state, self._presence, self._reports, self._addresses = state, presence, reports, addresses
        self._agreement = agreement
        self._text = Text(text, self._is_there, lambda: state.coordinator.last_round > 0)
        self._agreed: str | None = None
        """The last configuration that agreed: usually those of all members, so that few are parsed."""
        self._tokens: dict[str, str] = {}
        """Digest of the text that each member reads, of members that read one."""
        self._taking = threading.Lock()
        """Serializes joins of members that read a text."""
        self._available: dict[str, AvailableStates] = {}
        self._least = len(self.lacking(()))

    @property
    def tokens(self) -> str:
        """Digest of the run's text; empty while no member has named one."""
        return self._text.tokens

    def agree(self, request: pb.AgreeRequest, caller: Caller) -> pb.AgreeReply:
        """Compare a member's configuration and text with the run's."""
        member = caller.name
        self._state.expect_member(member)
        if request.configuration != self._agreed:
            self._require_agreement(member, request.configuration)
            self._agreed = request.configuration
        if request.tokens and not is_digest(request.tokens):
            raise self._state.refused(member, "an invalid digest of tokens", Kind.MALFORMED)
        with self._taking:
            self._tokens[member] = request.tokens
            self._require_same_text(member)
        return pb.AgreeReply(run=self._state.run)

    def _require_agreement(self, member: str, configuration: str) -> None:
        """Raise Refused for another configuration than the run's."""
        try:
            told = json.loads(configuration)
        except (ValueError, RecursionError):
            told = None
        if not isinstance(told, dict):
            raise self._state.refused(member, "a configuration that is not a JSON object", Kind.MALFORMED)
        if complaint := "" if self._agreement is None else self._agreement.complaint(told):
            reason = f"was started with another configuration than the exchange: {complaint}"
            raise self._state.refused(member, reason)

    def _require_same_text(self, member: str) -> None:
        """Raise Refused for a member that reads another text than the run's."""
        tokens = self._tokens.get(member)
        if tokens and (complaint := self._text.complaint(member, tokens)):
            raise self._state.refused(member, complaint)

    def _is_there(self, member: str) -> bool:
        return member in self._state.roster.members and self._state.coordinator.slot(member).held

    def join(self, request: pb.JoinRequest, caller: Caller) -> pb.JoinReply:
        """Give a slot to a process, once the slot is vacant. A second process under one name is refused."""
        member, state = caller.name, self._state
        state.expect_member(member)
        process = request.process or secrets.token_hex(8)
        with self._taking:
            self._require_same_text(member)
            for answer in state.decisions.tell(e.Applied(member, process, caller.holder > 0)):
                if isinstance(answer, e.Refused):
                    raise state.refused(member, answer.reason)
            if tokens := self._tokens.get(member):
                state.decisions.patiently(partial(self._text.note, member, tokens))
        term = state.decisions.wait_for_term(member, process, caller.is_asked)
        with state.changed:
            self._addresses.note(member, request.address)
            self._available[member] = AvailableStates(frozenset(request.rounds), tuple(request.damaged))
            state.changed.notify_all()
        self._reports.joined(member, request.address, term)
        self._presence.heard(member)
        return pb.JoinReply(term=term, takes_following=True)

    def meet_members(self) -> bool:
        """Wait until all required members have joined, or the run is known to be under way; return the latter."""
        state = self._state
        state.decisions.wait_until(lambda: state.goes_on or self._has_met())
        return state.goes_on

    def wait_until_joined(self) -> Mapping[str, AvailableStates]:
        """Wait until all required members have joined; return the states of all that have."""
        self._state.decisions.wait_until(self._has_met)
        with self._state.changed:
            return dict(self._available)

    def _has_met(self) -> bool:
        """Return whether all required members have joined. The count comes first: this is asked after every join."""
        return len(self._available) >= self._least and not self.lacking(self._available)

    def lacking(self, here: Collection[str]) -> list[str]:
        """Return the required members that are not in `here`.

        If all replicas are optional, return the missing members of the most complete replica.
        """
        rules = self._state.coordinator.rules
        absent = [place for place in rules.places if place not in here]
        if rules.expected(()):
            return [place for place in absent if rules.places[place] not in rules.optional]
        return min(([one for one in absent if rules.places[one] == name] for name in rules.replicas), key=len)
