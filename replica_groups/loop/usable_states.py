"""Choice of the member checkpoint from which a member continues when its run resumes."""

from __future__ import annotations

import sys

from hetero_pp.core.errors import Refused
from hetero_pp.outer.exchange_service import AvailableStates, ExchangeService
from replica_groups.loop.saved_states import SavedStates


def newest_usable_state(
    exchange: ExchangeService, member: str, replica: str, states: SavedStates, available: AvailableStates
) -> int | None:
    """Return the newest decided round of which a member has an undamaged state; None if there is none.

    States that this run cannot use are moved aside, not removed, because they may be all that is left of another run.
    """
    last_round = exchange.last_round()
    useful = frozenset(round_ for round_ in available.rounds if round_ <= last_round)
    if useful and not _is_known_since(exchange, member, replica, range(max(useful) + 1, last_round + 1)):
        useful = frozenset()  # what was counted since cannot be taken out of its error feedback
    aside = states.set_aside_all_but(useful)
    if aside is not None:
        print(f"{member}: states of later rounds were moved to {aside}", file=sys.stderr, flush=True)
    return max(useful, default=None)


def _is_known_since(exchange: ExchangeService, member: str, replica: str, rounds: range) -> bool:
    """Return whether the log still has what these rounds included of a replica; older contributions go first."""
    for round_ in rounds:
        for entry in exchange.record(round_, member).contributions:
            if entry.replica == replica:
                try:
                    return bool(exchange.fetch(member, round_, replica, entry.blobs[0].block))
                except Refused:
                    return False
    return True
