"""Batches of a replica: from a token store, with random access to any step, and of the share that it currently has.

Batches of a token store are pure functions of (seed, replica, step).

Shapes: B sequences, L positions; a row holds L + 1 tokens: the inputs and, shifted by one, the targets.

The training part of a store is cut into windows of L + 1 tokens. Window w belongs to replica w mod M, so the replicas'
shards are disjoint in every epoch. Optional replicas rotate their shards (`StoreBatches.rotation`).

Each epoch permutes a shard with its own key. The permutation is evaluated at the requested positions only, without a
table.

The text is divided again when the replicas change. All replicas then start epochs of the new shares, in another order.
Within such an epoch no two replicas read the same text, but text that was read before the change may be read again.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from hetero_pp.core.errors import ConfigError
from hetero_pp.core.seeds import seed_of
from hetero_pp.data.tokens import TokenStore

_ROUNDS = 4
_KEY = ("data", "corpus")
_SHARE = "share"


class Batches(Protocol):
    """Training data of one replica.

    Every rank of the replica reads whole batches, so the number of ranks has no influence.
    """

    def train(self, step: int) -> torch.Tensor:
        """Return the batch of step `step` (from 0), int64 [B, L + 1]."""

    def read_ahead(self, steps: range) -> None:
        """Read the batches of the next steps before the replica trains on any of them.

        Raises ConfigError if the text ends within these steps; the next batch is unchanged in that case.
        """

    def state(self) -> Any:
        """Return the position after the last batch that was read, as plain numbers, lists and strings."""

    def load(self, state: Any) -> None:
        """Restore the position that `state` returned; the following batches are the same as then."""


_POSITION = "data.json"


def save_position(state: Any, folder: Path) -> None:
    """Write the return value of `Batches.state` to a folder."""
    (folder / _POSITION).write_text(json.dumps(state), encoding="utf-8")


def load_position(batches: Batches, folder: Path) -> None:
    """Restore the batches to the position that `save_position` wrote."""
    batches.load(json.loads((folder / _POSITION).read_text(encoding="utf-8")))


@dataclass(frozen=True, kw_only=True)
class StoreBatches:
    """Batches of `batch_size` sequences from a token store, for replica number `replica` of `replicas`."""

    store: TokenStore
    sequence_length: int
    seed: int
    replica: int
    replicas: int
    batch_size: int
    rotation: tuple[int, ...] = ()
    """Numbers of the optional replicas, including this one.

    In each epoch, each of them reads the shard of the next one.
    """

    def __post_init__(self) -> None:
        assert 0 <= self.replica < self.replicas
        needed = self.replicas * self.batch_size * (self.sequence_length + 1)
        if len(self.store.train) < needed:
            raise ConfigError(
                _KEY,
                f"found {len(self.store.train)} tokens to train on, expected at least {needed}: "
                f"{self.replicas} replicas x {self.batch_size} sequences x {self.sequence_length + 1} tokens",
            )

    @property
    def shard_size(self) -> int:
        """Number of windows per epoch of this replica. Rotated shards all have the same size."""
        windows = len(self.store.train) // (self.sequence_length + 1)
        return windows // self.replicas if self.rotation else len(range(self.replica, windows, self.replicas))

    def shard(self, epoch: int) -> int:
        """Return the shard that this replica reads in an epoch: windows with this number modulo `replicas`."""
        if not self.rotation:
            return self.replica
        return self.rotation[(self.rotation.index(self.replica) + epoch) % len(self.rotation)]

    def windows(self, step: int) -> np.ndarray:
        """Return the numbers of the training windows that step `step` (from 0) reads, [B]."""
        samples = np.arange(step * self.batch_size, (step + 1) * self.batch_size)
        epochs, positions = np.divmod(samples, self.shard_size)
        for epoch in np.unique(epochs):
            shard = self.shard(int(epoch))
            key = seed_of(self.seed, "data", shard, epoch)
            shuffled = permute(positions[epochs == epoch], self.shard_size, key)
            positions[epochs == epoch] = self._windows_at(shuffled, shard)
        return positions

    def _windows_at(self, positions: np.ndarray, shard: int) -> np.ndarray:
        """Return the windows at the given positions of a shard. Batches of clusters have other shards."""
        return positions * self.replicas + shard

    def train(self, step: int) -> torch.Tensor:
        return self.rows(self.windows(step))

    def rows(self, windows: np.ndarray) -> torch.Tensor:
        """Return the tokens of training windows, int64 [len(windows), L + 1]."""
        return _rows(self.store.train, windows * (self.sequence_length + 1), self.sequence_length)

    def read_ahead(self, steps: range) -> None:
        """Do nothing: every batch of a token store is available at any time."""

    def state(self) -> dict[str, str]:
        """Return the digest of the tokens. The position follows from the step alone."""
        return {"tokens": self.store.digest}

    def load(self, state: Mapping[str, str]) -> None:
        """Check the digest. Raises ConfigError if the state belongs to batches of other tokens."""
        if state["tokens"] != self.store.digest:
            raise ConfigError(
                _KEY,
                f"found tokens whose sha256 begins with {self.store.digest[:12]}, expected "
                f"{state['tokens'][:12]}, the tokens that the run has trained on so far",
            )

    def require_one_epoch(self, steps: int) -> None:
        """Raise ConfigError if `steps` steps read any token twice (for `data.repeat: false`)."""
        if steps * self.batch_size > self.shard_size:
            raise ConfigError(
                ("data", "repeat"),
                f"found false and {steps} steps of {self.batch_size} sequences, expected at most "
                f"{self.shard_size // self.batch_size} steps: replica {self.replica} has a shard of "
                f"{self.shard_size} sequences",
            )


class RoundText:
    """Digests of the sequences that a replica trains on in a round, and the sequences themselves if a file keeps them.

    Each has its own digest, so that a few sequences can be shown and checked without the others.
    """

    def __init__(self, path: Path | None = None) -> None:
        """`path` gets the tokens as int32, one sequence after the other. It replaces an earlier file."""
        self.digests, self._path = bytearray(), path  # 32 bytes a sequence
        if path is not None:
            path.unlink(missing_ok=True)

    def add(self, tokens: torch.Tensor) -> None:
        """Add the sequences of a batch, [B, L + 1]. A file that the disk does not take is removed."""
        rows = tokens.numpy().astype("<i4")
        self.digests += sequence_digests(rows)
        if self._path is None:
            return
        try:
            with self._path.open("ab") as file:
                file.write(rows.tobytes())
        except OSError:
            self._path.unlink(missing_ok=True)
            self._path = None

    def digest(self) -> bytes:
        """Return the digest of all sequences."""
        return hashlib.sha256(self.digests).digest()


def sequence_digests(rows: np.ndarray) -> bytes:
    """Return sha256 of each row of tokens, [S, L + 1] as little-endian int32, one after the other."""
    return b"".join(hashlib.sha256(row.tobytes()).digest() for row in rows)


@dataclass(frozen=True)
class Share:
    """One of `replicas` parts of the text."""

    replica: int
    replicas: int
    rotation: tuple[int, ...] = ()  # optional replicas that rotate their shares (`StoreBatches.rotation`)
    round: int = 1  # first round in which this division of the text applies
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
        self.text: RoundText | None = None  # the tokens of each training batch are added, if it is set
        self._began: list[Any] = []
        """Positions at which the last round began, and the round before it if that one was still undecided then."""
        self._is_ahead = False  # whether the last round was trained before the round before it was decided
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

    def train(self, step: int) -> torch.Tensor:
        tokens = self._batches.train(step - self._first)
        if self.text is not None:
            self.text.add(tokens)
        return tokens

    @property
    def first(self) -> int:
        """The replica's step at which it began to read its present share."""
        return self._first

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


def validation_batches(store: TokenStore, sequence_length: int, sequences: int, batch_size: int) -> list[torch.Tensor]:
    """Return `sequences` validation rows, int64 [<= batch_size, L + 1], the same on every member.

    The rows are spread evenly over the validation part and do not overlap. The last batch may be smaller, so a mean
    over batches has to be weighted by their rows.
    """
    size, needed = len(store.validation), sequences * (sequence_length + 1)
    if size < needed:
        raise ConfigError(
            _KEY,
            f"found {size} tokens to validate on, expected at least {needed}: {sequences} sequences x "
            f"{sequence_length + 1} tokens; use a larger corpus or validation_share, or fewer validation_sequences",
        )
    starts = np.arange(sequences) * size // sequences
    return list(_rows(store.validation, starts, sequence_length).split(batch_size))


def permute(index: np.ndarray, size: int, key: int) -> np.ndarray:
    """Return a keyed permutation of range(size), evaluated at the given indices.

    Uses a Feistel network on pairs (row, column) of a near-square grid with hardly more than `size` cells. A result
    outside the range is permuted again until it falls inside (Black and Rogaway 2002, "generalized Feistel").
    """
    columns = math.isqrt(size - 1) + 1 if size > 1 else 1
    rows = -(-size // columns)
    keys = [seed_of(key, number) for number in range(2 * _ROUNDS)]
    out = _shuffle(index.astype(np.uint64), rows, columns, keys)
    while (outside := out >= size).any():
        out[outside] = _shuffle(out[outside], rows, columns, keys)
    return out.astype(np.int64)


def _shuffle(cells: np.ndarray, rows: int, columns: int, keys: list[int]) -> np.ndarray:
    """Apply a bijection of range(rows * columns): shift each half in turn by a hash of the other half."""
    row, column = np.divmod(cells, np.uint64(columns))
    for row_key, column_key in zip(keys[::2], keys[1::2], strict=True):
        row = (row + _hash(column, row_key) % np.uint64(rows)) % np.uint64(rows)
        column = (column + _hash(row, column_key) % np.uint64(columns)) % np.uint64(columns)
    return row * np.uint64(columns) + column


def _hash(values: np.ndarray, key: int) -> np.ndarray:
    """Apply the finalizer of SplitMix64, modulo 2^64."""
    values = values + np.uint64(key)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _rows(tokens: np.ndarray, starts: np.ndarray, sequence_length: int) -> torch.Tensor:
    """Return the L + 1 tokens from each start, int64 [B, L + 1]."""
    return torch.from_numpy(tokens[starts[:, None] + np.arange(sequence_length + 1)].astype(np.int64))
