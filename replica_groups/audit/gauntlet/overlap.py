"""Copies among the contributions to a round, by the positions of the values that they keep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from hetero_pp.pseudo_gradient.contribution import DecodedTensor

Contribution = Mapping[str, DecodedTensor]
"""Tensors by the parameters' names."""


def overlap(one: Contribution, other: Contribution) -> float:
    """Return the share of positions that two contributions to one model have in common, weighted by tensors' sizes."""
    common = kept = 0
    for name, tensor in one.items():
        common += int(torch.isin(tensor.indices, other[name].indices).sum())
        kept += min(len(tensor.indices), len(other[name].indices))
    return common / kept if kept else 0.0


def copies(contributions: Mapping[str, Contribution], arrived: Sequence[str], limit: float) -> dict[str, str]:
    """Return the original of each copy: of two contributions that overlap by more than `limit`, the later is a copy.

    `arrived`: all replicas, in the order in which their contributions arrived.
    """
    found: dict[str, str] = {}
    for later, name in enumerate(arrived):
        for original in arrived[:later]:
            if overlap(contributions[name], contributions[original]) > limit:
                found[name] = original
                break
    return found
