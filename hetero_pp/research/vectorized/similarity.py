"""Similarity of the contributions to one round: the cosines of the angles between all pairs.

Source: DiLoCo (Douillard et al. 2023), A.1, Figures 10 and 11, for outer gradients. Here the cosines are of the sent
values. They equal DiLoCo's for dense contributions. A compressed contribution is decoded, with 0 for values not sent.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hetero_pp.pseudo_gradient.contribution import DecodedTensor


class Similarities:
    """Cosines of one round, gathered parameter by parameter."""

    def __init__(self) -> None:
        self._products: Tensor | None = None
        """Products [n, n] of the n vectors over the parameters added so far, in fp64."""

    def add(self, sent: Sequence[DecodedTensor], shape: Sequence[int]) -> None:
        """Add every replica's contribution of one parameter, in the same order every time."""
        vectors = []
        for one in sent:
            dense = one.values.new_zeros(tuple(shape))
            one.add_to(dense, 1.0)
            vectors.append(dense.view(-1))
        if vectors:
            rows = torch.stack(vectors).double()
            products = (rows @ rows.T).cpu()
            self._products = products if self._products is None else self._products + products

    def of_pairs(self) -> tuple[float, float] | None:
        """Return mean and standard deviation over all pairs; None without pairs. A zero vector's pairs are 0."""
        products = self._products
        if products is None or len(products) < 2:
            return None
        lengths = products.diagonal().sqrt()
        cosines = products / torch.outer(lengths, lengths).clamp_min(torch.finfo(torch.float64).tiny)
        pairs = cosines[torch.ones_like(cosines).triu(1).bool()]
        return pairs.mean().item(), pairs.std(correction=0).item()
