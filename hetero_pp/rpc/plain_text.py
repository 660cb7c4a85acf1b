"""Makes text from others fit for a terminal: short, on one line, and without control characters."""

from __future__ import annotations

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from hetero_pp.core.control_characters import escaped

MOST_CHARACTERS = 2_000
TEXT_BYTES_MAX = 4 * (MOST_CHARACTERS + 1)
"""Bytes of a text that `plain` has returned, in UTF-8."""


def plain(text: str, most: int = MOST_CHARACTERS) -> str:
    """Return at most `most` characters, all printable: white space as blanks, other characters as their escapes."""
    cut = text[:most]
    if not cut.isprintable():
        cut = "".join(one if one.isprintable() else " " if one.isspace() else escaped(one) for one in cut)
    return cut[:most] + ("…" if max(len(text), len(cut)) > most else "")


def make_plain(message: Message) -> None:
    """Apply `plain` to every text in a message, at any depth."""
    for field, value in message.ListFields():
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            for one in [value] if isinstance(value, Message) else value:
                make_plain(one)
        elif field.type == FieldDescriptor.TYPE_STRING:
            if isinstance(value, str):
                setattr(message, field.name, plain(value))
            else:
                value[:] = [plain(one) for one in value]
