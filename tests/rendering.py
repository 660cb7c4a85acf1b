"""A stand-in for rendering, which takes a third of a short run's CPU time. Tests with the mark `renders` do render."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hetero_pp.core.files import write_whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RENDERER = "hetero_pp.program.report.pictures.save_figure"
"""Function that renders the pictures of a run. `save_placeholder` replaces it; figures are still composed."""


def save_placeholder(figure: Figure, path: Path, dpi: int = 0) -> None:
    """Write a file in place of a rendered picture."""
    write_whole(path, b"a picture")
