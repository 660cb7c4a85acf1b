"""By what a process shows who it is: a certificate, or on one machine a token. Both come from the run's secret, which
only launchers have.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Protocol

from hetero_pp.links import LinkSpec
from hetero_pp.rpc.certificates import Authority, Identity


@dataclass(frozen=True)
class Credentials:
    """Of one process. It can act for nobody else, as none can be made from another's."""

    name: str
    """A member; a replica, of who has started all its members; `exchange` or `launcher`, of who has started these."""
    token: str = ""
    """Where there is no identity."""
    links: Mapping[str, str] = field(default_factory=dict)
    """By stage link: what its two ends show each other, and nobody else knows, where there is no identity."""
    identity: Identity | None = None
    """By which it connects, where that is by TLS."""

    def of_link(self, link: str) -> LinkCredentials:
        """By which this process shows that it is an end of a link."""
        return LinkCredentials(self.links.get(link, ""), self.identity)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Credentials:
        found = json.loads(text)
        return cls(**found | {"identity": Identity(**found["identity"]) if found["identity"] else None})


@dataclass(frozen=True)
class LinkCredentials:
    """Of one end of a stage link."""

    token: str = ""
    """The link's, which only its two ends know; of no use where they have an identity."""
    identity: Identity | None = None


class Secret:
    """Of one run: who has it can make everybody's credentials."""

    def __init__(self, text: str) -> None:
        self.text, self._key = text, text.encode()

    @cached_property
    def authority(self) -> Authority:
        """That signs certificates of the run."""
        return Authority(self.text)

    def credentials(self, name: str, links: Iterable[LinkSpec] = (), encrypted: bool = False) -> Credentials:
        """Of the process of this name, and of those of these links that end at it."""
        if encrypted:
            return Credentials(name, identity=self.authority.identity(name))
        own = {link.name: self._derived("link", link.name) for link in links if name in (link.source, link.target)}
        return Credentials(name, self._derived("name", name), own)

    def is_of(self, name: str, token: str) -> bool:
        """Whether a token is that of a name. Takes as long for every wrong one."""
        return hmac.compare_digest(self._derived("name", name).encode(), token.encode())

    def _derived(self, kind: str, name: str) -> str:
        return hmac.new(self._key, f"{kind} {name}".encode(), hashlib.sha256).hexdigest()


class Keys(Protocol):
    """What a launcher has, to let processes in that it starts."""

    def of(self, name: str, links: Iterable[LinkSpec] = ()) -> Credentials:
        """Of the process of this name, and of those of these links that end at it."""


@dataclass(frozen=True)
class SecretKeys:
    """Of who has the run's secret: everybody's. Implements Keys."""

    secret: Secret
    encrypted: bool
    """Whether processes reach each other by TLS."""

    def of(self, name: str, links: Iterable[LinkSpec] = ()) -> Credentials:
        """See Keys."""
        return self.secret.credentials(name, links, self.encrypted)


@dataclass(frozen=True)
class InvitedKeys:
    """Of who holds one place by a ticket: its own. Implements Keys."""

    credentials: Credentials

    def of(self, name: str, links: Iterable[LinkSpec] = ()) -> Credentials:
        """See Keys."""
        assert name == self.credentials.name
        return self.credentials


def new_secret() -> str:
    """For a run that begins."""
    return secrets.token_hex(16)
