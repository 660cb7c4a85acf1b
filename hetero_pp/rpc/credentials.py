"""Credentials of processes: a certificate, or on one machine a token. Both follow from the launchers' secret."""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Protocol

from hetero_pp.config.links import EXCHANGE, VALIDATOR, LinkSpec
from hetero_pp.rpc.certificates import Authority, Identity


@dataclass(frozen=True)
class Credentials:
    """Credentials of one process. They are valid for its name only."""

    name: str
    """A member, a replica (launcher of its members), `launcher`, `exchange`, or a validator."""
    token: str = ""
    """Token, used without an identity."""
    links: Mapping[str, str] = field(default_factory=dict)
    """Link name -> token that only its two ends know, used without an identity."""
    identity: Identity | None = None
    """Key and certificate for TLS."""

    def of_link(self, link: str) -> LinkCredentials:
        """Return the credentials of this process at one end of a link."""
        return LinkCredentials(self.links.get(link, ""), self.identity)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Credentials:
        found = json.loads(text)
        return cls(**found | {"identity": Identity(**found["identity"]) if found["identity"] else None})


@dataclass(frozen=True)
class LinkCredentials:
    """Credentials of one end of a stage link."""

    token: str = ""
    """Token that only the two ends of the link know; unused if they have an identity."""
    identity: Identity | None = None


class Secret:
    """Secret of one run, from which the credentials of all its processes follow."""

    def __init__(self, text: str) -> None:
        self.text, self._key = text, text.encode()

    @cached_property
    def authority(self) -> Authority:
        """Authority that signs the certificates of the run."""
        return Authority(self.text)

    def credentials(self, name: str, links: Iterable[LinkSpec] = (), encrypted: bool = False) -> Credentials:
        """Return the credentials of a process, which include those of its ends of these links."""
        if encrypted:
            return Credentials(name, identity=self.authority.identity(name))
        own = {link.name: self._derived("link", link.name) for link in links if name in (link.source, link.target)}
        return Credentials(name, self._derived("name", name), own)

    @cached_property
    def draws(self) -> str:
        """Secret of the validators, by which they draw what they try."""
        return self._derived("draws", "")

    def is_of(self, name: str, token: str) -> bool:
        """Return whether a token belongs to a name, in constant time."""
        return hmac.compare_digest(self._derived("name", name).encode(), token.encode())

    def _derived(self, kind: str, name: str) -> str:
        return hmac.new(self._key, f"{kind} {name}".encode(), hashlib.sha256).hexdigest()


class Keys(Protocol):
    """Source of credentials for the processes that a launcher starts."""

    def of(self, name: str, links: Iterable[LinkSpec] = ()) -> Credentials:
        """Return the credentials of a process, which include those of its ends of these links."""


@dataclass(frozen=True)
class SecretKeys:
    """Credentials of all processes, for a launcher with the run's secret."""

    secret: Secret
    encrypted: bool
    """Whether processes connect by TLS."""

    def of(self, name: str, links: Iterable[LinkSpec] = ()) -> Credentials:
        return self.secret.credentials(name, links, self.encrypted)


@dataclass(frozen=True)
class InvitedKeys:
    """Credentials of one slot, for a launcher with a ticket."""

    credentials: Credentials

    def of(self, name: str, links: Iterable[LinkSpec] = ()) -> Credentials:
        assert name == self.credentials.name
        return self.credentials


def is_validators(name: str) -> bool:
    """Return whether a process of this name is a validator. None is called as the one beside the exchange."""
    own = name.removeprefix(VALIDATOR)
    return own not in (name, EXCHANGE) and re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]{0,39}", own) is not None


def new_secret() -> str:
    """Return a new secret, for a run that begins."""
    return secrets.token_hex(16)
