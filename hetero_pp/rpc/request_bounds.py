"""Largest request of each call, from a run's configuration: longer ones are refused by their length, without parsing.

Parsing can take a hundred times as much memory as a message has bytes, and no other call is answered meanwhile.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from google.protobuf.descriptor import FieldDescriptor

from hetero_pp.messages.messages_pb2 import DESCRIPTOR, Frame, Report
from hetero_pp.rpc.permissions import REPORTS
from hetero_pp.rpc.plain_text import TEXT_BYTES_MAX
from hetero_pp.run.spec import Roster

STATES_MAX = 16
"""Saved states that a member names when it joins. It keeps two, and may have been interrupted while it moved others."""

ADDRESS_BYTES_MAX = 300
"""Bytes of an address; a host name has at most 253."""

REPORTS_BYTES_MAX = 32 << 10
"""Bytes of the reports in one call. Members send more in several calls."""

_NAME_BYTES, _DIGEST_BYTES, _ID_BYTES, _SIGNING_REQUEST_BYTES = 320, 32, 64, 4 << 10
_JUDGEMENTS_A_REPLICA = 8
_ROOM_OF_A_CONFIGURATION = 64 << 10
"""Bytes by which another configuration may be longer than the run's, to be told in which keys it differs."""
_CHECKPOINT_PREFIX_BYTES = 32
_VARINT_BYTES = {FieldDescriptor.TYPE_BOOL: 1, FieldDescriptor.TYPE_UINT32: 5, FieldDescriptor.TYPE_UINT64: 10}
_FIXED_BYTES = {FieldDescriptor.TYPE_FLOAT: 4, FieldDescriptor.TYPE_DOUBLE: 8, FieldDescriptor.TYPE_ENUM: 10}

Bounds = Mapping[str, int]
"""Field of messages.proto, such as `HashReport.sha256` -> entries of a repeated field, or bytes of a text."""


class RequestBounds:
    """Largest requests of one run."""

    def __init__(self, roster: Roster, parameters: Collection[str], configuration_bytes: int) -> None:
        """`parameters`: names of all parameters; `configuration_bytes`: size of the configuration that hosts show."""
        self.fields = _fields(roster, parameters, configuration_bytes)
        """Bound of each field; of texts in repeated fields, `FIELD[]` is the bound of one."""
        self._most = {
            call.name: self.largest(call.input_type)
            for service in DESCRIPTOR.services_by_name.values()
            for call in service.methods
            if service.name != "StageLink" and call.input_type is not Frame.DESCRIPTOR
        } | {"Report": REPORTS_BYTES_MAX}

    def of(self, call: str) -> int:
        """Return the bytes of the largest request of a call."""
        return self._most[call]

    def largest(self, message: Any) -> int:
        """Return the bytes of the largest message of a type, given by its descriptor."""
        total, choices = 0, dict[str, int]()
        for field in message.fields:
            size = self._largest_field(field)
            if field.containing_oneof is None:
                total += size
            else:
                choices[field.containing_oneof.name] = max(size, choices.get(field.containing_oneof.name, 0))
        return total + sum(choices.values())

    def _largest_field(self, field: FieldDescriptor) -> int:
        name = field.full_name.removeprefix(f"{DESCRIPTOR.package}.")
        entries = self.fields[name] if field.is_repeated else 1
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            one = 0 if self.fields.get(name) == 0 else _with_length(self.largest(field.message_type))
        elif field.type in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES):
            one = _with_length(self.fields[f"{name}[]" if field.is_repeated else name])
        else:
            one = (_VARINT_BYTES | _FIXED_BYTES)[field.type]
        return entries * (_varint_bytes(field.number << 3) + one) if one else 0


def _fields(roster: Roster, parameters: Collection[str], configuration_bytes: int) -> Bounds:
    names = [*roster.members, *roster.members.values(), *(link for link, _ in roster.counts), *parameters]
    names += [block for blocks in roster.blocks.values() for block in blocks]
    name = max([_NAME_BYTES, *(len(one.encode()) for one in names)])
    following = max((len(blocks) for blocks in roster.blocks.values()), default=0)
    texts = {
        "AgreeRequest.configuration": 2 * configuration_bytes + _ROOM_OF_A_CONFIGURATION,
        "AgreeRequest.tokens": _ID_BYTES,
        "JoinRequest.address": ADDRESS_BYTES_MAX,
        "JoinRequest.damaged[]": TEXT_BYTES_MAX,
        "JoinRequest.process": _ID_BYTES,
        "AssignRequest.address": ADDRESS_BYTES_MAX,
        "BrokenRequest.cause": TEXT_BYTES_MAX,
        "DiedRequest.cause": TEXT_BYTES_MAX,
        "StayRequest.node": ADDRESS_BYTES_MAX,
        "CheckpointRequest.names[]": name + _CHECKPOINT_PREFIX_BYTES,
        "StoredBlob.url": 0,
        "StoredBlob.sha256": 0,
        "Upload.sha256": _DIGEST_BYTES,
        "RecordRequest.exchange": _ID_BYTES,
        "HashReport.Sha256Entry.value": _DIGEST_BYTES,
        "Recomputed.cause": TEXT_BYTES_MAX,
        "EnrolRequest.request": _SIGNING_REQUEST_BYTES,
        "StateSaving.failure": TEXT_BYTES_MAX,
        "Failure.cause": TEXT_BYTES_MAX,
        "Refusal.reason": TEXT_BYTES_MAX,
        "Computes.device": TEXT_BYTES_MAX,
    }
    texts |= dict.fromkeys(
        [f"Commitment.{one}" for one in ("before", "after", "text", "messages", "rest")], _DIGEST_BYTES
    )
    entries = {
        "JoinRequest.rounds": STATES_MAX,
        "JoinRequest.damaged": STATES_MAX,
        "CheckpointRequest.names": 3 * len(parameters) + 1,  # with momentum and the basis
        "BlobHeader.following": following,
        "BlobHeader.stored": 0,
        "HashReport.sha256": len(parameters),
        "JudgeRequest.judgements": _JUDGEMENTS_A_REPLICA * len(set(roster.members.values())),
        "WatchRequest.members": 2 * len(roster.members) + 1,
        "ReportRequest.reports": 1,
    }
    entries |= {f"Report.{one.name}": int(one.name in REPORTS) for one in Report.DESCRIPTOR.oneofs[0].fields}
    return dict.fromkeys(_NAMES, name) | texts | entries


_NAMES = (
    "BrokenRequest.blames",
    "DiedRequest.member",
    "BlobHeader.replica",
    "BlobHeader.block",
    "FollowingBlob.replica",
    "FollowingBlob.block",
    "Commitment.member",
    "FetchRequest.replica",
    "FetchRequest.block",
    "HashReport.Sha256Entry.key",
    "Judgement.replica",
    "Judgement.copies",
    "Recomputed.member",
    "Recomputed.evidence",
    "ShownFile.name",
    "WatchRequest.members[]",
    "RelayedLink.link",
    "Report.member",
    "InnerStep.replica",
    "Evaluation.replica",
    "LinkUse.link",
    "LinkUse.direction",
    "Refusal.sender",
    "Refusal.kind",
)
"""Fields with a name of the run, or one that is as short."""


def _with_length(size: int) -> int:
    """Return the bytes of a field with a length before it."""
    return size + _varint_bytes(size)


def _varint_bytes(value: int) -> int:
    return max(1, -(-value.bit_length() // 7))
