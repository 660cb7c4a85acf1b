"""Draws of the rounds that are computed again, by secrets of a hash chain, so that nobody can choose them.

  end <- sha256 - secret of the first round <- sha256 - secret of the second round <- sha256 - ...

The end is published before the first round, and each secret after its round's record is written. Nobody else knows a
secret before, and the exchange cannot change it any more. A round is drawn by its secret and the record's digest.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable

CHAIN_ROUNDS = 1 << 16
"""Rounds of one chain, which has 2 MiB. It takes as many hashes, about 0.05 s, and so may a check."""

_BYTES = hashlib.sha256().digest_size
_OF_64_BITS = 1 << 64


class Chain:
    """Secrets of the rounds from `first` on."""

    def __init__(self, seed: bytes, first: int) -> None:
        """`seed`: 32 random bytes, the secret of the last round."""
        self.first = first
        links = [seed]
        for _ in range(CHAIN_ROUNDS):
            links.append(hashlib.sha256(links[-1]).digest())
        self.end = links.pop()  # the hash that is published before the first round
        self._secrets = b"".join(reversed(links))

    @property
    def after(self) -> int:
        """First round that is not on the chain any more."""
        return self.first + CHAIN_ROUNDS

    def secret(self, round_: int) -> bytes:
        """Return the secret of a round. Raises ValueError for a round that is not on the chain."""
        place = _place(round_, self.first)
        return self._secrets[_BYTES * place : _BYTES * (place + 1)]


def leads_to(secret: bytes, round_: int, first: int, end: bytes) -> bool:
    """Return whether this is a round's secret on the chain of this end that begins with round `first`."""
    for _ in range(1 + _place(round_, first)):
        secret = hashlib.sha256(secret).digest()
    return hmac.compare_digest(secret, end)


def drawn(secret: bytes, record_sha256: bytes, replicas: Iterable[str], share: float) -> list[str]:
    """Return the replicas of a round that are computed again: each with probability `share`."""

    def number(replica: str) -> int:
        found = hmac.digest(secret, record_sha256 + replica.encode(), "sha256")
        return int.from_bytes(found[:8], "big")

    return sorted(replica for replica in replicas if number(replica) < share * _OF_64_BITS)


def _place(round_: int, first: int) -> int:
    if not 0 <= round_ - first < CHAIN_ROUNDS:
        raise ValueError(f"round {round_} is not one of the {CHAIN_ROUNDS:,} rounds from {first} on")
    return round_ - first
