"""Change the calls of a member: give one field a value that an honest member does not send.

A liar is a real member. Its calls are changed below its client, so its training and its files are honest. Tests
(tests/exchange/test_lies.py) and attacks (attacks_of_liars.py) share this module.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest import mock

import grpc
from google.protobuf.descriptor import FieldDescriptor, MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from hetero_pp.link.framing import header_and_payload_frames, read_frames
from hetero_pp.link.protocol import PREFIX_BYTES
from hetero_pp.messages import messages_pb2 as pb
from hetero_pp.pseudo_gradient.contribution import payload_bytes
from hetero_pp.rpc import exchange_client, stage_link
from hetero_pp.rpc.callers import Metadata
from hetero_pp.rpc.identities import Identity

MOST_LIED_BYTES = 1 << 20
"""Length in bytes of a text or a bytes value that is far too long. A message has at most 8 MiB."""
MOST_LIED_ENTRIES = 20_000
"""Entries of a list or a map that is far too long; more than a member may report at once."""
MOST_PAYLOAD_BYTES = 1 << 30
UNKNOWN_FIELD = b"\xfa\x3f\x04made"
"""Field 1023 with four bytes, as it is sent."""

HEADERS: Mapping[str, type[Message]] = {"Deposit": pb.BlobHeader, "Show": pb.ShownFile, "Open": pb.LinkHello}
"""Calls that send raw frames, with the message that their first frame holds."""
RAW = frozenset({"Probe", "Measure"})
"""Calls that send raw frames in which there is no message."""


class Lie(NamedTuple):
    """A message with one field changed."""

    path: str
    """The field, with the fields that it is in: `reports.inner_step.loss`."""
    what: str
    """Description of its new value."""
    message: Message


# ---- which fields there are ----


def sent_by(method: MethodDescriptor) -> Any:
    """Return the message that a caller sends; None for raw frames that hold none."""
    if method.name in RAW:
        return None
    kind = HEADERS.get(method.name)
    if kind is None and method.input_type is pb.Frame.DESCRIPTOR:
        raise KeyError(f"{method.name} sends raw frames: name the message of the first one in HEADERS, or in RAW")
    return method.input_type if kind is None else kind.DESCRIPTOR


def fields_of(message: Any) -> Iterator[str]:
    """Yield the path of every field of a message, and of the messages in it."""
    for field in message.fields:
        if field.message_type is None or _is_map(field):
            yield field.name
        else:
            yield from (f"{field.name}.{inner}" for inner in fields_of(field.message_type))
            if field.is_repeated or not field.message_type.fields:
                yield field.name


def _is_map(field: Any) -> bool:
    return field.message_type is not None and bool(field.message_type.GetOptions().map_entry)


# ---- what they are changed to ----


def raw_lies(honest: Sequence[bytes]) -> Iterator[tuple[str, Sequence[bytes]]]:
    """Yield (what was changed, frames) for a stream of raw frames without a message."""
    first, *rest = honest
    yield from {
        "no frame": [],
        "empty": [b"", *rest],
        "one too short": [first[:-1], *rest],
        "one too long": [first + b"\0", *rest],
        "far too long": [bytes(MOST_LIED_BYTES), *rest],
        "one frame too few": honest[:-1],
        "one frame too many": [*honest, first],
    }.items()


def lies_about(honest: Message, is_wanted: Callable[[str, str], bool] = lambda path, what: True) -> Iterator[Lie]:
    """Yield the message with one field changed, for every field and every value that is worth a try.

    `is_wanted` selects lies by their path and description. Other lies are not made, because making a lie takes time.
    """
    known = {honest.SerializeToString(deterministic=True)}
    unknown = _Change("", "a field that is not known", lambda: _with_unknown_field(honest))
    for path, what, make in (unknown, *_changes(honest)):
        if not is_wanted(path, what):
            continue
        lie = Lie(path, what, make())
        data = lie.message.SerializeToString(deterministic=True)
        if data not in known:
            known.add(data)
            yield lie


class _Change(NamedTuple):
    """A lie that is not made yet."""

    path: str
    what: str
    make: Callable[[], Message]


def _with_unknown_field(honest: Message) -> Message:
    return type(honest).FromString(honest.SerializeToString() + UNKNOWN_FIELD)


def _changes(honest: Message) -> Iterator[_Change]:
    for field in honest.DESCRIPTOR.fields:
        if _is_map(field):
            yield from _map_changes(honest, field)
        elif field.is_repeated:
            yield from _list_changes(honest, field)
        elif field.message_type is not None:
            yield from _message_changes(honest, field)
        else:
            if field.has_presence:
                yield _changed(honest, field.name, field.name, "left out", None)
            for what, value in values_of(field, getattr(honest, field.name)):
                yield _changed(honest, field.name, field.name, what, value)


def _changed(honest: Message, name: str, path: str, what: str, value: Any) -> _Change:
    """Return a change of a field to a value, or to the result of a function."""
    return _Change(path, what, lambda: _with(honest, name, value() if callable(value) else value))


def _with(honest: Message, name: str, value: Any) -> Message:
    """Return the message with another value of a field, or without the field if the value is None."""
    lie = type(honest)()
    lie.CopyFrom(honest)
    lie.ClearField(name)
    match value:
        case None:
            pass
        case Message():
            getattr(lie, name).CopyFrom(value)
        case dict():
            getattr(lie, name).update(value)
        case list():
            getattr(lie, name).extend(value)
        case _:
            setattr(lie, name, value)
    return lie


def _message_changes(honest: Message, field: Any) -> Iterator[_Change]:
    own = getattr(honest, field.name)
    yield _changed(honest, field.name, field.name, "left out", None)
    yield _changed(honest, field.name, field.name, "empty", type(own)())
    for path, what, make in _changes(own):
        yield _changed(honest, field.name, f"{field.name}.{path}", what, make)


def _list_changes(honest: Message, field: Any) -> Iterator[_Change]:
    name, own = field.name, list(getattr(honest, field.name))
    if field.message_type is not None:
        first = own[0] if own else GetMessageClass(field.message_type)()
        for path, what, make in _changes(first):
            yield _changed(honest, name, f"{name}.{path}", what, lambda make=make: [make(), *own[1:]])
    else:
        first = own[0] if own else ("x" if field.type == FieldDescriptor.TYPE_STRING else 1)
        for what, value in values_of(field, first):
            yield _changed(honest, name, name, what, [value, *own[1:]])
    lengths = {"empty": [], "one too few": own[:-1], "one too many": [*own, first]}
    for what, entries in {**lengths, "far too many": lambda: [first] * MOST_LIED_ENTRIES}.items():
        yield _changed(honest, name, name, what, entries)


def _map_changes(honest: Message, field: Any) -> Iterator[_Change]:
    name, own = field.name, dict(getattr(honest, field.name))
    keys = sorted(own)
    first, rest = keys[0] if keys else "x", {key: own[key] for key in keys[1:]}
    value = own.get(first, bytes(32))
    assert field.message_type is not None
    maps: dict[str, Any] = {"empty": {}, "one too few": rest, "one too many": {**own, "unknown": value}}
    maps["far too many"] = lambda: {str(number): value for number in range(MOST_LIED_ENTRIES)}
    for what, key in values_of(field.message_type.fields_by_name["key"], first):
        maps[f"a key {what}"] = {**rest, key: value}
    for what, one in values_of(field.message_type.fields_by_name["value"], value):
        maps[what] = {**rest, first: one}
    for what, entries in maps.items():
        yield _changed(honest, name, name, what, entries)


_BITS = {
    FieldDescriptor.TYPE_UINT32: 32,
    FieldDescriptor.TYPE_UINT64: 64,
}
_FLOATS = {FieldDescriptor.TYPE_FLOAT: 3.4028234e38, FieldDescriptor.TYPE_DOUBLE: sys.float_info.max}


def values_of(field: Any, honest: Any) -> Iterator[tuple[str, Any]]:
    """Yield what a field may be changed to: the ends of its type, zero, one beside the honest value, wrong lengths.

    Raises KeyError for an unknown type.
    """
    if field.type == FieldDescriptor.TYPE_STRING:
        yield from {
            "empty": "",
            "one too short": honest[:-1],
            "one too long": honest + "x",
            "control characters": "a\x1b[2J\n\x07\u202e",
            "a path": "../../state",
            "far too long": "x" * MOST_LIED_BYTES,
        }.items()
    elif field.type == FieldDescriptor.TYPE_BYTES:
        yield from {
            "empty": b"",
            "one too short": honest[:-1],
            "one too long": honest + b"\0",
            "zeros": bytes(len(honest)),
            "far too long": bytes(MOST_LIED_BYTES),
        }.items()
    elif field.type == FieldDescriptor.TYPE_BOOL:
        yield "the opposite", not honest
    elif field.type == FieldDescriptor.TYPE_ENUM:
        yield from ((f"{value}", value) for value in (0, -(2**31), 2**31 - 1, len(field.enum_type.values)))
        yield from ((one.name, one.number) for one in field.enum_type.values)
    elif field.type in _FLOATS:
        most = _FLOATS[field.type]
        values = [0.0, -0.0, 1.0, -1.0, most, -most, 5e-324, float("nan"), float("inf"), float("-inf")]
        yield from ((f"{value}", value) for value in (*values, honest + 1.0, 2 * honest))
    else:
        most = 2 ** _BITS[field.type] - 1
        numbers = [0, 1, honest - 1, honest + 1, 2**31, most // 2, most // 2 + 1, most - 1, most]
        yield from ((f"{value}", value) for value in numbers if 0 <= value <= most)


WORST = frozenset({"left out", "empty", "far too long", "far too many", "the opposite", "nan", "inf", "0"})
WORST |= {str(2**32 - 1), str(2**64 - 1)}
"""Values that a short check tries."""


# ---- calls on their way ----


@dataclass(frozen=True)
class Call:
    """A call that a liar's client makes, before it leaves."""

    path: str
    """The service and the method."""
    message: Message | None
    """The message; None for raw frames without a message."""
    frames: Sequence[bytes]
    """The message as bytes: one frame, or a header and its payload."""
    metadata: Metadata

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]

    def saying(self, message: Message) -> Call:
        """Return the same call with another message."""
        if self.name not in HEADERS:
            return Call(self.path, message, [message.SerializeToString()], self.metadata)
        assert self.message is not None
        _, payload = read_frames(iter(self.frames), type(self.message), size_of, MOST_PAYLOAD_BYTES)
        return Call(self.path, message, list(header_and_payload_frames(message, [bytes(payload)])), self.metadata)


def size_of(header: Any) -> int:
    """Return the size of the payload after a header."""
    return payload_bytes(header) if isinstance(header, pb.BlobHeader) else int(header.size)


Change = Callable[[Call], Call]
"""Change of a liar's call. It may block, and make other calls meanwhile."""


def link_message(frame: bytes) -> tuple[pb.LinkHeader, bytes] | None:
    """Return the header and the payload of a message on a stage link that is one frame; None for any other frame."""
    if len(frame) < PREFIX_BYTES:
        return None
    length = int.from_bytes(frame[:PREFIX_BYTES], "little")
    rest = frame[PREFIX_BYTES:]
    if length > len(rest):
        return None
    return pb.LinkHeader.FromString(rest[:length]), rest[length:]


def link_lies(frames: Iterator[bytes], change: Callable[[Message], Message]) -> Iterator[bytes]:
    """Yield the frames of one end of a stage link, with its hello and the headers of its messages changed."""
    for number, frame in enumerate(frames):
        if number == 0:
            yield change(pb.LinkHello.FromString(frame)).SerializeToString()
        elif (found := link_message(frame)) is None:
            yield frame
        else:
            header, payload = found
            yield from header_and_payload_frames(change(header), [payload])


class _Lying(
    grpc.UnaryUnaryClientInterceptor,
    grpc.UnaryStreamClientInterceptor,
    grpc.StreamUnaryClientInterceptor,
    grpc.StreamStreamClientInterceptor,
):
    """Changes the calls of one connection."""

    def __init__(self, change: Change, change_stream: Callable[[Iterator[bytes]], Iterator[bytes]]) -> None:
        self._change, self._change_stream = change, change_stream

    def intercept_unary_unary(self, continuation: Any, details: Any, request: Any) -> Any:
        if isinstance(request, bytes):  # it only asks whether anybody answers
            return continuation(details, request)
        message = self._changed(details, request, [request.SerializeToString()]).message
        return continuation(details, message)

    def intercept_unary_stream(self, continuation: Any, details: Any, request: Any) -> Any:
        return self.intercept_unary_unary(continuation, details, request)

    def intercept_stream_unary(self, continuation: Any, details: Any, frames: Any) -> Any:
        frames = list(frames)
        kind = HEADERS[details.method.rpartition("/")[2]]
        header, _ = read_frames(iter(frames), kind, size_of, MOST_PAYLOAD_BYTES)
        return continuation(details, iter(self._changed(details, header, frames).frames))

    def intercept_stream_stream(self, continuation: Any, details: Any, frames: Any) -> Any:
        return continuation(details, self._change_stream(frames))

    def _changed(self, details: Any, message: Message, frames: Sequence[bytes]) -> Call:
        return self._change(Call(details.method, message, frames, tuple(details.metadata or ())))


@contextmanager
def lying(
    member: str,
    change: Change = lambda call: call,
    change_stream: Callable[[Iterator[bytes]], Iterator[bytes]] = lambda frames: frames,
) -> Iterator[None]:
    """Change the calls of all connections that this member makes in this process, while the block runs.

    `change_stream` changes the frames of streams that a stage opens to another, from the hello on.
    """

    def patched(made: Callable[..., grpc.Channel]) -> Callable[..., grpc.Channel]:
        def make(address: str, identity: Identity | None = None, *arguments: Any) -> grpc.Channel:
            channel = made(address, identity, *arguments)
            if identity is None or identity.shown.name != member:
                return channel
            return grpc.intercept_channel(channel, _Lying(change, change_stream))

        return make

    with ExitStack() as stack:
        for module in (exchange_client, stage_link):  # blocks may be nested, one for each liar
            stack.enter_context(mock.patch.object(module, "make_channel", patched(module.make_channel)))
        yield
