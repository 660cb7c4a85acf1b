"""Shows a run while it runs: a live view on a terminal, or one line per round."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from hetero_pp.config.lines import DIRECTIONS, WAYS
from hetero_pp.core.units import format_bytes, format_share
from hetero_pp.messages.messages_pb2 import Waiting
from hetero_pp.program.report.lines import (
    divergence_line,
    format_amount,
    joined_line,
    round_line,
    start_line,
    status_lines,
    waiting_line,
)
from hetero_pp.program.report.output import about, now_and_then, tell
from hetero_pp.program.report.state import LineState, LinkState, RunState
from hetero_pp.program.report.tables import PlainTable, format_loss, format_two, heads_of

ROWS_BESIDE_LINKS = 13  # rows of the live view that are neither a replica nor a link
ROWS_OF_A_HEAD = 3
REFRESH_SECONDS = 0.25
LOSS_SECONDS = 5.0  # seconds that the line of a round waits for its validation loss once the next round has closed


class LiveDisplay:
    """Shows a running run: a live view on a terminal, else one line per round."""

    def __init__(
        self, state: RunState, console: Console, clock: Callable[[], float] = time.time, since: float | None = None
    ) -> None:
        """`since`: when the user started the command, in seconds of `clock`."""
        self._state, self._console, self._clock, self._since = state, console, clock, since
        self._live: Live | None = None
        self._rounds_told = 0
        self._reading = now_and_then(partial(tell, console), clock)
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
                tell(self._console, start_line(self._state))
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
        """Print lines that are due: all have joined, closed rounds in order, and once what the exchange waits for."""
        state, due = self._state, list[tuple[str, str]]()
        if state.reading is not None:
            self._reading(state.reading.what, state.reading.share)
        with state.lock:
            if not self._joining_told and state.joined_at is not None:
                self._joining_told = True
                due.append(("joined", joined_line(state, self._since)))
            for round_ in range(max(self._rounds_told, state.closed_earlier) + 1, state.rounds + 1):
                if round_ not in state.closed:  # its report was missed
                    continue
                if not is_last and not self._is_complete(round_):
                    break
                due.append(("round_closed", round_line(state, round_)))
                self._rounds_told = round_
            is_new, self._waiting_told = state.waiting is not self._waiting_told, state.waiting
            if is_new and state.waiting is not None and not is_last:
                due.append(("waiting", waiting_line(state, now=self._clock())))
        for event, line in due:
            with about(event):
                tell(self._console, line)

    def _say_divergence(self, is_last: bool) -> None:
        """Say once of each replica that it diverged: of all whose losses of a round show it in one line."""
        with self._state.lock:
            untold = [one for name, one in self._state.diverged.items() if name not in self._diverged_told]
            due = [one for one in untold if is_last or self._is_complete(one.round)]
            self._diverged_told |= {one.replica for one in due}
        if due:
            with about("diverged"):
                tell(self._console, divergence_line(due))

    def _is_complete(self, round_: int) -> bool:
        """Return whether the validation loss of a round is known, or is not waited for any longer.

        The loss arrives after the round closes, in fast runs even after the next round closes. It is not waited for
        while the run pauses, nor for longer than `LOSS_SECONDS` after the next round closed. If all replicas that lack
        it have lost a member, those seconds count from the close of this round.
        """
        state = self._state
        if state.mean_validation_loss(round_) is not None or state.pause is not None:
            return True
        gone = {state.members[slot].replica for slot in state.vacant}
        later = range(round_ if gone.issuperset(state.awaited_losses(round_)) else round_ + 1, state.rounds + 1)
        since = next((state.closed[one].time for one in later if one in state.closed), None)
        return since is not None and self._clock() - since > LOSS_SECONDS


def live_view(state: RunState, now: float, height: int) -> Group:
    """Return title, progress, replicas, lines and links; only the busiest links if not all fit into `height` rows."""
    left, times = state.seconds_left(now), f"{_clock_time(state.elapsed(now))} elapsed"
    if left is not None:
        times += f", about {_clock_time(left)} left"
    what = "" if state.spec.config.rehearsal is None else ": a rehearsal, which trains nothing"
    title = Table.grid(expand=True)
    title.add_column()
    title.add_column(justify="right")
    title.add_row(Text(f" {state.spec.config.name}{what}", style="bold"), Text(f"{times} ", style="dim"))

    progress = Table.grid(padding=(0, 1), expand=True)
    progress.add_column(no_wrap=True)
    progress.add_column(ratio=1)
    progress.add_column(justify="right", no_wrap=True)
    unit = "inner steps" if state.inner_steps is not None else "seconds"
    for label, (done, total) in (
        (" outer rounds", (state.rounds, state.rounds_planned)),
        (f" {unit} of this round", state.progress_of_open_round(now)),
    ):
        bar = ProgressBar(total=total, completed=done)
        progress.add_row(label, bar, f"{format_amount(done)}/{format_amount(total)} ")

    status = [Text(f" {line}", style="yellow" if bad else "dim") for line, bad in status_lines(state, now)]
    parts: list[RenderableType] = [title, progress, *status, _replicas(state, now)]
    links, lines = list(state.links.values()), list(state.lines.values())
    if lines:
        parts.append(_carried("line", "up / down", WAYS, lines, state, now))
    # Of the links only the busiest are shown if not all fit.
    others = len(state.replicas) + max(0, len(status) - 1) + (len(lines) + ROWS_OF_A_HEAD if lines else 0)
    room = max(3, height - ROWS_BESIDE_LINKS - others)
    if len(links) <= room:
        return Group(*parts, _carried("link", "bandwidth", DIRECTIONS, links, state, now))
    busiest = {link.name for link in sorted(links, key=lambda link: link.wire_bytes, reverse=True)[: room - 1]}
    shown = [link for link in links if link.name in busiest]
    rest = Text(f" and {len(links) - len(shown)} links with less traffic", style="dim")
    return Group(*parts, _carried("link", "bandwidth", DIRECTIONS, shown, state, now), rest)


def _replicas(state: RunState, now: float) -> PlainTable:
    heads = ["inner step", "loss", "validation loss", "tokens/s", *(["score"] if state.scores else [])]
    table = PlainTable(["replica", "kind"], heads)
    for replica in state.replicas.values():
        planned = "" if replica.inner_steps is None else f"/{state.rounds_planned * replica.inner_steps}"
        score = state.scores.get(replica.name)
        shown = "–" if score is None else "excluded" if score.excluded else f"{score.final:.2f}"
        table.add_row(
            replica.name,
            replica.kind,
            f"{replica.steps_done}{planned}",
            format_loss(replica.loss),
            format_loss(replica.last_validation_loss),
            f"{state.tokens_per_second(replica, now):,.0f}",
            *([shown] if state.scores else []),
        )
    return table


def _carried(
    head: str, limit: str, ways: Sequence[str], shown: Sequence[LinkState | LineState], state: RunState, now: float
) -> PlainTable:
    """Return a table of what links or lines carry now and have carried. `limit`: the head of their bandwidths."""
    table = PlainTable([head, limit], heads_of(ways, "now", "busy", "total"), spare=[limit])
    seconds = state.training_seconds(now)
    for each in shown:
        traffics = [*each.ways.values()]
        there, back = traffics
        is_by_lines = isinstance(each, LinkState) and each.spec.has_lines and there.bandwidth is back.bandwidth is None
        table.add_row(
            each.name,
            "lines" if is_by_lines else format_two(there.bandwidth, back.bandwidth),
            *(f"{format_bytes(traffic.recent_bytes_per_second(now))}/s" for traffic in traffics),
            *(format_share(traffic.busy_share(seconds)) for traffic in traffics),
            *(format_bytes(traffic.wire_bytes) for traffic in traffics),
        )
    return table


def _clock_time(seconds: float) -> str:
    """Format seconds as a clock: 95 -> "1:35"."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
