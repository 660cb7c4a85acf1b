"""A run as the page shows it: frames of any moment, its history, and what the history has gained."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, Protocol

from hetero_pp.core.errors import ConfigError
from hetero_pp.messages.messages_pb2 import Report
from hetero_pp.program.report.recorder import to_json
from hetero_pp.program.report.state import RunState
from hetero_pp.program.view.followed import FollowedReports
from hetero_pp.program.view.frame import frame_of
from hetero_pp.program.view.history import cost_of, history_of, round_of
from hetero_pp.program.view.key_frames import KeyFrames
from hetero_pp.program.view.prediction import PredictedStep, measured_of_run


class Source(Protocol):
    """A run or a prediction on the page."""

    @property
    def view(self) -> RunView | None:
        """The run as far as it is known; None for a prediction alone. It is replaced when the run begins anew."""

    @property
    def prediction(self) -> dict[str, Any] | None:
        """The prediction of one step, which takes a second when it is first asked for; None if there is none."""

    @property
    def predicts(self) -> bool:
        """Whether the prediction is what the user asked for."""

    def start(self) -> None:
        """Begin to follow the run."""

    def wait(self, seconds: float) -> bool:
        """Wait until what is known already has been read; return whether it has."""

    def close(self) -> None:
        """Stop."""


_SECONDS_BETWEEN_KEY_FRAMES, _SECONDS_PER_MEMBER = 0.5, 0.02
"""Interval of key frames at first: its minimum, and the share for each member. Frames of large runs cost more."""


class RunView(FollowedReports):
    """A followed run with its frames. All its methods may be called from any thread."""

    def __init__(self, state: RunState) -> None:
        super().__init__(state)
        self.key_frames = KeyFrames(max(_SECONDS_BETWEEN_KEY_FRAMES, _SECONDS_PER_MEMBER * len(self.members)))
        self._marks_told = 0
        self._predicted: PredictedStep | None = None
        self._told_head: dict[str, Any] = {}

    def take(self, report: Report) -> bool:
        with self.state.lock:
            has_mark = super().take(report)
            if has_mark or self.key_frames.is_due(self.since_start(report.time)):
                self.key_frames.add(self.since_start(report.time), to_json(frame_of(self, report.time)))
        return has_mark

    def frame(self) -> str:
        """Return the frame of this moment, as JSON."""
        with self.state.lock:
            return to_json(frame_of(self, self.now()))

    def frame_at(self, when: float) -> str:
        """Return the frame at a time in seconds since the first report, as JSON."""
        with self.state.lock:
            return self.key_frames.at(when) or to_json(frame_of(self, self.now()))

    def history(self, identifier: str) -> dict[str, Any]:
        """Return everything but the frames."""
        with self.state.lock:
            return {"id": identifier} | history_of(self)

    def prediction(self) -> dict[str, Any] | None:
        """Return the prediction of the run beside what it measured; None for one that cannot be predicted."""
        if self._predicted is None:
            spec = self.state.spec
            with suppress(ConfigError):
                self._predicted = None if spec.config.rehearsal is not None else PredictedStep(spec)
        return None if self._predicted is None else self._predicted.beside(measured_of_run(self))

    def take_changes(self, identifier: str) -> dict[str, Any]:
        """Return what the history has gained since the last call: for each key that changed."""
        with self.state.lock:
            head = {"outcome": self.outcome, "is_live": self.is_live, "problems": list(self.problems)}
            changed = {key: value for key, value in head.items() if self._told_head.get(key, ...) != value}
            self._told_head = head
            rounds = [round_of(self, one) for one in sorted(self._changed_rounds) if one in self.state.closed]
            self._changed_rounds = {one for one in self._changed_rounds if one not in self.state.closed}
            marks = self.marks(self._marks_told)
            self._marks_told = self._marked
            points = {name: found for name, curve in self.curves.items() if (found := curve.take_new())}
            parts = {"rounds": rounds, "marks": marks, "steps": points, "cost": cost_of(self) if rounds else None}
            span = {"id": identifier, "span": self.since_start(self.state.latest or 0.0)}
            return span | changed | {key: value for key, value in parts.items() if value}
