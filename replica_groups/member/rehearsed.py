"""The outer round of a rehearsal: contributions of the true sizes are deposited, fetched and verified, but not decoded.

Everything else of a rehearsal is an ordinary run with engine `timed`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping

import numpy as np

from hetero_pp.config.predictions import MeasuredCost
from hetero_pp.config.spec import MemberSpec, RunSpec
from hetero_pp.core.errors import MalformedContribution
from hetero_pp.core.seeds import seed_of
from hetero_pp.messages.messages_pb2 import RoundRecord
from hetero_pp.model.transformer import EMBEDDING, Shapes, block_of, shapes_by_block
from hetero_pp.pseudo_gradient.contribution import BlobAddress, blob_of
from hetero_pp.simulator.traffic import blob_sizes
from replica_groups.engines.engine import LocalParameters
from replica_groups.engines.timed import TimedPace
from replica_groups.member.error_feedback import Undecided
from replica_groups.member.outer_round import OuterRound
from replica_groups.member.session import MemberSession


class RehearsedRound(OuterRound):
    """Does what OuterRound does, for a member without parameters. Waits take the place of compression and decoding."""

    def __init__(self, spec: RunSpec, member: MemberSpec, session: MemberSession, cost: MeasuredCost) -> None:
        own = spec.config.outer.model_copy(update={"fragments": 1, "mixing": 0.0})  # it keeps no parameters
        super().__init__(session, LocalParameters({}), {}, own, keeps_undo=False, fragments=spec.fragments)
        shapes = shapes_by_block(spec.parameter_shapes)
        self.blocks = set(map(block_of, member.owned))
        self._shapes = {block: shapes[block] for block in sorted(self.blocks)}
        self._sizes, self._cost, self._pace = blob_sizes(spec)[member.replica.name], cost, TimedPace()
        followed = {block_of(EMBEDDING)} if member.follows_embedding else set()
        self._needed = sorted(shapes if spec.config.outer.source == "gradient" else self.blocks | followed)

    def needed(self) -> Collection[str]:
        return self._needed

    def _shapes_in(self, round_: int) -> Mapping[str, Shapes]:
        return {block: self._shapes[block] for block in sorted(self.fragments.among(self._shapes, round_))}

    def blobs(self, round_: int, generation: int | None) -> RehearsedBlobs:
        """Return the contribution of a generation to a round."""
        return RehearsedBlobs(
            self._shapes_in(round_), lambda block: self._blob(self.session.address_of(round_, block), generation)
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

    def end_inner_loop(self, round_: int) -> None:
        self.own.trained[round_] = {}

    def compress(self, round_: int, undecided: Undecided) -> tuple[Mapping[str, bytes], Iterator[tuple[str, bytes]]]:
        """Return the blobs, and yield them by block, each after the time that its compression takes."""
        # The cost is that of the rounds of all fragments together.
        blobs, total = self.blobs(round_, undecided.generation), sum(map(self._sizes.__getitem__, self._shapes))

        def compressed() -> Iterator[tuple[str, bytes]]:
            for block in blobs:
                self._pace.begin()
                data = blobs[block]
                self._pace.compute(self._cost.contribute * self._sizes[block] / total)
                yield block, data

        return blobs, compressed()

    def apply(self, record: RoundRecord, own: Mapping[str, bytes] | None, is_missed: bool = False) -> None:
        """Fetch what a member fetches, and verify it. `own` is None if the round does not include it."""
        fetch, needed = self.session.fetches(record.round), self.fragments.among(self._needed, record.round)
        total = sum(map(self._sizes.__getitem__, self._needed)) * len(record.contributions)
        for block in sorted(needed):
            for entry in record.contributions:
                is_own = own is not None and entry.replica == self.session.replica and block in self.blocks
                data = None if is_own else fetch(entry.replica, block)
                self._pace.begin()
                named = next(blob.sha256 for blob in entry.blobs if blob.block == block)
                if data is not None and hashlib.sha256(data).digest() != named:
                    raise MalformedContribution(f"{entry.replica}, {block}: differs from the blob in the round record")
                self._pace.compute(self._cost.apply * self._sizes[block] / total)
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
