"""This rank's rows of every parameter: cut from whole tensors, kept beside the computation, and gathered again."""

from __future__ import annotations

import torch
from torch import Tensor

from hetero_pp.model.transformer import Shapes
from hetero_pp.outer.step import parameter_of
from hetero_pp.pseudo_gradient.rows import rows_of
from replica_groups.outer.ranks import Ranks


class RankRows:
    """Rows of chunks (`pseudo_gradient.rows`) that belong to this rank, by parameter."""

    def __init__(self, shapes: Shapes, tile: tuple[int, int], ranks: Ranks) -> None:
        self.shapes, self._ranks = shapes, ranks
        self.of = {name: rows_of(shape, tile, ranks.rank, ranks.world) for name, shape in shapes.items()}

    def cut(self, state: str, whole: Tensor) -> Tensor:
        """Return this rank's rows of a parameter or of an optimizer's state of it; others belong to all ranks."""
        rows = self.of.get(parameter_of(state))
        return whole if rows is None else whole[rows.start : rows.stop]

    def whole(self, name: str, rows: Tensor) -> Tensor:
        """Return the whole tensor from the rows of all ranks, which all have to call this."""
        if self._ranks.world == 1:
            return rows
        return self._ranks.gather_rows(rows.to(self._ranks.device), self.shapes[name][0])


def kept(tensor: Tensor, device: torch.device, is_pinned: bool) -> Tensor:
    """Return a copy on a device, or in CPU memory that is pinned for a GPU."""
    copy = tensor.detach().to(device, copy=True).contiguous()
    return copy.pin_memory() if is_pinned else copy
