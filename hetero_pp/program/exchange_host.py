"""Makes the exchange of a run, and begins the run: with its first snapshot, or where an earlier start of it ended."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from hetero_pp.program.config import RunPlan
from hetero_pp.program.hugging_face.reading import first_snapshot
from hetero_pp.program.resume import log_of
from hetero_pp.program.train import round_optimizer
from replica_groups.exchange import Exchange
from replica_groups.keeper import Keeper
from replica_groups.restart import find_restart


def make_exchange(plan: RunPlan, folder: Path) -> Exchange:
    """An exchange that members can join; `begin_run` lets them train."""
    return Exchange(plan.run, plan.roster, None, plan.config.outer, log_of(folder))


def begin_run(exchange: Exchange, plan: RunPlan, resume: bool) -> Keeper:
    """Begin, with a keeper that follows. A run that goes on waits until all members have told what they hold.

    Raises RunFailed if there is no round from which all of them can go on, or a member is gone before.
    """
    config = plan.config
    if resume:
        restart = find_restart(exchange.log, plan.run, exchange.wait_until_joined(), partial(round_optimizer, plan))
        snapshot, damaged = restart.snapshot, restart.damaged
        exchange.log.forget_after(snapshot.round)
    else:
        snapshot, damaged = first_snapshot(plan), ()
    optimizer = round_optimizer(plan, snapshot.basis)
    keeper = Keeper(exchange, snapshot, config.outer.rounds, config.snapshots.every, optimizer)
    keeper.start()
    exchange.begin(snapshot, damaged)
    return keeper
