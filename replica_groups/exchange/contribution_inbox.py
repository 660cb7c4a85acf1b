"""Deposits of members for the open round: checked, decoded, written to the log, and only then told to the rules."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from hetero_pp.core.errors import MalformedContribution, Suspended
from hetero_pp.messages.messages_pb2 import BlobEntry, BlobHeader, Commitment
from hetero_pp.messages.refusals import Kind
from hetero_pp.model.transformer import Shapes
from hetero_pp.pseudo_gradient.blob_batches import BATCH_BYTES_MAX, payload_bytes, split_blobs
from hetero_pp.pseudo_gradient.compression import CompressionSettings
from hetero_pp.pseudo_gradient.contribution import BlobAddress, ReceivedBlob, entry_of, most_bytes
from hetero_pp.rpc.exchange_service import Caller
from replica_groups.exchange.log import blob_key
from replica_groups.exchange.runner import CoordinatorRunner
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
    holder: int  # number of the ticket's holder; 0 without a ticket
    address: BlobAddress
    generation: int
    sha256: bytes
    steps: int
    commitment: Commitment

    @property
    def kept_as(self) -> tuple[BlobAddress, int]:
        return self.address, self.generation

    @property
    def key(self) -> str:
        own = self.address
        return blob_key(own.round, own.replica, self.generation, own.block, self.sha256)

    def deposited(self, entry: BlobEntry | None) -> e.Deposited:
        own = self.address
        return e.Deposited(self.member, self.incarnation, own.round, self.generation, own.block, entry, self.steps)


class ContributionInbox:
    """Deposits of one run. Thread-safe; every call raises Refused, RunFailed, IncarnationOver, Suspended."""

    def __init__(self, runner: CoordinatorRunner, compression: CompressionSettings) -> None:
        self._runner, self._log, self._compression = runner, runner.log, compression
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
        address = self._address(header)
        self._expect_size(caller.name, address, header.size)
        if not header.following:
            return
        if (size := payload_bytes(header)) > BATCH_BYTES_MAX:
            reason = f"found {size} bytes of several blobs, expected at most {BATCH_BYTES_MAX}"
            raise self._runner.refused(caller.name, reason, Kind.MALFORMED)
        blocks = [header.block, *(one.block for one in header.following)]
        if len(blocks) > len(set(blocks)):
            raise self._runner.refused(caller.name, "found a blob named twice in a deposit", Kind.MALFORMED)
        for one in header.following:
            self._expect_size(caller.name, replace(address, block=one.block), one.size)

    def take(self, header: BlobHeader, data: bytes, caller: Caller) -> None:
        """Take blobs of a member. All are decoded before any is kept, so that no receiver meets a malformed one."""
        blobs = [
            (self._offer(one, hashlib.sha256(part).digest(), caller), part) for one, part in split_blobs(header, data)
        ]
        parts = {offer.address: part for offer, part in blobs}

        def keep(some: Sequence[Offer]) -> Sequence[BlobEntry]:
            entries = [self._checked(offer, parts[offer.address]) for offer in some]
            own = {offer.key: parts[offer.address] for offer in some}
            self._runner.retry(lambda: self._log.write_blobs(own))
            return entries

        self._take([offer for offer, _ in blobs], keep)

    def upload_url(self, header: BlobHeader, caller: Caller) -> str | None:
        """Return where a member may put a blob into the store.

        None if the store has no such URLs; empty if the blob need not be sent, because it is included or late.
        """
        offer, size = self._offer(header, header.sha256, caller), header.size
        self._expect_size(offer.member, offer.address, size)
        if not self._is_awaited(offer) or self._is_counted(offer):
            return ""
        with self._runner.changed:
            last_round = self._runner.coordinator.last_round
            self._announced = {key: one for key, one in self._announced.items() if key[0].round > last_round}
            announced = self._announced.setdefault(offer.kept_as, (offer.sha256, size))
        if announced != (offer.sha256, size):  # each would be another object in the store
            raise self._runner.refused(offer.member, f"`{offer.address.block}`: a second, different blob to upload")
        return self._runner.retry(lambda: upload_url(self._log, offer.key, size, offer.holder > 0))

    def uploaded(self, header: BlobHeader, caller: Caller) -> None:
        """Take a blob that a member has put into the store."""
        offer = self._offer(header, header.sha256, caller)
        most = most_bytes(self._shapes[offer.address.block], self._compression)

        def keep(some: Sequence[Offer]) -> Sequence[BlobEntry]:
            try:
                data = self._runner.retry(lambda: take_upload(self._log, offer.key, offer.sha256, most))
            except MalformedContribution as error:
                raise self._runner.refused(offer.member, f"`{offer.address.block}`: {error}", Kind.MALFORMED) from None
            except FileNotFoundError:
                raise self._runner.refused(offer.member, f"`{offer.address.block}` was not uploaded") from None
            return [self._checked(offer, data)]

        self._take([offer], keep)

    def _take(self, offers: Sequence[Offer], keep: Callable[[Sequence[Offer]], Sequence[BlobEntry]]) -> None:
        """Write blobs of one contribution, then tell the rules. Only the caller waits for it."""
        first, runner = offers[0], self._runner
        if (complaint := runner.coordinator.rules.complaint_of_steps(first.address.replica, first.steps)) is not None:
            raise runner.refused(first.member, f"`{first.address.block}`: {complaint}")
        if not self._is_awaited(first):
            runner.tell(first.deposited(None))  # what comes late is learnt from: how long to wait next
            return
        own = first.address.round, first.generation, first.commitment, first.holder
        if (complaint := runner.audits.attach(first.member, *own)) is not None:
            raise runner.refused(first.member, complaint)
        # Another deposit of the same blobs is waited for, because a blob is only included if that one succeeds.
        keys = {offer.kept_as for offer in offers}
        with runner.changed:
            runner.wait_until(lambda: self._being_kept.isdisjoint(keys), subject=first.member)
            some = [offer for offer in offers if not self._is_counted(offer)]
            self._being_kept.update(offer.kept_as for offer in some)
        if not some:
            return
        try:
            for offer, entry in zip(some, keep(some), strict=True):
                runner.require_alive()
                for answer in runner.tell(offer.deposited(entry)):
                    if isinstance(answer, e.Reject) and answer.slot == offer.member:
                        raise (
                            Suspended(answer.reason) if answer.is_over else runner.refused(offer.member, answer.reason)
                        )
                runner.require_alive()
        finally:
            with runner.changed:
                self._being_kept.difference_update(offer.kept_as for offer in some)
                runner.notifier.wake([first.member])

    # ---- checks ----

    def _require_begun(self, caller: Caller) -> None:
        self._runner.expect_member(caller.name)
        self._runner.require_begun(caller.name)

    def _address(self, header: BlobHeader) -> BlobAddress:
        return BlobAddress(self._runner.run, header.round, header.replica, header.block)

    def _offer(self, header: BlobHeader, sha256: bytes, caller: Caller) -> Offer:
        """Return a member's offer of a blob of its own. In the exchange's process, generation 0 is the current one."""
        self._require_begun(caller)
        member, generation, address = caller.name, header.generation, self._address(header)
        if caller.incarnation is None and not generation:
            generation = self._runner.coordinator.generation_of(member)
        self._expect_address(member, address)
        if len(sha256) != DIGEST_BYTES:
            reason = f"found a digest of {len(sha256)} bytes, expected {DIGEST_BYTES}"
            raise self._runner.refused(member, reason, Kind.MALFORMED)
        incarnation = self._runner.incarnation(caller)
        return Offer(member, incarnation, caller.holder, address, generation, sha256, header.steps, header.commitment)

    def _expect_address(self, member: str, address: BlobAddress) -> None:
        roster = self._runner.roster
        if roster.members[member] != address.replica or address.block not in roster.blocks[member]:
            reason = f"`{address.block}` of {address.replica} does not belong to this member"
            raise self._runner.refused(member, reason, Kind.FORBIDDEN)

    def _expect_size(self, member: str, address: BlobAddress, size: int) -> None:
        self._expect_address(member, address)
        most = most_bytes(self._shapes[address.block], self._compression)
        if size > most:
            reason = f"`{address.block}`: found {size} bytes, expected at most {most}"
            raise self._runner.refused(member, reason, Kind.MALFORMED)

    def _is_awaited(self, offer: Offer) -> bool:
        """Return whether a blob may still be included; if not, the record tells the sender that it was late."""
        round_, coordinator = offer.address.round, self._runner.coordinator
        with self._runner.changed:
            self._runner.require_alive()
            self._runner.require_incarnation(offer.member, offer.incarnation)
            last_round, current = coordinator.last_round, coordinator.generation_of(offer.member)
        if not 1 <= round_ <= last_round + 1:
            raise self._runner.refused(offer.member, f"found round {round_}, expected {last_round + 1}")
        if round_ > last_round and offer.generation != current:
            raise Suspended(f"{offer.address.replica} has a new generation")
        return round_ > last_round

    def _is_counted(self, offer: Offer) -> bool:
        """Return whether the blob is included already. Raises Refused if another blob is included in its place."""
        address = offer.address
        with self._runner.changed:
            known = self._runner.coordinator.deposited(address.replica, offer.generation, address.block)
        if known is not None and known.sha256 != offer.sha256:
            reason = f"a second, different `{address.block}` for round {address.round}"
            raise self._runner.refused(offer.member, reason)
        return known is not None

    def _checked(self, offer: Offer, data: bytes) -> BlobEntry:
        """Decode a blob, and return its entry in a record."""
        shapes = self._shapes[offer.address.block]
        try:
            with self._checking_small if len(data) < SMALL_BYTES else self._checking:
                blob = ReceivedBlob(data, offer.address, shapes, self._compression)
                values = [blob.values(name) for name in shapes] if self._decodes else []
                return entry_of(offer.address.block, offer.sha256, len(data), values)
        except MalformedContribution as error:
            raise self._runner.refused(offer.member, str(error), Kind.MALFORMED) from None
