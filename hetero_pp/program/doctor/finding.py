"""Findings of checks, and how checks are made: in threads, side by side, so that one that hangs delays no other."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, TimeoutError
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TypeVar

from hetero_pp.core.control_characters import without_controls
from hetero_pp.core.errors import HeteroPPError


class FindingState(StrEnum):
    """Verdict of a check."""

    OK = "OK"
    WARN = "WARN"
    FAIL = "FAIL"
    SKIP = "SKIP"
    """The check could not be made."""


@dataclass(frozen=True)
class Finding:
    """Result of one check."""

    state: FindingState
    line: str
    """Result in words, and unless the state is OK the remedy."""


class NotChecked(Exception):
    """A check cannot be made, for the reason in the message."""


def ok(line: str) -> Finding:
    return Finding(FindingState.OK, line)


def warn(line: str) -> Finding:
    return Finding(FindingState.WARN, line)


def fail(line: str) -> Finding:
    return Finding(FindingState.FAIL, line)


T = TypeVar("T")

_CHARACTERS_MAX = 2000


def in_background(work: Callable[[], T]) -> Future[T]:
    """Return the future result of a call in a daemon thread, which the end of the process does not wait for."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 (it is raised where the result is asked for)
            future.set_exception(error)

    threading.Thread(target=run, name="doctor", daemon=True).start()
    return future


def make_checks(checks: Mapping[str, Callable[[], Finding]], seconds: float) -> dict[str, Finding]:
    """Return the finding of each check by its name. A check without a result after `seconds` is a warning."""
    deadline = time.monotonic() + seconds
    futures = {name: in_background(check) for name, check in checks.items()}
    found = {name: _finding(future, deadline, seconds) for name, future in futures.items()}
    return {name: replace(one, line=_one_line(one.line)) for name, one in found.items()}


def _one_line(text: str) -> str:
    """Return a text, some of which may be a stranger's, as one line that looks like no other finding."""
    return without_controls(text[:_CHARACTERS_MAX])


def _finding(future: Future[Finding], deadline: float, seconds: float) -> Finding:
    try:
        return future.result(max(deadline - time.monotonic(), 0.0))
    except TimeoutError as error:
        if future.done():  # the check itself raised it
            return fail(str(error) or type(error).__name__)
        return warn(f"no result within {seconds:g} s: this machine, its disk or its line is busy; try again")
    except NotChecked as error:
        return Finding(FindingState.SKIP, str(error))
    except (HeteroPPError, OSError, ImportError, RuntimeError) as error:
        return fail(str(error) or type(error).__name__)
    except Exception as error:  # noqa: BLE001 (no answer of an exchange or of a machine hides what other checks found)
        return fail(f"this check failed ({type(error).__name__}: {error})")
