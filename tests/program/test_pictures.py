"""The pictures exist, have the right size and are not blank."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from test_run_state import (
    START,
    evaluation,
    inner_step,
    link_use,
    made_up_reports,
    made_up_spec,
    state_of,
)

from hetero_pp.program.report.pictures import draw_links, draw_losses
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
    draw_links(state, tmp_path / "links.png")
    for name in ("loss.png", "links.png"):
        assert_shows_something(tmp_path / name)
    assert not list(tmp_path.glob("*.part"))


def test_nothing_to_draw(tmp_path: Path) -> None:
    state = RunState(made_up_spec())
    draw_losses(state, tmp_path / "loss.png")
    draw_links(state, tmp_path / "links.png")
    assert not list(tmp_path.iterdir())


@pytest.mark.filterwarnings("error")
def test_a_diverged_run_and_links_of_very_different_loads(tmp_path: Path) -> None:
    reports = [inner_step(START, "dc", "dc", 1, step, loss=loss) for step, loss in enumerate((9.0, math.nan))]
    reports += [evaluation(START + 1, name, 1, math.inf) for name in ("dc", "home")]
    reports += [link_use(START + 1, "home.0-1", "forward", 1, 10**9, busy=2.0)]
    reports += [link_use(START + 1, "dc-exchange", "forward", 1, 10**3)]
    state = state_of(reports)
    draw_losses(state, tmp_path / "loss.png")
    draw_links(state, tmp_path / "links.png")
    for name in ("loss.png", "links.png"):
        assert_shows_something(tmp_path / name)
