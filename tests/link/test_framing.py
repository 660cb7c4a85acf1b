"""Frames: written messages are read back, and anything else is refused before memory is allocated for it."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import suppress
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_pp.config.lines import LinkShape
from hetero_pp.core.errors import MalformedMessage
from hetero_pp.link import framing, protocol
from hetero_pp.link.framing import (
    MOST_TOGETHER,
    BufferPool,
    Decoder,
    encode,
    header_and_payload_frames,
    read_frames,
)
from hetero_pp.link.protocol import WIRE_DTYPES, Message, sealed, wire_frames
from hetero_pp.link.shaping import ShapedQueue
from hetero_pp.messages.messages_pb2 import ACTIVATION, BF16, FP32, UINT8, LinkHeader, TensorHeader
from hetero_pp.rpc import link_end
from hetero_pp.rpc.link_end import LinkStream

SMALL_FRAME = 256


@pytest.fixture(autouse=True, scope="module")
def small_frames() -> Iterator[None]:
    """Make frames so small that small messages need several."""
    with (
        mock.patch.object(framing, "FRAME_BYTES", SMALL_FRAME),
        mock.patch.object(protocol, "FRAME_BYTES", SMALL_FRAME),
        mock.patch.object(link_end, "FRAME_BYTES", SMALL_FRAME),
    ):
        yield


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Draw a tensor of any bits, in any dtype of the wire."""
    dtype = draw(st.sampled_from(sorted(WIRE_DTYPES.values(), key=str)))
    shape = draw(st.lists(st.integers(0, 9), max_size=3))
    count = torch.Size(shape).numel() * dtype.itemsize
    data = random.Random(draw(st.integers(0, 1000))).randbytes(count)
    if not count:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=dtype).view(shape)


messages = st.builds(
    lambda round_, step, tensors: sealed(Message(LinkHeader(round=round_, step=step), tuple(tensors))),
    st.integers(0, 1 << 31),
    st.integers(0, 1 << 31),
    st.lists(tensors(), max_size=4),
)


def decode(decoder: Decoder, frames: list[bytes]) -> list[Message]:
    return [message for frame in frames for message in decoder.feed(frame)]


def encoded(*sent: Message) -> list[bytes]:
    return [b"".join(pieces) for message in sent for pieces in encode(message)]


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def assert_same(found: Message, expected: Message) -> None:
    assert found.header == expected.header
    for one, other in zip(found.tensors, expected.tensors, strict=True):
        assert (one.dtype, one.shape, bits(one)) == (other.dtype, other.shape, bits(other))


@given(st.lists(messages, min_size=1, max_size=3))
def test_round_trip(sent: list[Message]) -> None:
    frames = encoded(*sent)
    received = decode(decoder := Decoder(), frames)
    assert len(received) == len(sent)
    assert decoder.between_messages
    for found, expected in zip(received, sent, strict=True):
        assert_same(found, expected)
        assert all(tensor.storage_offset() * tensor.itemsize % 64 == 0 for tensor in found.tensors)


@given(messages)
def test_sizes_are_known_before_anything_is_encoded(message: Message) -> None:
    sizes = [len(frame) for frame in encoded(message)]
    assert [protocol.wire_bytes([size]) for size in sizes] == protocol.wire_frames(message)
    assert sum(wire_frames(message)) == protocol.wire_bytes(sizes)


def tiny(count: int) -> list[Message]:
    return [sealed(Message(LinkHeader(step=step), (torch.tensor([step], dtype=torch.uint8),))) for step in range(count)]


def queued(sent: Sequence[Message]) -> LinkStream:
    """Return a stream on which these messages are late."""
    stream = LinkStream(ShapedQueue(LinkShape()), BufferPool())
    for message in sent:
        stream.put(message, wire_frames(message))
    return stream


@given(st.lists(messages, min_size=1, max_size=5))
def test_late_messages_share_frames_and_are_read_back(sent: list[Message]) -> None:
    stream = queued(sent)
    stream.put_control(b"end")
    stream.close()
    *frames, control = stream.frames()
    assert control == b"end"
    assert len(frames) <= len(encoded(*sent))
    assert sum(map(len, frames)) == sum(map(len, encoded(*sent)))
    assert all(len(frame) <= SMALL_FRAME for frame in frames)
    received = decode(Decoder(), frames)
    assert len(received) == len(sent)
    for found, expected in zip(received, sent, strict=True):
        assert_same(found, expected)


def test_a_frame_takes_a_bounded_number_of_messages() -> None:
    stream = queued(tiny(MOST_TOGETHER + 1))
    with mock.patch.object(link_end, "FRAME_BYTES", 1 << 20):
        sizes = [len(frame) for _, frame in zip(range(2), stream.frames(), strict=False)]
    one = len(b"".join(encoded(tiny(2)[1])))
    assert sizes == [one * MOST_TOGETHER - 2, one]  # step 0 takes no bytes of the first header
    together = b"".join(encoded(*tiny(MOST_TOGETHER + 1)))
    with mock.patch.object(framing, "FRAME_BYTES", 1 << 20), pytest.raises(MalformedMessage, match="more messages"):
        Decoder().feed(together)


def test_a_message_behind_another_one_in_a_frame_is_whole_before_it_is_allocated() -> None:
    first, second = encoded(*tiny(2))
    large = LinkHeader(tensors=[TensorHeader(dtype=UINT8, shape=[500])])
    (claims,) = header_and_payload_frames(large, [])
    assert len(Decoder().feed(first + second)) == 2
    for bad in (second[:-1], second + b"x"):
        with pytest.raises(MalformedMessage):
            Decoder().feed(first + bad)
    (decoder := Decoder())._pool.give(torch.empty(64, dtype=torch.uint8))
    allocation = mock.patch.object(torch, "empty", side_effect=AssertionError("allocated"))
    with allocation, pytest.raises(MalformedMessage, match="found a payload of 500 bytes, expected at most 12"):
        decoder.feed(first + claims)


@settings(max_examples=300)
@given(messages, st.data())
def test_damaged_frames_decode_or_are_malformed(message: Message, data: st.DataObject) -> None:
    frames = encoded(message)
    index = data.draw(st.integers(0, len(frames) - 1))
    frame = bytearray(frames[index])
    match data.draw(st.sampled_from(["flip", "cut", "extend", "drop", "double"])):
        case "flip":
            frame[data.draw(st.integers(0, len(frame) - 1))] ^= data.draw(st.integers(1, 255))
            frames[index] = bytes(frame)
        case "cut":
            frames[index] = bytes(frame[: data.draw(st.integers(0, len(frame) - 1))])
        case "extend":
            frames[index] = bytes(frame) + data.draw(st.binary(min_size=1, max_size=9))
        case "drop":
            del frames[index]
        case "double":
            frames.insert(index, frames[index])
    with suppress(MalformedMessage):
        decode(Decoder(max_message_bytes=1 << 20), frames)


@settings(max_examples=300)
@given(st.lists(st.binary(max_size=SMALL_FRAME + 9), max_size=4))
def test_any_bytes_decode_or_are_malformed(frames: list[bytes]) -> None:
    with suppress(MalformedMessage):
        decode(Decoder(max_message_bytes=1 << 20), frames)


@pytest.mark.parametrize(
    ("dtype", "shape", "reason"),
    [
        (99, [1], "dtype 99"),
        (0, [1], "dtype 0"),
        (FP32, [1] * 9, "9 dimensions"),
        (FP32, [1 << 20], "at most"),
        (UINT8, [0xFFFFFFFF] * 4, "at most"),
        (UINT8, [0, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF], "at most"),
    ],
)
def test_impossible_tensors_are_refused_before_they_are_allocated(dtype: int, shape: list[int], reason: str) -> None:
    header = LinkHeader(tensors=[TensorHeader(shape=shape)])
    header.tensors[0].dtype = dtype  # type: ignore[assignment]
    (frame,) = header_and_payload_frames(header, [])
    allocation = mock.patch.object(torch, "empty", side_effect=AssertionError("allocated"))
    with allocation, pytest.raises(MalformedMessage, match=reason):
        Decoder(max_message_bytes=1 << 20).feed(frame)


def test_the_sum_of_the_tensors_is_bounded() -> None:
    header = LinkHeader(tensors=[TensorHeader(dtype=BF16, shape=[300])] * 2)
    (frame,) = header_and_payload_frames(header, [])
    with pytest.raises(MalformedMessage, match="found a payload of 1200 bytes, expected at most 1000"):
        Decoder(max_message_bytes=1000).feed(frame)


def test_the_number_of_tensors_is_bounded() -> None:
    header = LinkHeader(tensors=[TensorHeader(dtype=UINT8, shape=[0])] * (framing.MAX_TENSORS + 1))
    head = header.SerializeToString()
    with mock.patch.object(framing, "FRAME_BYTES", 1 << 20), pytest.raises(MalformedMessage, match="tensors"):
        Decoder().feed(len(head).to_bytes(4, "little") + head)


@pytest.mark.parametrize(
    "frame", [b"", b"\x00\x00", b"\x05\x00\x00\x00abcd", b"\xff\xff\xff\xff", b"\x02\x00\x00\x00\xff\xff"]
)
def test_lying_header_lengths_are_malformed(frame: bytes) -> None:
    with pytest.raises(MalformedMessage):
        Decoder().feed(frame)


def test_a_recycled_buffer_is_used_again_and_only_once() -> None:
    decoder = Decoder()
    frames = encoded(sealed(Message(LinkHeader(purpose=ACTIVATION), (torch.arange(100.0),))))
    (first,) = decode(decoder, frames)
    address = first.tensors[0].data_ptr()
    decoder._pool.recycle(first)
    decoder._pool.recycle(first)
    (second,) = decode(decoder, frames)
    (third,) = decode(decoder, frames)
    assert second.tensors[0].data_ptr() == address
    assert third.tensors[0].data_ptr() != address


def test_a_message_that_is_kept_is_never_overwritten() -> None:
    decoder = Decoder()
    kept = [
        decode(decoder, encoded(sealed(Message(LinkHeader(), (torch.full((99,), float(i)),)))))[0] for i in range(20)
    ]
    for i, message in enumerate(kept):
        assert torch.equal(message.tensors[0], torch.full((99,), float(i)))


@given(st.lists(st.binary(max_size=600), max_size=4))
def test_streams_of_a_header_and_bytes(buffers: list[bytes]) -> None:
    payload = b"".join(buffers)
    frames = list(header_and_payload_frames(LinkHeader(step=len(payload)), buffers))
    assert all(len(frame) == SMALL_FRAME for frame in frames[:-1])
    stream = iter([*frames, b"more"])
    header, found = read_frames(stream, LinkHeader, lambda header: header.step, max_bytes=len(payload))
    assert (header.step, bytes(found)) == (len(payload), payload)
    assert list(stream) == [b"more"]


def test_streams_that_are_cut_short_or_too_long_are_malformed() -> None:
    frames = list(header_and_payload_frames(LinkHeader(step=1000), [bytes(1000)]))

    def read(frames: list[bytes], max_bytes: int = 1000) -> None:
        read_frames(iter(frames), LinkHeader, lambda header: header.step, max_bytes)

    read(frames)
    for bad in ([], frames[:-1], frames[1:], [*frames[:-1], frames[-1] + b"x"], [*frames[:-1], b""]):
        with pytest.raises(MalformedMessage):
            read(bad)
    with pytest.raises(MalformedMessage, match="found a payload of 1000 bytes, expected at most 999"):
        read(frames, max_bytes=999)
