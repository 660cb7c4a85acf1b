"""docs/results.md and the list of tables: numbers come from rows, links work, and the record of machines is kept."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hetero_pp.core.errors import ConfigError
from hetero_pp.research.experiments.outcomes import commit, machine, trained_by
from hetero_pp.research.experiments.pages import with_figures, write_overview

Reproduce = Callable[..., tuple[int, str, str]]
Known = Callable[..., dict[str, Any]]
"""The type of the fixture of conftest.py."""

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "results.md"
LIST = ROOT / "docs" / "results_tables.md"


def test_the_page_is_that_of_the_results(tmp_path: Path) -> None:
    """The page and the list are as `--docs` writes them, except for the paths, and the page is short."""
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "results").symlink_to(RESULTS)
    write_overview(tmp_path / "benchmarks" / "results", tmp_path / "docs.md", ROOT / "configs" / "experiments")
    for written, page in (("docs.md", PAGE), ("docs_tables.md", LIST)):
        text = (tmp_path / written).read_text().replace("](benchmarks/", "](../benchmarks/")
        assert text == page.read_text()
    assert len(PAGE.read_text().splitlines()) <= 200


def test_links_lead_to_the_page_of_each_table_and_to_pictures() -> None:
    links = [link for page in (PAGE, LIST) for link in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text())]
    assert all((PAGE.parent / link).is_file() for link in links)
    linked = {(PAGE.parent / link).resolve() for link in links}
    assert {path.with_suffix(".md") for path in _tables()} <= linked
    assert sum(path.suffix == ".png" for path in linked) >= 4


def test_every_table_names_its_command() -> None:
    for path in _tables():
        text = path.with_suffix(".md").read_text()
        assert re.search(
            rf"^hetero-pp reproduce {path.parent.name}/{path.stem}( --scale \w+)? --seeds [1-9]$", text, re.M
        ), path


def _tables() -> list[Path]:
    return [
        path
        for scale in ("micro", "micro_long", "ladder", "vocabulary_8k", "vocabulary_32k")
        for path in (RESULTS / scale).glob("*/*.json")
    ]


# ---- numbers in a text ----

RESULT: dict[str, Any] = {
    "rows": [
        {
            "name": "base",
            "baseline": "base",
            "paper": 2.0,
            "ours": {"mean": 4.0, "seeds": {"1": 3.9, "2": 4.1}},
            "compressed_seeds": {"2": 5.0, "3": 6.0},
            "delta_percent": 0.0,
        },
        {
            "name": "a - b",
            "baseline": "base",
            "paper": 2.1,
            "ours": {"mean": 4.5, "seeds": {"2": 4.4, "3": 4.6}},
            "compressed_seeds": {"2": 5.25, "3": 6.5},
            "delta_percent": 12.34,
            "times_tokens": ["> ", 2.44],
            "bias": {"mean": 0.1234},
            "sparse_ring": {"mean": 1.239},
        },
    ],
    "claims": [
        {
            "text": "it costs",
            "of": "own",
            "about": "1",
            "verdict": "holds",
            "seeds": 3,
            "ours": False,
            "others": [{"of": "compressed", "verdict": "one seed", "seeds": 1}],
        },
        {
            "text": "it pays",
            "of": "uncompressed",
            "verdict": "does not hold",
            "seeds": 2,
            "ours": True,
            "others": [],
            "about": None,
        },
    ],
    "clock": {
        "hours": {"slow line": {"base": 9.0, "a - b": 1.0}},
        "until": [
            {
                "loss": 4.5,
                "hours": {"slow line": {"base": 3.14159, "a - b": None}, "20/100": {"base": 2.0, "a - b": 1.25}},
            }
        ],
    },
    "trends": [
        {"name": "a", "law": [{"width": 64, "percent": 4.56, "interval": [1.0, 20.04]}]},
        {"name": "b", "law": []},
    ],
}
FIGURES = {
    "{s/t | loss | a - b}": "4.50",
    "{s/t | percent | a - b}": "12.3",
    "{s/t | paper | a - b}": "2.10",
    "{s/t | paper percent | a - b}": "5.0",
    "{s/t | times | a - b}": "> 2.4",
    "{s/t | bias | a - b}": "12",
    "{s/t | sparse_ring | a - b}": "1.24",
    "{s/t | difference | base | a - b}": "0.30",  # at seed 2, which both have
    "{s/t | difference | base | a - b | compressed}": "0.38",  # at seeds 2 and 3
    "{s/t |\n  verdict | it\n  costs}": "holds (3 seeds)",
    "{s/t | verdict | it costs | compressed}": "one seed",
    "{s/t | verdict | it pays}": "does not hold (2 seeds)",
    "{s/t | law | a | 64}": "4.6 % (1.0 to 20.0)",
    "{s/t | until | 4.5 | slow line | base}": "3.14",
    "{s/t | until | 4.50 | slow line | a - b}": "never",
    "{s/t | first | 4.5 | slow line}": "base, 3.14 h",
    "{s/t | first | 4.5 | 20/100}": "a - b, 1.25 h",
}


@pytest.mark.parametrize(("text", "figure"), FIGURES.items(), ids=list(FIGURES.values()))
def test_figures_are_filled_in(text: str, figure: str, tmp_path: Path) -> None:
    (tmp_path / "found.md").write_text(f"# Found\n\nIt is {text}.\n- so\n")
    assert with_figures(tmp_path / "found.md", {"s/t": RESULT}) == f"# Found\n\nIt is {figure}.\n- so\n"


@pytest.mark.parametrize(
    "text",
    [
        "{s/u | loss | base}",
        "{s/t | loss | c}",
        "{s/t | bias | base}",
        "{s/t | ring | a - b}",
        "{s/t}",
        "{s/t | law | a | 128}",
        "{s/t | law | b | 64}",
        "{s/t | verdict | it pays | own}",
        "{s/t | until | 4.4 | slow line | base}",
        "{s/t | until | 4.5 | slow line | c}",
        "{s/t | first | 4.5 | quick line}",
        "{}",
    ],
)
def test_a_figure_that_is_not_known_is_told_by_its_line(text: str, tmp_path: Path) -> None:
    (tmp_path / "found.md").write_text(f"# Found\n\nIt is {text}.\n")
    with pytest.raises(ConfigError) as error:
        with_figures(tmp_path / "found.md", {"s/t": RESULT})
    assert str(error.value).startswith(f"{tmp_path / 'found.md'}:3: found `{text}`")


def test_the_first_screen_is_a_table_whose_verdicts_are_those_of_claims() -> None:
    """Each of its rows takes its verdict from a claim of the papers, and says why where the claim does not hold."""
    source = (ROOT / "configs" / "experiments" / "found.md").read_text().partition("\n\n## Which")[0]
    rows = [re.split(r" \| (?![^{]*\})", line.strip("| ")) for line in source.splitlines() if line.startswith("| ")][1:]
    shown = [line.split(" | ") for line in PAGE.read_text().splitlines()[7:] if line.startswith("| ")][1:]
    assert 12 <= len(rows) <= 18
    for number, (_, _, _, said, *why) in enumerate(rows):
        found = re.fullmatch(r"\{([\w/-]+) \| verdict \| (.+)\}", said)
        assert found, said
        [claim] = [
            claim
            for claim in json.loads((RESULTS / f"{found[1]}.json").read_text())["claims"]
            if claim["text"] == found[2]
        ]
        assert not claim["ours"]
        assert shown[number][3].startswith(claim["verdict"])
        assert claim["verdict"] != "does not hold" or len(why[0].strip("| ")) > 5, said


def test_the_claims_beyond_noise_are_counted_before_those_that_hold(tmp_path: Path) -> None:
    """Four of five claims have a verdict if each is judged alone; two of them still have one as a family."""
    claims = [
        {"p": p, "verdict": verdict, "ours": ours, "about": None, "of": "own"}
        for p, verdict, ours in (
            (0.0, "holds", True),
            (0.01, "does not hold", False),
            (0.03, "holds", False),
            (0.04, "holds", True),
            (0.2, "within noise", True),
            (None, "one seed", False),
        )
    ]
    result = json.loads((RESULTS / "micro" / "het-pp" / "table1.json").read_text()) | {"claims": claims}
    (path := tmp_path / "results" / "micro" / "het-pp" / "table1.json").parent.mkdir(parents=True)
    path.write_text(json.dumps(result))
    write_overview(tmp_path / "results", tmp_path / "page.md", tmp_path)
    paragraphs = (tmp_path / "page.md").read_text().split("\n\n")
    title, heading, statistic, alone = (" ".join(one.split()) for one in paragraphs)
    assert (title, heading) == ("# Results", "## How many verdicts are noise")
    assert statistic.startswith("2 of 5 claims are beyond noise ")
    assert ": 1 of the papers (*does not hold* 1) and 1 of ours (*holds* 1). 1 of them rest on" in statistic
    verdicts = "*holds* 1, *does not hold* 1, *one seed* 1", "*holds* 2, *within noise* 1"
    assert f": 3 of the papers ({verdicts[0]}) and 3 of ours ({verdicts[1]})." in alone


# ---- machines that trained the rows ----

HERE = {"machine": {"processor": "A", "cores": 2, "gpu": None, "python": "3", "torch": "2"}, "commit": "1111111"}
THERE = {"machine": {"processor": "B", "cores": 8, "gpu": "H100", "python": "3", "torch": "2"}, "commit": "2222222"}


def test_of_rows_that_do_not_say_what_the_table_said_stays(known: Known) -> None:
    earlier = [{**HERE, "rows": {"a": [1]}}]
    outcomes = {"a": {1: known(1.0), 2: known(1.0)}, "b": {1: known(1.0, **THERE)}}
    assert trained_by(outcomes, earlier) == [
        {**HERE, "rows": {"a": [1]}},
        {"machine": None, "commit": None, "rows": {"a": [2]}},
        {**THERE, "rows": {"b": [1]}},
    ]


@pytest.mark.starts_processes
def test_a_finished_table_that_is_written_anew_is_the_same(
    tmp_path: Path, reproduce: Reproduce, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This holds on another machine and commit, and in an empty folder, from the rows alone."""
    folder = tmp_path / "results" / "tiny"
    page = "--docs", str(tmp_path / "results.md")
    assert reproduce("toy/one", "--seeds", "1", *page)[0] == 0
    [entry] = json.loads((folder / "toy" / "one.json").read_text())["trained"]
    assert (entry["machine"], entry["commit"]) == (machine(), commit())
    pages = tmp_path / "results.md", tmp_path / "results_tables.md"
    written = {path: path.read_bytes() for path in [*folder.glob("**/*.*"), *pages]}
    monkeypatch.setattr("hetero_pp.research.experiments.training.commit", lambda: "0123abc")
    monkeypatch.setattr("hetero_pp.research.experiments.training.machine", lambda: THERE["machine"])
    for _ in range(2):
        assert reproduce("toy/one", "--seeds", "1", "--no-train", *page)[0] == 0
        assert {path: path.read_bytes() for path in written} == written
        shutil.rmtree(folder / "toy")
