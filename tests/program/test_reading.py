"""Progress of a long reading: a bar on a terminal, a few lines elsewhere. The clock is simulated."""

from __future__ import annotations

import io

from rich.console import Console

from hetero_pp.program.report.output import shown_reading


def shown(is_terminal: bool) -> str:
    """Return what is printed of a reading of 100 seconds."""
    out, now = io.StringIO(), [0.0]
    with shown_reading(
        Console(file=out, width=80, force_terminal=is_terminal), "reading the corpus", lambda: now[0]
    ) as on_progress:
        for now[0] in range(100):
            on_progress("encoding the corpus", now[0] / 100)
    return out.getvalue()


def test_progress_is_a_bar_on_a_terminal_and_elsewhere_lines_at_growing_intervals() -> None:
    lines = [f"encoding the corpus: {share} %" for share in (10, 30, 70)]
    assert shown(is_terminal=False).splitlines() == lines
    assert "encoding the corpus" in (bar := shown(is_terminal=True)) and "99%" in bar
