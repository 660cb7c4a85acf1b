"""History: what a run is made of, and what happened in each of its rounds."""

from __future__ import annotations

from typing import Any

from hetero_pp.program.compare import leaves
from hetero_pp.program.view.followed import FollowedReports
from hetero_pp.program.view.topology import topology_of

MOST_CELLS = 20_000
"""Cells of the grid of rounds, one per round and replica. Longer runs show every second, fourth, ... earlier round."""
_ALWAYS = 50
"""Newest rounds, which are always shown."""


def history_of(view: FollowedReports) -> dict[str, Any]:
    """Return the history of a run, without its id. The caller holds the state's lock."""
    state = view.state
    spec = state.spec.with_changes(state.changes)
    every = _every(len(state.closed) * max(1, len(state.replicas)))
    shown = [one for one in sorted(state.closed) if one % every == 0 or one > state.rounds - _ALWAYS]
    return {
        "name": spec.config.name,
        "rehearsal": spec.config.rehearsal is not None,
        "own": list(view.own),
        "is_live": view.is_live,
        "outcome": view.outcome,
        "span": view.since_start(state.latest or 0.0),
        "rounds_planned": state.rounds_planned,
        "inner_steps": state.inner_steps,
        "topology": topology_of(spec),
        "settings": dict(leaves(spec.latest.model_dump(mode="json", exclude={"name"})))
        | {"data: sha256": view.text or None},
        "rounds": [round_of(view, one) for one in shown],
        "steps": {name: curve.points for name, curve in view.curves.items()},
        "marks": view.marks(),
        "problems": view.problems,
        "cost": cost_of(view),
    }


def _every(cells: int) -> int:
    every = 1
    while cells > every * MOST_CELLS:
        every *= 2
    return every


def cost_of(view: FollowedReports) -> dict[str, Any]:
    """Return what the run has used and reached so far: seconds, tokens, bytes, loss. None is unknown."""
    state = view.state
    means = state.mean_validation_losses()
    goodput, share = state.goodput()
    used = {
        "training_seconds": state.training_seconds(),
        "tokens": sum(replica.tokens for replica in state.replicas.values()),
        "tokens_per_second": state.tokens_per_second(),
        "goodput": goodput,
        "goodput_share": share,
        "contribution_bytes": state.contribution_bytes,
    }
    return used | {
        "rounds": state.rounds,
        "wire_bytes": sum(link.wire_bytes for link in state.links.values()),
        "validation_loss": means[max(means)] if means else None,
    }


def round_of(view: FollowedReports, round_: int) -> dict[str, Any]:
    """Return a closed round, with a cell for each replica."""
    state, closed = view.state, view.state.closed[round_]
    causes = state.membership_state.not_counted(round_)
    names = dict.fromkeys([*state.membership_state.awaited(round_), *state.of_round(round_)])
    return {
        "round": round_,
        "closed": view.since_start(closed.time),
        "seconds": view.round_seconds(round_),
        "bytes": closed.bytes,
        "tokens": view.tokens.get(round_),
        "validation_loss": state.mean_validation_loss(round_),
        "cells": {name: _cell(view, round_, name, causes.get(name)) for name in names},
    }


def _cell(view: FollowedReports, round_: int, name: str, cause: str | None) -> dict[str, Any]:
    replica = view.state.replicas.get(name)
    return {
        "state": view.state.membership_state.outcome(name, round_),
        "why": cause,
        "bytes": view.contributed.get(round_, {}).get(name),
        "training_loss": None if replica is None else replica.round_loss(round_),
        "validation_loss": None if replica is None else replica.validation_loss.get(round_),
        **{f"{part}_seconds": seconds for part, seconds in view.times.of(round_, name).items()},
    }
