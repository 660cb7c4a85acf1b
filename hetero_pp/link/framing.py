"""Messages as raw frames: a protobuf header, and bytes that no protobuf touches.

    first frame    4 bytes: the header's length, little-endian | header | as much payload as fits
    other frames   the next FRAME_BYTES of payload; only the last may be shorter

On a stage link, messages of one frame may follow each other in the same frame, up to its size and MOST_TOGETHER.

The payload is all tensors' little-endian bytes, one after the other. Readers check every length before they
allocate, and raise MalformedMessage for anything that an honest sender would not have sent.
"""

from __future__ import annotations

import math
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from google.protobuf.message import DecodeError
from google.protobuf.message import Message as Protobuf
from torch import Tensor

from hetero_pp.core.errors import InvalidRequest, MalformedMessage
from hetero_pp.link.protocol import FRAME_BYTES, MAX_MESSAGE_BYTES, PREFIX_BYTES, WIRE_DTYPES, Message
from hetero_pp.messages.messages_pb2 import LinkHeader

MAX_HEADER_BYTES = 256 << 10
LINK_HEADER_BYTES_MAX = 16 << 10
"""Bytes of the header of a message between stages: a few tensors, and at the end of a round a certificate."""
MAX_TENSORS = 1024
MAX_DIMENSIONS = 8
MOST_TOGETHER = 16  # Messages in one frame. Each takes memory beside its bytes.

_LENGTH = struct.Struct("<I")
_ALIGNMENT = 64
_KEPT_BUFFERS = 16

Header = TypeVar("Header", bound=Protobuf)
Pieces = list[memoryview | bytes]  # a frame before it is copied


def header_and_payload_frames(header: Protobuf, buffers: Iterable[memoryview | bytes]) -> Iterator[bytes]:
    """Return the frames of a header and of buffers that form one payload. Copies once, when frames are taken."""
    return map(b"".join, _in_pieces(header, buffers))


def _in_pieces(header: Protobuf, buffers: Iterable[memoryview | bytes]) -> Iterator[Pieces]:
    head = header.SerializeToString()
    if len(head) > MAX_HEADER_BYTES:
        raise ValueError(f"found a header of {len(head)} bytes, expected at most {MAX_HEADER_BYTES}")
    parts: Pieces = [_LENGTH.pack(len(head)), head]
    room = FRAME_BYTES - PREFIX_BYTES - len(head)
    for buffer in buffers:
        rest = memoryview(buffer).cast("B")
        while len(rest) >= room:
            yield [*parts, rest[:room]]
            rest = rest[room:]
            parts, room = [], FRAME_BYTES
        parts.append(rest)
        room -= len(rest)
    if room < FRAME_BYTES:
        yield parts


def encode(message: Message) -> Iterator[Pieces]:
    """Return the frames of a sealed message, in pieces that are to be joined."""
    # Dense tensors, without a copy if they are on the CPU, and as uint8, because numpy has no bf16.
    buffers = (tensor.cpu().reshape(-1).view(torch.uint8).numpy().data for tensor in message.tensors)
    return _in_pieces(message.header, buffers)


class _Payload:
    """Fills memory with the parts of one payload, each of exactly the size that a sender would have cut."""

    def __init__(self, header_bytes: int, segments: Iterable[memoryview]) -> None:
        self._segments = deque(segment for segment in segments if len(segment))
        self._room = FRAME_BYTES - PREFIX_BYTES - header_bytes
        self.missing = sum(len(segment) for segment in self._segments)

    def add(self, part: memoryview) -> None:
        """Take the payload of one frame."""
        if len(rest := self.add_first(part)):
            expected = len(part) - len(rest)
            raise MalformedMessage(f"found {len(part)} bytes of payload in a frame, expected {expected}")

    def add_first(self, part: memoryview) -> memoryview:
        """Take the payload at the start of a frame; return what follows it."""
        expected = min(self.missing, self._room)
        if len(part) < expected:
            raise MalformedMessage(f"found {len(part)} bytes of payload in a frame, expected {expected}")
        part, rest = part[:expected], part[expected:]
        self.missing -= expected
        self._room = FRAME_BYTES
        while len(part):
            segment = self._segments.popleft()
            count = min(len(segment), len(part))
            segment[:count] = part[:count]
            part = part[count:]
            if count < len(segment):
                self._segments.appendleft(segment[count:])
        return rest


def _split(frame: bytes | memoryview, header_type: type[Header], most: int) -> tuple[Header, int, memoryview]:
    """Return the header of a first frame, of at most `most` bytes, the header's length, and the payload after it."""
    if not PREFIX_BYTES <= len(frame) <= FRAME_BYTES:
        raise MalformedMessage(f"found a first frame of {len(frame)} bytes, expected {PREFIX_BYTES} to {FRAME_BYTES}")
    (length,) = _LENGTH.unpack_from(frame)
    if length > (most := min(most, len(frame) - PREFIX_BYTES)):
        raise InvalidRequest(f"found a header of {length} bytes, expected at most {most}")
    rest = memoryview(frame)[PREFIX_BYTES:]
    header = header_type()
    try:
        header.ParseFromString(bytes(rest[:length]))
    except DecodeError as error:
        raise InvalidRequest(f"found {length} bytes that are no {header_type.__name__}") from error
    return header, length, rest[length:]


def read_frames(
    frames: Iterator[bytes],
    header_type: type[Header],
    size_of: Callable[[Header], int],
    max_bytes: int,
    max_header_bytes: int = MAX_HEADER_BYTES,
) -> tuple[Header, bytearray]:
    """Read what `header_and_payload_frames` wrote; `size_of` tells the payload's size from the header.

    Reads no further than the payload's end, so the caller decides whether more may follow.
    """
    buffers: list[bytearray] = []

    def room_for(header: Header) -> Iterator[memoryview]:
        size = size_of(header)
        if not 0 <= size <= max_bytes:
            raise MalformedMessage(f"found a payload of {size} bytes, expected at most {max_bytes}")
        buffers.append(bytearray(size))
        return map(memoryview, buffers)

    return read_into(frames, header_type, room_for, max_header_bytes=max_header_bytes), buffers[0]


def read_into(
    frames: Iterator[bytes],
    header_type: type[Header],
    room_for: Callable[[Header], Iterable[memoryview]],
    arrived: Callable[[int], None] = lambda n_bytes: None,
    max_header_bytes: int = MAX_HEADER_BYTES,
) -> Header:
    """As `read_frames`, into the memory that `room_for` has for the payload of a header.

    `arrived` is told the bytes of payload of each frame.
    """
    header, header_bytes, part = _split(_next(frames), header_type, max_header_bytes)
    payload = _Payload(header_bytes, room_for(header))
    payload.add(part)
    arrived(len(part))
    while payload.missing:
        part = memoryview(_next(frames))
        payload.add(part)
        arrived(len(part))
    return header


def _next(frames: Iterator[bytes]) -> bytes:
    frame = next(frames, None)
    if frame is None:
        raise MalformedMessage("found the end of the stream, expected another frame")
    return frame


class BufferPool:
    """Buffers for received messages, reused because fresh memory costs as much as the copy into it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: deque[Tensor] = deque(maxlen=_KEPT_BUFFERS)

    def take(self, n_bytes: int) -> Tensor:
        """Return a uint8 buffer of this size, rounded up: a returned one, or a new one."""
        size = -(-n_bytes // _ALIGNMENT) * _ALIGNMENT
        with self._lock:
            for index, buffer in enumerate(self._free):
                if len(buffer) == size:
                    del self._free[index]
                    return buffer
        return torch.empty(size, dtype=torch.uint8)

    def give(self, buffer: Tensor) -> None:
        """Keep a buffer for another message; drop the oldest one if there are many."""
        with self._lock:
            self._free.append(buffer)

    def recycle(self, message: Message) -> None:
        """Reuse a message's buffer. Does nothing for a message without one, or one that was recycled before."""
        if isinstance(message, ReceivedMessage) and message.lease:
            self.give(message.lease.pop())


@dataclass(frozen=True, slots=True, eq=False)
class ReceivedMessage(Message):
    """A message with tensors in a buffer of a pool, until `lease` returns the buffer."""

    lease: list[Tensor] = field(default_factory=list, repr=False)


class Decoder:
    """Assembles messages from frames. Not thread-safe."""

    def __init__(self, max_message_bytes: int = MAX_MESSAGE_BYTES, buffers: BufferPool | None = None) -> None:
        self._max = max_message_bytes
        self._pool = buffers or BufferPool()
        self._message: ReceivedMessage | None = None
        self._payload: _Payload | None = None

    @property
    def between_messages(self) -> bool:
        return self._payload is None

    def feed(self, frame: bytes) -> list[Message]:
        """Take the next frame; return the messages that it completes. Unusable after MalformedMessage."""
        if self._message is not None and self._payload is not None:
            self._payload.add(memoryview(frame))
            whole: list[Message] = [] if self._payload.missing else [self._message]
        else:
            whole, rest = self._first(frame, self._max)
            while len(rest):
                if len(whole) == MOST_TOGETHER:
                    raise MalformedMessage(f"found more messages in a frame, expected at most {MOST_TOGETHER}")
                more, rest = self._first(rest, len(rest))
                whole += more
        if whole:
            self._message = self._payload = None
        return whole

    def _first(self, frame: bytes | memoryview, most: int) -> tuple[list[Message], memoryview]:
        """Read the message of at most so much payload that begins a frame. Return it if it is whole, and the rest."""
        header, header_bytes, part = _split(frame, LinkHeader, LINK_HEADER_BYTES_MAX)
        self._message, segments = self._allocate(header, most)
        self._payload = _Payload(header_bytes, segments)
        rest = self._payload.add_first(part)
        return [] if self._payload.missing else [self._message], rest

    def _allocate(self, header: LinkHeader, most: int) -> tuple[ReceivedMessage, list[memoryview]]:
        """Return a message with memory for the tensors of this header, and that memory in the payload's order."""
        if len(header.tensors) > MAX_TENSORS:
            raise MalformedMessage(f"found {len(header.tensors)} tensors, expected at most {MAX_TENSORS}")
        sizes = []
        for tensor in header.tensors:
            shape = tuple(tensor.shape)
            if tensor.dtype not in WIRE_DTYPES:
                raise MalformedMessage(f"found a tensor of dtype {tensor.dtype}, expected one of {sorted(WIRE_DTYPES)}")
            if len(shape) > MAX_DIMENSIONS:
                raise MalformedMessage(f"found a tensor of {len(shape)} dimensions, expected at most {MAX_DIMENSIONS}")
            width = WIRE_DTYPES[tensor.dtype].itemsize
            if math.prod(max(size, 1) for size in shape) * width > self._max:
                raise MalformedMessage(f"found a tensor of shape {shape}, expected at most {self._max} bytes")
            sizes.append(math.prod(shape) * width)
        if sum(sizes) > most:
            raise MalformedMessage(f"found a payload of {sum(sizes)} bytes, expected at most {most}")
        aligned = [-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes]
        buffer = self._pool.take(sum(aligned))
        memory = buffer.numpy().data
        tensors, segments, start = [], [], 0
        for tensor, size, step in zip(header.tensors, sizes, aligned, strict=True):
            segments.append(memory[start : start + size])
            tensors.append(buffer[start : start + size].view(WIRE_DTYPES[tensor.dtype]).view(tuple(tensor.shape)))
            start += step
        return ReceivedMessage(header, tuple(tensors), [buffer]), segments
