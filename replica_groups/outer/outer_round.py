"""A member's side of the outer round: contribute its parameters, apply the included contributions, confirm the result.

On several ranks, each rank works on its own rows of every parameter. Theta at the start of the round, error feedback
and the selection are divided by rows of chunks (`pseudo_gradient.rows`). One parameter at a time is gathered whole.
"""

from __future__ import annotations

import hashlib
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from safetensors.torch import load, save
from torch import Tensor

from hetero_pp.core.device import CPU
from hetero_pp.core.errors import ExchangeLost, HeteroPPError, Stopped
from hetero_pp.core.finite import is_finite
from hetero_pp.core.scratch import Scratch
from hetero_pp.messages.messages_pb2 import ContributionEntry, RoundRecord
from hetero_pp.model.transformer import Shapes, block_of, shapes_by_block
from hetero_pp.outer.methods import OuterSettings
from hetero_pp.outer.overlap import start_before_mean
from hetero_pp.outer.step import OuterOptimizer, RoundOptimizer, parameter_of, parameter_sha256
from hetero_pp.pseudo_gradient.contribution import BlobAddress, DecodedTensor, ReceivedBlob, encode_blob
from hetero_pp.pseudo_gradient.error_feedback import Selection, give_back, select
from hetero_pp.pseudo_gradient.random_k import generator_of
from hetero_pp.pseudo_gradient.rows import join, packed, rows_of
from replica_groups.exchange.replay import FetchBlob, cut_rows, replay
from replica_groups.outer.on_host import OnHost
from replica_groups.outer.parameter_store import ParameterStore
from replica_groups.outer.ranks import ALONE, Ranks
from replica_groups.outer.saved_parts import read_part, write_part

_TRAINED = "trained:"
"""Key prefix in member checkpoints for pseudo-gradients that wait to be contributed; the round and the name follow."""
_LOCAL = "local:"
"""Key prefix in member checkpoints for the replica's own parameters after a round; the round and the name follow."""

LOCAL_LASTS = 2
"""Number of rounds after which a replica's own parameters are dropped.

A late replica usually skips one round. After a longer absence its parameters would pull theta back.
"""


class Contributions(Protocol):
    """The calls of an outer round to the exchange (`ExchangeService`)."""

    def deposit(
        self, member: str, address: BlobAddress, data: bytes, epoch: int | None = None, steps: int = 0
    ) -> None: ...

    def record(self, round_: int, member: str | None = None) -> RoundRecord: ...

    def fetch(self, member: str, round_: int, replica: str, block: str) -> bytes: ...

    def confirm(self, member: str, round_: int, sha256: Mapping[str, bytes]) -> None: ...


class Carrier(Protocol):
    """With overlap, completes a round in the background while the next one is trained (`CarriedExchange`)."""

    def carry(self, member: str, round_: int, replica: str, blocks: Collection[str]) -> None: ...

    def give_up(self) -> None: ...


@dataclass(eq=False)
class Undecided:
    """A contribution of which this member does not know yet whether its round includes it.

    It is decided when the round record arrives, or taken back, so that the round can be trained again.
    """

    round: int
    generation: int | None
    blobs: dict[str, bytes] = field(default_factory=dict)
    """By block; on the first rank only."""
    is_sent: bool = False
    """Whether all blocks are deposited. Until then the contribution cannot be included."""


@dataclass(frozen=True, eq=False)
class LocalParameters:
    """With keep_local: the replica's own parameters (this rank's rows) after a round that excluded it."""

    round: int
    rows: Mapping[str, Tensor]

    def is_start_of(self, round_: int, trained: int) -> bool:
        """Return whether a round may start here: all members kept theirs after round `trained`, lately enough."""
        return trained == self.round and round_ - trained <= LOCAL_LASTS


class OuterRound:
    """Keeps theta at the start of the round and the error feedback of the parameters that a member holds.

    A member also follows parameters of which it needs a synchronised copy without training them. An example is the
    token embedding, at stages that derive T_perp from it. With several ranks all of them call `synchronise`, and
    `exchange` is a CollectiveExchange.
    """

    def __init__(
        self,
        run: str,
        member: str,
        replica: str,
        parameters: ParameterStore,
        start: Mapping[str, Tensor],
        exchange: Contributions,
        settings: OuterSettings,
        optimizer: RoundOptimizer | None = None,
        ranks: Ranks = ALONE,
        keeps_undo: bool = True,
        carrier: Carrier | None = None,
        folder: Path | None = None,
    ) -> None:
        """Start from the parameters of the run checkpoint.

        `start` contains all held and followed parameters, whole. With `keeps_undo`, a second copy of the error feedback
        is kept in `folder` (Scratch) while a round is undecided, so that `undo` is exact. `carrier` is set on the first
        rank with overlap.
        """
        self.keeps_undo, self._carrier = keeps_undo, carrier
        self._error_before = Scratch(folder)
        self.run, self.member, self.replica = run, member, replica
        self.parameters, self.exchange, self.ranks = parameters, exchange, ranks
        self.settings = settings
        self.shapes = {name: tuple(tensor.shape) for name, tensor in start.items()}
        self.rows = {
            name: rows_of(shape, settings.compression.tile, ranks.rank, ranks.world)
            for name, shape in self.shapes.items()
        }
        self.blocks = {block_of(name) for name in parameters.shapes}
        self.optimizer = optimizer or OuterOptimizer(settings)
        if ranks.world > 1:
            self.optimizer = _ByRows(self.optimizer, self.shapes, self.rows)
        is_pinned = ranks.device.type == "cuda"
        self._selects_on = ranks.device if is_pinned else CPU
        """Device of the selection. It needs fp64, which other accelerators may lack."""
        kept_on = ranks.device if settings.keep_on_device else CPU
        if kept_on != CPU:
            self.optimizer, is_pinned = OnHost(self.optimizer), False
        self.theta = {name: _kept(_cut(tensor, self.rows[name]), kept_on, is_pinned) for name, tensor in start.items()}
        self.error = {name: _kept(torch.zeros_like(self.theta[name]), kept_on, is_pinned) for name in parameters.shapes}
        self._undecided: Undecided | None = None
        """The contribution that error feedback no longer contains."""
        self.starts: dict[str, Tensor] = {}
        """This rank's rows of the replica's parameters at the start of a round, where they differ from theta.

        They differ if the previous round is still in progress.
        """
        self.blocked = 0.0
        """Seconds spent waiting for the exchange; callers reset it to 0."""
        self.trained: dict[int, dict[str, Tensor]] = {}
        """With overlap: round -> pseudo-gradients (this rank's rows) of rounds that are trained and undecided."""
        self.local: LocalParameters | None = None
        self._is_applying = False
        """Whether the outer optimizer's state is partly that after the round in progress."""

    def synchronise(
        self,
        round_: int,
        epoch: int | None = None,
        steps: int = 0,
        on_contributed: Callable[[], object] = lambda: None,
    ) -> RoundRecord:
        """Contribute `steps` inner steps and apply the round, so that all replicas hold the same parameters.

        `on_contributed` is called while the contribution is in transit; with overlap, it may train the next round.

        Raises Suspended or TermOver if the round has to be trained again; call `undo` then. Raises Stopped if the
        member is asked to stop; after `undo`, `save` writes the state before the round.
        """
        own = self.contribute(round_, epoch, steps)
        if self._carrier is not None:
            self._carrier.carry(self.member, round_, self.replica, shapes_by_block(self.optimizer.needs(self.theta)))
        on_contributed()
        record = self._await_record(round_, own, epoch, steps)
        with self._undone_if_stopped():
            self._decide_and_apply(record, own, epoch)
        return record

    def _decide_and_apply(self, record: RoundRecord, own: Mapping[str, bytes], epoch: int | None) -> None:
        """Restore the contribution to error feedback if the record excludes it; then apply the round."""
        if self.settings.keep_local and not self._is_in(record) and self.replica not in record.left_out:
            self._keep_local(record.round)
            is_counted = False
        else:
            self.local = None
            is_counted = self._take_back_uncounted(record, own, epoch)
        self.apply(record, own if is_counted else None)

    @contextmanager
    def _undone_if_stopped(self) -> Iterator[None]:
        """If the block raises Stopped, let `take_back_undecided` restore the error feedback from before the round.

        Theta and the outer optimizer's state may be partly those after the round, but the process ends, and a member
        checkpoint does without both.
        """
        undecided = self._undecided
        try:
            yield
        except Stopped:
            self._undecided, self.local = undecided, None
            raise

    @property
    def is_settled(self) -> bool:
        """Whether this object's state is independent of the rounds that were closed without this member."""
        return self._sent is None and self.local is None and not self.trained

    @property
    def _sent(self) -> Undecided | None:
        """The undecided contribution, if it may be included."""
        return self._undecided if self._undecided is not None and self._undecided.is_sent else None

    def _is_in(self, record: RoundRecord) -> bool:
        """Return whether a record includes this replica."""
        return any(one.replica == self.replica for one in record.contributions)

    @torch.no_grad()
    def _keep_local(self, round_: int) -> None:
        """Keep the replica's own parameters, and restore error feedback to its state before the contribution."""
        self.local = None  # first, to avoid holding two copies at once
        rows = {
            name: self.parameters.read(name, self.rows[name]).to(error.device, copy=True)
            for name, error in self.error.items()
        }
        self.local = LocalParameters(round_, rows)
        self.take_back_undecided()

    def trained_beyond(self, round_: int) -> int:
        """Return the last round that was trained here but is not part of theta after `round_`; 0 if there is none."""
        if round_ + 1 in self.trained:
            return round_ + 1
        return 0 if self.local is None else self.local.round

    @torch.no_grad()
    def start_local(self, round_: int, trained: int) -> None:
        """Start a round from the replica's own parameters, if it was excluded from the last round; else drop them."""
        if self.local is not None and self.local.is_start_of(round_, trained):
            self._write(self.local.rows)
        else:
            self.local = None

    def _await_record(self, round_: int, own: Mapping[str, bytes], epoch: int | None, steps: int) -> RoundRecord:
        """Return the record once the round is closed.

        After a lost connection, deposit again, as the exchange may have restarted.
        """
        while True:
            try:
                with self._blocked():
                    return self.exchange.record(round_, self.member)
            except ExchangeLost:
                self._deposit(round_, own, epoch, steps)

    def undo(self) -> None:
        """Return to the start of the round: restore the error feedback before the undecided contribution.

        With overlap, rounds trained ahead of the undecided one are dropped. Error feedback stays until the round is
        decided or contributed to again, because the contribution may be included although the replica reforms.
        """
        if self.settings.overlap:
            self.starts.clear()
            if (sent := self._sent) is not None:
                self.trained = {round_: one for round_, one in self.trained.items() if round_ <= sent.round}
            if self._carrier is not None:
                self._carrier.give_up()
        else:
            self.take_back_undecided()

    def take_back_undecided(self) -> None:
        """Restore the error feedback from before the contribution to an undecided round, where a copy was kept."""
        if self._undecided is not None and self.keeps_undo:
            for name, error in self.error.items():
                error.copy_(self._error_before.read(name))
            self._undecided = None

    @torch.no_grad()
    def start_ahead(self) -> None:
        """Set this member's parameters to the start of the next round while its contribution is in transit."""
        self._write(self.starts)

    def _write(self, rows: Mapping[str, Tensor]) -> None:
        """Overwrite this member's parameters from each rank's rows."""
        for name in self.parameters.shapes:
            self.parameters.write(name, self._gathered(rows[name], name))
        self.parameters.finish_writing()

    @torch.no_grad()
    def end_inner_loop(self, round_: int) -> None:
        """With overlap: keep the pseudo-gradient of a round until it is contributed and decided."""
        self.trained[round_] = {name: self._difference(name).to(self.theta[name].device) for name in self.error}
        for name in self.error:
            self.starts.pop(name, None)

    @torch.no_grad()
    def restore(self) -> None:
        """Overwrite this member's parameters with theta."""
        self._write(self.theta)

    def reset(self, start: Mapping[str, Tensor], momentum: Mapping[str, Tensor], round_: int) -> None:
        """Take theta after a round, whole, and the outer optimizer's state from a run checkpoint.

        The member's parameters change only with the next `restore`.
        """
        self.local = None
        for name, theta in self.theta.items():
            theta.copy_(_cut(start[name], self.rows[name]))
        rows = {name: self.rows.get(parameter_of(name)) for name in momentum}
        kept = {name: one if (own := rows[name]) is None else _cut(one, own) for name, one in momentum.items()}
        self.optimizer.load(kept, round_)

    def catch_up(self, rounds: range, stale: range = range(0)) -> None:
        """Apply rounds that were closed without this member.

        Error feedback that was saved before the rounds of `stale` still holds what those rounds included from this
        replica. The included values are set to zero. The others decay as if no pseudo-gradient had been added; the
        pseudo-gradients of those rounds are lost.
        """
        for round_ in sorted({*rounds, *stale}):
            record = self._await_record(round_, {}, None, 0)
            if round_ in stale and self._is_in(record):
                self.local = None
            if (sent := self._sent) is not None and sent.round == round_:
                self._take_back_uncounted(record, sent.blobs, sent.generation)
            elif round_ in stale:
                self._forget_counted(record)
            if round_ in rounds:
                self.apply(record, None)

    @torch.no_grad()
    def _forget_counted(self, record: RoundRecord) -> None:
        for name, decoded in self._counted(record, self._fetches(record, None)):
            error = self.error[name].view(-1).mul_(self.settings.compression.error_feedback_decay)
            self._forget(error, decoded.indices)

    def _forget(self, error: Tensor, indices: Tensor) -> None:
        """Set the sent values to zero in error feedback; a momentum keeps them."""
        if self.settings.compression.memory == "error_feedback":
            error.index_fill_(0, indices.to(error.device), 0.0)

    @torch.no_grad()
    def _take_back_uncounted(self, record: RoundRecord, own: Mapping[str, bytes], epoch: int | None) -> bool:
        """Restore an excluded contribution to error feedback; return whether the record includes `own`.

        The record may instead include a contribution of an earlier generation of the replica, which another coordinator
        received first. That one is then subtracted from error feedback.
        """
        self._undecided = None
        counted = next((one for one in record.contributions if one.replica == self.replica), None)
        if counted is not None and (epoch is None or counted.epoch == epoch) and _names(counted, own):
            return True
        mine = RoundRecord(round=record.round)
        mine.contributions.add(replica=self.replica, weight=1.0)
        for name, decoded in self._counted(mine, lambda replica, block: self.ranks.broadcast_bytes(own.get(block))):
            indices, values = (one.to(self.error[name].device) for one in (decoded.indices, decoded.values))
            give_back(self.error[name], indices, values, self.settings.given_back)
        if counted is not None:
            for name, decoded in self._counted(record, self._fetches(record, None)):
                self._forget(self.error[name].view(-1), decoded.indices)
        return False

    def _counted(self, record: RoundRecord, fetch: FetchBlob) -> Iterator[tuple[str, DecodedTensor]]:
        """Yield what a record includes from this replica, for each parameter trained here: this rank's rows."""
        if not self._is_in(record):
            return
        for block, shapes in shapes_by_block(self.parameters.shapes).items():
            address = BlobAddress(self.run, record.round, self.replica, block)
            blob = ReceivedBlob(fetch(self.replica, block), address, shapes, self.settings.compression)
            for name, shape in shapes.items():
                yield name, cut_rows(blob.tensor(name), shape, self.rows[name])

    def _fetches(self, record: RoundRecord, own: Mapping[str, bytes] | None) -> FetchBlob:
        """Return a function that fetches the blobs of a record.

        The first rank's `own` blobs are used without a fetch, unless `own` is None on all ranks.
        """

        def fetch(replica: str, block: str) -> bytes:
            if own is not None and replica == self.replica and block in self.blocks:
                return self.ranks.broadcast_bytes(own.get(block))
            with self._blocked():
                return self.exchange.fetch(self.member, record.round, replica, block)

        return fetch

    @contextmanager
    def _blocked(self) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self.blocked += time.monotonic() - began

    @torch.no_grad()
    def apply(self, record: RoundRecord, own: Mapping[str, bytes] | None) -> None:
        """Apply the included contributions of a round.

        `own` contains this member's own blobs by block, if they were included.
        """
        self._is_applying = True
        replay(self.theta, self.run, record, self._fetches(record, own), self.optimizer)
        self._is_applying = False
        hashes = {}
        for name in self.theta:
            whole = self._whole(name)
            if name in self.parameters.shapes:
                self.parameters.write(name, whole)
            if self.ranks.is_first:
                hashes[name] = parameter_sha256(whole)
        self.parameters.finish_writing()
        self.trained.pop(record.round, None)
        self.exchange.confirm(self.member, record.round, hashes)

    def _whole(self, name: str) -> Tensor:
        return self._gathered(self.theta[name], name)

    def _gathered(self, rows: Tensor, name: str) -> Tensor:
        if self.ranks.world == 1:
            return rows
        return self.ranks.gather_rows(rows.to(self.ranks.device), self.shapes[name][0])

    def save(self, folder: Path) -> None:
        """Write this rank's error feedback and the outer optimizer's state. Theta is in the run checkpoints.

        The optimizer's state is there, too. It is left out if a stop has interrupted the round that changes it.
        """
        tensors = {f"error:{name}": tensor for name, tensor in self.error.items()}
        for round_, trained in self.trained.items():
            tensors |= {f"{_TRAINED}{round_}:{name}": tensor for name, tensor in trained.items()}
        if self.local is not None:
            tensors |= {f"{_LOCAL}{self.local.round}:{name}": tensor for name, tensor in self.local.rows.items()}
        optimizer = {} if self._is_applying else self.optimizer.state
        write_part(folder, self.ranks, tensors | {f"optimizer:{name}": t for name, t in optimizer.items()})

    def load(self, folder: Path, round_: int, snapshot: int | None = None) -> None:
        """Restore the state after a round, on any number of ranks.

        The member started from the run checkpoint after `snapshot`.

        If `snapshot` is another round, or the member checkpoint lacks the outer optimizer's state, the optimizer keeps
        its state from that run checkpoint.
        """
        tensors = read_part(folder, self.ranks, self.shapes, self.settings.compression.tile)
        for name, error in self.error.items():
            error.copy_(tensors[f"error:{name}"])
        if snapshot in (None, round_):
            kept = {name.split(":")[1]: tensor for name, tensor in tensors.items() if name.startswith("optimizer:")}
            if kept or snapshot is None:
                self.optimizer.load(kept, round_)
        local = _rounds_in(tensors, _LOCAL)
        self.local = next((LocalParameters(number, rows) for number, rows in local.items()), None)
        self.trained |= _rounds_in(tensors, _TRAINED)

    def _contributed(self, round_: int, name: str) -> Tensor:
        """Return this rank's rows of the pseudo-gradient, or of the gradient, which is consumed."""
        if self.settings.source == "gradient":
            return _cut(self.parameters.read_gradient(name), self.rows[name]).to(self._selects_on)
        return self.trained[round_][name].to(self._selects_on) if round_ in self.trained else self._difference(name)

    def _difference(self, name: str) -> Tensor:
        now = self.parameters.read(name, self.rows[name]).to(self._selects_on)
        return self.starts.get(name, self.theta[name]).to(now.device) - now

    @torch.no_grad()
    def contribute(self, round_: int, epoch: int | None = None, steps: int = 0) -> dict[str, bytes]:
        """Compress and deposit every block; return the blobs on the first rank."""
        self.take_back_undecided()
        if self.keeps_undo:
            for name, error in self.error.items():
                self._error_before.keep(name, error)
        self._undecided = undecided = Undecided(round_, epoch)
        for block, shapes in shapes_by_block(self.parameters.shapes).items():
            selections = self._selections(round_, shapes)
            if not self.ranks.is_first:
                deque(selections, maxlen=0)
                continue
            address = BlobAddress(self.run, round_, self.replica, block)
            undecided.blobs[block] = encode_blob(address, selections, self.settings.compression)
            self._deposit(round_, {block: undecided.blobs[block]}, epoch, steps)
        undecided.is_sent = True
        return undecided.blobs

    def _deposit(self, round_: int, blobs: Mapping[str, bytes], epoch: int | None, steps: int) -> None:
        for block, data in blobs.items():
            address = BlobAddress(self.run, round_, self.replica, block)
            with self._blocked():
                self.exchange.deposit(self.member, address, data, epoch, steps)

    def _selections(self, round_: int, shapes: Shapes) -> Iterator[tuple[str, tuple[int, ...], Selection]]:
        """Yield what to send of each parameter, computed lazily: whole on the first rank, else this rank's part."""
        for name, shape in shapes.items():
            delta = self._contributed(round_, name)
            if not is_finite(delta):
                raise HeteroPPError(f"{self.member} diverged: {name} is not finite after round {round_}")
            yield name, shape, self._select(name, delta, round_)

    def _select(self, name: str, delta: Tensor, round_: int) -> Selection:
        compression, ranks, kept = self.settings.compression, self.ranks, self.error[name]
        error = kept.to(delta.device)
        generator = generator_of(self.run, round_, self.replica, name, ranks.rank)
        selection = select(error, delta, compression, ranks.sum if ranks.world > 1 else None, generator)
        if error is not kept:
            kept.copy_(error)
        if self.settings.overlap:
            sent = DecodedTensor(selection.indices, selection.values)
            start = start_before_mean(self.theta[name].to(delta.device), sent, self.settings)
            self.starts[name] = start.to(kept.device)
        if ranks.world == 1 and delta.device.type == "cpu":
            return selection
        parts = ranks.gather_bytes(save(packed(selection, tuple(delta.shape), compression.tile)))
        return (
            join(self.shapes[name], compression.tile, [load(part) for part in parts]) if ranks.is_first else selection
        )


class _ByRows:
    """Outer optimizer that works on this rank's rows of theta. Implements RoundOptimizer."""

    def __init__(self, whole: RoundOptimizer, shapes: Shapes, rows: Mapping[str, range]) -> None:
        self.settings = whole.settings
        self._whole, self._shapes, self._rows = whole, shapes, rows

    def begin(self, round_: int) -> None:
        self._whole.begin(round_)

    def needs(self, theta: Mapping[str, Tensor]) -> Shapes:
        return {name: self._shapes[name] for name in theta}

    def rows(self, name: str, shape: tuple[int, ...]) -> range:
        return self._rows[name]

    def take(self, theta: Mapping[str, Tensor], name: str, mean: Tensor) -> None:
        self._whole.take(theta, name, mean)

    def finish(self, theta: Mapping[str, Tensor]) -> None:
        self._whole.finish(theta)

    @property
    def state(self) -> Mapping[str, Tensor]:
        """The state of this rank's rows."""
        return self._whole.state

    def load(self, state: Mapping[str, Tensor], rounds: int) -> None:
        self._whole.load(state, rounds)


def _rounds_in(tensors: Mapping[str, Tensor], prefix: str) -> dict[int, dict[str, Tensor]]:
    """Return the tensors of a member checkpoint whose keys are `prefix`, a round and a parameter, by round."""
    found: dict[int, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        if key.startswith(prefix):
            number, name = key.removeprefix(prefix).split(":")
            found.setdefault(int(number), {})[name] = tensor
    return found


def _names(counted: ContributionEntry, own: Mapping[str, bytes]) -> bool:
    """Return whether the record names exactly these blobs.

    Two coordinators at once may have formed two groups of the same generation, so comparing generations is not enough.
    """
    named = {blob.block: blob.sha256 for blob in counted.blobs}
    return all(named.get(block) == hashlib.sha256(data).digest() for block, data in own.items())


def _cut(tensor: Tensor, rows: range) -> Tensor:
    return tensor[rows.start : rows.stop]


def _kept(tensor: Tensor, device: torch.device, is_pinned: bool) -> Tensor:
    """Return a copy on a device, or in CPU memory that is pinned for a GPU."""
    copy = tensor.detach().to(device, copy=True).contiguous()
    return copy.pin_memory() if is_pinned else copy
