"""Error feedback of the parameters that a member trains, and the contribution that it no longer contains.

A contribution is decided, or undecided: being deposited, or sent. It leaves error feedback when it is selected. While
it is undecided, a copy of error feedback from before it can be restored, so that the round can be trained again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hetero_pp.core.tensor_files import Scratch
from hetero_pp.messages.messages_pb2 import ContributionEntry
from hetero_pp.outer.methods import OuterSettings
from hetero_pp.pseudo_gradient.contribution import DecodedTensor
from hetero_pp.pseudo_gradient.error_feedback import give_back


@dataclass(eq=False)
class Undecided:
    """A contribution of which this member does not know yet whether its round includes it."""

    round: int
    generation: int | None
    blobs: dict[str, bytes] = field(default_factory=dict)  # by block; on the first rank only
    is_sent: bool = False  # Whether all blocks are deposited. Until then the contribution cannot be included.

    @property
    def digests(self) -> dict[str, str]:
        """The sha256 of each blob, as hexadecimal digits, by block."""
        return {block: hashlib.sha256(data).hexdigest() for block, data in self.blobs.items()}


def is_named(counted: ContributionEntry | None, generation: int | None, digests: Mapping[str, str]) -> bool:
    """Return whether an entry of a record is of this generation (None: of any) and has these blobs, by block.

    Two coordinators at once may have formed two groups of the same generation, so comparing generations is not enough.
    """
    if counted is None or generation not in (None, counted.generation):
        return False
    named = {blob.block: blob.sha256.hex() for blob in counted.blobs}
    return all(named.get(block) == digest for block, digest in digests.items())


class ErrorFeedback:
    """This rank's rows of error feedback, by parameter."""

    def __init__(self, tensors: dict[str, Tensor], settings: OuterSettings, copies: Scratch | None) -> None:
        """`copies` holds the copy from before an undecided contribution; None keeps no copy."""
        self.tensors = tensors
        self.undecided: Undecided | None = None
        self._settings, self._copies = settings, copies
        self._being_copied: dict[str, Future[None]] = {}
        self._names: Collection[str] = ()  # parameters of the undecided contribution

    @property
    def sent(self) -> Undecided | None:
        """The undecided contribution, if it may be included."""
        return self.undecided if self.undecided is not None and self.undecided.is_sent else None

    def begin(self, round_: int, generation: int | None, names: Collection[str]) -> Undecided:
        """Begin a contribution of these parameters, from the state before the last one if that is still undecided."""
        self.take_back()
        self._names = names
        if self._copies is not None:
            copier = ThreadPoolExecutor(1, "error feedback")  # a thread, because it may wait for the disk
            self._being_copied = {name: copier.submit(self._copies.keep, name, self.tensors[name]) for name in names}
            copier.shutdown(wait=False)
        self.undecided = Undecided(round_, generation)
        return self.undecided

    def to_change(self, name: str) -> Tensor:
        """Return a tensor that the contribution may change, once its copy exists."""
        if name in self._being_copied:
            self._being_copied.pop(name).result()
        return self.tensors[name]

    def take_back(self) -> None:
        """Restore the state from before the undecided contribution, where a copy was kept."""
        if self.undecided is not None and self._copies is not None:
            for name in self._names:
                self.to_change(name).copy_(self._copies.read(name))
            self.undecided = None

    @torch.no_grad()
    def give_back(self, name: str, excluded: DecodedTensor) -> None:
        """Restore the share `returned` of an excluded contribution."""
        error = self.tensors[name]
        indices, values = (one.to(error.device) for one in (excluded.indices, excluded.values))
        give_back(error, indices, values, self._settings.given_back)

    @torch.no_grad()
    def forget(self, name: str, included: DecodedTensor, decays: bool = False) -> None:
        """Set included values to zero; a momentum keeps them. With `decays`, first decay all values by one round."""
        error = self.tensors[name].view(-1)
        if decays:
            error.mul_(self._settings.compression.error_feedback_decay)
        if self._settings.compression.memory == "error_feedback":
            error.index_fill_(0, included.indices.to(error.device), 0.0)
