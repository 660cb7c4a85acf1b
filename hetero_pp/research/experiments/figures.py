"""Figures in a hand-written text: `{micro/het-pp/table1 | loss | SparseLoCo}` is replaced by the known value."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any, get_args

from hetero_pp.core.errors import ConfigError
from hetero_pp.research.experiments.definition import FORWARDS, Measurement

FOUND = "found.md"
"""File beside the experiments with the findings in words."""

Result = Mapping[str, Any]
Results = Mapping[str, Result]
"""Results by scale and name, such as `micro/het-pp/table1`."""


def with_figures(path: Path, results: Results) -> str:
    """Return the text of a file with its figures filled in.

    `{TABLE | WHAT | NAME...}` is one of:
    - `loss` (nats) or `percent` (above the baseline) of a row; `paper` and `paper percent` are the paper's values.
    - `bias` (percent), `similarity`, `momentum`, `kept_momentum` (cosines), `norm`, `uncorrelated`, `gather`, `ring`,
      `sparse_ring` (megabytes), predicted `hours` of a row.
    - `difference` (nats): the second row's loss minus the first's.
    - `verdict` of a claim, with its number of seeds.
    - `law` of a trend at a width: percent, and its interval.

    A last name `compressed` or `uncompressed` selects the forward of a difference or a verdict. Raises ConfigError with
    the file and line of an unknown figure.
    """
    text = path.read_text(encoding="utf-8")

    def figure(match: re.Match[str]) -> str:
        try:
            return _figure([" ".join(part.split()) for part in match[1].split("|")], results)
        except (KeyError, ValueError, TypeError):
            line = text.count("\n", 0, match.start()) + 1
            raise ConfigError((), f"{path}:{line}: found `{match[0]}`, expected a figure that is known") from None

    return _folded(re.sub(r"\{([^{}]*)\}", figure, text))


def _folded(text: str) -> str:
    """Wrap every paragraph and list item to lines of even length; keep tables and the gaps between."""
    texts_and_gaps = re.split(r"(\n(?=- )|\n\n)", text.strip())
    for place in range(0, len(texts_and_gaps), 2):
        if texts_and_gaps[place].startswith("|"):
            continue
        line = " ".join(texts_and_gaps[place].split())
        below = "  " if line.startswith("- ") else ""
        texts_and_gaps[place] = fill(line, 120, subsequent_indent=below, break_on_hyphens=False)
    return "".join(texts_and_gaps) + "\n"


def _figure(parts: list[str], results: Results) -> str:
    table, what, *names = parts
    result = results[table]
    forward = names.pop() if names[-1] in FORWARDS else None
    if what == "verdict":
        [name] = names
        [claim] = [claim for claim in result["claims"] if claim["text"] == name]
        by_forward = {one["of"]: _with_seeds(one) for one in (claim, *claim["others"])}
        return by_forward[forward or claim["of"]]
    if what == "law":
        return _law(result["trends"], *names)
    rows = {row["name"]: row for row in result["rows"]}
    if what == "difference":
        first, second = (_losses(rows[name], forward or "own") for name in names)
        return _difference(first, second)
    return _OF_ROWS[what](rows, *(rows[name] for name in names))


def _with_seeds(judged: Mapping[str, Any]) -> str:
    """Return a verdict with its number of seeds: `holds (5 seeds)`, `one seed`."""
    return f"{judged['verdict']} ({judged['seeds']} seeds)" if judged["seeds"] > 1 else str(judged["verdict"])


def _law(trends: Sequence[Mapping[str, Any]], name: str, width: str) -> str:
    """Return what a trend's law predicts for a width."""
    [trend] = [trend for trend in trends if trend["name"] == name]
    [said] = [said for said in trend["law"] if said["width"] == int(width)]
    return f"{said['percent']:.1f} % ({said['interval'][0]:.1f} to {said['interval'][1]:.1f})"


Row = Mapping[str, Any]


def _losses(row: Row, forward: str) -> Mapping[str, float]:
    found: Mapping[str, float] = row["ours"]["seeds"] if forward == "own" else row[f"{forward}_seeds"]
    return found


def _difference(one: Mapping[str, float], other: Mapping[str, float]) -> str:
    """Return the mean difference over the seeds that both have."""
    paired = [other[seed] - one[seed] for seed in one if seed in other]
    return f"{sum(paired) / len(paired):.2f}"


_OF_ROWS: dict[str, Callable[..., str]] = {
    "loss": lambda _, row: f"{row['ours']['mean']:.2f}",
    "percent": lambda _, row: f"{row['delta_percent']:.1f}",
    "paper": lambda _, row: f"{row['paper']:.2f}",
    "paper percent": lambda rows, row: f"{100 * (row['paper'] / rows[row['baseline']]['paper'] - 1):.1f}",
    "bias": lambda _, row: f"{100 * row['bias']['mean']:.0f}",
    **{
        name: (lambda _, row, name=name: f"{row[name]['mean']:.2f}")
        for name in get_args(Measurement)
        if name not in ("bias", "hours")
    },
    "hours": lambda _, row: f"{row['hours']:.1f}",
}
