"""How alike are what replicas contribute to one round: the cosines of the angles between any two of them.

Source: DiLoCo (Douillard et al. 2023), A.1, Figures 10 and 11, of outer gradients. Here they are of what is sent: with
dense contributions that is the same; a compressed one is what is decoded of it, 0 where nothing was sent.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hetero_pp.pseudo_gradient.contribution import DecodedTensor


class Similarities:
    """Of one round, parameter by parameter."""

    def __init__(self) -> None:
        self._products: Tensor | None = None
        """[n, n] of the n vectors as far as they have come, in fp64."""

    def add(self, sent: Sequence[DecodedTensor], shape: Sequence[int]) -> None:
        """What each has sent of one parameter, in the same order every time."""
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
        """Mean and standard deviation over all pairs, of which that of a vector of nothing has 0; None without any."""
        products = self._products
        if products is None or len(products) < 2:
            return None
        lengths = products.diagonal().sqrt()
        cosines = products / torch.outer(lengths, lengths).clamp_min(torch.finfo(torch.float64).tiny)
        pairs = cosines[torch.ones_like(cosines).triu(1).bool()]
        return pairs.mean().item(), pairs.std(correction=0).item()
