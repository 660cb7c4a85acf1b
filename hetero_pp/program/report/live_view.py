"""The live view of a run on a terminal: progress, replicas, lines and links."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from hetero_pp.config.lines import WAYS
from hetero_pp.config.links import DIRECTIONS
from hetero_pp.core.units import format_bytes, format_count, format_seconds, format_share
from hetero_pp.program.report.carried import LineState, LinkState
from hetero_pp.program.report.reading import reading_line
from hetero_pp.program.report.replica_state import ReplicaState
from hetero_pp.program.report.round_lines import format_amount, joined_line, waiting_line
from hetero_pp.program.report.state import MemberPresence, RunState
from hetero_pp.program.report.tables import PlainTable, format_loss, format_two, heads_of

ROWS_BESIDE_LINKS = 13
"""Rows of the live view that are neither a replica nor a link."""
ROWS_OF_A_HEAD = 3
ROWS_OF_TROUBLE = 3
"""Most rows of vacant slots in the live view."""


def live_view(state: RunState, now: float, height: int) -> Group:
    """Return title, progress, replicas, lines and links; only the busiest links if not all fit into `height` rows."""
    links, lines, status = list(state.links.values()), list(state.lines.values()), list(_status(state, now))
    others = len(state.replicas) + max(0, len(status) - 1) + (len(lines) + ROWS_OF_A_HEAD if lines else 0)
    room = max(3, height - ROWS_BESIDE_LINKS - others)
    parts: list[RenderableType] = [_title(state, now), _progress(state, now), *status]
    parts.append(_live_replicas(state, now))
    if lines:
        parts.append(_live_lines(lines, state.training_seconds(now), now))
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
    what = "" if state.spec.config.rehearsal is None else ": a rehearsal, which trains nothing"
    grid.add_row(Text(f" {state.spec.config.name}{what}", style="bold"), Text(f"{times} ", style="dim"))
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
        grid.add_row(label, ProgressBar(total=total, completed=done), f"{format_amount(done)}/{format_amount(total)} ")
    return grid


def _status(state: RunState, now: float) -> Iterator[Text]:
    for line, is_trouble in status_lines(state, now):
        yield Text(f" {line}", style="yellow" if is_trouble else "dim")


def status_lines(state: RunState, now: float) -> Iterator[tuple[str, bool]]:
    """Yield lines on members that are gone, and on what the run waits for; each with whether it is trouble."""
    yield from ((line, True) for line in trouble_lines(state, now))
    if state.waiting is not None and state.waiting_told is not None:
        yield waiting_line(state, now), True
    elif state.reading is not None:
        yield reading_line(state.reading.what, state.reading.share), False
    elif not state.has_all_needed:
        yield joined_line(state), False


def trouble_lines(state: RunState, now: float) -> Iterator[str]:
    """Yield lines about a pause, vacant slots, excluded replicas and the end of audits; none if there is no trouble.

    An optional replica in which nobody is any more is no trouble.
    """
    pause, given_up = state.membership_state.pause, state.membership_state.given_up
    if pause is not None:
        seconds = format_seconds(round(max(0.0, now - pause.start)))
        yield f"round {pause.round} pauses for {seconds}: {pause.cause}"
    nobody = (MemberPresence.VACANT, MemberPresence.MISSING)
    optional = [replica for replica in state.spec.replicas_ever if replica.optional]
    left = [one for one in optional if all(state.presence(name) in nobody for name in one.members)]
    empty = {slot for replica in left for slot in replica.members}
    away = {slot: cause for slot, cause in state.membership_state.vacant.items() if slot not in empty}
    vacant = {slot: f"{cause}; its slot is vacant" for slot, cause in away.items()}
    causes = list((vacant | given_up).values())
    yield from causes[:ROWS_OF_TROUBLE]
    if len(causes) > ROWS_OF_TROUBLE:
        yield f"and {format_count(len(causes) - ROWS_OF_TROUBLE, 'more slot')} without a member"
    if state.membership_state.unaudited is not None:
        yield f"unaudited: {state.membership_state.unaudited}"
    excluded = [f"{one.replica} is excluded: {one.excluded}" for one in state.scores.values() if one.excluded]
    yield from excluded[:ROWS_OF_TROUBLE]
    if len(excluded) > ROWS_OF_TROUBLE:
        yield f"and {format_count(len(excluded) - ROWS_OF_TROUBLE, 'more replica')} excluded"


def _live_replicas(state: RunState, now: float) -> PlainTable:
    heads = ["inner step", "loss", "validation loss", "tokens/s", *(["score"] if state.scores else [])]
    table = PlainTable(["replica", "kind"], heads)
    for replica in state.replicas.values():
        validation = replica.validation_loss
        table.add_row(
            replica.name,
            replica.kind,
            _steps(state, replica),
            format_loss(replica.loss),
            format_loss(validation[max(validation)] if validation else None),
            f"{state.tokens_per_second(replica, now):,.0f}",
            *([_score(state, replica)] if state.scores else []),
        )
    return table


def _score(state: RunState, replica: ReplicaState) -> str:
    found = state.scores.get(replica.name)
    return "–" if found is None else "excluded" if found.excluded else f"{found.final:.2f}"


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


def _live_lines(lines: Sequence[LineState], seconds: float, now: float) -> PlainTable:
    """Return a table of what each line carries, `seconds` after training began."""
    table = PlainTable(["line", "up / down"], heads_of(WAYS, "now", "busy", "total"), spare=["up / down"])
    for line in lines:
        table.add_row(
            line.spec.name,
            format_two(line.spec.up, line.spec.down),
            *(f"{format_bytes(line.recent_bytes_per_second(way, now))}/s" for way in WAYS),
            *(format_share(line.busy_share(way, seconds)) for way in WAYS),
            *(format_bytes(line.wire_bytes(way)) for way in WAYS),
        )
    return table


def _clock_time(seconds: float) -> str:
    """Format seconds as a clock: 95 -> "1:35"."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
