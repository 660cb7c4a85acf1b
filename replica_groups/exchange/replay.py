"""Replay of a run log: theta after any round, from a run checkpoint, the later records and their contributions.

The auditor follows a run round after round (Follower). A run resumes or is exported from any round (checkpoint_after).
A log is checked from its first run checkpoint on (LogCheck).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from hetero_pp.config.checkpoint import OpenCheckpoint, RunCheckpoint
from hetero_pp.core.errors import DamagedFile, MalformedContribution, StoreError
from hetero_pp.core.tensor_files import Scratch
from hetero_pp.messages.messages_pb2 import RoundRecord
from hetero_pp.model.transformer import shapes_by_block, shapes_of
from hetero_pp.outer.apply_round import FetchBlob, apply_round
from hetero_pp.outer.step import RoundOptimizer, parameter_sha256, parameters_sha256
from replica_groups.exchange.audits import audit_key, read_audit
from replica_groups.exchange.log import ContributionLog, checkpoint_key

T = TypeVar("T")

OptimizerFor = Callable[[Tensor | None], RoundOptimizer]  # returns the run's outer optimizer for the run's basis


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


class Follower:
    """theta of one run, round after round. It is on disk between rounds (Scratch), because it is a whole model."""

    def __init__(
        self, run: str, checkpoint: RunCheckpoint, optimizer: RoundOptimizer, folder: Path | None = None
    ) -> None:
        """Begin after a run checkpoint's round. `folder` holds theta; None: the folder of Python's `tempfile`."""
        self.round = checkpoint.round  # the last round that was applied
        self._run, self._basis, self._optimizer = run, checkpoint.basis, optimizer
        if checkpoint.round > 0:
            optimizer.load(checkpoint.momentum, checkpoint.round)
        self._theta = Scratch(folder)
        for name, tensor in checkpoint.parameters.items():
            self._theta.keep(name, tensor)
        blocks = shapes_by_block(shapes_of(checkpoint.parameters)).values()
        is_whole = optimizer.settings.source == "gradient" and blocks  # because it clips by the norm of all
        self._parts = [list(checkpoint.parameters)] if is_whole else [list(shapes) for shapes in blocks]
        """Names of the parameters that are in memory at the same time."""

    @torch.no_grad()
    def apply(self, record: RoundRecord, fetch: FetchBlob) -> dict[str, bytes]:
        """Apply the next round; return the hashes of the parameters after it."""
        hashes: dict[str, bytes] = {}
        for names in self._parts:
            hashes |= self._apply_to(names, record, fetch)
        self.round = record.round
        return hashes

    def _apply_to(self, names: list[str], record: RoundRecord, fetch: FetchBlob) -> dict[str, bytes]:
        """Apply a round to some parameters; return their hashes."""
        theta = {name: self._theta.read(name) for name in names}
        apply_round(theta, self._run, record, fetch, self._optimizer)
        for name, tensor in theta.items():
            self._theta.keep(name, tensor)
        return {name: parameter_sha256(tensor) for name, tensor in theta.items()}

    def theta(self) -> dict[str, Tensor]:
        """Return a copy of all parameters, in memory."""
        return {name: self._theta.read(name) for names in self._parts for name in names}

    def checkpoint(self) -> RunCheckpoint:
        """Return the run checkpoint after the last applied round."""
        return RunCheckpoint(self.round, self.theta(), self._basis, self._optimizer.state)


@dataclass(frozen=True)
class CheckedRound:
    """Findings for a round, and for the run checkpoint after it."""

    round: int
    replicas: tuple[str, ...]  # included replicas
    late: tuple[str, ...]
    left_out: tuple[str, ...]  # replicas whose contributions were rejected as too large
    sha256: str | None  # sha256 of the parameters after the round; None if they cannot be computed
    is_audited: bool  # whether the run's auditor computed the same
    has_checkpoint: bool  # whether a run checkpoint has the same parameters
    damaged: tuple[str, ...]  # damaged, missing or differing objects, one line each


class LogCheck:
    """A pass over the log of one run. After damage it continues from the next undamaged run checkpoint.

    A run that trains meanwhile removes run checkpoints that newer ones replace, and with `store.history: recent` the
    contributions before them. That is no damage.
    """

    def __init__(
        self, log: ContributionLog, run: str, optimizer_for: Callable[[Tensor | None], RoundOptimizer]
    ) -> None:
        self._log = log
        self._run = run
        self._optimizer_for = optimizer_for
        self._optimizer: RoundOptimizer | None = None
        self._theta: dict[str, Tensor] | None = None
        self._basis: Tensor | None = None
        self._damaged: list[str] = []
        self._newest = 0  # round of the newest run checkpoint when the pass began

    def rounds(self, last: int) -> Iterator[CheckedRound]:
        """Yield every round from the first run checkpoint to `last` as it is checked.

        Raises FileNotFoundError if there is no such run checkpoint.
        """
        found = self._log.checkpoints()
        checkpoints, self._newest = {round_ for round_ in found if round_ <= last}, max(found, default=0)
        if not checkpoints:
            raise FileNotFoundError(f"found no run checkpoint up to round {last} in {self._log.store.url()}")
        for round_ in range(min(checkpoints), last + 1):
            self._damaged = []
            record = None if round_ == min(checkpoints) else self._apply(round_)
            has_checkpoint = round_ in checkpoints and self._hold_against_checkpoint(round_)
            sha256 = None if self._theta is None else _sha256(self._theta)
            yield CheckedRound(
                round_,
                () if record is None else tuple(entry.replica for entry in record.contributions),
                () if record is None else tuple(record.late),
                () if record is None else tuple(record.left_out),
                sha256,
                sha256 is not None and record is not None and self._hold_against_audit(record, sha256),
                has_checkpoint,
                tuple(self._damaged),
            )

    def checkpoint(self, round_: int) -> RunCheckpoint | None:
        """theta after the last checked round; None if it cannot be computed."""
        if self._theta is None or self._optimizer is None:
            return None
        return RunCheckpoint(round_, self._theta, self._basis, self._optimizer.state if round_ else {})

    @torch.no_grad()
    def _apply(self, round_: int) -> RoundRecord | None:
        """Read and apply a round's record. theta is lost if it cannot be applied."""
        theta, self._theta = self._theta, None
        record = self._noting(lambda: self._log.read_record(round_))
        if record is None:
            return None
        read, lost = self._log.blobs_of(record), len(self._damaged)

        def is_before_all(now: Collection[int]) -> bool:
            return min(now) >= round_

        for entry in record.contributions:
            for blob in entry.blobs:
                self._noting(partial(read, entry.replica, blob.block), is_before_all)
        if theta is not None and self._optimizer is not None and len(self._damaged) == lost:
            optimizer = self._optimizer

            def apply() -> dict[str, Tensor]:
                apply_round(theta, self._run, record, read, optimizer)
                return theta

            self._theta = self._noting(apply, is_before_all)
        return record

    def _hold_against_checkpoint(self, round_: int) -> bool:
        checkpoint = self._noting(lambda: self._log.read_checkpoint(round_), lambda now: max(now) > self._newest)
        if checkpoint is None:
            return False
        if self._theta is None:
            self._theta, self._basis = dict(checkpoint.parameters), checkpoint.basis
            self._optimizer = self._optimizer_for(checkpoint.basis)
            if round_ > 0:
                self._optimizer.load(checkpoint.momentum, round_)
        elif (replayed := self.checkpoint(round_)) is None or _sha256(replayed.tensors()) != _sha256(
            checkpoint.tensors()
        ):
            self._damaged.append(
                f"{self._log.store.url(checkpoint_key(round_))} differs from the parameters that the log gives"
            )
            return False
        return True

    def _hold_against_audit(self, record: RoundRecord, sha256: str) -> bool:
        store, before = self._log.store, len(self._damaged)
        try:
            audit = read_audit(store, record.round)
        except FileNotFoundError:
            return False  # it was not audited any more, if it was the last
        except DamagedFile as error:
            self._damaged.append(str(error))
            return False
        where = store.url(audit_key(record.round))
        if audit.record_sha256 != record.sha256.hex():
            self._damaged.append(f"{where} belongs to another record")
        if audit.parameters_sha256 != sha256:
            self._damaged.append(f"{where} has {audit.parameters_sha256}, the log gives {sha256}")
        return len(self._damaged) == before

    def _noting(
        self, read: Callable[[], T], is_removed: Callable[[Collection[int]], bool] = lambda now: False
    ) -> T | None:
        """Return what `read` returns, or note the error and return None.

        `is_removed`: whether the run has removed a missing file since the pass began, given the run checkpoints of now.
        """
        try:
            return read()
        except FileNotFoundError as error:
            if (now := self._log.checkpoints()) and is_removed(now):
                return None
            self._damaged.append(f"{error.filename} is missing" if error.filename else str(error))
        except (DamagedFile, MalformedContribution) as error:
            self._damaged.append(str(error))
        return None


def _sha256(parameters: Mapping[str, Tensor]) -> str:
    return parameters_sha256({name: parameter_sha256(tensor) for name, tensor in parameters.items()}).hex()
