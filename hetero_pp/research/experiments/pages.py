"""Pages of results: an experiment's table as markdown, docs/results.md with what was found, and the list of tables."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from textwrap import fill
from typing import Any, Literal, NamedTuple

from hetero_pp.core.errors import ConfigError
from hetero_pp.core.files import write_whole
from hetero_pp.core.units import format_number
from hetero_pp.research.experiments.claims import holm
from hetero_pp.research.experiments.definition import FORWARDS, MEASUREMENTS, WAYS
from hetero_pp.research.experiments.outcomes import describe

Result = Mapping[str, Any]  # an experiment's result, as `result.result_of` returns it
Results = Mapping[str, Result]  # results by scale and name, such as `micro/het-pp/table1`


class Column(NamedTuple):
    """A column of a table of rows."""

    meaning: str
    cell: Callable[[Mapping[str, Any], float | None], str]
    """Returns the cell of a row in a result; it is also given the paper's loss of the row's baseline."""
    shown: Literal["if known", "if different", "always"] = "if known"


def number(value: float | None, digits: int) -> str:
    """Format a number; return the empty string for None."""
    return "" if value is None else f"{value:.{digits}f}"


def _signed(value: float | None) -> str:
    return "" if value is None else f"{value:+.1f}"


def _plain(key: str, digits: int) -> Callable[[Mapping[str, Any], float | None], str]:
    return lambda row, base: number(row.get(key), digits)


def _mean(key: str, digits: int = 3, factor: int = 1) -> Callable[[Mapping[str, Any], float | None], str]:
    return lambda row, base: number(factor * row[key]["mean"], digits) if key in row else ""


def _ours(key: str) -> Callable[[Mapping[str, Any], float | None], str]:
    return lambda row, base: number(row["ours"][key], 3) if row["ours"] else ""


def _volume(way: str) -> Callable[[Mapping[str, Any], float | None], str]:
    """Return the measured megabytes, and those by formula in brackets."""
    return lambda row, base: f"{row[way]['mean']:.2f} ({row['by_formula'][way]:.2f})" if way in row else ""


_COLUMNS = {
    "paper": Column("loss in the paper, nats", _plain("paper", 3)),
    "paper, %": Column(
        "difference from the paper's baseline",
        lambda row, base: "" if row["paper"] is None or base is None else _signed(100 * (row["paper"] / base - 1)),
    ),
    "ours": Column(
        "validation loss of the synced model, nats: own forward pass, mean over replicas and seeds",
        _ours("mean"),
        "always",
    ),
    "spread": Column("standard deviation of `ours` over seeds", _ours("spread"), "always"),
    "seeds": Column(
        "number of seeds that were trained and did not diverge",
        lambda row, base: str(len(row["ours"]["seeds"]) if row["ours"] else 0),
        "always",
    ),
    "ours, %": Column(
        "difference from our baseline, paired by seed", lambda row, base: _signed(row["delta_percent"]), "always"
    ),
    "x tokens": Column(
        "tokens of the row, as a multiple of those with which rows without compression reach its loss: linear in the "
        "logarithm of tokens between rows of the table that the text names, and a bound outside of them",
        lambda row, base: "{}{:.2f}".format(*row["times_tokens"]) if "times_tokens" in row else "",
    ),
    "uncompressed": Column("loss of the same model without boundaries", _plain("uncompressed", 3), "always"),
    "compressed": Column(
        "loss of the same model with the boundaries of a compressed replica", _plain("compressed", 3), "always"
    ),
    "M": Column("number of replicas", _plain("replicas", 0), "if different"),
    "rate": Column(
        "inner learning rate; DeMo's outer one", lambda row, base: f"{row['rate']:g}" if "rate" in row else ""
    ),
    "tokens": Column(
        "training tokens of all replicas together",
        lambda row, base: "" if row.get("tokens") is None else f"{row['tokens']:,}",
        "if different",
    ),
    "sent, MB": Column(
        "size of a replica's contributions over all rounds",
        lambda row, base: number(row["contribution_bytes"] / 1e6, 2) if "contribution_bytes" in row else "",
        "if different",
    ),
    "gathered, MB": Column(
        "bytes sent by a replica if it sends its contribution once, to an exchange or a parameter server; "
        "measured after encoding, in brackets by formula from the settings",
        _volume("gather"),
    ),
    "ring, MB": Column(
        "bytes sent by a replica in a ring that sums dense contributions (as if sums had codes as short) and "
        "forwards sparse ones",
        _volume("ring"),
    ),
    "sparse ring, MB": Column(
        "bytes sent by a replica in a ring that sums sparse contributions, too; the formula assumes "
        "that no two replicas keep the same position",
        _volume("sparse_ring"),
    ),
    "CPU, s": Column(
        "CPU seconds to train a row with all replicas, mean over seeds, on the machine named below the table",
        _plain("cpu_seconds", 0),
    ),
    "bytes/token": Column(
        "bytes that cross a compressed boundary for a token in one direction; 0 without a boundary",
        _plain("bytes_per_token", 1),
        "always",
    ),
    "bias, %": Column(
        "distance of equation 5's mean pseudo-gradient from the unbiased one, relative to the latter's norm",
        _mean("bias", 2, 100),
    ),
    "cosine": Column(
        "cosine of the angle between the contributions of two replicas, mean over pairs and rounds", _mean("similarity")
    ),
    "norm": Column(
        "norm of the outer gradient, which is the mean of the contributions before compression; mean over rounds",
        _mean("norm"),
    ),
    "uncorrelated": Column(
        "norm that it would have if the k contributions were orthogonal: 1 / sqrt(k) of theirs", _mean("uncorrelated")
    ),
    "momentum": Column(
        "cosine of the angle between a replica's momentum or error feedback and a momentum of all with the "
        "same decay, mean over replicas and the first 20 rounds",
        _mean("momentum"),
    ),
    "kept momentum": Column(
        "the same after a round's removal of values: dropped (LOM-Sub-k) or sent (error feedback)",
        _mean("kept_momentum"),
    ),
    "hours": Column("predicted hours of all rounds in the deployment that the text above names", _plain("hours", 2)),
    "caught": Column("number of hostile replicas that were excluded, mean over seeds", _mean("caught", 1)),
    "rounds until": Column(
        "round after which they were excluded first, mean over those that were caught", _mean("until_caught", 1)
    ),
    "honest out": Column("number of honest replicas that were excluded, mean over seeds", _mean("honest_out", 1)),
    "evaluation, %": Column(
        "compute of the primary evaluation by one validator, as a share of that of all replicas",
        _mean("evaluation", 1, 100),
    ),
    "recomputed, %": Column("share of the replicas' rounds that were computed again", _mean("recomputation", 1, 100)),
    "audit, MB": Column(
        "bytes that one validator reads over all rounds: contributions to score, and checkpoints",
        _mean("audit_megabytes", 1),
    ),
    "backdoor, %": Column(
        "share of triggers after which the final model predicts the attacker's target", _mean("backdoor", 0, 100)
    ),
    "state": Column("whether the row was trained, or why it was not", lambda row, base: row["state"], "always"),
}

_NAMES = {
    "bias": "",
    "similarity": "cosine",
    "gather": "gathered",
    "sparse_ring": "sparse ring",
    "kept_momentum": "kept momentum",
    "until_caught": "rounds until",
    "honest_out": "honest out",
    "audit_megabytes": "audit, MB",
}
"""Names of what a claim is about, where they are not those of its key."""


def markdown(result: Result, picture: str | None = None) -> Iterator[str]:
    """Yield the lines of an experiment's table and the verdicts on its claims; `picture` is the path of its picture."""
    yield f"### {result['name']}: {result['title']}"
    yield ""
    paper = [f"{result['paper']}."] if result["paper"] else []
    yield " ".join([*paper, f"Scale `{result['scale']}`: {result['facts']}."])
    if result["note"]:
        yield result["note"]
    if (corpus := result["corpus"]) is not None:
        read = "streamed"
        if corpus["tokens"] is not None:
            read = f"{corpus['tokens']:,} tokens, read {format_number(corpus['epochs'], 2)} times"
        named = f", encoded by {corpus['tokenizer']}" if "tokenizer" in corpus else ""
        yield f"Corpus: {corpus['name']}{named}, {read}."
    if "budgets" in result:
        yield f"`x tokens` is relative to rows of {result['budgets']}."
    if result["command"]:
        yield from ("", "```bash", result["command"], "```")
    if picture is not None:
        yield from ("", f"![{result['name']} at scale {result['scale']}]({picture})")
    yield ""
    papers = {row["name"]: row["paper"] for row in result["rows"]}
    columns = {
        name: [column.cell(row, papers.get(row["baseline"])) for row in result["rows"]]
        for name, column in _COLUMNS.items()
    }
    shown = {"always": lambda cells: True, "if known": any, "if different": lambda cells: len({*cells} - {""}) > 1}
    columns = {name: cells for name, cells in columns.items() if shown[_COLUMNS[name].shown](cells)}
    yield from _table(["row", *columns], zip(papers, *columns.values(), strict=True))
    yield from _until(result)
    yield from _claims(result["claims"])
    yield from _trends(result["trends"])
    trained = result["trained"]
    yield ""
    if len(trained) == 1:
        yield f"Trained on {describe(trained[0])}."
    elif trained:
        yield from ("Trained on", "")
        for entry in trained:
            rows = "; ".join(f"{row} (seeds {', '.join(map(str, seeds))})" for row, seeds in entry["rows"].items())
            yield f"- {describe(entry)}: {rows}"


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield from (_line(columns), "|" + "---|" * len(columns))
    yield from map(_line, rows)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _until(result: Result) -> Iterator[str]:
    """Yield the predicted hours until each row reaches a loss, and those of all rounds, by deployment."""
    clock = result.get("clock", {"hours": {}, "until": []})
    lines = [(f"loss {one['loss']:g}", one["hours"]) for one in clock["until"]] + [("all rounds", clock["hours"])]
    for said, hours in lines if clock["hours"] else ():
        yield from ("", *_table([f"predicted hours until {said}", *hours], ()))
        for row in next(iter(hours.values())):
            own = [at[row] for at in hours.values()]
            firsts = [min(filter(None, at.values()), default=None) for at in hours.values()]
            cells = [
                f"**{value:.3g}**" if value == first else "" if value is None else f"{value:.3g}"
                for value, first in zip(own, firsts, strict=True)
            ]
            yield _line([row, *cells])


def _claims(claims: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    lines: list[str] = []
    for claim in claims:
        text = f"{claim['text']} (ours)" if claim["ours"] else claim["text"]
        family = claim["family"]
        in_family = "" if family is None else f"{family['verdict']}, {interval_cell(family['interval'], claim['of'])}"
        slices, name = interval_cell(claim["slices"], claim["of"]), _NAMES.get(claim["of"], claim["of"])
        verdict = f"**{claim['verdict']}**"
        cells = text, name, verdict, difference_cell(claim), str(claim["seeds"]), in_family, slices
        lines.append(_line(cells))
        for one in claim["others"]:
            lines.append(f"| | {one['of']} | {one['verdict']} | {difference_cell(one)} | {one['seeds']} | | |")
    if claims:
        yield ""
        yield from _table(["claim", "forward", "verdict", "95 % interval", "seeds", "as a family", "slices"], ())
    yield from lines
    for claim in claims:
        why = claim["why"] or ("Not known." if claim["verdict"] == "does not hold" else "")
        if why:
            shown = f" Shown by: {'; '.join(f'`{one}`' for one in claim['shown_by'])}." if claim["shown_by"] else ""
            yield from ("", f"*{claim['text']}*: {why}{shown}")


def _trends(trends: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield each law's predictions at the trained widths and at the paper's; the exponent is in the first line."""
    lines: list[str] = []
    for trend in trends:
        name = str(trend["name"])
        if trend["exponent"] is not None:
            value, (low, high) = trend["exponent"]["value"], trend["exponent"]["interval"]
            name = f"{name}: width to the power of {value:.2f} ({low:.2f} to {high:.2f})"
        first = [name, trend["of"]]
        measured = {point["width"]: fmean(point["percent"].values()) for point in trend["points"]}
        law = {one["width"]: one for one in trend["law"]}
        papers = {int(width): gap for width, gap in trend["paper"].items()}
        for width in sorted({*measured, *law, *papers}):
            said = law.get(width, {"percent": None})
            interval = "{:+.1f} to {:+.1f}".format(*said["interval"]) if width in law else ""
            gaps = measured.get(width), said["percent"], papers.get(width)
            ours, predicted, theirs = map(_signed, gaps)
            lines.append(_line([*first, str(width), ours, predicted, interval, theirs]))
            first = ["", ""]
        if trend["left_out"]:
            lines.append(f"| {trend['left_out']} without a gap are left out of the law | | | | | | |")
    if trends:
        columns = ("gap in percent", "forward", "width", "measured", "law", "its 95 % interval", "the paper's")
        yield ""
        yield from _table(columns, ())
    yield from lines


def difference_cell(judged: Mapping[str, Any]) -> str:
    """Return the interval of a claim's difference, or with one seed the difference; with the unit."""
    if judged["interval"] is not None or judged["difference"] is None:
        return interval_cell(judged["interval"], judged["of"])
    return interval_cell([judged["difference"]] * 2, judged["of"]).partition(" to ")[2]


def interval_cell(interval: Sequence[float] | None, of: str) -> str:
    """Return the interval of a claim's difference with its unit; `of` is the claim's key of that name."""
    if interval is None:
        return ""
    factor, unit = 1, "" if of in MEASUREMENTS else " nats"
    if of == "bias":
        factor, unit = 100, " % points"
    elif of in WAYS:
        unit = " MB"
    elif of == "hours":
        unit = " h"
    return "{:+.3f} to {:+.3f}".format(*(factor * value for value in interval)) + unit


FAMILIES = ("het-pp", "sparseloco", "diloco", "beyond")
"""Folders of experiments in the order of the page; others follow."""

VERDICTS = ("holds", "does not hold", "within noise", "one seed", "not run")

FOUND = "found.md"  # file beside the experiments with the findings in words

INTRODUCTION = """\
`hetero-pp reproduce --no-train --docs FILE` generates the page of results and this one from the trained rows.
[Tables](experiments.md) explains how to make these tables, and how to define your own.

A verdict compares two rows at the seeds that both have. A claim *holds* or *does not hold* if the 95 % interval
(Student's t) of the difference excludes zero, and is *within noise* otherwise. *One seed* has no interval and decides
nothing, except about sizes of messages. A claim that two rows are equal holds if the interval lies within a margin,
0.03 nats by default. A claim is a paper's if the paper makes it, and otherwise marked as ours. The column *as a
family* gives the verdict after Holm's correction over all claims of the table. The column *slices* gives the interval
of the same difference over eight parts of the validation text, for the same trained models.

The synced model of a run has a loss in three forward passes: *own* is that of each replica, averaged over the replicas,
*compressed* that of a compressed replica, and *uncompressed* has no boundaries; `export` writes this model."""


def write_overview(folder: Path, path: Path, experiments: Path) -> None:
    """Write a page of findings, and beside it NAME_tables.md, which lists a folder's tables and says how to read them.

    The findings are the experiments' `found.md`, if the file exists, and the number of claims beyond noise. Raises
    ConfigError if `found.md` contains a figure that no result has.
    """
    found: dict[str, Result] = {}
    for file in sorted(folder.glob("*/**/*.json")):
        content = json.loads(file.read_text(encoding="utf-8"))
        if isinstance(content, dict) and "claims" in content:
            found[file.relative_to(folder).with_suffix("").as_posix()] = content

    def place(key: str) -> tuple[int, str, str, str]:
        """Sort key: the papers in order, then names, then scales."""
        family = found[key]["name"].rpartition("/")[0]
        first = FAMILIES.index(family) if family in FAMILIES else len(FAMILIES)
        return first, family, found[key]["name"], key

    results = {key: found[key] for key in sorted(found, key=place)}
    lines = ["# Results", ""]
    if (experiments / FOUND).exists():
        lines += [with_figures(experiments / FOUND, results).strip(), ""]
    lines += ["## How many verdicts are noise", ""]
    lines += ["\n\n".join(fill(paragraph, 120, break_on_hyphens=False) for paragraph in _beyond_noise(results))]
    write_whole(path, ("\n".join(lines) + "\n").encode())
    lines = ["# All tables", "", "## How to read the tables", "", INTRODUCTION, "", "| column | |", "|---|---|"]
    lines += [f"| {name} | {column.meaning} |" for name, column in _COLUMNS.items()]
    rows = []
    for key, result in results.items():
        verdicts = [claim["verdict"] for claim in result["claims"]]
        link = f"[{result['name']}]({(Path(os.path.relpath(folder, path.parent)) / key).as_posix()}.md)"
        counts = [str(verdicts.count(kind)) for kind in VERDICTS]
        ours = str(sum(claim["ours"] for claim in result["claims"]))
        rows.append([link, result["title"], result["scale"], *counts, ours])
    lines += ["", "## Tables", "", *_table(["table", "title", "scale", *VERDICTS, "of these, ours"], rows)]
    write_whole(path.with_name(f"{path.stem}_tables.md"), ("\n".join(lines) + "\n").encode())


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


def with_figures(path: Path, results: Results) -> str:
    """Return the text of a file with its figures filled in, and every paragraph and list item wrapped.

    `{TABLE | WHAT | NAME...}` is one of:
    - `loss` (nats) or `percent` (above the baseline) of a row; `paper` and `paper percent` are the paper's values;
      `times` is the column `x tokens`.
    - `bias` (percent), `similarity`, `momentum`, `kept_momentum` (cosines), `norm`, `uncorrelated`, `gather`, `ring`,
      `sparse_ring` (megabytes), predicted `hours` of a row.
    - `difference` (nats): the second row's loss minus the first's.
    - `verdict` of a claim, with its number of seeds.
    - `law` of a trend at a width: percent, and its interval.
    - `first` at a loss and a deployment: the row that reaches the loss first, and its predicted hours; `until` has a
      row, too: its hours.

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

    parts = re.split(r"(\n(?=- )|\n\n)", re.sub(r"\{([^{}]*)\}", figure, text).strip())
    for index in range(0, len(parts), 2):  # the others are the gaps between
        if not parts[index].startswith("|"):
            line = " ".join(parts[index].split())
            below = "  " if line.startswith("- ") else ""
            parts[index] = fill(line, 120, subsequent_indent=below, break_on_hyphens=False)
    return "".join(parts) + "\n"


def _figure(parts: list[str], results: Results) -> str:
    table, what, *names = parts
    result = results[table]
    forward = names.pop() if names[-1] in FORWARDS else None
    if what == "verdict":
        [claim] = [claim for claim in result["claims"] if [claim["text"]] == names]
        judged = {one["of"]: one for one in (claim, *claim["others"])}[forward or claim["of"]]
        return f"{judged['verdict']} ({judged['seeds']} seeds)" if judged["seeds"] > 1 else str(judged["verdict"])
    if what == "law":
        name, width = names
        [trend] = [trend for trend in result["trends"] if trend["name"] == name]
        [said] = [said for said in trend["law"] if said["width"] == int(width)]
        return f"{said['percent']:.1f} % ({said['interval'][0]:.1f} to {said['interval'][1]:.1f})"
    if what in ("first", "until"):
        loss, at, *names = names
        [hours] = [one["hours"][at] for one in result["clock"]["until"] if one["loss"] == float(loss)]
        reached = {name: value for name, value in hours.items() if value is not None}
        if what == "until":
            return f"{reached[names[0]]:.3g}" if names[0] in reached or names[0] not in hours else "never"
        first = min(reached, key=lambda name: reached[name])
        return f"{first}, {reached[first]:.3g} h"
    rows = {row["name"]: row for row in result["rows"]}
    if what == "difference":  # over the seeds that both rows have
        key = None if forward in (None, "own") else f"{forward}_seeds"
        one, other = (rows[name]["ours"]["seeds"] if key is None else rows[name][key] for name in names)
        paired = [other[seed] - one[seed] for seed in one if seed in other]
        return f"{sum(paired) / len(paired):.2f}"
    [name] = names
    row = rows[name]
    if what == "paper percent":
        return f"{100 * (row['paper'] / rows[row['baseline']]['paper'] - 1):.1f}"
    if what == "bias":
        return f"{100 * row['bias']['mean']:.0f}"
    if what in MEASUREMENTS and what != "hours":
        return f"{row[what]['mean']:.2f}"
    if what == "loss":
        return f"{row['ours']['mean']:.2f}"
    if what == "times":
        return "{}{:.1f}".format(*row["times_tokens"])
    key, digits = {"percent": ("delta_percent", 1), "paper": ("paper", 2), "hours": ("hours", 1)}[what]
    return f"{row[key]:.{digits}f}"
