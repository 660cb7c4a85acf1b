"""A run in numbers: the content of summary.json, and the tables and lines at the run's end, which are made of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from google.protobuf.message import Message
from rich.console import Console

from hetero_pp.config.lines import DIRECTIONS, EXCHANGE, WAYS
from hetero_pp.core.units import format_bytes, format_count, format_number, format_seconds, format_share, format_times
from hetero_pp.program.report.lines import divergence_line
from hetero_pp.program.report.output import say
from hetero_pp.program.report.state import Divergence, LineState, LinkState, RunState
from hetero_pp.program.report.tables import PlainTable, format_bandwidth, format_loss
from replica_groups.exchange.stall_detector import listed


def summary_of(state: RunState) -> dict[str, Any]:
    """Return the run in numbers, for JSON. For a failed run: what is known, and the cause under `failed`."""
    with state.lock:
        return _summary(state)


def _summary(state: RunState) -> dict[str, Any]:
    means, seconds, rounds = state.mean_validation_losses(), state.training_seconds(), range(state.rounds + 1)

    def losses(by_round: Mapping[int, float]) -> dict[str, Any]:
        """Return the losses of rounds 1, 2, ... up to the last known one; None for unknown ones before it."""
        known = [by_round.get(round_) for round_ in range(1, max(by_round, default=0) + 1)]
        return {"initial_validation_loss": by_round.get(0), "validation_loss": known}

    def carried(part: LinkState | LineState, per_round: str) -> dict[str, Any]:
        ways = part.ways.items()
        return {
            "bandwidth_bits_per_second": {way: traffic.bandwidth for way, traffic in ways},
            "payload_bytes": {way: traffic.payload_bytes for way, traffic in ways},
            "wire_bytes": {way: traffic.wire_bytes for way, traffic in ways},
            "busy_share": {way: traffic.busy_share(seconds) for way, traffic in ways},
            f"{per_round}_per_round": {
                way: [getattr(traffic.of_round(round_), per_round) for round_ in rounds] for way, traffic in ways
            },
        }

    def sizes(size: int, kept_values: int) -> dict[str, Any]:
        bits = 8 * size / kept_values if kept_values else None
        return {"bytes": size, "kept_values": kept_values, "bits_per_value": bits}

    # Members and other processes that were restarted or replaced, or are gone.
    troubled: dict[str, Any] = {}
    for name in dict.fromkeys([*state.members, *state.restarts]):
        member = state.members.get(name)
        again = {
            "taken_again": 0 if member is None else member.taken_again,
            "restarts": state.restarts[name],
            "healed": state.healed[name],
        }
        gone = state.given_up.get(name) or (None if member is None else member.vacant)
        if any(again.values()) or gone is not None:
            troubled[name] = again | {"incarnation": None if member is None else member.incarnation, "gone": gone}

    summary: dict[str, Any] = {
        "name": state.spec.config.name,
        "rehearsal": state.spec.config.rehearsal is not None,
        "rounds": state.rounds,
        **losses(means),
        "replicas": [
            {
                "name": replica.name,
                "kind": replica.kind,
                "tokens": replica.tokens,
                "steps": [replica.steps(round_) for round_ in range(1, replica.last_round + 1)],
                "loss": replica.round_loss(replica.latest[0]),
                **losses(replica.validation_loss),
            }
            for replica in state.replicas.values()
        ],
        "links": [
            {
                "name": link.name,
                "from": link.spec.source,
                "to": link.spec.target,
                "lines": {
                    end: None if line is None else line.name
                    for end, line in (("from", link.spec.source_line), ("to", link.spec.target_line))
                },
                **carried(link, "payload_bytes"),
            }
            for link in state.links.values()
        ],
        "lines": [
            {"name": line.name, "kind": line.spec.kind, "members": list(line.spec.members)}
            | carried(line, "wire_bytes")
            for line in state.lines.values()
        ],
        "contributions": sizes(state.contribution_bytes, sum(closed.kept_values for closed in state.closed.values()))
        | {
            "per_round": [
                {"round": round_} | sizes(closed.bytes, closed.kept_values)
                for round_, closed in sorted(state.closed.items())
            ]
        },
        "parameters_sha256": state.final_sha256(),
        "wall_seconds": state.elapsed(),
        "training_seconds": seconds,
        "tokens_per_second": state.tokens_per_second(),
        "goodput": dict(zip(("tokens_per_second", "share"), state.goodput(), strict=True)),
        "membership_state": {
            "participation": state.tally.participation,
            "not_counted": [
                {"round": round_, "replica": replica, "cause": why.cause}
                for round_ in sorted(state.closed)
                for replica, why in state.not_counted(round_).items()
            ],
            "late": dict(state.late),
            "suspended": dict(state.suspended),
            "pauses": [
                {
                    "round": pause.round,
                    "seconds": None if pause.end is None else pause.end - pause.start,
                    "cause": pause.cause,
                }
                for pause in state.pauses
            ],
            "members": troubled,
        },
        "refusals": state.refusals.total(),
        "refusals_by_kind": dict(sorted(state.refusals.items())),
        "refusals_told_by": dict(sorted(state.refusals_told.items())),
        "changes": state.changed.changes.history,
    }
    is_judged = state.spec.config.audit.scores is None or state.scores or not state.rounds
    audit: dict[str, Any] = {
        "scores": [_fields(score) for score in state.scores.values()],
        "checks": state.checks,
        "failed_checks": [
            {"round": check.round, "replica": check.replica} | _fields(check.recomputed)
            for check in state.failed_checks
        ],
        "unaudited": state.unaudited or (None if is_judged else "no validator has judged a round"),
    }
    if any(audit.values()):
        summary["audit"] = audit
    if state.diverged:
        summary["diverged"] = [divergence._asdict() for divergence in state.diverged.values()]
    if state.failed is not None:
        summary["failed"] = state.failed
    return summary


def _fields(message: Message) -> dict[str, Any]:
    return {field.name: getattr(message, field.name) for field in message.DESCRIPTOR.fields}


# ---- printed ----


def print_result(console: Console, summary: Mapping[str, Any], folder: Path) -> None:
    """Print the results of a run from its summary. `folder`: where the run's files are."""
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
    console.print(table)
    console.print(_carried("link", DIRECTIONS, summary["links"]))
    if summary["lines"]:
        console.print(_carried("line", WAYS, summary["lines"]))
    for line in _lines(summary, folder):
        say(console, line)


def _carried(what: str, ways: Sequence[str], carried: Sequence[Mapping[str, Any]]) -> PlainTable:
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


def _lines(summary: Mapping[str, Any], folder: Path) -> Iterator[str]:
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
    yield from _membership_lines(summary)
    if "diverged" in summary:
        yield f"{divergence_line([Divergence(**one) for one in summary['diverged']])}."
    audit = summary.get("audit", {})
    if checks := audit.get("checks", 0):
        failed = len(audit["failed_checks"])
        found = f"{failed} differed from what was contributed (see metrics.jsonl)" if failed else "all as contributed"
        yield f"Audits: {format_count(checks, 'round')} of replicas computed again, {found}."
    if scores := audit.get("scores"):
        excluded = [one["replica"] for one in scores if one["excluded"]]
        words = f"excluded: {', '.join(excluded)}" if excluded else "nobody is excluded"
        yield f"Scores: {format_count(len(scores), 'replica')}, {words} (`hetero-pp audit scores`)."
    if audit.get("unaudited"):
        yield f"Unaudited: {audit['unaudited']}."
    if summary["refusals"]:
        kinds = ", ".join(f"{count} {kind}" for kind, count in summary["refusals_by_kind"].items())
        told = summary.get("refusals_told_by", {}).items()
        words = ", ".join(f"{member} reports {count}" for member, count in told if member != EXCHANGE)
        yield f"Refused messages: {kinds}{words and f'; of these {words}'} (see metrics.jsonl)."
    rounds = f"{format_count(summary['rounds'], 'outer round')} in {format_seconds(summary['wall_seconds'])}"
    yield f"{rounds}, {summary['tokens_per_second']:,.0f} tokens/s over all replicas."
    if "failed" in summary:
        yield f"Failed: {summary['failed']}"
    yield f"Files: {folder} (summary.json, metrics.jsonl, loss.png, tensorboard/)"


def _membership_lines(summary: Mapping[str, Any]) -> Iterator[str]:
    """Yield lines about the membership events in a run's summary and their cost; none if there were no events."""
    found, goodput = summary["membership_state"], summary["goodput"]
    for name, one in found["members"].items():
        joined = max(0, one["taken_again"] - one["restarts"])  # a restart joins once
        counts = {"restarted": one["restarts"], "joined again": joined, "recovered from the log": one["healed"]}
        times = [f"{what} {format_times(count)}" for what, count in counts.items() if count]
        yield f"{name}: {', '.join([*times, *([one['gone']] if one['gone'] else [])])}."
    for replica, count in found["suspended"].items():
        yield f"{replica}: lost a stage within a round {format_times(count)}."
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
