"""Draw of the replicas whose contributions to a round are tried."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable


def draw(secret: bytes, record_sha256: bytes, replicas: Iterable[str], count: int) -> list[str]:
    """Return `count` of the replicas, or all if they are fewer, in the order of their names.

    Every replica is equally likely in every round, also one that was drawn in the last one. A replica that knows that
    it will not be drawn could do no work.

    `record_sha256` is that of the round's record, so the draw is unknown before the contributions are fixed. `secret`
    is at least 16 bytes that are revealed after the run, so no contribution can be chosen by its draw. Deterministic.
    """
    ranks = {name: hashlib.sha256(b"\0".join((secret, record_sha256, name.encode()))).digest() for name in replicas}
    return sorted(sorted(ranks, key=lambda name: ranks[name])[:count])
