"""Layout of all tables, on a terminal or in a file."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

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
        self._rows.append(cells + ("",) * (len(self._heads) - len(cells)))

    def add_both(self, name: str, ways: Sequence[str], *columns: Sequence[str]) -> None:
        """Add one row per direction: the name in the first, an arrow, and that direction's cell of each column."""
        for index, way in enumerate(ways):
            self.add_row("" if index else name, ARROWS[way], *(column[index] for column in columns))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        columns = [self._column(index) for index in range(len(self._heads))]
        if options.ascii_only:
            columns = [column.in_ascii() for column in columns]
        if _needed([column.most if column.is_text else column.least for column in columns]) > options.max_width:
            columns = [column for column in columns if column.head not in self.spare]
        parts = _side_by_side(columns, options.max_width)
        if len(parts) > 1:
            beside = options.max_width - _needed([0, max(column.least for column in columns[1:])])
            names = replace(columns[0], folded=min(_LEAST_NAMES, beside))
            parts = _side_by_side([names, *columns[1:]], options.max_width)
        for part in parts:
            yield _drawn(part, options.max_width)

    @property
    def _heads(self) -> Sequence[str]:
        return [*self.left, *self.right, *self.last]

    def _column(self, index: int) -> _Column:
        is_text = not len(self.left) <= index < len(self.left) + len(self.right)
        return _Column(self._heads[index], [row[index] for row in self._rows], is_text)


@dataclass(frozen=True)
class _Column:
    head: str
    cells: Sequence[str]
    is_text: bool
    folded: int = _LEAST_TEXT  # width that a text keeps before it is folded

    def in_ascii(self) -> _Column:
        return replace(self, head=in_ascii(self.head), cells=[in_ascii(cell) for cell in self.cells])

    @property
    def most(self) -> int:
        """The width at which nothing is folded."""
        return max(map(len, (self.head, *self.cells)))

    @property
    def least(self) -> int:
        """The least width at which the column can be shown."""
        head = max(widest_word(self.head), min(len(self.head), _LEAST_HEAD))
        if not self.is_text:
            return max(head, *map(len, self.cells), 0)
        return max(1, head, *map(widest_part, self.cells), min(self.most, self.folded))


def _side_by_side(columns: Sequence[_Column], room: int) -> list[list[_Column]]:
    """Split columns into as few tables as fit; each begins with the first column."""
    first, *rest = columns
    parts = [[first]]
    for column in rest:
        if len(parts[-1]) > 1 and _needed([one.least for one in (*parts[-1], column)]) > room:
            parts.append([first])
        parts[-1].append(column)
    return parts


def _needed(widths: Sequence[int]) -> int:
    return sum(widths) + _GAP * (len(widths) - 1) + _EDGES


def _drawn(columns: Sequence[_Column], room: int) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    widths = _widths(columns, room)
    for column, width in zip(columns, widths, strict=True):
        head = Text("\n".join(fold(column.head, width)))
        table.add_column(head, width=width, no_wrap=True, justify="left" if column.is_text else "right")
    for cells in zip(*(column.cells for column in columns), strict=True):
        table.add_row(*(Text("\n".join(fold_names(cell, width))) for cell, width in zip(cells, widths, strict=True)))
    return table


def _widths(columns: Sequence[_Column], room: int) -> list[int]:
    """Return the widths: the least that each column needs, then one column of width at a time while room is left.

    Spare width goes to the narrowest folded column, to texts before numbers.
    """
    widths = [column.least for column in columns]
    for _ in range(room - _needed(widths)):
        folded = [index for index, column in enumerate(columns) if widths[index] < column.most]
        if not folded:
            break
        widths[min(folded, key=lambda index: (not columns[index].is_text, widths[index]))] += 1
    return widths


def heads_of(ways: Sequence[str], *columns: str) -> list[str]:
    """Return the heads of columns that have one entry per direction."""
    return [f"{column} {ARROWS[way]}" for column in columns for way in ways]


def format_bandwidth(value: float | None, has_lines: bool) -> str:
    """Format the bandwidth of one direction of a link; `lines` if only the lines that it passes limit it."""
    return "lines" if value is None and has_lines else format_bits_per_second(value)


def spanned(values: Iterable[float], shown: Callable[[float], str]) -> str:
    """Format equal values once, and others as a range: `4.13 s`, or `4.1 s .. 4.3 s`."""
    ordered = sorted(values)
    low, high = shown(ordered[0]), shown(ordered[-1])
    return low if low == high else f"{low} .. {high}"


def spanned_limits(values: Iterable[float | None], shown: Callable[[float | None], str]) -> str:
    """Format limits as `spanned` formats numbers. None (no limit) is the largest."""
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
