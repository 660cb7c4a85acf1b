"""docs/results.md: what was found, and the verdicts of every table with a link to its page."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

from hetero_pp.core.errors import ConfigError
from hetero_pp.core.files import write_whole
from hetero_pp.research.experiments.figures import FOUND, Results, with_figures
from hetero_pp.research.experiments.markdown import COLUMNS
from hetero_pp.research.experiments.verdict import holm

FAMILIES = ("het-pp", "sparseloco", "diloco", "beyond")
"""Folders of experiments in the order of the page; others follow."""

VERDICTS = ("holds", "does not hold", "within noise", "one seed", "not run")

INTRODUCTION = """\
`hetero-pp reproduce --no-train --docs FILE` generates this page from the trained rows. It also fills in the figures
of the text above. [reproducing.md](reproducing.md) explains how to make these tables, and
[experiments.md](experiments.md) how to define your own.

A verdict compares two rows at the seeds that both have. A claim *holds* or *does not hold* if the 95 % interval
(Student's t) of the difference excludes zero. It is *within noise* otherwise. One seed has no interval and decides
nothing: the table then says *one seed* and has the difference. Sizes of messages are an exception, because they hardly
depend on the seed. A claim that two rows are equal holds if the interval lies within a margin, 0.03 nats by default.
A claim is a paper's if the paper makes it, and otherwise marked as ours.

One of twenty claims about nothing gets a verdict by chance. The column *as a family* gives the verdict after Holm's
correction over all claims of the table, with the interval used there. The column *slices* gives the interval of the
same difference over eight parts of the validation text, for the same trained models. Rows trained before slices
were recorded have none.

The synced model of a run has a loss in three forward passes. *Own* is the forward pass of each replica, averaged
over the replicas. *Compressed* is that of a compressed replica. *Uncompressed* has no boundaries; `export` writes
this model. The average over a mix of replicas can hide what the other two show, so each verdict names its forward
pass."""


def write_overview(folder: Path, path: Path, experiments: Path) -> None:
    """Write a page that summarizes the results of a folder and links to the page of each table.

    The number of claims beyond noise comes first, then the findings in the experiments' `found.md`, if the file
    exists. Raises ConfigError if they contain a figure that no result has.
    """
    results = dict(sorted(_results(folder), key=_place))
    lines = ["# Results", ""]
    for paragraph in _beyond_noise(results):
        lines += [fill(paragraph, 120, break_on_hyphens=False), ""]
    if (experiments / FOUND).exists():
        lines += [with_figures(experiments / FOUND, results).strip(), ""]
    lines += ["## How to read the tables", "", INTRODUCTION, "", *_columns(), ""]
    lines += ["## All tables", "", *_counts(results, os.path.relpath(folder, path.parent))]
    write_whole(path, ("\n".join(lines) + "\n").encode())


def _place(named: tuple[str, dict[str, Any]]) -> tuple[int, str, str, str]:
    """Sort key: the papers in order, then names, then scales."""
    path, result = named
    family = result["name"].rpartition("/")[0]
    first = FAMILIES.index(family) if family in FAMILIES else len(FAMILIES)
    return first, family, result["name"], path


def _results(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield results with their scale and name, such as `micro/het-pp/table1`."""
    for path in sorted(folder.glob("*/**/*.json")):
        content = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(content, dict) and "claims" in content:
            if "trends" not in content or any("ours" not in claim for claim in content["claims"]):
                raise ConfigError(
                    (), f"{path}: was written by an older hetero-pp; expected one that `reproduce --no-train` renewed"
                )
            yield path.relative_to(folder).with_suffix("").as_posix(), content


def _columns() -> Iterator[str]:
    yield from ("| column | |", "|---|---|")
    yield from (f"| {name} | {meaning} |" for name, meaning in COLUMNS.items())


def _counts(results: dict[str, dict[str, Any]], folder: str) -> Iterator[str]:
    """Yield a table of verdicts; `folder` is the path from the page to the results."""
    yield f"| table | title | scale | {' | '.join(VERDICTS)} | of these, ours |"
    yield "|" + "---|" * (4 + len(VERDICTS))
    for key, result in results.items():
        verdicts = [claim["verdict"] for claim in result["claims"]]
        counts = " | ".join(str(verdicts.count(kind)) for kind in VERDICTS)
        link = f"[{result['name']}]({(Path(folder) / key).as_posix()}.md)"
        ours = sum(claim["ours"] for claim in result["claims"])
        yield f"| {link} | {result['title']} | {result['scale']} | {counts} | {ours} |"


def distinct_claims(results: Results) -> list[Mapping[str, Any]]:
    """Return the claims of all tables; claims that state the same about the same rows are returned once."""
    claims = [claim for one in results.values() for claim in one["claims"]]
    known = {claim["about"]: claim for claim in reversed(claims) if claim["about"] is not None}
    return [claim for claim in claims if claim["about"] is None or known[claim["about"]] is claim]


def _beyond_noise(results: Results) -> Iterator[str]:
    """Yield paragraphs: how many claims are beyond noise after Holm's correction, and the verdicts without it."""
    claims = distinct_claims(results)
    levels = holm([claim["p"] for claim in claims])
    judged = len(levels) - levels.count(None)
    beyond = [one for one, level in zip(claims, levels, strict=True) if level is not None and one["p"] <= level]
    exact = sum(one["p"] == 0 for one in beyond)
    yield (
        f"{len(beyond)} of {judged} claims are beyond noise if Holm's correction treats all tables as one family: "
        f"{_verdicts(beyond)}. {exact} of them rest on a difference that is the same at each seed, such as a count of "
        "0. This statistic has the claims with two seeds or more. A claim that several tables make about the same rows "
        "counts once."
    )
    yield (
        f"Without the correction, each claim judged alone at 5 %: {_verdicts(claims)}. One of twenty claims about "
        "nothing then gets a verdict by chance, and one seed decides nothing."
    )


def _verdicts(claims: Sequence[Mapping[str, Any]]) -> str:
    """Return how many claims are the papers' and how many ours, with their verdicts."""
    told = []
    for whose, is_ours in (("the papers", False), ("ours", True)):
        verdicts = [claim["verdict"] for claim in claims if claim["ours"] is is_ours]
        kinds = ", ".join(f"*{kind}* {verdicts.count(kind)}" for kind in VERDICTS if kind in verdicts)
        told.append(f"{len(verdicts)} of {whose} ({kinds or 'none'})")
    return " and ".join(told)
