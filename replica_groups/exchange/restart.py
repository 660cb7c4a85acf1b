"""Choice of the round from which a run resumes: the newest that all members hold and the log can rebuild."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from hetero_pp.config.checkpoint import OpenCheckpoint, RunCheckpoint
from hetero_pp.core.errors import DamagedFile, HeteroPPError, MalformedContribution, StoreError
from hetero_pp.outer.apply_round import apply_round
from hetero_pp.outer.step import RoundOptimizer
from hetero_pp.rpc.exchange_service import AvailableStates
from replica_groups.exchange.log import ContributionLog

OptimizerFor = Callable[[Tensor | None], RoundOptimizer]
"""Returns the run's outer optimizer for the run's basis."""


@dataclass(frozen=True)
class Restart:
    """Start of a run, or of its continuation."""

    checkpoint: RunCheckpoint
    damaged: tuple[str, ...] = ()
    """Skipped files, each with its damage."""
    last_round: int | None = None
    """Last decided round, if it is later than the run checkpoint's."""
    note: str = ""
    """Data without which the run resumes."""


def find_restart(
    log: ContributionLog, run: str, available: Mapping[str, AvailableStates], optimizer_for: OptimizerFor, every: int
) -> Restart:
    """Return the newest round of which every member has an undamaged state, and theta after it, as without a break.

    If some members lost their states, or are more than the `every` rounds between two states behind, it is the newest
    round that the log can rebuild. The others lose nothing, and each member continues with the state that it has.
    Members that stopped one round apart, before the first state that all of them have, start again from round 0. Raises
    HeteroPPError with the states of all members if the log can rebuild none.
    """
    damaged = [f"{member}: {one}" for member, states in sorted(available.items()) for one in states.damaged]
    common = frozenset.intersection(*(states.rounds for states in available.values()))
    held = [max(states.rounds, default=0) for states in available.values()]
    newest = max(held)
    if not common and newest - min(held) <= 1 and min(held) > 0:
        common |= {0}
    of_members = sorted(common, reverse=True) if newest - max(common, default=0) <= every else []
    last = log.last_record()
    for round_ in (*of_members, *range(last, -1, -1)):
        try:
            checkpoint = checkpoint_after(log, run, round_, optimizer_for, damaged)
        except FileNotFoundError:
            continue
        behind = [name for name, states in sorted(available.items()) if round_ > 0 and round_ not in states.rounds]
        older = [f"{name} {_saved(available[name].rounds, round_)}" for name in behind]
        return Restart(checkpoint, tuple(dict.fromkeys(damaged)), note="; ".join(older))
    holders = "; ".join(f"{member} {_listed(states.rounds)}" for member, states in sorted(available.items()))
    complaint = f"found no round that all members have saved and that the log (up to round {last}) can restore"
    cause = f"{complaint}: {holders} (states are saved every `checkpoints.every` rounds)"
    raise HeteroPPError("; ".join([cause, *dict.fromkeys(damaged)]))


@torch.no_grad()
def checkpoint_after(
    log: ContributionLog, run: str, round_: int, optimizer_for: OptimizerFor, damaged: list[str]
) -> RunCheckpoint:
    """Return theta after a round: the newest undamaged run checkpoint up to it, and the rounds since, replayed.

    Damaged files are added to `damaged`. Raises FileNotFoundError if the remaining files do not suffice.
    """
    checkpoint = newest_sound(log, round_, damaged)
    theta, where = dict(checkpoint.parameters), log.store.url()
    optimizer = optimizer_for(checkpoint.basis)
    if checkpoint.round > 0:
        optimizer.load(checkpoint.momentum, checkpoint.round)
    for number in range(checkpoint.round + 1, round_ + 1):
        try:
            record = log.read_record(number)
            apply_round(theta, run, record, log.blobs_of(record), optimizer)
        except FileNotFoundError as error:
            if log.has_record(number):
                damaged.append(f"{error.filename} is missing")
            raise FileNotFoundError(f"the log in {where} ends before round {number}") from None
        except (DamagedFile, MalformedContribution) as error:
            damaged.append(str(error) if isinstance(error, DamagedFile) else f"{where}, round {number}: {error}")
            raise FileNotFoundError(f"the log in {where} cannot be read after round {number - 1}") from None
    momentum = optimizer.state if checkpoint.round < round_ else checkpoint.momentum
    return RunCheckpoint(round_, theta, checkpoint.basis, momentum)


def newest_sound(log: ContributionLog, round_: int, damaged: list[str]) -> RunCheckpoint:
    """Return the newest readable run checkpoint up to a round, in memory. As `open_newest` otherwise."""
    with open_newest(log, round_, damaged) as file:
        return file.checkpoint()


def open_newest(log: ContributionLog, round_: int, damaged: list[str]) -> OpenCheckpoint:
    """Open the newest readable run checkpoint up to a round; damaged ones are added to `damaged`.

    Raises FileNotFoundError if there is none, StoreError if it may be readable later.
    """
    unread: list[StoreError] = []
    for number in sorted(log.checkpoints(), reverse=True):
        if number <= round_:
            try:
                return log.open_checkpoint(number)
            except DamagedFile as error:
                damaged.append(str(error))
            except StoreError as error:
                unread.append(error)
            except FileNotFoundError:
                continue  # a newer one has just taken its place
    if unread:
        raise unread[0]
    raise FileNotFoundError(f"found no undamaged run checkpoint up to round {round_} in {log.store.url()}")


def _saved(rounds: frozenset[int], round_: int) -> str:
    newest = max((one for one in rounds if one < round_), default=None)
    none = "has no saved state and starts with an empty error feedback"
    return none if newest is None else f"restores the state that it saved after round {newest}"


def _listed(rounds: frozenset[int]) -> str:
    return f"holds {', '.join(map(str, sorted(rounds)))}" if rounds else "holds none"
