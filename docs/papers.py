"""Write the pages of results that the site adds: one page a paper, made from the same files as docs/results.md.

The numbers and the tables are those of `hetero-pp reproduce --no-train`. These pages have bars beside them, and
docs/_static/site.js makes their tables sortable and filters verdicts. Without scripts they stay plain tables.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hetero_pp.research.experiments.pages import VERDICTS, markdown

PAPERS = {
    "het-pp": ("Het-PP", "https://arxiv.org/abs/2601.02360"),
    "sparseloco": ("SparseLoCo", "https://arxiv.org/abs/2508.15706"),
    "diloco": ("DiLoCo", "https://arxiv.org/abs/2311.08105"),
    "ours": ("Beyond the papers", ""),
}
"""Title and address of each paper. `ours` has the tables of all other folders."""

_LEGEND = """\
The bar of a claim shows the 95 % interval of its difference. The bars of a row show its difference from the baseline in
percent: the outlined bar is the paper's, and the filled bar is ours. All bars of a column have one scale, and the line
is at zero. [How to read the tables](../results_tables.md#how-to-read-the-tables) explains columns and verdicts."""
_INTERVAL = re.compile(r"([-+][\d.]+) to ([-+][\d.]+)")
_PERCENT = ("paper, %", "ours, %")
_WIDTH, _HEIGHT = 96, 12
"""Size of a bar in pixels."""


def page(results: Path, name: str) -> str:
    """Return the page of a paper as Markdown. `results` is the folder of the scales."""
    title, address = PAPERS[name]
    tables = list(_tables(results, name))
    counts = Counter(claim["verdict"] for _, result in tables for claim in result["claims"])
    told = ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS if counts[verdict])
    source = f"[The paper]({address}) is the source of the columns `paper`. " if address else ""
    lines = [f"# {title}", "", f"{source}Claims of these tables: {told}.", ""]
    lines += [_LEGEND, ""]
    for key, result in tables:
        heading, *rest = markdown(result)
        lines += [f"({anchor(key)})=", f"{heading.replace('###', '##')} ({result['scale']})", *with_bars(rest), ""]
    return "\n".join(lines)


def anchor(key: str) -> str:
    """Return the anchor of a table, such as `micro-het-pp-table1` for `micro/het-pp/table1`."""
    return key.replace("/", "-").replace("_", "-").lower()


def with_bars(lines: Sequence[str]) -> Iterator[str]:
    """Yield the lines of a table's page, with bars in its cells of intervals and percentages."""
    named = list(_named_cells(lines))
    limits: dict[bool, float] = {}
    for title, cell in (one for cells in named for one in cells):
        if (ends := _ends(title, cell)) is not None:
            is_percent = title in _PERCENT
            limits[is_percent] = max(limits.get(is_percent, 0.001), *map(abs, ends))
    for line, cells in zip(lines, named, strict=True):
        yield f"| {' | '.join(_with_bar(title, cell, limits) for title, cell in cells)} |" if cells else line


def _named_cells(lines: Sequence[str]) -> Iterator[list[tuple[str, str]]]:
    """Yield the cells of each line with the titles of their columns: an empty list for lines that are no rows."""
    header: list[str] = []
    for line in lines:
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
        is_row = bool(header and set(line) - {"|", "-"} and cells)
        yield list(zip(header, cells, strict=True)) if is_row else []
        header = (header or cells) if cells else []


def _ends(title: str, cell: str) -> tuple[float, float] | None:
    """Return the ends of a cell's bar; None if it has none."""
    if title in _PERCENT and re.fullmatch(r"[-+][\d.]+", cell):
        return min(0.0, float(cell)), max(0.0, float(cell))
    if title == "95 % interval" and (found := _INTERVAL.match(cell)):
        return float(found[1]), float(found[2])
    return None


def _with_bar(title: str, cell: str, limits: Mapping[bool, float]) -> str:
    ends = _ends(title, cell)
    if ends is None:
        return cell
    limit = limits[title in _PERCENT]
    left, right = (_WIDTH / 2 * (1 + end / limit) for end in ends)
    kind, width = "theirs" if title == "paper, %" else "ours", max(right - left, 1.5)
    return (
        f'<svg class="bar" width="{_WIDTH}" height="{_HEIGHT}" aria-hidden="true">'
        f'<line x1="{_WIDTH / 2:g}" x2="{_WIDTH / 2:g}" y1="0" y2="{_HEIGHT}"/>'
        f'<rect class="{kind}" x="{left:.1f}" width="{width:.1f}" y="2.5" height="{_HEIGHT - 5}"/></svg> {cell}'
    )


def _tables(results: Path, name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the results of a paper by scale and name, such as `micro/het-pp/table1`: the micro scale first."""
    for path in sorted(results.glob("*/*/*.json"), key=lambda path: (path.parts[-3] != "micro", path.parts, path.name)):
        family = path.parent.name
        if (family if family in PAPERS else "ours") == name:
            result = json.loads(path.read_text(encoding="utf-8"))
            yield path.relative_to(results).with_suffix("").as_posix(), result
