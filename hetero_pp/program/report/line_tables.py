"""Tables of access lines, for the live view and the end of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hetero_pp.config.lines import WAYS
from hetero_pp.core.units import format_bits_per_second, format_bytes
from hetero_pp.program.report.carried import LineState
from hetero_pp.program.report.state import format_share
from hetero_pp.program.report.tables import PlainTable, format_two, heads_of


def live_lines(lines: Sequence[LineState], seconds: float, now: float) -> PlainTable:
    """Return a table of what each line carries, `seconds` after training began."""
    table = PlainTable(["line", "up / down"], heads_of(WAYS, "now", "busy", "total"), spare=["up / down"])
    for line in lines:
        table.add_row(
            line.spec.name,
            format_two(line.spec.up, line.spec.down),
            *(f"{format_bytes(line.recent_bytes_per_second(way, now))}/s" for way in WAYS),
            *(format_share(line.busy_share(way, seconds)) for way in WAYS),
            *(format_bytes(line.wire_bytes(way)) for way in WAYS),
        )
    return table


def result_lines(summary: Mapping[str, Any]) -> PlainTable:
    """Return a table of what each line carried in a run, from its summary."""
    table = PlainTable(["line", ""], ["bandwidth", "payload", "wire", "busy"])
    for line in summary["lines"]:
        table.add_both(
            line["name"],
            WAYS,
            [format_bits_per_second(line["bandwidth_bits_per_second"][way]) for way in WAYS],
            [format_bytes(line["payload_bytes"][way]) for way in WAYS],
            [format_bytes(line["wire_bytes"][way]) for way in WAYS],
            [format_share(line["busy_share"][way]) for way in WAYS],
        )
    return table
