"""Text on which contributions are tried: what a replica trained on in a round, and what nobody did."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from hetero_pp.core.errors import ConfigError
from hetero_pp.data.batches import StoreBatches
from hetero_pp.data.sources import Source
from hetero_pp.run.batches import batches_of
from hetero_pp.run.spec import RunSpec

_TRIES = 16
"""Windows that are drawn for each one that is needed, because some may be assigned to a replica."""


class Texts:
    """Text of a run with a corpus that is encoded once."""

    def __init__(self, spec: RunSpec, source: Source, rows: int) -> None:
        """`rows`: number of sequences of each kind. Raises ConfigError for a corpus with fewer."""
        self._spec, self._source, self._rows = spec, source, rows
        self._members = {member.replica.name: member for member in spec.members.values()}
        batches = self._batches(next(iter(self._members)), 1)
        self._windows = len(batches.store.train) // (batches.sequence_length + 1)
        if self._windows < rows:
            key, found = ("audit", "gauntlet", "sequences"), f"found {rows}, expected at most {self._windows}"
            raise ConfigError(key, f"{found}, the sequences of the corpus")

    def of(self, replica: str, round_: int, drawing: np.random.Generator) -> tuple[Tensor, Tensor]:
        """Return drawn sequences that a replica trained on in a round, and others, int64 [rows, L + 1] each.

        The others are assigned to no replica in this round. If there are too few, because a round reads nearly the
        whole corpus, the rest are any that are not assigned to this replica, and then any.
        """
        own, batches = self._assigned(replica, round_), self._batches(replica, round_)
        all_ = np.concatenate([self._assigned(one.name, round_) for one in self._spec.replicas_in(round_)])
        candidates = drawing.permutation(min(self._windows, 1 << 20))
        if self._windows > len(candidates):
            candidates = drawing.integers(self._windows, size=_TRIES * self._rows)
        known = np.where(np.isin(candidates, own), 2, np.isin(candidates, all_))
        others = candidates[np.argsort(known, kind="stable")][: self._rows]
        return batches.rows(drawing.choice(own, self._rows, replace=len(own) < self._rows)), batches.rows(others)

    def _assigned(self, replica: str, round_: int) -> np.ndarray:
        """Return the numbers of the training windows that a replica reads in a round."""
        first, steps = self._spec.share_of(replica, round_).first_step or 0, self._spec.inner_steps
        own = range((round_ - 1) * steps - first, round_ * steps - first)
        return np.concatenate([self._batches(replica, round_).windows(step) for step in own])

    def _batches(self, replica: str, round_: int) -> StoreBatches:
        share = self._spec.share_of(replica, round_)
        batches = batches_of(self._spec, self._members[replica], self._source, share)
        assert isinstance(batches, StoreBatches), "a validator does not read streams"
        return batches
