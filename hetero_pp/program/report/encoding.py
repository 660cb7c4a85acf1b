"""Prints ASCII where the output's encoding is not UTF-8, as under cron or in Docker."""

from __future__ import annotations

import codecs
import io
import sys

_ERRORS = "hetero_pp.ascii"  # name of the error handler for characters that the output's encoding lacks

_ASCII = dict(zip("–—−─━│┃×·µ≈‘’“”\N{NO-BREAK SPACE}", "-----||x.u~''\"\" ", strict=True)) | {
    "…": "...",
    "→": "->",
    "←": "<-",
    "↑": "up",
    "↓": "down",
    "≥": ">=",
    "≤": "<=",
    "±": "+-",
}
"""Replacements of the program's signs; other characters become escapes such as `\\xe9` or `\\u03b8`."""


def make_printable() -> None:
    """Let standard output and standard error take any text: in ASCII if they are not UTF-8.

    Without this Python raises UnicodeEncodeError in the middle of a table, after the work was done.
    """

    def replacement(error: UnicodeError) -> tuple[str, int]:
        assert isinstance(error, UnicodeEncodeError)
        return in_ascii(error.object[error.start : error.end]), error.end

    codecs.register_error(_ERRORS, replacement)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            is_utf_8 = codecs.lookup(stream.encoding).name.startswith("utf")
            stream.reconfigure(encoding=None if is_utf_8 else "ascii", errors=_ERRORS)


def in_ascii(text: str) -> str:
    """Return a text as an ASCII output shows it.

    Tables use this for their widths, because some signs become two letters.
    """
    shown = ""
    for character in text:
        if "\udc80" <= character <= "\udcff":  # a byte of a file name or an argument that is not valid text
            shown += f"\\x{ord(character) - 0xDC00:02x}"
        else:
            shown += _ASCII.get(character) or character.encode("ascii", "backslashreplace").decode()
    return shown
