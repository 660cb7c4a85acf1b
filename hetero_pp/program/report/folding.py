"""Text in lines of a given width: broken between words, and within a long one where people would break it."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence

_HELD = "\N{NO-BREAK SPACE}"
_WITHIN_A_QUANTITY = re.compile(r"(?<=\d) (?=[A-Za-zµ%/])|(?<= /) (?=\d)| (?== )|(?<= =) ")
"""Between a number and its unit, around the slash of `20 / 100 Mbit/s`, and in `H = 15`."""
_WITHIN_A_NAME = re.compile(r"(?<=[A-Za-z)\]][-._/=,:])(?=[\w(\[])")
"""After a sign that joins its parts; never within a number."""


def fold(text: str, width: int, indent: str = "", hanging: str | None = None) -> list[str]:
    """Lines of at most `width`, `indent` before each (`hanging` before all but the first).

    Words that are wider, such as paths, stay whole.
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
    """As `fold`, but names that are wider are broken, too, between their parts: `replicas.home.` and `boundary`."""
    lines: list[str] = []
    for line in fold(text, width):
        lines += [line] if len(line) <= width else _joined(_WITHIN_A_NAME.split(line), width)
    return lines


def widest_word(text: str) -> int:
    """The least width that `fold` can keep to."""
    return max(map(len, fold(text, 1)))


def widest_part(text: str) -> int:
    """The least width that `fold_names` can keep to."""
    return max(len(part) for word in fold(text, 1) for part in _WITHIN_A_NAME.split(word))


def _joined(parts: Sequence[str], width: int) -> list[str]:
    lines = [""]
    for part in parts:
        if lines[-1] and len(lines[-1]) + len(part) > width:
            lines.append("")
        lines[-1] += part
    return lines
