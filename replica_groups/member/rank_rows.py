"""This rank's rows of every parameter: cut from whole tensors, gathered again, and saved for any number of ranks."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from hetero_pp.core.errors import HeteroPPError
from hetero_pp.core.files import whole
from hetero_pp.core.tensor_files import save_tensors
from hetero_pp.model.transformer import Shapes
from hetero_pp.outer.step import parameter_of
from hetero_pp.pseudo_gradient.rows import Shape, rows_of
from replica_groups.engines.ranks import Ranks


class RankRows:
    """Rows of chunks (`pseudo_gradient.rows`) that belong to this rank, by parameter. Implements Part."""

    def __init__(self, shapes: Shapes, tile: tuple[int, int], ranks: Ranks) -> None:
        self.shapes, self._ranks = shapes, ranks
        self.rows = {name: rows_of(shape, tile, ranks.rank, ranks.world) for name, shape in shapes.items()}

    def cut(self, state: str, whole: Tensor) -> Tensor:
        """Return this rank's rows of a parameter or of an optimizer's state of it; others belong to all ranks."""
        rows = self.rows.get(parameter_of(state))
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


def write_part(folder: Path, ranks: Ranks, tensors: Mapping[str, Tensor]) -> None:
    """Write this rank's rows of tensors; names may have a prefix that ends in a colon."""
    file = folder / f"outer-{ranks.rank}-of-{ranks.world}.safetensors"
    with whole(file) as part:
        save_tensors({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, part)


def read_part(folder: Path, ranks: Ranks, shapes: Mapping[str, Shape], tile: tuple[int, int]) -> dict[str, Tensor]:
    """Read this rank's rows of tensors that any number of ranks wrote.

    `shapes` are the whole shapes by name, without the prefix. A tensor without a shape was written whole; it is read
    from rank 0's file. Raises HeteroPPError if a file is missing.
    """
    found = sorted(folder.glob("outer-*-of-*.safetensors"), key=lambda path: int(path.name.split("-")[1]))
    worlds = {int(match[1]) for path in found if (match := re.search(r"-of-(\d+)", path.name))}
    if worlds != {len(found)}:
        raise HeteroPPError(f"{folder}: found {[path.name for path in found]}, expected one file per rank")
    parts = [safe_open(path, framework="pt") for path in found]
    tensors = {}
    for name in sorted(set(parts[0].keys())):
        shape = shapes.get(parameter_of(name.split(":")[-1]))
        if shape is None or (len(parts) == ranks.world == 1):
            tensors[name] = parts[0].get_tensor(name)
            continue
        wanted = rows_of(shape, tile, ranks.rank, ranks.world)
        pieces = [torch.empty(0, *shape[1:])]
        for index, part in enumerate(parts):
            held = rows_of(shape, tile, index, len(parts))
            start, stop = max(held.start, wanted.start), min(held.stop, wanted.stop)
            if start < stop:
                pieces.append(part.get_slice(name)[start - held.start : stop - held.start])
        tensors[name] = torch.cat(pieces)
    return tensors
