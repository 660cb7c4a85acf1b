"""The result of one check: a state, and one line that says what was found and how to mend it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class State(StrEnum):
    """Verdict of a check."""

    OK = "OK"
    WARN = "WARN"
    FAIL = "FAIL"
    SKIP = "SKIP"
    """The check could not be made."""


@dataclass(frozen=True)
class Finding:
    """Result of one check."""

    state: State
    line: str
    """Result in words, and unless the state is OK the remedy."""


class NotChecked(Exception):
    """A check cannot be made, for the reason in the message."""


def ok(line: str) -> Finding:
    return Finding(State.OK, line)


def warn(line: str) -> Finding:
    return Finding(State.WARN, line)


def fail(line: str) -> Finding:
    return Finding(State.FAIL, line)
