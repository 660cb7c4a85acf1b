"""A member of a rehearsal: engine `timed` in the ordinary training loop, and rounds whose contributions mean nothing.

Contributions of the true sizes are deposited, fetched and verified, but not decoded.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hetero_pp.config.predictions import MeasuredCost
from hetero_pp.config.spec import MemberSpec, RunSpec
from hetero_pp.config.topology import ParticipantsReplica
from hetero_pp.core.errors import MalformedContribution
from hetero_pp.core.seeds import seed_of
from hetero_pp.data.batches import SharedBatches
from hetero_pp.messages.messages_pb2 import RoundRecord
from hetero_pp.model.transformer import EMBEDDING, block_of, shapes_by_block
from hetero_pp.pseudo_gradient.contribution import BlobAddress, blob_of
from hetero_pp.simulator.costs import cost_of
from hetero_pp.simulator.traffic import blob_sizes
from replica_groups.engines.engine import LocalParameters
from replica_groups.engines.timed import TimedBoundary, TimedEngine, TimedPace, TimedStage
from replica_groups.member.outer_round import OuterRound
from replica_groups.member.session import MemberSession
from replica_groups.member.trainers import DatacenterMember, StageMember, TrainingMember, worker_settings
from stages.worker import StageWorker, Timing


def build_rehearsed(spec: RunSpec, member: MemberSpec, session: MemberSession) -> tuple[TrainingMember, RehearsedRound]:
    """Return the trainer and the outer round of a member. Raises ConfigError for unknown hardware."""
    replica, data = member.replica, spec.config.data
    cost, pace, rows = cost_of(spec, member), TimedPace(), replica.batch_size // replica.micro_batches
    batches, validation = None, list[Tensor]()
    if member.stage is None or member.stage.is_first:
        random = torch.Generator().manual_seed(0)
        tokens = torch.randint(spec.shape.vocabulary, (replica.batch_size, data.sequence_length + 1), generator=random)
        batches = SharedBatches(spec.share_of(replica.name, 1), lambda share: _SameBatch(tokens))
        sequences = data.validation_sequences
        validation = [tokens[: min(rows, sequences - first)] for first in range(0, sequences, rows)]
    trainer: TrainingMember
    if member.stage is not None and isinstance(replica, ParticipantsReplica):
        boundary = TimedBoundary(replica.boundary, spec.shape.width, rows, data.sequence_length)
        stage = TimedStage(member.stage, spec.shape, boundary, cost, pace)
        worker = StageWorker(stage, worker_settings(spec.config, replica), None, None)
        pace.waited = lambda: worker.timing.waited_previous + worker.timing.waited_next
        trainer = RehearsedStageMember(worker, pace, batches, validation, -(-data.validation_sequences // rows))
    else:
        assert batches is not None
        engine = TimedEngine(cost, replica.micro_batches, spec.shape.vocabulary, pace)
        trainer = DatacenterMember(member.name, engine, batches, validation)
    return trainer, RehearsedRound(spec, member, session, cost, TimedPace())


class RehearsedStageMember(StageMember):
    """A stage whose reported compute is the timed one."""

    def __init__(self, worker: StageWorker, pace: TimedPace, *args: Any) -> None:
        super().__init__(worker.settings.replica, worker, *args)
        self._pace, self._reported = pace, 0.0

    def timing(self) -> Timing:
        timing = super().timing()
        timing.compute, self._reported = self._pace.computed - self._reported, self._pace.computed
        return timing


class _SameBatch:
    """One batch that is read again and again, at every position. Implements Batches."""

    def __init__(self, tokens: Tensor) -> None:
        self._tokens = tokens

    def train(self, step: int) -> Tensor:
        return self._tokens

    def read_ahead(self, steps: range) -> None: ...

    def state(self) -> Any:
        return {}

    def load(self, state: Any) -> None: ...


class RehearsedRound(OuterRound):
    """Does what OuterRound does, for a member without parameters. Waits take the place of compression and decoding."""

    def __init__(
        self, spec: RunSpec, member: MemberSpec, session: MemberSession, cost: MeasuredCost, pace: TimedPace
    ) -> None:
        super().__init__(session, LocalParameters({}), {}, spec.config.outer, keeps_undo=False)
        shapes = shapes_by_block(spec.parameter_shapes)
        self.blocks = set(map(block_of, member.owned))
        self._shapes = {block: shapes[block] for block in sorted(self.blocks)}
        self._sizes, self._cost, self._pace = blob_sizes(spec)[member.replica.name], cost, pace
        followed = {block_of(EMBEDDING)} if member.follows_embedding else set()
        self._needed = sorted(shapes if spec.config.outer.source == "gradient" else self.blocks | followed)

    def needed(self) -> Collection[str]:
        return self._needed

    def blobs(self, round_: int, generation: int | None) -> RehearsedBlobs:
        """Return the contribution of a generation to a round."""
        return RehearsedBlobs(
            self._shapes, lambda block: self._blob(self.session.address_of(round_, block), generation)
        )

    def _blob(self, address: BlobAddress, generation: int | None) -> bytes:
        """Return a blob of the predicted size. Its values are random, so that nothing on its way can compress them."""
        shapes = self._shapes[address.block]
        contents = dict.fromkeys(sorted(shapes), b"")

        def blob() -> bytes:
            filled = ((name, shapes[name], data) for name, data in contents.items())
            return blob_of(address, filled, self.settings.compression)

        room = max(0, self._sizes[address.block] - len(blob()))
        seed = seed_of("rehearsed blob", address.run, address.round, address.replica, address.block, generation or 0)
        contents[min(shapes)] = np.random.default_rng(seed).bytes(room)
        return blob()

    def contribute(
        self,
        round_: int,
        generation: int | None = None,
        steps: int = 0,
        before_last: Callable[[], object] = lambda: None,
    ) -> Mapping[str, bytes]:
        undecided, blobs = self.feedback.begin(round_, generation), self.blobs(round_, generation)
        self.session.contribute(round_, self._compressed(blobs), generation, steps, before_last)
        undecided.is_sent = True
        return blobs

    def _compressed(self, blobs: Mapping[str, bytes]) -> Iterator[tuple[str, bytes]]:
        """Yield the blobs by block, each after the time that its compression takes."""
        total = sum(map(self._sizes.__getitem__, self._shapes))
        for block in self._shapes:
            self._pace.begin()
            data = blobs[block]
            self._pace.compute(self._cost.contribute * self._sizes[block] / total)
            yield block, data

    def apply(self, record: RoundRecord, own: Mapping[str, bytes] | None) -> None:
        """Fetch what a member fetches, and verify it. `own` is None if the round does not include it."""
        fetch, count = self.session.fetches(record.round), len(self._needed) * len(record.contributions)
        for block in self._needed:
            for entry in record.contributions:
                is_own = own is not None and entry.replica == self.session.replica and block in self.blocks
                data = None if is_own else fetch(entry.replica, block)
                self._pace.begin()
                named = next(blob.sha256 for blob in entry.blobs if blob.block == block)
                if data is not None and hashlib.sha256(data).digest() != named:
                    raise MalformedContribution(f"{entry.replica}, {block}: differs from the blob in the round record")
                self._pace.compute(self._cost.apply / count)
        self.own.trained.pop(record.round, None)
        self.session.confirm(self.session.member, record.round, {})


class RehearsedBlobs(Mapping[str, bytes]):
    """Blobs of one contribution, by block. Each is made anew when it is asked for, so that none is held."""

    def __init__(self, blocks: Collection[str], blob_of_block: Callable[[str], bytes]) -> None:
        self._blocks, self._blob = blocks, blob_of_block

    def __getitem__(self, block: str) -> bytes:
        return self._blob(block)

    def __iter__(self) -> Iterator[str]:
        return iter(self._blocks)

    def __len__(self) -> int:
        return len(self._blocks)
