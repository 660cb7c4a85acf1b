"""Follower of a run's log: theta after each round, from the theta before, the round's record and its contributions."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from hetero_pp.config.checkpoint import RunCheckpoint
from hetero_pp.core.tensor_files import Scratch
from hetero_pp.messages.messages_pb2 import RoundRecord
from hetero_pp.model.transformer import shapes_by_block, shapes_of
from hetero_pp.outer.apply_round import FetchBlob, apply_round
from hetero_pp.outer.step import RoundOptimizer, parameter_sha256


class Follower:
    """theta of one run, round after round. It is on disk between rounds (Scratch), because it is a whole model."""

    def __init__(
        self, run: str, checkpoint: RunCheckpoint, optimizer: RoundOptimizer, folder: Path | None = None
    ) -> None:
        """Begin after a run checkpoint's round. `folder` holds theta; None: the folder of Python's `tempfile`."""
        self.round = checkpoint.round
        """The last round that was applied."""
        self._run, self._basis, self._optimizer = run, checkpoint.basis, optimizer
        if checkpoint.round > 0:
            optimizer.load(checkpoint.momentum, checkpoint.round)
        self._theta = Scratch(folder)
        for name, tensor in checkpoint.parameters.items():
            self._theta.keep(name, tensor)
        blocks = shapes_by_block(shapes_of(checkpoint.parameters)).values()
        is_whole = optimizer.settings.source == "gradient" and blocks  # because it clips by the norm of all
        self._parts = [list(checkpoint.parameters)] if is_whole else [list(shapes) for shapes in blocks]
        """Names of the parameters that are in memory at the same time."""

    @torch.no_grad()
    def apply(self, record: RoundRecord, fetch: FetchBlob) -> dict[str, bytes]:
        """Apply the next round; return the hashes of the parameters after it."""
        hashes: dict[str, bytes] = {}
        for names in self._parts:
            hashes |= self._apply_to(names, record, fetch)
        self.round = record.round
        return hashes

    def _apply_to(self, names: list[str], record: RoundRecord, fetch: FetchBlob) -> dict[str, bytes]:
        """Apply a round to some parameters; return their hashes."""
        theta = {name: self._theta.read(name) for name in names}
        apply_round(theta, self._run, record, fetch, self._optimizer)
        for name, tensor in theta.items():
            self._theta.keep(name, tensor)
        return {name: parameter_sha256(tensor) for name, tensor in theta.items()}

    def theta(self) -> dict[str, Tensor]:
        """Return a copy of all parameters, in memory."""
        return {name: self._theta.read(name) for names in self._parts for name in names}

    def checkpoint(self) -> RunCheckpoint:
        """Return the run checkpoint after the last applied round."""
        return RunCheckpoint(self.round, self.theta(), self._basis, self._optimizer.state)
