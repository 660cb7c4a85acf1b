"""Text of a ticket as people paste it: with words in front, line breaks and spaces inside, and invisible characters."""

from __future__ import annotations

import re
from collections.abc import Iterator

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
