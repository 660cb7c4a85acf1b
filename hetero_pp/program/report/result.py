"""Tables and lines at the end of a run, from its summary."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from hetero_pp.config.lines import WAYS
from hetero_pp.config.links import DIRECTIONS, EXCHANGE
from hetero_pp.core.units import format_bytes, format_count, format_number, format_seconds, format_share, format_times
from hetero_pp.program.report.output import say
from hetero_pp.program.report.round_lines import divergence_line
from hetero_pp.program.report.state import Divergence
from hetero_pp.program.report.tables import PlainTable, format_bandwidth, format_loss
from replica_groups.exchange.stall_detector import listed


def print_result(console: Console, summary: Mapping[str, Any], folder: Path) -> None:
    """Print the results of a run from its summary. `folder`: where the run's files are."""
    console.print(_result_replicas(summary))
    console.print(_result_carried("link", DIRECTIONS, summary["links"]))
    if summary["lines"]:
        console.print(_result_carried("line", WAYS, summary["lines"]))
    for line in _result_lines(summary, folder):
        say(console, line)


def _result_replicas(summary: Mapping[str, Any]) -> PlainTable:
    """Return a table of the replicas, with validation losses before training and after the first and last round."""
    rounds = sorted({1, summary["rounds"]} - {0})
    validation = ["validation initial", *(f"validation round {round_}" for round_ in rounds)]
    table = PlainTable(["replica", "kind"], ["tokens", "training loss", *validation])
    replicas = summary["replicas"]
    whole = {"name": "mean", "kind": "", "tokens": sum(replica["tokens"] for replica in replicas), "loss": None}
    for replica in [*replicas, dict(summary) | whole] if len(replicas) > 1 else replicas:
        losses = replica["validation_loss"]
        table.add_row(
            replica["name"],
            replica["kind"],
            f"{replica['tokens']:,}",
            format_loss(replica["loss"]),
            format_loss(replica["initial_validation_loss"]),
            *(format_loss(losses[round_ - 1] if round_ <= len(losses) else None) for round_ in rounds),
        )
    return table


def _result_carried(what: str, ways: Sequence[str], carried: Sequence[Mapping[str, Any]]) -> PlainTable:
    """Return a table of what each link or line carried in each direction."""
    table = PlainTable([what, ""], ["bandwidth", "payload", "wire", "busy"])
    for one in carried:
        has_lines = any(one.get("lines", {}).values())
        table.add_both(
            one["name"],
            ways,
            [format_bandwidth(one["bandwidth_bits_per_second"][way], has_lines) for way in ways],
            [format_bytes(one["payload_bytes"][way]) for way in ways],
            [format_bytes(one["wire_bytes"][way]) for way in ways],
            [format_share(one["busy_share"][way]) for way in ways],
        )
    return table


def _result_lines(summary: Mapping[str, Any], folder: Path) -> Iterator[str]:
    first = sum(sum(rounds[0] for rounds in link["payload_bytes_per_round"].values()) for link in summary["links"])
    if first:
        before = "The first run checkpoint and the evaluation of the initial weights"
        yield f"{before} account for {format_bytes(first)} of the payload."
    contributions = summary["contributions"]
    bits = contributions["bits_per_value"]
    if bits is not None:
        kept = f"{contributions['kept_values']:,} values kept, {format_number(bits)} bits per kept value"
        yield f"Contributions: {format_bytes(contributions['bytes'])} in total, {kept}."
    hashes = set(summary["parameters_sha256"].values())
    if len(hashes) == 1:
        yield f"All replicas hold the same weights: sha256 {hashes.pop()[:16]}…"
    elif hashes:
        yield "The replicas do not hold the same weights."
    yield from _membership_events(summary)
    if "diverged" in summary:
        yield f"{divergence_line([Divergence(**one) for one in summary['diverged']])}."
    yield from _audit_lines(summary.get("audit", {}))
    if summary["refusals"]:
        kinds = ", ".join(f"{count} {kind}" for kind, count in summary["refusals_by_kind"].items())
        told = summary.get("refusals_told_by", {}).items()
        words = ", ".join(f"{member} reports {count}" for member, count in told if member != EXCHANGE)
        yield f"Refused messages: {kinds}{words and f'; of these {words}'} (see metrics.jsonl)."
    rounds = f"{format_count(summary['rounds'], 'outer round')} in {format_seconds(summary['wall_seconds'])}"
    yield f"{rounds}, {summary['tokens_per_second']:,.0f} tokens/s over all replicas."
    if "failed" in summary:
        yield f"Failed: {summary['failed']}"
    yield f"Files: {folder} (summary.json, metrics.jsonl, loss.png, links.png, tensorboard/)"


def _audit_lines(audit: Mapping[str, Any]) -> Iterator[str]:
    """Yield lines about what audits found in a run; none for a run without audits."""
    if checks := audit.get("checks", 0):
        failed = len(audit["failed_checks"])
        found = f"{failed} differed from what was contributed (see metrics.jsonl)" if failed else "all as contributed"
        yield f"Audits: {format_count(checks, 'round')} of replicas computed again, {found}."
    if scores := audit.get("scores"):
        excluded = [one["replica"] for one in scores if one["excluded"]]
        words = f"excluded: {', '.join(excluded)}" if excluded else "nobody is excluded"
        yield f"Scores: {format_count(len(scores), 'replica')}, {words} (`hetero-pp scores`)."
    if audit.get("unaudited"):
        yield f"Unaudited: {audit['unaudited']}."


_TIMES = {"restarts": "restarted", "taken_again": "joined again", "healed": "recovered from the log"}


def _membership_events(summary: Mapping[str, Any]) -> Iterator[str]:
    """Yield lines about the membership events in a run's summary and their cost; none if there were no events."""
    found, goodput = summary["membership_state"], summary["goodput"]
    for name, one in found["members"].items():
        counts = dict(one) | {"taken_again": max(0, one["taken_again"] - one["restarts"])}  # a restart joins once
        times = [f"{what} {format_times(counts[key])}" for key, what in _TIMES.items() if counts[key]]
        yield f"{name}: {', '.join([*times, *([one['gone']] if one['gone'] else [])])}."
    for replica, count in found["suspended"].items():
        yield f"{replica}: returned to the start of a round {format_times(count)}."
    by_replica: defaultdict[str, list[str]] = defaultdict(list)
    for one in found["not_counted"]:
        by_replica[one["replica"]].append(str(one["round"]))
    for replica, rounds in by_replica.items():
        yield f"{replica}: excluded from {format_count(len(rounds), 'round')} ({listed(rounds)})."
    if found["pauses"]:
        seconds = sum(one["seconds"] or 0.0 for one in found["pauses"])
        yield f"Below quorum: {format_count(len(found['pauses']), 'pause')}, {format_seconds(seconds)} in total."
    if (found["members"] or by_replica or found["suspended"]) and goodput["share"] is not None:
        rate = f"{goodput['tokens_per_second']:,.0f} tokens/s"
        counted = f"{rate}, {format_share(goodput['share'])} of the trained tokens"
        yield f"Participation {format_share(found['participation'])}; included contributions: {counted}."
