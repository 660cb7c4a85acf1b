"""Error feedback and top-k of each chunk in one pass, compiled by numba: the same values and positions as by torch.

One row of tiles stays in the cache while it is updated, while the largest magnitude is taken of each group (one column
of a few consecutive rows), and while what may be among the k largest is picked out. Thresholds are found by bisection:
counting what is at least as large is a vector operation. Magnitudes are compared as the bits of floats, which have the
same order and are never NaN. Counters are unsigned, as numba would look for negative indices.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray
from torch import Tensor

from hetero_pp.pseudo_gradient.chunks import Group, as_matrix
from hetero_pp.pseudo_gradient.two_level import group_height

MAGNITUDE = np.int32(0x7FFFFFFF)
"""The bits of a float without its sign."""

Floats = NDArray[np.float32]
Ints = NDArray[np.int32]


def advance(error: Tensor, delta: Tensor, band: Group, kept: int, decay: float) -> Tensor:
    """error <- decay error + delta in a band of tensors on the CPU, rounded twice as by torch.

    Returns positions [count, k] of the k largest magnitudes of each chunk, ascending; of equal ones the lower index.
    """
    positions = np.empty((band.count, kept), dtype=np.int64)
    own, added = (band.part(as_matrix(tensor.detach())) for tensor in (error, delta))
    height = group_height(band, kept)
    beta = np.float32(decay)
    _advance(
        own.numpy(), own.view(torch.int32).numpy(), added.numpy(), beta, band.rows, band.columns, height, positions
    )
    return torch.from_numpy(positions)


@njit(cache=True, nogil=True)
def _advance(
    error: Floats,
    error_bits: Ints,
    delta: Floats,
    decay: np.float32,
    rows: int,
    columns: int,
    height: int,
    positions: NDArray[np.int64],
) -> None:
    """For parts [r * rows, c * columns] and positions [r * c, k]; `error_bits` is the memory of `error`."""
    tiles, kept = error.shape[1] // columns, positions.shape[1]
    largest = np.empty((rows // height, error.shape[1]), dtype=np.int32)
    groups, keys = np.empty(rows // height * columns, dtype=np.int32), np.empty(rows * columns + 1, dtype=np.int32)
    places, survivors = np.empty(rows * columns + 1, dtype=np.int32), np.empty(columns + 1, dtype=np.int32)
    for top in range(0, error.shape[0], rows):
        largest[:] = 0
        for row in range(rows):
            _update(error[top + row], delta[top + row], decay, largest[row // height])
        for tile in range(tiles):
            left = tile * columns
            for group in range(rows // height):
                groups[group * columns : (group + 1) * columns] = largest[group, left : left + columns]
            least = _threshold(groups, kept, kept // 8)
            tile_bits = error_bits[top : top + rows, left : left + columns]
            found = _survivors(tile_bits, groups, least, height, survivors, keys, places)
            _keep(keys[:found], places[:found], positions[top // rows * tiles + tile])


@njit(cache=True, nogil=True)
def _update(error: Floats, delta: Floats, decay: np.float32, largest: Ints) -> None:
    """error <- decay error + delta in one row, and the largest magnitudes so far of each column."""
    for column in range(error.shape[0]):
        value = np.float32(error[column] * decay + delta[column])
        error[column] = value
        largest[column] = max(largest[column], np.int32(value.view(np.int32) & MAGNITUDE))


@njit(cache=True, nogil=True)
def _threshold(keys: Ints, kept: int, surplus: int) -> np.int32:
    """A number that at least `kept` keys reach, and at most `surplus` more, or else the largest that `kept` reach."""
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
    """Fill keys and places with what reaches `least` in one tile, in order; how many do.

    Everything is written and the count only then raised: a branch would often be mispredicted.
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
def _keep(keys: Ints, places: Ints, positions: NDArray[np.int64]) -> None:
    """The places of the largest keys [k], of equal ones the first."""
    least = _threshold(keys, positions.shape[0], 0)
    room = positions.shape[0] - _reaching(keys, np.int32(least + 1))
    kept = 0
    for index in range(keys.shape[0]):
        is_equal = keys[index] == least
        if keys[index] > least or (is_equal and room > 0):
            positions[kept] = places[index]
            kept += 1
            room -= is_equal
