"""A run as an operator's tools see it: its state once it is known, its condition, and the exchange's present time."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import StrEnum

from hetero_pp.core.units import format_seconds
from hetero_pp.messages.messages_pb2 import STORING, Report
from hetero_pp.program.report.lines import STALL_SECONDS, waiting_line
from hetero_pp.program.report.state import RunState
from hetero_pp.rpc.exchange_service import MOST_BETWEEN

SILENT_SECONDS = MOST_BETWEEN + STALL_SECONDS
"""Seconds without any report after which a run has stalled. The exchange reports a wait every MOST_BETWEEN seconds."""


class Condition(StrEnum):
    """Condition of a run."""

    STARTING = "starting"  # training has not begun
    RUNNING = "running"
    PAUSED = "paused"  # fewer replicas are present than a round needs
    STALLED = "stalled"  # no progress, or a disk or store that takes no data
    FAILED = "failed"
    OVER = "over"  # every round is closed


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
        pause = state.pause
        if state.failed is not None:
            return Health(Condition.FAILED, state.failed)
        if state.has_closed_all_rounds:
            return Health(Condition.OVER)
        if pause is not None:
            return Health(Condition.PAUSED, f"round {pause.round} is paused: {pause.cause}")
        # A store error, or a wait of STALL_SECONDS in which no member computes.
        waiting = state.waiting
        is_slow_step = waiting is not None and any(one.computes for one in waiting.missing)
        has_waited = not is_slow_step and seconds_without_progress(state, now) > STALL_SECONDS
        if waiting is not None and (waiting.awaited == STORING or has_waited):
            return Health(Condition.STALLED, waiting_line(state, now, sees_all))
        silent = 0.0 if state.latest is None else now - state.latest
        if sees_all and silent > SILENT_SECONDS:
            return Health(Condition.STALLED, f"no report for {format_seconds(silent)}")
        return Health(Condition.RUNNING if state.has_begun else Condition.STARTING)


def seconds_without_progress(state: RunState, now: float) -> float:
    """Return for how long the exchange has waited without progress; 0 if it has reported no wait."""
    if state.waiting is None:
        return 0.0
    return state.waiting.seconds + max(0.0, now - state.waiting_told)


class Observed:
    """The run of this process. The server answers before its state is known."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self.only: frozenset[str] | None = None  # members whose reports this host gets; None: all
        self.state: RunState | None = None
        self.heard: float | None = None  # time of the last report by this host's clock; None before the first

    def follow(self, state: RunState, members: Collection[str] | None = None) -> None:
        """Show a run from now on. `members`: those whose reports this host gets; None: all."""
        self.only = None if members is None else frozenset(members)
        self.state = state

    def on_report(self, report: Report) -> None:
        """Note that a report arrived."""
        self.heard = self._clock()

    @property
    def sees_all(self) -> bool:
        """Whether the state gets the reports of all members."""
        return self.only is None

    def now(self) -> float:
        """Return the present time by the exchange's clock, which dates the reports. This host's may be wrong."""
        now, state = self._clock(), self.state
        return now if state is None or state.latest is None or self.heard is None else state.latest + now - self.heard

    def health(self) -> Health:
        """Return the health of the run; before it is known, that it is starting."""
        state = self.state
        return Health(Condition.STARTING) if state is None else health_of(state, self.now(), self.sees_all)

    def round(self, state: RunState) -> int:
        """Return the last closed round; where this host knows only its own members, their last finished round."""
        if self.only is None:
            return state.rounds
        return max((state.members[name].last_round for name in self.only), default=0)
