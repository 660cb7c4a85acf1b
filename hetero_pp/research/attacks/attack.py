"""An attack: what a hostile replica does otherwise than an honest one, and what it knows then.

Contributions are flat vectors here, of all P parameters in the order of theta, 0 where nothing is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hetero_pp.messages.messages_pb2 import Losses


@dataclass(frozen=True)
class Known:
    """Knowledge of a hostile replica in a round, before it contributes. Omniscient attacks use all of it."""

    round: int
    place: int
    """Its place among the hostile replicas, from 0."""
    theta: Tensor
    """Parameters [P] at the start of the round."""
    fellows: Sequence[Tensor]
    """Contributions [P] that the programs of the hostile replicas would send, its own at `place`."""
    honest: Tensor
    """Contributions [n, P] of the n honest replicas that take part; n may be 0, unless the attack `needs_honest`."""
    first: Tensor
    """Its contribution to the first round [P]; in that round, the one that its program would send."""
    parts: Sequence[slice]
    """Where each parameter is in the vectors."""
    kept: Callable[[Tensor], Tensor]
    """Returns what the format of contributions keeps of a vector [P]: the largest values of each chunk, quantised."""
    draw: torch.Generator
    """Random numbers of this replica and round."""

    @property
    def own(self) -> Tensor:
        """Contribution that its program would send [P]."""
        return self.fellows[self.place]


def as_trained(known: Known) -> Tensor:
    """Contribute what the program sends."""
    return known.own


@dataclass(frozen=True)
class Attack:
    """An attack as the parts of a replica that it changes."""

    contribution: Callable[[Known], Tensor] = as_trained
    """Returns the vector [P] to contribute; the trainer sends what the format keeps of it."""
    needs_honest: bool = False
    """Whether it derives the contribution from honest ones. If there are none in a round, the program's is sent."""
    text: Callable[[Tensor, int, torch.Generator], Tensor] | None = None
    """Changes the tokens [B, L + 1] of a step; it is given the size of the vocabulary, and random numbers."""
    activations: Callable[[Tensor], Tensor] | None = None
    """Changes the hidden states [B, L, D] that the middle stage sends; its gradients change with them."""
    losses: Callable[[bool, Losses], Losses] | None = None
    """Changes the losses that a lying validator reports; the flag says whether the contribution is a hostile one."""

    @property
    def trains_otherwise(self) -> bool:
        """Whether inner steps are not those that the replica's seed and settings determine."""
        return self.text is not None or self.activations is not None
