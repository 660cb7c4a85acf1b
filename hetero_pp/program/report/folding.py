"""Wraps text to a given width, between words and within long names at natural places."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence

_HELD = "\N{NO-BREAK SPACE}"
_WITHIN_A_QUANTITY = re.compile(r"(?<=\d) (?=[A-Za-zµ%/])|(?<= /) (?=\d)| (?== )|(?<= =) ")
"""Spaces that never break: before a unit, around the slash of `20 / 100 Mbit/s`, and in `H = 15`."""
_WITHIN_A_NAME = re.compile(r"(?<=[A-Za-z)\]][-._/=,:])(?=[\w(\[])")
"""Places where a long name may break: after a sign that joins its parts, but not before a number."""


def fold(text: str, width: int, indent: str = "", hanging: str | None = None) -> list[str]:
    """Return the text as lines of at most `width`, with `indent` before each (`hanging` before all but the first).

    Longer words, such as paths, stay whole.
    """
    held = _WITHIN_A_QUANTITY.sub(_HELD, text)
    lines = textwrap.wrap(
        held,
        width,
        initial_indent=indent,
        subsequent_indent=indent if hanging is None else hanging,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line.replace(_HELD, " ") for line in lines] or [""]


def fold_names(text: str, width: int) -> list[str]:
    """Fold a text as `fold` does, and break longer names between their parts: `replicas.home.` and `boundary`."""
    lines: list[str] = []
    for line in fold(text, width):
        lines += [line] if len(line) <= width else _joined(_WITHIN_A_NAME.split(line), width)
    return lines


def widest_word(text: str) -> int:
    """Return the least width that `fold` can keep to."""
    return max(map(len, fold(text, 1)))


def widest_part(text: str) -> int:
    """Return the least width that `fold_names` can keep to."""
    return max(len(part) for word in fold(text, 1) for part in _WITHIN_A_NAME.split(word))


def _joined(parts: Sequence[str], width: int) -> list[str]:
    lines = [""]
    for part in parts:
        if lines[-1] and len(lines[-1]) + len(part) > width:
            lines.append("")
        lines[-1] += part
    return lines
