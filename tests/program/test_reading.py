"""Progress of a long reading: a bar on a terminal, a few lines elsewhere. The clock is simulated."""

from __future__ import annotations

import io

from rich.console import Console

from hetero_pp.program.report.output import shown_reading


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def shown(seconds: int, is_terminal: bool) -> str:
    out, clock = io.StringIO(), Clock()
    console = Console(file=out, width=80, force_terminal=is_terminal)
    with shown_reading(console, "reading the corpus", clock) as on_progress:
        for clock.now in range(seconds):
            on_progress("encoding the corpus", clock.now / seconds)
    return out.getvalue()


def test_lines_at_growing_intervals_where_there_is_no_terminal() -> None:
    assert shown(100, is_terminal=False).splitlines() == [
        "encoding the corpus: 10 %",
        "encoding the corpus: 30 %",
        "encoding the corpus: 70 %",
    ]


def test_a_bar_with_a_percentage_on_a_terminal() -> None:
    text = shown(100, is_terminal=True)
    assert "encoding the corpus" in text
    assert "99%" in text
