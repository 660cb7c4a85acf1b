"""Present action and times of a stage: for reports, and for threads that watch over it."""

from __future__ import annotations

from dataclasses import dataclass

from hetero_pp.messages.messages_pb2 import Doing
from hetero_pp.pipeline.schedule import Action

_OF_BACKWARD = (Action.RECEIVE_GRADIENT, Action.BACKWARD, Action.SEND_GRADIENT)


@dataclass
class Timing:
    """Seconds since the last reset."""

    compute: float = 0.0
    waited_previous: float = 0.0
    """For messages of the previous stage."""
    waited_next: float = 0.0
    """For messages of the next stage."""


@dataclass
class ActivityMeter:
    """Progress of a training worker, for other threads."""

    done: int = 0
    """Number of finished events of the schedule."""
    waits: bool = False
    """Whether the worker waits for a neighbour."""
    action: Action = Action.FORWARD
    """Action of the present or last event."""

    @property
    def doing(self) -> Doing:
        """The action of this moment, as it is reported."""
        if self.waits:
            is_gradient = self.action is Action.RECEIVE_GRADIENT
            return Doing.WAITING_FOR_NEXT if is_gradient else Doing.WAITING_FOR_PREVIOUS
        return Doing.BACKWARD if self.action in _OF_BACKWARD else Doing.FORWARD
