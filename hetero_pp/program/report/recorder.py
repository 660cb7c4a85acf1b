"""Writes the record of a run: metrics.jsonl and TensorBoard events as it runs, a summary and pictures at its end."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from types import MappingProxyType
from typing import Any

from hetero_pp.config.folder import RunFolder
from hetero_pp.config.spec import RunSpec
from hetero_pp.core.files import PART, LastingLog, complaint, flush, write_whole
from hetero_pp.messages.messages_pb2 import Report
from hetero_pp.program.report.boards import MakeSink, OptionalSink, Scalars, TensorBoard
from hetero_pp.program.report.events import line_of
from hetero_pp.program.report.pictures import draw_links, draw_losses
from hetero_pp.program.report.state import RunState
from hetero_pp.program.report.summary import summary_of

INTERRUPTED = "interrupted"  # recorded cause of a run that a user interrupted

_LATER = "{} (--resume does that once the disk has room)"
"""Message about a file that is written at each end of a run, even of a resumed run with nothing left to train."""


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
                self._write(report)
            except Exception as error:  # noqa: BLE001 (an error in the record must not fail the run)
                self._has_gaps = True
                self._fails(error)

    def _write(self, report: Report) -> None:
        if report.WhichOneof("event") is not None:
            self._metrics.write((to_json(line_of(report)) + "\n").encode())
        self._scalars.on_report(report)
        if self._takes_place:
            self._take_place()
        for log in (self._metrics, self._board.log):
            if log is not None and log.failure is not None:
                self._has_gaps |= log.has_gaps
                self._fails(log.failure)

    def _fails(self, error: Exception) -> None:
        if not self._complained:
            became = "has gaps" if self._has_gaps else "is incomplete until the disk has room"
            why = complaint(error) if isinstance(error, OSError) else str(error)
            self._complain(f"{self._folder.path}: the record of the run {became}, but the run continues: {why}")
        self._complained = True

    def close(self, before_drawing: Callable[[], None] | None = None) -> None:
        """Write summary.json and the pictures from what is known.

        Complains about each file that the disk does not take. `before_drawing` is called before the pictures are drawn,
        because that takes seconds.
        """
        with self._lock:
            self._has_ended = True
            if self._takes_place:
                self._take_place()
            self._last(self._metrics.close, "has gaps at its end")
            self._last(self._scalars.close, "has gaps at its end")
            self._last(self._board.close, "has gaps at its end")
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
        pictures = {"loss.png": draw_losses, "links.png": draw_links}
        if self._state.spec.config.rehearsal is not None:
            del pictures["loss.png"]  # nothing is trained
        for name, draw in pictures.items():
            became = _LATER.format("was not drawn")
            if unwritten is None:
                self._last(partial(draw, self._state, folder.path / name), became)
            else:  # a picture takes seconds of computing, for nothing while the disk is full
                self._complain(f"{folder.path / name} {became}; the run itself is not affected: {complaint(unwritten)}")

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
