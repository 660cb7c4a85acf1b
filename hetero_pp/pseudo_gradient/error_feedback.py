"""Error feedback: selects what is sent of a parameter difference and keeps the rest (SparseLoCo, equation 2).

    e <- beta e + Delta;  D = Q(TopK(e));  e <- e - D

The quantised value is subtracted, so that the receiver's loss of precision is corrected later, too. A share r of an
excluded contribution is restored: e <- e + r D.

With a momentum instead (DiLoCo-LOM, SparseLoCo section 2.2) nothing is subtracted, except the largest by LOM-Sub-k:

    m <- beta m + Delta;  D = Q(Delta + beta m);  m <- m - TopK(m)

With a transform (DeMo) Delta is the transformed difference. So e, m and D are coefficients, and the outer step inverts
the transform.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from hetero_pp.pseudo_gradient.compression import CompressionSettings
from hetero_pp.pseudo_gradient.cosines import transformed
from hetero_pp.pseudo_gradient.quantise import Quantised, SumOver, quantise_as
from hetero_pp.pseudo_gradient.selection import (
    advance_compiled,
    as_matrix,
    find_largest,
    groups_of,
    random_positions,
)


@dataclass(frozen=True)
class Selection:
    """Sent values of one tensor: positions [n, k] per group, ascending within chunks, and their values."""

    positions: tuple[Tensor, ...]
    indices: Tensor  # indices of all kept values into the flattened tensor, in the order of the positions
    quantised: Quantised

    @property
    def values(self) -> Tensor:
        """Values as the receiver decodes them [n], fp32, in the order of the positions."""
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
    """Select what is sent this round and subtract it from `error` in place.

    Both tensors have the parameter's shape, fp32, or that of a part of it: whole rows of chunks, or none
    (pseudo_gradient.rows). `sum_over` then sums over parts. Random-k draws from `generator`, on the CPU.
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
    """Update e <- beta e + Delta, select D = Q(TopK(e)), and subtract it: e <- e - D."""
    flat, density, decay = error.view(-1), settings.density, settings.error_feedback_decay
    groups = groups_of(tuple(error.shape), settings.tile) if error.numel() else ()
    numba: ModuleType | None = None
    if settings.accelerator == "numba" and settings.selection == "top_k" and error.device.type == "cpu":
        settings.require_accelerator()
        numba = importlib.import_module("hetero_pp.pseudo_gradient.compiled_pass")
        if settings.quantiser == "signs":
            return Selection(*numba.select_signs(error, delta, groups, density, decay, sum_over))
    found: list[tuple[Tensor, Tensor, Tensor]] = []  # positions, flat indices and values [count, k] of each group
    for group in groups:
        if numba is not None:
            chosen = numba.advance(error, delta, group, group.kept(density), decay)
            found.append((chosen.positions, chosen.indices, chosen.values))
            continue
        positions, indices, values = list[Tensor](), list[Tensor](), list[Tensor]()
        for band in group.bands(error.device):  # all steps while the band is in the cache
            kept = band.kept(density)
            if settings.accelerator == "compile" and settings.selection == "top_k" and kept < band.size:
                positions.append(advance_compiled(error, delta, band, kept, decay))
            else:
                band.part(as_matrix(error)).mul_(decay).add_(band.part(as_matrix(delta)))
                if settings.selection == "random_k":
                    positions.append(random_positions(band.count, band.size, kept, generator).to(error.device))
                else:
                    positions.append(find_largest(as_matrix(error), band, kept))
            indices.append(band.flat_indices(positions[-1]))
            values.append(flat.take(indices[-1]))
        found.append((torch.cat(positions), torch.cat(indices), torch.cat(values)))
    where = _joined([one.view(-1) for _, one, _ in found], torch.empty(0, dtype=torch.int64, device=error.device))
    sent = _joined([one.view(-1) for _, _, one in found], flat[:0])
    quantised = quantise_as(settings, sent, [(len(one), one.shape[1]) for one, _, _ in found], sum_over)
    flat.index_copy_(0, where, sent - quantised.values)
    return Selection(tuple(one for one, _, _ in found), where, quantised)


def _select_with_momentum(
    momentum: Tensor, delta: Tensor, settings: CompressionSettings, sum_over: SumOver | None
) -> Selection:
    """Select what is sent of one tensor by a replica with its own momentum, which is updated in place."""
    beta = settings.error_feedback_decay
    momentum.mul_(beta).add_(delta)
    told = momentum.mul(beta).add_(delta)
    forgets = settings.model_copy(update={"memory": "error_feedback", "error_feedback_decay": 0.0})
    return _select(torch.zeros_like(told), told, forgets, sum_over, None)


def give_back(error: Tensor, indices: Tensor, values: Tensor, share: float) -> None:
    """Restore to `error`, in place, `share` of an excluded contribution: values [n] at flat indices [n], unique.

    The values are as receivers decode them. Without a memory (beta = 0) the next round discards this too.
    """
    error.view(-1).index_add_(0, indices, values * share)


def _joined(parts: list[Tensor], none: Tensor) -> Tensor:
    """Join the parts; does not copy a single part, the usual case."""
    return parts[0] if len(parts) == 1 else torch.cat([none, *parts])
