"""Seeds for all random choices of a run, derived from the run's seed and the purpose of the choice."""

from __future__ import annotations

import hashlib


def seed_of(*parts: object) -> int:
    """Return a 63-bit seed that depends on every part and on nothing else."""
    text = "/".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "little") >> 1
