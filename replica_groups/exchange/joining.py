"""Joining: agreement on the configuration and the text, slots for processes, and waiting for required members."""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import sys
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from pydantic import TypeAdapter

from hetero_pp.config.changes import Agreement
from hetero_pp.core.errors import DamagedFile
from hetero_pp.core.files import write_whole
from hetero_pp.messages import messages_pb2 as pb
from hetero_pp.messages.refusals import Kind
from hetero_pp.rpc.exchange_service import AvailableStates, Caller
from hetero_pp.store.folder import storing
from replica_groups.exchange.assignments import Addresses
from replica_groups.exchange.exchange_state import ExchangeState
from replica_groups.exchange.presence import Presence
from replica_groups.exchange.reports import Reports
from replica_groups.rounds import events as e

_SHOWN = 12
"""Digits of a digest that messages show."""


@dataclass(frozen=True)
class _TextDigest:
    tokens: str
    """sha256 of the tokens, as hexadecimal digits."""
    by: tuple[str, ...]
    """Members that read them."""


def is_digest(text: str) -> bool:
    """Return whether a text is a sha256 as hexadecimal digits."""
    return re.fullmatch("[0-9a-f]{64}", text) is not None


class Text:
    """The run's text: the first member that reads it names it, and members that read another text are refused.

    A member names its text by the digest of its tokens, which nobody verifies: this protects against mistakes such as a
    wrong path, not against lies. Until a round is decided, the first member may have been wrong, so once no member that
    named this text is there, another text may be named. Not thread-safe.
    """

    def __init__(self, path: Path | None, is_there: Callable[[str], bool], has_trained: Callable[[], bool]) -> None:
        """`path`: the file that keeps the text's digest; one from an earlier start of the run is final.

        `is_there`: returns whether a member holds its slot; `has_trained`: whether a round is decided.
        """
        self._path, self._is_there, self._has_trained = path, is_there, has_trained
        self._told = None if path is None else _kept(path)
        self._stays = self._told is not None

    @property
    def tokens(self) -> str:
        """Digest of the text; empty while no member has named one."""
        return "" if self._told is None else self._told.tokens

    def complaint(self, member: str, tokens: str) -> str:
        """Return why a member that reads these tokens may not take part; empty if it may."""
        told = self._told
        if told is None or told.tokens == tokens:
            return ""
        others = [one for one in told.by if one != member and self._is_there(one)]
        if not (self._stays or self._has_trained() or others):
            return ""
        found = f"found tokens whose sha256 begins with {tokens[:_SHOWN]}, expected {told.tokens[:_SHOWN]}"
        by = ", ".join(others or told.by)
        return f"reads another text than the run: {found}{f', as {by} reads' if by else ''}"

    def note(self, member: str, tokens: str) -> None:
        """Note that a member with these tokens takes part. May be repeated after StoreError (file not written)."""
        told = self._told
        by = told.by if told is not None and told.tokens == tokens else ()
        if member in by:
            return
        now = _TextDigest(tokens, (*by, member))
        if self._path is not None:
            content = json.dumps({"tokens": tokens, "by": now.by})
            with storing("written", self._path):
                write_whole(self._path, f"{content}\n{_checksum(content)}\n".encode())
        self._told = now


class Joining:
    """Admits members to the slots of one run. Thread-safe."""

    def __init__(
        self,
        state: ExchangeState,
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
            for answer in state.runner.tell(e.Applied(member, process, caller.holder > 0)):
                if isinstance(answer, e.Reject):
                    raise state.refused(member, answer.reason)
            if tokens := self._tokens.get(member):
                state.runner.retry(partial(self._text.note, member, tokens))
        incarnation = state.runner.wait_for_incarnation(member, process, caller.is_asked)
        with state.changed:
            self._addresses.note(member, request.address)
            self._available[member] = AvailableStates(frozenset(request.rounds), tuple(request.damaged))
            state.changed.notify_all()
        self._reports.joined(member, request.address, incarnation)
        self._presence.heard(member)
        return pb.JoinReply(incarnation=incarnation)

    def meet_members(self) -> bool:
        """Wait until all required members have joined, or the run is known to be under way; return the latter."""
        state = self._state
        state.runner.wait_until(lambda: state.goes_on or self._has_met())
        return state.goes_on

    def wait_until_joined(self) -> Mapping[str, AvailableStates]:
        """Wait until all required members have joined; return the states of all that have."""
        self._state.runner.wait_until(self._has_met)
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
        absent = [slot for slot in rules.slots if slot not in here]
        if rules.expected(()):
            return [slot for slot in absent if rules.slots[slot] not in rules.optional]
        return min(([one for one in absent if rules.slots[one] == name] for name in rules.replicas), key=len)


def shown_digest(path: Path) -> str:
    """Return the digits that messages show of the digest in a file; empty if the file is missing or damaged."""
    try:
        return _read(path).tokens[:_SHOWN]
    except (OSError, DamagedFile):
        return ""


def _kept(path: Path) -> _TextDigest | None:
    """Return what the file says; None if it is missing or damaged, because members name the text again."""
    try:
        return _read(path)
    except FileNotFoundError:
        return None
    except DamagedFile as error:
        print(f"{error}; the next member that joins determines the text of the run", file=sys.stderr, flush=True)
        return None


def _read(path: Path) -> _TextDigest:
    """Read the file. Raises DamagedFile."""
    try:
        content, checksum = path.read_text(encoding="utf-8").splitlines()
        if checksum != _checksum(content):
            raise ValueError("its checksum does not match")
        return TypeAdapter(_TextDigest).validate_json(content)
    except ValueError as error:
        raise DamagedFile(f"{path} is damaged: {str(error).splitlines()[0]}") from None


def _checksum(content: str) -> str:
    return hashlib.sha256(content.encode()).hexdigest()
