"""Bytes of a contribution: exact, as docs/wire-format.md says, small, and refused if anything is wrong."""

from __future__ import annotations

import hashlib
import json
import math
import random
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from wire_reference import decode

from hetero_pp.core.errors import MalformedContribution
from hetero_pp.messages.messages_pb2 import BlobEntry
from hetero_pp.pseudo_gradient.compression import CompressionSettings
from hetero_pp.pseudo_gradient.contribution import (
    BEFORE_BODY,
    FORMAT_VERSION,
    MAGIC,
    BlobAddress,
    DecodedTensor,
    Shape,
    blob_bytes,
    contribution_digest,
    decode_blob,
    encode_blob,
    entry_of,
    kept_values,
    most_bytes,
)
from hetero_pp.pseudo_gradient.error_feedback import Selection, select
from hetero_pp.pseudo_gradient.quantise import Quantised
from hetero_pp.pseudo_gradient.selection import random_positions
from hetero_pp.pseudo_gradient.streams import Reader, Writer

unhurried = settings(deadline=None, max_examples=60)
SIDES = st.integers(1, 20)
SHAPE = st.tuples(SIDES, SIDES) | st.tuples(st.integers(1, 90))
TILES = st.tuples(st.integers(1, 9), st.integers(1, 9))
DENSITIES = st.floats(0.001, 1.0)
VALUES = [("levels", 1), ("levels", 2), ("levels", 3), ("levels", 4), ("levels", 8), ("levels", 32), ("signs", 1)]
ADDRESS = BlobAddress("run", 3, "home", "layers.1")
SHAPES: dict[str, Shape] = {"layers.1.a": (20, 13), "layers.1.b": (33,), "layers.1.c": (16, 16)}
VECTORS = Path(__file__).parents[1] / "vectors"


def _compression(
    width: int = 2, density: float = 1 / 8, tile: tuple[int, int] = (8, 8), quantiser: str = "levels"
) -> CompressionSettings:
    return CompressionSettings(density=density, tile=tile, value_bits=width, quantiser=quantiser)


def _select(shape: Shape, compression: CompressionSettings, seed: int = 0) -> Selection:
    generator = torch.Generator().manual_seed(seed)
    delta = torch.randn(shape, generator=generator)
    return select(torch.zeros(shape), delta, compression, generator=generator)


def _selections(
    compression: CompressionSettings, shapes: dict[str, Shape] = SHAPES
) -> list[tuple[str, Shape, Selection]]:
    return [(name, shape, _select(shape, compression, seed)) for seed, (name, shape) in enumerate(shapes.items())]


def _dense(shape: Shape, sent: Selection | DecodedTensor) -> Tensor:
    dense = torch.zeros(math.prod(shape))
    dense[sent.indices] = sent.values
    return dense


def _sealed(body: bytes) -> bytes:
    return MAGIC + bytes([FORMAT_VERSION]) + hashlib.sha256(body).digest() + body


# ---- decoding is exact ----


@unhurried
@given(SHAPE, TILES, DENSITIES, st.sampled_from(VALUES), st.sampled_from(["top_k", "random_k"]))
def test_any_selection_comes_back_here_and_in_another_decoder(
    shape: Shape, tile: tuple[int, int], density: float, values: tuple[str, int], selection: str
) -> None:
    quantiser, width = values
    compression = _compression(width, density, tile, quantiser).model_copy(update={"selection": selection})
    chosen = _select(shape, compression)
    data = encode_blob(ADDRESS, [("x", shape, chosen)], compression)
    decoded = decode_blob(data, ADDRESS, {"x": shape}, compression)["x"]
    assert torch.equal(_dense(shape, decoded), _dense(shape, chosen))
    assert sorted(decoded.indices.tolist()) == sorted(chosen.indices.tolist())
    assert len(decoded.values) == chosen.kept_values == kept_values(shape, compression)
    elsewhere = decode(data)["tensors"]["x"]
    assert elsewhere == dict(zip(decoded.indices.tolist(), decoded.values.tolist(), strict=True))


@pytest.mark.parametrize("size", [1, 254, 255, 256, 510, 70_000])
def test_gaps_of_any_length_come_back(size: int) -> None:
    """One value is kept, after `size` values that are not."""
    delta = torch.zeros(size + 1)
    delta[-1] = 1.0
    compression = _compression(32, 1e-9)
    chosen = select(torch.zeros_like(delta), delta, compression)
    data = encode_blob(ADDRESS, [("x", (size + 1,), chosen)], compression)
    decoded = decode_blob(data, ADDRESS, {"x": (size + 1,)}, compression)["x"]
    assert (decoded.indices.tolist(), decoded.values.tolist()) == ([size], [1.0])


def test_tensors_are_asked_for_one_after_the_other() -> None:
    """Only one tensor's selection of a large model is in memory at a time."""
    compression, alive = _compression(), []

    def selections() -> Iterator[tuple[str, Shape, Selection]]:
        for name, shape, chosen in _selections(compression):
            alive.append(name)
            yield name, shape, chosen
            alive.remove(name)
            assert not alive

    assert encode_blob(ADDRESS, selections(), compression) == encode_blob(
        ADDRESS, _selections(compression), compression
    )


# ---- the format does not change ----


@pytest.mark.parametrize("path", sorted(VECTORS.glob("*.json")), ids=lambda path: path.stem)
def test_vectors_decode_to_what_they_always_did(path: Path) -> None:
    vector = json.loads(path.read_text())
    data = path.with_suffix(".blob").read_bytes()
    compression = CompressionSettings.model_validate(vector["compression"])
    shapes = {name: tuple(tensor["shape"]) for name, tensor in vector["tensors"].items()}
    decoded = decode_blob(data, BlobAddress(**vector["address"]), shapes, compression)
    elsewhere = decode(data)
    for name, tensor in vector["tensors"].items():
        expected = {
            index: struct.unpack("<f", bytes.fromhex(value))[0]
            for index, value in zip(tensor["indices"], tensor["values"], strict=True)
        }
        assert dict(zip(decoded[name].indices.tolist(), decoded[name].values.tolist(), strict=True)) == expected
        assert elsewhere["tensors"][name] == expected


def test_there_are_vectors_of_every_kind() -> None:
    """Makes sure that the test above does not pass because it finds no vectors."""
    kinds = [json.loads(path.read_text())["compression"] for path in VECTORS.glob("*.json")]
    assert {(kind["quantiser"], kind["value_bits"]) for kind in kinds} == set(VALUES)


# ---- size ----


@pytest.mark.parametrize(("kept", "limit"), [(32, 8.318), (128, 6.382), (256, 5.376)])
def test_uniform_positions_take_at_most_two_percent_more_than_they_must(kept: int, limit: float) -> None:
    """The lower limit is log2 C(4096, k) / k bits."""
    combinations = math.lgamma(4097) - math.lgamma(kept + 1) - math.lgamma(4097 - kept)
    assert combinations / math.log(2) / kept == pytest.approx(limit, abs=1e-3)
    chunks, compression = 65536 // kept, _compression(32, kept / 4096, (64, 64))
    positions = random_positions(chunks, 4096, kept, torch.Generator().manual_seed(0))
    zeros = Quantised(torch.zeros(chunks * kept))  # zeros take almost no bytes
    data = encode_blob(ADDRESS, [("x", (64 * chunks, 64), Selection((positions,), positions, zeros))], compression)
    assert 8 * len(data) / positions.numel() < limit * 1.02


@pytest.mark.parametrize(
    ("values", "density"),
    [(kind, density) for kind in VALUES for density in (1 / 128, 1 / 32, 1.0) if density < 1 or kind[1] > 1],
)
def test_the_size_that_is_expected_of_random_values(values: tuple[str, int], density: float) -> None:
    compression = _compression(values[1], density, (64, 64), values[0])
    shapes: dict[str, Shape] = {"a": (512, 768), "b": (768,)}
    size = len(encode_blob(ADDRESS, _selections(compression, shapes), compression))
    assert size == pytest.approx(blob_bytes(ADDRESS, shapes, compression), rel=0.12)


@pytest.mark.parametrize("selection", ["top_k", "random_k"])
@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("density", [1 / 4096, 1 / 128, 1 / 3, 1.0])
@pytest.mark.parametrize("shapes", [{"a": (512, 768), "b": (768,)}, {"x": (1, 1)}, {"n" * 60: (3, 5, 7), "y": (4097,)}])
def test_no_blob_is_longer_than_is_let_in(
    selection: str, values: tuple[str, int], density: float, shapes: dict[str, Shape]
) -> None:
    """Values and positions are random, so neither can be compressed."""
    compression = CompressionSettings(
        density=density, tile=(64, 64), selection=selection, quantiser=values[0], value_bits=values[1]
    )
    size = len(encode_blob(ADDRESS, _selections(compression, shapes), compression))
    kept = sum(kept_values(shape, compression) for shape in shapes.values())
    assert size <= most_bytes(shapes, compression) <= 12 * kept + 16_384


# ---- anything else is refused ----

SETTINGS = {kind: _compression(kind[1], quantiser=kind[0]) for kind in [("levels", 2), ("levels", 32), ("signs", 1)]}
HONEST = {kind: encode_blob(ADDRESS, _selections(chosen), chosen) for kind, chosen in SETTINGS.items()}
KINDS = st.sampled_from(list(HONEST))


def _decodes_or_is_refused(data: bytes, kind: tuple[str, int]) -> None:
    compression = SETTINGS[kind]
    try:
        decoded = decode_blob(data, ADDRESS, SHAPES, compression)
    except MalformedContribution:
        return
    assert decoded.keys() == SHAPES.keys()
    for name, shape in SHAPES.items():
        indices, values = decoded[name].indices, decoded[name].values
        assert values.dtype == torch.float32 and torch.isfinite(values).all()
        assert len(indices) == len(values) == len(indices.unique()) == kept_values(shape, compression)
        assert indices.min() >= 0 and indices.max() < math.prod(shape)


@settings(deadline=None, max_examples=300)
@given(st.data(), KINDS)
def test_mutated_content_is_valid_or_refused(data: st.DataObject, kind: tuple[str, int]) -> None:
    """The digest is made valid again, because otherwise it would refuse everything."""
    body = bytearray(HONEST[kind][BEFORE_BODY:])
    for _ in range(data.draw(st.integers(1, 4))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    _decodes_or_is_refused(_sealed(bytes(body)), kind)


@unhurried
@given(st.data(), KINDS)
def test_truncated_and_extended_content_is_refused(data: st.DataObject, kind: tuple[str, int]) -> None:
    body = HONEST[kind][BEFORE_BODY:]
    cut = body[: data.draw(st.integers(0, len(body) - 1))]
    for other in (cut, body + data.draw(st.binary(min_size=1, max_size=20))):
        with pytest.raises(MalformedContribution):
            decode_blob(_sealed(other), ADDRESS, SHAPES, SETTINGS[kind])


def test_a_blob_of_another_address_other_settings_or_other_tensors_is_refused() -> None:
    data = HONEST["levels", 2]
    for change in ({"run": "other"}, {"round": 4}, {"replica": "dc"}, {"block": "layers.2"}):
        with pytest.raises(MalformedContribution, match="expected"):
            decode_blob(data, BlobAddress(**(vars(ADDRESS) | change)), SHAPES, _compression())
    quarter, tall, signs = _compression(2, 1 / 4), _compression(tile=(8, 4)), _compression(1, quantiser="signs")
    for compression in (quarter, tall, _compression(3), signs):
        with pytest.raises(MalformedContribution, match="other settings"):
            decode_blob(data, ADDRESS, SHAPES, compression)
    fewer = {name: shape for name, shape in SHAPES.items() if name != "layers.1.b"}
    for changed in ({"layers.1.a": (13, 20)}, {"layers.1.c": (256,)}, {"layers.1.d": (4, 4)}):
        with pytest.raises(MalformedContribution):
            decode_blob(data, ADDRESS, SHAPES | changed, _compression())
    with pytest.raises(MalformedContribution):
        decode_blob(data, ADDRESS, fewer, _compression())
    a, b, c = _selections(_compression())
    for tensors in ([a, a, b, c], [b, a, c], [a, b, c, c]):
        with pytest.raises(MalformedContribution, match="found the tensors"):
            decode_blob(encode_blob(ADDRESS, tensors, _compression()), ADDRESS, SHAPES, _compression())


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("width", [2, 32])
def test_values_that_are_not_finite_are_refused(value: float, width: int) -> None:
    compression = _compression(width)
    chosen = _select((33,), compression)
    spoilt = chosen.quantised.values if chosen.quantised.levels is None else chosen.quantised.levels
    spoilt[:] = value
    data = encode_blob(ADDRESS, [("x", (33,), chosen)], compression)
    with pytest.raises(MalformedContribution, match="finite"):
        decode_blob(data, ADDRESS, {"x": (33,)}, compression)


def test_positions_beyond_the_chunk_are_refused() -> None:
    compression = _compression(32)
    chosen = _select((33,), compression)
    beyond = Selection((torch.tensor([[3, 5, 9, 33]]),), chosen.indices, chosen.quantised)
    data = encode_blob(ADDRESS, [("x", (33,), beyond)], compression)
    with pytest.raises(MalformedContribution, match="outside its chunk"):
        decode_blob(data, ADDRESS, {"x": (33,)}, compression)


def test_a_frame_is_not_unpacked_beyond_what_is_expected() -> None:
    """zstd trusts the size in a frame regardless of its own arguments, so 6 kB could become 200 MB."""
    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 28))
    writer = Writer()
    writer.put("BI", 1, len(bomb))
    writer.put_bytes(bomb)
    with pytest.raises(MalformedContribution, match="268435456 bytes, expected 0 to 100"):
        Reader(writer.take(), "x").take_stream(0, 100)
    silent = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(100))
    with pytest.raises(MalformedContribution, match="does not give its size"):
        Reader(struct.pack("<BI", 1, len(silent)) + silent, "x").take_stream(0, 100)
    two = zstandard.ZstdCompressor().compress(bytes(100)) * 2
    with pytest.raises(MalformedContribution, match="damaged"):
        Reader(struct.pack("<BI", 1, len(two)) + two, "x").take_stream(0, 100)


def _entry(block: str, data: bytes) -> BlobEntry:
    return entry_of(block, hashlib.sha256(data).digest(), len(data), [torch.ones(7)])


def test_digests_by_hand_and_from_every_blob() -> None:
    blobs = {f"layers.{index}": bytes([index]) * 3 for index in range(3)}
    entries = [_entry(block, data) for block, data in blobs.items()]
    text = b"".join(block.encode() + b"\0" + hashlib.sha256(data).digest() for block, data in sorted(blobs.items()))
    whole = hashlib.sha256(text).digest()
    assert contribution_digest(entries) == contribution_digest(reversed(entries)) == whole
    assert (entries[2].block, entries[2].size, entries[2].kept_values) == ("layers.2", 3, 7)
    for index, block in enumerate(blobs):
        changed = _entry(block, b"other")
        assert contribution_digest([*entries[:index], changed, *entries[index + 1 :]]) != whole
        assert contribution_digest([*entries[:index], *entries[index + 1 :]]) != whole


# ---- methods of a decoded tensor ----


def test_a_decoded_tensor_is_added_at_its_indices() -> None:
    total = torch.ones(2, 3)
    DecodedTensor(torch.tensor([1, 5]), torch.tensor([2.0, -4.0])).add_to(total, 0.5)
    assert total.tolist() == [[1, 2, 1], [1, 1, -1]]


def test_a_part_of_a_decoded_tensor_is_counted_from_its_start() -> None:
    part = DecodedTensor(torch.tensor([9, 1, 5, 4]), torch.tensor([1.0, 2.0, 3.0, 4.0])).part(4, 9)
    assert (part.indices.tolist(), part.values.tolist()) == ([1, 0], [3.0, 4.0])


INPUTS = 6000


def test_mutated_blobs_decode_or_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parents[2] / "benchmarks"), *sys.path])
    from contribution_target import Count, mutated, seeds, try_one

    dice, honest, count = random.Random(0), list(seeds()), Count()
    for seed in honest:
        try_one(seed, count)
    assert (count.decoded, count.refused) == (len(honest), 0)
    for _ in range(INPUTS):
        try_one(mutated(dice.choice(honest), dice.choice(honest), dice), count)
    assert count.refused > INPUTS / 2
    assert count.decoded > len(honest) + INPUTS / 100
    assert count.inputs == count.decoded + count.refused
