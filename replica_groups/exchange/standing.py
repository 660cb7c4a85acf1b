"""Decisions of the rules about members and replicas, as reports."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from hetero_pp.config.links import EXCHANGE
from hetero_pp.core.units import format_seconds
from hetero_pp.messages.messages_pb2 import (
    EXCLUDED,
    HEALED,
    LATE,
    LEFT_OUT,
    NOT_AWAITED,
    PAUSED,
    SCALED,
    SILENT,
    SUSPENDED,
    TERM_OVER,
    WENT_ON,
    Happened,
    Over,
    Report,
    Standing,
)
from replica_groups.protocol import events as e


def reports_of(effect: e.Effect, replicas: Mapping[str, str]) -> Iterator[Report]:
    """Yield the reports of an effect for watchers; `replicas`: slot -> replica."""
    match effect:
        case e.Fenced(place, term, cause, silent) if cause:
            yield _report(SILENT if silent else TERM_OVER, place=place, replica=replicas[place], term=term, cause=cause)
        case e.Suspended(place, term, _, cause):
            yield _report(SUSPENDED, place=place, replica=replicas[place], term=term, cause=cause)
        case e.TooLate(replica, round_):
            yield _report(LATE, replica=replica, round=round_)
        case e.Bounded(replica, round_, scale, why):
            what = SCALED if scale else LEFT_OUT
            yield _report(what, replica=replica, round=round_, cause=f"{scale:.3g}" if scale else why)
        case e.Paused(round_, there, needed):
            yield _report(PAUSED, round=round_, cause=why_paused(there, len(set(replicas.values())), needed))
        case e.WentOn(round_):
            yield _report(WENT_ON, round=round_)
        case e.Over(round_, rounds, finishing):
            over = Over(round=round_, rounds=rounds, finishing=finishing)
            yield Report(member=EXCHANGE, over=over)
        case e.Heal(place, term, round_, parameter):
            cause = f"held a {parameter} that differs from the run log"
            yield _report(HEALED, place=place, replica=replicas[place], term=term, round=round_, cause=cause)
        case e.Barred(place, term, round_, until, cause):
            replica = replicas[place]
            cause = f"{cause}: {replica} takes part in no round before {until}, unless a quorum needs it"
            yield _report(EXCLUDED, place=place, replica=replica, term=term, round=round_, cause=cause)
        case e.NotAwaited(replica, round_, missed, seconds):
            cause = f"missed {missed} rounds in a row: rounds of the next {format_seconds(round(seconds))}"
            yield _report(NOT_AWAITED, replica=replica, round=round_, cause=cause)


def why_paused(there: Collection[str], replicas: int, needed: int) -> str:
    """Return why no round can close."""
    return f"{len(there)} of {replicas} replicas are present, {needed} are required"


def _report(
    what: Happened, place: str = "", replica: str = "", term: int = 0, round: int = 0, cause: str = ""
) -> Report:
    standing = Standing(what=what, place=place, replica=replica, term=term, round=round, cause=cause)
    return Report(member=EXCHANGE, standing=standing)
