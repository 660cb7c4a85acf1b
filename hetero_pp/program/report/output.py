"""Prints text to the terminal's width, or 80 columns without a terminal."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from hetero_pp.core.control_characters import without_controls
from hetero_pp.program.report.encoding import in_ascii
from hetero_pp.program.report.folding import fold

WIDTH_OF_FILES = 80
"""Columns without a terminal: pipes and files are read in terminals, logs and chats."""


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


def tell(console: Console, line: str, style: str = "", hanging: str = "  ") -> None:
    """Print an event in one line, so that logs can be searched; on a terminal, wrap it with `hanging` as indent."""
    shown = in_ascii(line) if console.options.ascii_only else line
    shown = "\n".join(fold(shown, console.width, hanging=hanging)) if console.is_terminal else shown
    console.print(Text(shown, style=style), soft_wrap=True)


def announce(line: str) -> None:
    """Print an event on standard output, as `tell` does."""
    tell(standard_output(), line)


def complain(message: str) -> None:
    """Print an error to standard error: wrapped on a terminal, else as one line."""
    message = without_controls(message)
    width = shutil.get_terminal_size().columns
    print("\n".join(fold(message, width, hanging="  ")) if sys.stderr.isatty() else message, file=sys.stderr)
