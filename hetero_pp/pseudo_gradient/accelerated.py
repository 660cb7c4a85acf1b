"""Error feedback, top-k and signs of each chunk in one pass over memory, compiled by numba; bitwise equal to torch's.

The pass reads whole rows of the tensors, in the order of memory. It compares each magnitude with a threshold of its
tile, which is estimated from the tile above, and keeps one bit of each comparison. The values that reach the threshold
are candidates. If too few or far too many do, a new threshold is searched and the tile is compared again. The k
largest candidates are found by a search of their own, while the rows of tiles are still in the cache.

There the pass also subtracts what is sent, with the magnitude that the chunk's own mean gives. The mean of all kept
magnitudes, which the holders of parts of a tensor sum up, only bounds it. So few chunks are subtracted again.

Thresholds are found by counting the values above them, a vector operation. Magnitudes are compared as the bits of
floats, which have the same order and are never NaN. Counters are unsigned, as numba would check for negative indices.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic
from numpy.typing import NDArray
from torch import Tensor

from hetero_pp.pseudo_gradient.chunks import Group, as_matrix
from hetero_pp.pseudo_gradient.quantise import STEPS_PER_OCTAVE, Quantised, SumOver, dequantise_signs, magnitudes_of

MAGNITUDE = np.int32(0x7FFFFFFF)
"""Mask of a float's bits without its sign."""

WORD = 64
"""Comparisons in a word, one a bit."""

USUAL = 4
"""Most candidates of a usual word, which are always written: a branch on their number would often be mispredicted."""

OCTAVE = 1 << 23
"""Difference between the bits of a float and those of its double."""

STEP = OCTAVE // 4
"""Largest step to the next estimate of a threshold."""

Floats = NDArray[np.float32]
Ints = NDArray[np.int32]
Longs = NDArray[np.int64]
Codes = NDArray[np.uint32]
"""Places in a tile whose rows are padded to a power of two: row << shift | column."""
Words = NDArray[np.uint64]


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
    own, added = (group.part(as_matrix(tensor.detach().contiguous())) for tensor in (error, delta))
    _advance(
        own.numpy(),
        own.view(torch.int32).numpy(),
        added.numpy(),
        (chosen.positions.numpy(), chosen.indices.numpy(), chosen.values.numpy()),
        (chosen.sums.numpy(), chosen.subtracted.numpy()),
        (np.float32(decay), subtracts),
        (group.rows, group.columns),
        (group.top * group.stride + group.left, group.stride),
    )
    return chosen


def select_signs(
    error: Tensor,
    delta: Tensor,
    groups: Iterable[Group],
    density: float,
    decay: float,
    sum_over: SumOver | None = None,
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
        _send(
            error.view(-1).numpy(),
            (one.indices.numpy(), one.values.numpy(), one.subtracted.numpy()),
            signs.numpy(),
            sent.numpy(),
        )
    values, signs = (_flat(parts, like) for parts, like in (([one.values for one in found], each), (codes, magnitudes)))
    indices = _flat([one.indices for one in found], torch.empty(0, dtype=torch.int64))
    return tuple(one.positions for one in found), indices, Quantised(values, signs, None, magnitudes, base)


def _flat(parts: list[Tensor], like: Tensor) -> Tensor:
    """Join tensors [count, k] of the type of `like`; does not copy a single one, the usual case."""
    return parts[0].view(-1) if len(parts) == 1 else torch.cat([like[:0], *(part.view(-1) for part in parts)])


# ---- words of 64 comparisons: LLVM vectorises these, which numba cannot express ----


@intrinsic
def _advance_word(typing: Any, error: Any, delta: Any, start: Any, decay: Any, least: Any) -> Any:
    """Update 64 values of a row from `start`; return a word of which of their magnitudes reach `least`."""
    integer, lanes, integers = ir.IntType(32), ir.VectorType(ir.FloatType(), WORD), ir.VectorType(ir.IntType(32), WORD)

    def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        def pointer(place: int) -> Any:
            array = context.make_array(signature.args[place])(context, builder, given[place])
            return builder.bitcast(builder.gep(array.data, [given[2]]), lanes.as_pointer())

        def on_all_lanes(value: Any, vector: Any) -> Any:
            none = ir.Constant(vector, ir.Undefined)
            first = builder.insert_element(none, value, ir.Constant(integer, 0))
            return builder.shuffle_vector(first, none, ir.Constant(integers, [0] * WORD))

        own = pointer(0)
        decayed = builder.fmul(builder.load(own, align=4), on_all_lanes(given[3], lanes))
        value = builder.fadd(decayed, builder.load(pointer(1), align=4))
        builder.store(value, own, align=4)
        keys = builder.and_(builder.bitcast(value, integers), ir.Constant(integers, [int(MAGNITUDE)] * WORD))
        reach = builder.icmp_signed(">=", keys, on_all_lanes(given[4], integers))
        return builder.bitcast(reach, ir.IntType(WORD))

    return types.uint64(error, delta, start, decay, least), generate


@intrinsic
def _ones(typing: Any, word: Any) -> Any:
    """Return the number of ones in a word."""
    return types.uint64(types.uint64), lambda context, builder, signature, given: builder.ctpop(given[0])


@intrinsic
def _first_one(typing: Any, word: Any) -> Any:
    """Return the place of the lowest one in a word; 64 if there is none."""
    is_defined = ir.Constant(ir.IntType(1), 0)
    return types.uint64(types.uint64), lambda context, builder, signature, given: builder.cttz(given[0], is_defined)


# ---- the pass ----


@njit(cache=True, nogil=True)
def _advance(
    error: Floats,
    error_bits: Ints,
    delta: Floats,
    selected: tuple[Longs, Longs, Floats],
    of_chunks: tuple[NDArray[np.float64], Floats],
    how: tuple[np.float32, bool],
    sizes: tuple[int, int],
    layout: tuple[int, int],
) -> None:
    """Update parts [r * rows, c * columns] and select from them.

    `error_bits` shares the memory of `error`. `selected`: positions, indices and values, each [r * c, k]. `of_chunks`:
    sums and subtracted magnitudes [r * c]. `how`: decay, and whether to subtract. `sizes`: rows and columns. `layout`:
    the index of the part's first element, and the distance to that of its second row.
    """
    positions, indices, values = selected
    sums, subtracted = of_chunks
    decay, subtracts = how
    rows, columns = sizes
    first, stride = layout
    tiles, kept, shift = error.shape[1] // columns, positions.shape[1], 0
    while 1 << shift < columns:
        shift += 1
    room = rows * columns + USUAL
    candidates = np.empty((tiles, room), dtype=np.int32), np.empty((tiles, room), dtype=np.uint32)
    found, least, keys = np.zeros(tiles, np.uint64), np.full(tiles, MAGNITUDE, np.int32), np.empty(room, np.int32)
    target, usual, slope = kept + int(3 * np.sqrt(kept)), np.zeros(tiles, dtype=np.int64), np.float64(OCTAVE)
    for top in range(0, error.shape[0], rows):
        found[:] = 0
        for row in range(rows):
            line = error[top + row], error_bits[top + row], delta[top + row]
            _update(line, decay, columns, least, np.uint32(row << shift), candidates, found)
        for tile in range(tiles):
            left, chunk = tile * columns, top // rows * tiles + tile
            own, bits = error[top : top + rows, left : left + columns], error_bits[top : top + rows, left:][:, :columns]
            raw, codes, low, count = candidates[0][tile], candidates[1][tile], np.int64(least[tile]), np.int64(found[tile])
            is_near = kept <= count <= 2 * target
            if not is_near:
                near = low + _step(count - target, slope) if top else np.int64(least[tile - 1])
                low = _search(bits, keys, kept, target, near, slope)
                count = _compare(bits, np.int32(low), shift, raw, codes)
            last = _keep(raw[:count], codes[:count], keys[:count], kept, low, slope)
            if count > kept:
                slope += ((last - low) / (count - kept) - slope) / 8
            usual[tile] += (last - usual[tile]) // (2 if is_near else 1)
            least[tile] = max(usual[tile] + _step(kept - target, slope), 0)
            start = first + top * stride + left
            _look_up(raw, codes, shift, columns, start, stride, positions[chunk], indices[chunk], values[chunk])
            sums[chunk] = _sum(values[chunk])
            if subtracts:
                subtracted[chunk] = _rounded(sums[chunk] / kept)
                _subtract(own, codes, shift, values[chunk], subtracted[chunk])


@njit(cache=True, nogil=True)
def _update(
    line: tuple[Floats, Ints, Floats],
    decay: np.float32,
    columns: int,
    least: Ints,
    first: np.uint32,
    candidates: tuple[Ints, Codes],
    found: NDArray[np.uint64],
) -> None:
    """Update error <- decay error + delta in one row, and append the values that reach `least` of their tile [tiles].

    `line`: the row of the error, its bits, and that of delta. `first`: the code of the row's first place.
    `candidates`: values' bits and codes [tiles, most], of which each tile has `found` [tiles].
    """
    error, bits, delta = line
    whole = columns - columns % WORD
    for tile in range(least.shape[0]):
        left, raw, codes = tile * columns, candidates[0][tile], candidates[1][tile]
        for start in range(0, whole, WORD):
            word = _advance_word(error, delta, left + start, decay, least[tile])
            found[tile] = _append(word, bits, left + start, first + np.uint32(start), raw, codes, found[tile])
        if whole < columns:
            word = np.uint64(0)
            for column in range(whole, columns):
                value = np.float32(error[left + column] * decay + delta[left + column])
                error[left + column] = value
                reaches = np.int32(value.view(np.int32) & MAGNITUDE) >= least[tile]
                word |= np.uint64(reaches) << np.uint64(column - whole)
            found[tile] = _append(word, bits, left + whole, first + np.uint32(whole), raw, codes, found[tile])


@njit(cache=True, nogil=True)
def _append(
    word: np.uint64, bits: Ints, start: int, first: np.uint32, raw: Ints, codes: Codes, found: np.uint64
) -> np.uint64:
    """Append the values of the word's ones to those found; return their new number.

    The word is of the bits from `start`, whose codes begin at `first`.
    """
    ones = _ones(word)
    for index in range(USUAL):
        place = min(_first_one(word), np.uint64(bits.shape[0] - start - 1))
        raw[found + np.uint64(index)] = bits[np.uint64(start) + place]
        codes[found + np.uint64(index)] = first + np.uint32(place)
        word &= word - np.uint64(1)
    for index in range(np.uint64(USUAL), ones):
        place = _first_one(word)
        raw[found + np.uint64(index)] = bits[np.uint64(start) + place]
        codes[found + np.uint64(index)] = first + np.uint32(place)
        word &= word - np.uint64(1)
    return found + ones


@njit(cache=True, nogil=True)
def _search(bits: Ints, keys: Ints, kept: int, target: int, near: np.int64, slope: float) -> np.int64:
    """Search a threshold in a tile from an estimate of it; its magnitudes are written to `keys`."""
    rows, columns = bits.shape
    for row in range(rows):
        line = bits[row]
        for column in range(columns):
            keys[row * columns + column] = line[column] & MAGNITUDE
    return _threshold(keys[: rows * columns], kept, 2 * target - kept, np.int64(0), near, slope)


@njit(cache=True, nogil=True)
def _compare(bits: Ints, least: np.int32, shift: int, raw: Ints, codes: Codes) -> np.int64:
    """Write the values of a tile that reach `least`, and return their number."""
    found = np.uint64(0)
    for row in range(bits.shape[0]):
        line = bits[row]
        for start in range(0, line.shape[0], WORD):
            word = np.uint64(0)
            for column in range(start, min(start + WORD, line.shape[0])):
                word |= np.uint64(np.int32(line[column] & MAGNITUDE) >= least) << np.uint64(column - start)
            found = _append(word, line, start, np.uint32((row << shift) + start), raw, codes, found)
    return np.int64(found)


@njit(cache=True, nogil=True)
def _step(surplus: int, slope: float) -> np.int64:
    """Return the step from a threshold that `surplus` values too many reach, if each takes `slope`."""
    return min(max(np.int64(surplus * slope), -STEP), STEP)


@njit(cache=True, nogil=True)
def _threshold(keys: Ints, kept: int, surplus: int, low: np.int64, near: np.int64, slope: float) -> np.int64:
    """Return a threshold that at least `kept` and at most `kept + surplus` keys reach.

    If there is none, returns the largest threshold that `kept` keys reach. They reach `low`. The search begins at the
    estimate `near`.
    """
    high, middle, tries = np.int64(MAGNITUDE) + 1, near, 0
    while high - low > 1:
        if tries > 6 or not low < middle < high:
            middle = (low + high) // 2
        reached = _reaching(keys, np.int32(middle))
        if reached < kept:
            high = middle
        else:
            low = middle
            if reached <= kept + surplus:
                break
        middle += _step(reached - kept - surplus // 2, slope)
        tries += 1
    return low


@njit(cache=True, nogil=True)
def _reaching(keys: Ints, least: np.int32) -> np.int32:
    count = np.int32(0)
    for index in range(keys.shape[0]):
        count = np.int32(count + (keys[index] >= least))
    return count


@njit(cache=True, nogil=True)
def _keep(raw: Ints, codes: Codes, keys: Ints, kept: int, low: np.int64, slope: float) -> np.int64:
    """Move the k largest candidates, of equal ones the first, to the front; return a threshold that they reach.

    All of them reach `low`. Their magnitudes are written to `keys`.
    """
    found = raw.shape[0]
    for index in range(found):
        keys[index] = raw[index] & MAGNITUDE
    least = _threshold(keys, kept, 0, low, low + _step(found - kept, slope), slope)
    room = kept - _reaching(keys, np.int32(least + 1))
    place = np.uint64(0)
    for index in range(found):
        is_equal = (keys[index] == least) & (room > 0)
        raw[place], codes[place] = raw[index], codes[index]
        place += np.uint64((keys[index] > least) | is_equal)
        room -= is_equal
    return least


@njit(cache=True, nogil=True)
def _look_up(
    raw: Ints,
    codes: Codes,
    shift: int,
    columns: int,
    start: int,
    stride: int,
    positions: Longs,
    indices: Longs,
    values: Floats,
) -> None:
    """Write positions, indices and values [k] of candidates in a tile whose first element has the index `start`."""
    mask = np.uint32((1 << shift) - 1)
    for index in range(positions.shape[0]):
        row, column = np.int64(codes[index] >> np.uint32(shift)), np.int64(codes[index] & mask)
        positions[index] = row * columns + column
        indices[index] = start + row * stride + column
        values[index] = np.int32(raw[index]).view(np.float32)


# ---- signs ----


@njit(cache=True, nogil=True, fastmath={"reassoc"})
def _sum(values: Floats) -> np.float64:
    """Return the sum of magnitudes. In fp64 it is exact in any order unless magnitudes differ by 2^20 and more."""
    total = 0.0
    for index in range(values.shape[0]):
        total += np.float64(abs(values[index]))
    return total


@njit(cache=True, nogil=True)
def _rounded(mean: np.float64) -> np.float32:
    """Return the magnitude that represents a mean, if it is not bounded; 0 for 0."""
    if not mean > 0:
        return np.float32(0)
    return np.float32(2.0 ** (np.rint(np.log2(mean) * STEPS_PER_OCTAVE) / STEPS_PER_OCTAVE))


@njit(cache=True, nogil=True)
def _subtract(tile: Floats, codes: Codes, shift: int, values: Floats, magnitude: np.float32) -> None:
    """Subtract the signed magnitude from a tile's values [k] at these places."""
    columns = np.uint32((1 << shift) - 1)
    for index in range(values.shape[0]):
        value = values[index]
        sent = -magnitude if np.float32(value).view(np.int32) < 0 else magnitude
        tile[codes[index] >> np.uint32(shift), codes[index] & columns] = value - sent


@njit(cache=True, nogil=True)
def _send(flat: Floats, chosen: tuple[Longs, Floats, Floats], codes: NDArray[np.uint8], magnitudes: Floats) -> None:
    """Write the signs of values [chunks, k] and replace the values by signed magnitudes.

    Where another magnitude was subtracted in the pass, the rest is put in `flat` anew. `chosen`: indices, values and
    subtracted magnitudes.
    """
    indices, values, subtracted = chosen
    for chunk in range(values.shape[0]):
        magnitude = magnitudes[chunk]
        if magnitude != subtracted[chunk]:
            for place in range(values.shape[1]):
                value = values[chunk, place]
                sent = -magnitude if np.float32(value).view(np.int32) < 0 else magnitude
                flat[np.uint64(indices[chunk, place])] = value - sent
        for place in range(values.shape[1]):
            is_negative = np.float32(values[chunk, place]).view(np.int32) < 0
            codes[chunk, place] = is_negative
            values[chunk, place] = -magnitude if is_negative else magnitude
