"""A run in numbers: the content of summary.json, and of the tables at the run's end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from google.protobuf.message import Message

from hetero_pp.config.lines import WAYS, LineSpec
from hetero_pp.program.report.carried import LineState, LinkState
from hetero_pp.program.report.replica_state import ReplicaState
from hetero_pp.program.report.state import RunState


def summary_of(state: RunState) -> dict[str, Any]:
    """Return the run in numbers, for JSON. For a failed run: what is known, and the cause under `failed`."""
    with state.lock:
        means, seconds, rounds = state.mean_validation_losses(), state.training_seconds(), range(state.rounds + 1)
        return {
            "name": state.spec.config.name,
            "rehearsal": state.spec.config.rehearsal is not None,
            "rounds": state.rounds,
            "initial_validation_loss": means.get(0),
            "validation_loss": _from_first_round(means),
            "replicas": [_replica(replica) for replica in state.replicas.values()],
            "links": [_link(link, seconds, rounds) for link in state.links.values()],
            "lines": [_line(line, seconds, rounds) for line in state.lines.values()],
            "contributions": _contributions(state),
            "parameters_sha256": state.final_sha256(),
            "wall_seconds": state.elapsed(),
            "training_seconds": seconds,
            "tokens_per_second": state.tokens_per_second(),
            "goodput": dict(zip(("tokens_per_second", "share"), state.goodput(), strict=True)),
            "membership_state": {"participation": state.tally.participation} | state.membership_state.summary(),
            "refusals": state.refusals.total(),
            "refusals_by_kind": dict(sorted(state.refusals.items())),
            "refusals_told_by": dict(sorted(state.refusals_told.items())),
            "changes": state.changes.history,
            **_audit(state),
            **_diverged(state),
        } | ({} if state.failed is None else {"failed": state.failed})


def _audit(state: RunState) -> dict[str, Any]:
    """Return what audits found, under `audit`; nothing for a run without audits."""
    is_judged = state.spec.config.audit.scores is None or state.scores or not state.rounds
    found = {
        "scores": [_fields(one) for one in state.scores.values()],
        "checks": state.checks,
        "failed_checks": [
            {"round": one.round, "replica": one.replica} | _fields(one.recomputed) for one in state.failed_checks
        ],
        "unaudited": state.membership_state.unaudited or (None if is_judged else "no validator has judged a round"),
    }
    return {"audit": found} if any(found.values()) else {}


def _diverged(state: RunState) -> dict[str, Any]:
    """Return the replicas that have diverged, under `diverged`; nothing if there are none."""
    return {"diverged": [asdict(one) for one in state.diverged.values()]} if state.diverged else {}


def _fields(message: Message) -> dict[str, Any]:
    return {field.name: getattr(message, field.name) for field in message.DESCRIPTOR.fields}


def _link(link: LinkState, seconds: float, rounds: range) -> dict[str, Any]:
    ways = link.directions.items()
    return {
        "name": link.spec.name,
        "from": link.spec.source,
        "to": link.spec.target,
        "lines": {"from": _name(link.spec.source_line), "to": _name(link.spec.target_line)},
        "bandwidth_bits_per_second": {way: state.bandwidth for way, state in ways},
        "payload_bytes": {way: state.payload_bytes for way, state in ways},
        "wire_bytes": {way: state.wire_bytes for way, state in ways},
        "busy_share": {way: state.busy_share(seconds) for way, state in ways},
        "payload_bytes_per_round": {
            way: [state.payload_bytes_of_round(round_) for round_ in rounds] for way, state in ways
        },
    }


def _line(line: LineState, seconds: float, rounds: range) -> dict[str, Any]:
    return {
        "name": line.spec.name,
        "kind": line.spec.kind,
        "members": list(line.spec.members),
        "bandwidth_bits_per_second": {way: line.spec.bandwidth(way) for way in WAYS},
        "payload_bytes": {way: line.payload_bytes(way) for way in WAYS},
        "wire_bytes": {way: line.wire_bytes(way) for way in WAYS},
        "busy_share": {way: line.busy_share(way, seconds) for way in WAYS},
        "wire_bytes_per_round": {way: [line.wire_bytes_of_round(way, round_) for round_ in rounds] for way in WAYS},
    }


def _name(line: LineSpec | None) -> str | None:
    return None if line is None else line.name


def _contributions(state: RunState) -> dict[str, Any]:
    closed = [state.closed[round_] for round_ in sorted(state.closed)]
    whole = _sizes(state.contribution_bytes, sum(one.kept_values for one in closed))
    rounds = [{"round": one.round} | _sizes(one.bytes, one.kept_values) for one in closed]
    return whole | {"per_round": rounds}


def _sizes(size: int, kept_values: int) -> dict[str, Any]:
    bits = 8 * size / kept_values if kept_values else None
    return {"bytes": size, "kept_values": kept_values, "bits_per_value": bits}


def _replica(replica: ReplicaState) -> dict[str, Any]:
    return {
        "name": replica.name,
        "kind": replica.kind,
        "tokens": replica.tokens,
        "steps": [replica.steps(round_) for round_ in range(1, replica.last_round + 1)],
        "loss": replica.last_round_loss(),
        "initial_validation_loss": replica.validation_loss.get(0),
        "validation_loss": _from_first_round(replica.validation_loss),
    }


def _from_first_round(losses: Mapping[int, float]) -> list[float | None]:
    """Return the losses of rounds 1, 2, ... up to the last known one; None for unknown ones before it."""
    last = max(losses, default=0)
    return [losses.get(round_) for round_ in range(1, last + 1)]
