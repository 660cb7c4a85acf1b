"""The record of a run: metrics.jsonl and TensorBoard events as it runs, a summary and a picture at its end.

Each line of metrics.jsonl is one report, with the fields of its event by their names. It is what every reader of a
record folds again.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from hetero_pp.config.folder import RunFolder
from hetero_pp.config.lines import EXCHANGE
from hetero_pp.config.run_config import RunConfig
from hetero_pp.config.spec import RunSpec
from hetero_pp.core.bounded import before_gap, parse_json
from hetero_pp.core.errors import DamagedFile
from hetero_pp.core.files import PART, LastingLog, complaint, flush, keep_trying, write_whole
from hetero_pp.messages.messages_pb2 import BlobEntry, Report, RoundRecord
from hetero_pp.program.report.boards import MakeSink, OptionalSink, Scalars, TensorBoard
from hetero_pp.program.report.pictures import draw_losses
from hetero_pp.program.report.state import RunState
from hetero_pp.program.report.summary import summary_of
from replica_groups.exchange.log import open_log

INTERRUPTED = "interrupted"  # recorded cause of a run that a user interrupted

_LATER = "{} (--resume does that once the disk has room)"
"""Message about a file that is written at each end of a run, even of a resumed run with nothing left to train."""
LINE_BYTES_MAX = 2**20
"""Most bytes that are read as one line. The pieces of a longer one are no JSON, so they are skipped."""
STRANGE = (AttributeError, KeyError, OverflowError, TypeError, ValueError)
"""Errors of `report_of` for a line that no report has."""

_EVENTS = frozenset(field.name for field in Report.DESCRIPTOR.oneofs_by_name["event"].fields)
_KEPT = frozenset(
    ["begun", "inner_step", "evaluation", "link_use", "member_round", "refusal", "round_verified", "scores", "judged"]
)
"""Events that a resumed run reports again up to a round. Closed rounds are in the log instead."""
_KEPT_UNTIL = frozenset(["joined", "computes", "activity", "membership_event"])
"""Events without a round that a resumed run reports again, up to the close of the last round that is kept."""


class Recorder:
    """Writes reports as they arrive. Apply each report to `state` first, then give it to `on_report`.

    The record is a view of the run: if writing fails, it prints that once, and the run continues unaffected. Data that
    a full disk does not take is written once it has room.
    """

    def __init__(
        self,
        spec: RunSpec,
        folder: RunFolder,
        state: RunState,
        resume: bool = False,
        complain: Callable[[str], None] = print,
        boards: Mapping[str, MakeSink] = MappingProxyType({}),
    ) -> None:
        """With `resume`, the record of an earlier start stays in place until `go_on`.

        `boards`: further places, by name, that get the scalars of TensorBoard.
        """
        self._folder = folder
        self._state = state
        self._complain = complain
        self._complained = self._has_ended = False
        self._takes_place = False  # whether the record of an earlier start still has to be replaced
        self._has_gaps = False  # whether some report can never be written
        self._lock = threading.Lock()
        self._has_begun = not resume
        self._path = folder.metrics.with_name(folder.metrics.name + PART) if resume else folder.metrics
        self._metrics = LastingLog(self._path)
        self._metrics.flush()
        self._board = TensorBoard(folder.path / "tensorboard", state)
        self._boards = [
            OptionalSink(name, make, state, folder.path / "boards" / name, complain) for name, make in boards.items()
        ]
        self._scalars = Scalars(state, [self._board, *self._boards])

    def go_on(self) -> None:
        """Replace the record of an earlier start, after all reports to keep from it were reported again.

        If some could not be written, the earlier record is kept beside the new one.
        """
        with self._lock:
            self._has_begun = self._takes_place = True
            self._last(self._scalars.close, "has gaps")  # no board gets the end of earlier rounds twice
            for board in self._boards:
                board.go_on()
            self._take_place()

    def _take_place(self) -> None:
        """Replace the record of an earlier start, once everything reported again is on the disk."""
        try:
            self._metrics.flush()
            flush(self._path)
            if self._board.log is not None:
                self._board.log.flush()
            if self._has_gaps and self._folder.metrics.exists():
                self._folder.metrics.replace(f"{self._folder.metrics}.before")
            self._path = self._path.replace(self._folder.metrics)
            if not self._has_gaps:
                self._board.go_on()
            self._folder.summary.unlink(missing_ok=True)  # the summary of a run that had ended
            flush(self._folder.path)
            self._takes_place = False
        except OSError as error:
            self._fails(error)

    def on_report(self, report: Report) -> None:
        """Write one report. Ignored after `close`."""
        with self._lock:
            if self._has_ended:
                return
            try:
                if report.WhichOneof("event") is not None:
                    self._metrics.write((to_json(line_of(report)) + "\n").encode())
                self._scalars.on_report(report)
                if self._takes_place:
                    self._take_place()
                for log in (self._metrics, self._board.log):
                    if log is not None and log.failure is not None:
                        self._has_gaps |= log.has_gaps
                        self._fails(log.failure)
            except Exception as error:  # noqa: BLE001 (an error in the record must not fail the run)
                self._has_gaps = True
                self._fails(error)

    def _fails(self, error: Exception) -> None:
        if not self._complained:
            became = "has gaps" if self._has_gaps else "is incomplete until the disk has room"
            why = complaint(error) if isinstance(error, OSError) else str(error)
            self._complain(f"{self._folder.path}: the record of the run {became}, but the run continues: {why}")
        self._complained = True

    def close(self, before_drawing: Callable[[], None] | None = None) -> None:
        """Write summary.json and loss.png from what is known.

        Complains about each file that the disk does not take. `before_drawing` is called before the picture is drawn,
        because that takes seconds.
        """
        with self._lock:
            self._has_ended = True
            if self._takes_place:
                self._take_place()
            for close in (self._metrics.close, self._scalars.close, self._board.close):
                self._last(close, "has gaps at its end")
        if not self._has_begun:
            with suppress(OSError):
                self._path.unlink()  # the run did not resume: the earlier record stays
        else:
            self._conclude(before_drawing)
        for board in self._boards:  # last, because a service may take long to answer
            board.close()

    def _conclude(self, before_drawing: Callable[[], None] | None) -> None:
        folder = self._folder
        summary = (to_json(summary_of(self._state), indent=2) + "\n").encode()
        unwritten = self._last(lambda: write_whole(folder.summary, summary), _LATER.format("was not written"))
        if before_drawing is not None:
            before_drawing()
        if self._state.spec.config.rehearsal is not None:
            return  # nothing is trained
        picture, became = folder.path / "loss.png", _LATER.format("was not drawn")
        if unwritten is None:
            self._last(partial(draw_losses, self._state, picture), became)
        else:  # a picture takes seconds of computing, for nothing while the disk is full
            self._complain(f"{picture} {became}; the run itself is not affected: {complaint(unwritten)}")

    def _last(self, do: Callable[[], object], became: str) -> OSError | None:
        """Call a function once, and complain if it fails. Return why the disk does not take it, if so."""
        try:
            do()
        except OSError as error:
            path = "the record" if error.filename is None else error.filename
            self._complain(f"{path} {became}; the run itself is not affected: {complaint(error)}")
            return error
        except Exception as error:  # noqa: BLE001 (an error in the record must not fail the run)
            self._fails(error)
        return None


def to_json(value: Any, indent: int | None = None) -> str:
    """Encode strict JSON, in which numbers that are not finite become null."""
    try:
        return json.dumps(value, indent=indent, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(value), indent=indent, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# ---- a line ----


def line_of(report: Report) -> dict[str, Any]:
    """Return a report as an object for JSON. A closed round has the sums of its blobs, and no commitments."""
    event = report.WhichOneof("event")
    told = getattr(report, str(event))
    if event == "round_closed":
        told = RoundRecord(round=told.round, late=told.late, left_out=told.left_out)
        for entry in report.round_closed.contributions:
            kept = told.contributions.add()
            kept.CopyFrom(entry)
            del kept.commitments[:], kept.blobs[:]
            sizes = sum(blob.size for blob in entry.blobs), sum(blob.kept_values for blob in entry.blobs)
            kept.blobs.append(BlobEntry(size=sizes[0], kept_values=sizes[1]))
    return {"time": report.time, "member": report.member, "event": event} | _fields(told, keeps_zeros=True)


def report_of(line: Mapping[str, Any]) -> Report:
    """Return the report of a line. Numbers that are not finite were recorded as null, and stay unset.

    Raises one of STRANGE for a line that no report has.
    """
    report, event = Report(time=float(line["time"]), member=line["member"]), line["event"]
    if not math.isfinite(report.time) or event not in _EVENTS:
        raise ValueError(f"found the event {event!r} at {report.time}, expected a known one at a finite time")
    _fill(getattr(report, event), line)
    return report


def _fields(message: Message, keeps_zeros: bool) -> dict[str, Any]:
    """Return the fields of a message: bytes in hexadecimal digits, enumerated values by their names in lower case.

    Left out are optional fields that are not set, empty lists, and in messages within it all zeros.
    """
    found: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if field.is_repeated:
            if value:
                found[field.name] = [_value(field, one) for one in value]
        elif message.HasField(field.name) if field.has_presence else keeps_zeros or value:
            found[field.name] = _value(field, value)
    return found


def _value(field: Any, value: Any) -> Any:
    if isinstance(value, Message):
        return _fields(value, keeps_zeros=False)
    if field.enum_type is not None:
        known = field.enum_type.values_by_number.get(value)
        return value if known is None else known.name.lower()
    return value.hex() if isinstance(value, bytes) else value


def _fill(message: Message, line: Mapping[str, Any]) -> None:
    message.SetInParent()
    for field in message.DESCRIPTOR.fields:
        value = line.get(field.name)
        if value is None:
            continue
        if field.message_type is not None:
            for one in value if field.is_repeated else [value]:
                own = getattr(message, field.name)
                _fill(own.add() if field.is_repeated else own, one)
        elif field.is_repeated:
            getattr(message, field.name).extend(value)
        elif field.enum_type is not None and isinstance(value, str):
            setattr(message, field.name, field.enum_type.values_by_name[value.upper()].number)
        else:
            is_bytes = field.type == FieldDescriptor.TYPE_BYTES
            setattr(message, field.name, bytes.fromhex(value) if is_bytes else value)


# ---- reading a record ----


def reports_until(config: RunConfig, folder: RunFolder, last: int, complain: Callable[[str], None]) -> list[Report]:
    """Return the earlier reports of a run up to a round, in order of time, so that a resumed run applies them again.

    Closed rounds come from the run's log, and all else from metrics.jsonl. With overlap, the steps of the next round
    are included, because the saved states contain them. `complain` is called with a line on what is missing.
    From which round a run resumes is decided elsewhere (replica_groups.exchange.host).
    """
    until_of = {"inner_step": last + config.outer.overlap}
    reports, unplaced, closed, strange = list[Report](), list[Report](), dict[int, float](), 0
    for line in _lines(folder.metrics):
        try:
            event = line["event"]
            if event == "round_closed":
                closed[int(line["round"])] = float(line["time"])
            elif event in _KEPT and line.get("round", 0) <= until_of.get(event, last):
                reports.append(report_of(line))
            elif event in _KEPT_UNTIL:
                unplaced.append(report_of(line))
        except STRANGE:
            strange += 1
    if strange:
        complain(f"skipped {strange} unreadable lines of {folder.metrics.name}")
    until = max((time for round_, time in closed.items() if round_ <= last), default=0.0)
    reports += [report for report in unplaced if report.time <= until]
    for report in reports:
        if report.HasField("begun"):  # the resumed run's own `begun` report has all changes
            report.begun.ClearField("changes")
            report.begun.ClearField("note")
    log, when = open_log(config, folder), min((report.time for report in reports), default=time.time())
    for round_ in range(1, last + 1):
        try:
            record = keep_trying(partial(log.read_record, round_), complain)
        except (DamagedFile, FileNotFoundError) as error:
            complain(f"the contributions of round {round_} are missing from the summary: {error}")
            record = RoundRecord(round=round_)
        when = max(when, closed.get(round_, when))  # a close that was not recorded: assume the time of the round before
        reports.append(Report(time=when, member=EXCHANGE, round_closed=record))
    return sorted(reports, key=lambda report: report.time)


def last_closed(folder: RunFolder) -> int:
    """Return the last closed round in metrics.jsonl; 0 if there is none."""
    rounds = (line.get("round") for line in _lines(folder.metrics, "round_closed"))
    return before_gap({0, *(round_ for round_ in rounds if isinstance(round_, int) and round_ > 0)})[-1]


def recorded(folder: RunFolder, *events: str) -> Iterator[Report]:
    """Yield the recorded reports of some events, by default of all. Damaged lines are left out."""
    for line in _lines(folder.metrics, *events):
        with suppress(*STRANGE):
            yield report_of(line)


def _lines(metrics: Path, *events: str) -> Iterator[Any]:
    """Yield the parsed lines of some events, or all that are JSON; nothing if the file does not exist."""
    if not metrics.is_file():
        return
    with metrics.open(encoding="utf-8", errors="replace") as file:
        while text := file.readline(LINE_BYTES_MAX):
            if events and not any(f'"{event}"' in text for event in events):
                continue
            with suppress(ValueError):  # the last line may be cut off if the run was killed
                line = parse_json(text)
                if not events or (isinstance(line, dict) and line.get("event") in events):
                    yield line
