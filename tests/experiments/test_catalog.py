"""A user's experiments folder: its scales, errors of a wrong file, and other files that still work."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from catalogs import SHIPPED

from hetero_pp.core.errors import ConfigError
from hetero_pp.research.experiments.command import Request
from hetero_pp.research.experiments.definition import SHIPPED_SCALES, Catalog, Row
from hetero_pp.research.experiments.rows import Setting

Reproduce = Callable[..., tuple[int, str, str]]
"""The type of the fixture of conftest.py."""

SMALLEST = """\
name: mine
title: Mine
baseline: none
rows:
  - {name: none}
  - name: all
    compressed: all
"""
SCALE = (SHIPPED_SCALES / "micro.yaml").read_text()


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    folder = tmp_path / "tables"
    folder.mkdir()
    (folder / "mine.yaml").write_text(SMALLEST)
    return folder


def test_a_table_needs_no_paper_no_claims_and_no_scale_of_its_own(mine: Path) -> None:
    catalog = Catalog(mine)
    assert set(catalog.experiments) == {"mine"}
    assert set(catalog.scales) == set(SHIPPED.scales)
    [setting], broken = Request(catalog).settings()
    assert not broken
    assert [len(setting.config(row).replicas) for row in setting.rows()] == [4, 4]


@pytest.mark.parametrize("place", ["quick.yaml", "scales/quick.yaml", "toy/quick.yaml"])
def test_a_scale_is_found_wherever_it_lies(place: str, mine: Path) -> None:
    (mine / place).parent.mkdir(exist_ok=True)
    (mine / place).write_text(SCALE.replace("name: micro", "name: quick").replace("\nreplicas: 4", "\nreplicas: 2"))
    catalog = Catalog(mine)
    assert catalog.scale("quick").replicas == 2
    assert set(catalog.scales) == {"quick", *SHIPPED.scales}
    assert set(catalog.experiments) == {"mine"}


def test_each_papers_experiments_have_its_recipe(mine: Path) -> None:
    """Experiments of no paper have the recipe without `experiments`; nobody has that of another paper."""
    (mine / "sparseloco").mkdir()
    (mine / "sparseloco" / "one.yaml").write_text(SMALLEST.replace("name: mine", "name: sparseloco/one"))
    catalog = Catalog(mine)
    found = {one.experiment.name: one.scale.key for one in Request(catalog, scale="paper").settings()[0]}
    assert found == {"mine": "paper", "sparseloco/one": "paper/sparseloco"}
    [setting], _ = Request(catalog, scale="paper/sparseloco").settings()
    assert (setting.experiment.name, setting.scale.name) == ("sparseloco/one", "paper")
    with pytest.raises(ConfigError) as error:
        Request(catalog, names=["sparseloco/one"], scale="paper/diloco").settings()
    said = "7: experiments: found the experiment `sparseloco/one`, expected one in the folder `diloco`"
    assert str(error.value).startswith(f"{SHIPPED_SCALES / 'paper' / 'diloco.yaml'}:{said}")


def test_a_scale_of_ones_own_is_taken_before_the_shipped_one_and_hides_its_recipes(mine: Path) -> None:
    (mine / "micro.yaml").write_text(SCALE.replace("\nreplicas: 4", "\nreplicas: 2"))
    (mine / "paper.yaml").write_text(SCALE.replace("name: micro", "name: paper"))
    catalog = Catalog(mine)
    assert catalog.scale("micro").replicas == 2
    assert "paper/diloco" not in catalog.scales
    with pytest.raises(ConfigError, match="none: found no folder, expected a folder with experiments"):
        Catalog(mine / "none")


def test_cells_at_a_scale_replace_a_rows_own(mine: Path) -> None:
    row = "    cells: {outer.learning_rate: 0.9, inner.steps: 5}\n    at: {micro: {outer.learning_rate: 0.8}}\n"
    (mine / "mine.yaml").write_text(SMALLEST + row)
    catalog = Catalog(mine)
    [setting], _ = Request(catalog).settings()
    config = setting.config(setting.rows()[1])
    assert (config.outer.learning_rate, config.inner.steps) == (0.8, 5)


WRONG = {
    "no YAML": (SMALLEST + "  - [", "mine.yaml:8: not YAML: "),
    "a list": ("- 1\n", "mine.yaml:1: found no keys and values at the top, expected at least `name: NAME`"),
    "an unknown key": (
        SMALLEST.replace("compressed:", "compresed:"),
        "mine.yaml:7: rows[1].compresed: found an unknown",
    ),
    "a wrong value": (SMALLEST + "    rank: many\n", "mine.yaml:8: rows[1].rank: found `many`, expected a number or a"),
    "no title": (SMALLEST.replace("title: Mine\n", ""), "mine.yaml:1: title: found nothing, expected a value"),
    "no such baseline": (
        SMALLEST.replace("baseline: none", "baseline: non"),
        "mine.yaml:1: found no row `non`, expected one of `none`, `all`",
    ),
    "two rows of a name": (SMALLEST.replace("name: all", "name: none"), "found two rows named `none`"),
    "a claim of no row": (
        SMALLEST + "claims: [{text: a, lower: [none, some]}]\n",
        "found no row `some`, expected one of `none`, `all`",
    ),
    "a claim of nothing": (
        SMALLEST + "claims:\n  - {text: a, lower: [none, all]}\n  - {text: b}\n",
        "mine.yaml:10: claims[1]: expected exactly one of `lower`, `equal`, `grows`",
    ),
    "a claim of what is not measured": (
        SMALLEST + "claims: [{text: a, of: similarity, lower: [none, all]}]\n",
        "found a claim about similarity without `similarity_every`, expected the rounds between measurements",
    ),
    "a claim about time without one": (
        SMALLEST + "claims: [{text: a, by: all, lower: [none, all]}]\n",
        "found no `timed` in row `all`, expected it for a claim about time",
    ),
    "a clock that is not there": (SMALLEST + "clock: {run: away.yaml}\n", "tables/away.yaml"),
    "a loss of another forward by a time": (
        SMALLEST + "claims: [{text: a, of: compressed, by: all, lower: [none, all]}]\n",
        "found `by` with `of: compressed`, expected `own`, the loss of every round",
    ),
    "a reason that nothing shows": (
        SMALLEST + "claims:\n  - {text: a, lower: [none, all], why: It is small.}\n",
        "mine.yaml:9: claims[0]: found `why` without `shown_by`, expected rows that show it, or `not known` in its",
    ),
    "a reason that no row of another table shows": (
        SMALLEST + "claims:\n  - {text: a, lower: [none, all], why: Small., shown_by: [all, other, other | small]}\n",
        "mine.yaml:9: claims[0].shown_by: found `other | small`, expected a row of this table, the name of a table, or",
    ),
    "a name that leads elsewhere": (
        SMALLEST.replace("name: mine", "name: ../mine"),
        "mine.yaml:1: name: found `../mine`",
    ),
}
CELLS = {
    "an unknown cell": (
        SMALLEST + "    cells:\n      inner.stepz: 5\n",
        "mine.yaml:9: rows[1].cells.inner.stepz: found an unknown key",
    ),
    "a cell with a wrong value": (
        SMALLEST + "    cells: {outer.momentum: 2}\n",
        "mine.yaml:8: rows[1].cells.outer.momentum: found `2`, expected less than 1 (row `all` at scale micro)",
    ),
    "a cell of no section": (
        SMALLEST + "    cells: {outer.rounds.x: 2}\n",
        "mine.yaml:8: rows[1].cells.outer.rounds.x: found a single value above `x`, expected a section",
    ),
    "a cell of a scale": (
        SMALLEST + "    at: {micro: {inner.warmup_steps: x}}\n",
        "mine.yaml:8: rows[1].at.micro.inner.warmup_steps: found `x`, expected a whole number",
    ),
    "a cell of all rows": (
        SMALLEST + "at:\n  micro:\n    outer.method: best\n",
        "mine.yaml:10: at.micro.outer.method: found `best`, expected one of `het_pp`, `sparseloco`, `sparseloco_signs`",
    ),
    "no cell": (SMALLEST + "    cells: {seed: 1}\n", "mine.yaml:8: rows[1].cells.seed: found a key that a row cannot"),
}


@pytest.mark.parametrize(("text", "words"), [*WRONG.values(), *CELLS.values()], ids=[*WRONG, *CELLS])
def test_what_is_wrong_is_told_by_file_line_and_key_in_one_line(text: str, words: str, mine: Path) -> None:
    (mine / "mine.yaml").write_text(text)
    (mine / "other.yaml").write_text(SMALLEST.replace("name: mine", "name: other"))
    with pytest.raises(ConfigError) as error:
        Request(Catalog(mine), names=["mine"]).settings()
    assert words in str(error.value)
    assert str(error.value).startswith(str(mine))
    assert "\n" not in str(error.value)
    [setting], broken = Request(Catalog(mine)).settings()
    assert setting.experiment.name == "other"
    assert [str(one) for one in broken.values()] == [str(error.value)]


@pytest.mark.parametrize(
    ("line", "wrong", "told"),
    [
        ("steps: 10", "stepz: 10", r"base\.inner\.stepz: found an unknown key"),
        ("hardware: cpu", "hardware: x", "hardware: found `x`, expected one of `cpu`, `gpu`"),
    ],
)
def test_what_is_wrong_with_a_scale_is_told_by_its_file(mine: Path, line: str, wrong: str, told: str) -> None:
    number = 1 + SCALE[: SCALE.index(line)].count("\n")
    (mine / "quick.yaml").write_text(SCALE.replace("name: micro", "name: quick").replace(line, wrong))
    with pytest.raises(ConfigError, match=rf"quick\.yaml:{number}: {told}"):
        Request(Catalog(mine), names=["mine"], scale="quick").settings()
    assert Request(Catalog(mine), names=["mine"]).settings()


def test_a_name_that_two_files_have_is_that_of_the_first(mine: Path) -> None:
    (mine / "again.yaml").write_text(SMALLEST)
    catalog = Catalog(mine)
    assert set(catalog.experiments) == {"mine"}
    assert "mine.yaml:1: name: found `mine`, which is the name of another file" in str(catalog.broken["mine"])


def test_a_broken_file_is_listed_and_leaves_the_others_as_they_are(
    tmp_path: Path, toys: Path, reproduce: Reproduce
) -> None:
    (toys / "toy" / "two.yaml").write_text(SMALLEST.replace("name: mine", "name: toy/two") + "clams: []\n")
    code, out, _ = reproduce("--list", "--json", str(tmp_path / "list.json"))
    assert code == 0
    said = "two.yaml:8: clams: found an unknown key, expected one of"
    assert f"toy/two is invalid: {toys / 'toy' / said}" in out
    one, two = json.loads((tmp_path / "list.json").read_text())
    assert (one["name"], one["state"]) == ("toy/one", "0 of 4 rows at scale tiny")
    assert (two["name"], two["state"]) == ("toy/two", "broken")
    assert said in two["error"]
    code, out, errors = reproduce("toy/one", "--no-train", "--seeds", "1")
    assert (code, errors) == (0, "")
    assert "toy/two" not in out
    code, _, errors = reproduce("toy/two", "--no-train")
    assert code == 2
    assert said in errors


def test_a_row_of_another_method_has_none_of_the_scales_cells(tmp_path: Path) -> None:
    """A density belongs to SparseLoCo and not to DiLoCo. Cells that the row sets itself are kept, in any order."""
    found = SHIPPED.experiment("het-pp/table1")
    cells = {"outer.compression.value_bits": 8, "outer.method": "diloco"}
    rows = [
        Row(name="a", cells=cells),
        Row(name="b", steps=20, cells={"outer.method": "diloco"}),
        Row(name="c", steps=7),
    ]
    experiment = found.model_copy(update={"rows": rows, "claims": [], "baseline": "a"})
    setting = Setting(SHIPPED.scale("micro"), experiment)
    outer = setting.config(rows[0]).outer
    assert (outer.compression.density, outer.compression.value_bits, outer.rounds) == (1.0, 8, 40)
    config = setting.config(rows[1])
    assert (config.inner.steps, config.rounds, config.outer.compression.value_bits) == (20, 20, 32)
    assert (setting.config(rows[2]).outer.rounds, setting.not_representable(rows[2])) == (57, None)
    assert (
        setting.not_representable(Row(name="d", steps=500)) == "not representable: 400 steps are not a multiple of 500"
    )
