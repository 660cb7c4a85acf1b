"""Computes a replica's round again: what it contributes then, and to what its members commit."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hetero_pp.core.device import CPU, computing
from hetero_pp.core.errors import DamagedFile
from hetero_pp.data.sources import Source
from hetero_pp.run.spec import RunSpec
from replica_groups.audit.recompute.group import ReplicaHere, RoundStart
from replica_groups.loop.commitments import state_of
from replica_groups.member.committed_state import CommittedState

_OF_A_STATE = (LookupError, ValueError, TypeError, AttributeError, ArithmeticError)
"""Errors that an invented state leads to, when it is loaded or used. Others may be those of this machine."""


@dataclass(frozen=True)
class Recomputed:
    """A replica's round that was computed again."""

    here: ReplicaHere
    """The replica, as it is after the round."""
    after: Mapping[str, bytes]
    """Member -> digest of its checkpoint after the round."""
    text: Mapping[str, bytes]
    """Member -> digest of its text; of those that read it."""

    @property
    def blobs(self) -> Mapping[str, bytes]:
        """The contribution, by block."""
        return self.here.blobs


def recompute(
    spec: RunSpec, replica: str, start: RoundStart, steps: int, source: Source | None, device: torch.device = CPU
) -> Recomputed:
    """Train a replica's round again. The tensors of `start` are not changed.

    Raises DamagedFile for a checkpoint that is not of its member, and ConfigError for one of another text. Raises
    HeteroPPError for values that are not finite, and OutOfMemory if this device is too small.
    """
    torch.set_num_threads(spec.config.threads)
    for name, state in start.states.items():
        _require_finite(name, state)
    texts: dict[str, Any] = {}
    try:
        with computing("recomputation", device):
            here = _built(spec, replica, start, source, device)
            for name, member in here.members.items():
                if member.batches is not None:
                    member.batches.text = texts[name] = hashlib.sha256()
            here.train(steps)
    except _OF_A_STATE as error:
        raise DamagedFile(f"the checkpoint of {replica} is not of its members ({error})") from None
    after = {name: _after(here, name, steps).sha256 for name in here.members}
    return Recomputed(here, after, {name: text.digest() for name, text in texts.items()})


def _built(spec: RunSpec, replica: str, start: RoundStart, source: Source | None, device: torch.device) -> ReplicaHere:
    try:
        return ReplicaHere(spec, replica, start, source, device)
    except RuntimeError as error:
        if isinstance(error, torch.AcceleratorError) or "memory" in str(error):
            raise
        raise DamagedFile(f"the checkpoint of {replica} is not of its members ({error})") from None


def _require_finite(member: str, state: CommittedState) -> None:
    for name, tensor in state.tensors.items():
        if tensor.dtype != torch.float32 or not bool(tensor.isfinite().all()):
            raise DamagedFile(f"{member}: found {name} in its checkpoint, expected finite values in fp32")


def _after(here: ReplicaHere, member: str, steps: int) -> CommittedState:
    batches = here.members[member].batches
    position = None if batches is None else batches.state()
    known = None if here.spec.config.inner.steps is not None else {"first": here.first + steps, "last": steps}
    return state_of(here.members[member], here.outers[member], position, known)
