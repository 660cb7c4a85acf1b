"""Error feedback, top-k and signs of each chunk on a CPU, by a pass that numba compiles; bitwise equal to torch's."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hetero_pp.pseudo_gradient.chunks import Group
from hetero_pp.pseudo_gradient.compiled_pass import advance_group, send_signs
from hetero_pp.pseudo_gradient.quantise import Quantised, SumOver, dequantise_signs, magnitudes_of


@dataclass(frozen=True)
class Chosen:
    """Kept values of a group of chunks [count, k], and what was subtracted of them."""

    positions: Tensor
    """Positions in the chunks, ascending."""
    indices: Tensor
    """Indices into the flattened tensor."""
    values: Tensor
    """Values before the subtraction."""
    sums: Tensor
    """Sums of the magnitudes of chunks [count], fp64."""
    subtracted: Tensor
    """Magnitudes that were subtracted [count], fp32."""


def advance(error: Tensor, delta: Tensor, group: Group, kept: int, decay: float, subtracts: bool = False) -> Chosen:
    """Update error <- decay error + delta in a group of tensors on the CPU, rounded twice as by torch.

    Returns the k largest magnitudes of each chunk; of equal ones the lower index. With `subtracts`, the mean magnitude
    of each chunk is subtracted from them with their signs, rounded as by quantise.quantise_signs but unbounded.
    """
    count, shape = group.count, (group.count, kept)
    chosen = Chosen(
        torch.empty(shape, dtype=torch.int64),
        torch.empty(shape, dtype=torch.int64),
        torch.empty(shape),
        torch.empty(count, dtype=torch.float64),
        torch.empty(count),
    )
    own, added = (tensor.detach().reshape(-1) for tensor in (error, delta))
    advance_group(
        (own.numpy(), own.view(torch.int32).numpy(), added.numpy()),
        (chosen.positions.numpy(), chosen.indices.numpy(), chosen.values.numpy()),
        (chosen.sums.numpy(), chosen.subtracted.numpy()),
        (np.float32(decay), subtracts),
        (group.rows, group.columns),
        (group.top, group.bottom, group.left, group.right, group.stride),
    )
    return chosen


def select_signs(
    error: Tensor, delta: Tensor, groups: Iterable[Group], density: float, decay: float, sum_over: SumOver | None = None
) -> tuple[tuple[Tensor, ...], Tensor, Quantised]:
    """Select signs of a tensor and subtract them from `error`, as error_feedback.select does.

    Returns the positions of each group, the indices of all kept values and what is sent.
    """
    found = [advance(error, delta, group, group.kept(density), decay, subtracts=True) for group in groups]
    kept = [(len(one.positions), one.positions.shape[1]) for one in found]
    base, magnitudes = magnitudes_of([one.sums for one in found], kept, error.device, sum_over)
    each = dequantise_signs(torch.zeros_like(magnitudes), magnitudes, base, [(len(magnitudes), 1)])
    codes = [torch.empty(one.positions.shape, dtype=torch.uint8) for one in found]
    for one, signs, sent in zip(found, codes, each.split([len(one.sums) for one in found]), strict=True):
        send_signs(
            error.view(-1).numpy(),
            (one.indices.numpy(), one.values.numpy(), one.subtracted.numpy()),
            signs.numpy(),
            sent.numpy(),
        )
    sent_values = Quantised(
        _flat([one.values for one in found], each), _flat(codes, magnitudes), None, magnitudes, base
    )
    indices = _flat([one.indices for one in found], torch.empty(0, dtype=torch.int64))
    return tuple(one.positions for one in found), indices, sent_values


def _flat(parts: list[Tensor], like: Tensor) -> Tensor:
    """Join tensors [count, k] of the type of `like`; does not copy a single one, the usual case."""
    return parts[0].view(-1) if len(parts) == 1 else torch.cat([like[:0], *(part.view(-1) for part in parts)])
