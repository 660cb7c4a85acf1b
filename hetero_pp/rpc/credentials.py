"""By what a process shows who it is: a token of its own, derived from the run's secret, which only launchers have."""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field

from hetero_pp.links import LinkSpec


@dataclass(frozen=True)
class Credentials:
    """Of one process. It can act for nobody else, as no token can be made from another."""

    name: str
    """A member; a replica, of who has started all its members; `exchange` or `launcher`, of who has started these."""
    token: str
    links: Mapping[str, str] = field(default_factory=dict)
    """By stage link: what its two ends show each other, and nobody else knows."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Credentials:
        return cls(**json.loads(text))


class Secret:
    """Of one run: who has it can make everybody's credentials."""

    def __init__(self, text: str) -> None:
        self._key = text.encode()

    def credentials(self, name: str, links: Iterable[LinkSpec] = ()) -> Credentials:
        """Of the process of this name, and of those of these links that end at it."""
        own = {link.name: self._derived("link", link.name) for link in links if name in (link.source, link.target)}
        return Credentials(name, self._derived("name", name), own)

    def is_of(self, name: str, token: str) -> bool:
        """Whether a token is that of a name. Takes as long for every wrong one."""
        return hmac.compare_digest(self._derived("name", name).encode(), token.encode())

    def _derived(self, kind: str, name: str) -> str:
        return hmac.new(self._key, f"{kind} {name}".encode(), hashlib.sha256).hexdigest()


def new_secret() -> str:
    """For a run that begins."""
    return secrets.token_hex(16)
