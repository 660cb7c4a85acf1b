"""Division of the text among replicas, and batches of one share. The text is divided again when the replicas change.

A replica reads its share epoch after epoch. After a change, all replicas start epochs of the new shares, in another
order. Within such an epoch no two replicas read the same text, but text that was read before the change may be read
again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from hetero_pp.core.seeds import seed_of
from hetero_pp.data.batches import Batches, save_position

_SHARE = "share"


class Hash(Protocol):
    """A digest in progress, of hashlib."""

    def update(self, data: bytes, /) -> None: ...

    def digest(self) -> bytes: ...


@dataclass(frozen=True)
class Share:
    """One of `replicas` parts of the text."""

    replica: int
    replicas: int
    rotation: tuple[int, ...] = ()
    """Optional replicas that rotate their shares (`StoreBatches.rotation`)."""
    round: int = 1
    """First round in which this division of the text applies."""
    first_step: int | None = 0
    """First step of the replica that reads this share; None: its current step when it learns of the share."""

    def seed(self, seed: int) -> int:
        """Return the seed for the order in which the share is read."""
        return seed if self.round == 1 else seed_of(seed, "shared out", self.round)


class SharedBatches:
    """Batches of the share that a replica currently has. Implements Batches."""

    def __init__(self, share: Share, batches_of: Callable[[Share], Batches]) -> None:
        """Start with a share. `batches_of` returns the batches of a share, from step 0 on."""
        self._batches_of = batches_of
        self.text: Hash | None = None
        """Digest to which the tokens of each training batch are added, if it is set."""
        self._began: list[Any] = []
        """Positions at which the last round began, and the round before it if that one was still undecided then."""
        self._is_ahead = False
        """Whether the last round was trained before the round before it was decided."""
        self._take(share, share.first_step or 0)

    def take(self, share: Share, step: int) -> None:
        """Read a share from step `step` on. Nothing changes if this share is already being read."""
        if share.first_step is not None:
            first = share.first_step
        else:  # the step of the earlier call, if the replica already learned of this share
            first = self._first if replace(share, first_step=self._first) == self._share else step
        if replace(share, first_step=first) != self._share:
            self._take(share, first)

    def _take(self, share: Share, first: int) -> None:
        self._share, self._batches = replace(share, first_step=first), self._batches_of(share)
        self._first = first

    def train(self, step: int) -> Tensor:
        tokens = self._batches.train(step - self._first)
        if self.text is not None:
            self.text.update(tokens.numpy().astype("<i8", copy=False).tobytes())
        return tokens

    def read_ahead(self, steps: range) -> None:
        self._batches.read_ahead(range(steps.start - self._first, steps.stop - self._first))

    def remember(self, ahead: bool = False) -> None:
        """Mark the start of a round; with `ahead`, the round before may still have to be read again."""
        self._began, self._is_ahead = [*(self._began[-1:] if ahead else ()), self.state()], ahead

    def undo(self) -> None:
        """Return to the start of the earliest round that may have to be read again."""
        self.load(self._began[0])

    def save(self, folder: Path) -> None:
        """Write the position to resume from.

        After a round that was trained ahead, this is the start of that round, which may have to be read again.
        """
        save_position(self._began[-1] if self._is_ahead else self.state(), folder)

    def state(self) -> Any:
        own = self._batches.state()
        return own if self._share.round == 1 else {_SHARE: asdict(self._share), "batches": own}

    def load(self, state: Mapping[str, Any]) -> None:
        if _SHARE in state:
            saved = state[_SHARE]
            share = Share(**{**saved, "rotation": tuple(saved["rotation"])})
            if share != self._share:
                self._take(share, saved["first_step"])
            state = state["batches"]
        self._batches.load(state)
