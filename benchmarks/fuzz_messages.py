"""Messages to every call of messages.proto: honest, mutated, and with arbitrary values."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from attack_calls import Target
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from lies import HEADERS

from hetero_pp.link.framing import header_and_payload_frames
from hetero_pp.messages import messages_pb2 as pb
from hetero_pp.rpc.callers import Metadata, shown
from hetero_pp.rpc.channels import PROTOCOL_VERSION
from hetero_pp.rpc.identities import Credentials
from hetero_pp.rpc.relay import SERVICE as RELAY
from hetero_pp.rpc.services import ADMISSION_SERVICE as ADMISSION
from hetero_pp.rpc.services import EXCHANGE_SERVICE as EXCHANGE
from hetero_pp.rpc.stage_link import SERVICE as LINKS

CALLS = {call.name: service for service in (EXCHANGE, ADMISSION, RELAY, LINKS) for call in service.methods}
TEXTS = [
    "",
    "exchange",
    "launcher",
    "away",
    "a\x1b[2J\n\x07",
    "x" * 3000,
    "../../state",
    "{}",
    "[[[[",
    "null",
    "é\u202e",
]
BYTES = [b"", bytes(31), bytes(32), b"\xff" * 32, bytes(1000)]
NUMBERS = [0, 1, 2, 3, 7, 100, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1]
FLOATS = [0.0, 1.0, -1.0, 1e300, math.nan, math.inf, -math.inf]
INTEGERS = {
    FieldDescriptor.TYPE_UINT32: 2**32,
    FieldDescriptor.TYPE_UINT64: 2**64,
    FieldDescriptor.TYPE_ENUM: 2**31,
}


@dataclass
class Known:
    """State that the guest knows, and the valid values that follow from it."""

    target: Target
    incarnation: int = 1
    round: int = 1
    blob: bytes = b""
    """Honest blob of the guest's first block and of no other, because a complete contribution would be included."""
    request: bytes = b""
    """Honest request for a certificate."""
    number: Iterator[int] = field(default_factory=lambda: count(1))

    def right(self, dice: random.Random) -> Mapping[str, Any]:
        """Return valid values of fields by name. The round may be one that is already closed."""
        target = self.target
        return {
            "version": PROTOCOL_VERSION,
            "replica": target.guest.name,
            "member": target.guest.name,
            "block": target.blocks[0],
            "round": self.round - dice.choice([0, 0, 1, 1, 2]),
            "holds": self.round - 1,
            "generation": self.incarnation,
            "incarnation": self.incarnation,
            "size": len(self.blob),
            "token": "",
            "link": target.link.name,
            "request": self.request,
            "sender": target.neighbour.name,
            "stream": 1,
            "received": 0,
            "goes_on": False,
        }


def any_message(message: Message, dice: random.Random, texts: Sequence[str], depth: int = 0) -> Message:
    """Fill a message with values that fit its fields. Some are at the limits of their type."""
    for one in message.DESCRIPTOR.fields:
        if dice.random() < 0.25 or depth > 3:
            continue
        if one.message_type is not None and one.message_type.GetOptions().map_entry:
            entries = getattr(message, one.name)
            for _ in range(dice.randrange(4)):
                entries[dice.choice(texts)] = dice.choice(BYTES)
        elif one.is_repeated:
            values = getattr(message, one.name)
            for _ in range(dice.randrange(4)):
                if one.message_type is not None:
                    any_message(values.add(), dice, texts, depth + 1)
                else:
                    values.append(_value(one, dice, texts))
        elif one.message_type is not None:
            any_message(getattr(message, one.name), dice, texts, depth + 1).SetInParent()
        else:
            setattr(message, one.name, _value(one, dice, texts))
    return message


def _value(one: Any, dice: random.Random, texts: Sequence[str]) -> Any:
    if one.type == FieldDescriptor.TYPE_STRING:
        return dice.choice(texts)
    if one.type == FieldDescriptor.TYPE_BYTES:
        return dice.choice(BYTES)
    if one.type == FieldDescriptor.TYPE_BOOL:
        return dice.random() < 0.5
    if one.type in INTEGERS:
        return dice.choice([number for number in NUMBERS if number < INTEGERS[one.type]])
    return dice.choice(FLOATS)


def righted(message: Message, right: Mapping[str, Any]) -> Message:
    """Set each field to the valid value of its name, if there is one, and return the message."""
    for one in message.DESCRIPTOR.fields:
        if one.name in right and not one.is_repeated and one.message_type is None:
            setattr(message, one.name, right[one.name])
        elif one.message_type is not None and not one.is_repeated and message.HasField(one.name):
            righted(getattr(message, one.name), right)
    return message


def mutated(data: bytes, dice: random.Random) -> bytes:
    """Return the bytes after a few changes: bits flipped, bytes removed, inserted or doubled."""
    found = bytearray(data)
    for _ in range(dice.randrange(1, 5)):
        at = dice.randrange(len(found) + 1)
        match dice.randrange(4):
            case 0 if at < len(found):
                found[at] ^= 1 << dice.randrange(8)
            case 1:
                del found[at : at + dice.randrange(1, 9)]
            case 2:
                found[at:at] = dice.randbytes(dice.randrange(1, 9))
            case 3:
                found[at:at] = found[at : at + dice.randrange(1, 65)]
    return bytes(found)


def request(call: str, dice: random.Random, known: Known, texts: Sequence[str]) -> list[bytes]:
    """Return the frames of one call: a third honest, a third with arbitrary values, a third with changed bytes."""
    kind = HEADERS.get(call) or GetMessageClass(CALLS[call].methods_by_name[call].input_type)
    message, way = any_message(kind(), dice, texts), dice.randrange(3)
    if way != 1:
        righted(message, known.right(dice))
    if isinstance(message, pb.LinkHello) and way != 1:
        hello = message if isinstance(message, pb.LinkHello) else message.hello
        righted(hello, known.right(dice))
        hello.generation, hello.session = next(known.number), b"session"
    if isinstance(message, pb.RelayedLink) and way != 1:
        message.link = dice.choice([known.target.own_link] * 8 + [known.target.link.name, "", "dc-exchange"])
    if isinstance(message, pb.ReportRequest):
        _spare_the_run(message)
    frames = _frames(call, message, dice, known, texts)
    if way == 2:
        at = dice.randrange(len(frames))
        frames[at] = mutated(frames[at], dice)
    return frames


def _spare_the_run(message: pb.ReportRequest) -> None:
    """Mark each failure as a consequence of another one.

    A member's own failure is believed, and would end the run (docs/security.md).
    """
    for report in message.reports:
        if report.HasField("failure"):
            report.failure.consequence = True


def _frames(call: str, message: Message, dice: random.Random, known: Known, texts: Sequence[str]) -> list[bytes]:
    if call in ("Deposit", "Show"):
        payload = known.blob if dice.random() < 0.5 else dice.randbytes(dice.randrange(2000))
        return list(header_and_payload_frames(message, [payload]))
    if call in ("Probe", "Measure"):
        sizes = [dice.choice([0, 1, 100, 5000, 512 << 10, (512 << 10) + 1]) for _ in range(dice.randrange(1, 5))]
        return [dice.randbytes(size) for size in sizes]
    if call == "Open":
        headers = [any_message(pb.LinkHeader(), dice, texts) for _ in range(dice.randrange(4))]
        bodies = [list(header_and_payload_frames(one, [dice.randbytes(dice.randrange(200))])) for one in headers]
        return [message.SerializeToString(), *(frame for body in bodies for frame in body)]
    return [message.SerializeToString()]


def metadata(caller: str, call: str, dice: random.Random, known: Known) -> Metadata:
    """Return the metadata of a message, by which the caller names itself beside its certificate."""
    target = known.target
    if caller == "member" and CALLS[call] is RELAY:
        return shown(target.ends[0])
    if caller == "member":
        own = shown(target.guest, target.run if dice.random() < 0.95 else None)
        incarnations = [str(known.incarnation)] * 12 + [str(known.incarnation - 1), "0", "999999999", "-1", "one"]
        return (*own, ("incarnation", dice.choice(incarnations)))
    strange = Credentials(dice.choice([target.guest.name, target.honest, "launcher", "exchange", "away", "x" * 500]))
    shows = [(), (("token", "made up"),), shown(strange, target.run, 1), (("name", strange.name), ("token", ""))]
    return dice.choice(shows)
