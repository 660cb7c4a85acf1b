"""Draws of contributions that are tried or computed again, by secrets of a hash chain, so that nobody can choose them.

  end <- sha256 - secret of the first round <- sha256 - secret of the second round <- sha256 - ...

The end is published before the first round, and each secret after its round's record is written. Nobody else knows a
secret before, and the exchange cannot change it any more. A round is drawn by its secret and the record's digest.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Collection, Iterable, Sequence

CHAIN_ROUNDS = 1 << 16
"""Rounds of one chain, which has 2 MiB. It takes as many hashes, about 0.05 s, and so may a check."""

DRAWS, TEXTS = "draws", "texts"  # folders of the log: who is drawn, and what drawn members have shown of their text
ROUNDS_TO_SHOW_TEXT = 2
"""Rounds within which a text has to arrive, which is small: its score would otherwise come too late."""

_BYTES = hashlib.sha256().digest_size
_OF_64_BITS = 1 << 64


def draw_key(round_: int) -> str:
    return f"{DRAWS}/round-{round_:06d}.json"


def text_key(round_: int, replica: str) -> str:
    return f"{TEXTS}/{round_:06d}-{replica}"


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


def drawn_for_trials(
    secret: bytes,
    record_sha256: bytes,
    replicas: Iterable[str],
    count: int,
    suspects: Sequence[str] = (),
    new: Collection[str] = (),
) -> list[str]:
    """Return `count` of the replicas, or all if they are fewer, in the order of their names.

    Up to half of the places are for suspects, in their order, and what is left goes first to new replicas. All others
    are equally likely in every round, also one that was drawn in the last one. A replica that knows that it will not be
    drawn could do no work. The draw is unknown before the contributions are fixed. Deterministic.
    """
    ranks = {name: hashlib.sha256(b"\0".join((secret, record_sha256, name.encode()))).digest() for name in replicas}
    order = sorted(ranks, key=lambda name: ranks[name])
    first = [name for name in suspects if name in ranks][: (count + 1) // 2]
    order = first + sorted((name for name in order if name not in first), key=lambda name: name not in new)
    return sorted(order[:count])


def _place(round_: int, first: int) -> int:
    if not 0 <= round_ - first < CHAIN_ROUNDS:
        raise ValueError(f"round {round_} is not one of the {CHAIN_ROUNDS:,} rounds from {first} on")
    return round_ - first
