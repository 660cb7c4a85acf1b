"""Where a run that ended early goes on: after the newest round that all members hold and that the log can give."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from hetero_pp.errors import DamagedFile, HeteroPPError, MalformedContribution
from hetero_pp.outer.exchange_service import AvailableStates, ExchangeService
from hetero_pp.outer.step import RoundOptimizer
from hetero_pp.snapshot import Snapshot
from replica_groups.exchange.log import ContributionLog
from replica_groups.exchange.replay import replay
from replica_groups.saved_states import SavedStates

OptimizerFor = Callable[[Tensor | None], RoundOptimizer]
"""The run's outer optimizer, by the run's basis."""


def states_to_go_on_from(
    exchange: ExchangeService, member: str, states: SavedStates, available: AvailableStates
) -> int | None:
    """The newest round that is decided of which a member has a sound state; None if there is none.

    States that this run has no use for are moved aside: they may be all that is left of another one.
    """
    last_round = exchange.last_round()
    useful = frozenset(round_ for round_ in available.rounds if round_ <= last_round)
    aside = states.set_aside_all_but(useful)
    if aside is not None:
        print(f"{member}: states that the run does not go on from were moved to {aside}", file=sys.stderr, flush=True)
    return max(useful, default=None)


@dataclass(frozen=True)
class Restart:
    """What a run begins with, or goes on from."""

    snapshot: Snapshot
    damaged: tuple[str, ...] = ()
    """Files that were passed over, each with what is wrong with it."""
    last_round: int | None = None
    """The last that is decided, if that is a later one."""


def find_restart(
    log: ContributionLog, run: str, available: Mapping[str, AvailableStates], optimizer_for: OptimizerFor
) -> Restart:
    """The newest round of which every member has a sound state, and theta after it.

    Raises HeteroPPError with who holds what if there is none.
    """
    damaged = [f"{member}: {one}" for member, states in sorted(available.items()) for one in states.damaged]
    common = frozenset.intersection(*(states.rounds for states in available.values()))
    for round_ in sorted(common, reverse=True):
        try:
            snapshot = snapshot_after(log, run, round_, optimizer_for, damaged)
        except FileNotFoundError:
            continue
        return Restart(snapshot, tuple(dict.fromkeys(damaged)))
    holders = "; ".join(f"{member} {_listed(states.rounds)}" for member, states in sorted(available.items()))
    last = max(log.records(), default=0)
    complaint = f"found no round that all members hold and the log (up to round {last}) can give: {holders}"
    complaint += " (states are saved every `snapshots.every` rounds)"
    raise HeteroPPError("; ".join([complaint, *dict.fromkeys(damaged)]))


@torch.no_grad()
def snapshot_after(
    log: ContributionLog, run: str, round_: int, optimizer_for: OptimizerFor, damaged: list[str]
) -> Snapshot:
    """theta after a round: the newest snapshot up to it that is sound, and the rounds since, replayed.

    What is found damaged is added to `damaged`. Raises FileNotFoundError if what is left does not suffice.
    """
    snapshot = newest_sound(log, round_, damaged)
    theta, where = dict(snapshot.parameters), log.store.url()
    optimizer = optimizer_for(snapshot.basis)
    if snapshot.round > 0:
        optimizer.load(snapshot.momentum, snapshot.round)
    for number in range(snapshot.round + 1, round_ + 1):
        try:
            record = log.read_record(number)
            replay(theta, run, record, log.blobs_of(record), optimizer)
        except FileNotFoundError as error:
            if number in log.records():
                damaged.append(f"{error.filename} is not there")
            raise FileNotFoundError(f"the log in {where} ends before round {number}") from None
        except (DamagedFile, MalformedContribution) as error:
            damaged.append(str(error) if isinstance(error, DamagedFile) else f"{where}, round {number}: {error}")
            raise FileNotFoundError(f"the log in {where} cannot be read beyond round {number - 1}") from None
    momentum = optimizer.state if snapshot.round < round_ else snapshot.momentum
    return Snapshot(round_, theta, snapshot.basis, momentum)


def newest_sound(log: ContributionLog, round_: int, damaged: list[str]) -> Snapshot:
    for number in sorted(log.snapshots(), reverse=True):
        if number <= round_:
            try:
                return log.read_snapshot(number)
            except DamagedFile as error:
                damaged.append(str(error))
    raise FileNotFoundError(f"found no sound snapshot up to round {round_} in {log.store.url()}")


def _listed(rounds: frozenset[int]) -> str:
    return f"holds {', '.join(map(str, sorted(rounds)))}" if rounds else "holds none"
