"""Error feedback, top-k and signs of each chunk on a CPU, in one pass over memory that numba compiles; torch's bits.

The pass reads whole rows of the tensors, in the order of memory. It compares each magnitude with a threshold of its
tile, which is estimated from the tiles above. Values that reach it are listed while they are in the first cache. The
k largest of these candidates are kept. If fewer than k or far too many reach the estimate, a threshold is searched in
a copy of the tile. There the pass counts the largest magnitudes of small groups of values, which are fewer.

The pass also subtracts what is sent, with the magnitude that the chunk's own mean gives. The mean of all kept
magnitudes, which the holders of parts of a tensor sum up, only bounds it, so few chunks are subtracted again.

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
from numba import extending, njit, types
from numpy.typing import NDArray
from torch import Tensor

from hetero_pp.pseudo_gradient.quantise import (
    STEPS_PER_OCTAVE,
    Quantised,
    SumOver,
    dequantise_signs,
    magnitudes_of,
)
from hetero_pp.pseudo_gradient.selection import GROUPS_PER_KEPT, Group

MAGNITUDE = np.int32(0x7FFFFFFF)  # mask of a float's bits without its sign
WORD = 64  # comparisons in a word, one a bit

USUAL = 4
"""Most candidates of a usual word, which are always written: a branch on their number would often be mispredicted."""

OCTAVE = 1 << 23
"""Difference between the bits of a float and those of its double: the largest step to the next estimate."""

intrinsic: Any = extending.intrinsic  # its type says that a call passes the context of typing, too

Floats = NDArray[np.float32]
Ints = NDArray[np.int32]
Longs = NDArray[np.int64]
Places = NDArray[np.uint32]  # positions in a chunk


# ---- words of 64 comparisons: vector operations that numba cannot express ----


def _reach(builder: Any, bits: Any, least: Any) -> Any:
    """Return a word with a bit for each lane of `bits`: whether it reaches `least` without its sign."""
    keys = builder.and_(bits, ir.Constant(bits.type, [int(MAGNITUDE)] * WORD))
    return builder.bitcast(builder.icmp_signed(">=", keys, _on_all_lanes(builder, least)), ir.IntType(WORD))


def _on_all_lanes(builder: Any, value: Any) -> Any:
    none, zero = ir.Constant(ir.VectorType(value.type, WORD), ir.Undefined), ir.IntType(32)(0)
    zeros = ir.Constant(ir.VectorType(zero.type, WORD), [0] * WORD)
    return builder.shuffle_vector(builder.insert_element(none, value, zero), none, zeros)


def _lanes(context: Any, builder: Any, signature: Any, given: Any, argument: int, start: int) -> Any:
    """Return the address of WORD elements of an array from an index; both are places in the arguments."""
    array = context.make_array(signature.args[argument])(context, builder, given[argument])
    element = builder.gep(array.data, [given[start]])
    vector = ir.VectorType(context.get_data_type(signature.args[argument].dtype), WORD)
    return builder.bitcast(element, vector.as_pointer())


@intrinsic
def _advance_word(typing: Any, error: Any, delta: Any, start: Any, decay: Any, least: Any) -> Any:
    """Update WORD values of a row from `start`; return a word with a bit for each magnitude that reaches `least`."""

    def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        own, added = (_lanes(context, builder, signature, given, place, 2) for place in (0, 1))
        decayed = builder.fmul(builder.load(own, align=4), _on_all_lanes(builder, given[3]))
        values = builder.fadd(decayed, builder.load(added, align=4))
        builder.store(values, own, align=4)
        return _reach(builder, builder.bitcast(values, ir.VectorType(ir.IntType(32), WORD)), given[4])

    return types.uint64(error, delta, start, decay, least), generate


@intrinsic
def _compare_word(typing: Any, bits: Any, start: Any, least: Any) -> Any:
    """Return a word with a bit for each magnitude, of WORD values from `start`, that reaches `least`."""

    def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        return _reach(builder, builder.load(_lanes(context, builder, signature, given, 0, 1), align=4), given[2])

    return types.uint64(bits, start, least), generate


@intrinsic
def _ones(typing: Any, word: Any) -> Any:
    """Return the number of ones in a word."""
    return types.uint64(types.uint64), lambda context, builder, signature, given: builder.ctpop(given[0])


@intrinsic
def _first_one(typing: Any, word: Any) -> Any:
    """Return the place of the lowest one in a word; WORD if there is none."""
    is_defined = ir.Constant(ir.IntType(1), 0)
    return types.uint64(types.uint64), lambda context, builder, signature, given: builder.cttz(given[0], is_defined)


# ---- the pass ----


@njit(cache=True, nogil=True)
def advance_group(
    tensors: tuple[Floats, Ints, Floats],
    selected: tuple[Longs, Longs, Floats],
    of_chunks: tuple[NDArray[np.float64], Floats],
    how: tuple[np.float32, bool],
    sizes: tuple[int, int],
    area: tuple[int, int, int, int, int],
) -> None:
    """Update a group of chunks of the error and select from it.

    `tensors`, flat: the error, its bits, which share its memory, and delta. `selected`: positions, indices and values,
    each [chunks, k]. `of_chunks`: sums and subtracted magnitudes [chunks]. `how`: decay, and whether to subtract.
    `sizes`: rows and columns of a chunk. `area`: top, bottom, left, right and stride of the group.
    """
    bits, (rows, columns), (highest, bottom, leftmost, right, stride) = tensors[1], sizes, area
    tiles, kept, size = (right - leftmost) // columns, selected[0].shape[1], rows * columns
    raw, places = np.empty((tiles, size + USUAL), dtype=np.int32), np.empty((tiles, size + USUAL), dtype=np.uint32)
    found, least, scratch = np.zeros(tiles, np.uint64), np.full(tiles, MAGNITUDE, np.int32), np.empty(size, np.int32)
    usual, slope, spread, most = np.zeros(tiles, np.int64), float(OCTAVE), 0.0, 2 * kept + 256
    chunk = 0
    for top in range(highest, bottom, rows):
        found[:] = 0
        for row in range(rows):
            start = (top + row) * stride + leftmost
            _update(tensors, (start, row * columns, columns), how[0], least, (raw, places), found)
        for tile in range(tiles):
            start, low, count = top * stride + leftmost + tile * columns, np.int64(least[tile]), found[tile]
            if count < kept or count > most:
                near, listed = usual[tile if top > highest else tile - 1], (raw[tile], places[tile])
                low, count = _again(bits[start:], (rows, columns, stride), scratch, kept, (near, slope), listed)
            last = _keep(raw[tile][:count], places[tile][:count], kept, low, slope)
            if count > kept:
                slope += ((last - low) / (np.int64(count) - kept) - slope) / 8
            if top > highest:
                spread += (abs(last - usual[tile]) - spread) / 8
            usual[tile] += (last - usual[tile]) // (2 if top > highest else 1)
            is_known = 2 * spread < (most - kept) / 2 * slope
            margin = max(3 * np.sqrt(kept) * slope, 2 * spread)
            least[tile] = max(usual[tile] - np.int64(margin), 0) if is_known else np.int64(MAGNITUDE)
            kept_here, layout = (raw[tile], places[tile]), (start, stride)
            _take(tensors[0], kept_here, columns, layout, selected, of_chunks, chunk, how[1])
            chunk += 1


@njit(cache=True, nogil=True)
def _update(
    tensors: tuple[Floats, Ints, Floats],
    where: tuple[int, int, int],
    decay: np.float32,
    least: Ints,
    listed: tuple[Ints, Places],
    found: NDArray[np.uint64],
) -> None:
    """Update error <- decay error + delta in one row, and append the values that reach `least` of their tile [tiles].

    `tensors`: the error, its bits and delta. `where`: the row's index in them, the place of its first value in its
    tile, and the columns of a tile. Each tile has `found` [tiles] values in `listed`: bits and places [tiles, most].
    """
    (error, bits, delta), (begin, first, columns), (raw, places) = tensors, where, listed
    whole = columns - columns % WORD
    for tile in range(least.shape[0]):
        left = begin + tile * columns
        for start in range(0, whole, WORD):
            word = _advance_word(error, delta, left + start, decay, least[tile])
            found[tile] = _append(word, bits, left + start, first + start, raw[tile], places[tile], found[tile])
        if whole < columns:
            word = np.uint64(0)
            for column in range(whole, columns):
                value = np.float32(error[left + column] * decay + delta[left + column])
                error[left + column] = value
                reaches = np.int32(value.view(np.int32) & MAGNITUDE) >= least[tile]
                word |= np.uint64(reaches) << np.uint64(column - whole)
            found[tile] = _append(word, bits, left + whole, first + whole, raw[tile], places[tile], found[tile])


@njit(cache=True, nogil=True)
def _append(
    word: np.uint64, bits: Ints, start: int, first: int, raw: Ints, places: Places, found: np.uint64
) -> np.uint64:
    """Append the values of the word's ones to those found; return their new number.

    The word compares the bits from `start` on. The place of the first of them is `first`.
    """
    ones = _ones(word)
    for index in range(USUAL):
        place = _first_one(word) & np.uint64(WORD - 1)
        raw[found + np.uint64(index)] = bits[np.uint64(start) + place]
        places[found + np.uint64(index)] = np.uint32(first) + np.uint32(place)
        word &= word - np.uint64(1)
    for index in range(np.uint64(USUAL), ones):
        place = _first_one(word)
        raw[found + np.uint64(index)] = bits[np.uint64(start) + place]
        places[found + np.uint64(index)] = np.uint32(first) + np.uint32(place)
        word &= word - np.uint64(1)
    return found + ones


@njit(cache=True, nogil=True)
def _again(
    bits: Ints,
    sizes: tuple[int, int, int],
    scratch: Ints,
    kept: int,
    estimate: tuple[np.int64, float],
    listed: tuple[Ints, Places],
) -> tuple[np.int64, np.uint64]:
    """Search a threshold in a tile from an estimate of it, and list the values that reach it.

    `sizes`: rows and columns of the tile, which begins with `bits`, and the distance of its rows. `estimate`: the
    threshold, and its change for each value more. The values' bits and places are `listed`.

    Returns the threshold and the number of values. A threshold that k groups of values reach is reached by k values.
    """
    (rows, columns, stride), (near, slope), (raw, places) = sizes, estimate, listed
    for row in range(rows):
        line, copy = bits[row * stride : row * stride + columns], scratch[row * columns : (row + 1) * columns]
        for column in range(columns):
            copy[column] = line[column]
    size = rows * columns
    groups = np.zeros(-(-size // max(1, size // (GROUPS_PER_KEPT * kept))), dtype=np.int32)
    for first in range(0, size, groups.shape[0]):
        _raise(groups, scratch[first : first + groups.shape[0]])
    least, found = _threshold(groups, kept, kept // 8, np.int64(0), near, slope), np.uint64(0)
    for start in range(0, size - WORD + 1, WORD):
        word = _compare_word(scratch, start, np.int32(least))
        found = _append(word, scratch, start, start, raw, places, found)
    for place in range(size - size % WORD, size):
        raw[found], places[found] = scratch[place], place
        found += np.uint64((scratch[place] & MAGNITUDE) >= least)
    return least, found


@njit(cache=True, nogil=True)
def _raise(groups: Ints, bits: Ints) -> None:
    """Replace keys of groups by larger magnitudes."""
    for index in range(bits.shape[0]):
        groups[index] = max(groups[index], np.int32(bits[index] & MAGNITUDE))


@njit(cache=True, nogil=True)
def _threshold(bits: Ints, kept: int, surplus: int, low: np.int64, near: np.int64, slope: float) -> np.int64:
    """Return a threshold that at least `kept` and at most `kept + surplus` magnitudes reach.

    If there is none, returns the largest threshold that `kept` of them reach. They reach `low`. The search begins at
    the estimate `near`; `slope` estimates the distance between neighbouring magnitudes.
    """
    high, middle, tries = np.int64(MAGNITUDE) + 1, near, 0
    while high - low > 1:
        if tries > 6 or not low < middle < high:
            middle = (low + high) // 2
        reached = np.int64(_reaching(bits, np.int32(middle)))
        if reached < kept:
            high = middle
        else:
            low = middle
            if reached <= kept + surplus:
                break
        middle += np.int64(min(max((reached - kept - surplus // 2) * slope, -OCTAVE), OCTAVE))
        slope, tries = slope * 1.5, tries + 1
    return low


@njit(cache=True, nogil=True)
def _reaching(bits: Ints, least: np.int32) -> np.int32:
    count = np.int32(0)
    for index in range(bits.shape[0]):
        count = np.int32(count + (np.int32(bits[index] & MAGNITUDE) >= least))
    return count


@njit(cache=True, nogil=True)
def _keep(raw: Ints, places: Places, kept: int, low: np.int64, slope: float) -> np.int64:
    """Move the k largest candidates, of equal ones the first, to the front; return a threshold that they reach.

    All of them reach `low`.
    """
    surplus = raw.shape[0] - kept
    least = _threshold(raw, kept, 0, low, low + np.int64(surplus * slope), slope) if surplus else low
    room, place = kept - _reaching(raw, np.int32(least + 1)), np.uint64(0)
    for index in range(raw.shape[0]):
        key = raw[index] & MAGNITUDE
        is_equal = (key == least) & (room > 0)
        raw[place], places[place] = raw[index], places[index]
        place += np.uint64((key > least) | is_equal)
        room -= is_equal
    return least


@njit(cache=True, nogil=True)
def _take(
    flat: Floats,
    listed: tuple[Ints, Places],
    columns: int,
    layout: tuple[int, int],
    selected: tuple[Longs, Longs, Floats],
    of_chunks: tuple[NDArray[np.float64], Floats],
    chunk: int,
    subtracts: bool,
) -> None:
    """Write what is selected in a chunk, the first k of the candidates `listed`, and subtract it.

    `layout`: the index of the chunk's first element, and the distance to that of its second row.
    """
    positions, indices, values = selected[0][chunk], selected[1][chunk], selected[2][chunk]
    raw, places = listed
    shift = 0
    while 1 << shift < columns:
        shift += 1
    if columns == 1 << shift:
        for index in range(positions.shape[0]):
            row = np.int64(places[index] >> np.uint32(shift))
            indices[index] = layout[0] + row * (layout[1] - columns) + np.int64(places[index])
    else:
        for index in range(positions.shape[0]):
            row = np.int64(places[index] // np.uint32(columns))
            indices[index] = layout[0] + row * (layout[1] - columns) + np.int64(places[index])
    for index in range(positions.shape[0]):
        positions[index], values[index] = places[index], np.int32(raw[index]).view(np.float32)
    of_chunks[0][chunk] = _sum(values)
    if subtracts:
        of_chunks[1][chunk] = _rounded(of_chunks[0][chunk] / positions.shape[0])
        _subtract(flat, indices, values, of_chunks[1][chunk])


# ---- signs ----


@njit(cache=True, nogil=True, fastmath={"reassoc"})
def _sum(values: Floats) -> np.float64:
    """Return the sum of magnitudes. In fp64 it is exact in any order unless magnitudes differ by 2^20 and more."""
    total = 0.0
    for index in range(values.shape[0]):
        total += np.float64(abs(values[index]))
    return np.float64(total)


@njit(cache=True, nogil=True)
def _rounded(mean: np.float64) -> np.float32:
    """Return the magnitude that represents a mean, if it is not bounded; 0 for 0."""
    if not mean > 0:
        return np.float32(0)
    return np.float32(2.0 ** (np.rint(np.log2(mean) * STEPS_PER_OCTAVE) / STEPS_PER_OCTAVE))


@njit(cache=True, nogil=True)
def _subtract(flat: Floats, indices: Longs, values: Floats, magnitude: np.float32) -> None:
    """Put the values [k] less the signed magnitude in `flat` at the indices."""
    for index in range(values.shape[0]):
        sent = -magnitude if np.float32(values[index]).view(np.int32) < 0 else magnitude
        flat[np.uint64(indices[index])] = values[index] - sent


@njit(cache=True, nogil=True)
def send_signs(
    flat: Floats, chosen: tuple[Longs, Floats, Floats], codes: NDArray[np.uint8], magnitudes: Floats
) -> None:
    """Write the signs of values [chunks, k] and replace the values by signed magnitudes.

    Chunks from which the pass subtracted another magnitude are subtracted again. `chosen`: indices, values and
    subtracted magnitudes.
    """
    indices, values, subtracted = chosen
    for chunk in range(values.shape[0]):
        magnitude = magnitudes[chunk]
        if magnitude != subtracted[chunk]:
            _subtract(flat, indices[chunk], values[chunk], magnitude)
        for place in range(values.shape[1]):
            is_negative = np.float32(values[chunk, place]).view(np.int32) < 0
            codes[chunk, place] = is_negative
            values[chunk, place] = -magnitude if is_negative else magnitude


# ---- for tensors of torch ----


@dataclass(frozen=True)
class Chosen:
    """Kept values of a group of chunks [count, k], and what was subtracted of them."""

    positions: Tensor  # positions in the chunks, ascending
    indices: Tensor  # indices into the flattened tensor
    values: Tensor  # values before the subtraction
    sums: Tensor  # sums of the magnitudes of chunks [count], fp64
    subtracted: Tensor  # magnitudes that were subtracted [count], fp32


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
