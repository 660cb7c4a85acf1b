"""A member's side of the outer round: contribute its parameters, apply what was counted, prove what it holds.

On several ranks each works on rows of its own of every parameter: theta at the start of the round, error feedback and
the selection are cut by rows of chunks (pseudo_gradient.rows), and one parameter at a time is made whole.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol

import torch
from safetensors.torch import load, save
from torch import Tensor

from hetero_pp.errors import HeteroPPError
from hetero_pp.messages.messages_pb2 import RoundRecord
from hetero_pp.model import Shapes, block_of, shapes_by_block
from hetero_pp.outer.methods import OuterSettings
from hetero_pp.outer.step import OuterOptimizer, RoundOptimizer, parameter_sha256
from hetero_pp.pseudo_gradient.contribution import BlobAddress, encode_blob
from hetero_pp.pseudo_gradient.error_feedback import Selection, select
from hetero_pp.pseudo_gradient.random_k import generator_of
from hetero_pp.pseudo_gradient.rows import join, packed, rows_of
from replica_groups.exchange.replay import replay
from replica_groups.parameter_store import ParameterStore
from replica_groups.ranks import ALONE, Ranks
from replica_groups.saved_parts import read_part, write_part


class Contributions(Protocol):
    """What an outer round asks of the exchange; see ExchangeService."""

    def deposit(self, member: str, address: BlobAddress, data: bytes) -> None: ...

    def record(self, round_: int) -> RoundRecord: ...

    def fetch(self, member: str, round_: int, replica: str, block: str) -> bytes: ...

    def confirm(self, member: str, round_: int, sha256: Mapping[str, bytes]) -> None: ...


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
    ) -> None:
        """`start` is what the run starts from: all held parameters, whole, and the followed ones."""
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
        self.starts: dict[str, Tensor] = {}
        """What this replica starts the round with, where that is not theta (an ablation of the embedding's split)."""

    def synchronise(self, round_: int) -> None:
        """Bring this member's parameters to what all replicas hold after the round."""
        self.apply(round_, self.contribute(round_))

    @torch.no_grad()
    def apply(self, round_: int, own: Mapping[str, bytes]) -> None:
        """Once the round is closed, what was counted in it; `own` is what this member contributed, by block."""
        record = self.exchange.record(round_)

        def fetch(replica: str, block: str) -> bytes:
            if replica == self.replica and block in self.blocks:
                return self.ranks.broadcast_bytes(own.get(block))
            return self.exchange.fetch(self.member, round_, replica, block)

        replay(self.theta, self.run, record, fetch, self.optimizer)
        hashes = {}
        for name, part in self.theta.items():
            whole = self.ranks.gather_rows(part.to(self.ranks.device), self.shapes[name][0])
            if name in self.parameters.shapes:
                self.parameters.write(name, whole)
            if self.ranks.is_first:
                hashes[name] = parameter_sha256(whole)
        self.parameters.finish_writing()
        self.exchange.confirm(self.member, round_, hashes)

    @torch.no_grad()
    def restore(self) -> None:
        """Write theta at the start of the round into the parameters again. Error feedback stays what it is."""
        for name in self.parameters.shapes:
            part = self.theta[name].to(self.ranks.device)
            self.parameters.write(name, self.ranks.gather_rows(part, self.shapes[name][0]))
        self.parameters.finish_writing()

    def save(self, folder: Path) -> None:
        """Write this rank's error feedback and what the outer optimizer keeps; theta is in the run's snapshots."""
        tensors = {f"error:{name}": tensor for name, tensor in self.error.items()}
        write_part(folder, self.ranks, tensors | {f"optimizer:{name}": t for name, t in self.optimizer.state.items()})

    def load(self, folder: Path, round_: int) -> None:
        """Go on after a round, in a member that started from its snapshot, on any number of ranks."""
        tensors = read_part(folder, self.ranks, self.shapes, self.settings.compression.tile)
        for name, error in self.error.items():
            error.copy_(tensors[f"error:{name}"])
        kept = {name.split(":")[1]: tensor for name, tensor in tensors.items() if name.startswith("optimizer:")}
        self.optimizer.load(kept, round_)

    def _contributed(self, name: str) -> Tensor:
        """This rank's rows of the pseudo-gradient, or of the gradient, which is then used up."""
        if self.settings.source == "gradient":
            return _cut(self.parameters.read_gradient(name), self.rows[name])
        now = self.parameters.read(name, self.rows[name])
        return self.starts.get(name, self.theta[name]).to(now.device) - now

    @torch.no_grad()
    def contribute(self, round_: int) -> dict[str, bytes]:
        """Compress and hand in every block; returns the blobs, on the first rank."""
        blobs: dict[str, bytes] = {}
        for block, shapes in shapes_by_block(self.parameters.shapes).items():
            selections = self._selections(round_, shapes)
            if not self.ranks.is_first:
                deque(selections, maxlen=0)
                continue
            address = BlobAddress(self.run, round_, self.replica, block)
            blobs[block] = encode_blob(address, selections, self.settings.compression)
            self.exchange.deposit(self.member, address, blobs[block])
        return blobs

    def _selections(self, round_: int, shapes: Shapes) -> Iterator[tuple[str, tuple[int, ...], Selection]]:
        """What is sent of each parameter, made when it is asked for; whole on the first rank, else this rank's part."""
        for name, shape in shapes.items():
            delta = self._contributed(name)
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


def _cut(tensor: Tensor, rows: range) -> Tensor:
    return tensor[rows.start : rows.stop]


def _kept(tensor: Tensor, is_pinned: bool) -> Tensor:
    """A copy in CPU memory, pinned for a GPU."""
    copy = tensor.detach().to("cpu", copy=True).contiguous()
    return copy.pin_memory() if is_pinned else copy
