"""What had been reported of a run that ended early, to be reported again when it goes on.

After which round it goes on is not decided here: members say what they have, and the exchange chooses
(replica_groups.exchange.restart).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from hetero_pp.bounded import before_gap, parse_json
from hetero_pp.errors import DamagedFile
from hetero_pp.links import EXCHANGE
from hetero_pp.messages.messages_pb2 import Happened, Report, RoundRecord
from hetero_pp.run.config import RunConfig
from hetero_pp.run.folder import RunFolder
from replica_groups.exchange.open_log import open_log

_KEPT = ("begun", "inner_step", "evaluation", "link_use", "member_round", "refusal", "round_verified")
"""Events that a run which goes on tells again; closed rounds are in the log."""

_LINE_CHARACTERS_MAX = 2**20
"""Characters of one line of metrics.jsonl; what is longer is read in parts, none of which is JSON."""

_KEPT_UNTIL = ("joined", "standing")
"""The same of those that name no round, up to the close of the last that is kept."""


def reports_until(config: RunConfig, folder: RunFolder, last: int, complain: Callable[[str], None]) -> list[Report]:
    """What was reported of a run's rounds up to this one: closed rounds by its log, the rest as far as it was noted.

    With overlap the steps of the next round, too: they are part of the states that members go on from.
    """
    until_of = {"inner_step": last + config.outer.overlap}
    reports, unplaced, closed, strange = [], [], {}, 0
    for line in _lines(folder.metrics):
        try:
            if line["event"] == "round_closed":
                closed[int(line["round"])] = float(line["time"])
            elif line["event"] in _KEPT and line.get("round", 0) <= until_of.get(line["event"], last):
                reports.append(_report(line))
            elif line["event"] in _KEPT_UNTIL:
                unplaced.append(_report(line))
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError):
            strange += 1
    if strange:
        complain(f"{strange} unreadable lines of {folder.metrics.name} are skipped")
    until = max((time for round_, time in closed.items() if round_ <= last), default=0.0)
    reports += [report for report in unplaced if report.time <= until]
    log, when = open_log(config, folder), min((report.time for report in reports), default=time.time())
    for round_ in range(1, last + 1):
        try:
            record = log.read_record(round_)
        except (DamagedFile, FileNotFoundError) as error:
            complain(f"the contributions of round {round_} are missing from the summary: {error}")
            record = RoundRecord(round=round_)
        when = max(when, closed.get(round_, when))  # of one that was not noted before the end: after the one before
        reports.append(Report(time=when, member=EXCHANGE, round_closed=record))
    return sorted(reports, key=lambda report: report.time)


def last_closed(folder: RunFolder) -> int:
    """Return the last round whose close was noted; 0 if none was."""
    closed = (line for line in _lines(folder.metrics, '"round_closed"') if isinstance(line, dict))
    rounds = (line.get("round") for line in closed if line.get("event") == "round_closed")
    known = {round_ for round_ in rounds if isinstance(round_, int) and round_ > 0}
    return before_gap({0, *known})[-1]


def _lines(metrics: Path, having: str = "") -> Iterator[Any]:
    """Yield the lines that hold a text, parsed; nothing if there is no such file."""
    if not metrics.is_file():
        return
    with metrics.open(encoding="utf-8", errors="replace") as file:
        while line := file.readline(_LINE_CHARACTERS_MAX):
            if having in line:
                with suppress(ValueError):  # the last line of a run that was killed as it wrote
                    yield parse_json(line)


def _report(line: dict[str, Any]) -> Report:
    report = Report(time=float(line["time"]), member=line["member"])
    if line["event"] == "standing":
        line = line | {"what": Happened.Value(line["what"].upper())}
    _fill(getattr(report, line["event"]), line)
    if report.HasField("begun"):
        report.begun.ClearField("changes")  # the start that goes on now tells them all
    return report


def _fill(message: Message, line: dict[str, Any]) -> None:
    message.SetInParent()
    for field in message.DESCRIPTOR.fields:
        value = line.get(field.name)
        if field.is_repeated:
            if value:  # several texts were joined to one
                getattr(message, field.name).append(value)
        elif value is not None:
            is_bytes = field.type == FieldDescriptor.TYPE_BYTES
            setattr(message, field.name, bytes.fromhex(value) if is_bytes else value)
