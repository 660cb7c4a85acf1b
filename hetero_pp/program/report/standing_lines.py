"""Lines about membership events: in a round's line, in the live view, and at the end of a run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from hetero_pp.core.units import format_count, format_seconds, format_times
from hetero_pp.program.report.standings import Standings
from hetero_pp.program.report.state import format_share
from replica_groups.exchange.patience import listed

ROWS_OF_TROUBLE = 3
"""Most rows of vacant slots in the live view."""

_TIMES = {"restarts": "restarted", "taken_again": "joined again", "healed": "recovered from the log"}


def reasons(why: Mapping[str, str]) -> str:
    """Join replicas and reasons: `home (home.1 was killed by SIGKILL), dc was late`."""
    return ", ".join(_reason(replica, cause) for replica, cause in why.items())


def _reason(replica: str, cause: str) -> str:
    return cause if cause.startswith(f"{replica} ") else f"{replica} ({cause.removeprefix(f'{replica}: ')})"


def trouble_lines(standings: Standings, now: float) -> Iterator[str]:
    """Yield lines about a pause and vacant slots; none if there is no trouble."""
    pause, given_up = standings.pause, standings.given_up
    if pause is not None:
        seconds = format_seconds(round(max(0.0, now - pause.start)))
        yield f"round {pause.round} pauses for {seconds}: {pause.cause}"
    vacant = {place: f"{cause}; its slot is vacant" for place, cause in standings.vacant.items()}
    causes = list((vacant | given_up).values())
    yield from causes[:ROWS_OF_TROUBLE]
    if len(causes) > ROWS_OF_TROUBLE:
        yield f"and {format_count(len(causes) - ROWS_OF_TROUBLE, 'more slot')} without a member"


def result_standings(summary: Mapping[str, Any]) -> Iterator[str]:
    """Yield lines about the membership events in a run's summary and their cost; none if there were no events."""
    found, goodput = summary["standings"], summary["goodput"]
    for name, one in found["members"].items():
        times = [f"{what} {format_times(one[key])}" for key, what in _TIMES.items() if one[key]]
        yield f"{name}: {', '.join([*times, *([one['gone']] if one['gone'] else [])])}."
    for replica, count in found["suspended"].items():
        yield f"{replica}: returned to the start of a round {format_times(count)}."
    by_replica: defaultdict[str, list[str]] = defaultdict(list)
    for one in found["not_counted"]:
        by_replica[one["replica"]].append(str(one["round"]))
    for replica, rounds in by_replica.items():
        yield f"{replica}: excluded from {format_count(len(rounds), 'round')} ({listed(rounds)})."
    if found["pauses"]:
        seconds = sum(one["seconds"] or 0.0 for one in found["pauses"])
        yield f"Below quorum: {format_count(len(found['pauses']), 'pause')}, {format_seconds(seconds)} in total."
    if (found["members"] or by_replica or found["suspended"]) and goodput["share"] is not None:
        counted = (
            f"{goodput['tokens_per_second']:,.0f} tokens/s, {format_share(goodput['share'])} of the trained tokens"
        )
        yield f"Participation {format_share(found['participation'])}; included contributions: {counted}."
