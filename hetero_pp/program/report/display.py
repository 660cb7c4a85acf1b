"""Shows a run while it runs: a live view on a terminal, or one line per round."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

from rich.console import Console, Group
from rich.live import Live

from hetero_pp.messages.messages_pb2 import Waiting
from hetero_pp.program.report.json_lines import about
from hetero_pp.program.report.live_view import live_view
from hetero_pp.program.report.output import tell
from hetero_pp.program.report.reading import now_and_then
from hetero_pp.program.report.round_lines import divergence_line, joined_line, round_line, start_line, waiting_line
from hetero_pp.program.report.state import RunState

REFRESH_SECONDS = 0.25
LOSS_SECONDS = 5.0
"""Seconds that the line of a round waits for its validation loss once the next round has closed."""


class LiveDisplay:
    """Shows a running run: a live view on a terminal, else one line per round."""

    def __init__(
        self, state: RunState, console: Console, clock: Callable[[], float] = time.time, since: float | None = None
    ) -> None:
        """`since`: when the user started the command, in seconds of `clock`."""
        self._state, self._console, self._clock, self._since = state, console, clock, since
        self._live: Live | None = None
        self._rounds_told = 0
        self._reading = now_and_then(self._say, clock)
        self._joining_told = False
        self._waiting_told: Waiting | None = None
        self._diverged_told: set[str] = set()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="display", daemon=True)

    def __enter__(self) -> LiveDisplay:
        if self._console.is_terminal:
            self._live = Live(self.view(), console=self._console, auto_refresh=False)
            self._live.start()
        else:
            with about("start"):
                self._say(start_line(self._state))
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        """Stop the display. The view of a run that ended well disappears, because `print_result` prints its tables."""
        self._ended.set()
        self._thread.join()
        if self._live is not None:
            self._live.update(self.view())
            self._live.transient = error is None
            self._live.stop()
        else:
            self._say_what_is_new(is_last=True)
        self._say_divergence(is_last=True)

    def refresh(self) -> None:
        """Update what is shown. The display does so by itself every REFRESH_SECONDS."""
        if self._live is not None:
            self._live.update(self.view(), refresh=True)
        else:
            self._say_what_is_new(is_last=False)
        self._say_divergence(is_last=False)

    def view(self) -> Group:
        with self._state.lock:
            return live_view(self._state, self._clock(), self._console.height)

    def _run(self) -> None:
        while not self._ended.wait(REFRESH_SECONDS):
            self.refresh()

    def _say_what_is_new(self, is_last: bool) -> None:
        if self._state.reading is not None:
            self._reading(self._state.reading.what, self._state.reading.share)
        due = {"joined": self._beginning_due(), "round_closed": self._lines_due(is_last)}
        for event, lines in (due | {"waiting": self._waiting_due(is_last)}).items():
            with about(event):
                for line in lines:
                    self._say(line)

    def _beginning_due(self) -> Iterator[str]:
        """Yield once, when all members have joined, the line that says so."""
        with self._state.lock:
            if not self._joining_told and self._state.joined_at is not None:
                self._joining_told = True
                yield joined_line(self._state, self._since)

    def _waiting_due(self, is_last: bool) -> Iterator[str]:
        """Yield what the exchange waits for, once per report of it."""
        with self._state.lock:
            is_new = self._state.waiting is not self._waiting_told
            self._waiting_told = self._state.waiting
            if is_new and self._state.waiting is not None and not is_last:
                yield waiting_line(self._state, now=self._clock())

    def _lines_due(self, is_last: bool) -> list[str]:
        """Return the lines of closed rounds, in order. A line waits for its validation loss (see `_is_complete`)."""
        lines: list[str] = []
        with self._state.lock:
            first = max(self._rounds_told, self._state.closed_earlier) + 1
            for round_ in range(first, self._state.rounds + 1):
                if round_ not in self._state.closed:  # its report was missed
                    continue
                if not is_last and not self._is_complete(round_):
                    break
                lines.append(round_line(self._state, round_))
                self._rounds_told = round_
        return lines

    def _say_divergence(self, is_last: bool) -> None:
        """Say once of each replica that it diverged: of all whose losses of a round show it in one line."""
        with self._state.lock:
            untold = [one for name, one in self._state.diverged.items() if name not in self._diverged_told]
            due = [one for one in untold if is_last or self._is_complete(one.round)]
            self._diverged_told |= {one.replica for one in due}
        if due:
            with about("diverged"):
                self._say(divergence_line(due))

    def _is_complete(self, round_: int) -> bool:
        """Return whether the validation loss of a round is known, or is not waited for any longer.

        The loss arrives after the round closes, in fast runs even after the next round closes. It is not waited for
        while the run pauses, nor for longer than `LOSS_SECONDS` after the next round closed. If all replicas that lack
        it have lost a member, those seconds count from the close of this round.
        """
        state = self._state
        if state.mean_validation_loss(round_) is not None or state.membership_state.pause is not None:
            return True
        gone = {state.membership_state.slots[slot].replica for slot in state.membership_state.vacant}
        later = range(round_ if gone.issuperset(state.awaited_losses(round_)) else round_ + 1, state.rounds + 1)
        since = next((state.closed[one].time for one in later if one in state.closed), None)
        return since is not None and self._clock() - since > LOSS_SECONDS

    def _say(self, line: str) -> None:
        tell(self._console, line)
