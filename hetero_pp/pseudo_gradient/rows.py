"""Tensors split by rows of chunks, so that several ranks compress one tensor: each rank takes whole chunks, in order.

The joined selections of the parts equal the whole's: the same positions, and levels from the same sums.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hetero_pp.pseudo_gradient.error_feedback import Selection
from hetero_pp.pseudo_gradient.quantise import Quantised
from hetero_pp.pseudo_gradient.selection import groups_of

Shape = tuple[int, ...]


def rows_of(shape: Shape, tile: tuple[int, int], part: int, parts: int) -> range:
    """Return the rows of one part: equal numbers of tiles, or none for the last parts if few tiles are left.

    A tensor that is no matrix is one chunk, which belongs to the first part. If torch's `Shard(0)` cuts between tiles,
    the cuts are the same.
    """
    rows = shape[0]
    height = tile[0] if len(shape) == 2 else rows
    share = math.ceil(math.ceil(rows / height) / parts) * height
    return range(min(part * share, rows), min((part + 1) * share, rows))


def join(shape: Shape, tile: tuple[int, int], parts: Sequence[Mapping[str, Tensor]]) -> Selection:
    """Join `packed` parts, in the order of their rows, to the selection of the whole tensor, without its indices."""
    positions: list[Tensor] = []
    found: dict[str, list[Tensor]] = {"values": [], "codes": [], "magnitudes": []}
    where = [dict(_groups(part)) for part in parts]
    for group in groups_of(shape, tile):
        key = (group.rows, group.columns)
        held = [(part, own[key]) for part, own in zip(parts, where, strict=True) if key in own]
        positions.append(torch.cat([part[f"positions.{index}"] for part, (index, _, _) in held]))
        for part, (index, start, stop) in held:
            for name in ("values", "codes"):
                found[name] += [part[name][start:stop]] if name in part else []
            found["magnitudes"] += [part[f"magnitudes.{index}"]] if "base" in part else []
    joined = {name: torch.cat(tensors) if tensors else None for name, tensors in found.items()}
    assert joined["values"] is not None
    base = int(parts[0]["base"]) if "base" in parts[0] else 0
    quantised = Quantised(joined["values"], joined["codes"], parts[0].get("levels"), joined["magnitudes"], base)
    return Selection(tuple(positions), torch.empty(0, dtype=torch.int64), quantised)


def packed(selection: Selection, shape: Shape, tile: tuple[int, int]) -> dict[str, Tensor]:
    """Return a part's selection as tensors by name, to be sent and joined; `shape` is the part's."""
    found = {f"positions.{index}": positions for index, positions in enumerate(selection.positions)}
    quantised = selection.quantised
    found["values"] = quantised.values
    found |= {} if quantised.codes is None else {"codes": quantised.codes}
    found |= {} if quantised.levels is None else {"levels": quantised.levels}
    if quantised.magnitudes is not None:
        chunks = [len(positions) for positions in selection.positions]
        found |= {f"magnitudes.{index}": own for index, own in enumerate(quantised.magnitudes.split(chunks))}
        found["base"] = torch.tensor(quantised.base)
    groups = [(group.rows, group.columns) for group in groups_of(shape, tile)] if shape[0] else []
    found["groups"] = torch.tensor(groups, dtype=torch.int64).view(-1, 2)
    return {name: tensor.cpu().contiguous() for name, tensor in found.items()}


def _groups(part: Mapping[str, Tensor]) -> list[tuple[tuple[int, int], tuple[int, int, int]]]:
    """Return for each group the (rows, columns) of its chunks, its index, and the range of its values in the part's."""
    found, start = [], 0
    for index, (rows, columns) in enumerate(part["groups"].tolist()):
        stop = start + part[f"positions.{index}"].numel()
        found.append(((rows, columns), (index, start, stop)))
        start = stop
    return found
