"""Makes the exchange of a run with its first snapshot, its log and its keeper."""

from __future__ import annotations

from pathlib import Path

from hetero_pp.program.config import RunPlan
from hetero_pp.program.train import round_optimizer
from hetero_pp.snapshot import initial_snapshot
from replica_groups.exchange import Exchange
from replica_groups.keeper import Keeper
from replica_groups.log import ContributionLog


def start_exchange(plan: RunPlan, folder: Path) -> tuple[Exchange, Keeper]:
    """An exchange that is ready for members, and the keeper that follows it."""
    config = plan.config
    snapshot = initial_snapshot(plan.shape, plan.largest_rank, config.seed)
    exchange = Exchange(plan.run, plan.roster, snapshot, config.outer, ContributionLog(folder / "log"))
    optimizer = round_optimizer(plan, snapshot.basis)
    keeper = Keeper(exchange, snapshot, config.outer.rounds, config.snapshots.every, optimizer)
    keeper.start()
    return exchange, keeper
