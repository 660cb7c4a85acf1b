"""Error feedback, top-k and signs of each chunk in two passes, compiled by numba; bitwise equal to torch's.

The first pass updates the error and finds the kept values. The second pass visits only those and subtracts what is
sent. Between them lies the mean of all kept magnitudes, which the holders of parts of a tensor sum up.

In the first pass one row of tiles stays in the cache. The pass updates it, takes the largest magnitude of each group
(one column of a few consecutive rows), and picks candidates for the k largest. Thresholds are found by bisection,
because counting the values above a threshold is a vector operation. Magnitudes are compared as the bits of floats,
which have the same order and are never NaN. Counters are unsigned, as numba would check for negative indices.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray
from torch import Tensor

from hetero_pp.pseudo_gradient.chunks import Group, as_matrix
from hetero_pp.pseudo_gradient.quantise import Kept, Quantised, SumOver, dequantise_signs, magnitudes_of
from hetero_pp.pseudo_gradient.two_level import group_height

MAGNITUDE = np.int32(0x7FFFFFFF)
"""Mask of a float's bits without its sign."""

Floats = NDArray[np.float32]
Ints = NDArray[np.int32]
Longs = NDArray[np.int64]


def advance(error: Tensor, delta: Tensor, group: Group, kept: int, decay: float) -> tuple[Tensor, Tensor, Tensor]:
    """Update error <- decay error + delta in a group of tensors on the CPU, rounded twice as by torch.

    Returns the k largest magnitudes of each chunk; of equal ones the lower index. Returns positions [count, k],
    ascending, indices into the flattened tensor [count, k], and values [count, k].
    """
    positions, indices = (torch.empty(group.count, kept, dtype=torch.int64) for _ in range(2))
    values = torch.empty(group.count, kept)
    own, added = (group.part(as_matrix(tensor.detach())) for tensor in (error, delta))
    height, first = group_height(group, kept), group.top * group.stride + group.left
    _advance(
        own.numpy(),
        own.view(torch.int32).numpy(),
        added.numpy(),
        (positions.numpy(), indices.numpy(), values.numpy()),
        np.float32(decay),
        (group.rows, group.columns, height),
        (first, group.stride),
    )
    return positions, indices, values


def quantise_signs(
    flat: Tensor, indices: Tensor, values: Tensor, kept: Kept, sum_over: SumOver | None = None
) -> Quantised:
    """Quantise values [n] in place, as quantise.quantise_signs does; flat[indices] becomes the rounding error."""
    sizes = [chunks * each for chunks, each in kept]
    parts = [part.view(shape).numpy() for part, shape in zip(values.split(sizes), kept, strict=True)]
    sums = [torch.from_numpy(_sums(part)) for part in parts]
    base, magnitudes = magnitudes_of(sums, kept, values.device, sum_over)
    codes, chunks = torch.empty(len(values), dtype=torch.uint8), [(len(magnitudes), 1)]
    of_chunks = dequantise_signs(torch.zeros_like(magnitudes), magnitudes, base, chunks)
    each = zip(
        parts, indices.split(sizes), codes.split(sizes), of_chunks.split([len(one) for one in sums]), strict=True
    )
    for part, where, signs, magnitude in each:
        _subtract(flat.numpy(), where.view(part.shape).numpy(), part, signs.view(part.shape).numpy(), magnitude.numpy())
    return Quantised(values, codes, None, magnitudes, base)


@njit(cache=True, nogil=True)
def _advance(
    error: Floats,
    error_bits: Ints,
    delta: Floats,
    selected: tuple[Longs, Longs, Floats],
    decay: np.float32,
    sizes: tuple[int, int, int],
    layout: tuple[int, int],
) -> None:
    """Update parts [r * rows, c * columns] and select from them.

    `sizes`: rows, columns, height of a group of rows. `error_bits` shares the memory of `error`. `selected`: positions,
    indices and values, each [r * c, k]. `layout`: the index of the part's first element, and the distance to that of
    its second row.
    """
    positions, indices, values = selected
    rows, columns, height = sizes
    first, stride = layout
    tiles, kept = error.shape[1] // columns, positions.shape[1]
    largest = np.empty((rows // height, error.shape[1]), dtype=np.int32)
    groups, keys = np.empty(rows // height * columns, dtype=np.int32), np.empty(rows * columns + 1, dtype=np.int32)
    places, survivors = np.empty(rows * columns + 1, dtype=np.int32), np.empty(columns + 1, dtype=np.int32)
    for top in range(0, error.shape[0], rows):
        largest[:] = 0
        for row in range(rows):
            _update(error[top + row], delta[top + row], decay, largest[row // height])
        for tile in range(tiles):
            left, chunk = tile * columns, top // rows * tiles + tile
            for group in range(rows // height):
                groups[group * columns : (group + 1) * columns] = largest[group, left : left + columns]
            least = _threshold(groups, kept, kept // 8)
            tile_bits = error_bits[top : top + rows, left : left + columns]
            found = _survivors(tile_bits, groups, least, height, survivors, keys, places)
            _keep(keys[:found], places[:found], positions[chunk])
            own, start = error[top : top + rows, left : left + columns], first + top * stride + left
            _look_up(own, positions[chunk], start, stride, indices[chunk], values[chunk])


@njit(cache=True, nogil=True)
def _update(error: Floats, delta: Floats, decay: np.float32, largest: Ints) -> None:
    """Update error <- decay error + delta in one row, and the largest magnitudes so far of each column."""
    for column in range(error.shape[0]):
        value = np.float32(error[column] * decay + delta[column])
        error[column] = value
        largest[column] = max(largest[column], np.int32(value.view(np.int32) & MAGNITUDE))


@njit(cache=True, nogil=True)
def _threshold(keys: Ints, kept: int, surplus: int) -> np.int32:
    """Return a threshold that at least `kept` and at most `kept + surplus` keys reach.

    If there is none, returns the largest threshold that `kept` keys reach.
    """
    low, high = np.int64(keys.min()), np.int64(keys.max()) + 1
    while high - low > 1:
        middle = (low + high) // 2
        reached = _reaching(keys, np.int32(middle))
        if reached < kept:
            high = middle
            continue
        low = middle
        if reached <= kept + surplus:
            break
    return np.int32(low)


@njit(cache=True, nogil=True)
def _reaching(keys: Ints, least: np.int32) -> np.int32:
    count = np.int32(0)
    for index in range(keys.shape[0]):
        count = np.int32(count + (keys[index] >= least))
    return count


@njit(cache=True, nogil=True)
def _survivors(
    bits: Ints, groups: Ints, least: np.int32, height: int, survivors: Ints, keys: Ints, places: Ints
) -> np.uint32:
    """Write the keys and places that reach `least` in one tile, in order; return how many they are.

    Every candidate is written, and only the count depends on it, because a branch would often be mispredicted.
    """
    width = bits.shape[1]
    found = np.uint32(0)
    for top in range(0, bits.shape[0], height):
        own = groups[top // height * width : (top // height + 1) * width]
        count = np.uint32(0)
        for place in range(width):
            survivors[count] = place
            count = np.uint32(count + np.uint32(own[place] >= least))
        for row in range(top, top + height):
            line = bits[row]
            for index in range(count):
                column = np.uint32(survivors[index])
                key = np.int32(line[column] & MAGNITUDE)
                keys[found] = key
                places[found] = row * width + column
                found = np.uint32(found + np.uint32(key >= least))
    return found


@njit(cache=True, nogil=True)
def _keep(keys: Ints, places: Ints, positions: Longs) -> None:
    """Write the places of the k largest keys, of equal ones the first, to `positions` [k]."""
    least = _threshold(keys, positions.shape[0], 0)
    room = positions.shape[0] - _reaching(keys, np.int32(least + 1))
    kept = 0
    for index in range(keys.shape[0]):
        is_equal = keys[index] == least
        if keys[index] > least or (is_equal and room > 0):
            positions[kept] = places[index]
            kept += 1
            room -= is_equal


@njit(cache=True, nogil=True)
def _look_up(tile: Floats, positions: Longs, start: int, stride: int, indices: Longs, values: Floats) -> None:
    """Write the indices and values [k] of positions [k] in a tile whose first element has the index `start`."""
    width = np.uint32(tile.shape[1])
    for place in range(positions.shape[0]):
        position = np.uint32(positions[place])
        row = position // width
        column = np.uint32(position - row * width)
        indices[place] = start + np.int64(row) * stride + column
        values[place] = tile[row, column]


@njit(cache=True, nogil=True)
def _sums(values: Floats) -> NDArray[np.float64]:
    """Return the sum of the magnitudes of each chunk [chunks, k]."""
    sums = np.empty(values.shape[0], dtype=np.float64)
    for chunk in range(values.shape[0]):
        total = 0.0
        for place in range(values.shape[1]):
            total += np.float64(abs(values[chunk, place]))
        sums[chunk] = total
    return sums


@njit(cache=True, nogil=True)
def _subtract(flat: Floats, indices: Longs, values: Floats, codes: NDArray[np.uint8], magnitudes: Floats) -> None:
    """Write the signs of values [chunks, k], replace values by signed magnitudes, and put the rest in `flat`."""
    for chunk in range(values.shape[0]):
        magnitude = magnitudes[chunk]
        for place in range(values.shape[1]):
            value = np.float32(values[chunk, place])
            sign = value.view(np.uint32) >> np.uint32(31)
            sent = -magnitude if sign else magnitude
            codes[chunk, place] = sign
            values[chunk, place] = sent
            flat[np.uint64(indices[chunk, place])] = value - sent
