"""Compare ways to compress a pseudo-gradient: error feedback, top-k per chunk, quantise, subtract what is sent, encode.

    python benchmarks/compressors.py [--elements 33554432] [--device cuda] [--json FILE]

On a CPU, the result is elements per CPU second on one thread, for k of the 4096 values of a chunk. It is the median of
interleaved runs. The floor is one pass `e <- .95 e + d` and nothing else. Then contributions are decoded from bytes and
added to a total, one or eight at a time, in values per CPU second. On a GPU, the results are elements per second and
the share of a copy's bandwidth. An element moves 12 bytes (e is read and written, d is read).

templar's ways are written anew after its compressor. It selects from a copy in tiles, packs positions to 12 bits and
codes to bytes, and subtracts a dense tensor. It decodes into a dense tensor. As in the members of a run, malloc keeps
freed memory of up to 32 MiB. Larger tensors are faulted in again, which much of templar's time goes to;
MALLOC_MMAP_THRESHOLD_=1073741824 MALLOC_TRIM_THRESHOLD_=2147483648 avoids that.
"""

from __future__ import annotations

import gc
import multiprocessing
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch
from command_line import extra, origin, parse, parser_of, save
from numpy.typing import NDArray
from processes import reset_peak, status_bytes, when_idle
from rich.console import Console
from torch import Tensor

from hetero_pp.program.launch.fork_server import safe_path
from hetero_pp.program.report.tables import PlainTable
from hetero_pp.pseudo_gradient.compression import CompressionSettings
from hetero_pp.pseudo_gradient.contribution import BlobAddress, ReceivedBlob, encode_blob
from hetero_pp.pseudo_gradient.error_feedback import select
from hetero_pp.pseudo_gradient.quantise import dequantise, quantise
from hetero_pp.pseudo_gradient.selection import groups_of, top_k_positions
from hetero_pp.rpc.memory import keep_freed_memory

with extra("numba"):
    from numba import njit

SIDE = 64
CHUNK = SIDE * SIDE
ADDRESS = BlobAddress("run", 1, "replica", "block")
COLUMNS = 4096
KEPT = (32, 128)
EMBEDDING = (32000, 1536)
"""Shape of the embedding of the 512m preset."""
SMOKE = {"elements": COLUMNS * SIDE, "kept": [32], "embedding": [8192, 64]}
DECAY = 0.95
RUNS = 5
BYTES_PER_ELEMENT = 12
"""Bytes of memory traffic per element: the error is read and written, the difference is read."""

Way = Callable[[Tensor, Tensor, int], object]
"""Takes error [R, C] (updated in place), delta [R, C] and k."""


def _floor_torch(error: Tensor, delta: Tensor, kept: int) -> None:
    error.mul_(DECAY).add_(delta)


def _floor_numba(error: Tensor, delta: Tensor, kept: int) -> None:
    _fused(error.view(-1).numpy(), delta.view(-1).numpy(), np.float32(DECAY))


@njit
def _fused(error: NDArray[np.float32], delta: NDArray[np.float32], decay: np.float32) -> None:
    for index in range(error.shape[0]):
        error[index] = error[index] * decay + delta[index]


def _plain(error: Tensor, delta: Tensor, kept: int) -> None:
    """Compress with one torch.topk per chunk."""
    error.mul_(DECAY).add_(delta)
    (group,) = groups_of(tuple(error.shape), (SIDE, SIDE))
    bands = [(band, top_k_positions(band.gather(error), kept)) for band in group.bands()]
    where = torch.cat([band.flat_indices(positions).view(-1) for band, positions in bands])
    codes, levels = quantise(error.view(-1)[where], 2)
    error.view(-1)[where] -= dequantise(codes, levels)


def _settings(kept: int, accelerator: str = "torch") -> CompressionSettings:
    return CompressionSettings.model_validate(
        {"density": kept / CHUNK, "error_feedback_decay": DECAY, "accelerator": accelerator}
    )


def _ours(error: Tensor, delta: Tensor, kept: int, accelerator: str = "torch") -> bytes:
    settings = _settings(kept, accelerator)
    selection = select(error, delta, settings)
    if error.device.type != "cpu":
        return b""  # the CPU encodes the few kept values
    return encode_blob(ADDRESS, [("x", tuple(error.shape), selection)], settings)


def templar(error: Tensor, delta: Tensor, kept: int) -> tuple[Tensor, Tensor]:
    """Return packed positions, and codes of one byte each."""
    error.mul_(DECAY).add_(delta)
    tiles = error.unflatten(0, (-1, SIDE)).unflatten(2, (-1, SIDE)).transpose(1, 2).reshape(-1, CHUNK)
    positions = tiles.abs().topk(kept, dim=1, sorted=False).indices
    values = tiles.gather(1, positions)
    packed = _pack_12(positions)
    codes, lookup = _bytes_and_lookup(values)
    dense = torch.zeros_like(tiles).scatter_(1, positions, lookup[codes.long()])
    rows, columns = error.shape[0] // SIDE, error.shape[1] // SIDE
    error.sub_(dense.view(rows, columns, SIDE, SIDE).transpose(1, 2).reshape(error.shape))
    return packed, codes


def _pack_12(positions: Tensor) -> Tensor:
    first, second = positions.reshape(-1, 2).to(torch.int32).unbind(1)
    three = (first & 0xFF, (first >> 8) | ((second & 0xF) << 4), second >> 4)
    return torch.stack([part.to(torch.uint8) for part in three], dim=1)


def _unpack_12(packed: Tensor) -> Tensor:
    low, middle, high = packed.to(torch.int64).unbind(1)
    return torch.stack([low | ((middle & 0xF) << 8), (middle >> 4) | (high << 4)], dim=1).view(-1)


def _bytes_and_lookup(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes of 4 buckets over six standard deviations, and the mean value of each bucket."""
    centre = values.mean()
    centred = values - centre
    scale = 6 * centred.norm() / (values.numel() - 1) ** 0.5 / 4
    codes = (centred / scale + 2).round().clamp(0, 3).to(torch.uint8)
    which = codes.long().view(-1)
    sums = torch.zeros(4, device=values.device).scatter_add_(0, which, values.view(-1))
    counts = torch.zeros(4, device=values.device).scatter_add_(0, which, torch.ones_like(values).view(-1))
    return codes, torch.where(counts > 0, sums / counts, torch.zeros_like(sums))


FLOORS: Mapping[str, Way] = {"one pass, torch": _floor_torch, "one pass, numba": _floor_numba}
WAYS: Mapping[str, Way] = {
    **FLOORS,
    "numba": partial(_ours, accelerator="numba"),
    "torch, two-level": _ours,
    "torch, one topk": _plain,
    "templar": templar,
}
GPU_WAYS: Mapping[str, Way] = {
    **{name: way for name, way in WAYS.items() if "numba" not in name},
    "compiled": partial(_ours, accelerator="compile"),
}


@dataclass(frozen=True)
class Received:
    """A contribution to one tensor [R, C], in this project's format and in templar's."""

    total: Tensor
    blob: bytes
    settings: CompressionSettings
    packed: Tensor
    codes: Tensor
    lookup: Tensor


def _add_ours(received: Received, times: int) -> None:
    shapes = {"x": tuple(received.total.shape)}
    for _ in range(times):
        ReceivedBlob(received.blob, ADDRESS, shapes, received.settings).tensor("x").add_to(received.total, 0.5)


def _add_templar(received: Received, times: int) -> None:
    """Add all contributions at once: build a dense tensor in tiles, and reorder it into rows and columns."""
    total = received.total
    chunks, rows = total.numel() // CHUNK, total.shape[0] // SIDE
    positions = [_unpack_12(received.packed).view(chunks, -1) for _ in range(times)]
    values = [received.lookup[received.codes.long()].view(chunks, -1) for _ in range(times)]
    tiles = torch.zeros(chunks, CHUNK)
    tiles.scatter_reduce_(1, torch.cat(positions, 1), torch.cat(values, 1), reduce="mean", include_self=False)
    total.add_(tiles.view(rows, -1, SIDE, SIDE).transpose(1, 2).reshape(total.shape))


ADDERS: Mapping[str, Callable[[Received], object]] = {
    "ours": lambda received: _add_ours(received, 1),
    "templar": lambda received: _add_templar(received, 1),
    "ours, 8 at once": lambda received: _add_ours(received, 8),
    "templar, 8 at once": lambda received: _add_templar(received, 8),
}


def _inputs(elements: int, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Return an error and a difference [R, 4096] of whole tiles."""
    generator = torch.Generator().manual_seed(0)
    rows = max(1, elements // (COLUMNS * SIDE)) * SIDE
    error, delta = (torch.randn(rows, COLUMNS, generator=generator).to(device) for _ in range(2))
    return error, delta


def _received(elements: int, kept: int) -> Received:
    error, delta = _inputs(elements)
    selection = select(error, delta, _settings(kept))
    blob = encode_blob(ADDRESS, [("x", tuple(error.shape), selection)], _settings(kept))
    codes, lookup = _bytes_and_lookup(selection.values.view(-1, kept))
    return Received(delta, blob, _settings(kept), _pack_12(selection.positions[0]), codes, lookup)


def measure(ways: Mapping[str, Way], elements: int, kept: int) -> dict[str, float]:
    """Return elements per CPU second of each way."""
    error, delta = _inputs(elements)
    works = {name: partial(way, error, delta, kept) for name, way in ways.items()}
    return {name: error.numel() / seconds for name, seconds in _interleaved(works, time.process_time).items()}


def measure_adding(elements: int, kept: int) -> dict[str, float]:
    """Return the values per CPU second that each way decodes and adds to a total."""
    received = _received(elements, kept)
    works = {name: partial(add, received) for name, add in ADDERS.items()}
    found = _interleaved(works, time.process_time)
    return {name: received.codes.numel() * (8 if "8" in name else 1) / seconds for name, seconds in found.items()}


def measure_gpu(device: str, elements: int, kept: int) -> dict[str, float]:
    """Return elements per second of each way on a device, and of one pass at a copy's bandwidth."""
    error, delta = _inputs(elements, device)
    target = torch.empty_like(error)
    works: dict[str, Callable[[], object]] = {"copy": partial(target.copy_, delta)}
    clock = partial(when_idle, error.device)
    works |= {name: partial(way, error, delta, kept) for name, way in GPU_WAYS.items()}
    found = {name: error.numel() / seconds for name, seconds in _interleaved(works, clock).items()}
    return found | {"copy": found["copy"] * 8 / BYTES_PER_ELEMENT}


def _interleaved(works: Mapping[str, Callable[[], object]], now: Callable[[], float]) -> dict[str, float]:
    """Return the median seconds of each work. The first run of each is a warm-up."""
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(RUNS + 1):
        for name, work in works.items():
            started = now()
            work()
            seconds[name].append(now() - started)
    return {name: median(found[1:]) for name, found in seconds.items()}


def cpu_seconds(work: Callable[[], object]) -> float:
    """Return the median CPU seconds of several calls."""
    return _interleaved({"": work}, time.process_time)[""]


def measure_memory(embedding: Sequence[int], kept: int, accelerator: str) -> float:
    """Return the peak of extra memory while an embedding is compressed, divided by the embedding's size."""
    torch.set_num_threads(1)
    error, delta = torch.zeros(*embedding), torch.randn(*embedding)
    _ours(error, delta, kept, accelerator)
    gc.collect()
    before = reset_peak()
    _ours(error, delta, kept, accelerator)
    return (status_bytes("VmHWM") - before) / (error.numel() * 4)


def _elsewhere(work: Callable[..., float], *arguments: object) -> float:
    """Run in a process of its own, because this process keeps memory that it has freed."""
    with safe_path(), multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(work, arguments)


def measure_all(elements: int, ks: Sequence[int], embedding: Sequence[int]) -> dict[str, Any]:
    """Measure every way on the CPU, on one thread, at every k."""
    torch.set_num_threads(1)
    keep_freed_memory()
    return {
        "elements": elements,
        "floor": {str(kept): max(measure(FLOORS, elements, kept).values()) for kept in ks},
        "elements_per_cpu_second": {str(kept): measure(WAYS, elements, kept) for kept in ks},
        "extra_memory": {
            accelerator: {str(kept): _elsewhere(measure_memory, embedding, kept, accelerator) for kept in ks}
            for accelerator in ("torch", "numba")
        },
        "values_added_per_cpu_second": {str(kept): measure_adding(elements, kept) for kept in ks},
    }


def _rows(rates: Mapping[str, float], floor: float) -> Iterator[tuple[str, ...]]:
    for name, rate in rates.items():
        peer = "templar, 8 at once" if "8" in name else "templar"
        yield name, f"{rate / 1e6:,.0f}", f"{rate / floor:.3f}", f"{rate / rates[peer]:.1f}"


def show(found: Mapping[str, Any]) -> None:
    titles = {
        "elements_per_cpu_second": ("M elements a CPU second", "of the floor"),
        "values_added_per_cpu_second": ("M values decoded and added a CPU second", "of the fastest"),
        "elements_per_second": ("M elements a second", "of a copy's bandwidth"),
    }
    for accelerator, shares in found.get("extra_memory", {}).items():
        for kept, share in shares.items():
            print(f"memory beside a tensor, {accelerator}, k = {kept}: {share:.2f} of the tensor's")
    for key, (unit, share) in titles.items():
        for kept, rates in found.get(key, {}).items():
            table = PlainTable([f"k = {kept} of {CHUNK}"], [unit, share, "over templar's"])
            floors = [rates[name] for name in FLOORS if name in rates]
            for row in _rows(rates, rates.get("copy") or max(floors or rates.values())):
                table.add_row(*row)
            Console(width=120).print(table)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--elements", type=int, default=1 << 25)
    parser.add_argument("--kept", type=int, nargs="+", default=KEPT, help="values to keep of the 4096 of a chunk")
    parser.add_argument(
        "--embedding", type=int, nargs=2, default=EMBEDDING, help="shape of the embedding whose memory is measured"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    arguments = parse(parser, SMOKE)
    elements, device = arguments.elements, arguments.device
    if device == "cpu":
        found = measure_all(elements, arguments.kept, arguments.embedding)
    else:
        speeds = {str(kept): measure_gpu(device, elements, kept) for kept in arguments.kept}
        found = {"elements": elements, "elements_per_second": speeds}
    show(found)
    save(origin() | found, arguments.json)


if __name__ == "__main__":
    main()
