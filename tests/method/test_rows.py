"""Compression of a tensor in parts equals compression of the whole tensor."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor

from hetero_pp.pseudo_gradient.compression import CompressionSettings
from hetero_pp.pseudo_gradient.contribution import BlobAddress, encode_blob
from hetero_pp.pseudo_gradient.error_feedback import select
from hetero_pp.pseudo_gradient.rows import join, packed, rows_of

TILE = (64, 64)
SHAPES = [(300, 200), (64, 64), (130, 70), (7, 200), (50,), (128, 192), (64, 1)]
ADDRESS = BlobAddress("run", 1, "replica", "block")


class Parts:
    """Sums over threads in the order of parts, as a process group sums over ranks."""

    def __init__(self, count: int) -> None:
        self.barrier = threading.Barrier(count)
        self.given: list[Tensor] = [torch.empty(0)] * count

    def sum(self, part: int, tensor: Tensor) -> None:
        self.given[part] = tensor.clone()
        self.barrier.wait()
        total = torch.stack(self.given).sum(dim=0)
        self.barrier.wait()
        tensor.copy_(total)


@pytest.mark.parametrize(("quantiser", "value_bits"), [("levels", 2), ("levels", 32), ("signs", 1)])
@pytest.mark.parametrize("parts", [2, 3, 5])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_parts_select_what_the_whole_selects(
    shape: tuple[int, ...], parts: int, quantiser: str, value_bits: int
) -> None:
    settings = CompressionSettings.model_validate({"quantiser": quantiser, "value_bits": value_bits})
    generator = torch.Generator().manual_seed(parts)
    error, delta = (torch.randn(shape, generator=generator) for _ in range(2))
    whole_error = error.clone()
    whole = select(whole_error, delta, settings)
    errors: list[Tensor] = [torch.empty(0)] * parts
    sent: list[dict[str, Tensor]] = [{}] * parts
    together = Parts(parts)

    def run(part: int) -> None:
        rows = rows_of(shape, TILE, part, parts)
        errors[part] = error[rows.start : rows.stop].clone()
        found = select(errors[part], delta[rows.start : rows.stop], settings, lambda tensor: together.sum(part, tensor))
        sent[part] = packed(found, tuple(errors[part].shape), TILE)

    threads = [threading.Thread(target=run, args=(part,)) for part in range(parts)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    joined = join(shape, TILE, sent)
    for ours, theirs in zip(joined.positions, whole.positions, strict=True):
        assert torch.equal(ours, theirs)
    assert joined.kept_values == whole.kept_values
    if value_bits == 32:
        blobs = [encode_blob(ADDRESS, [("x", shape, chosen)], settings) for chosen in (joined, whole)]
        assert blobs[0] == blobs[1]
    else:
        assert joined.quantised.codes is not None and whole.quantised.codes is not None
        assert torch.equal(joined.quantised.codes, whole.quantised.codes)
        assert torch.allclose(joined.values, whole.values, rtol=1e-6, atol=1e-7)
    if quantiser == "signs":
        assert joined.quantised.base == whole.quantised.base
        assert joined.quantised.magnitudes is not None and whole.quantised.magnitudes is not None
        assert torch.equal(joined.quantised.magnitudes, whole.quantised.magnitudes)
    assert torch.allclose(torch.cat(errors), whole_error, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rows", [1, 63, 64, 65, 127, 128, 1000, 5440])
@pytest.mark.parametrize("parts", [1, 2, 3, 8])
def test_rows_are_all_there_once_and_cut_between_tiles(rows: int, parts: int) -> None:
    cut = [rows_of((rows, 10), TILE, part, parts) for part in range(parts)]
    assert [row for one in cut for row in one] == list(range(rows))
    assert all(one.start % 64 == 0 or not one for one in cut)
    chunks = torch.arange(rows).chunk(parts)
    if len(chunks[0]) % 64 == 0:  # where torch's Shard(0) cuts between tiles
        assert [list(one) for one in cut if one] == [chunk.tolist() for chunk in chunks]
