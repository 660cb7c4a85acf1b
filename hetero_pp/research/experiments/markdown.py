"""An experiment's result as markdown: its rows, command, picture, table, verdicts and provenance."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

from hetero_pp.core.units import format_number
from hetero_pp.research.experiments.definition import OF_ATTACKS, OF_OUTER_GRADIENTS, WAYS
from hetero_pp.research.experiments.provenance import describe

COLUMNS = {
    "paper": "loss in the paper, nats",
    "paper, %": "difference from the paper's baseline",
    "ours": "validation loss of the synced model, nats: own forward pass, mean over replicas and seeds",
    "spread": "standard deviation of `ours` over seeds",
    "seeds": "number of seeds that were trained and did not diverge",
    "ours, %": "difference from our baseline, paired by seed",
    "uncompressed": "loss of the same model without boundaries",
    "compressed": "loss of the same model with the boundaries of a compressed replica",
    "M": "number of replicas",
    "rate": "inner learning rate; DeMo's outer one",
    "tokens": "training tokens of all replicas together",
    "sent, MB": "size of a replica's contributions over all rounds",
    "gathered, MB": "bytes sent by a replica if it sends its contribution once, to an exchange or a parameter server; "
    "measured after encoding, in brackets by formula from the settings",
    "ring, MB": "bytes sent by a replica in a ring that sums dense contributions (as if sums had codes as short) and "
    "forwards sparse ones",
    "sparse ring, MB": "bytes sent by a replica in a ring that sums sparse contributions, too; the formula assumes "
    "that no two replicas keep the same position",
    "CPU, s": "CPU seconds to train a row with all replicas, mean over seeds, on the machine named below the table",
    "bytes/token": "bytes that cross a compressed boundary for a token in one direction; 0 without a boundary",
    "bias, %": "distance of equation 5's mean pseudo-gradient from the unbiased one, relative to the latter's norm",
    "cosine": "cosine of the angle between the contributions of two replicas, mean over pairs and rounds",
    "norm": "norm of the outer gradient, which is the mean of the contributions before compression; mean over rounds",
    "uncorrelated": "norm that it would have if the k contributions were orthogonal: 1 / sqrt(k) of theirs",
    "momentum": "cosine of the angle between a replica's momentum or error feedback and a momentum of all with the "
    "same decay, mean over replicas and the first 20 rounds",
    "kept momentum": "the same after a round's removal of values: dropped (LOM-Sub-k) or sent (error feedback)",
    "hours": "predicted hours of all rounds in the deployment that the text above names",
    "caught": "number of hostile replicas that were excluded, mean over seeds",
    "rounds until": "round after which they were excluded first, mean over those that were caught",
    "honest out": "number of honest replicas that were excluded, mean over seeds",
    "evaluation, %": "compute of the primary evaluation by one validator, as a share of that of all replicas",
    "recomputed, %": "share of the replicas' rounds that were computed again",
    "audit, MB": "bytes that one validator reads over all rounds: contributions to score, and checkpoints",
    "backdoor, %": "share of triggers after which the final model predicts the attacker's target",
    "state": "whether the row was trained, or why it was not",
}
"""Meaning of each column.

A table omits a column of `_WHERE_KNOWN` if no row has a value, and M, tokens or bytes sent if all rows agree.
"""

_OF_OUTER_GRADIENTS = ("norm", "uncorrelated", "momentum", "kept momentum")

_WHERE_KNOWN = (
    *("paper", "paper, %", "rate", "bias, %", "cosine", "CPU, s"),
    *("gathered, MB", "ring, MB", "sparse ring, MB"),
    *_OF_OUTER_GRADIENTS,
    "hours",
    *("caught", "rounds until", "honest out", "evaluation, %", "recomputed, %", "audit, MB", "backdoor, %"),
)


def markdown(result: Mapping[str, Any], picture: str | None = None) -> Iterator[str]:
    """Yield the lines of an experiment's table and the verdicts on its claims; `picture` is the path of its picture."""
    yield f"### {result['name']}: {result['title']}"
    yield ""
    yield from _paragraph(result)
    if result["command"]:
        yield from ("", "```bash", result["command"], "```")
    if picture is not None:
        yield from ("", f"![{result['name']} at scale {result['scale']}]({picture})")
    yield ""
    yield from _table(result)
    yield from _claims(result["claims"])
    yield from _trends(result["trends"])
    yield from ("", *_trained(result["trained"]))


def _paragraph(result: Mapping[str, Any]) -> Iterator[str]:
    paper = [f"{result['paper']}."] if result["paper"] else []
    yield " ".join([*paper, f"Scale `{result['scale']}`: {result['facts']}."])
    if result["note"]:
        yield result["note"]
    corpus = result["corpus"]
    if corpus is not None:
        read = "streamed"
        if corpus["tokens"] is not None:
            read = f"{corpus['tokens']:,} tokens, read {format_number(corpus['epochs'], 2)} times"
        named = f", encoded by {corpus['tokenizer']}" if "tokenizer" in corpus else ""
        yield f"Corpus: {corpus['name']}{named}, {read}."


def _table(result: Mapping[str, Any]) -> Iterator[str]:
    papers = {row["name"]: row["paper"] for row in result["rows"]}
    rows = [_cells(row, papers.get(row["baseline"])) for row in result["rows"]]
    shown = dict.fromkeys(COLUMNS, True)
    shown |= {name: any(row[name] for row in rows) for name in _WHERE_KNOWN}
    shown |= {name: len({row[name] for row in rows} - {""}) > 1 for name in ("M", "tokens", "sent, MB")}
    columns = [name for name in COLUMNS if shown[name]]
    yield "| row | " + " | ".join(columns) + " |"
    yield "|" + "---|" * (1 + len(columns))
    for row in rows:
        yield f"| {row['row']} | " + " | ".join(row[name] for name in columns) + " |"


def _cells(row: Mapping[str, Any], base: float | None) -> dict[str, str]:
    """Return a row's cells by column; `base` is the paper's loss of the baseline."""
    ours = row["ours"] or {"mean": None, "spread": None, "seeds": {}}
    theirs = None if row["paper"] is None or base is None else 100 * (row["paper"] / base - 1)
    return {
        "row": row["name"],
        "paper": number(row["paper"], 3),
        "paper, %": _signed(theirs),
        "ours": number(ours["mean"], 3),
        "spread": number(ours["spread"], 3),
        "seeds": str(len(ours["seeds"])),
        "ours, %": _signed(row["delta_percent"]),
        "uncompressed": number(row.get("uncompressed"), 3),
        "compressed": number(row.get("compressed"), 3),
        "M": number(row.get("replicas"), 0),
        "rate": f"{row['rate']:g}" if "rate" in row else "",
        "tokens": "" if row.get("tokens") is None else f"{row['tokens']:,}",
        "sent, MB": number(_millions(row.get("contribution_bytes")), 2),
        "gathered, MB": _volume(row, "gather"),
        "ring, MB": _volume(row, "ring"),
        "sparse ring, MB": _volume(row, "sparse_ring"),
        "CPU, s": number(row.get("cpu_seconds"), 0),
        "bytes/token": number(row.get("bytes_per_token"), 1),
        "bias, %": number(100 * row["bias"]["mean"], 2) if "bias" in row else "",
        "cosine": _measured(row, "similarity"),
        **{name: _measured(row, name.replace(" ", "_")) for name in _OF_OUTER_GRADIENTS},
        "hours": number(row.get("hours"), 2),
        "caught": _measured(row, "caught", digits=1),
        "rounds until": _measured(row, "until_caught", digits=1),
        "honest out": _measured(row, "honest_out", digits=1),
        "evaluation, %": _measured(row, "evaluation", 100, 1),
        "recomputed, %": _measured(row, "recomputation", 100, 1),
        "audit, MB": _measured(row, "audit_megabytes", digits=1),
        "backdoor, %": _measured(row, "backdoor", 100, 0),
        "state": row["state"],
    }


def _measured(row: Mapping[str, Any], name: str, factor: int = 1, digits: int = 3) -> str:
    return number(factor * row[name]["mean"], digits) if name in row else ""


def _volume(row: Mapping[str, Any], way: str) -> str:
    """Return the measured megabytes, and those by formula in brackets."""
    return f"{row[way]['mean']:.2f} ({row['by_formula'][way]:.2f})" if way in row else ""


def _millions(value: float | None) -> float | None:
    return None if value is None else value / 1e6


_NAMED = {
    "bias": "",
    "similarity": "cosine",
    "gather": "gathered",
    "sparse_ring": "sparse ring",
    "kept_momentum": "kept momentum",
    "until_caught": "rounds until",
    "honest_out": "honest out",
    "audit_megabytes": "audit, MB",
}
"""Names of what a claim is about, for measurements other than losses."""


def _claims(claims: list[Mapping[str, Any]]) -> Iterator[str]:
    if claims:
        columns = ("claim", "forward", "verdict", "95 % interval", "seeds", "as a family", "slices")
        yield from ("", f"| {' | '.join(columns)} |", "|" + "---|" * len(columns))
    for claim in claims:
        forward = _NAMED.get(claim["of"], claim["of"])
        verdict = f"**{claim['verdict']}** | {difference_cell(claim)} | {claim['seeds']}"
        text = f"{claim['text']} (ours)" if claim["ours"] else claim["text"]
        yield f"| {text} | {forward} | {verdict} | {_family(claim)} | {_slices(claim)} |"
        for one in claim["others"]:
            yield f"| | {one['of']} | {one['verdict']} | {difference_cell(one)} | {one['seeds']} | | |"
    for claim in claims:
        why = claim["why"] or ("Not known." if claim["verdict"] == "does not hold" else "")
        if why:
            shown = f" Shown by: {'; '.join(f'`{one}`' for one in claim['shown_by'])}." if claim["shown_by"] else ""
            yield from ("", f"*{claim['text']}*: {why}{shown}")


def _trends(trends: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield each law's predictions at the trained widths and at the paper's; the exponent is in the first line."""
    if trends:
        columns = ("gap in percent", "forward", "width", "measured", "law", "its 95 % interval", "the paper's")
        yield from ("", f"| {' | '.join(columns)} |", "|" + "---|" * len(columns))
    for trend in trends:
        for number, cells in enumerate(_trend_cells(trend)):
            first = [_trend_name(trend), trend["of"]] if number == 0 else ["", ""]
            yield f"| {' | '.join([*first, *cells])} |"
        if trend["left_out"]:
            yield f"| {trend['left_out']} without a gap are left out of the law | | | | | | |"


def _trend_name(trend: Mapping[str, Any]) -> str:
    if trend["exponent"] is None:
        return str(trend["name"])
    value, (low, high) = trend["exponent"]["value"], trend["exponent"]["interval"]
    return f"{trend['name']}: width to the power of {value:.2f} ({low:.2f} to {high:.2f})"


def _trend_cells(trend: Mapping[str, Any]) -> Iterator[list[str]]:
    """Yield for each width: the width, the measured gap, the law's, its interval, the paper's gap."""
    measured = {point["width"]: fmean(point["percent"].values()) for point in trend["points"]}
    law = {one["width"]: one for one in trend["law"]}
    papers = {int(width): gap for width, gap in trend["paper"].items()}
    for width in sorted({*measured, *law, *papers}):
        said = law.get(width, {"percent": None})
        interval = "{:+.1f} to {:+.1f}".format(*said["interval"]) if width in law else ""
        yield [str(width), _signed(measured.get(width)), _signed(said["percent"]), interval, _signed(papers.get(width))]


def _trained(entries: list[Mapping[str, Any]]) -> Iterator[str]:
    if len(entries) == 1:
        yield f"Trained on {describe(entries[0])}."
    elif entries:
        yield from ("Trained on", "")
    for entry in entries if len(entries) > 1 else ():
        rows = "; ".join(f"{row} (seeds {', '.join(map(str, seeds))})" for row, seeds in entry["rows"].items())
        yield f"- {describe(entry)}: {rows}"


def _family(claim: Mapping[str, Any]) -> str:
    family = claim["family"]
    return "" if family is None else f"{family['verdict']}, {interval_cell(family['interval'], claim['of'])}"


def _slices(claim: Mapping[str, Any]) -> str:
    return interval_cell(claim["slices"], claim["of"])


def difference_cell(judged: Mapping[str, Any]) -> str:
    """Return the interval of a claim's difference, or with one seed the difference; with the unit."""
    if judged["interval"] is not None or judged["difference"] is None:
        return interval_cell(judged["interval"], judged["of"])
    return interval_cell([judged["difference"]] * 2, judged["of"]).partition(" to ")[2]


def interval_cell(interval: Sequence[float] | None, of: str) -> str:
    """Return the interval of a claim's difference with its unit; `of` is the claim's key of that name."""
    if interval is None:
        return ""
    megabytes = dict.fromkeys(WAYS, (1, " MB"))
    plain = dict.fromkeys(("similarity", *OF_OUTER_GRADIENTS, *OF_ATTACKS), (1, ""))
    plain["hours"] = (1, " h")
    factor, unit = {"bias": (100, " % points"), **plain, **megabytes}.get(of, (1, " nats"))
    return "{:+.3f} to {:+.3f}".format(*(factor * value for value in interval)) + unit


def number(value: float | None, digits: int) -> str:
    """Format a number; return the empty string for None."""
    return "" if value is None else f"{value:.{digits}f}"


def _signed(value: float | None) -> str:
    return "" if value is None else f"{value:+.1f}"
