"""How far something long is, told to whoever shows it."""

from __future__ import annotations

from collections.abc import Callable

OnProgress = Callable[[str, float], None]
"""(what is done, the share of it that is done, from 0 to 1). Called often: whoever shows it leaves most of them out."""


def untold(what: str, share: float) -> None:
    """Where nobody wants to know."""
