"""The pictures exist, have the right size and are not blank."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from made_up_run import (
    START,
    evaluation,
    inner_step,
    made_up_reports,
    made_up_spec,
    state_of,
)

from hetero_pp.program.report.pictures import draw_losses
from hetero_pp.program.report.state import RunState

pytestmark = pytest.mark.renders


def pixels(path: Path) -> np.ndarray:
    from matplotlib.image import imread

    return imread(path, format="png")


def assert_shows_something(path: Path, colours: int = 50) -> None:
    image = pixels(path)
    assert image.shape[:2] == (1000, 1600)
    assert len(np.unique((image[..., :3] * 255).astype(np.uint32) @ [1 << 16, 1 << 8, 1])) > colours


def test_pictures_of_a_whole_run(tmp_path: Path) -> None:
    state = state_of(made_up_reports())
    draw_losses(state, tmp_path / "loss.png")
    assert_shows_something(tmp_path / "loss.png")
    assert not list(tmp_path.glob("*.part"))


def test_nothing_to_draw(tmp_path: Path) -> None:
    state = RunState(made_up_spec())
    draw_losses(state, tmp_path / "loss.png")
    assert not list(tmp_path.iterdir())


@pytest.mark.filterwarnings("error")
def test_a_diverged_run(tmp_path: Path) -> None:
    reports = [inner_step(START, "dc", "dc", 1, step, loss=loss) for step, loss in enumerate((9.0, math.nan))]
    reports += [evaluation(START + 1, name, 1, math.inf) for name in ("dc", "home")]
    state = state_of(reports)
    draw_losses(state, tmp_path / "loss.png")
    assert_shows_something(tmp_path / "loss.png")
