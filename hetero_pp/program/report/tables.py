"""What all tables on a terminal, or in a file that takes its place, have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from hetero_pp.links import DIRECTIONS
from hetero_pp.units import format_bits_per_second

WIDTH_OF_FILES = 100
"""Columns of the tables where there is no terminal."""


def wide(console: Console, width: int = WIDTH_OF_FILES) -> Console:
    """A terminal as it is; a file or a pipe with room for a table."""
    return console if console.is_terminal else Console(file=console.file, width=max(width, console.width))


def plain_table(left: Sequence[str], right: Sequence[str], widest: int | None = None) -> Table:
    """A table with text columns first (the first one never narrower than `widest`) and number columns after them."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for column in left:
        table.add_column(column, overflow="fold", min_width=widest if column == left[0] else None)
    for column in right:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def format_bandwidths(ways: Mapping[Any, float | None], has_lines: bool = False) -> str:
    """`100 Mbit/s`; if the directions differ, `20 / 50 Mbit/s` or `50 Mbit/s / 1 Gbit/s`.

    What has no limit but the lines that it passes is as fast as its `lines`.
    """
    if has_lines and all(ways[way] is None for way in DIRECTIONS):
        return "lines"
    return format_two(*(ways[way] for way in DIRECTIONS))


def format_two(there: float | None, back: float | None) -> str:
    """Two bandwidths; one number if they are equal."""
    first, second = format_bits_per_second(there), format_bits_per_second(back)
    if first == second:
        return first
    number, _, unit = first.partition(" ")
    return f"{number if unit and second.endswith(f' {unit}') else first} / {second}"
