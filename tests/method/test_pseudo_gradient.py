"""From a parameter difference to the sent values: each step against a slow implementation."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hetero_pp.pseudo_gradient.compression import CompressionSettings
from hetero_pp.pseudo_gradient.contribution import BlobAddress, ReceivedBlob, encode_blob, kept_values
from hetero_pp.pseudo_gradient.error_feedback import Selection, give_back, select
from hetero_pp.pseudo_gradient.quantise import dequantise, quantise, quantise_signs, signs_by_numpy, signs_by_torch
from hetero_pp.pseudo_gradient.selection import (
    Group,
    as_matrix,
    generator_of,
    groups_of,
    random_positions,
    top_k_positions,
)

unhurried = settings(deadline=None, max_examples=60)
SIDES = st.integers(1, 20)
MATRICES = st.tuples(SIDES, SIDES)
VECTORS = st.tuples(st.integers(1, 90))
TILES = st.tuples(st.integers(1, 9), st.integers(1, 9))


def _randn(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# ---- chunks ----


@unhurried
@given(MATRICES | VECTORS, TILES)
def test_chunks_cover_every_element_once(shape: tuple[int, ...], tile: tuple[int, int]) -> None:
    tensor = torch.arange(math.prod(shape)).view(shape)
    groups = list(groups_of(shape, tile))
    assert len(groups) <= (4 if len(shape) == 2 else 1)
    seen = []
    for group in groups:
        chunks = group.gather(as_matrix(tensor))
        assert chunks.shape == (group.count, group.size)
        everywhere = torch.arange(group.size).expand(group.count, -1)
        assert torch.equal(chunks, group.flat_indices(everywhere))  # the values are the flat indices
        seen += chunks.flatten().tolist()
    assert sorted(seen) == list(range(math.prod(shape)))


@unhurried
@given(MATRICES, TILES)
def test_a_chunk_is_a_tile(shape: tuple[int, int], tile: tuple[int, int]) -> None:
    tensor = torch.arange(math.prod(shape)).view(shape)
    expected = {
        tuple(tensor[top : top + tile[0], left : left + tile[1]].flatten().tolist())
        for top in range(0, shape[0], tile[0])
        for left in range(0, shape[1], tile[1])
    }
    found = [tuple(chunk) for group in groups_of(shape, tile) for chunk in group.gather(tensor).tolist()]
    assert len(found) == len(expected) and set(found) == expected


@pytest.mark.parametrize(
    ("size", "density", "kept"),
    [
        *((4096, 1 / 32, 128), (7, 1.0, 7)),  # whole numbers
        *((33, 1 / 32, 1), (47, 1 / 32, 1), (4099, 1 / 32, 128), (5, 0.25, 1)),  # less than a half beyond one
        *((49, 1 / 32, 2), (63, 1 / 32, 2), (11, 0.25, 3)),  # more than a half
        *((48, 1 / 32, 2), (80, 1 / 32, 3), (112, 1 / 32, 4), (10, 0.25, 3), (14, 0.25, 4)),  # a half beyond 1, 2, 3
        *((24, 1 / 32, 1), (16, 1 / 32, 1), (15, 1 / 32, 1), (1, 1 / 32, 1)),  # less than one
    ],
)
def test_partial_tiles_keep_the_density(size: int, density: float, kept: int) -> None:
    """max(1, floor(density n + 1/2)): rounded to the nearest, a half up, and at least one value."""
    assert kept == max(1, int(Fraction(density) * size + Fraction(1, 2)))
    assert Group(0, 1, 0, size, 1, size, size).kept(density) == kept


# ---- top-k ----


def _top_k_by_sorting(row: list[float], kept: int) -> list[int]:
    return sorted(sorted(range(len(row)), key=lambda index: (-abs(row[index]), index))[:kept])


@unhurried
@given(
    st.integers(1, 12).flatmap(
        lambda size: st.tuples(
            st.lists(
                st.lists(st.sampled_from([-2.0, -1.0, -0.0, 0.0, 1.0, 2.0]), min_size=size, max_size=size), min_size=1
            ),
            st.integers(1, size),
        )
    )
)
def test_top_k_with_ties(rows_and_kept: tuple[list[list[float]], int]) -> None:
    rows, kept = rows_and_kept
    found = top_k_positions(torch.tensor(rows), kept)
    assert found.tolist() == [_top_k_by_sorting(row, kept) for row in rows]


# ---- quantiser ----


def _quantise_plainly(values: Tensor, width: int) -> tuple[list[int], list[float]]:
    numbers = values.double().numpy()
    centre, deviation, count = numbers.mean(), numbers.std(), 2**width
    scale = 6 * deviation / count
    codes = [min(max(round((x - centre) / scale + count / 2), 0), count - 1) for x in numbers.tolist()]
    members = [
        [x for x, code in zip(numbers.tolist(), codes, strict=True) if code == bucket] for bucket in range(count)
    ]
    return codes, [sum(bucket) / len(bucket) if bucket else 0.0 for bucket in members]


@pytest.mark.parametrize("width", [1, 2, 3, 4])
@pytest.mark.parametrize("seed", range(3))
def test_the_quantiser_is_the_deployed_one(width: int, seed: int) -> None:
    values = _randn((300,), seed) * 10.0 ** (-seed) + seed
    codes, levels = quantise(values, width)
    expected_codes, expected_levels = _quantise_plainly(values, width)
    assert codes.tolist() == expected_codes
    assert levels.tolist() == pytest.approx(expected_levels, rel=1e-6, abs=1e-9)
    assert levels.dtype == torch.float32 and len(levels) == 2**width
    assert dequantise(codes, levels).tolist() == [levels[code].item() for code in expected_codes]


def test_values_far_out_fall_into_the_last_buckets() -> None:
    values = torch.cat([torch.zeros(998), torch.tensor([-1.0, 1.0])])
    codes, levels = quantise(values, 2)
    assert codes.tolist() == [2] * 998 + [0, 3]
    assert levels.tolist() == [-1.0, 0.0, 0.0, 1.0]


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("value", [0.0, 0.5, -3.25, 1e-30])
def test_a_constant_is_sent_as_it_is(width: int, value: float) -> None:
    values = torch.full((50,), value)
    codes, levels = quantise(values, width)
    assert torch.equal(dequantise(codes, levels), values)
    assert torch.isfinite(levels).all()


# ---- error feedback ----


@pytest.mark.parametrize(("quantiser", "width"), [("levels", 1), ("levels", 2), ("levels", 32), ("signs", 1)])
@pytest.mark.parametrize("shape", [(20, 13), (33,), (8, 8)])
def test_error_feedback_loses_nothing(quantiser: str, width: int, shape: tuple[int, ...]) -> None:
    """Kept and sent values add up to beta e + Delta, round after round."""
    compression = CompressionSettings(
        density=1 / 8, tile=(8, 8), quantiser=quantiser, value_bits=width, error_feedback_decay=0.9
    )
    error = torch.zeros(shape)
    for round_ in range(5):
        delta = _randn(shape, round_)
        before = error.double()
        sent = torch.zeros(shape, dtype=torch.float64)
        selection = select(error, delta, compression)
        where = _flat_indices(shape, selection, compression)
        sent.view(-1)[where] = selection.values.double()
        torch.testing.assert_close(error.double() + sent, 0.9 * before + delta.double(), atol=1e-6, rtol=1e-6)
        assert len(where) == len(set(where.tolist())) == selection.kept_values == kept_values(shape, compression)
        assert error.abs().max() > 0.1  # some values were kept


def _flat_indices(shape: tuple[int, ...], selection: Selection, compression: CompressionSettings) -> Tensor:
    groups = groups_of(shape, compression.tile)
    return torch.cat([g.flat_indices(p).flatten() for g, p in zip(groups, selection.positions, strict=True)])


def test_selection_is_of_the_error_and_not_of_the_difference() -> None:
    compression = CompressionSettings(density=1 / 4, value_bits=32, error_feedback_decay=0.5)
    error = torch.tensor([8.0, 0.0, 0.0, -2.0])
    selection = select(error, torch.tensor([0.0, 3.0, 0.0, 0.5]), compression)
    assert selection.positions[0].tolist() == [[0]] and selection.values.tolist() == [4.0]
    assert error.tolist() == [0.0, 3.0, 0.0, -0.5]


def test_what_is_subtracted_is_the_quantised_value() -> None:
    compression = CompressionSettings(density=1 / 4, value_bits=2)
    error, delta = torch.zeros(64), _randn((64,))
    selection = select(error, delta, compression)
    where = _flat_indices((64,), selection, compression)
    assert selection.quantised.codes is not None and selection.quantised.levels is not None
    assert torch.equal(selection.values, selection.quantised.levels[selection.quantised.codes.long()])
    torch.testing.assert_close(error[where], delta[where] - selection.values, atol=0, rtol=0)
    assert (error[where] != 0).any()


@pytest.mark.parametrize("share", [1.0, 0.5, 0.0])
@pytest.mark.parametrize("bits", [1, 2, 32])
def test_what_receivers_decode_goes_back(bits: int, share: float) -> None:
    """For the whole tensor and for parts of its rows, the result is e + r D. Before D was taken out, it was e + D."""
    shape = (20, 13)
    compression = CompressionSettings.model_validate({"density": 1 / 4, "tile": (8, 8), "value_bits": bits})
    error, delta = _randn(shape, 1), _randn(shape, 2)
    before = error.double() * compression.error_feedback_decay + delta.double()
    selection = select(error, delta, compression)
    kept, address = error.double(), BlobAddress("run", 3, "home", "block")
    data = encode_blob(address, [("x", shape, selection)], compression)
    sent = ReceivedBlob(data, address, {"x": shape}, compression).tensor("x")
    parts = error[:8].clone(), error[8:].clone()
    for part, start, stop in zip(parts, (0, 8), (8, 20), strict=True):
        of_part = sent.part(start * 13, stop * 13)
        give_back(part, of_part.indices, of_part.values, share)
    give_back(error, sent.indices, sent.values, share)
    torch.testing.assert_close(error.double(), share * before + (1 - share) * kept, atol=1e-6, rtol=1e-6)
    assert torch.equal(torch.cat(parts), error)
    assert (before - kept).abs().max() > 0.5  # some values were taken out


# ---- signs, random-k ----


@unhurried
@given(st.lists(st.integers(1, 6), min_size=1, max_size=8), st.integers(-30, 30), st.integers(0, 99))
def test_signs_are_the_signs_and_magnitudes_the_chunks_means(kept: list[int], exponent: int, seed: int) -> None:
    """Magnitudes agree within half a sixteenth of an octave, if a chunk is within 8 octaves of the mean."""
    values = (_randn((sum(kept),), seed).abs() + 0.5) * _randn((sum(kept),), seed + 1).sign() * 2.0**exponent
    quantised = quantise_signs(values, [(1, each) for each in kept])
    assert torch.equal(quantised.values.sign(), values.sign())
    for ours, theirs in zip(quantised.values.split(kept), values.split(kept), strict=True):
        assert ours.abs().unique().numel() == 1
        assert abs(math.log2(ours[0].abs() / theirs.abs().mean())) <= 1 / 32 + 1e-4


@pytest.mark.parametrize("kept", [[(8, 128)], [(3, 5), (1, 7), (2, 9)], [(0, 4)], []], ids=str)
def test_numpy_and_torch_decode_signs_to_the_same_bits(kept: list[tuple[int, int]]) -> None:
    """CPUs use numpy, and other devices torch."""
    generator = torch.Generator().manual_seed(1)
    count, chunks = sum(number * each for number, each in kept), sum(number for number, _ in kept)
    codes = torch.randint(0, 2, (count,), generator=generator, dtype=torch.uint8)
    magnitudes = torch.randint(0, 256, (chunks,), generator=generator, dtype=torch.uint8)
    ours, theirs = (decode(codes, magnitudes, 3, kept) for decode in (signs_by_numpy, signs_by_torch))
    assert ours.view(torch.int32).equal(theirs.view(torch.int32))


def test_a_chunk_of_zeros_stays_zeros() -> None:
    quantised = quantise_signs(torch.tensor([0.0, 0.0, 3.0, -3.0]), [(2, 2)])
    assert quantised.values[:2].tolist() == [0.0, 0.0] and (quantised.values[2:].abs() > 2.9).all()
    assert quantise_signs(torch.zeros(4), [(2, 2)]).values.tolist() == [0.0] * 4


def test_signs_in_two_bits_are_refused() -> None:
    with pytest.raises(ValueError, match="found value_bits 2 with `quantiser: signs`, expected 1 or `levels`"):
        CompressionSettings(quantiser="signs", value_bits=2)


@unhurried
@given(st.integers(1, 5), st.integers(1, 40), st.data())
def test_random_k_keeps_k_of_each_chunk_and_the_same_again(chunks: int, size: int, data: st.DataObject) -> None:
    kept = data.draw(st.integers(1, size))
    positions, again, other = (
        random_positions(chunks, size, kept, generator_of("run", round_, "home", "x")) for round_ in (1, 1, 2)
    )
    assert positions.shape == (chunks, kept) and torch.equal(positions, again)
    assert (positions[:, 1:] > positions[:, :-1]).all() and positions.min() >= 0 and positions.max() < size
    if kept < size and chunks * size > 60:
        assert not torch.equal(positions, other)


def test_random_k_is_uniform() -> None:
    positions = random_positions(4000, 10, 3, torch.Generator().manual_seed(0))
    share = positions.flatten().bincount(minlength=10) / 4000
    assert (share - 0.3).abs().max() < 0.03
