"""Prints each line of a command as one JSON object, for programs that collect logs."""

from __future__ import annotations

import io
import json
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import TextIO

from hetero_pp.core.files import print_without_fail
from hetero_pp.messages.messages_pb2 import MembershipEventKind, Report

_WARNINGS = frozenset({"refusal", "failure", "waiting", "state_saving", "diverged"}) | {
    MembershipEventKind.Name(what).lower()
    for what in MembershipEventKind.values()
    if MembershipEventKind.Name(what) not in ("MEMBERSHIP_EVENT_KIND_UNSPECIFIED", "WENT_ON", "HEALED", "INJECTED")
}
"""Events whose lines are warnings."""

_SUBJECT: ContextVar[tuple[str, str]] = ContextVar("subject", default=("", ""))
"""Event and member that the lines of this thread are about."""


@contextmanager
def about(event: str, member: str = "") -> Iterator[None]:
    """Let the lines that this thread prints in the block be about an event, and a member if it has one."""
    token = _SUBJECT.set((event, member))
    try:
        yield
    finally:
        _SUBJECT.reset(token)


@contextmanager
def about_report(report: Report) -> Iterator[None]:
    """Let the lines of the block be about a report. A membership event has its own name, such as `restarted`."""
    event, member = report.WhichOneof("event") or "", report.member
    if event == "membership_event":
        member = report.membership_event.slot or report.membership_event.replica
        if report.membership_event.what in MembershipEventKind.values():  # a later version may have others
            event = MembershipEventKind.Name(report.membership_event.what).lower()
    with about(event, member):
        yield


class JsonLines(io.TextIOBase):
    """Stream whose lines become JSON objects on another stream. Not a terminal, so a line stays one line."""

    def __init__(self, stream: TextIO, level: str) -> None:
        """`level`: of lines that are about no event that is a warning."""
        self.run = ""
        self._stream, self._level = stream, level
        self._lock = threading.Lock()
        self._rest: dict[int, str] = {}  # begun line of each thread

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._stream.encoding

    @property
    def errors(self) -> str | None:  # type: ignore[override]
        return self._stream.errors

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._stream.fileno()

    def write(self, text: str, /) -> int:
        """Print every line that is now complete."""
        with self._lock:
            *lines, rest = (self._rest.pop(threading.get_ident(), "") + text).split("\n")
            if rest:
                self._rest[threading.get_ident()] = rest
            for line in filter(str.strip, lines):
                self._stream.write(self._object(line) + "\n")
            self._stream.flush()
        return len(text)

    def flush(self) -> None:
        self._stream.flush()

    def _object(self, line: str) -> str:
        event, member = _SUBJECT.get()
        level = "warning" if self._level == "info" and event in _WARNINGS else self._level
        now = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        found = {"time": now, "level": level, "event": event or "message", "run": self.run, "member": member}
        is_utf_8 = (self.encoding or "").lower().replace("-", "").startswith("utf8")
        return json.dumps(found | {"text": line.rstrip()}, ensure_ascii=not is_utf_8)


@contextmanager
def printed_as_json() -> Iterator[None]:
    """Print the lines of the block to standard output and standard error as JSON."""
    print_without_fail()
    with ExitStack() as stack:
        stack.enter_context(redirect_stdout(JsonLines(sys.stdout, "info")))
        stack.enter_context(redirect_stderr(JsonLines(sys.stderr, "error")))
        yield


def name_run(run: str) -> None:
    """Name the run that all further lines are about, if they are printed as JSON."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, JsonLines):
            stream.run = run
