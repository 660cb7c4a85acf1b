"""A member's side of the outer round: contribute its parameters, apply what was counted, prove what it holds.

On several ranks each works on rows of its own of every parameter: theta at the start of the round, error feedback and
the selection are cut by rows of chunks (pseudo_gradient.rows), and one parameter at a time is made whole.
"""

from __future__ import annotations

import hashlib
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import torch
from safetensors.torch import load, save
from torch import Tensor

from hetero_pp.errors import ExchangeLost, HeteroPPError
from hetero_pp.messages.messages_pb2 import ContributionEntry, RoundRecord
from hetero_pp.model import Shapes, block_of, shapes_by_block
from hetero_pp.outer.methods import OuterSettings
from hetero_pp.outer.overlap import start_before_mean
from hetero_pp.outer.step import OuterOptimizer, RoundOptimizer, parameter_of, parameter_sha256
from hetero_pp.pseudo_gradient.contribution import BlobAddress, DecodedTensor, ReceivedBlob, encode_blob
from hetero_pp.pseudo_gradient.error_feedback import Selection, give_back, select
from hetero_pp.pseudo_gradient.random_k import generator_of
from hetero_pp.pseudo_gradient.rows import join, packed, rows_of
from replica_groups.exchange.replay import FetchBlob, cut_rows, replay
from replica_groups.parameter_store import ParameterStore
from replica_groups.ranks import ALONE, Ranks
from replica_groups.saved_parts import read_part, write_part

_TRAINED = "trained:"
"""In saved states, before the round and the name of a pseudo-gradient that waits to be contributed."""
_LOCAL = "local:"
"""In saved states, before a round and the name of a parameter as the replica trains on from it after that."""

LOCAL_LASTS = 2
"""Rounds: who is late skips one as a rule; who is away for longer would pull theta back to where it was then."""


class Contributions(Protocol):
    """What an outer round asks of the exchange; see ExchangeService."""

    def deposit(
        self, member: str, address: BlobAddress, data: bytes, epoch: int | None = None, steps: int = 0
    ) -> None: ...

    def record(self, round_: int, member: str | None = None) -> RoundRecord: ...

    def fetch(self, member: str, round_: int, replica: str, block: str) -> bytes: ...

    def confirm(self, member: str, round_: int, sha256: Mapping[str, bytes]) -> None: ...


class Carrier(Protocol):
    """With overlap, what has a round on its way while the next one is trained; see CarriedExchange."""

    def carry(self, member: str, round_: int, replica: str, blocks: Collection[str]) -> None: ...

    def give_up(self) -> None: ...


class OuterRound:
    """Keeps theta at the start of the round and the error feedback of the parameters that a member holds.

    `followed` are parameters that it needs a synced copy of but does not train (the token embedding, at stages that
    derive T_perp from it). With several ranks all of them call `synchronise`, and `exchange` is a CollectiveExchange.
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
    ) -> None:
        """`start` is what the run starts from: all held parameters, whole, and the followed ones.

        With `keeps_undo` error feedback is kept twice while a round is not decided, so that `undo` is exact.
        `carrier`: with overlap, on the first rank.
        """
        self.keeps_undo, self._carrier = keeps_undo, carrier
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
        self.theta = {name: _kept(_cut(tensor, self.rows[name]), is_pinned) for name, tensor in start.items()}
        self.error = {name: _kept(torch.zeros_like(self.theta[name]), is_pinned) for name in parameters.shapes}
        self._before: dict[str, Tensor] = {}
        """Error feedback as it was before the contribution whose round is not decided yet."""
        self._undecided: tuple[int, int | None, Mapping[str, bytes]] | None = None
        """Round, epoch and blobs of what error feedback has no more, and may have been counted or not."""
        self.starts: dict[str, Tensor] = {}
        """This rank's rows of what this replica starts a round with, where that is not theta: if the round before is on
        its way, or in an ablation of the embedding's split.
        """
        self.blocked = 0.0
        """Seconds that it stood still for the exchange, until somebody sets them to 0."""
        self.trained: dict[int, dict[str, Tensor]] = {}
        """With overlap, by round: the pseudo-gradients (this rank's rows) of rounds trained and not decided."""
        self.local: dict[str, Tensor] = {}
        """With keep_local, after a round that did not count this replica: its own parameters (this rank's rows)."""
        self._local_of = 0
        """That round."""

    def synchronise(
        self,
        round_: int,
        epoch: int | None = None,
        steps: int = 0,
        on_contributed: Callable[[], object] = lambda: None,
    ) -> RoundRecord:
        """Bring this member's parameters to what all replicas hold after the round, `steps` inner steps after it began.

        `on_contributed` is called while that is on its way; with overlap, it may train the next round.

        Raises Suspended or TermOver if the round has to be trained again: see `undo`.
        """
        own = self.contribute(round_, epoch, steps)
        if self._carrier is not None:
            self._carrier.carry(self.member, round_, self.replica, shapes_by_block(self.optimizer.needs(self.theta)))
        on_contributed()
        record = self._await_record(round_, own, epoch, steps)
        if self.settings.keep_local and not self._is_in(record) and self.replica not in record.left_out:
            self._keep_local(round_)
            is_counted = False
        else:
            self._drop_local()
            is_counted = self._take_back_uncounted(record, own, epoch)
        self.apply(record, own if is_counted else None)
        return record

    @property
    def is_settled(self) -> bool:
        """Whether nothing here depends on what the rounds came to that were closed without this member."""
        return self._undecided is None and not self.local and not self.trained

    def _is_in(self, record: RoundRecord) -> bool:
        """Whether it counts this replica."""
        return any(one.replica == self.replica for one in record.contributions)

    @torch.no_grad()
    def _keep_local(self, round_: int) -> None:
        """As if the round had not been: its way goes on, and error feedback holds what it held."""
        self._drop_local()  # first, or two copies would be held at once
        self._local_of = round_
        self.local = {
            name: self.parameters.read(name, self.rows[name]).to(error.device, copy=True)
            for name, error in self.error.items()
        }
        self.take_back_undecided()

    def _drop_local(self) -> None:
        self.local, self._local_of = {}, 0

    def trained_beyond(self, round_: int) -> int:
        """The last round whose training is here and not in theta, which is that after `round_`; 0 if there is none."""
        return round_ + 1 if round_ + 1 in self.trained else self._local_of

    @torch.no_grad()
    def start_local(self, round_: int, trained: int) -> None:
        """Have this member's parameters start a round where they were, if the last one did not count them, and if all
        of the replica kept them after that: after round `trained`.
        """
        if self.local and trained == self._local_of and round_ - trained <= LOCAL_LASTS:
            self._write(self.local)
        else:
            self._drop_local()

    def _await_record(self, round_: int, own: Mapping[str, bytes], epoch: int | None, steps: int) -> RoundRecord:
        """Once the round is closed. An exchange that was gone for a while may have to be told again."""
        while True:
            try:
                with self._blocked():
                    return self.exchange.record(round_, self.member)
            except ExchangeLost:
                self._deposit(round_, own, epoch, steps)

    def undo(self) -> None:
        """Return to the round's start: error feedback is what it was before what was contributed and not decided.

        With overlap what was trained ahead of that is dropped, and error feedback stays until the round is decided, or
        contributed to again: it may be counted though its replica is formed anew.
        """
        if self.settings.overlap:
            self.starts.clear()
            if self._undecided is not None:
                self.trained = {round_: one for round_, one in self.trained.items() if round_ <= self._undecided[0]}
            if self._carrier is not None:
                self._carrier.give_up()
        else:
            self.take_back_undecided()

    def take_back_undecided(self) -> None:
        """Have error feedback as it was before the contribution of a round that is not decided."""
        for name, before in self._before.items():
            self.error[name].copy_(before)
        if self._before:
            self._before, self._undecided = {}, None

    @torch.no_grad()
    def start_ahead(self) -> None:
        """Have this member's parameters start the next round, while what it contributed to this one is on its way."""
        self._write(self.starts)

    def _write(self, rows: Mapping[str, Tensor]) -> None:
        """Overwrite this member's parameters, of which each rank has rows."""
        for name in self.parameters.shapes:
            self.parameters.write(name, self._gathered(rows[name], name))
        self.parameters.finish_writing()

    @torch.no_grad()
    def end_inner_loop(self, round_: int) -> None:
        """With overlap: keep what a round's inner steps came to, until it is contributed and decided."""
        self.trained[round_] = {name: self._difference(name).to(self.theta[name].device) for name in self.error}
        for name in self.error:
            self.starts.pop(name, None)

    @torch.no_grad()
    def restore(self) -> None:
        """Overwrite this member's parameters with theta."""
        self._write(self.theta)

    def reset(self, start: Mapping[str, Tensor], momentum: Mapping[str, Tensor], round_: int) -> None:
        """Take theta after a round, whole, from a snapshot, with the outer optimizer's state; see `restore`."""
        self._drop_local()
        for name, theta in self.theta.items():
            theta.copy_(_cut(start[name], self.rows[name]))
        rows = {name: self.rows.get(parameter_of(name)) for name in momentum}
        kept = {name: one if (own := rows[name]) is None else _cut(one, own) for name, one in momentum.items()}
        self.optimizer.load(kept, round_)

    def catch_up(self, rounds: range, stale: range = range(0)) -> None:
        """Apply rounds that were closed without this member.

        Error feedback that was saved before the rounds of `stale` still holds what its replica was counted for since:
        there it is set to zero, elsewhere it decays as if nothing had come (it did, and is lost).
        """
        for round_ in sorted({*rounds, *stale}):
            record = self._await_record(round_, {}, None, 0)
            if round_ in stale and self._is_in(record):
                self._drop_local()
            if self._undecided is not None and self._undecided[0] == round_:
                self._take_back_uncounted(record, self._undecided[2], self._undecided[1])
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
        """What was sent is no error any more; a momentum keeps it."""
        if self.settings.compression.memory == "error_feedback":
            error.index_fill_(0, indices.to(error.device), 0.0)

    @torch.no_grad()
    def _take_back_uncounted(self, record: RoundRecord, own: Mapping[str, bytes], epoch: int | None) -> bool:
        """What this member has contributed and the record does not name goes back into error feedback: whether it does.

        It may name what was contributed before the replica was formed anew: to another coordinator, which was first.
        """
        self._before, self._undecided = {}, None
        counted = next((one for one in record.contributions if one.replica == self.replica), None)
        if counted is not None and (epoch is None or counted.epoch == epoch) and _names(counted, own):
            return True
        mine = RoundRecord(round=record.round)
        mine.contributions.add(replica=self.replica, weight=1.0)
        for name, decoded in self._counted(mine, lambda replica, block: self.ranks.broadcast_bytes(own.get(block))):
            give_back(self.error[name], decoded.indices, decoded.values, self.settings.given_back)
        if counted is not None:
            for name, decoded in self._counted(record, self._fetches(record, None)):
                self._forget(self.error[name].view(-1), decoded.indices)
        return False

    def _counted(self, record: RoundRecord, fetch: FetchBlob) -> Iterator[tuple[str, DecodedTensor]]:
        """What a record counts of this replica, of each parameter that is trained here: this rank's rows."""
        if not self._is_in(record):
            return
        for block, shapes in shapes_by_block(self.parameters.shapes).items():
            address = BlobAddress(self.run, record.round, self.replica, block)
            blob = ReceivedBlob(fetch(self.replica, block), address, shapes, self.settings.compression)
            for name, shape in shapes.items():
                yield name, cut_rows(blob.tensor(name), shape, self.rows[name])

    def _fetches(self, record: RoundRecord, own: Mapping[str, bytes] | None) -> FetchBlob:
        """What a record names; `own`, on the first rank, is at hand, unless it is None on all of them."""

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
        """What was counted in a round; `own` is what this member contributed, by block, if that was counted."""
        replay(self.theta, self.run, record, self._fetches(record, own), self.optimizer)
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
        return self.ranks.gather_rows(rows.to(self.ranks.device), self.shapes[name][0])

    def save(self, folder: Path) -> None:
        """Write this rank's error feedback and what the outer optimizer keeps; theta is in the run's snapshots."""
        tensors = {f"error:{name}": tensor for name, tensor in self.error.items()}
        for round_, trained in self.trained.items():
            tensors |= {f"{_TRAINED}{round_}:{name}": tensor for name, tensor in trained.items()}
        tensors |= {f"{_LOCAL}{self._local_of}:{name}": tensor for name, tensor in self.local.items()}
        write_part(folder, self.ranks, tensors | {f"optimizer:{name}": t for name, t in self.optimizer.state.items()})

    def load(self, folder: Path, round_: int, snapshot: int | None = None) -> None:
        """Go on after a round, on any number of ranks, in a member that started from the snapshot after `snapshot`.

        If that is another one, the outer optimizer keeps what it has from there.
        """
        tensors = read_part(folder, self.ranks, self.shapes, self.settings.compression.tile)
        for name, error in self.error.items():
            error.copy_(tensors[f"error:{name}"])
        if snapshot in (None, round_):
            kept = {name.split(":")[1]: tensor for name, tensor in tensors.items() if name.startswith("optimizer:")}
            self.optimizer.load(kept, round_)
        self._drop_local()
        for key, tensor in tensors.items():
            if key.startswith(_LOCAL):
                number, name = key.removeprefix(_LOCAL).split(":")
                self._local_of, self.local[name] = int(number), tensor
            if key.startswith(_TRAINED):
                number, name = key.removeprefix(_TRAINED).split(":")
                self.trained.setdefault(int(number), {})[name] = tensor

    def _contributed(self, round_: int, name: str) -> Tensor:
        """This rank's rows of the pseudo-gradient, or of the gradient, which is then used up."""
        if self.settings.source == "gradient":
            return _cut(self.parameters.read_gradient(name), self.rows[name])
        return self.trained[round_][name].to(self.ranks.device) if round_ in self.trained else self._difference(name)

    def _difference(self, name: str) -> Tensor:
        now = self.parameters.read(name, self.rows[name])
        return self.starts.get(name, self.theta[name]).to(now.device) - now

    @torch.no_grad()
    def contribute(self, round_: int, epoch: int | None = None, steps: int = 0) -> dict[str, bytes]:
        """Compress and hand in every block; returns the blobs, on the first rank."""
        blobs: dict[str, bytes] = {}
        self.take_back_undecided()
        self._before = {name: error.clone() for name, error in self.error.items()} if self.keeps_undo else {}
        for block, shapes in shapes_by_block(self.parameters.shapes).items():
            selections = self._selections(round_, shapes)
            if not self.ranks.is_first:
                deque(selections, maxlen=0)
                continue
            address = BlobAddress(self.run, round_, self.replica, block)
            blobs[block] = encode_blob(address, selections, self.settings.compression)
            self._deposit(round_, {block: blobs[block]}, epoch, steps)
        self._undecided = round_, epoch, blobs
        return blobs

    def _deposit(self, round_: int, blobs: Mapping[str, bytes], epoch: int | None, steps: int) -> None:
        for block, data in blobs.items():
            address = BlobAddress(self.run, round_, self.replica, block)
            with self._blocked():
                self.exchange.deposit(self.member, address, data, epoch, steps)

    def _selections(self, round_: int, shapes: Shapes) -> Iterator[tuple[str, tuple[int, ...], Selection]]:
        """What is sent of each parameter, made when it is asked for; whole on the first rank, else this rank's part."""
        for name, shape in shapes.items():
            delta = self._contributed(round_, name)
            if not bool(torch.isfinite(delta).all()):
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
    """An outer optimizer that is told of, and changes, this rank's rows of theta. Implements RoundOptimizer."""

    def __init__(self, whole: RoundOptimizer, shapes: Shapes, rows: Mapping[str, range]) -> None:
        self.settings = whole.settings
        self._whole, self._shapes, self._rows = whole, shapes, rows

    def begin(self, round_: int) -> None:
        """See RoundOptimizer."""
        self._whole.begin(round_)

    def needs(self, theta: Mapping[str, Tensor]) -> Shapes:
        """See RoundOptimizer."""
        return {name: self._shapes[name] for name in theta}

    def rows(self, name: str, shape: tuple[int, ...]) -> range:
        """See RoundOptimizer."""
        return self._rows[name]

    def take(self, theta: Mapping[str, Tensor], name: str, mean: Tensor) -> None:
        """See RoundOptimizer."""
        self._whole.take(theta, name, mean)

    def finish(self, theta: Mapping[str, Tensor]) -> None:
        """See RoundOptimizer."""
        self._whole.finish(theta)

    @property
    def state(self) -> Mapping[str, Tensor]:
        """See RoundOptimizer: this rank's rows."""
        return self._whole.state

    def load(self, state: Mapping[str, Tensor], rounds: int) -> None:
        """See RoundOptimizer."""
        self._whole.load(state, rounds)


def _names(counted: ContributionEntry, own: Mapping[str, bytes]) -> bool:
    """Whether what was counted are these blobs: two coordinators at once may have formed two groups of one epoch."""
    named = {blob.block: blob.sha256 for blob in counted.blobs}
    return all(named.get(block) == hashlib.sha256(data).digest() for block, data in own.items())


def _cut(tensor: Tensor, rows: range) -> Tensor:
    return tensor[rows.start : rows.stop]


def _kept(tensor: Tensor, is_pinned: bool) -> Tensor:
    """A copy in CPU memory, pinned for a GPU."""
    copy = tensor.detach().to("cpu", copy=True).contiguous()
    return copy.pin_memory() if is_pinned else copy
