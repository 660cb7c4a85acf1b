"""Makes the exchange of a run with its first snapshot, its log and its keeper."""

from __future__ import annotations

from pathlib import Path

from hetero_pp.program.config import RunPlan
from hetero_pp.program.hugging_face.reading import first_snapshot
from hetero_pp.program.resume import log_of
from hetero_pp.program.train import round_optimizer
from hetero_pp.snapshot import load_snapshot
from replica_groups.exchange import Exchange
from replica_groups.keeper import Keeper


def start_exchange(plan: RunPlan, folder: Path, last_round: int = 0) -> tuple[Exchange, Keeper]:
    """An exchange that is ready for members, and the keeper that follows it; `last_round` is over already."""
    config, log = plan.config, log_of(folder)
    if last_round > 0:
        snapshot = load_snapshot(log.snapshot_path(last_round))
    else:
        snapshot = first_snapshot(plan)
    exchange = Exchange(plan.run, plan.roster, snapshot, config.outer, log)
    optimizer = round_optimizer(plan, snapshot.basis)
    keeper = Keeper(exchange, snapshot, config.outer.rounds, config.snapshots.every, optimizer)
    keeper.start()
    return exchange, keeper
