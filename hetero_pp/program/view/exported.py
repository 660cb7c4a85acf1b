"""Writes the page with its data as one HTML file that needs no server and no network."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hetero_pp.core.files import write_whole
from hetero_pp.program.report.recorder import to_json
from hetero_pp.program.view.run_view import Source
from hetero_pp.program.view.self_contained import self_contained
from hetero_pp.program.view.server import run_of

MOST_FRAMES = 300
"""Key frames of each run in the file."""


def export_page(sources: Mapping[str, Source], path: Path) -> None:
    """Write the page of these runs to a file. Raises OSError."""
    write_whole(path, self_contained(data_of(sources)).encode())


def data_of(sources: Mapping[str, Source]) -> dict[str, Any]:
    """Return the runs, their histories and frames, and predictions, in the form that the page reads."""
    views = {name: source.view for name, source in sources.items() if source.view is not None}
    predictions = {name: source.prediction for name, source in sources.items()}
    found = {
        "runs": [run_of(name, source) for name, source in sources.items()],
        "histories": {name: view.history(name) for name, view in views.items()},
        "predictions": {name: one for name, one in predictions.items() if one is not None},
    }
    frames = {name: [*view.key_frames.some(MOST_FRAMES), view.frame()] for name, view in views.items()}
    shown: dict[str, Any] = json.loads(to_json(found))  # numbers that are not finite become null
    return shown | {"frames": {name: [json.loads(one) for one in found] for name, found in frames.items()}}
