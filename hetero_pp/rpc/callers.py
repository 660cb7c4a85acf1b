"""Who calls the exchange, by what a call shows: never by what it says of itself alone."""

from __future__ import annotations

from dataclasses import dataclass

import grpc

from hetero_pp.errors import WrongToken
from hetero_pp.links import EXCHANGE, LAUNCHER
from hetero_pp.rpc.credentials import Credentials, Secret
from hetero_pp.run.spec import Roster

Metadata = tuple[tuple[str, str], ...]

_NAME, _TOKEN, _RUN, _TERM = "name", "token", "run", "term"
_MOST_DIGITS = 9


@dataclass(frozen=True)
class Caller:
    """Of one call."""

    name: str
    """A member, or who has started some."""
    members: frozenset[str]
    """Whose processes it has started, or is."""
    is_member: bool
    term: int | None
    """Which it says that it holds of its place."""
    run: str | None
    """Of which it says that it is."""


class Callers:
    """Of one run: members, and who has started them."""

    def __init__(self, secret: Secret, roster: Roster) -> None:
        self._secret = secret
        self._members = {LAUNCHER: frozenset(roster.members), EXCHANGE: frozenset[str]()}
        for member, replica in roster.members.items():
            self._members[replica] = self._members.get(replica, frozenset()) | {member}
        self._members |= {member: frozenset([member]) for member in roster.members}
        self._roster = roster

    def __len__(self) -> int:
        """How many there are."""
        return len(self._members)

    def of(self, context: grpc.ServicerContext) -> Caller:
        """Who makes a call. Raises WrongToken for who does not show it."""
        told = {key: value for key, value in context.invocation_metadata() if isinstance(value, str)}
        name, term = told.get(_NAME, ""), told.get(_TERM, "")
        if name not in self._members or not self._secret.is_of(name, told.get(_TOKEN, "")):
            raise WrongToken("the exchange was started with another token")
        number = int(term) if term.isdecimal() and term.isascii() and len(term) <= _MOST_DIGITS else None
        return Caller(name, self._members[name], name in self._roster.members, number, told.get(_RUN))


def shown(credentials: Credentials, run: str | None = None, term: int | None = None) -> Metadata:
    """The metadata by which a call shows who makes it, in which term of which run."""
    found = [(_NAME, credentials.name), (_TOKEN, credentials.token)]
    found += [] if run is None else [(_RUN, run)]
    found += [] if term is None else [(_TERM, str(term))]
    return tuple(found)


def claimed(context: grpc.ServicerContext) -> str:
    """How a caller calls itself, and where it is: for a complaint about it."""
    name = dict(context.invocation_metadata()).get(_NAME, "")
    return f"{name if isinstance(name, str) and name else 'a stranger'} at {context.peer()}"
