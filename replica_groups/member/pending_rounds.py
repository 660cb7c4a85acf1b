"""Rounds that a replica has trained and theta does not contain: rounds ahead of it, or a round that excluded it.

A round starts from theta, or from another state of the replica itself:
- with `overlap`, from theta minus a part of the contribution that is under way (`starts`);
- with `keep_local`, from the replica's parameters after a round that excluded it (`local`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

_TRAINED = "trained:"
"""Key prefix in saved states for pseudo-gradients that wait to be contributed; the round and the name follow."""
_LOCAL = "local:"
"""Key prefix in saved states for the replica's own parameters after a round; the round and the name follow."""

LOCAL_LASTS = 2
"""Number of rounds after which a replica's own parameters are dropped.

A late replica usually skips one round. After a longer absence its parameters would pull theta back.
"""


@dataclass(frozen=True, eq=False)
class LocalStart:
    """With keep_local: the replica's own parameters (this rank's rows) after a round that excluded it."""

    round: int
    rows: Mapping[str, Tensor]

    def is_start_of(self, round_: int, trained: int) -> bool:
        """Return whether a round may start here: all members kept theirs after round `trained`, lately enough."""
        return trained == self.round and round_ - trained <= LOCAL_LASTS


class PendingRounds:
    """This rank's rows of the replica's own states, by parameter."""

    def __init__(self) -> None:
        self.starts: dict[str, Tensor] = {}
        """The replica's parameters at the start of a round, where they differ from theta."""
        self.trained: dict[int, dict[str, Tensor]] = {}
        """With overlap: round -> pseudo-gradients of rounds that are trained and undecided."""
        self.local: LocalStart | None = None

    def beyond(self, round_: int) -> int:
        """Return the last round that was trained here but is not part of theta after `round_`; 0 if there is none."""
        if round_ + 1 in self.trained:
            return round_ + 1
        return 0 if self.local is None else self.local.round

    def drop_ahead_of(self, round_: int | None) -> None:
        """Drop the start of the next round and, unless `round_` is None, what was trained after that round."""
        self.starts.clear()
        if round_ is not None:
            self.trained = {number: one for number, one in self.trained.items() if number <= round_}

    def tensors(self) -> dict[str, Tensor]:
        """Return what a saved state holds of this."""
        tensors: dict[str, Tensor] = {}
        for round_, trained in self.trained.items():
            tensors |= {f"{_TRAINED}{round_}:{name}": tensor for name, tensor in trained.items()}
        if self.local is not None:
            tensors |= {f"{_LOCAL}{self.local.round}:{name}": tensor for name, tensor in self.local.rows.items()}
        return tensors

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore what `tensors` returned; other tensors are ignored."""
        local = _rounds_in(tensors, _LOCAL)
        self.local = next((LocalStart(number, rows) for number, rows in local.items()), None)
        self.trained |= _rounds_in(tensors, _TRAINED)


def _rounds_in(tensors: Mapping[str, Tensor], prefix: str) -> dict[int, dict[str, Tensor]]:
    """Return the tensors of a saved state whose keys are `prefix`, a round and a parameter, by round."""
    found: dict[int, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        if key.startswith(prefix):
            number, name = key.removeprefix(prefix).split(":")
            found.setdefault(int(number), {})[name] = tensor
    return found
