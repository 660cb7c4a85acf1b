"""Findings of checks, and how checks are made: in threads, side by side, so that one that hangs delays no other.

Also the checks of Python and its packages: they need nothing but the standard library and what pip installs first.
"""

from __future__ import annotations

import platform
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, TimeoutError
from dataclasses import dataclass, replace
from enum import StrEnum
from importlib import metadata
from typing import TypeVar

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from hetero_pp.core.errors import HeteroPPError
from hetero_pp.core.text import without_controls
from hetero_pp.core.units import format_count

T = TypeVar("T")

NAME = "hetero-pp"
_INSTALL = "in the folder of hetero-pp: pip install --editable ."
_CHARACTERS_MAX = 2000


class FindingState(StrEnum):
    """Verdict of a check."""

    OK = "OK"
    WARN = "WARN"
    FAIL = "FAIL"
    SKIP = "SKIP"  # the check could not be made


@dataclass(frozen=True)
class Finding:
    """Result of one check."""

    state: FindingState
    line: str  # result in words, and unless the state is OK the remedy


class NotChecked(Exception):
    """A check cannot be made, for the reason in the message."""


def ok(line: str) -> Finding:
    return Finding(FindingState.OK, line)


def warn(line: str) -> Finding:
    return Finding(FindingState.WARN, line)


def fail(line: str) -> Finding:
    return Finding(FindingState.FAIL, line)


def in_background(work: Callable[[], T]) -> Future[T]:
    """Return the future result of a call in a daemon thread, which the end of the process does not wait for."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 (it is raised where the result is asked for)
            future.set_exception(error)

    threading.Thread(target=run, name="check", daemon=True).start()
    return future


def make_checks(checks: Mapping[str, Callable[[], Finding]], seconds: float) -> dict[str, Finding]:
    """Return the finding of each check by its name. A check without a result after `seconds` is a warning."""
    deadline = time.monotonic() + seconds
    futures = {name: in_background(check) for name, check in checks.items()}
    found = dict[str, Finding]()
    for name, future in futures.items():
        try:
            found[name] = future.result(max(deadline - time.monotonic(), 0.0))
        except TimeoutError as error:
            if future.done():  # the check itself raised it
                found[name] = fail(str(error) or type(error).__name__)
            else:
                told = f"no result within {seconds:g} s: this machine, its disk or its line is busy; try again"
                found[name] = warn(told)
        except NotChecked as error:
            found[name] = Finding(FindingState.SKIP, str(error))
        except (HeteroPPError, OSError, ImportError, RuntimeError) as error:
            found[name] = fail(str(error) or type(error).__name__)
        except Exception as error:  # noqa: BLE001 (no answer of an exchange or of a machine hides what others found)
            found[name] = fail(f"this check failed ({type(error).__name__}: {error})")
    # Some of the text may be a stranger's: as one line without controls it looks like no other finding.
    return {name: replace(one, line=without_controls(one.line[:_CHARACTERS_MAX])) for name, one in found.items()}


# ---- Python ----


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
    wrong: dict[str, str] = {}
    required = [one for one in needed if one.marker is None or one.marker.evaluate({"extra": ""})]
    for one in required:
        try:
            version = metadata.version(one.name)
        except metadata.PackageNotFoundError:
            wrong[str(one)] = f"{one.name} is not installed"
            continue
        if not one.specifier.contains(version, prereleases=True):
            wrong[str(one)] = f"found {one.name} {version}, expected {one.specifier}"
    if wrong:
        names = " ".join(f"'{one}'" for one in wrong)
        return fail(f"{'; '.join(wrong.values())}: pip install {names}")
    return ok(f"{format_count(len(required), 'package')} as hetero-pp needs them")
