"""A run as an operator's tools see it: its state once it is known, and the exchange's present time."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

from hetero_pp.config.links import DIRECTIONS, Direction
from hetero_pp.messages.messages_pb2 import Report
from hetero_pp.program.operate.health import Condition, Health, health_of
from hetero_pp.program.report.carried import DirectionState
from hetero_pp.program.report.own_rounds import sender
from hetero_pp.program.report.replica_state import ReplicaState
from hetero_pp.program.report.state import RunState


class Observed:
    """The run of this process. The server answers before its state is known."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._members: frozenset[str] | None = None
        self.state: RunState | None = None
        self.heard: float | None = None
        """Time of the last report by this host's clock; None before the first."""

    def follow(self, state: RunState, members: Collection[str] | None = None) -> None:
        """Show a run from now on. `members`: those whose reports this host gets; None: all."""
        self._members = None if members is None else frozenset(members)
        self.state = state

    def on_report(self, report: Report) -> None:
        """Note that a report arrived."""
        self.heard = self._clock()

    @property
    def sees_all(self) -> bool:
        """Whether the state gets the reports of all members."""
        return self._members is None

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
        if self._members is None:
            return state.rounds
        return max((state.spent[name].last_round for name in self._members), default=0)

    # ---- what this host knows of the run; the caller holds the state's lock ----

    def members(self, state: RunState) -> list[str]:
        """Return the members that the run requires or that have joined, as far as this host gets their reports."""
        came = [name for name in state.spec.members if name in state.spec.needed or name in state.joined]
        return came if self._members is None else [name for name in came if name in self._members]

    def replicas(self, state: RunState) -> list[ReplicaState]:
        """Return the replicas of these members."""
        names = {state.spec.members[member].replica.name for member in self.members(state)}
        return [replica for replica in state.replicas.values() if replica.name in names]

    def directions(self, state: RunState) -> list[tuple[str, Direction, DirectionState]]:
        """Return the directions of links in which these members or the exchange send: the sender reports the use."""
        return [
            (link.name, way, link.directions[way])
            for link in state.links.values()
            for way in DIRECTIONS
            if self._members is None or sender(link.spec, way) in self._members
        ]
