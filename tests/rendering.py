"""A stand-in for rendering, which takes a third of a short run's CPU time. Tests with the mark `renders` do render."""

from __future__ import annotations

from pathlib import Path

from hetero_pp.core.files import write_whole

RENDERER = "hetero_pp.program.report.pictures.save_figure"
"""The function that `save_placeholder` replaces. It renders the pictures of a run; figures are still composed."""


def save_placeholder(_figure: object, path: Path, dpi: int = 0) -> None:
    """Write a file in place of a rendered picture."""
    write_whole(path, b"a picture")
