"""Members of an exchange as tests need them: all of a roster join, and ask for the open round."""

from __future__ import annotations

import math
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor

from hetero_pp.outer.exchange_service import Assignment
from hetero_pp.run.spec import Roster
from replica_groups.exchange.exchange import Exchange
from replica_groups.protocol.rules import Rules, Window

FOR_EVER = Window(1.0, math.inf, math.inf)


def patient(roster: Roster) -> Rules:
    """Rules under which everybody is waited for: however busy the machine is, nobody is late or silent for too long."""
    return Rules(roster.members, roster.blocks, grace=FOR_EVER, limit=math.inf, lease=FOR_EVER, hang=FOR_EVER)


def join_all(exchange: Exchange) -> None:
    """Every member takes its place."""
    for member in exchange.roster.members:
        exchange.join(member, "")


def assign_all(exchange: Exchange, holds: int = 0, members: Collection[str] | None = None) -> dict[str, Assignment]:
    """All of them, or these, ask for work at once, as the members of a replica wait for each other: what they get."""
    asking = list(exchange.roster.members if members is None else members)
    with ThreadPoolExecutor(len(asking)) as pool:
        work = pool.map(lambda member: exchange.assign(member, holds), asking)
        return dict(zip(asking, work, strict=True))
