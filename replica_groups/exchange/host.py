"""Makes the exchange of a run, and begins the run: with its first snapshot, or where an earlier start of it ended."""

from __future__ import annotations

from functools import partial

from hetero_pp.errors import DamagedFile, HeteroPPError
from hetero_pp.run.first_snapshot import first_snapshot
from hetero_pp.run.folder import RunFolder
from hetero_pp.run.round_optimizer import round_optimizer
from hetero_pp.run.spec import RunSpec
from hetero_pp.snapshot import open_snapshot
from replica_groups.exchange.auditor import Auditor
from replica_groups.exchange.exchange import Exchange
from replica_groups.exchange.log import ContributionLog
from replica_groups.exchange.restart import Restart, find_restart


def make_exchange(spec: RunSpec, folder: RunFolder) -> Exchange:
    """An exchange that members can join; `begin_run` lets them train."""
    return Exchange(spec.run, spec.roster, None, spec.config.outer, ContributionLog(folder.log))


def begin_run(exchange: Exchange, spec: RunSpec, resume: bool) -> Auditor:
    """Begin, with an auditor that follows. A run that goes on waits until all members have told what they hold.

    Raises HeteroPPError if there is no round from which all of them can go on, RunFailed if a member is gone before.
    """
    config = spec.config
    try:
        start = _find_start(exchange, spec) if resume else Restart(first_snapshot(spec))
    except HeteroPPError as error:
        exchange.fail(str(error))  # members wait to hear where they begin
        raise
    optimizer = round_optimizer(spec, start.snapshot.basis)
    auditor = Auditor(exchange, start.snapshot, config.outer.rounds, config.snapshots.every, optimizer)
    auditor.start()
    exchange.begin(start.snapshot, start.damaged)
    return auditor


def _find_start(exchange: Exchange, spec: RunSpec) -> Restart:
    """Raises HeteroPPError where there is none, or going on from it would undo the end of a run that is over."""
    available, rounds = exchange.wait_until_joined(), spec.config.outer.rounds
    if _is_over(exchange.log, rounds) and not all(rounds in states.rounds for states in available.values()):
        raise HeteroPPError(f"the run is over: its log has the snapshot after round {rounds} of {rounds}")
    start = find_restart(exchange.log, spec.run, available, partial(round_optimizer, spec))
    exchange.log.forget_after(start.snapshot.round)
    return start


def _is_over(log: ContributionLog, rounds: int) -> bool:
    """Whether there is a sound snapshot after the last round."""
    try:
        with open_snapshot(log.snapshot_path(rounds)):
            return True
    except (DamagedFile, FileNotFoundError):
        return False
