"""A run as the page shows it: its state, its curves and marks, and frames of any moment."""

from __future__ import annotations

import time
import zlib
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from hetero_pp.core.errors import ConfigError
from hetero_pp.messages.messages_pb2 import Report
from hetero_pp.program.report.recorder import to_json
from hetero_pp.program.report.state import News, RunState
from hetero_pp.program.view.page_data import cost_of, frame_of, history_of, mark_of, round_of, since_start
from hetero_pp.program.view.prediction import PredictedStep, measured_of_run

MOST_POINTS = 1000  # points of a curve, after thinning
MOST_MARKS = 5000  # marks that are kept: the newest ones
MOST_FRAMES = 800  # above this number every second frame is dropped, and later ones are taken half as often
_MOST_PROBLEMS = 20
_SECONDS_BETWEEN_FRAMES, _SECONDS_PER_MEMBER = 0.5, 0.02
"""Interval of key frames at first: its minimum, and the share for each member. Frames of large runs cost more."""
_SECONDS_OUT_OF_ORDER = 5.0
"""A report that is older than the last frame by more belongs to an earlier start of the run, which is told again."""


class Curve:
    """Loss over the steps of one replica: at most twice MOST_POINTS points [time, step, loss]."""

    def __init__(self) -> None:
        self.points: list[list[float]] = []
        self._every = 1
        self._unsent = 0  # number of the first step that `take_new` has not returned

    def add(self, time: float, step: int, loss: float) -> None:
        """Add a point. A step that is trained again replaces its point and those after it."""
        while self.points and self.points[-1][1] >= step:
            self.points.pop()
            self._unsent = min(self._unsent, step)
        if step % self._every == 0:
            self.points.append([time, step, loss])
        if len(self.points) >= 2 * MOST_POINTS:
            self._every *= 2
            self.points = [point for point in self.points if point[1] % self._every == 0]

    def take_new(self) -> list[list[float]]:
        """Return the points since the last call."""
        found = self.points[bisect_left([point[1] for point in self.points], self._unsent) :]
        if found:
            self._unsent = int(found[-1][1]) + 1
        return found


class KeyFrames:
    """Frames by time, as compressed JSON. Their number is bounded, and so is the memory: some MB for 100 members."""

    def __init__(self, interval: float) -> None:
        """`interval`: seconds between two frames at first."""
        self._interval = interval
        self._times: list[float] = []
        self._frames: list[bytes] = []

    def is_due(self, time: float) -> bool:
        """Return whether a frame at this time is wanted."""
        if not self._times:
            return True
        return time >= self._times[-1] + self._interval or time < self._times[-1] - _SECONDS_OUT_OF_ORDER

    def add(self, time: float, frame: str) -> None:
        """Add a frame. It replaces those at later times."""
        kept = bisect_right(self._times, time)
        del self._times[kept:], self._frames[kept:]
        self._times.append(time)
        self._frames.append(zlib.compress(frame.encode(), level=1))
        if len(self._times) > MOST_FRAMES:
            self._interval *= 2
            self._times, self._frames = self._times[::2], self._frames[::2]

    def at(self, time: float) -> str | None:
        """Return the last frame up to a time, or the first one; None if there is none."""
        if not self._times:
            return None
        return zlib.decompress(self._frames[max(0, bisect_right(self._times, time) - 1)]).decode()

    def some(self, most: int) -> Iterator[str]:
        """Yield at most this many frames, evenly spaced over all of them, with the last one."""
        count = len(self._frames)
        chosen = {round(index * (count - 1) / max(1, most - 1)) for index in range(most)}
        for index in sorted(chosen) if count > most else range(count):
            yield zlib.decompress(self._frames[index]).decode()


class RunView:
    """A run with what its page needs beyond its state. Apply each report to `state`, then give it to `take`.

    All methods may be called from any thread.
    """

    def __init__(self, state: RunState) -> None:
        self.state = state
        self.own: tuple[str, ...] = ()  # members on this host, if it has joined a run of another host
        self.text = ""  # first digits of the digest of the run's text; empty if unknown
        self.is_live = True
        self.outcome: str | None = None
        """How the run ended: `over` or `failed`; None while it is not known to have ended."""
        self.cause = ""  # why it failed
        self.version = 0  # changes with everything that the page shows
        self.curves: dict[str, Curve] = {}
        self.stale = ""  # why the page may be behind the run; empty if it is not known to be
        self.problems: list[str] = []
        self.key_frames = KeyFrames(max(_SECONDS_BETWEEN_FRAMES, _SECONDS_PER_MEMBER * len(state.members)))
        self._marks: deque[tuple[int, News]] = deque(maxlen=MOST_MARKS)
        self._marked = self._marks_told = 0  # number of marks so far, and of those that `take_changes` has returned
        self._changed_rounds: set[int] = set()
        self._told_head: dict[str, Any] = {}
        self._heard_at = time.monotonic()
        self._predicted: PredictedStep | None = None

    # ---- writing ----

    def take(self, report: Report) -> None:
        """Take in a report that the state has accepted."""
        with self.state.lock:
            self.version += 1
            self._heard_at = time.monotonic()
            if self.state.news is not None:
                self._marks.append((self._marked, self.state.news))
                self._marked += 1
            event, since = report.WhichOneof("event"), since_start(self.state, report.time)
            if event in ("evaluation", "member_round", "round_closed"):
                self._changed_rounds.add(getattr(report, event).round)
            if event == "inner_step" and report.inner_step.HasField("loss"):
                step = report.inner_step
                replica = self.state.replicas.get(step.replica)
                if replica is not None and step.round not in replica.settled:
                    curve = self.curves.setdefault(step.replica, Curve())
                    curve.add(since, replica.index(step.round, step.step), step.loss)
            if self.state.news is not None or self.key_frames.is_due(since):
                self.key_frames.add(since, to_json(frame_of(self.state, report.time, self.outcome, self.stale)))

    def end(self, outcome: str | None, is_live: bool, cause: str = "") -> None:
        """Note how the run ended, or that it runs."""
        if (outcome, is_live, cause) != (self.outcome, self.is_live, self.cause):
            self.outcome, self.is_live, self.cause = outcome, is_live, cause
            self.version += 1

    def note_stale(self, why: str) -> None:
        """Note why the page may be behind the run."""
        if why != self.stale:
            self.stale = why
            self.version += 1

    def complain(self, problem: str) -> None:
        """Note something that is missing or damaged. Only the first ones are kept."""
        if len(self.problems) < _MOST_PROBLEMS and problem not in self.problems:
            self.problems.append(problem)
            self.version += 1

    # ---- reading ----

    def now(self) -> float:
        """Return the present time by the clock of the reports: it stands still once the run has ended."""
        latest = self.state.latest or 0.0
        return latest + (time.monotonic() - self._heard_at) if self.is_live and self.state.latest else latest

    def marks(self, since: int = 0) -> list[dict[str, Any]]:
        """Return the marks from a number on, in order of time: a run that goes on reports its earlier start later."""
        found = sorted((one for one in self._marks if one[0] >= since), key=lambda one: one[1].report.time)
        return [mark_of(self.state, number, news) for number, news in found]

    def frame(self, when: float | None = None) -> str:
        """Return the frame of this moment, or at a time in seconds since the first report, as JSON."""
        with self.state.lock:
            earlier = None if when is None else self.key_frames.at(when)
            return earlier or to_json(frame_of(self.state, self.now(), self.outcome, self.stale))

    def history(self, identifier: str) -> dict[str, Any]:
        """Return everything but the frames."""
        with self.state.lock:
            steps = {name: curve.points for name, curve in self.curves.items()}
            found = self._head() | {"own": list(self.own), "steps": steps, "marks": self.marks()}
            return {"id": identifier} | history_of(self.state, self.text) | found

    def _head(self) -> dict[str, Any]:
        return {"outcome": self.outcome, "cause": self.cause, "is_live": self.is_live, "problems": [*self.problems]}

    def whole(self, identifier: str) -> str:
        """Return the history and the frame of this moment, as JSON."""
        with self.state.lock:
            return f'{{"history": {to_json(self.history(identifier))}, "frame": {self.frame()}}}'

    def changes(self, identifier: str) -> str:
        """Return what the history has gained since the last call, and the frame of this moment, as JSON."""
        with self.state.lock:
            return f'{{"history": {to_json(self.take_changes(identifier))}, "frame": {self.frame()}}}'

    def take_changes(self, identifier: str) -> dict[str, Any]:
        """Return what the history has gained since the last call: for each key that changed."""
        with self.state.lock:
            head = self._head()
            changed = {key: value for key, value in head.items() if self._told_head.get(key, ...) != value}
            self._told_head = head
            rounds = [round_of(self.state, one) for one in sorted(self._changed_rounds) if one in self.state.closed]
            self._changed_rounds = {one for one in self._changed_rounds if one not in self.state.closed}
            marks, self._marks_told = self.marks(self._marks_told), self._marked
            points = {name: found for name, curve in self.curves.items() if (found := curve.take_new())}
            parts = {"rounds": rounds, "marks": marks, "steps": points, "cost": cost_of(self.state) if rounds else None}
            span = {"id": identifier, "span": since_start(self.state, self.state.latest or 0.0)}
            return span | changed | {key: value for key, value in parts.items() if value}

    def prediction(self) -> dict[str, Any] | None:
        """Return the prediction of the run beside what it measured; None for one that cannot be predicted.

        It takes a second when it is first asked for.
        """
        if self._predicted is None:
            spec = self.state.spec
            with suppress(ConfigError):
                self._predicted = None if spec.config.rehearsal is not None else PredictedStep(spec)
        return None if self._predicted is None else self._predicted.beside(measured_of_run(self.state))
