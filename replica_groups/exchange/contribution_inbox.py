"""Deposits of members for the open round: checked, decoded, written to the log, and only then told to the rules."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from hetero_pp.core.errors import MalformedContribution, Suspended
from hetero_pp.messages.messages_pb2 import BlobEntry, BlobHeader, Commitment
from hetero_pp.messages.refusals import Kind
from hetero_pp.model.transformer import Shapes
from hetero_pp.pseudo_gradient.blob_batches import BATCH_BYTES_MAX, payload_bytes, split_blobs
from hetero_pp.pseudo_gradient.compression import CompressionSettings
from hetero_pp.pseudo_gradient.contribution import BlobAddress, ReceivedBlob, entry_of, most_bytes
from hetero_pp.rpc.exchange_service import Caller
from replica_groups.exchange.commitments import Commitments
from replica_groups.exchange.exchange_state import ExchangeState
from replica_groups.exchange.log import ContributionLog, blob_key
from replica_groups.exchange.uploads import take_upload, upload_url
from replica_groups.rounds import events as e

SMALL_BYTES = 256 << 10
"""Size of a blob from which on two threads decode faster than one: blobs of 117 KB take 1.3 times as long with two.

Blobs of 470 KB take 0.85 times as long.
"""

DIGEST_BYTES = hashlib.sha256().digest_size


@dataclass(frozen=True)
class Offer:
    """A blob that a member has for a round, before it is sent or uploaded."""

    member: str
    incarnation: int
    address: BlobAddress
    generation: int
    sha256: bytes
    steps: int = 0
    commitment: Commitment = field(default_factory=Commitment)
    holder: int = 0
    """Number of the ticket's holder; 0 without a ticket."""

    @property
    def key(self) -> str:
        own = self.address
        return blob_key(own.round, own.replica, self.generation, own.block, self.sha256)


class ContributionInbox:
    """Deposits of one run. Thread-safe; every call raises Refused, RunFailed, IncarnationOver, Suspended."""

    def __init__(self, state: ExchangeState, log: ContributionLog, compression: CompressionSettings) -> None:
        self._state, self._log, self._compression = state, log, compression
        self._runner = state.runner
        self.commitments: Commitments | None = None
        """Takes what comes with each blob, if the run is audited by recomputation."""
        self._shapes: Mapping[str, Shapes] = {}
        self._decodes = True
        self._being_kept: set[tuple[BlobAddress, int]] = set()
        self._announced: dict[tuple[BlobAddress, int], tuple[bytes, int]] = {}
        """Blob of a generation -> digest and size for which a URL was signed, in rounds that are open."""
        self._checking = threading.BoundedSemaphore(os.cpu_count() or 1)
        """As many blobs are decoded at once as there are cores: decoding takes several times a blob's memory."""
        self._checking_small = threading.Lock()
        """Small blobs are decoded one at a time: two threads would wait for Python's lock more than they compute."""

    def begin(self, shapes: Mapping[str, Shapes], decodes: bool = True) -> None:
        """Take the shapes of all parameters, by block. `decodes`: whether blobs have values, as not in a rehearsal."""
        self._shapes, self._decodes = shapes, decodes

    def expect(self, header: BlobHeader, caller: Caller) -> None:
        """Raise Refused for blobs that are not a member's, or larger than any of their shapes comes to."""
        self._require_begun(caller)
        self._expect_size(caller.name, self._address(header), header.size)
        if not header.following:
            return
        if (size := payload_bytes(header)) > BATCH_BYTES_MAX:
            reason = f"found {size} bytes of several blobs, expected at most {BATCH_BYTES_MAX}"
            raise self._state.refused(caller.name, reason, Kind.MALFORMED)
        blocks = [header.block, *(one.block for one in header.following)]
        if len(blocks) > len(set(blocks)):
            raise self._state.refused(caller.name, "found a blob named twice in a deposit", Kind.MALFORMED)
        for one in header.following:
            self._expect_size(caller.name, replace(self._address(header), block=one.block), one.size)

    def _expect_size(self, member: str, address: BlobAddress, size: int) -> None:
        self._expect_address(member, address)
        most = most_bytes(self._shapes[address.block], self._compression)
        if size > most:
            reason = f"`{address.block}`: found {size} bytes, expected at most {most}"
            raise self._state.refused(member, reason, Kind.MALFORMED)

    def take(self, header: BlobHeader, data: bytes, caller: Caller) -> None:
        """Take blobs of a member. All are decoded before any is kept, so that no receiver meets a malformed one."""
        blobs = [
            (self._offer(one, hashlib.sha256(part).digest(), caller), part) for one, part in split_blobs(header, data)
        ]
        parts = {offer.address: part for offer, part in blobs}

        def keep(some: Sequence[Offer]) -> Sequence[BlobEntry]:
            own = {offer.address: parts[offer.address] for offer in some}
            entries = [self._checked(offer, own[offer.address]) for offer in some]
            self._runner.retry(lambda: self._log.write_blobs(own, some[0].generation))
            return entries

        self._take([offer for offer, _ in blobs], keep)

    def upload_url(self, header: BlobHeader, caller: Caller) -> str | None:
        """Return where a member may put a blob into the store.

        None if the store has no such URLs; empty if the blob need not be sent, because it is included or late.
        """
        offer, size = self._offer(header, header.sha256, caller), header.size
        self._expect_own(offer)
        self._expect_size(offer.member, offer.address, size)
        if not self._is_awaited(offer) or self._is_counted(offer):
            return ""
        with self._runner.changed:
            last_round = self._state.coordinator.last_round
            self._announced = {key: one for key, one in self._announced.items() if key[0].round > last_round}
            announced = self._announced.setdefault(_kept_as(offer), (offer.sha256, size))
        if announced != (offer.sha256, size):  # each would be another object in the store
            raise self._state.refused(offer.member, f"`{offer.address.block}`: a second, different blob to upload")
        return self._runner.retry(lambda: upload_url(self._log, offer.key, size, offer.holder > 0))

    def uploaded(self, header: BlobHeader, caller: Caller) -> None:
        """Take a blob that a member has put into the store."""
        offer = self._offer(header, header.sha256, caller)
        most = most_bytes(self._shapes.get(offer.address.block, {}), self._compression)

        def keep(some: Sequence[Offer]) -> Sequence[BlobEntry]:
            try:
                data = self._runner.retry(lambda: take_upload(self._log, offer.key, offer.sha256, most))
            except MalformedContribution as error:
                raise self._state.refused(offer.member, f"`{offer.address.block}`: {error}", Kind.MALFORMED) from None
            except FileNotFoundError:
                raise self._state.refused(offer.member, f"`{offer.address.block}` was not uploaded") from None
            return [self._checked(offer, data)]

        self._take([offer], keep)

    def _require_begun(self, caller: Caller) -> None:
        self._state.expect_member(caller.name)
        self._state.require_begun(caller.name)

    def _address(self, header: BlobHeader) -> BlobAddress:
        return BlobAddress(self._state.run, header.round, header.replica, header.block)

    def _offer(self, header: BlobHeader, sha256: bytes, caller: Caller) -> Offer:
        """Return a member's offer. In the exchange's process, generation 0 is the current one."""
        self._require_begun(caller)
        generation = header.generation
        if caller.incarnation is None and not generation:
            generation = self._state.coordinator.slot(caller.name).generation
        own = self._state.incarnation(caller), self._address(header)
        return Offer(caller.name, *own, generation, sha256, header.steps, header.commitment, caller.holder)

    def _take(self, offers: Sequence[Offer], keep: Callable[[Sequence[Offer]], Sequence[BlobEntry]]) -> None:
        """Write blobs of one contribution, then tell the rules. Only the caller waits for it."""
        for offer in offers:
            self._expect_own(offer)
        offer = offers[0]
        if (complaint := self._state.coordinator.rules.complaint_of_steps(offer.steps)) is not None:
            raise self._state.refused(offer.member, f"`{offer.address.block}`: {complaint}")
        is_awaited = self._is_awaited(offer)
        if is_awaited and self.commitments is not None:
            round_, own = offer.address.round, (offer.commitment, offer.holder)
            if (complaint := self.commitments.take(offer.member, round_, offer.generation, *own)) is not None:
                raise self._state.refused(offer.member, complaint)
        if not is_awaited:
            self._runner.tell(_deposited(offer, None))  # what comes late is learnt from: how long to wait next
        elif some := self._begin_to_keep(offers):
            try:
                for one, entry in zip(some, keep(some), strict=True):
                    self._count(one, entry)
            finally:
                with self._runner.changed:
                    self._being_kept.difference_update(map(_kept_as, some))
                    self._runner.wake(offer.member)

    def _expect_own(self, offer: Offer) -> None:
        self._expect_address(offer.member, offer.address)
        if len(offer.sha256) != DIGEST_BYTES:
            reason = f"found a digest of {len(offer.sha256)} bytes, expected {DIGEST_BYTES}"
            raise self._state.refused(offer.member, reason, Kind.MALFORMED)

    def _expect_address(self, member: str, address: BlobAddress) -> None:
        roster = self._state.roster
        if roster.members[member] != address.replica or address.block not in roster.blocks[member]:
            reason = f"`{address.block}` of {address.replica} does not belong to this member"
            raise self._state.refused(member, reason, Kind.FORBIDDEN)

    def _is_awaited(self, offer: Offer) -> bool:
        """Return whether a blob may still be included; if not, the record tells the sender that it was late."""
        replica, round_ = offer.address.replica, offer.address.round
        with self._runner.changed:
            self._runner.require_alive()
            self._runner.require_incarnation(offer.member, offer.incarnation)
            coordinator = self._state.coordinator
            last_round, current = coordinator.last_round, coordinator.slot(offer.member).generation
        if not 1 <= round_ <= last_round + 1:
            reason = f"found round {round_}, expected {last_round + 1}"
            raise self._state.refused(offer.member, reason)
        if round_ > last_round and offer.generation != current:
            raise Suspended(f"{replica} has a new generation")
        return round_ > last_round

    def _begin_to_keep(self, offers: Sequence[Offer]) -> Sequence[Offer]:
        """Return the blobs that the caller has to keep: those that are not included already.

        Waits for other deposits of the same blobs, because a blob is only included if that one succeeds.
        """
        keys = set(map(_kept_as, offers))
        with self._runner.changed:
            self._runner.wait_until(lambda: self._being_kept.isdisjoint(keys), subject=offers[0].member)
            some = [offer for offer in offers if not self._is_counted(offer)]
            self._being_kept.update(map(_kept_as, some))
        return some

    def _is_counted(self, offer: Offer) -> bool:
        """Return whether the blob is included already. Raises Refused if another blob is included in its place."""
        address = offer.address
        with self._runner.changed:
            known = self._state.coordinator.deposited(address.replica, offer.generation, address.block)
        if isinstance(known, BlobEntry) and known.sha256 != offer.sha256:
            reason = f"a second, different `{address.block}` for round {address.round}"
            raise self._state.refused(offer.member, reason)
        return known is not None

    def _checked(self, offer: Offer, data: bytes) -> BlobEntry:
        shapes = self._shapes[offer.address.block]
        try:
            with self._checking_small if len(data) < SMALL_BYTES else self._checking:
                blob = ReceivedBlob(data, offer.address, shapes, self._compression)
                values = [blob.values(name) for name in shapes] if self._decodes else []
                return entry_of(offer.address, data, values)
        except MalformedContribution as error:
            raise self._state.refused(offer.member, str(error), Kind.MALFORMED) from None

    def _count(self, offer: Offer, entry: BlobEntry) -> None:
        self._runner.require_alive()
        for answer in self._runner.tell(_deposited(offer, entry)):
            if isinstance(answer, e.Reject) and answer.slot == offer.member:
                if answer.is_over:
                    raise Suspended(answer.reason)
                raise self._state.refused(offer.member, answer.reason)
        self._runner.require_alive()


def _kept_as(offer: Offer) -> tuple[BlobAddress, int]:
    return offer.address, offer.generation


def _deposited(offer: Offer, entry: BlobEntry | None) -> e.Deposited:
    address = offer.address
    return e.Deposited(
        offer.member, offer.incarnation, address.round, offer.generation, address.block, entry, offer.steps
    )
