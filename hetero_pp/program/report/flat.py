"""Reports as the flat lines of metrics.jsonl, and reports from such lines."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from hetero_pp.messages.messages_pb2 import (
    Awaited,
    BlobEntry,
    ContributionEntry,
    Judgement,
    Missing,
    Report,
    RoundRecord,
    Waiting,
)

_JOINED = ", "
"""Sign between the names of a list, which a flat line holds as one text."""
_DAMAGED = "; "
"""Sign between the descriptions of damaged files."""
_EVENTS = frozenset(field.name for field in Report.DESCRIPTOR.oneofs_by_name["event"].fields)


def flat_lines(report: Report) -> Iterator[dict[str, Any]]:
    """Yield a report as flat objects: one, and one per contribution of a closed round; one per replica's score."""
    event = report.WhichOneof("event")
    head = {"time": report.time, "member": report.member}
    if event == "round_closed":
        record = report.round_closed
        lists = {"late": _JOINED.join(record.late), "left_out": _JOINED.join(record.left_out)}
        what = {"round": record.round, "contributions": len(record.contributions)}
        yield head | {"event": event} | what | {name: text for name, text in lists.items() if text}
        yield from (head | {"event": "contribution"} | line for line in _contribution_lines(record))
    elif event == "begun":
        begun = report.begun
        texts = {"changes": begun.changes, "note": begun.note}
        since = {"last_round": begun.last_round, "damaged": _DAMAGED.join(begun.damaged)}
        yield head | {"event": event} | since | {name: text for name, text in texts.items() if text}
    elif event == "waiting":
        yield head | {"event": event} | _waiting(report.waiting)
    elif event == "scores":
        of_round = head | {"event": event, "round": report.scores.round}
        yield from (of_round | _fields(score) for score in report.scores.scores)
    elif event == "judged":
        yield head | {"event": event} | _judgement(report.judged)
    elif event == "over":
        over = {"round": report.over.round, "rounds": report.over.rounds}
        yield head | {"event": event} | over | {"finishing": _JOINED.join(report.over.finishing)}
    elif event is not None:
        yield head | {"event": event} | _fields(getattr(report, event))


def _contribution_lines(record: RoundRecord) -> Iterator[dict[str, Any]]:
    for entry in record.contributions:
        yield {
            "round": record.round,
            "replica": entry.replica,
            "weight": entry.weight,
            "digest": entry.digest.hex(),
            "bytes": sum(blob.size for blob in entry.blobs),
            "kept_values": sum(blob.kept_values for blob in entry.blobs),
            "steps": entry.steps,
            "tokens": entry.tokens,
        } | ({"scale": entry.scale} if entry.scale else {})


def _waiting(told: Waiting) -> dict[str, Any]:
    what = {"awaited": Awaited.Name(told.awaited).lower(), "round": told.round, "seconds": told.seconds}
    lists = {
        "silent": [f"{one.member} {one.silent_seconds}" for one in told.missing if one.HasField("silent_seconds")],
        "computing": [one.member for one in told.missing if one.computes],
    }
    texts = {name: _JOINED.join(found) for name, found in lists.items()} | {"obstacle": told.obstacle}
    members = {"members": _JOINED.join(one.member for one in told.missing)}
    return what | members | {name: text for name, text in texts.items() if text}


def _judgement(told: Judgement) -> dict[str, Any]:
    finding = told.WhichOneof("finding") or ""
    found = getattr(told, finding, None)
    of_finding = _fields(found) if isinstance(found, Message) else {finding: found}
    return {"round": told.round, "replica": told.replica, "finding": finding} | of_finding


def _fields(event: Message) -> dict[str, Any]:
    """Return the fields of a message without nested ones, without optional fields that are not set."""
    told = (field for field in event.DESCRIPTOR.fields if not field.has_presence or event.HasField(field.name))
    return {field.name: _value(field, getattr(event, field.name)) for field in told}


def _value(field: Any, value: Any) -> Any:
    """Return a value as JSON has it: bytes in hexadecimal digits, and the name of an enumerated value."""
    if field.enum_type is not None:
        known = field.enum_type.values_by_number.get(value)
        return str(value) if known is None else known.name.lower()
    return value.hex() if isinstance(value, bytes) else value


# ---- and back ----


class UnknownEvent(ValueError):
    """A line has an event that this version does not know."""


def report_of(line: Mapping[str, Any]) -> Report:
    """Return the report of a line, for a closed round without its contributions.

    Numbers that are not finite were recorded as null, and stay unset. Raises UnknownEvent, or ValueError, TypeError,
    KeyError or AttributeError for a line that no report has.
    """
    report, event = Report(time=float(line["time"]), member=line["member"]), line["event"]
    if not math.isfinite(report.time):
        raise ValueError(f"found the time {report.time}, expected a finite one")
    if event not in _EVENTS:
        raise UnknownEvent(f"found the unknown event {event[:40]!r}")
    told = getattr(report, event)
    told.SetInParent()
    if event == "waiting":
        _fill_waiting(report.waiting, line)
        return report
    _fill(told, line)
    if event == "scores":
        _fill(report.scores.scores.add(), line)
    elif event == "judged" and line["finding"] in ("losses", "recomputed"):
        finding = getattr(report.judged, line["finding"])
        finding.SetInParent()
        _fill(finding, line)
    return report


def contribution_of(line: Mapping[str, Any]) -> ContributionEntry:
    """Return the contribution of a line. Its blobs are one, of the same size."""
    blob = BlobEntry(size=line["bytes"], kept_values=line["kept_values"])
    entry = ContributionEntry(replica=line["replica"], weight=line["weight"], blobs=[blob])
    entry.digest = bytes.fromhex(line["digest"])
    entry.steps, entry.tokens, entry.scale = line.get("steps", 0), line.get("tokens", 0), line.get("scale", 0.0)
    return entry


def _fill(message: Any, line: Mapping[str, Any]) -> None:
    for field in message.DESCRIPTOR.fields:
        _set(message, field, line.get(field.name))


def _fill_waiting(waiting: Waiting, line: Mapping[str, Any]) -> None:
    told = {"round": line["round"], "seconds": line["seconds"], "obstacle": line.get("obstacle", "")}
    waiting.MergeFrom(Waiting(awaited=line["awaited"].upper(), **told))
    silent = dict(one.rsplit(" ", 1) for one in _names(line.get("silent", "")))
    computing = _names(line.get("computing", ""))
    for name in _names(line["members"]):
        missing = Missing(member=name, computes=name in computing)
        if name in silent:
            missing.silent_seconds = float(silent[name])
        waiting.missing.append(missing)


def _names(text: str) -> list[str]:
    return text.split(_JOINED) if text else []


def _set(message: Message, field: FieldDescriptor, value: Any) -> None:
    """Set one field of a message from the value of a line. Nested messages have no value in a line."""
    if value is None or field.type == FieldDescriptor.TYPE_MESSAGE:
        return
    if field.is_repeated:
        if value:
            getattr(message, field.name).extend(value.split(_DAMAGED if field.name == "damaged" else _JOINED))
        return
    if field.enum_type is not None:
        value = field.enum_type.values_by_name[value.upper()].number
    setattr(message, field.name, bytes.fromhex(value) if field.type == FieldDescriptor.TYPE_BYTES else value)
