"""JSON of a run for its page: its history, with what the run is made of, and frames of every moment.

The caller holds the state's lock.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hetero_pp.config.lines import EXCHANGE, WAYS, Direction, LinkSpec, members_at
from hetero_pp.config.spec import RunSpec
from hetero_pp.config.topology import DatacenterReplica, ParticipantsReplica, ReplicaSettings
from hetero_pp.core.units import bytes_per_second
from hetero_pp.messages.messages_pb2 import CONTRIBUTING, Credit, Doing
from hetero_pp.program.compare import leaves
from hetero_pp.program.report.lines import kind_of, status_lines, words_of
from hetero_pp.program.report.state import MemberPresence, News, RunState, awaiting

MOST_CELLS = 20_000
"""Cells of the grid of rounds, one per round and replica. Longer runs show every second, fourth, ... earlier round."""
_ALWAYS = 50  # newest rounds, which are always shown
_CHARACTERS_MAX = 1000  # of the text of a mark
_MOST_RATE = 1e18  # bytes per second: a damaged record may tell any bytes within any time
SIDES: Mapping[str, Direction] = {"there": "forward", "back": "backward"}
"""Direction of a link as the page names it -> as the run names it."""
_LASTING = ("given_up", "vacant", "suspended", "finished")
"""States whose start is known. Activities are samples: between two of them a member may do something else."""
_HOPS = {Doing.WAITING_FOR_PREVIOUS: -1, Doing.WAITING_FOR_NEXT: 1}
_DOINGS: Mapping[Doing, str] = {
    Doing.COMPUTING: "computing",
    Doing.FORWARD: "forward",
    Doing.BACKWARD: "backward",
    Doing.WAITING_FOR_PREVIOUS: "waiting",
    Doing.WAITING_FOR_NEXT: "waiting",
    Doing.OUTER_ROUND: "outer",
    Doing.EVALUATING: "evaluating",
    Doing.CATCHING_UP: "reading",
    Doing.WAITING_FOR_ROUND: "waiting",
}
"""Reported activity of a member -> its state on the page."""


# ---- the history ----


def since_start(state: RunState, when: float) -> float:
    """Return a time as seconds since the run's first report, without breaks between two sittings."""
    return round(state.elapsed(when), 3)


def history_of(state: RunState, text: str) -> dict[str, Any]:
    """Return what is known of a run. `text`: first digits of the digest of its text; empty if unknown."""
    spec, every = state.changed, 1
    while len(state.closed) * max(1, len(state.replicas)) > every * MOST_CELLS:
        every *= 2
    shown = [one for one in sorted(state.closed) if one % every == 0 or one > state.rounds - _ALWAYS]
    return {
        "name": spec.config.name,
        "rehearsal": spec.config.rehearsal is not None,
        "span": since_start(state, state.latest or 0.0),
        "rounds_planned": state.rounds_planned,
        "inner_steps": state.inner_steps,
        "topology": topology_of(spec),
        "settings": dict(leaves(spec.latest.model_dump(mode="json", exclude={"name"})))
        | {"data: sha256": text or None},
        "rounds": [round_of(state, one) for one in shown],
        "cost": cost_of(state),
    }


def cost_of(state: RunState) -> dict[str, Any]:
    """Return what the run has used and reached so far: seconds, tokens, bytes, loss. None is unknown."""
    means, (goodput, share) = state.mean_validation_losses(), state.goodput()
    return {
        "training_seconds": state.training_seconds(),
        "tokens": sum(replica.tokens for replica in state.replicas.values()),
        "tokens_per_second": state.tokens_per_second(),
        "goodput": goodput,
        "goodput_share": share,
        "contribution_bytes": state.contribution_bytes,
        "rounds": state.rounds,
        "wire_bytes": sum(link.wire_bytes for link in state.links.values()),
        "validation_loss": means[max(means)] if means else None,
    }


def round_of(state: RunState, round_: int) -> dict[str, Any]:
    """Return a closed round, with a cell for each replica."""
    closed, cells = state.closed[round_], {}
    excluded = state.not_counted(round_)
    for name in dict.fromkeys([*state.awaited(round_), *state.of_round(round_)]):
        replica = state.replicas.get(name)
        cells[name] = {
            "state": state.outcome(name, round_),
            "why": excluded[name].cause if name in excluded else None,
            "bytes": closed.sizes.get(name),
            "training_loss": None if replica is None else replica.round_loss(round_),
            "validation_loss": None if replica is None else replica.validation_loss.get(round_),
            **{f"{part}_seconds": seconds for part, seconds in state.times(round_, name).items()},
        }
    return {
        "round": round_,
        "closed": since_start(state, closed.time),
        # It is not known how long a round took if it is not known when the one before closed.
        "seconds": state.round_seconds(round_) if round_ == 1 or round_ - 1 in state.closed else None,
        "bytes": closed.bytes,
        "tokens": closed.tokens_until,
        "validation_loss": state.mean_validation_loss(round_),
        "cells": cells,
    }


def mark_of(state: RunState, number: int, news: News) -> dict[str, Any]:
    """Return a membership event as the page shows it. Only members of the run have their own marks."""
    report = news.report
    is_of_exchange, told = report.HasField("membership_event"), report.membership_event
    slot = told.slot if is_of_exchange else report.member
    member = state.members.get(slot)
    return {
        "id": number,
        "time": since_start(state, report.time),
        "kind": kind_of(news),
        "member": None if member is None else slot,
        "replica": told.replica or (None if member is None else member.replica),
        "round": (told.round if is_of_exchange else report.begun.last_round) or None,
        "text": words_of(news, state.spec)[:_CHARACTERS_MAX],
    }


# ---- what does not change ----


def topology_of(spec: RunSpec) -> dict[str, Any]:
    """Return sites, replicas, members, links and lines. Rates are in bytes per second; None is unlimited."""
    sites = {name: members_at(site, list(spec.members)) for name, site in spec.config.sites.items()}
    site_of = {member: name for name, members in sites.items() for member in members}
    members = []
    for member in spec.members.values():
        replica, stage = member.replica, member.stage
        members.append(
            {
                "id": member.name,
                "replica": replica.name,
                "stage": None if stage is None else stage.index,
                "layers": None if stage is None else _layers(stage.layers),
                "engine": replica.engine if isinstance(replica, DatacenterReplica) else "stages",
                "site": site_of.get(member.name),
            }
        )
    return {
        "sites": [{"id": name, "label": name} for name in sites],
        "replicas": [
            {
                "id": replica.name,
                "kind": replica.kind,
                "optional": replica.optional,
                "members": list(replica.members),
                "boundary": _boundary(replica, spec.shape.width),
                "batch_size": replica.batch_size,
            }
            for replica in spec.replicas_ever
        ],
        "members": members,
        "links": [
            {
                "id": link.name,
                "source": link.source,
                "target": link.target,
                "kind": "exchange" if EXCHANGE in (link.source, link.target) else "stage",
                "bandwidth": {side: bytes_per_second(link.bottleneck(way)) for side, way in SIDES.items()},
                "latency": {side: link.shape(way).latency for side, way in SIDES.items()},
            }
            for link in spec.links.values()
        ],
        "lines": [
            {"id": line.name, "latency": line.latency, "members": list(line.members)}
            | {way: bytes_per_second(line.bandwidth(way)) for way in WAYS}
            for line in spec.lines.values()
        ],
    }


def _boundary(replica: ReplicaSettings, width: int) -> str | None:
    """Return what crosses between the stages of a group, such as `8 of 64, 4 bits`; None if nothing does."""
    if not isinstance(replica, ParticipantsReplica) or replica.stage_count < 2:
        return None
    own = replica.boundary
    kept = own.dimensions(width)
    coefficient = own.dtype if own.bits is None else f"{own.bits} bits"
    return f"{width if kept is None else kept} of {width}, {coefficient}"


def _layers(layers: range) -> str:
    if len(layers) < 2:
        return f"layer {layers.start}" if layers else "no layer"
    return f"layers {layers.start}-{layers.stop - 1}"


# ---- one moment ----


def frame_of(state: RunState, now: float, outcome: str | None = None, stale: str = "") -> dict[str, Any]:
    """Return the frame at a time in seconds since the epoch. `stale`: why the page may be behind the run."""
    done, total = state.progress_of_open_round(now)
    left, waiting = state.seconds_left(now), state.waiting
    members = {}
    for name, member in state.members.items():
        what, detail = _what(state, name)
        members[name] = {
            "state": what,
            "detail": detail,
            "since": since_start(state, member.since) if member.since is not None and what in _LASTING else None,
            "device": member.device or None,
            "incarnation": member.incarnation,
            "round": member.round,
            "heard": None if member.heard is None else since_start(state, member.heard),
        }
    return {
        "time": since_start(state, now),
        "phase": _phase(state, outcome),
        "message": state.failed or stale or next((line for line, _ in status_lines(state, now)), ""),
        "rounds_closed": state.rounds,
        "step_done": done,
        "step_total": total,
        "elapsed": round(state.elapsed(now), 3),
        "seconds_left": None if left is None else round(left, 1),
        "members": members,
        "replicas": {replica.name: _replica(state, replica, now) for replica in state.spec.replicas_ever},
        "links": {
            name: {
                side: _flow(direction.recent_bytes_per_second(now), link.spec.bottleneck(way), direction.wire_bytes)
                | {"awaited": _awaited_share(state, link.spec, way)}
                for side, way in SIDES.items()
                if (direction := link.ways[way])
            }
            for name, link in state.links.items()
        },
        "lines": {
            name: {
                way: _flow(traffic.recent_bytes_per_second(now), traffic.bandwidth, traffic.wire_bytes)
                for way, traffic in line.ways.items()
            }
            for name, line in state.lines.items()
        },
        "exchange": {
            "missing": [] if waiting is None else [one.member for one in waiting.missing],
            "store_error": "" if waiting is None else waiting.store_error,
            "refusals": state.refusals.total(),
        },
    }


def _phase(state: RunState, outcome: str | None) -> str:
    if state.failed is not None or outcome == "failed":
        return "failed"
    if state.is_over or outcome == "over":
        return "over"
    if not state.has_begun:
        return "joining"
    if state.pause is not None:
        return "paused"
    done, total = state.progress_of_open_round(state.latest or 0.0)  # as far as the last report shows
    if state.waiting is not None and (state.waiting.awaited != CONTRIBUTING or done >= total):
        return "waiting"
    return "training"


def _what(state: RunState, name: str) -> tuple[str, str]:
    """Return what a member does, and the details in words."""
    presence, found = state.presence(name), state.members[name]
    if presence is MemberPresence.MISSING:
        return "absent", ""
    if presence is not MemberPresence.PRESENT:
        return presence, state.given_up.get(name) or found.vacant or ""
    if found.is_suspended:
        return "suspended", "returns to the start of its round"
    if found.doing not in _DOINGS:
        return ("computing" if state.has_begun else "reading"), ""
    detail, member = "", state.spec.members[name]
    if found.doing == Doing.WAITING_FOR_ROUND:
        detail = "waits for the next round"
    elif member.stage is not None and found.doing in _HOPS:
        stages = member.replica.members
        detail = f"waits for {stages[(member.stage.index + _HOPS[found.doing]) % len(stages)]}"
    return _DOINGS[found.doing], detail


def _replica(state: RunState, replica: ReplicaSettings, now: float) -> dict[str, Any]:
    members = [state.members[name] for name in replica.members if name in state.members]
    vacant = [member.vacant is not None for member in members]
    if all(member.has_finished for member in members):
        what = "finished"
    elif not state.joined.issuperset(replica.members):
        what = "absent"
    elif replica.name in state.barred:
        what = "barred"
    elif any(vacant):
        what = "left" if all(vacant) else "suspended"
    else:
        what = "suspended" if any(member.is_suspended for member in members) else "training"
    found, credit = state.replicas.get(replica.name), state.tally.credits.get(replica.name, Credit())
    numbers: dict[str, Any] = {
        "loss": found and found.loss,
        "validation_loss": found and found.last_validation_loss,
        "tokens_per_second": found and state.tokens_per_second(found, now),
        "tokens": found and found.tokens,
        "steps_done": found and found.steps_done,
        "included": found and credit.included,
        "missed": found and credit.missed,
    }
    if (score := state.scores.get(replica.name)) is not None:
        numbers |= {"score": score.final, "excluded": score.excluded}
    return {"state": what} | numbers


def _awaited_share(state: RunState, link: LinkSpec, way: Direction) -> float | None:
    """Return the share of the receiver's last round in which it waited for messages of this direction."""
    receiver, part = awaiting(link, way)
    share = state.members[receiver].share(part) if receiver in state.members else None
    return None if share is None else round(share, 4)


def _flow(rate: float, limit: float | None, wire_bytes: int) -> dict[str, float | None]:
    """Return what passes now. `rate` is in bytes per second, `limit` in bits per second."""
    busy = None if limit is None else round(8 * rate / limit, 4)
    return {"rate": round(min(rate, _MOST_RATE)), "busy": busy, "bytes": wire_bytes}
