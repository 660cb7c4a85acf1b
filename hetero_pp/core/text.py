"""Text from others: characters that control a terminal, and tickets as people paste them.

A pasted ticket may have words in front, line breaks and spaces inside, and invisible characters.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator

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


PREFIX = "hpp1."  # prefix of every ticket, with the version of its content
MOST_CHARACTERS = 20_000

_BEGINS = re.compile(r"\s*".join(map(re.escape, PREFIX)))
_MARKS = re.compile(r"[^A-Za-z0-9_.\s-]")
"""Characters that no ticket has, such as quotation marks and spaces of no width."""
_LONGEST_NAME = 255  # characters of a file's name on all systems


def is_ticket(text: str) -> bool:
    """Return whether a text has a ticket in it, or is a long word such as a part of one, which is a secret, too."""
    bare = _MARKS.sub("", text)
    return _BEGINS.search(bare) is not None or (len(text) > _LONGEST_NAME and "/" not in text)


def bodies(text: str) -> Iterator[str]:
    """Yield what may be the ticket after its prefix: all of it first, then with fewer of the last words."""
    bare = _MARKS.sub("", text)
    if (begins := _BEGINS.search(bare)) is None or len(bare) > MOST_CHARACTERS:
        return
    words = bare[begins.end() :].replace(".", " ").split()
    for count in range(len(words), 0, -1):
        yield "".join(words[:count])
