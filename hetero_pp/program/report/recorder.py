"""What a run leaves behind: metrics.jsonl and TensorBoard events as it goes, a summary and pictures at its end."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from google.protobuf.message import Message

from hetero_pp.errors import RunFailed
from hetero_pp.files import PART, flush, write_whole
from hetero_pp.messages.messages_pb2 import Awaited, Evaluation, Happened, InnerStep, LinkUse, Report, RoundRecord
from hetero_pp.program.report.pictures import draw_links, draw_losses
from hetero_pp.program.report.state import RunState
from hetero_pp.run.folder import RunFolder
from hetero_pp.run.spec import RunSpec
from hetero_pp.run.yaml_file import config_text

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class Recorder:
    """Writes reports as they come. Give each report to `state` first, then to `on_report`.

    What it writes is a view of the run: where that fails it says so, once, and neither ends nor falsifies the run.
    """

    def __init__(
        self,
        spec: RunSpec,
        folder: RunFolder,
        state: RunState,
        resume: bool = False,
        complain: Callable[[str], None] = print,
    ) -> None:
        """With `resume` what an earlier start of the run left stays as it is until `go_on`."""
        self._folder = folder
        self._state = state
        self._complain = complain
        self._complained = False
        self._lock = threading.Lock()
        self._has_begun = not resume
        self._path = folder.metrics.with_name(folder.metrics.name + PART) if resume else folder.metrics
        self._metrics = self._path.open("w", buffering=1, encoding="utf-8")  # by line: a killed run keeps what it wrote
        self._board = _Board(folder.path / "tensorboard", state)

    def go_on(self) -> None:
        """Take the place of what an earlier start wrote: all that is to be kept of it was reported again.

        Where that could not be written, what the earlier start wrote is kept beside it.
        """
        with self._lock:
            self._has_begun = True
            try:
                self._metrics.flush()
                flush(self._path)
                if self._complained and self._folder.metrics.exists():
                    self._folder.metrics.replace(f"{self._folder.metrics}.before")
                self._path = self._path.replace(self._folder.metrics)
                if not self._complained:
                    self._board.go_on()
                self._folder.summary.unlink(missing_ok=True)  # of a run that had ended
                flush(self._folder.path)
            except OSError as error:
                self._fails(error)

    def on_report(self, report: Report) -> None:
        """Write one report; nothing any more after `close`."""
        with self._lock:
            if self._metrics.closed:
                return
            try:
                self._write(report)
            except Exception as error:  # noqa: BLE001 (see above: whatever fails here is not the run)
                self._fails(error)

    def _write(self, report: Report) -> None:
        for line in flat_lines(report):
            self._metrics.write(to_json(line) + "\n")
        self._board.on_report(report)

    def _fails(self, error: Exception) -> None:
        if not self._complained:
            self._complain(
                f"{self._folder.path}: metrics cannot be written ({error}); they have a gap, and the run continues"
            )
        self._complained = True

    def fail(self, cause: str) -> None:
        """The run has failed: the summary will say why."""
        self._state.fail(cause)

    def close(self) -> None:
        """Write summary.json and the pictures, of what is known.

        Raises RunFailed if a run that is known to have failed in nothing else would be left without a summary.
        """
        with self._lock:
            for close in (self._metrics.close, self._board.close):
                try:
                    close()
                except Exception as error:  # noqa: BLE001 (see above)
                    self._fails(error)
        if not self._has_begun:
            self._path.unlink()  # the run did not go on: what it had left stays
            return
        try:
            write_whole(self._folder.summary, (to_json(self._state.summary(), indent=2) + "\n").encode())
            draw_losses(self._state, self._folder.path / "loss.png")
            draw_links(self._state, self._folder.path / "links.png")
        except OSError as error:
            if self._state.failed is None:
                raise RunFailed(f"the run is over, but its summary and pictures cannot be written: {error}") from None
            self._fails(error)


def to_json(value: Any, indent: int | None = None) -> str:
    """Strict JSON: a number that is not finite becomes null."""
    return json.dumps(_finite(value), indent=indent, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def flat_lines(report: Report) -> Iterator[dict[str, Any]]:
    """A report as flat objects: one, and one more for each contribution of a closed round."""
    event = report.WhichOneof("event")
    head = {"time": report.time, "member": report.member}
    if event == "round_closed":
        record = report.round_closed
        late = {"late": ", ".join(record.late)} if record.late else {}
        yield head | {"event": event, "round": record.round, "contributions": len(record.contributions)} | late
        yield from (head | {"event": "contribution"} | line for line in _contribution_lines(record))
    elif event == "begun":
        begun = report.begun
        yield (
            head
            | {"event": event, "last_round": begun.last_round, "damaged": "; ".join(begun.damaged)}
            | ({"changes": begun.changes} if begun.changes else {})
        )
    elif event == "waiting":
        waiting = report.waiting
        what = {"awaited": Awaited.Name(waiting.awaited).lower(), "round": waiting.round, "seconds": waiting.seconds}
        yield head | {"event": event} | what | {"members": ", ".join(one.member for one in waiting.missing)}
    elif event == "over":
        over = {"round": report.over.round, "rounds": report.over.rounds}
        yield head | {"event": event} | over | {"finishing": ", ".join(report.over.finishing)}
    elif event == "standing":
        told = report.standing
        yield head | {"event": event} | _fields(told) | {"what": Happened.Name(told.what).lower()}
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
        }


def _fields(event: Message) -> dict[str, Any]:
    """The fields of a message without nested ones, but for optional ones that are not set."""
    values = {
        field.name: getattr(event, field.name)
        for field in event.DESCRIPTOR.fields
        if not field.has_presence or event.HasField(field.name)
    }
    return {name: value.hex() if isinstance(value, bytes) else value for name, value in values.items()}


class _Board:
    """Scalars for TensorBoard: inner steps over the global step, everything else over the round; one value a step."""

    def __init__(self, folder: Path, state: RunState) -> None:
        self._folder = folder
        self._state = state
        self._before = list(folder.glob("events.*"))
        """Of earlier starts of the run."""
        self._newest: dict[str, int] = {}
        """The step of the last value that was written, by tag."""
        self._uses: dict[tuple[str, str], tuple[float, LinkUse]] = {}
        self._tokens: dict[int, dict[str, int]] = {}
        """By round, then by replica: tokens up to its end, until those of all replicas are written."""
        self._written: dict[str, tuple[int, float]] = {}
        """By replica, and for all: tokens and training seconds that were written last."""

    @cached_property
    def _writer(self) -> SummaryWriter:
        """Made when there is something to write: an attempt to go on that fails leaves no file."""
        from torch.utils.tensorboard import SummaryWriter

        writer = SummaryWriter(str(self._folder), flush_secs=5)
        config = self._state.spec.with_changes(self._state.changes).latest
        writer.add_text("configuration", f"```yaml\n{config_text(config)}```", 0)
        return writer

    def go_on(self) -> None:
        """Take the place of what earlier starts wrote: all that is to be kept of it was reported again."""
        for path in self._before:
            path.unlink(missing_ok=True)

    def on_report(self, report: Report) -> None:
        """Write what a report adds."""
        event = report.WhichOneof("event")
        if event == "inner_step":
            self._inner_step(report.time, report.inner_step)
        elif event == "evaluation":
            self._evaluation(report.time, report.evaluation)
        elif event == "link_use":
            self._link_use(report.time, report.link_use)
        elif event == "member_round":
            self._member_round(report.time, report.member, report.member_round.round)

    def _scalar(self, time: float, tag: str, value: float, step: int) -> None:
        if step <= self._newest.get(tag, -1):
            return  # evaluated again where the run goes on
        self._newest[tag] = step
        self._writer.add_scalar(tag, value, step, walltime=time)

    def _inner_step(self, time: float, step: InnerStep) -> None:
        replica = self._state.replicas.get(step.replica)
        index = 0 if replica is None else replica.index(step.round, step.step)
        for field, tag in (("loss", "training_loss"), ("gradient_norm",) * 2, ("learning_rate",) * 2):
            if step.HasField(field):
                self._scalar(time, f"{tag}/{step.replica}", getattr(step, field), index)

    def _evaluation(self, time: float, evaluation: Evaluation) -> None:
        self._scalar(time, f"validation_loss/{evaluation.replica}", evaluation.loss, evaluation.round)
        mean = self._state.mean_validation_loss(evaluation.round)
        if mean is not None:
            self._scalar(time, "validation_loss/mean", mean, evaluation.round)

    def _member_round(self, time: float, member: str, round_: int) -> None:
        """Write a replica's tokens once its first member is through with a round: it has told all of its steps then."""
        for name, replica in self._state.replicas.items():
            if member in (name, f"{name}.0"):
                tokens = replica.tokens_until(round_)
                self._tokens.setdefault(round_, {})[name] = tokens
                self._write_tokens(time, name, tokens, round_)
        for told in sorted(self._tokens):
            if told < round_ - 1 or self._tokens[told].keys() >= self._state.replicas.keys():
                self._write_tokens(time, "all", sum(self._tokens.pop(told).values()), told)

    def _write_tokens(self, time: float, name: str, tokens: int, round_: int) -> None:
        """Write the tokens up to a round, and their rate since the round before."""
        seconds = self._state.training_seconds(time)
        tokens_before, seconds_before = self._written.get(name, (0, 0.0))
        self._written[name] = tokens, seconds
        self._scalar(time, f"tokens/{name}", tokens, round_)
        if seconds > seconds_before:
            rate = (tokens - tokens_before) / (seconds - seconds_before)
            self._scalar(time, f"tokens_per_second/{name}", rate, round_)

    def _link_use(self, time: float, use: LinkUse) -> None:
        """A count is cumulative within its round: write it when the next round's first one comes."""
        key = (use.link, use.direction)
        if key in self._uses and self._uses[key][1].round != use.round:
            self._round_over(*self._uses[key])
        self._uses[key] = (time, use)

    def _round_over(self, time: float, use: LinkUse) -> None:
        self._scalar(time, f"wire_bytes/{use.link}/{use.direction}", use.wire_bytes, use.round)
        link = self._state.links.get(use.link)
        for way, direction in link.directions.items() if link is not None else ():
            share = direction.busy_share(self._state.training_seconds(time))
            if way == use.direction and share is not None:
                self._scalar(time, f"busy_share/{use.link}/{way}", share, use.round)

    def close(self) -> None:
        """Write the links' last round, and flush."""
        for time, use in self._uses.values():
            self._round_over(time, use)
        self._uses.clear()
        if "_writer" in vars(self):
            self._writer.close()
