"""Members of an exchange for tests: all members of a roster join and ask for the open round."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Collection
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

from hetero_pp.config.checkpoint import RunCheckpoint
from hetero_pp.config.spec import Roster
from hetero_pp.messages.messages_pb2 import AssignReply
from replica_groups.exchange.exchange import Exchange
from replica_groups.rounds.rules import Rules, Window

Answer = TypeVar("Answer")
TIMEOUT = 30.0
"""Seconds in which a call that does not wait for others returns, even on a busy machine."""
FOR_EVER = Window(1.0, math.inf, math.inf)


def patient(roster: Roster) -> Rules:
    """Return rules without time limits: however busy the machine is, no member is late or silent for too long."""
    return Rules(roster.members, roster.blocks, grace=FOR_EVER, limit=math.inf, lease=FOR_EVER, hang=FOR_EVER)


def join_all(exchange: Exchange) -> None:
    """Let every member join."""
    for member in exchange.roster.members:
        exchange.join(member, "")


def begin(exchange: Exchange, checkpoint: RunCheckpoint) -> None:
    """Begin the run once every member has joined, so that all take part in the first round."""
    join_all(exchange)
    exchange.begin(checkpoint)


def assign_all(exchange: Exchange, holds: int = 0, members: Collection[str] | None = None) -> dict[str, AssignReply]:
    """Let all members, or these, ask for work at once, because the members of a replica wait for each other."""
    asking = list(exchange.roster.members if members is None else members)
    found = [in_thread(partial(exchange.assign, member, holds)) for member in asking]
    return {member: one.result(TIMEOUT) for member, one in zip(asking, found, strict=True)}


def in_thread(work: Callable[[], Answer]) -> Future[Answer]:
    """Run a call that may never return in a daemon thread; return the future of its result."""
    end: Future[Answer] = Future()

    def run() -> None:
        try:
            end.set_result(work())
        except Exception as error:  # noqa: BLE001 (raised again by the future)
            end.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return end
