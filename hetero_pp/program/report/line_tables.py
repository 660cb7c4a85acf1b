"""Lines in tables: while a run goes on, and at its end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from hetero_pp.lines import WAYS, Way
from hetero_pp.program.report.carried import LineState
from hetero_pp.program.report.state import format_share
from hetero_pp.program.report.tables import format_two, plain_table
from hetero_pp.units import format_bytes

ARROWS: Mapping[Way, str] = {"up": "↑", "down": "↓"}


def live_lines(lines: Sequence[LineState], seconds: float, now: float) -> Table:
    """What each line carries, `seconds` after training began."""
    table = _table("now", "busy", "total")
    for line in lines:
        table.add_row(
            line.spec.name,
            format_two(line.spec.up, line.spec.down),
            *(f"{format_bytes(line.recent_bytes_per_second(way, now))}/s" for way in WAYS),
            *(format_share(line.busy_share(way, seconds)) for way in WAYS),
            *(format_bytes(line.wire_bytes(way)) for way in WAYS),
        )
    return table


def result_lines(summary: Mapping[str, Any]) -> Table:
    """What each line carried in a run, from its summary."""
    table = _table("payload", "wire", "busy")
    for line in summary["lines"]:
        table.add_row(
            line["name"],
            format_two(*(line["bandwidth_bits_per_second"][way] for way in WAYS)),
            *(format_bytes(line[what][way]) for what in ("payload_bytes", "wire_bytes") for way in WAYS),
            *(format_share(line["busy_share"][way]) for way in WAYS),
        )
    return table


def _table(*columns: str) -> Table:
    return plain_table(("line", "up / down"), [f"{column} {ARROWS[way]}" for column in columns for way in WAYS])
