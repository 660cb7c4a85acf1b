"""Fragments of a model, which are synchronised one after the other: round r synchronises fragment (r - 1) mod F.

Source: Streaming DiLoCo (Douillard et al. 2025, arXiv 2501.18512), whose fragments are groups of layers, too. Each
fragment meets every F rounds, and `inner.steps` lie between two rounds. So a replica trains its own parameters x
through F rounds, and every value of theta is the one after the last round of its fragment:

    Delta_p = theta_p - x_p         x: parameters of the replica, theta: those of all, p: fragment of the round
    theta_p <- outer step of the mean of what is sent of Delta_p, and error feedback
    x_p <- mixing x_p + (1 - mixing) theta_p

With `overlap` the replica trains another round between the first line and the others. Difference: once it has
contributed, the paper's x_p stays. Here it becomes theta_p minus the presumed share of what is sent (`outer.presumed`),
because error feedback keeps the rest. If every value is sent, x_p is the paper's to the bit.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from hetero_pp.model.transformer import EMBEDDING, LAYERS, block_of

Pattern = Literal["strided", "sequential"]


@dataclass(frozen=True)
class Fragments:
    """The fragments of a model.

    They are layers. The token embedding is in the first fragment, and the last norm and the head are in the last one.
    `strided`: layer i is in fragment i mod F. `sequential`: fragments are consecutive layers.
    """

    count: int = 1  # F
    pattern: Pattern = "strided"
    layers: int = 1  # of the model

    def of(self, block: str) -> int:
        """Return the fragment of a block, from 0."""
        if not block.startswith(LAYERS):
            return 0 if block == block_of(EMBEDDING) else self.count - 1
        layer = int(block.removeprefix(LAYERS))
        return layer % self.count if self.pattern == "strided" else layer * self.count // self.layers

    def of_round(self, round_: int) -> int:
        """Return the fragment that a round synchronises."""
        return (round_ - 1) % self.count

    def describe(self, round_: int) -> str:
        """Return `fragment 2 of 4`, which a round synchronises; empty if the model has a single one."""
        return "" if self.count == 1 else f"fragment {self.of_round(round_) + 1} of {self.count}"

    def among(self, blocks: Collection[str], round_: int) -> frozenset[str]:
        """Return the blocks, among these, that a round synchronises."""
        return frozenset(block for block in blocks if self.of(block) == self.of_round(round_))


WHOLE = Fragments()
"""The model as a single fragment: every round synchronises all blocks."""
