"""Tensors cut by rows of chunks, so that several ranks compress one tensor: each takes whole chunks, in order.

What the parts select, joined, is what the whole would select: the same positions, and levels from the same sums.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hetero_pp.pseudo_gradient.chunks import groups_of
from hetero_pp.pseudo_gradient.error_feedback import Selection

Shape = tuple[int, ...]


def rows_of(shape: Shape, tile: tuple[int, int], part: int, parts: int) -> range:
    """The rows of a tensor that are one part's: equal numbers of tiles, or nothing for the last parts if few are left.

    What is no matrix is one chunk, the first part's. Where torch's `Shard(0)` cuts between tiles, it cuts here too.
    """
    rows = shape[0]
    height = tile[0] if len(shape) == 2 else rows
    share = math.ceil(math.ceil(rows / height) / parts) * height
    return range(min(part * share, rows), min((part + 1) * share, rows))


def join(shape: Shape, tile: tuple[int, int], parts: Sequence[Mapping[str, Tensor]]) -> Selection:
    """The selection of the whole tensor from `packed` parts, in the order of their rows."""
    positions, codes, values = [], [], []
    where = [dict(_groups(part)) for part in parts]
    for group in groups_of(shape, tile):
        key = (group.rows, group.columns)
        held = [(part, own[key]) for part, own in zip(parts, where, strict=True) if key in own]
        positions.append(torch.cat([part[f"positions.{index}"] for part, (index, _, _) in held]))
        values += [part["values"][start:stop] for part, (_, start, stop) in held]
        codes += [part["codes"][start:stop] for part, (_, start, stop) in held if "codes" in part]
    levels = parts[0].get("levels")
    none = torch.empty(0, dtype=torch.int64)
    return Selection(tuple(positions), none, torch.cat(codes) if codes else None, levels, torch.cat(values))


def packed(selection: Selection, shape: Shape, tile: tuple[int, int]) -> dict[str, Tensor]:
    """A part's selection as tensors by name, to be sent and joined; `shape` is the part's."""
    found = {f"positions.{index}": positions for index, positions in enumerate(selection.positions)}
    found["values"] = selection.values
    if selection.codes is not None and selection.levels is not None:
        found |= {"codes": selection.codes, "levels": selection.levels}
    groups = [(group.rows, group.columns) for group in groups_of(shape, tile)] if shape[0] else []
    found["groups"] = torch.tensor(groups, dtype=torch.int64).view(-1, 2)
    return {name: tensor.cpu().contiguous() for name, tensor in found.items()}


def _groups(part: Mapping[str, Tensor]) -> list[tuple[tuple[int, int], tuple[int, int, int]]]:
    """(rows, columns) of each group's chunks -> its index, and where its values lie among the part's."""
    found, start = [], 0
    for index, (rows, columns) in enumerate(part["groups"].tolist()):
        stop = start + part[f"positions.{index}"].numel()
        found.append(((rows, columns), (index, start, stop)))
        start = stop
    return found
