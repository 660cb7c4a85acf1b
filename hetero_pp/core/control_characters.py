"""Find and escape characters that control a terminal, or reorder its text."""

from __future__ import annotations

import unicodedata

_REORDERING = frozenset({"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"})
"""Bidirectional classes of characters such as U+202E."""


def is_control(character: str) -> bool:
    """Return whether a character is a control character, half of a surrogate pair, or reorders text."""
    return unicodedata.category(character) in ("Cc", "Cs") or unicodedata.bidirectional(character) in _REORDERING


def without_controls(text: str, keeps_lines: bool = False) -> str:
    """Return a text with control characters escaped; all other characters of any language stay.

    Line breaks become blanks unless `keeps_lines`.
    """
    if text.isprintable():
        return text
    breaks = "\n" if keeps_lines else " "
    return "".join(breaks if one == "\n" else escaped(one) if is_control(one) else one for one in text)


def escaped(character: str) -> str:
    """Return a character as an escape of Python, such as `\\x1b`."""
    return character.encode("unicode_escape").decode("ascii")
