"""Outer rounds of a rehearsal: contributions of the true sizes are deposited, fetched and verified, but not decoded."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterator, Mapping

import numpy as np

from hetero_pp.core.errors import MalformedContribution
from hetero_pp.core.seeds import seed_of
from hetero_pp.messages.messages_pb2 import RoundRecord
from hetero_pp.model.transformer import EMBEDDING, Shapes, block_of, shapes_by_block
from hetero_pp.pseudo_gradient.compression import CompressionSettings
from hetero_pp.pseudo_gradient.contribution import BlobAddress, blob_of
from hetero_pp.run.simulate_section import MeasuredCost
from hetero_pp.run.spec import MemberSpec, RunSpec
from hetero_pp.simulator.traffic import blob_sizes
from replica_groups.engines.parameter_store import LocalParameters
from replica_groups.member.outer_round import OuterRound
from replica_groups.member.session import MemberSession
from replica_groups.rehearsal.emulated import EmulatedPace


class RehearsedRound(OuterRound):
    """Does what OuterRound does, for a member without parameters. Waits take the place of compression and decoding."""

    def __init__(
        self,
        spec: RunSpec,
        member: MemberSpec,
        session: MemberSession,
        cost: MeasuredCost,
        pace: EmulatedPace,
    ) -> None:
        own, outer = member.replica.name, spec.config.outer
        super().__init__(session, LocalParameters({}), {}, outer, keeps_undo=False)
        shapes = shapes_by_block(spec.parameter_shapes)
        self.blocks = set(map(block_of, member.owned))
        self._shapes = {block: shapes[block] for block in sorted(self.blocks)}
        self._sizes, self._cost, self._pace = blob_sizes(spec)[own], cost, pace
        followed = {block_of(EMBEDDING)} if member.follows_embedding else set()
        self._needed = sorted(shapes if outer.source == "gradient" else self.blocks | followed)

    def needed(self) -> Collection[str]:
        return self._needed

    def blobs(self, round_: int, generation: int | None) -> RehearsedBlobs:
        """Return the contribution of a generation to a round."""
        addresses = {block: self.session.address_of(round_, block) for block in self._shapes}
        return RehearsedBlobs(addresses, self._shapes, self._sizes, self.settings.compression, generation or 0)

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
    """Blobs of one contribution, by block. Each is made anew when it is asked for, so that none is held.

    They are random, so that nothing on their way can compress them.
    """

    def __init__(
        self,
        addresses: Mapping[str, BlobAddress],
        shapes: Mapping[str, Shapes],
        sizes: Mapping[str, int],
        settings: CompressionSettings,
        generation: int,
    ) -> None:
        """`sizes` are the predicted bytes of each block's blob (`blob_sizes`), `shapes` those of its tensors."""
        self._addresses, self._shapes, self._sizes = addresses, shapes, sizes
        self._settings, self._generation = settings, generation

    def __getitem__(self, block: str) -> bytes:
        address, names = self._addresses[block], sorted(self._shapes[block])
        contents = dict.fromkeys(names, b"")
        room = self._sizes[block] - len(self._blob(address, contents))
        seed = seed_of("rehearsed blob", address.run, address.round, address.replica, block, self._generation)
        contents[names[0]] = np.random.default_rng(seed).bytes(max(0, room))
        return self._blob(address, contents)

    def __iter__(self) -> Iterator[str]:
        return iter(self._addresses)

    def __len__(self) -> int:
        return len(self._addresses)

    def _blob(self, address: BlobAddress, contents: Mapping[str, bytes]) -> bytes:
        shapes = self._shapes[address.block]
        return blob_of(address, ((name, shapes[name], data) for name, data in contents.items()), self._settings)
