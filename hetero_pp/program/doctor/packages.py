"""Checks of Python: its version, the packages that hetero-pp needs, and the encoding of output and file names."""

from __future__ import annotations

import codecs
import locale
import platform
import sys
from importlib import metadata

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from hetero_pp.core.units import format_count
from hetero_pp.program.doctor.finding import Finding, fail, ok, warn

NAME = "hetero-pp"
_INSTALL = "in the folder of hetero-pp: pip install --editable ."


def check_python() -> Finding:
    """Compare the version of Python with the one that the package asks for."""
    found = platform.python_version()
    try:
        needed = metadata.metadata(NAME)["Requires-Python"]
    except metadata.PackageNotFoundError:
        return warn(f"Python {found}; {NAME} is not installed, so the version that it needs is not known: {_INSTALL}")
    if not SpecifierSet(needed).contains(found, prereleases=True):
        return fail(f"found Python {found}, expected {needed}: make a virtual environment with a newer Python")
    return ok(f"Python {found} (needed: {needed})")


def check_packages() -> Finding:
    """Compare the version of each package that hetero-pp needs with the installed one."""
    try:
        needed = [Requirement(one) for one in metadata.requires(NAME) or ()]
    except metadata.PackageNotFoundError:
        return warn(f"{NAME} is not installed, so the versions that it needs are not known: {_INSTALL}")
    own = [one for one in needed if one.marker is None or one.marker.evaluate({"extra": ""})]
    wrong = {str(one): complaint for one in own if (complaint := _complaint(one))}
    if wrong:
        names = " ".join(f"'{one}'" for one in wrong)
        return fail(f"{'; '.join(wrong.values())}: pip install {names}")
    return ok(f"{format_count(len(own), 'package')} as hetero-pp needs them")


def _complaint(needed: Requirement) -> str:
    """Return what is wrong with the installed version of a package; empty if nothing is."""
    try:
        found = metadata.version(needed.name)
    except metadata.PackageNotFoundError:
        return f"{needed.name} is not installed"
    if needed.specifier.contains(found, prereleases=True):
        return ""
    return f"found {needed.name} {found}, expected {needed.specifier}"


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
