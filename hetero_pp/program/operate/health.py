"""Health of a run, for probes and alerts: whether it goes on, and if not, why."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from hetero_pp.core.units import format_seconds
from hetero_pp.messages.messages_pb2 import STORING
from hetero_pp.outer.exchange_service import MOST_BETWEEN
from hetero_pp.program.report.round_lines import STALL_SECONDS, waiting_line
from hetero_pp.program.report.state import RunState

SILENT_SECONDS = MOST_BETWEEN + STALL_SECONDS
"""Seconds without any report after which a run has stalled. The exchange reports a wait every MOST_BETWEEN seconds."""


class Condition(StrEnum):
    """Condition of a run."""

    STARTING = "starting"
    """No inner step was reported yet."""
    RUNNING = "running"
    PAUSED = "paused"
    """Fewer replicas are present than a round needs."""
    STALLED = "stalled"
    """No progress, or a disk or store that takes no data."""
    FAILED = "failed"
    OVER = "over"
    """Every round is closed."""


@dataclass(frozen=True)
class Health:
    """Condition of a run, with the reason if the run does not go on."""

    condition: Condition
    reason: str = ""

    @property
    def is_well(self) -> bool:
        """Whether the run goes on, or is over."""
        return self.condition in (Condition.STARTING, Condition.RUNNING, Condition.OVER)


def health_of(state: RunState, now: float, sees_all: bool = True) -> Health:
    """Return the health of a run at a time, in seconds since 1970 by the clock of the reports.

    `sees_all`: whether `state` gets the reports of all members. Otherwise silence is normal while others train.
    """
    with state.lock:
        pause, begun = state.standings.pause, state.first_step is not None
        if state.failed is not None:
            return Health(Condition.FAILED, state.failed)
        if state.has_closed_all_rounds:
            return Health(Condition.OVER)
        if pause is not None:
            return Health(Condition.PAUSED, f"round {pause.round} is paused: {pause.cause}")
        if _has_stalled(state, now):
            return Health(Condition.STALLED, waiting_line(state, now, sees_all))
        silent = 0.0 if state.latest is None else now - state.latest
        if sees_all and silent > SILENT_SECONDS:
            return Health(Condition.STALLED, f"no report for {format_seconds(silent)}")
        return Health(Condition.RUNNING if begun else Condition.STARTING)


def _has_stalled(state: RunState, now: float) -> bool:
    """Return whether the exchange reports an obstacle, or a wait of STALL_SECONDS in which no member computes."""
    waiting = state.waiting
    if waiting is None:
        return False
    is_slow_step = any(one.computes for one in waiting.missing)
    return waiting.awaited == STORING or (not is_slow_step and seconds_without_progress(state, now) > STALL_SECONDS)


def seconds_without_progress(state: RunState, now: float) -> float:
    """Return for how long the exchange has waited without progress; 0 if it has reported no wait."""
    if state.waiting is None or state.waiting_told is None:
        return 0.0
    return state.waiting.seconds + max(0.0, now - state.waiting_told)
