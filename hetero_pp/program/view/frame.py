"""Frame: what every part of a run does at one moment."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from hetero_pp.config.lines import WAYS
from hetero_pp.config.links import Direction, LinkSpec
from hetero_pp.config.topology import ReplicaSettings
from hetero_pp.messages.messages_pb2 import CONTRIBUTING, Credit, Doing
from hetero_pp.program.report.live_view import status_lines
from hetero_pp.program.report.replica_state import ReplicaState
from hetero_pp.program.report.spent import awaiting
from hetero_pp.program.report.state import MemberPresence, RunState
from hetero_pp.program.view.followed import FollowedReports, MemberDetails
from hetero_pp.program.view.topology import SIDES

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
_MOST_RATE = 1e18
"""Bytes per second: a damaged record may tell any bytes within any time."""
_LASTING = ("given_up", "vacant", "suspended", "finished")
"""States whose start is known. Activities are samples: between two of them a member may do something else."""
_HOPS = {Doing.WAITING_FOR_PREVIOUS: -1, Doing.WAITING_FOR_NEXT: 1}


def frame_of(view: FollowedReports, now: float) -> dict[str, Any]:
    """Return the frame at a time in seconds since the epoch. The caller holds the state's lock."""
    state = view.state
    done, total = state.progress_of_open_round(now)
    left, waiting = state.seconds_left(now), state.waiting
    return {
        "time": view.since_start(now),
        "phase": _phase(view),
        "message": state.failed or view.stale or next((line for line, _ in status_lines(state, now)), ""),
        "rounds_closed": state.rounds,
        "step_done": done,
        "step_total": total,
        "elapsed": round(state.elapsed(now), 3),
        "seconds_left": None if left is None else round(left, 1),
        "members": {name: _member(view, name, details) for name, details in view.members.items()},
        "replicas": _replicas(view, now),
        "links": _links(view, now),
        "lines": _lines(state, now),
        "exchange": {
            "missing": [] if waiting is None else [one.member for one in waiting.missing],
            "store_error": "" if waiting is None else waiting.store_error,
            "refusals": state.refusals.total(),
        },
    }


def _phase(view: FollowedReports) -> str:
    state = view.state
    if state.failed is not None or (view.outcome or "").startswith("failed"):
        return "failed"
    if state.is_over or view.outcome == "over":
        return "over"
    if not state.has_begun:
        return "joining"
    if state.membership_state.pause is not None:
        return "paused"
    if state.waiting is not None and (state.waiting.awaited != CONTRIBUTING or _trained(state)):
        return "waiting"
    return "training"


def _trained(state: RunState) -> bool:
    """Return whether all inner steps of the open round are done, as far as the last report shows."""
    done, total = state.progress_of_open_round(state.latest or 0.0)
    return done >= total


def _member(view: FollowedReports, name: str, details: MemberDetails) -> dict[str, Any]:
    what, detail = _what(view.state, name, details)
    return {
        "state": what,
        "detail": detail,
        "since": view.since_start(details.since) if details.since is not None and what in _LASTING else None,
        "device": details.device,
        "incarnation": view.state.membership_state.slots[name].incarnation,
        "round": details.round,
        "heard": None if details.heard is None else view.since_start(details.heard),
    }


def _what(state: RunState, name: str, details: MemberDetails) -> tuple[str, str]:
    """Return what a member does, and the details in words."""
    presence, membership_state = state.presence(name), state.membership_state
    if presence is not MemberPresence.PRESENT:
        cause = membership_state.given_up.get(name) or membership_state.slots[name].vacant or ""
        return ("absent" if presence is MemberPresence.MISSING else presence), cause
    if details.is_suspended:
        return "suspended", "returns to the start of its round"
    if details.doing in _DOINGS:
        return _DOINGS[details.doing], _awaited(state, name, details.doing)
    return ("computing", "") if state.has_begun else ("reading", "")


def _awaited(state: RunState, name: str, doing: Doing) -> str:
    """Return in words the neighbour or the round that a member waits for; empty if it does not wait."""
    member = state.spec.members[name]
    if doing == Doing.WAITING_FOR_ROUND:
        return "waits for the next round"
    if member.stage is None or doing not in _HOPS:
        return ""
    members = member.replica.members
    return f"waits for {members[(member.stage.index + _HOPS[doing]) % len(members)]}"


def _replicas(view: FollowedReports, now: float) -> dict[str, Any]:
    state, vacant, replicas = view.state, view.state.membership_state.vacant, {}
    for replica in state.spec.replicas_ever:
        found = state.replicas.get(replica.name)
        numbers = dict.fromkeys(_NUMBERS) if found is None else _numbers(state, found, now)
        replicas[replica.name] = {"state": _state_of(view, replica, vacant), **numbers, **_score(state, replica.name)}
    return replicas


def _score(state: RunState, replica: str) -> dict[str, Any]:
    """Return the score of a replica's contributions; nothing for a run without scores."""
    found = state.scores.get(replica)
    return {} if found is None else {"score": found.final, "excluded": found.excluded}


_NUMBERS = ("loss", "validation_loss", "tokens_per_second", "tokens", "steps_done", "included", "missed")


def _numbers(state: RunState, replica: ReplicaState, now: float) -> Mapping[str, float | None]:
    credit = state.tally.credits.get(replica.name, Credit())
    return {
        "loss": replica.loss,
        "validation_loss": replica.last_validation_loss,
        "tokens_per_second": state.tokens_per_second(replica, now),
        "tokens": replica.tokens,
        "steps_done": replica.steps_done,
        "included": credit.included,
        "missed": credit.missed,
    }


def _state_of(view: FollowedReports, replica: ReplicaSettings, vacant: Collection[str]) -> str:
    members = replica.members
    details = [view.members[member] for member in members if member in view.members]
    if view.state.finished.issuperset(members):
        return "finished"
    if not view.state.joined.issuperset(members):
        return "absent"
    if replica.name in view.barred:
        return "barred"
    if any(member in vacant for member in members):
        return "left" if all(member in vacant for member in members) else "suspended"
    return "suspended" if any(member.is_suspended for member in details) else "training"


def _links(view: FollowedReports, now: float) -> dict[str, Any]:
    return {
        name: {
            side: _flow(
                link.directions[way].recent_bytes_per_second(now),
                view.limits[name][side],
                link.directions[way].wire_bytes,
            )
            | {"awaited": _awaited_share(view.state, link.spec, way)}
            for side, way in SIDES.items()
        }
        for name, link in view.state.links.items()
    }


def _awaited_share(state: RunState, link: LinkSpec, way: Direction) -> float | None:
    """Return the share of the receiver's last round in which it waited for messages of this direction."""
    receiver, part = awaiting(link, way)
    share = state.spent[receiver].share(part) if receiver in state.spent else None
    return None if share is None else round(share, 4)


def _flow(rate: float, limit: float | None, wire_bytes: int) -> dict[str, float | None]:
    """Return what passes now. `rate` is in bytes per second, `limit` in bits per second."""
    busy = None if limit is None else round(8 * rate / limit, 4)
    return {"rate": round(min(rate, _MOST_RATE)), "busy": busy, "bytes": wire_bytes}


def _lines(state: RunState, now: float) -> dict[str, Any]:
    return {
        name: {
            way: _flow(
                line.recent_bytes_per_second(way, now), state.spec.lines[name].bandwidth(way), line.wire_bytes(way)
            )
            for way in WAYS
        }
        for name, line in state.lines.items()
    }
