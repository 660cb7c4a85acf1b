"""Check of the encoding of the output and of file names."""

from __future__ import annotations

import codecs
import locale
import sys

from hetero_pp.program.doctor.finding import Finding, ok, warn

_MEND = "set PYTHONUTF8=1, or a locale such as LC_ALL=C.UTF-8"


def check_output() -> Finding:
    """Check that Python uses UTF-8 for file names, text files and the output."""
    found = {
        "file names": sys.getfilesystemencoding(),
        "text files": locale.getencoding() if not sys.flags.utf8_mode else "utf-8",
        "the output": sys.stdout.encoding,
    }
    others = {what: name for what, name in found.items() if codecs.lookup(name).name != "utf-8"}
    if not others:
        return ok("UTF-8")
    shown = ", ".join(f"{name} for {what}" for what, name in others.items())
    return warn(f"found {shown}, expected UTF-8; tables are printed in ASCII: {_MEND}")
