"""Experiments as data: every row validates; keys, resuming, tables, and verdicts on numbers computed by hand."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from catalogs import SHIPPED

from hetero_pp.config.spec import RunSpec
from hetero_pp.config.topology import ParticipantsReplica
from hetero_pp.core.errors import ConfigError
from hetero_pp.data.tokens import TokenStore
from hetero_pp.research.experiments.command import Request, scale_of, with_device
from hetero_pp.research.experiments.corpus import Supply
from hetero_pp.research.experiments.definition import Catalog, Claim, Experiment, Row, Trend
from hetero_pp.research.experiments.outcomes import commit, machine
from hetero_pp.research.experiments.pages import markdown, write_overview
from hetero_pp.research.experiments.result import result_of, write_result
from hetero_pp.research.experiments.rows import Setting
from hetero_pp.research.settings import ResearchConfig

Reproduce = Callable[..., tuple[int, str, str]]
"""The type of the fixture of conftest.py."""

EVERYWHERE = [
    (name, scale)
    for name, experiment in SHIPPED.experiments.items()
    for scale in ("micro", "micro_long", "ladder", "small", "paper")
    if experiment.has_scale(scale)
]
NAMES = [f"het-pp/table{name}" for name in ("1", "2", "3", "4", "5a", "5b", "5c", "5d", "7", "8")]


def test_the_tables_are_there() -> None:
    assert {*NAMES, "het-pp/alpha", "beyond/rank_for_bits"} <= set(SHIPPED.experiments)
    recipes = {"paper", "paper/sparseloco", "paper/diloco"}
    vocabularies = {"vocabulary_8k", "vocabulary_32k"}
    assert set(SHIPPED.scales) == {"micro", "micro_long", "ladder", "small", "at_size", *vocabularies, *recipes}


@pytest.mark.parametrize(("experiment", "scale"), EVERYWHERE)
def test_every_row_validates_at_every_scale(experiment: str, scale: str) -> None:
    found = SHIPPED.experiment(experiment)
    setting = Setting(SHIPPED.scale_of(found, scale), found)
    for row in found.rows:
        reason = setting.not_representable(row)
        if reason is not None:
            assert isinstance(row.rank, float) or row.replicas is not None or row.steps is not None
            continue
        config = setting.config(row, 1)
        compressed = [replica for replica in config.replicas if isinstance(replica, ParticipantsReplica)]
        assert len(compressed) == row.compressed_share * len(config.replicas)
        assert all(replica.boundary.rank == row.rank for replica in compressed)
        assert config.seed == 1


def test_the_papers_models_are_those_of_its_table_9() -> None:
    """Compares learning rates, sequence lengths, tokens and M of 512M, 178M and 1B, and of the AdamW baseline."""
    found = {}
    for name in ("table1", "table1_178m", "table7", "table4"):
        experiment = SHIPPED.experiment(f"het-pp/{name}")
        config = Setting(SHIPPED.scale("paper"), experiment).config(experiment.rows[0])
        tokens = config.rounds * (config.inner.steps or 0) * config.data.sequence_length
        tokens *= sum(replica.batch_size for replica in config.replicas)
        length, rate = config.data.sequence_length, config.inner.learning_rate
        found[name] = (config.model.preset, len(config.replicas), length, rate, round(tokens / 1e9))
    assert found == {
        "table1": ("512m", 8, 2048, 1e-3, 10),
        "table1_178m": ("178m", 8, 2048, 1e-3, 3),
        "table7": ("1b", 2, 1024, 1e-3, 10),
        "table4": ("512m", 8, 2048, 3e-4, 10),
    }


def _at_paper(name: str, row: str) -> ResearchConfig:
    experiment = SHIPPED.experiment(name)
    setting = Setting(SHIPPED.scale_of(experiment, "paper"), experiment)
    return setting.config(next(one for one in experiment.rows if one.name == row))


def test_dilocos_sizes_are_those_of_its_table_1() -> None:
    """Parameters are the paper's: two feed-forward matrices of 4 x width, and one matrix for embedding and output."""
    for size, (layers, width, heads, head) in {
        "60M": (3, 896, 16, 64),
        "150M": (12, 896, 16, 64),
        "400M": (12, 1536, 12, 128),
    }.items():
        spec = RunSpec(_at_paper("diloco/table1", f"{size}, DiLoCo"), 32000)
        shape = spec.shape
        assert (shape.layers, shape.width, shape.heads) == (layers, width, heads)
        assert (shape.head_width or width // heads) == head
        papers = 32000 * width + layers * (4 * width * heads * head + 2 * width * 4 * width)
        assert spec.parameter_count - 32000 * width == pytest.approx(papers, rel=1e-3)
        assert (len(spec.config.replicas), spec.config.inner.steps, spec.config.rounds) == (8, 500, 176)


def test_sparselocos_rows_are_those_of_its_table_9() -> None:
    """Compares parameters, batch, steps and rates. Table 9 of ours has the searched values, not ten times of them."""
    config = _at_paper("sparseloco/table1", "SparseLoCo, 1/32")
    assert RunSpec(config, 32000).parameter_count == 512_398_848
    assert [(one.batch_size, len(config.replicas)) for one in config.replicas] == [(256, 8)] * 8
    assert (config.data.sequence_length, config.inner.warmup_steps) == (2048, 500)
    found = {}
    for row in SHIPPED.experiment("sparseloco/table1").rows:
        config = _at_paper("sparseloco/table1", row.name)
        steps, compression = config.rounds * (config.inner.steps or 0), config.outer.compression
        found[row.name] = (steps, config.inner.learning_rate, config.outer.learning_rate, compression.density)
    assert found == {
        "AdamW DDP": (2445, 2e-3, 1.0, 1.0),
        "DiLoCo": (2445, 8e-4, 0.6, 1.0),
        "SparseLoCo, 1/128": (2445, 1e-3, 1.0, 1 / 128),
        "SparseLoCo, 1/32": (2445, 1e-3, 1.0, 1 / 32),
        "DeMo, 1/128": (2445, 1.0, 1e-3, 1 / 128),
        "DeMo, 1/32": (2445, 1.0, 1e-3, 1 / 32),
    }
    for row in SHIPPED.experiment("sparseloco/table9").rows:
        config = _at_paper("sparseloco/table9", row.name)
        rate = config.outer.learning_rate if row.name.startswith("DeMo") else config.inner.learning_rate
        assert rate == pytest.approx(float(row.name.split(", ")[1]) / 10)
    demo = _at_paper("sparseloco/table7", "DeMo").outer
    assert (demo.learning_rate, demo.warmup_rounds, demo.compression.density) == (1e-3, 500, 1 / 128)
    long = _at_paper("sparseloco/table8", "DiLoCo")
    assert (long.rounds * 250, long.inner.learning_rate) == (4750, 6e-4)
    assert _at_paper("sparseloco/figure1", "DiLoCo, H = 30").inner.learning_rate == 6e-4


def test_a_row_that_repeats_the_corpus_needs_no_more_of_it() -> None:
    """Table 3 of DiLoCo has such rows with 64 replicas; the largest of the others has 16."""
    setting = Setting(SHIPPED.scale("micro"), SHIPPED.experiment("diloco/table3"))
    Supply(setting, _store(16 * 4 * 400 * 129)).require_enough()
    with pytest.raises(
        ConfigError, match="found 3,302,399 tokens in standard-library, expected 3,302,400: 1 are missing"
    ):
        Supply(setting, _store(16 * 4 * 400 * 129 - 1)).require_enough()


def _store(tokens: int) -> TokenStore:
    train, validation = np.zeros(tokens, np.uint8), np.zeros(10**6, np.uint8)
    return TokenStore(train=train, validation=validation, vocabulary=256, path=Path(), digest="")


def _outcome(loss: float, diverged: bool = False) -> dict[str, Any]:
    return {
        "key": "",
        "validation_loss": [loss + 1, loss],
        "uncompressed": loss,
        "compressed": None,
        "tokens": 10,
        "boundary_bytes_per_token": 16.0,
        "diverged": diverged,
        "seconds": 1.0,
    }


@pytest.mark.starts_processes
def test_tables(tmp_path: Path) -> None:
    experiment = Experiment(
        name="toy/one",
        title="Toy",
        paper="nowhere",
        baseline="none",
        bias_every=1,
        similarity_every=1,
        rows=[Row(name="none", paper=2.0), Row(name="all", compressed="all", rank=8, paper=2.2), Row(name="bad")],
        claims=[
            Claim(text="costs", lower=("none", "all"), why="because", shown_by=["all"]),
            Claim(text="bias", of="bias", lower=("none", "all")),
            Claim(text="alike", of="similarity", lower=("none", "all")),
            Claim(text="early", lower=("none", "all"), after=0.4, ours=True),
        ],
    )
    outcomes = {
        "none": {
            seed: _outcome(loss) | {"similarity": [(1, 0.2, 0.0), (2, 0.1 + 0.1 * seed, 0.1)]}
            for seed, loss in ((1, 4.0), (2, 4.2))
        },
        "all": {
            seed: _outcome(loss)
            | {"bias": [(1, 0.2), (2, 0.4)], "similarity": [(2, 0.3 + 0.05 * seed, 0.1)]}
            | {"validation_loss": [3.3 + 0.2 * seed, loss]}
            for seed, loss in ((1, 4.4), (2, 4.62))
        },
        "bad": {1: _outcome(7.0, diverged=True)},
    }
    result = result_of(Setting(SHIPPED.scale("micro"), experiment), None, outcomes)
    rows = {row["name"]: row for row in result["rows"]}
    assert rows["all"]["ours"]["mean"] == pytest.approx(4.51)
    assert rows["all"]["ours"]["spread"] == pytest.approx(0.15556, abs=1e-4)
    assert rows["all"]["delta_percent"] == pytest.approx(10.0)
    assert rows["bad"]["ours"] is None
    assert rows["bad"]["state"] == "diverged (seed: last finite loss {1: 7.0})"
    assert rows["all"]["bias"]["mean"] == pytest.approx(0.3)
    assert rows["all"]["k_over_d"] == pytest.approx(1 / 8)
    assert [claim["verdict"] for claim in result["claims"]] == ["holds", "not run", "holds", "does not hold"]
    early = result["claims"][-1]
    assert (early["others"], early["slices"]) == ([], None)
    assert early["interval"] == pytest.approx((-1.5, -1.5))
    text = "\n".join(markdown(result))
    assert "| alike | cosine | **holds** | +0.150 to +0.150 | 2 |" in text
    assert "| all | 2.200 | +10.0 | 4.510 | 0.156 | 2 | +10.0 | 4.510 |  | 0.01 | 16.0 | 30.00 | 0.375 | done |" in text
    assert "| costs | own | **holds** |" in text
    assert "| early (ours) | own | **does not hold** |" in text
    assert "*costs*: because Shown by: `all`." in text
    assert "*early*: Not known." in text  # a claim that does not hold has a reason, or none is known
    assert "*alike*" not in text
    path = tmp_path / "results" / "micro" / "toy" / "one.json"
    write_result(result, outcomes, path)
    assert json.loads(path.read_text())["claims"][0]["seeds"] == 2
    assert path.with_suffix(".png").stat().st_size > 10_000
    write_overview(tmp_path / "results", tmp_path / "results.md", tmp_path)
    assert (
        "| [toy/one](results/micro/toy/one.md) | Toy | micro | 2 | 1 | 0 | 0 | 1 | 1 |"
        in (tmp_path / "results_tables.md").read_text()
    )


def test_a_row_lasts_until_something_is_measured() -> None:
    experiment = Experiment(name="toy/one", title="", baseline="a", volume_every=41, rows=[Row(name="a")])
    with pytest.raises(
        ConfigError, match="found 41, expected at most the 40 rounds of row `a` at scale micro"
    ) as error:
        Setting(SHIPPED.scale("micro"), experiment).config(experiment.rows[0])
    assert error.value.key == ("volume_every",)


def _rows(tmp_path: Path) -> Path:
    return tmp_path / "results" / "tiny" / "rows.jsonl"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, reproduce_in: Callable[[Path], Reproduce]) -> tuple[Path, str]:
    """Train the toy's table with two seeds. Return its folder and what the command printed."""
    folder = tmp_path_factory.mktemp("trained")
    docs = str(folder / "results.md")
    code, said, errors = reproduce_in(folder)("toy/one", "--seeds", "2", "--workers", "2", "--docs", docs)
    assert code == 0, errors
    return folder, said


@pytest.fixture
def table(trained: tuple[Path, str], tmp_path: Path, reproduce: Reproduce) -> Path:
    """Return the trained table in the test's folder, in which `reproduce` may change it."""
    for name in ("results", "runs"):
        shutil.copytree(trained[0] / name, tmp_path / name)
    return tmp_path / "results" / "tiny" / "toy" / "one.json"


@pytest.mark.starts_processes
def test_rows_are_compared_in_tokens_with_the_scales_budgets(table: Path, tmp_path: Path, reproduce: Reproduce) -> None:
    scale = tmp_path / "experiments" / "scales" / "tiny.yaml"
    scale.write_text(f"budgets: toy/one\n{scale.read_text()}")
    assert reproduce("toy/one", "--no-train", "--seeds", "2")[0] == 0
    result = json.loads(table.read_text())
    none, compressed = (row["times_tokens"] for row in result["rows"][:2])
    assert none == ["", pytest.approx(1)]
    assert compressed[0] in ("> ", "< ")
    assert result["budgets"] == "toy/one"


@pytest.mark.starts_processes
def test_a_table_is_made_and_resumed(
    trained: tuple[Path, str], table: Path, tmp_path: Path, reproduce: Reproduce
) -> None:
    """The command prints the needed tokens, and whether the corpus has them, before it trains rows."""
    result = json.loads(table.read_text())
    told = " ".join(trained[1].split()).partition(" rows ")[0]
    assert f"{result['corpus']['tokens']:,} tokens to train on in " in told
    assert "272 are needed: enough" in told  # 2 rounds of 2 steps of 2 replicas, with 2 sequences of 17
    rows = {row["name"]: row for row in result["rows"]}
    assert set(rows["all"]["ours"]["seeds"]) == {"1", "2"}
    assert rows["too small"]["state"] == "not representable: k = 0.25 of 16 dimensions"
    assert rows["explodes"]["state"].startswith("diverged")
    assert [claim["verdict"] for claim in result["claims"]][1] == "not run"
    assert (trained[0] / "results.md").exists()
    kept = _rows(tmp_path).read_text().splitlines()
    assert len(kept) == 3 * 2  # 1/4 of 16 is 4: one row serves both
    made = {"compiled": False, "device": "cpu", "machine": machine(), "commit": commit()}
    assert [{key: row[key] for key in made} for row in map(json.loads, kept)] == [made] * len(kept)
    assert rows["the same"]["ours"] == rows["all"]["ours"]
    code, _, _ = reproduce("toy/one", "--seeds", "2")
    assert code == 0
    assert _rows(tmp_path).read_text().splitlines() == kept
    _rows(tmp_path).write_text("\n".join(kept[1:]) + "\n")
    assert reproduce("toy/one", "--seeds", "2", "--no-train")[0] == 0
    assert _rows(tmp_path).read_text().splitlines() == kept[1:]
    assert reproduce("toy/one", "--seeds", "2")[0] == 0
    [again, *others] = _rows(tmp_path).read_text().splitlines()
    assert others == kept[1:]
    assert json.loads(again)["validation_loss"] == json.loads(kept[0])["validation_loss"]
    assert again != kept[0]  # its seconds differ, so it was trained again


@pytest.mark.starts_processes
def test_rows_that_fail_are_told_and_the_exit_code_says_so(tmp_path: Path, reproduce: Reproduce) -> None:
    checkpoints = tmp_path / "runs" / ".rows"
    checkpoints.parent.mkdir()
    checkpoints.write_text("a file where checkpoints would go")
    only = ("--seeds", "1", "--rows", "none", "--rows", "all")
    assert reproduce("toy/one", *only)[0] == 0  # only state that an interruption would need is lost
    keys = [json.loads(line)["key"] for line in _rows(tmp_path).read_text().splitlines()]
    shutil.rmtree(tmp_path / "results")
    checkpoints.unlink()
    checkpoints.mkdir()
    for key in keys:
        (checkpoints / f"{key}.pt").mkdir()
    code, said, errors = reproduce("toy/one", *only)
    assert code == 1
    assert "none, seed 1 failed: IsADirectoryError" in said
    assert errors == "hetero-pp: 2 of 2 rows did not finish training\n"
    assert "not run: costs" in said


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["toy/two"], "found no experiment `toy/two`, expected one of toy/one"),
        (
            ["toy/one", "--scale", "huge"],
            f"found no scale `huge`, expected one of {', '.join(sorted([*SHIPPED.scales, 'tiny']))}",
        ),
    ],
)
def test_unknown_names_list_the_known_ones(
    arguments: list[str], words: str, tmp_path: Path, reproduce: Reproduce
) -> None:
    code, _, errors = reproduce(*arguments)
    assert code == 2
    assert errors == f"hetero-pp: {words}\n"


@pytest.mark.starts_processes
def test_a_table_is_kept_if_nothing_of_it_is_known(table: Path, tmp_path: Path, reproduce: Reproduce) -> None:
    kept = table.read_text()
    _rows(tmp_path).unlink()
    code, out, _ = reproduce("toy/one", "--no-train")
    assert code == 0
    assert "was not changed" in " ".join(out.split())  # a long path breaks the line
    assert table.read_text() == kept


@pytest.mark.starts_processes
def test_a_small_corpus_says_what_it_lacks_or_is_repeated(tmp_path: Path, toys: Path, reproduce: Reproduce) -> None:
    scale = toys / "scales" / "tiny.yaml"
    scale.write_text(scale.read_text().replace("rounds: 2", "rounds: 2000"))
    code, _, errors = reproduce("toy/one")
    assert code == 2
    assert "are missing (supply more text: --corpus PATH, or --corpus hf:NAME with --tokenizer PATH" in errors
    assert "; --repeat reads this corpus " in errors
    scale.write_text(scale.read_text().replace("validation_sequences: 4", "validation_sequences: 4000"))
    code, _, errors = reproduce("toy/one", "--repeat")
    assert code == 2
    assert "tokens to validate on in" in errors
    scale.write_text(scale.read_text().replace("validation_sequences: 4000", "validation_sequences: 4"))
    longer = scale.read_text().replace("sequence_length: 16", "sequence_length: 128")
    scale.write_text(longer.replace("rounds: 2000", "rounds: 13"))
    code, out, _ = reproduce("toy/one", "--dry-run", "--repeat")
    assert code == 0
    assert "tokens are needed of" in " ".join(out.split())
    code, _, errors = reproduce("toy/one", "--seeds", "1", "--rows", "none", "--repeat")
    assert code == 0, errors
    table = tmp_path / "results" / "tiny" / "toy" / "one.md"
    epochs = float(table.read_text().partition("read ")[2].partition(" times")[0])
    assert epochs > 1


@pytest.mark.parametrize(("scale", "rounds"), [("micro", False), ("paper", True)])
def test_only_scales_for_gpus_round_products(scale: str, rounds: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of the other scales are compared with rows that a CPU has trained."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    training = with_device(Request(SHIPPED, scale=scale), "cuda").training
    assert (training.device, training.rounds_products) == ("cuda", rounds)


@pytest.mark.starts_processes
def test_a_scale_without_its_hardware_is_validated_only(tmp_path: Path, toys: Path, reproduce: Reproduce) -> None:
    scale = toys / "scales" / "tiny.yaml"
    scale.write_text(scale.read_text().replace("hardware: cpu", "hardware: gpu"))
    monkey = pytest.MonkeyPatch()
    with monkey.context() as patch:
        patch.setattr("torch.cuda.is_available", lambda: False)
        assert reproduce("toy/one", "--seeds", "1")[0] == 0
        rows = json.loads((tmp_path / "results" / "tiny" / "toy" / "one.json").read_text())["rows"]
        assert rows[0]["state"] == "only validated: this scale needs a GPU"
        code, _, errors = reproduce("toy/one", "--device", "cuda")
        assert (code, errors) == (2, "hetero-pp: --device cuda: found no GPU that torch can use\n")
        assert reproduce("toy/one", "--seeds", "1", "--rows", "none", "--device", "cpu")[0] == 0
    rows = json.loads((tmp_path / "results" / "tiny" / "toy" / "one.json").read_text())["rows"]
    assert rows[0]["state"] == "done"


@pytest.mark.starts_processes
def test_only_rows_of_a_name_are_trained(tmp_path: Path, reproduce: Reproduce) -> None:
    results = str(tmp_path / "results")
    assert reproduce("toy/one", "--seeds", "1", "--rows", "n?ne", "--rows", "the *", "--results", results)[0] == 0
    trained = [json.loads(line)["row"] for line in _rows(tmp_path).read_text().splitlines()]
    assert trained == ["toy/one: none", "toy/one: the same"]
    rows = json.loads((tmp_path / "results" / "tiny" / "toy" / "one.json").read_text())["rows"]
    assert {row["name"]: row["state"] for row in rows if row["ours"] is None}["explodes"] == "not run"


def test_an_experiment_may_be_for_one_scale_alone(toys: Path, reproduce: Reproduce) -> None:
    text = (toys / "toy" / "one.yaml").read_text()
    (toys / "toy" / "large.yaml").write_text(text.replace("toy/one", "toy/large") + "scale: micro\n")
    catalog = Catalog(toys)
    assert (scale_of(catalog, ["toy/large"]), scale_of(catalog, ["toy/one"]), scale_of(catalog, [])) == ("micro",) * 3
    large = catalog.experiment("toy/large").model_copy(update={"scale": "tiny"})
    catalog.experiments["toy/large"] = large
    assert scale_of(catalog, ["toy/large"]) == "tiny"
    with pytest.raises(ConfigError, match="found experiments for the scales micro, tiny, expected one at a time"):
        scale_of(catalog, ["toy/large", "toy/one"])
    names = [setting.experiment.name for setting in Request(catalog, scale="micro").settings()[0]]
    assert "toy/one" in names and "toy/large" not in names
    code, _, errors = reproduce("toy/large", "--dry-run")
    assert (code, errors) == (2, "hetero-pp: --scale tiny: toy/large is only defined for micro\n")


def test_a_size_and_a_row_that_are_not_there_are_told() -> None:
    row = Row(name="a", size="65")
    setting = Setting(SHIPPED.scale("ladder"), Experiment(name="t", title="t", baseline="a", rows=[row]))
    with pytest.raises(ConfigError, match="found `65`, expected one of ladder's: 64, 128, 192, 256"):
        setting.config(row)
    with pytest.raises(ValueError, match="found no row `b`, expected one of `a`"):
        Experiment(name="t", title="t", baseline="a", rows=[Row(name="a")], trends=[Trend(name="t", rows=["a", "b"])])
    with pytest.raises(ValueError, match="exactly one"):
        Claim(text="", lower=("a", "b"), equal=("a", "b"))


def test_the_ladder_has_tokens_in_proportion_to_parameters() -> None:
    setting = Setting(SHIPPED.scale("ladder"), SHIPPED.experiment("beyond/ladder"))
    ratios = []
    for row in setting.experiment.rows:
        config = setting.config(row)
        ratios.append(config.rounds * 10 * 4 * 4 * 128 / RunSpec(config, setting.scale.vocabulary).parameter_count)
        if row.bits is not None:
            assert isinstance(row.rank, int)
            assert 4 * row.rank + 8 == 16 * (setting.width(row) // 8)  # as many bits as 1/8 of the dimensions in bf16
    assert max(ratios) / min(ratios) < 1.02
