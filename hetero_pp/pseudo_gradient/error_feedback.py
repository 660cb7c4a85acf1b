"""From a parameter difference to what is sent, keeping what was not: SparseLoCo equation 2.

    e <- beta e + Delta;  D = Q(TopK(e));  e <- e - D

The value that is subtracted is the quantised one, so the receiver's loss of precision is made good later too.
A contribution that no round counted goes back, whole or a share r of it: e <- e + r D.

With a momentum instead (DiLoCo-LOM, SparseLoCo section 2.2) nothing is subtracted but, of LOM-Sub-k, the largest:

    m <- beta m + Delta;  D = Q(Delta + beta m);  m <- m - TopK(m)

With a transform (DeMo) Delta is that of the parameter, and so e, m and D are of coefficients: the outer step goes back.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from hetero_pp.pseudo_gradient import fused, two_level
from hetero_pp.pseudo_gradient.chunks import Group, as_matrix, groups_of
from hetero_pp.pseudo_gradient.compression import CompressionSettings
from hetero_pp.pseudo_gradient.cosines import transformed
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
    told = delta if settings.transform == "none" else transformed(delta, settings.tile)
    if settings.memory == "momentum":
        return _select_with_momentum(error, told, settings, sum_over)
    return _select(error, told, settings, sum_over, generator)


def _select(
    error: Tensor,
    delta: Tensor,
    settings: CompressionSettings,
    sum_over: SumOver | None,
    generator: torch.Generator | None,
) -> Selection:
    flat = error.view(-1)
    groups = groups_of(tuple(error.shape), settings.tile) if error.numel() else ()
    found = [_advance(error, delta, group, settings, generator) for group in groups]
    positions = tuple(one for one, _, _ in found)
    where = _joined([one.view(-1) for _, one, _ in found], torch.empty(0, dtype=torch.int64, device=error.device))
    values = _joined([one.view(-1) for _, _, one in found], flat[:0])
    kept = [(len(one), one.shape[1]) for one in positions]
    if _is_accelerated(error, settings) and settings.quantiser == "signs":
        return Selection(positions, where, _accelerated(settings).quantise_signs(flat, where, values, kept, sum_over))
    quantised = quantise_as(settings, values, kept, sum_over)
    flat.index_copy_(0, where, values - quantised.values)
    return Selection(positions, where, quantised)


def _select_with_momentum(
    momentum: Tensor, delta: Tensor, settings: CompressionSettings, sum_over: SumOver | None
) -> Selection:
    """What is sent of one tensor by a replica that keeps a momentum of its own, which is changed in place."""
    beta = settings.error_feedback_decay
    momentum.mul_(beta).add_(delta)
    told = momentum.mul(beta).add_(delta)
    forgets = settings.model_copy(update={"memory": "error_feedback", "error_feedback_decay": 0.0})
    sent = _select(torch.zeros_like(told), told, forgets, sum_over, None)
    if settings.memory_drops > 0:
        largest = {"density": settings.memory_drops, "selection": "top_k", "error_feedback_decay": 1.0}
        as_they_are = {"quantiser": "levels", "value_bits": 32}
        dropped = forgets.model_copy(update=largest | as_they_are)
        _select(momentum, torch.zeros_like(momentum), dropped, sum_over, None)
    return sent


def give_back(error: Tensor, indices: Tensor, values: Tensor, share: float) -> None:
    """Return to `error`, in place, `share` of what was sent and not counted: values [n] at flat indices [n], unique.

    They are as receivers decode them. Without a decay (beta = 0) nothing is kept, and the next round forgets this too.
    """
    error.view(-1).index_add_(0, indices, values * share)


def _advance(
    error: Tensor, delta: Tensor, group: Group, settings: CompressionSettings, generator: torch.Generator | None
) -> tuple[Tensor, Tensor, Tensor]:
    """error <- beta error + delta in a group; positions, flat indices and values [count, k] of what is sent."""
    kept, decay = group.kept(settings.density), settings.error_feedback_decay
    if _is_accelerated(error, settings):
        return _accelerated(settings).advance(error, delta, group, kept, decay)
    positions, indices, values = [], [], []
    for band in group.bands(error.device):  # all of it while the band is in the cache
        positions.append(_advance_band(error, delta, band, settings, generator))
        indices.append(band.flat_indices(positions[-1]))
        values.append(error.view(-1).take(indices[-1]))
    return torch.cat(positions), torch.cat(indices), torch.cat(values)


def _advance_band(
    error: Tensor, delta: Tensor, band: Group, settings: CompressionSettings, generator: torch.Generator | None
) -> Tensor:
    """error <- beta error + delta in a band; positions [count, k] of what is sent."""
    kept, decay = band.kept(settings.density), settings.error_feedback_decay
    if settings.accelerator == "compile" and settings.selection == "top_k" and kept < band.size:
        return fused.advance(error, delta, band, kept, decay)
    band.part(as_matrix(error)).mul_(decay).add_(band.part(as_matrix(delta)))
    if settings.selection == "random_k":
        return random_positions(band.count, band.size, kept, generator).to(error.device)
    return two_level.find(as_matrix(error), band, kept)


def _joined(parts: list[Tensor], none: Tensor) -> Tensor:
    """Without a copy if there is one part, as of most tensors."""
    return parts[0] if len(parts) == 1 else torch.cat([none, *parts])


def _is_accelerated(error: Tensor, settings: CompressionSettings) -> bool:
    return settings.accelerator == "numba" and settings.selection == "top_k" and error.device.type == "cpu"


def _accelerated(settings: CompressionSettings) -> ModuleType:
    """The module that needs numba. Raises ConfigError if that is not installed."""
    settings.require_accelerator()
    return importlib.import_module("hetero_pp.pseudo_gradient.accelerated")
