"""From a parameter difference to bytes and back, each step against a slow restatement."""

from __future__ import annotations

import hashlib
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hetero_pp import bits
from hetero_pp.errors import MalformedContribution
from hetero_pp.pseudo_gradient.chunks import Group, as_matrix, groups_of
from hetero_pp.pseudo_gradient.contribution import (
    BlobAddress,
    DecodedTensor,
    blob_bytes,
    contribution_digest,
    decode_blob,
    encode_blob,
    entry_of,
    kept_values,
    payload_bytes,
)
from hetero_pp.pseudo_gradient.error_feedback import CompressionSettings, Selection, select
from hetero_pp.pseudo_gradient.quantise import dequantise, quantise
from hetero_pp.pseudo_gradient.top_k import top_k_positions
from hetero_pp.rpc.messages_pb2 import Blob

unhurried = settings(deadline=None, max_examples=60)
SIDES = st.integers(1, 20)
MATRICES = st.tuples(SIDES, SIDES)
VECTORS = st.tuples(st.integers(1, 90))
TILES = st.tuples(st.integers(1, 9), st.integers(1, 9))
DENSITIES = st.floats(0.001, 1.0)


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


def test_a_vector_is_one_chunk() -> None:
    (group,) = groups_of((100,), (4, 4))
    assert (group.count, group.size) == (1, 100)


@pytest.mark.parametrize(
    ("size", "density", "kept"),
    [(4096, 1 / 32, 128), (24, 1 / 32, 1), (16, 1 / 32, 1), (1, 1 / 32, 1), (48, 1 / 32, 2), (10, 0.25, 3), (7, 1, 7)],
)
def test_partial_tiles_keep_the_density(size: int, density: float, kept: int) -> None:
    """max(1, floor(density n + 1/2)): a half is rounded up, and nothing is kept out altogether."""
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


@pytest.mark.parametrize("kept", [1, 5, 127, 128])
def test_top_k_without_ties(kept: int) -> None:
    chunks = _randn((7, 128))
    assert top_k_positions(chunks, kept).tolist() == [_top_k_by_sorting(row, kept) for row in chunks.tolist()]


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


@pytest.mark.parametrize("width", [1, 2, 3, 4, 32])
@pytest.mark.parametrize("shape", [(20, 13), (33,), (8, 8)])
def test_error_feedback_loses_nothing(width: int, shape: tuple[int, ...]) -> None:
    """What is kept and what is sent add up to beta e + Delta, round after round."""
    compression = CompressionSettings(density=1 / 8, tile=(8, 8), value_bits=width, error_feedback_decay=0.9)
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
        assert error.abs().max() > 0.1  # something was kept


def _flat_indices(shape: tuple[int, ...], selection: Selection, compression: CompressionSettings) -> Tensor:
    groups = groups_of(shape, compression.tile)
    return torch.cat([g.flat_indices(p).flatten() for g, p in zip(groups, selection.positions, strict=True)])


def test_selection_is_of_the_error_and_not_of_the_difference() -> None:
    compression = CompressionSettings(density=1 / 4, value_bits=32, error_feedback_decay=0.5)
    error = torch.tensor([8.0, 0.0, 0.0, -2.0])
    selection = select(error, torch.tensor([0.0, 3.0, 0.0, 0.5]), compression)
    assert selection.positions[0].tolist() == [[0]] and selection.values.tolist() == [4.0]
    assert error.tolist() == [0.0, 3.0, 0.0, -0.5]


def test_32_bits_send_exact_values_and_leave_zeros() -> None:
    compression = CompressionSettings(density=1 / 4, tile=(8, 8), value_bits=32)
    error, delta = torch.zeros(16, 24), _randn((16, 24))
    selection = select(error, delta, compression)
    where = _flat_indices((16, 24), selection, compression)
    assert selection.codes is None and selection.levels is None
    assert torch.equal(selection.values, delta.view(-1)[where])
    assert (error.view(-1)[where] == 0).all()
    rest = torch.ones(16 * 24, dtype=torch.bool).index_fill(0, where, False)
    assert torch.equal(error.view(-1)[rest], delta.view(-1)[rest])


def test_what_is_subtracted_is_the_quantised_value() -> None:
    compression = CompressionSettings(density=1 / 4, value_bits=2)
    error, delta = torch.zeros(64), _randn((64,))
    selection = select(error, delta, compression)
    where = _flat_indices((64,), selection, compression)
    assert selection.codes is not None and selection.levels is not None
    assert torch.equal(selection.values, selection.levels[selection.codes.long()])
    torch.testing.assert_close(error[where], delta[where] - selection.values, atol=0, rtol=0)
    assert (error[where] != 0).any()


# ---- blobs ----

ADDRESS = BlobAddress("run", 3, "home", "layers.1")
SHAPES: dict[str, tuple[int, ...]] = {"layers.1.a": (20, 13), "layers.1.b": (33,), "layers.1.c": (16, 16)}


def _compression(width: int = 2, density: float = 1 / 8) -> CompressionSettings:
    return CompressionSettings(density=density, tile=(8, 8), value_bits=width)


def _selections(
    compression: CompressionSettings, shapes: dict[str, tuple[int, ...]] = SHAPES
) -> dict[str, tuple[tuple[int, ...], Selection]]:
    return {
        name: (shape, select(torch.zeros(shape), _randn(shape, seed), compression))
        for seed, (name, shape) in enumerate(shapes.items())
    }


@pytest.mark.parametrize("density", [1 / 8, 1.0])
@pytest.mark.parametrize("width", [1, 2, 3, 4, 32])
def test_a_blob_comes_back_to_the_bit(width: int, density: float) -> None:
    compression = _compression(width, density)
    selections = _selections(compression)
    decoded = decode_blob(encode_blob(ADDRESS, selections, compression), ADDRESS, SHAPES, compression)
    assert decoded.keys() == SHAPES.keys()
    for name, (shape, selection) in selections.items():
        assert torch.equal(decoded[name].indices, _flat_indices(shape, selection, compression))
        assert torch.equal(decoded[name].values, selection.values)


@unhurried
@given(MATRICES | VECTORS, TILES, DENSITIES, st.sampled_from([1, 2, 3, 4, 32]))
def test_any_shape_comes_back_and_has_the_size_foretold(
    shape: tuple[int, ...], tile: tuple[int, int], density: float, width: int
) -> None:
    compression = CompressionSettings(density=density, tile=tile, value_bits=width)
    selections = _selections(compression, {"x": shape})
    data = encode_blob(ADDRESS, selections, compression)
    selection = selections["x"][1]
    decoded = decode_blob(data, ADDRESS, {"x": shape}, compression)["x"]
    assert torch.equal(decoded.values, selection.values)
    assert torch.equal(decoded.indices, _flat_indices(shape, selection, compression))
    payload = Blob.FromString(data).tensors[0]
    assert payload_bytes(shape, compression) == (len(payload.positions), len(payload.codes))
    assert kept_values(shape, compression) == selection.kept_values
    assert blob_bytes(ADDRESS, {"x": shape}, compression) == len(data)


def test_sizes_by_hand() -> None:
    """64 x 64 at 1/32: 128 positions of 12 bits, 128 codes of 2 bits."""
    assert payload_bytes((64, 64), CompressionSettings()) == (192, 32)
    # An edge of 32 columns more: one tile of 64 x 32, 64 positions of 11 bits.
    assert payload_bytes((64, 96), CompressionSettings()) == (192 + 88, 48)
    assert payload_bytes((64, 64), CompressionSettings(value_bits=32)) == (192, 512)
    assert blob_bytes(ADDRESS, SHAPES, _compression()) == len(
        encode_blob(ADDRESS, _selections(_compression()), _compression())
    )


def test_a_dense_tensor_sends_no_positions() -> None:
    assert payload_bytes((20, 13), CompressionSettings(density=1.0, value_bits=32)) == (0, 20 * 13 * 4)
    # Of a chunk so small that its one kept value is all of it, neither: the last row of one column.
    assert payload_bytes((9, 1), CompressionSettings(density=1 / 8, tile=(8, 8), value_bits=2)) == (1, 1)


def test_the_same_selection_gives_the_same_bytes() -> None:
    compression = _compression()
    selections = _selections(compression)
    backwards = dict(reversed(selections.items()))
    assert encode_blob(ADDRESS, selections, compression) == encode_blob(ADDRESS, backwards, compression)


def _check(decoded: dict[str, DecodedTensor], shapes: dict[str, tuple[int, ...]]) -> None:
    assert decoded.keys() == shapes.keys()
    for name, shape in shapes.items():
        indices, values = decoded[name].indices, decoded[name].values
        assert values.dtype == torch.float32 and torch.isfinite(values).all()
        assert len(indices) == len(values) == len(indices.unique()) == kept_values(shape, _compression())
        assert indices.min() >= 0 and indices.max() < math.prod(shape)


def _decodes_or_is_refused(data: bytes, width: int) -> None:
    try:
        decoded = decode_blob(data, ADDRESS, SHAPES, _compression(width))
    except MalformedContribution:
        return
    _check(decoded, SHAPES)


HONEST = {width: encode_blob(ADDRESS, _selections(_compression(width)), _compression(width)) for width in (2, 32)}


@settings(deadline=None, max_examples=300)
@given(st.data(), st.sampled_from([2, 32]))
def test_mutated_bytes_are_valid_or_refused(data: st.DataObject, width: int) -> None:
    blob = bytearray(HONEST[width])
    for _ in range(data.draw(st.integers(1, 4))):
        blob[data.draw(st.integers(0, len(blob) - 1))] = data.draw(st.integers(0, 255))
    _decodes_or_is_refused(bytes(blob), width)


@unhurried
@given(st.data(), st.sampled_from([2, 32]))
def test_truncated_and_extended_bytes_are_refused(data: st.DataObject, width: int) -> None:
    blob = HONEST[width]
    cut = blob[: data.draw(st.integers(0, len(blob) - 1))]
    with pytest.raises(MalformedContribution):
        decode_blob(cut, ADDRESS, SHAPES, _compression(width))
    _decodes_or_is_refused(blob + data.draw(st.binary(max_size=20)), width)


@settings(deadline=None, max_examples=200)
@given(st.binary(max_size=200))
def test_random_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(MalformedContribution):
        decode_blob(data, ADDRESS, SHAPES, _compression())


@settings(deadline=None, max_examples=200)
@given(st.data(), st.sampled_from([2, 32]))
def test_random_payloads_of_the_right_form_are_valid_or_refused(data: st.DataObject, width: int) -> None:
    blob = Blob.FromString(HONEST[width])
    payload = blob.tensors[data.draw(st.integers(0, 2))]
    field = data.draw(st.sampled_from(["positions", "codes", "levels"]))
    if field == "levels":
        payload.ClearField("levels")
        payload.levels.extend(data.draw(st.lists(st.floats(width=32), min_size=3, max_size=5)))
    else:
        length = len(getattr(payload, field)) + data.draw(st.integers(-1, 1))
        setattr(payload, field, data.draw(st.binary(min_size=length, max_size=length)))
    _decodes_or_is_refused(blob.SerializeToString(), width)


@pytest.mark.parametrize("change", [{"run": "other"}, {"round": 4}, {"replica": "dc"}, {"block": "layers.2"}])
def test_a_blob_under_another_address_is_refused(change: dict[str, object]) -> None:
    address = BlobAddress(**(vars(ADDRESS) | change))  # type: ignore[arg-type]
    with pytest.raises(MalformedContribution, match="expected"):
        decode_blob(HONEST[2], address, SHAPES, _compression())


@pytest.mark.parametrize(
    "compression",
    [
        CompressionSettings(density=1 / 4, tile=(8, 8), value_bits=2),
        CompressionSettings(density=1 / 8, tile=(8, 4), value_bits=2),
        CompressionSettings(density=1 / 8, tile=(8, 8), value_bits=3),
    ],
)
def test_a_blob_compressed_otherwise_is_refused(compression: CompressionSettings) -> None:
    with pytest.raises(MalformedContribution, match="shape, tile, density, bits"):
        decode_blob(HONEST[2], ADDRESS, SHAPES, compression)


@pytest.mark.parametrize(
    "shapes",
    [
        SHAPES | {"layers.1.a": (13, 20)},
        SHAPES | {"layers.1.c": (256,)},
        SHAPES | {"layers.1.d": (4, 4)},
        {name: shape for name, shape in SHAPES.items() if name != "layers.1.b"},
    ],
)
def test_a_blob_of_other_tensors_is_refused(shapes: dict[str, tuple[int, ...]]) -> None:
    with pytest.raises(MalformedContribution):
        decode_blob(HONEST[2], ADDRESS, shapes, _compression())


def test_a_tensor_named_twice_is_refused() -> None:
    blob = Blob.FromString(HONEST[2])
    blob.tensors.append(blob.tensors[0])
    with pytest.raises(MalformedContribution, match="expected the tensors"):
        decode_blob(blob.SerializeToString(), ADDRESS, SHAPES, _compression())


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_are_refused(value: float) -> None:
    quantised, exact = Blob.FromString(HONEST[2]), Blob.FromString(HONEST[32])
    quantised.tensors[1].levels[:] = [value] * 4
    exact.tensors[1].codes = np.array(value, dtype="<f4").tobytes() + exact.tensors[1].codes[4:]
    for blob, width in ((quantised, 2), (exact, 32)):
        with pytest.raises(MalformedContribution, match="finite"):
            decode_blob(blob.SerializeToString(), ADDRESS, SHAPES, _compression(width))


@pytest.mark.parametrize("positions", [[3, 3, 5, 9], [3, 2, 5, 9], [3, 5, 9, 33]])
def test_positions_that_repeat_or_leave_the_chunk_are_refused(positions: list[int]) -> None:
    blob = Blob.FromString(HONEST[2])
    assert blob.tensors[1].shape == [33]  # one chunk, of which 4 are kept
    blob.tensors[1].positions = bits.pack(np.array(positions), 6).tobytes()
    with pytest.raises(MalformedContribution, match="positions"):
        decode_blob(blob.SerializeToString(), ADDRESS, SHAPES, _compression())


def test_digests_by_hand_and_from_every_blob() -> None:
    blobs = {f"layers.{index}": bytes([index]) * 3 for index in range(3)}
    entries = [entry_of(BlobAddress("run", 1, "dc", block), data, 7) for block, data in blobs.items()]
    text = b"".join(block.encode() + b"\0" + hashlib.sha256(data).digest() for block, data in sorted(blobs.items()))
    whole = hashlib.sha256(text).digest()
    assert contribution_digest(entries) == contribution_digest(reversed(entries)) == whole
    assert (entries[2].block, entries[2].size, entries[2].kept_values) == ("layers.2", 3, 7)
    for index, block in enumerate(blobs):
        changed = entry_of(BlobAddress("run", 1, "dc", block), b"other", 7)
        assert contribution_digest([*entries[:index], changed, *entries[index + 1 :]]) != whole
        assert contribution_digest([*entries[:index], *entries[index + 1 :]]) != whole


def test_a_decoded_tensor_is_added_at_its_indices() -> None:
    total = torch.ones(2, 3)
    DecodedTensor(torch.tensor([1, 5]), torch.tensor([2.0, -4.0])).add_to(total, 0.5)
    assert total.tolist() == [[1, 2, 1], [1, 1, -1]]
