"""`--sweep`: its rows, their baselines, its errors and its picture."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from catalogs import SHIPPED
from matplotlib.figure import Figure

from hetero_pp.config.topology import ParticipantsReplica
from hetero_pp.core.errors import ConfigError
from hetero_pp.research.experiments.command import Request
from hetero_pp.research.experiments.definition import Catalog, Experiment, Row
from hetero_pp.research.experiments.pages import markdown
from hetero_pp.research.experiments.plots import draw
from hetero_pp.research.experiments.result import result_of
from hetero_pp.research.experiments.rows import Setting
from hetero_pp.research.experiments.sweep import swept

MICRO = SHIPPED.scale("micro")
TABLES = Path(__file__).parents[2] / "configs" / "experiments"


def _swept(*sweeps: str, experiment: str = "het-pp/table3") -> Setting:
    """Return the rows of the paper in a table, swept."""
    shipped = SHIPPED.experiment(experiment)
    papers = [row for row in shipped.rows if "ours" not in row.name]
    return swept(Setting(MICRO, shipped.model_copy(update={"rows": papers, "claims": []})), sweeps)


def _baselines(setting: Setting) -> dict[str, str]:
    return {row.name: setting.experiment.baseline_of(row) for row in setting.experiment.rows}


def test_rows_are_repeated() -> None:
    setting = _swept("outer.compression.density=1/128,1/8", "inner.steps=5,20")
    assert len(setting.experiment.rows) == 5 * 4
    config = setting.config(setting.experiment.rows[-1])
    assert (config.outer.compression.density, config.inner.steps) == (1 / 8, 20)


def test_replicas_and_the_rows_own_cells_are_changed() -> None:
    setting = _swept("replicas.batch_size=2", "replicas.boundary.dtype=fp32", "bits=4", "replicas=2", "rank=1/4")
    config = setting.config(setting.experiment.rows[1])
    assert [replica.batch_size for replica in config.replicas] == [2, 2]
    for replica in config.replicas:
        assert isinstance(replica, ParticipantsReplica)
        assert (replica.boundary.bits, replica.boundary.rank, replica.boundary.dtype) == (4, 1 / 4, "fp32")


def test_a_row_is_compared_with_the_baseline_at_its_own_values() -> None:
    setting = _swept("inner.steps=5,20", experiment="het-pp/table7")
    assert _baselines(setting) == {
        "Baseline, inner.steps=5": "Baseline, inner.steps=5",
        "Baseline, inner.steps=20": "Baseline, inner.steps=20",
        "PP-Compression, inner.steps=5": "Baseline, inner.steps=5",
        "PP-Compression, inner.steps=20": "Baseline, inner.steps=20",
    }
    assert Experiment.model_validate(setting.experiment.model_dump(exclude={"rows"}) | _rows(setting))


def _rows(setting: Setting) -> dict[str, Any]:
    """Return the rows as a YAML would have them."""
    return {"name": "toy", "rows": [row.model_dump(exclude={"of", "swept"}) for row in setting.experiment.rows]}


def test_a_row_that_the_cell_does_not_change_is_there_once() -> None:
    """A baseline without a boundary has no rank, so it does not change."""
    assert _baselines(_swept("rank=4,16", experiment="het-pp/table7")) == {
        "Baseline": "Baseline",
        "PP-Compression, rank=4": "Baseline",
        "PP-Compression, rank=16": "Baseline",
    }
    both = _baselines(_swept("rank=4,16", "inner.steps=5,20", experiment="het-pp/table7"))
    assert both["PP-Compression, rank=16, inner.steps=5"] == "Baseline, inner.steps=5"
    assert len(both) == 2 + 4


def test_the_papers_loss_stays_where_its_row_stays() -> None:
    rows = _swept("inner.steps=10,20", experiment="het-pp/table7").experiment.rows
    assert [row.paper for row in rows] == [2.747, None, 2.91, None]


def test_a_cell_is_of_one_replica_by_its_name_or_its_number() -> None:
    named, numbered = (_swept(f"replicas.{which}.batch_size=2") for which in ("r1", "1"))
    for setting in (named, numbered):
        sizes = [one.batch_size for one in setting.config(setting.experiment.rows[0]).replicas]
        assert sizes[1] == 2
        assert 2 not in (sizes[0], *sizes[2:])


THEIRS = "(SparseLoCo's paper: 1/128, 2-bit codes)."


def test_the_header_is_of_the_rows_that_there_are() -> None:
    setting = _swept("outer.compression.density=1/128,1/8", "inner.steps=5,20")
    header = next(line for line in markdown(result_of(setting, None, {})) if "Scale" in line)
    assert header.endswith("M = 4, H = 5 or 20, 40 or 48 outer rounds, density 1/128 or 1/8, not quantised " + THEIRS)
    note = "Swept: `outer.compression.density` = 1/128, 1/8; `inner.steps` = 5, 20."
    assert note in "\n".join(markdown(result_of(setting, None, {})))


def test_different_sweeps_have_different_names() -> None:
    sweeps = [["rank=4,8"], ["rank=4,16"], ["rank=1/8,1/2"], ["rank=4,8", "bits=4"], ["inner.steps=5"]]
    sweeps += [[f"inner.steps={','.join(map(str, range(11, 80)))},{last}"] for last in (80, 81)]
    names = {_swept(*some, experiment="het-pp/table7").experiment.name for some in sweeps}
    assert len(names) == len(sweeps)
    assert all(name.count("/") == 1 and len(name) < 200 for name in names)


REFUSED = {
    "no values": (["density"], "expected CELL=A,B"),
    "a value that a row cannot have": (["rank=many"], "--sweep rank=many: found `many`, expected a number or a ratio"),
    "an unknown key": (["inner.stepz=1,2"], "--sweep inner.stepz=1: found an unknown key, expected one of"),
    "the right key": (["inner.stepz=1,2"], "did you mean `steps`?"),
    "an unknown key of some rows": (["replicas.boundary.foo=1"], "--sweep replicas.boundary.foo=1: found an unknown"),
    "a key below a number": (
        ["outer.rounds.x=1"],
        "--sweep outer.rounds.x=1: found a single value above `x`, expected a section",
    ),
    "no such replica": (
        ["replicas.home.batch_size=4"],
        "no entry `home` in `replicas`, expected one of 0 (r0), 1",
    ),
    "of one replica": (["replicas.r0.batch_size=x"], "--sweep replicas.r0.batch_size=x: found `x`, expected a whole"),
    "no number": (["replicas.batch_size=x"], "--sweep replicas.batch_size=x: found `x`, expected a whole number"),
    "nothing": (["inner.steps=0"], "--sweep inner.steps=0: found `0`, expected at least 1"),
    "time beside steps": (["inner.seconds=5 s"], "--sweep inner.seconds=5 s: found 5 s and"),
    "what decides nothing": (["threads=1,2"], "--sweep threads=1,2: changes no row of het-pp/table3"),
    "links, which decide nothing": (["links.dsl.bandwidth=1 Mbit/s,2 Mbit/s"], "changes no row of het-pp/table3"),
    "what it is already": (["outer.learning_rate=1.0"], "--sweep outer.learning_rate=1.0: changes no row"),
    "one value as two": (["rank=1/4,16"], "--sweep rank=1/4,16: found 1/4 and 16, which are equal in every row"),
    "one value twice": (["inner.steps=5,5"], "--sweep inner.steps=5,5: found 5 and 5, which are equal"),
    "one cell twice": (["rank=4", "rank=8"], "--sweep rank=8: found `rank` twice"),
    "seeds": (["seed=1,2"], "--sweep seed=1: found a key that a row cannot set, expected --seeds"),
    "another corpus": (["data.corpus=docstrings"], "expected the `corpus` of the experiment, or --corpus"),
    "what is no cell": (["paper=1,2"], "--sweep paper=1,2: expected a key of a run, or one of rank, bits, compressed"),
}


def test_a_row_has_rounds_of_steps() -> None:
    """Rows are compared after equal numbers of steps, and the trainer of tables has no clock."""
    setting = _swept("inner.steps=5,20")
    row = setting.experiment.rows[0]
    timed = row.model_copy(update={"cells": {"inner": {"seconds": 5}}, "swept": {"inner": "{seconds: 5}"}})
    with pytest.raises(
        ConfigError, match="found 5 s, expected `steps`: rows are compared after equal numbers of steps"
    ):
        setting.config(timed)


@pytest.mark.parametrize(("sweeps", "words"), REFUSED.values(), ids=REFUSED)
def test_a_sweep_that_means_nothing_is_one_line(sweeps: list[str], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        _swept(*sweeps)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_of_all_tables_those_that_a_sweep_does_not_change_are_told(tmp_path: Path) -> None:
    for name in ("het-pp/table7", "beyond/sign_codes", "scales/micro"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(TABLES / f"{name}.yaml", tmp_path / f"{name}.yaml")
    settings, broken = Request(Catalog(tmp_path), sweeps=["rank=4,16"]).settings()
    assert [one.experiment.name for one in settings] == ["het-pp/table7-sweep-rank=4,16"]
    assert broken.keys() == {"beyond/sign_codes"}
    assert "changes no row of beyond/sign_codes" in str(broken["beyond/sign_codes"])


def test_the_picture_is_loss_against_the_swept_cell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, known: Callable[..., Any]
) -> None:
    rows = [Row(name="none"), Row(name="all", compressed="all", rank=8)]
    toy = Setting(MICRO, Experiment(name="toy", title="", baseline="none", rows=rows))
    setting = swept(toy, ["rank=1/4,1/16,1/8"])
    losses = {"none": 2.0, "all, rank=1/4": 3.0, "all, rank=1/16": 5.0, "all, rank=1/8": 4.0}
    outcomes = {row: {1: known(loss)} for row, loss in losses.items()}
    pictures: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: pictures.append(figure))
    draw(result_of(setting, None, outcomes), outcomes, tmp_path / "toy.png")
    [picture] = pictures
    _, against = picture.axes
    assert against.get_xlabel() == "rank"
    assert [label.get_text() for label in against.get_xticklabels()] == ["1/16", "1/8", "1/4"]
    drawn = {line.get_label(): np.asarray(line.get_xydata()).tolist() for line in against.get_lines()}
    assert [[1 / 16, 5.0], [1 / 8, 4.0], [1 / 4, 3.0]] in drawn.values()
    assert [y for _, y in drawn["none"]] == [2.0, 2.0]
