"""Prints text: in the output's encoding, folded to the terminal's width, and with the progress of long readings."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from contextvars import ContextVar
from datetime import UTC, datetime
from functools import partial
from typing import TextIO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.segment import Segment
from rich.table import Column
from rich.text import Text

from hetero_pp.core.files import print_without_fail
from hetero_pp.core.progress import NowAndThen, OnProgress
from hetero_pp.core.text import without_controls
from hetero_pp.messages.messages_pb2 import MembershipEventKind, Report
from hetero_pp.program.report.encoding import in_ascii
from hetero_pp.rpc.exchange_service import FIRST_TOLD, MOST_BETWEEN

WIDTH_OF_FILES = 80  # columns without a terminal: pipes and files are read in terminals, logs and chats


class SafeConsole(Console):
    """A console that prints control characters as escapes, so that no name, file or message controls the terminal."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            if segment.control or segment.text.isprintable():
                yield segment
            else:
                yield Segment(without_controls(segment.text, keeps_lines=True), segment.style)


def standard_output() -> Console:
    """Return the console on which a command prints, as wide as the terminal; without one, `COLUMNS`, else 80."""
    console = SafeConsole()
    is_given = os.environ.get("COLUMNS", "").isdigit()
    return console if console.is_terminal or is_given else SafeConsole(width=WIDTH_OF_FILES)


def say(console: Console, text: str, bold: str = "", style: str = "", indent: str = "") -> None:
    """Print a sentence, wrapped to the console's width. `bold`: the beginning of the text to print bold."""
    shown = in_ascii(text) if console.options.ascii_only else text
    found = Text("\n".join(fold(shown, console.width, indent)), style=style)
    found.stylize("bold", 0, len(bold))
    console.print(found, soft_wrap=True)


def tell(console: Console, line: str, style: str = "", hanging: str = "  ", folds: bool = False) -> None:
    """Print an event in one line, so that logs can be searched; on a terminal, wrap it with `hanging` as indent.

    `folds`: wrap it in a pipe, too.
    """
    shown = in_ascii(line) if console.options.ascii_only else line
    shown = "\n".join(fold(shown, console.width, hanging=hanging)) if folds or console.is_terminal else shown
    console.print(Text(shown, style=style), soft_wrap=True)


def announce(line: str) -> None:
    """Print an event on standard output, as `tell` does."""
    tell(standard_output(), line)


def complain(message: str) -> None:
    """Print an error to standard error: wrapped on a terminal, else as one line."""
    message = without_controls(message)
    width = shutil.get_terminal_size().columns
    print("\n".join(fold(message, width, hanging="  ")) if sys.stderr.isatty() else message, file=sys.stderr)


# ---- folding ----

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
        lines.append(line)
        if len(line) > width:
            lines[-1] = ""
            for part in _WITHIN_A_NAME.split(line):
                if lines[-1] and len(lines[-1]) + len(part) > width:
                    lines.append("")
                lines[-1] += part
    return lines


def widest_word(text: str) -> int:
    """Return the least width that `fold` can keep to."""
    return max(map(len, fold(text, 1)))


def widest_part(text: str) -> int:
    """Return the least width that `fold_names` can keep to."""
    return max(len(part) for word in fold(text, 1) for part in _WITHIN_A_NAME.split(word))


# ---- progress ----

_SECONDS_BETWEEN_LOOKS = 0.1


@contextmanager
def shown_reading(console: Console, what: str, clock: Callable[[], float] = time.monotonic) -> Iterator[OnProgress]:
    """Yield a function for the block to report its progress. `what` is shown until the first report.

    Nothing is left on a terminal.
    """
    if not console.is_terminal:
        yield now_and_then(partial(tell, console), clock)
        return
    columns = (
        TextColumn("{task.description}", table_column=Column()),
        BarColumn(20),
        TaskProgressColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(what, total=None)
        yield NowAndThen(
            lambda doing, share: progress.update(task, description=doing, total=1.0, completed=share),
            0.0,
            lambda _: _SECONDS_BETWEEN_LOOKS,
            clock,
        )


def now_and_then(say: Callable[[str], None], clock: Callable[[], float]) -> NowAndThen:
    """Return a function that prints `encoding the corpus: 40 %` after some seconds, then at growing intervals."""
    return NowAndThen(
        lambda doing, share: say(reading_line(doing, share)),
        FIRST_TOLD,
        lambda waited: min(2 * waited, MOST_BETWEEN),
        clock,
    )


def reading_line(doing: str, share: float) -> str:
    """Format progress: `encoding the corpus: 40 %`."""
    return f"{doing}: {100 * share:.0f} %"


# ---- lines as JSON objects, for programs that collect logs ----

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
        event, member = _SUBJECT.get()
        level = "warning" if self._level == "info" and event in _WARNINGS else self._level
        subject = {"level": level, "event": event or "message", "run": self.run, "member": member}
        is_utf_8 = (self.encoding or "").lower().replace("-", "").startswith("utf8")
        with self._lock:
            *lines, rest = (self._rest.pop(threading.get_ident(), "") + text).split("\n")
            if rest:
                self._rest[threading.get_ident()] = rest
            for line in filter(str.strip, lines):
                now = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
                found = {"time": now} | subject | {"text": line.rstrip()}
                self._stream.write(json.dumps(found, ensure_ascii=not is_utf_8) + "\n")
            self._stream.flush()
        return len(text)

    def flush(self) -> None:
        self._stream.flush()


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
