"""How many bytes the relay carries for a stage link: a few times what the run predicts for a round."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

CARRIED_FACTOR = 3
"""Ratio of the bytes that a link may carry in a round to the predicted ones. Some are sent again after a cut, and with
`outer.overlap` the first two rounds are trained at once.
"""

FREE_BYTES = 128 << 10
"""Bytes that each direction of a link may carry beside these in a round: handshakes, signatures, acknowledgements."""

MESSAGE_BYTES = 512
"""Bytes of a message beside its tensors: its header, and what gRPC and TLS add."""

LINE_FACTOR = 1.25
"""Ratio of the rate at which the relay carries a link to the rate of its configured line."""

LINE_AHEAD_SECONDS = 1.0
"""Seconds of a line's bytes that the relay carries without delay, because they may have waited elsewhere."""

REFILL_SECONDS = 600.0
"""Seconds after which a link that has used up a round's bytes may carry as many again, little by little. So a round
with many cuts ends at last.
"""


@dataclass(frozen=True)
class LinkLimit:
    """Limit of what one direction of a link may carry."""

    step_bytes: float
    """Predicted bytes of an inner step."""
    evaluation_bytes: float = 0.0
    bits_a_second: float | None = None
    """Rate of the configured line; None: unlimited."""

    def round_bytes(self, steps: float) -> float:
        """Return the bytes that it may carry in a round."""
        return FREE_BYTES + CARRIED_FACTOR * (steps * self.step_bytes + self.evaluation_bytes)


class TrainedRound(NamedTuple):
    """The round that a group trains. In each round and generation its links may carry a round's bytes."""

    round: int
    generation: int
    steps: float
    """Largest number of its inner steps."""


class Budget:
    """Bytes that one direction of a link may carry still. Not thread-safe."""

    def __init__(self, limit: LinkLimit, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit, self._clock = limit, clock
        self._training: TrainedRound | None = None
        self._left = self._at = self._line_free_at = 0.0
        """Bytes that may follow; time at which they were used up; time at which the line has carried everything."""
        self._is_told = False

    def carry(self, count: int, trains: Callable[[], TrainedRound | None]) -> bool:
        """Take bytes from the budget. Return whether more may follow at once; if not, ask again with 0 bytes."""
        now, rate = self._clock(), self._limit.bits_a_second
        self._left -= count
        if rate is not None:
            self._line_free_at = max(now, self._line_free_at) + 8 * count / (LINE_FACTOR * rate)
        if self._left <= 0 and (training := trains()) is not None:
            whole = self._limit.round_bytes(training.steps)
            if training != self._training:
                self._training, self._left, self._at, self._is_told = training, whole, math.inf, False
            else:
                self._left = min(whole, self._left + max(0.0, now - self._at) * whole / REFILL_SECONDS)
                self._at = now
        return self._left > 0 and self._line_free_at <= now + LINE_AHEAD_SECONDS

    def is_newly_used_up(self) -> bool:
        """Return whether the bytes of a round are used up, once for each round."""
        was_told, self._is_told = self._is_told, self._is_told or self._left <= 0
        return self._is_told and not was_told
