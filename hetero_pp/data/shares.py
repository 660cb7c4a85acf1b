"""Which part of the text is a replica's, and batches of it: it is shared out anew when a run goes on with others.

Until then a replica reads its share epoch after epoch. From then on all of them begin with epochs of the new shares,
in another order: no two read the same in one, as before, but what somebody has read already may be read again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from hetero_pp.data.batches import Batches, save_position
from hetero_pp.seeds import seed_of

_SHARE = "share"


@dataclass(frozen=True)
class Share:
    """One of as many parts of the text as there are replicas."""

    replica: int
    replicas: int
    rotation: tuple[int, ...] = ()
    """Of replicas that come and go: see StoreBatches."""
    round: int = 1
    """From which on the text is shared out so."""
    first_step: int | None = 0
    """Of the replica's steps, the first that reads it; None: the one that it is at when it hears of it."""

    def seed(self, seed: int) -> int:
        """For the order in which it is read."""
        return seed if self.round == 1 else seed_of(seed, "shared out", self.round)


class SharedBatches:
    """Batches of the share that a replica has. Implements Batches."""

    def __init__(self, share: Share, batches_of: Callable[[Share], Batches]) -> None:
        """`batches_of`: what the replica trains on while it has a share, from step 0 on."""
        self._batches_of = batches_of
        self._began: list[Any] = []
        """Where the last round began, and the one before if that was not decided then."""
        self._is_ahead = False
        """Whether the last round was trained ahead of that."""
        self._take(share, share.first_step or 0)

    def take(self, share: Share, step: int) -> None:
        """From step `step` on, read a share; nothing changes if it is the one that is read already."""
        if share.first_step is not None:
            first = share.first_step
        else:  # the one that it was at, if it has heard of it already
            first = self._first if replace(share, first_step=self._first) == self._share else step
        if replace(share, first_step=first) != self._share:
            self._take(share, first)

    def _take(self, share: Share, first: int) -> None:
        self._share, self._batches = replace(share, first_step=first), self._batches_of(share)
        self._first = first

    def train(self, step: int) -> Tensor:
        """See Batches."""
        return self._batches.train(step - self._first)

    def read_ahead(self, steps: range) -> None:
        """See Batches."""
        self._batches.read_ahead(range(steps.start - self._first, steps.stop - self._first))

    def remember(self, ahead: bool = False) -> None:
        """A round begins here; `ahead`: while the one before may have to be read again."""
        self._began, self._is_ahead = [*(self._began[-1:] if ahead else ()), self.state()], ahead

    def undo(self) -> None:
        """Go back to where the first round began that may have to be read again."""
        self.load(self._began[0])

    def save(self, folder: Path) -> None:
        """Write where to go on from: before a round that was trained ahead, which may have to be read again."""
        save_position(self._began[-1] if self._is_ahead else self.state(), folder)

    def state(self) -> Any:
        """See Batches."""
        own = self._batches.state()
        return own if self._share.round == 1 else {_SHARE: asdict(self._share), "batches": own}

    def load(self, state: Mapping[str, Any]) -> None:
        """See Batches."""
        if _SHARE in state:
            saved = state[_SHARE]
            share = Share(**{**saved, "rotation": tuple(saved["rotation"])})
            if share != self._share:
                self._take(share, saved["first_step"])
            state = state["batches"]
        self._batches.load(state)
