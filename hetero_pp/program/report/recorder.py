"""Writes the record of a run: metrics.jsonl and TensorBoard events as it runs, a summary and pictures at its end."""

from __future__ import annotations

import json
import math
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetero_pp.core.files import PART, LastingLog, complaint, flush, write_whole
from hetero_pp.messages.messages_pb2 import Evaluation, InnerStep, LinkUse, Report
from hetero_pp.program.report.flat import flat_lines
from hetero_pp.program.report.pictures import draw_links, draw_losses
from hetero_pp.program.report.state import RunState
from hetero_pp.program.report.summary import summary_of
from hetero_pp.run.folder import RunFolder
from hetero_pp.run.spec import RunSpec
from hetero_pp.run.yaml_file import config_text

if TYPE_CHECKING:
    from tensorboard.compat.proto.event_pb2 import Event


INTERRUPTED = "interrupted"
"""Recorded cause of a run that a user interrupted."""

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
    ) -> None:
        """With `resume`, the record of an earlier start stays in place until `go_on`."""
        self._folder = folder
        self._state = state
        self._complain = complain
        self._complained = self._has_ended = False
        self._takes_place = False
        """Whether the record of an earlier start still has to be replaced."""
        self._has_gaps = False
        """Whether some report can never be written."""
        self._lock = threading.Lock()
        self._has_begun = not resume
        self._path = folder.metrics.with_name(folder.metrics.name + PART) if resume else folder.metrics
        self._metrics = LastingLog(self._path)
        self._metrics.flush()
        self._board = _Board(folder.path / "tensorboard", state)

    def go_on(self) -> None:
        """Replace the record of an earlier start, after all reports to keep from it were reported again.

        If some could not be written, the earlier record is kept beside the new one.
        """
        with self._lock:
            self._has_begun = self._takes_place = True
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
        for line in flat_lines(report):
            self._metrics.write((to_json(line) + "\n").encode())
        self._board.on_report(report)
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

    def fail(self, cause: str) -> None:
        """Record the cause of a failed run for the summary."""
        self._state.fail(cause)

    def close(self, before_drawing: Callable[[], None] | None = None) -> None:
        """Write summary.json and the pictures from what is known.

        Complains about each file that the disk does not take. `before_drawing` is called before the pictures are drawn,
        because that takes seconds.
        """
        folder = self._folder
        with self._lock:
            self._has_ended = True
            if self._takes_place:
                self._take_place()
            self._last(self._metrics.close, "has gaps at its end")
            self._last(self._board.close, "has gaps at its end")
        if not self._has_begun:
            with suppress(OSError):
                self._path.unlink()  # the run did not resume: the earlier record stays
            return
        unwritten = self._last(lambda: write_whole(folder.summary, self._summary()), _LATER.format("was not written"))
        if before_drawing is not None:
            before_drawing()
        for name, draw in (("loss.png", draw_losses), ("links.png", draw_links)):
            became = _LATER.format("was not drawn")
            if unwritten is None:
                self._last(partial(draw, self._state, folder.path / name), became)
            else:  # a picture takes seconds of computing, for nothing while the disk is full
                self._complain(f"{folder.path / name} {became}; the run itself is not affected: {complaint(unwritten)}")

    def _summary(self) -> bytes:
        return (to_json(summary_of(self._state), indent=2) + "\n").encode()

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


class _Board:
    """Writes scalars for TensorBoard, one value per tag and step.

    The step is the global inner step for inner steps, and the round for everything else.
    """

    def __init__(self, folder: Path, state: RunState) -> None:
        # Imported now: it takes seconds, for which the first reports of a run would wait unwritten.
        import torch.utils.tensorboard.summary  # noqa: F401 (which imports tensorboard)

        self._folder = folder
        self._state = state
        self._before = list(folder.glob("events.*"))
        """Files of earlier starts of the run."""
        self._newest: dict[str, int] = {}
        """Step of the last written value, by tag."""
        self._uses: dict[tuple[str, str], tuple[float, LinkUse]] = {}
        self._tokens: dict[int, dict[str, int]] = {}
        """Tokens up to the end of a round, by round and replica, until those of all replicas are written."""
        self._written: dict[str, tuple[int, float]] = {}
        """Last written (tokens, training seconds), by replica and for all."""
        self.log: LastingLog | None = None
        """The open file; None until there is something to write."""

    def _write(self, event: Event) -> None:
        """Write an event. The file is created with the first one, so that a failed resume leaves no file.

        TensorBoard's own writer is not used: it writes in a thread, which ends for good when a disk is full for a
        moment.
        """
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter

        if self.log is None:
            from torch.utils.tensorboard.summary import text

            name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{id(self)}"
            self.log = LastingLog(self._folder / name)
            config = self._state.spec.with_changes(self._state.changes).latest
            summary = text("configuration", f"```yaml\n{config_text(config)}```")
            for first in (
                Event(wall_time=time.time(), file_version="brain.Event:2"),
                Event(wall_time=event.wall_time, step=0, summary=summary),
            ):
                RecordWriter(self.log).write(first.SerializeToString())
        RecordWriter(self.log).write(event.SerializeToString())

    def go_on(self) -> None:
        """Remove the files of earlier starts, after all reports to keep from them were reported again."""
        for path in self._before:
            path.unlink(missing_ok=True)

    def on_report(self, report: Report) -> None:
        """Write the scalars of a report."""
        event = report.WhichOneof("event")
        if event == "inner_step":
            self._inner_step(report.time, report.inner_step)
        elif event == "evaluation":
            self._evaluation(report.time, report.evaluation)
        elif event == "link_use":
            self._link_use(report.time, report.link_use)
        elif event == "member_round":
            self._member_round(report.time, report.member, report.member_round.round)

    def _scalar(self, when: float, tag: str, value: float, step: int) -> None:
        if step <= self._newest.get(tag, -1):
            return  # a resumed run evaluates again what it resumes from
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        self._newest[tag] = step
        summary = Summary(value=[Summary.Value(tag=tag, simple_value=value)])
        self._write(Event(wall_time=when, step=step, summary=summary))

    def _inner_step(self, when: float, step: InnerStep) -> None:
        replica = self._state.replicas.get(step.replica)
        index = 0 if replica is None else replica.index(step.round, step.step)
        for field, tag in (("loss", "training_loss"), ("gradient_norm",) * 2, ("learning_rate",) * 2):
            if step.HasField(field):
                self._scalar(when, f"{tag}/{step.replica}", getattr(step, field), index)

    def _evaluation(self, when: float, evaluation: Evaluation) -> None:
        self._scalar(when, f"validation_loss/{evaluation.replica}", evaluation.loss, evaluation.round)
        mean = self._state.mean_validation_loss(evaluation.round)
        if mean is not None:
            self._scalar(when, "validation_loss/mean", mean, evaluation.round)

    def _member_round(self, when: float, member: str, round_: int) -> None:
        """Write a replica's tokens once its first member has finished a round, having reported all of its steps."""
        for name, replica in self._state.replicas.items():
            if member in (name, f"{name}.0"):
                tokens = replica.tokens_until(round_)
                self._tokens.setdefault(round_, {})[name] = tokens
                self._write_tokens(when, name, tokens, round_)
        for told in sorted(self._tokens):
            if told < round_ - 1 or self._tokens[told].keys() >= self._state.replicas.keys():
                self._write_tokens(when, "all", sum(self._tokens.pop(told).values()), told)

    def _write_tokens(self, when: float, name: str, tokens: int, round_: int) -> None:
        """Write the tokens up to a round, and their rate since the round before."""
        seconds = self._state.training_seconds(when)
        tokens_before, seconds_before = self._written.get(name, (0, 0.0))
        self._written[name] = tokens, seconds
        self._scalar(when, f"tokens/{name}", tokens, round_)
        if seconds > seconds_before:
            rate = (tokens - tokens_before) / (seconds - seconds_before)
            self._scalar(when, f"tokens_per_second/{name}", rate, round_)

    def _link_use(self, when: float, use: LinkUse) -> None:
        """Write the final count of a round when the first count of the next round arrives: counts are cumulative."""
        key = (use.link, use.direction)
        if key in self._uses and self._uses[key][1].round != use.round:
            self._round_over(*self._uses[key])
        self._uses[key] = (when, use)

    def _round_over(self, when: float, use: LinkUse) -> None:
        self._scalar(when, f"wire_bytes/{use.link}/{use.direction}", use.wire_bytes, use.round)
        link = self._state.links.get(use.link)
        for way, direction in link.directions.items() if link is not None else ():
            share = direction.busy_share(self._state.training_seconds(when))
            if way == use.direction and share is not None:
                self._scalar(when, f"busy_share/{use.link}/{way}", share, use.round)

    def close(self) -> None:
        """Write the last round of each link, and flush."""
        for when, use in self._uses.values():
            self._round_over(when, use)
        self._uses.clear()
        if self.log is not None:
            self.log.close()
