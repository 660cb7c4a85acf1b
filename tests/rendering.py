"""A stand-in for the pictures of a run: rendering takes a third of a short run's CPU time. The mark `renders` draws.

This module is imported before the settings of PyTorch are made, so it imports nothing that imports PyTorch.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hetero_pp.core.files import write_whole

if TYPE_CHECKING:
    from hetero_pp.program.report.state import RunState

RECORDER = "hetero_pp.program.report.recorder"
DRAWS = ("draw_losses",)
"""Names in the recorder of the functions that draw a run's pictures."""


def draw_placeholder(state: RunState, path: Path) -> None:
    """Write a file in place of a picture. As with pictures, there is none before the first inner step."""
    if state.first_step is not None:
        write_whole(path, b"a picture")
