"""Terminal output of a run: a live view or one line per round while it runs, and tables at its end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from hetero_pp.config.links import DIRECTIONS, EXCHANGE
from hetero_pp.config.topology import DatacenterReplica
from hetero_pp.core.units import format_bytes, format_count, format_number, format_seconds
from hetero_pp.messages.messages_pb2 import CONTRIBUTING, FINISHING, JOINING, STORING, Waiting
from hetero_pp.outer.exchange_service import FIRST_TOLD
from hetero_pp.program.report.carried import LinkState
from hetero_pp.program.report.line_tables import live_lines, result_lines
from hetero_pp.program.report.output import say, tell
from hetero_pp.program.report.reading import now_and_then, reading_line
from hetero_pp.program.report.replica_state import ReplicaState
from hetero_pp.program.report.standing_lines import reasons, result_standings, trouble_lines
from hetero_pp.program.report.state import RunState, format_share
from hetero_pp.program.report.tables import PlainTable, format_bandwidth, format_two, heads_of
from replica_groups.exchange.patience import listed, whom

REFRESH_SECONDS = 0.25
LOSS_SECONDS = 5.0
"""Seconds that the line of a round waits for its validation loss once the next round has closed."""
STALL_SECONDS = 60.0
"""Seconds without an inner step after which a member that trains, and sends heartbeats, is shown as stalled."""
ROWS_BESIDE_LINKS = 13
"""Rows of the live view that are neither a replica nor a link."""
ROWS_OF_A_HEAD = 3
"""Rows of a table's head."""


class LiveDisplay:
    """Shows a running run: a live view on a terminal, else one line per round."""

    def __init__(
        self,
        state: RunState,
        console: Console,
        clock: Callable[[], float] = time.time,
        since: float | None = None,
    ) -> None:
        """`since`: when the user started the command, in seconds of `clock`."""
        self._state = state
        self._since = since
        self._console = console
        self._clock = clock
        self._live: Live | None = None
        self._rounds_told = 0
        self._reading = now_and_then(self._say, clock)
        self._joining_told = False
        self._waiting_told: Waiting | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="display", daemon=True)

    def __enter__(self) -> LiveDisplay:
        if self._console.is_terminal:
            self._live = Live(self.view(), console=self._console, auto_refresh=False)
            self._live.start()
        else:
            self._say(start_line(self._state))
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Stop the display.

        The live view of a run that ended well disappears, because `print_result` prints its tables.
        """
        self._ended.set()
        self._thread.join()
        if self._live is not None:
            self._live.update(self.view())
            self._live.transient = error is None
            self._live.stop()
        else:
            self._say_what_is_new(is_last=True)

    def refresh(self) -> None:
        """Update what is shown. The display does so by itself every REFRESH_SECONDS."""
        if self._live is not None:
            self._live.update(self.view(), refresh=True)
        else:
            self._say_what_is_new(is_last=False)

    def view(self) -> Group:
        """Return the whole live view."""
        with self._state.lock:
            return live_view(self._state, self._clock(), self._console.height)

    def _run(self) -> None:
        while not self._ended.wait(REFRESH_SECONDS):
            self.refresh()

    def _say_what_is_new(self, is_last: bool) -> None:
        if self._state.reading is not None:
            self._reading(self._state.reading.what, self._state.reading.share)
        for line in [*self._beginning_due(), *self._lines_due(is_last), *self._waiting_due(is_last)]:
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

    def _is_complete(self, round_: int) -> bool:
        """Return whether the validation loss of a round is known, or is not waited for any longer.

        The loss arrives after the round closes, in fast runs even after the next round closes. It is not waited for
        while the run pauses, nor for longer than `LOSS_SECONDS` after the next round closed. If all replicas that lack
        it have lost a member, those seconds count from the close of this round.
        """
        state = self._state
        if state.mean_validation_loss(round_) is not None or state.standings.pause is not None:
            return True
        gone = {state.standings.places[place].replica for place in state.standings.vacant}
        later = range(round_ if gone.issuperset(state.awaited_losses(round_)) else round_ + 1, state.rounds + 1)
        since = next((state.closed[one].time for one in later if one in state.closed), None)
        return since is not None and self._clock() - since > LOSS_SECONDS

    def _say(self, line: str) -> None:
        tell(self._console, line)


# ---- lines, without a terminal ----


def start_line(state: RunState) -> str:
    """Return a line on the run that is about to start."""
    spec = state.spec
    replicas = format_count(sum(not replica.optional for replica in spec.config.replicas), "replica")
    return (
        f"{spec.config.name}: {replicas}, {format_count(len(spec.needed), 'member')}, "
        f"{format_count(state.rounds_planned, 'outer round')} of {spec.config.inner.length}"
    )


def joined_line(state: RunState, since: float | None = None) -> str:
    """Return how many members have joined, and which have not; with `since`, how long it took for all to join."""
    members = list(state.spec.needed)
    missing = [member for member in members if member not in state.joined]
    count = f"{format_count(len(members), 'member')} {'has' if len(members) == 1 else 'have'} joined"
    if not missing:
        after = ""
        if since is not None and state.joined_at is not None:
            after = f", {format_seconds(max(0.0, state.joined_at - since))} after the start"
        return f"{'all ' if len(members) > 1 else ''}{count}{after}"
    return f"{len(members) - len(missing)} of {count}, missing: {listed([_with_nodes(state, one) for one in missing])}"


def _with_nodes(state: RunState, member: str) -> str:
    """Return a member's name, with a note if it joins only once all of its nodes have met."""
    replica = state.spec.members[member].replica
    if isinstance(replica, DatacenterReplica) and replica.nodes > 1:
        return f"{member} (joins when its {replica.nodes} nodes have met)"
    return member


def waiting_line(state: RunState, now: float | None = None, sees_all: bool = True) -> str:
    """Return what the exchange waits for, and since when there was no progress.

    `now`: seconds since the epoch, by default when the exchange reported it. `sees_all`: whether `state` is given the
    reports of all members, so that it knows how many inner steps the slowest replica has done.
    """
    assert state.waiting is not None and state.waiting_told is not None
    now = state.waiting_told if now is None else max(now, state.waiting_told)
    seconds = round(state.waiting.seconds + now - state.waiting_told)
    if state.waiting.awaited == CONTRIBUTING:
        return _contributing(state, state.waiting, now, seconds, sees_all)
    if state.waiting.awaited == STORING:
        return f"{whom(state.waiting)}; retrying for {format_seconds(max(1, seconds))} so far"
    what = joined_line(state) if state.waiting.awaited == JOINING else whom(state.waiting)
    missing = state.waiting.missing
    heard = [one for one in missing if one.HasField("silent_seconds") and one.silent_seconds < FIRST_TOLD]
    if state.waiting.awaited == FINISHING and len(heard) == len(missing):  # they apply and evaluate the last round
        return f"{what}; for {format_seconds(seconds)} so far"
    return f"{what}; no progress for {format_seconds(seconds)}"


def _contributing(state: RunState, waiting: Waiting, now: float, seconds: float, sees_all: bool) -> str:
    """Return the line for a round whose contributions are awaited.

    It is of the form `round 1: training (2 of 50 inner steps; waiting for 5 of 5 contributions)`. It names the late
    members, and the `seconds` for which the round has stalled. A long step is no stall: while a member computes, the
    line names it instead, and both are left out of the first minute of training.
    """
    missing = [one.member for one in waiting.missing]
    total = len({*state.contributing_members(waiting.round), *missing})
    names = f" from {listed(missing)}" if len(missing) < total else ""
    waits = f"waiting for {len(missing)} of {format_count(total, 'contribution')}{names}"
    silent = [
        f"{one.member} for {format_seconds(round(one.silent_seconds))}" if one.silent_seconds else one.member
        for one in waiting.missing
        if not one.HasField("silent_seconds") or one.silent_seconds >= FIRST_TOLD
    ]
    heard = f"; no heartbeat from {listed(silent)}" if silent else ""
    computing = [one.member for one in waiting.missing if one.computes and one.silent_seconds < FIRST_TOLD]
    stalled = f"; no progress for {format_seconds(seconds)}"
    if computing:
        stalled = f"; computing for {format_seconds(seconds)}: {listed(computing)}"
    if not sees_all or waiting.round != state.rounds + 1:
        return f"round {waiting.round}: {waits}{heard}{stalled}"
    done, planned = state.progress_of_open_round(now)
    is_training = done < planned
    if is_training and not silent and seconds < STALL_SECONDS:
        stalled = ""
    what = "training" if is_training else "trained"
    unit = "s" if state.inner_steps is None else "inner steps"
    return f"round {waiting.round}: {what} ({_amount(done)} of {_amount(planned)} {unit}; {waits}){heard}{stalled}"


def _amount(value: float) -> str:
    """Format inner steps, or seconds of a round."""
    return format_number(round(value, 1), 6)


def earlier_line(state: RunState) -> str:
    """Return a line on earlier rounds: `rounds 1 to 12 were closed earlier; last validation loss 4.3100`."""
    last = state.closed_earlier
    rounds = "round 1 was" if last == 1 else f"rounds 1 to {last} were"
    losses = (state.mean_validation_loss(round_) for round_ in range(last, -1, -1))
    loss = next((loss for loss in losses if loss is not None), None)
    return f"{rounds} closed earlier" + ("" if loss is None else f"; last validation loss {_loss(loss)}")


def round_line(state: RunState, round_: int) -> str:
    """Return the line of a closed round: losses, seconds, excluded replicas, and missing losses with reasons."""
    replicas = state.of_round(round_)
    losses = ", ".join(f"{name} {_loss(replica.round_loss(round_))}" for name, replica in replicas.items())
    uncounted = state.standings.not_counted(round_)
    unevaluated = {name: why for name, why in state.missing_losses(round_).items() if name not in uncounted}
    without = {"excluded": uncounted, "not evaluated": unevaluated}
    return (
        f"round {round_}/{state.rounds_planned}: validation loss {_validation(state, round_)}, "
        f"training loss {losses}, {format_seconds(state.round_seconds(round_))}"
        + "".join(f"; {what}: {reasons(why)}" for what, why in without.items() if why)
    )


def _validation(state: RunState, round_: int) -> str:
    """Format the mean validation loss; if some replicas could not report theirs, the losses of the others by name."""
    mean = state.mean_validation_loss(round_)
    if mean is not None or not (state.standings.not_counted(round_) or state.missing_losses(round_)):
        return _loss(mean)
    told = {name: replica.validation_loss.get(round_) for name, replica in state.of_round(round_).items()}
    return ", ".join(f"{name} {_loss(loss)}" for name, loss in told.items())


# ---- the live view ----


def live_view(state: RunState, now: float, height: int) -> Group:
    """Return title, progress, replicas, lines and links; only the busiest links if not all fit into `height` rows."""
    links, lines, status = list(state.links.values()), list(state.lines.values()), list(_status(state, now))
    others = len(state.replicas) + max(0, len(status) - 1) + (len(lines) + ROWS_OF_A_HEAD if lines else 0)
    room = max(3, height - ROWS_BESIDE_LINKS - others)
    parts: list[RenderableType] = [_title(state, now), _progress(state, now), *status]
    parts.append(_live_replicas(state, now))
    if lines:
        parts.append(live_lines(lines, state.training_seconds(now), now))
    if len(links) <= room:
        return Group(*parts, _live_links(state, links, now))
    busiest = sorted(links, key=lambda link: link.wire_bytes, reverse=True)[: room - 1]
    shown = [link for link in links if any(link is one for one in busiest)]
    rest = Text(f" and {len(links) - len(shown)} links with less traffic", style="dim")
    return Group(*parts, _live_links(state, shown, now), rest)


def _title(state: RunState, now: float) -> Table:
    left = state.seconds_left(now)
    times = f"{_clock_time(state.elapsed(now))} elapsed"
    if left is not None:
        times += f", about {_clock_time(left)} left"
    grid = Table.grid(expand=True)
    grid.add_column()
    grid.add_column(justify="right")
    grid.add_row(Text(f" {state.spec.config.name}", style="bold"), Text(f"{times} ", style="dim"))
    return grid


def _progress(state: RunState, now: float) -> Table:
    grid = Table.grid(padding=(0, 1), expand=True)
    grid.add_column(no_wrap=True)
    grid.add_column(ratio=1)
    grid.add_column(justify="right", no_wrap=True)
    what = "inner steps" if state.inner_steps is not None else "seconds"
    for label, (done, total) in (
        (" outer rounds", (state.rounds, state.rounds_planned)),
        (f" {what} of this round", state.progress_of_open_round(now)),
    ):
        grid.add_row(label, ProgressBar(total=total, completed=done), f"{_amount(done)}/{_amount(total)} ")
    return grid


def _status(state: RunState, now: float) -> Iterator[Text]:
    """Yield lines on members that are gone, and on what the run waits for."""
    yield from (Text(f" {line}", style="yellow") for line in trouble_lines(state.standings, now))
    if state.waiting is not None and state.waiting_told is not None:
        yield Text(f" {waiting_line(state, now)}", style="yellow")
    elif state.reading is not None:
        yield Text(f" {reading_line(state.reading.what, state.reading.share)}", style="dim")
    elif not state.has_all_needed:
        yield Text(f" {joined_line(state)}", style="dim")


def _live_replicas(state: RunState, now: float) -> PlainTable:
    table = PlainTable(["replica", "kind"], ["inner step", "loss", "validation loss", "tokens/s"])
    for replica in state.replicas.values():
        validation = replica.validation_loss
        table.add_row(
            replica.name,
            replica.kind,
            _steps(state, replica),
            _loss(replica.loss),
            _loss(validation[max(validation)] if validation else None),
            f"{state.tokens_per_second(replica, now):,.0f}",
        )
    return table


def _steps(state: RunState, replica: ReplicaState) -> str:
    """Format the inner steps that a replica has done, and their planned number if it is known."""
    planned = "" if state.inner_steps is None else f"/{state.rounds_planned * state.inner_steps}"
    return f"{replica.steps_done}{planned}"


def _live_links(state: RunState, links: list[LinkState], now: float) -> PlainTable:
    table = PlainTable(["link", "bandwidth"], heads_of(DIRECTIONS, "now", "busy", "total"), spare=["bandwidth"])
    seconds = state.training_seconds(now)
    for link in links:
        ways = [link.directions[way] for way in DIRECTIONS]
        limits = [way.bandwidth for way in ways]
        table.add_row(
            link.spec.name,
            "lines" if link.spec.has_lines and limits == [None, None] else format_two(*limits),
            *(f"{format_bytes(way.recent_bytes_per_second(now))}/s" for way in ways),
            *(format_share(way.busy_share(seconds)) for way in ways),
            *(format_bytes(way.wire_bytes) for way in ways),
        )
    return table


# ---- the end ----


def print_result(console: Console, summary: Mapping[str, Any], folder: Path) -> None:
    """Print the results of a run from its summary. `folder`: where the run's files are."""
    console.print(_result_replicas(summary))
    console.print(_result_links(summary))
    if summary["lines"]:
        console.print(result_lines(summary))
    for line in _result_lines(summary, folder):
        say(console, line)


def _result_replicas(summary: Mapping[str, Any]) -> PlainTable:
    """Return a table of the replicas, with validation losses before training and after the first and last round."""
    rounds = sorted({1, summary["rounds"]} - {0})
    validation = ["validation initial", *(f"validation round {round_}" for round_ in rounds)]
    table = PlainTable(["replica", "kind"], ["tokens", "training loss", *validation])
    replicas = summary["replicas"]
    whole = {"name": "mean", "kind": "", "tokens": sum(replica["tokens"] for replica in replicas), "loss": None}
    for replica in [*replicas, dict(summary) | whole] if len(replicas) > 1 else replicas:
        losses = replica["validation_loss"]
        table.add_row(
            replica["name"],
            replica["kind"],
            f"{replica['tokens']:,}",
            _loss(replica["loss"]),
            _loss(replica["initial_validation_loss"]),
            *(_loss(losses[round_ - 1] if round_ <= len(losses) else None) for round_ in rounds),
        )
    return table


def _result_links(summary: Mapping[str, Any]) -> PlainTable:
    table = PlainTable(["link", ""], ["bandwidth", "payload", "wire", "busy"])
    for link in summary["links"]:
        limits = link["bandwidth_bits_per_second"]
        table.add_both(
            link["name"],
            DIRECTIONS,
            [format_bandwidth(limits[way], any(link["lines"].values())) for way in DIRECTIONS],
            [format_bytes(link["payload_bytes"][way]) for way in DIRECTIONS],
            [format_bytes(link["wire_bytes"][way]) for way in DIRECTIONS],
            [format_share(link["busy_share"][way]) for way in DIRECTIONS],
        )
    return table


def _result_lines(summary: Mapping[str, Any], folder: Path) -> Iterator[str]:
    first = sum(sum(rounds[0] for rounds in link["payload_bytes_per_round"].values()) for link in summary["links"])
    if first:
        yield (
            "The first snapshot and the evaluation of the initial weights account for "
            f"{format_bytes(first)} of the payload."
        )
    contributions = summary["contributions"]
    bits = contributions["bits_per_value"]
    if bits is not None:
        yield (
            f"Contributions: {format_bytes(contributions['bytes'])} in total, "
            f"{contributions['kept_values']:,} values kept, {format_number(bits)} bits per kept value."
        )
    hashes = set(summary["parameters_sha256"].values())
    if len(hashes) == 1:
        yield f"All replicas hold the same weights: sha256 {hashes.pop()[:16]}…"
    elif hashes:
        yield "The replicas do not hold the same weights."
    yield from result_standings(summary)
    if summary["refusals"]:
        kinds = ", ".join(f"{count} {kind}" for kind, count in summary["refusals_by_kind"].items())
        told = summary.get("refusals_told_by", {}).items()
        words = ", ".join(f"{member} reports {count}" for member, count in told if member != EXCHANGE)
        yield f"Refused messages: {kinds}{words and f'; of these {words}'} (see metrics.jsonl)."
    yield (
        f"{format_count(summary['rounds'], 'outer round')} in {format_seconds(summary['wall_seconds'])}, "
        f"{summary['tokens_per_second']:,.0f} tokens/s over all replicas."
    )
    if "failed" in summary:
        yield f"Failed: {summary['failed']}"
    yield f"Files: {folder} (summary.json, metrics.jsonl, loss.png, links.png, tensorboard/)"


# ---- words and numbers ----


def _loss(loss: float | None) -> str:
    return "–" if loss is None else f"{loss:.4f}"


def _clock_time(seconds: float) -> str:
    """Format seconds as a clock: 95 -> "1:35"."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
