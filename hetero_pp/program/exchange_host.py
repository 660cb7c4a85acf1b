"""Makes the exchange of a run, and begins the run: with its first snapshot, or where an earlier start of it ended."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from hetero_pp.errors import DamagedFile, HeteroPPError
from hetero_pp.program.config import RunPlan
from hetero_pp.program.hugging_face.reading import first_snapshot
from hetero_pp.program.resume import log_of
from hetero_pp.program.train import round_optimizer
from hetero_pp.snapshot import open_snapshot
from replica_groups.exchange import Exchange
from replica_groups.keeper import Keeper
from replica_groups.log import ContributionLog
from replica_groups.restart import Restart, find_restart


def make_exchange(plan: RunPlan, folder: Path) -> Exchange:
    """An exchange that members can join; `begin_run` lets them train."""
    return Exchange(plan.run, plan.roster, None, plan.config.outer, log_of(folder))


def begin_run(exchange: Exchange, plan: RunPlan, resume: bool) -> Keeper:
    """Begin, with a keeper that follows. A run that goes on waits until all members have told what they hold.

    Raises HeteroPPError if there is no round from which all of them can go on, RunFailed if a member is gone before.
    """
    config = plan.config
    try:
        start = _find_start(exchange, plan) if resume else Restart(first_snapshot(plan))
    except HeteroPPError as error:
        exchange.fail(str(error))  # members wait to hear where they begin
        raise
    optimizer = round_optimizer(plan, start.snapshot.basis)
    keeper = Keeper(exchange, start.snapshot, config.outer.rounds, config.snapshots.every, optimizer)
    keeper.start()
    exchange.begin(start.snapshot, start.damaged)
    return keeper


def _find_start(exchange: Exchange, plan: RunPlan) -> Restart:
    """Raises HeteroPPError where there is none, or only one before the end of a run that is over."""
    start = find_restart(exchange.log, plan.run, exchange.wait_until_joined(), partial(round_optimizer, plan))
    rounds, found = plan.config.outer.rounds, start.snapshot.round
    if found < rounds and _is_over(exchange.log, rounds):
        raise HeteroPPError(
            f"the run is over, its log has round {rounds} of {rounds}: going on after {found} undoes it"
        )
    exchange.log.forget_after(found)
    return start


def _is_over(log: ContributionLog, rounds: int) -> bool:
    """Whether there is a sound snapshot after the last round."""
    try:
        with open_snapshot(log.snapshot_path(rounds)):
            return True
    except (DamagedFile, FileNotFoundError):
        return False
