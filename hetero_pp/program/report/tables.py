"""Layout of all tables, on a terminal or in a file."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from hetero_pp.core.units import format_bits_per_second
from hetero_pp.messages.report_bounds import MOST_LOSS
from hetero_pp.program.report.encoding import in_ascii
from hetero_pp.program.report.output import fold, fold_names, widest_part, widest_word

ARROWS: Mapping[str, str] = {"forward": "→", "backward": "←", "up": "↑", "down": "↓"}
"""Arrows for the directions of a link, and for up and down of a line."""

_LEAST_TEXT, _LEAST_NAMES = 12, 24
"""Columns of width that a text keeps before it is folded; and the first column, in a table split into several."""
_LEAST_HEAD = 8  # columns of width that a head keeps before it is folded
_GAP, _EDGES = 2, 2  # columns of width between two columns of a table, and at its edges

Value = TypeVar("Value", bound=float | None)


class _Column:
    def __init__(self, head: str, cells: Sequence[str], is_text: bool, folded: int = _LEAST_TEXT) -> None:
        """`folded`: width that a text keeps before it is folded."""
        self.head, self.cells, self.is_text = head, cells, is_text
        self.most = max(map(len, (head, *cells)))  # the width at which nothing is folded
        least = max(widest_word(head), min(len(head), _LEAST_HEAD))
        self.least = max(least, *map(len, cells), 0)  # the least width at which the column can be shown
        if is_text:
            self.least = max(1, least, *map(widest_part, cells), min(self.most, folded))


@dataclass(frozen=True)
class PlainTable:
    """A table of text columns, number columns, and text columns again, for any width.

    Texts and heads are folded, numbers never. Columns that do not fit follow in a table below, which repeats the first
    column.
    """

    left: Sequence[str]
    right: Sequence[str]
    last: Sequence[str] = ()
    spare: Sequence[str] = ()  # heads of the columns to drop if the table does not fit unfolded
    _rows: list[tuple[str, ...]] = field(default_factory=list)

    def add_row(self, *cells: str) -> None:
        """Add a row with one cell per column. Missing cells are empty."""
        columns = len(self.left) + len(self.right) + len(self.last)
        self._rows.append(cells + ("",) * (columns - len(cells)))

    def add_both(self, name: str, ways: Sequence[str], *columns: Sequence[str]) -> None:
        """Add one row per direction: the name in the first, an arrow, and that direction's cell of each column."""
        for index, way in enumerate(ways):
            self.add_row("" if index else name, ARROWS[way], *(column[index] for column in columns))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        room, columns = options.max_width, list[_Column]()
        shown: Callable[[str], str] = in_ascii if options.ascii_only else str
        for index, head in enumerate([*self.left, *self.right, *self.last]):
            is_text = not len(self.left) <= index < len(self.left) + len(self.right)
            columns.append(_Column(shown(head), [shown(row[index]) for row in self._rows], is_text))
        if _needed([column.most if column.is_text else column.least for column in columns]) > room:
            columns = [column for column in columns if column.head not in self.spare]
        parts = _side_by_side(columns, room)
        if len(parts) > 1:
            beside = room - _needed([0, max(column.least for column in columns[1:])])
            first = _Column(columns[0].head, columns[0].cells, columns[0].is_text, min(_LEAST_NAMES, beside))
            parts = _side_by_side([first, *columns[1:]], room)
        for part in parts:
            yield _drawn(part, room)


def _side_by_side(columns: Sequence[_Column], room: int) -> list[list[_Column]]:
    """Split columns into as few tables as fit; each begins with the first column."""
    first, *rest = columns
    parts = [[first]]
    for column in rest:
        if len(parts[-1]) > 1 and _needed([each.least for each in (*parts[-1], column)]) > room:
            parts.append([first])
        parts[-1].append(column)
    return parts


def _needed(widths: Sequence[int]) -> int:
    return sum(widths) + _GAP * (len(widths) - 1) + _EDGES


def _drawn(columns: Sequence[_Column], room: int) -> Table:
    # Each column gets the least width that it needs, then one column of width at a time while room is left: the
    # narrowest folded column first, texts before numbers.
    widths = [column.least for column in columns]
    for _ in range(room - _needed(widths)):
        folded = [index for index, column in enumerate(columns) if widths[index] < column.most]
        if not folded:
            break
        widths[min(folded, key=lambda index: (not columns[index].is_text, widths[index]))] += 1
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for column, width in zip(columns, widths, strict=True):
        head = Text("\n".join(fold(column.head, width)))
        table.add_column(head, width=width, no_wrap=True, justify="left" if column.is_text else "right")
    for cells in zip(*(column.cells for column in columns), strict=True):
        table.add_row(*(Text("\n".join(fold_names(cell, width))) for cell, width in zip(cells, widths, strict=True)))
    return table


def heads_of(ways: Sequence[str], *columns: str) -> list[str]:
    """Return the heads of columns that have one entry per direction."""
    return [f"{column} {ARROWS[way]}" for column in columns for way in ways]


def format_bandwidth(value: float | None, has_lines: bool) -> str:
    """Format the bandwidth of one direction of a link; `lines` if only the lines that it passes limit it."""
    return "lines" if value is None and has_lines else format_bits_per_second(value)


def spanned(values: Iterable[Value], shown: Callable[[Value], str]) -> str:
    """Format equal values once, others as a range: `4.1 s`, or `4.1 s .. 4.3 s`. None (no limit) is the largest."""
    ordered = sorted(values, key=lambda value: math.inf if value is None else value)
    low, high = shown(ordered[0]), shown(ordered[-1])
    return low if low == high else f"{low} .. {high}"


def format_two(there: float | None, back: float | None) -> str:
    """Format two bandwidths: `20 / 50 Mbit/s` or `50 Mbit/s / 1 Gbit/s`; one number if they are equal."""
    first, second = format_bits_per_second(there), format_bits_per_second(back)
    if first == second:
        return first
    number, _, unit = first.partition(" ")
    return f"{number if unit and second.endswith(f' {unit}') else first} / {second}"


def format_loss(loss: float | None) -> str:
    """Format a loss; None (not known) is a dash. Reports end at MOST_LOSS, which also stands for NaN."""
    if loss is not None and loss >= MOST_LOSS:
        return f"{MOST_LOSS:,.0f} or more"
    return "–" if loss is None else f"{loss:.4f}"
