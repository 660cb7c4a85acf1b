"""Pictures of tables: where data and names are, and that names are readable."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from catalogs import SHIPPED
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text

from hetero_pp.research.experiments.definition import Experiment, Row
from hetero_pp.research.experiments.pages import markdown
from hetero_pp.research.experiments.plots import Place, lay_out
from hetero_pp.research.experiments.result import result_of
from hetero_pp.research.experiments.rows import Setting

Known = Callable[..., dict[str, Any]]
Drawn = Callable[..., Figure]
"""Types of fixtures of conftest.py."""

MICRO = SHIPPED.scale("micro")
RANKS = [2, 4, 6, 8, 14, 15, 16, 24, 30, 40, 60, 62]


@pytest.fixture
def picture(known: Known, drawn: Drawn) -> Figure:
    """Return the picture of an uncompressed row and of many ranks with equal losses at similar bytes per token."""
    rows = [Row(name="not compressed"), *(Row(name=f"{k} of them", compressed="all", rank=k) for k in RANKS)]
    setting = Setting(MICRO, Experiment(name="toy/plot", title="", baseline="not compressed", rows=rows))
    sizes = [0.0, *(2.0 * k for k in RANKS)]
    outcomes = {row.name: {1: known(4.0, boundary_bytes_per_token=size)} for row, size in zip(rows, sizes, strict=True)}
    figure = drawn(result_of(setting, None, outcomes), outcomes)
    FigureCanvasAgg(figure).draw()
    return figure


def test_what_is_not_compressed_is_a_line_and_no_point(picture: Figure) -> None:
    _, _, of_bytes = picture.axes
    points = {float(x) for container in of_bytes.containers for x in container[0].get_xdata()}
    assert points == {2.0 * k for k in RANKS}
    assert [[0.0, 4.0], [1.0, 4.0]] in [np.asarray(line.get_xydata()).tolist() for line in of_bytes.get_lines()]


def test_no_two_names_touch_and_none_leaves_the_picture(picture: Figure) -> None:
    texts: list[Text] = [*picture.legends[0].get_texts()]
    for axes in picture.axes:
        low, high = axes.get_xlim()
        texts += [label for label in axes.get_xticklabels() if low <= label.get_position()[0] <= high]
        texts += [axes.xaxis.label, axes.yaxis.label, axes.title]
    boxes = [(text.get_text(), text.get_window_extent()) for text in texts if text.get_text()]
    assert len(boxes) > 30
    whole = picture.bbox
    for name, box in boxes:
        assert whole.x0 <= box.x0 < box.x1 <= whole.x1 and whole.y0 <= box.y0 < box.y1 <= whole.y1, name
    assert not [(one[0], other[0]) for one, other in combinations(boxes, 2) if one[1].overlaps(other[1])]


def test_each_deployment_of_a_clock_has_a_panel_on_equal_logarithmic_axes(known: Known, drawn: Drawn) -> None:
    """The second of three rounds in 6 hours ends after 4; the page marks the first row to reach a loss."""
    rows = [Row(name=name) for name in ("one", "other")]
    setting = Setting(MICRO, Experiment(name="toy/plot", title="", baseline="one", rows=rows))
    outcomes = {row.name: {1: known(3.0, validation_loss=[5.0, 4.0, 3.0])} for row in rows}
    result = result_of(setting, None, outcomes)
    hours = {"slow": {"one": 6.0, "other": 3.0}, "quick": {"one": 0.3, "other": 3.0}, "third": {"one": 1, "other": 1}}
    until = {"slow": {"one": 4.0, "other": 2.0}, "quick": {"one": 0.2, "other": None}, "third": {"one": 1, "other": 1}}
    result["clock"] = {"hours": hours, "until": [{"loss": 4.0, "hours": until}]}
    panels = drawn(result, outcomes).axes
    assert [(axes.get_title(), axes.get_xscale()) for axes in panels] == [(name, "log") for name in hours]
    shown = [np.asarray(line.get_xydata()).tolist() for line in panels[0].get_lines()]
    assert shown == [[[2.0, 5.0], [4.0, 4.0], [6.0, 3.0]], [[1.0, 5.0], [2.0, 4.0], [3.0, 3.0]]]
    assert panels[0].get_xlim() == panels[1].get_xlim()
    page = list(markdown(result))
    start = page.index("| predicted hours until loss 4 | slow | quick | third |")
    assert page[start + 2 : start + 4] == ["| one | 4 | **0.2** | **1** |", "| other | **2** |  | **1** |"]
    assert "| one | 6 | **0.3** | **1** |" in page
    assert "| predicted hours until all rounds | slow | quick | third |" in page


def test_rows_that_differ_in_more_than_the_rank_are_on_no_line(known: Known) -> None:
    cells = {"inner.learning_rate": 1e-3}
    rows = [Row(name="a", compressed="all", rank=4), Row(name="b", compressed="all", rank=8, cells=cells)]
    rows += [Row(name=name, compressed="all", rank=rank) for name, rank in {"c": 16, "d": 32}.items()]
    setting = Setting(MICRO, Experiment(name="toy/plot", title="", baseline="a", rows=rows))
    result = result_of(setting, None, {row.name: {1: known(4.0)} for row in rows})
    assert result["varied"] == {"k/d": [[("a", 1 / 16), ("c", 1 / 4), ("d", 1 / 2)]]}


@pytest.mark.parametrize(
    ("values", "scale"), [((1, 2, 7), "linear"), ((1, 8), "log"), ((0, 100), "linear"), ((16,), "linear")]
)
def test_an_axis_has_room_and_is_logarithmic_where_values_differ_much(values: tuple[float, ...], scale: str) -> None:
    axes = Figure().subplots()
    lay_out(axes, [Place(value, f"{value:g}") for value in values])
    assert axes.get_xscale() == scale
    low, high = axes.get_xlim()
    assert low < min(values) <= max(values) < high
