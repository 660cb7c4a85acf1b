"""From a parameter difference to what is sent, keeping what was not: SparseLoCo equation 2.

    e <- beta e + Delta;  D = Q(TopK(e));  e <- e - D

The value that is subtracted is the quantised one, so the receiver's loss of precision is made good later too.
"""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from hetero_pp.errors import ConfigError
from hetero_pp.pseudo_gradient import two_level
from hetero_pp.pseudo_gradient.chunks import Group, as_matrix, groups_of
from hetero_pp.pseudo_gradient.compression import CompressionSettings
from hetero_pp.pseudo_gradient.quantise import Quantised, SumOver, quantise_as
from hetero_pp.pseudo_gradient.random_k import random_positions


@dataclass(frozen=True)
class Selection:
    """What is sent of one tensor: positions [n, k] per group, ascending within chunks, and the values there."""

    positions: tuple[Tensor, ...]
    indices: Tensor
    """Of all kept values, into the flattened tensor, in the order of the positions."""
    quantised: Quantised

    @property
    def values(self) -> Tensor:
        """As the receiver will see them [n], fp32, in the order of the positions."""
        return self.quantised.values

    @property
    def kept_values(self) -> int:
        return self.values.numel()


def select(
    error: Tensor,
    delta: Tensor,
    settings: CompressionSettings,
    sum_over: SumOver | None = None,
    generator: torch.Generator | None = None,
) -> Selection:
    """Take from `error`, in place, what is sent this round. Both have the parameter's shape, fp32.

    Or the shape of a part of it, whole rows of chunks, or none (pseudo_gradient.rows); then `sum_over` sums over parts.
    `generator`, on the CPU, is what random-k draws from.
    """
    flat = error.view(-1)
    positions, indices, kept = [], [torch.empty(0, dtype=torch.int64, device=error.device)], [flat[:0]]
    for group in groups_of(tuple(error.shape), settings.tile) if error.numel() else ():
        chosen = []
        for band in group.bands():
            chosen.append(_advance(error, delta, band, settings, generator))
            indices.append(band.flat_indices(chosen[-1]).view(-1))
            kept.append(flat.index_select(0, indices[-1]))  # while the band is in the cache
        positions.append(torch.cat(chosen))
    where, values = torch.cat(indices), torch.cat(kept)
    quantised = quantise_as(settings, values, [(len(one), one.shape[1]) for one in positions], sum_over)
    flat.index_copy_(0, where, values - quantised.values)
    return Selection(tuple(positions), where, quantised)


def _advance(
    error: Tensor, delta: Tensor, band: Group, settings: CompressionSettings, generator: torch.Generator | None
) -> Tensor:
    """error <- beta error + delta in a band, while it is in the cache; which of each chunk [count, k] are sent."""
    kept = band.kept(settings.density)
    if settings.accelerator == "numba" and settings.selection == "top_k" and error.device.type == "cpu":
        return _accelerated().advance(error, delta, band, kept, settings.error_feedback_decay)
    band.part(as_matrix(error)).mul_(settings.error_feedback_decay).add_(band.part(as_matrix(delta)))
    if settings.selection == "random_k":
        return random_positions(band.count, band.size, kept, generator).to(error.device)
    return two_level.find(as_matrix(error), band, kept)


def _accelerated() -> ModuleType:
    """The module that needs numba. Raises ConfigError if that is not installed."""
    if importlib.util.find_spec("numba") is None:
        raise ConfigError(("outer", "compression", "accelerator"), "needs `pip install hetero-pp[numba]`")
    return importlib.import_module("hetero_pp.pseudo_gradient.accelerated")
