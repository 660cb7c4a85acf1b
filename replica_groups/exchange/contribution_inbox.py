"""Deposits of members for the open round: checked, decoded, written to the log, and only then told to the rules."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from hetero_pp.core.errors import MalformedContribution, Suspended
from hetero_pp.messages.messages_pb2 import BlobEntry, BlobHeader
from hetero_pp.messages.refusals import Kind
from hetero_pp.model.transformer import Shapes
from hetero_pp.pseudo_gradient.compression import CompressionSettings
from hetero_pp.pseudo_gradient.contribution import (
    BATCH_BYTES_MAX,
    BlobAddress,
    ReceivedBlob,
    entry_of,
    most_bytes,
    payload_bytes,
    split_blobs,
)
from hetero_pp.rpc.exchange_service import Caller
from replica_groups.exchange.log import blob_key
from replica_groups.exchange.runner import CoordinatorRunner
from replica_groups.rounds import events as e

SMALL_BYTES = 256 << 10
"""Size of a blob from which on two threads decode faster than one: blobs of 117 KB take 1.3 times as long with two.

Blobs of 470 KB take 0.85 times as long.
"""

DIGEST_BYTES = hashlib.sha256().digest_size


class ContributionInbox:
    """Deposits of one run. Thread-safe; every call raises Refused, RunFailed, IncarnationOver, Suspended."""

    def __init__(self, runner: CoordinatorRunner, compression: CompressionSettings) -> None:
        self._runner, self._log, self._compression = runner, runner.log, compression
        self._shapes: Mapping[str, Shapes] = {}
        self._decodes = True
        self._being_kept: set[tuple[BlobAddress, int]] = set()  # blobs of a generation
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
        parts = {
            one.block: (self._offer(one, hashlib.sha256(part).digest(), caller), part)
            for one, part in split_blobs(header, data)
        }

        def keep(some: Sequence[BlobHeader]) -> Sequence[BlobEntry]:
            entries = [self._checked(one, parts[one.block][1], caller) for one in some]
            own = {_key(one): parts[one.block][1] for one in some}
            self._runner.retry(lambda: self._log.write_blobs(own))
            return entries

        offers = [offer for offer, _ in parts.values()]
        self._take([one for one, _ in offers], offers[0][1], keep)

    def upload_url(self, header: BlobHeader, caller: Caller) -> str | None:
        """Return where a member may put a blob into the store.

        None if the store has no such URLs; empty if the blob need not be sent, because it is included or late.
        """
        (own, caller), size = self._offer(header, header.sha256, caller), header.size
        self._expect_size(caller.name, self._address(own), size)
        if not self._is_awaited(own, caller) or self._is_counted(own, caller):
            return ""
        with self._runner.changed:
            last_round = self._runner.coordinator.last_round
            self._announced = {key: one for key, one in self._announced.items() if key[0].round > last_round}
            announced = self._announced.setdefault((self._address(own), own.generation), (own.sha256, size))
        if announced != (own.sha256, size):  # each would be another object in the store
            raise self._runner.refused(caller.name, f"`{own.block}`: a second, different blob to upload")
        return self._runner.retry(lambda: self._log.upload_url(_key(own), size, caller.holder > 0))

    def uploaded(self, header: BlobHeader, caller: Caller) -> None:
        """Take a blob that a member has put into the store."""
        own, caller = self._offer(header, header.sha256, caller)
        most = most_bytes(self._shapes[own.block], self._compression)

        def keep(some: Sequence[BlobHeader]) -> Sequence[BlobEntry]:
            try:
                data = self._runner.retry(lambda: self._log.take_upload(_key(own), own.sha256, most))
            except MalformedContribution as error:
                raise self._runner.refused(caller.name, f"`{own.block}`: {error}", Kind.MALFORMED) from None
            except FileNotFoundError:
                raise self._runner.refused(caller.name, f"`{own.block}` was not uploaded") from None
            return [self._checked(own, data, caller)]

        self._take([own], caller, keep)

    def _take(
        self, blobs: Sequence[BlobHeader], caller: Caller, keep: Callable[[Sequence[BlobHeader]], Sequence[BlobEntry]]
    ) -> None:
        """Write blobs of one contribution, then tell the rules. Only the caller waits for it."""
        first, runner, member = blobs[0], self._runner, caller.name
        if (complaint := runner.coordinator.rules.complaint_of_steps(first.replica, first.steps)) is not None:
            raise runner.refused(member, f"`{first.block}`: {complaint}")
        if not self._is_awaited(first, caller):
            runner.tell(_deposited(first, caller, None))  # what comes late is learnt from: how long to wait next
            return
        complaint = runner.audits.attach(member, first.round, first.generation, first.commitment, caller.holder)
        if complaint is not None:
            raise runner.refused(member, complaint)
        # Another deposit of the same blobs is waited for, because a blob is only included if that one succeeds.
        keys = {(self._address(one), one.generation) for one in blobs}
        with runner.changed:
            runner.wait_until(lambda: self._being_kept.isdisjoint(keys), subject=member)
            some = [one for one in blobs if not self._is_counted(one, caller)]
            kept = {(self._address(one), one.generation) for one in some}
            self._being_kept |= kept
        if not some:
            return
        try:
            for one, entry in zip(some, keep(some), strict=True):
                runner.require_alive()
                for answer in runner.tell(_deposited(one, caller, entry)):
                    if isinstance(answer, e.Reject) and answer.slot == member:
                        raise Suspended(answer.reason) if answer.is_over else runner.refused(member, answer.reason)
                runner.require_alive()
        finally:
            with runner.changed:
                self._being_kept -= kept
                runner.notifier.wake([member])

    # ---- checks ----

    def _require_begun(self, caller: Caller) -> None:
        self._runner.expect_member(caller.name)
        self._runner.require_begun(caller.name)

    def _address(self, header: BlobHeader) -> BlobAddress:
        return BlobAddress(self._runner.run, header.round, header.replica, header.block)

    def _offer(self, header: BlobHeader, sha256: bytes, caller: Caller) -> tuple[BlobHeader, Caller]:
        """Return a blob's header with its digest and generation, and the caller with its incarnation.

        In the exchange's process, generation 0 is the current one.
        """
        self._require_begun(caller)
        own = BlobHeader()
        own.CopyFrom(header)
        own.sha256 = sha256
        if caller.incarnation is None and not own.generation:
            own.generation = self._runner.coordinator.generation_of(caller.name)
        self._expect_address(caller.name, self._address(own))
        if len(sha256) != DIGEST_BYTES:
            reason = f"found a digest of {len(sha256)} bytes, expected {DIGEST_BYTES}"
            raise self._runner.refused(caller.name, reason, Kind.MALFORMED)
        return own, replace(caller, incarnation=self._runner.incarnation(caller))

    def _expect_address(self, member: str, address: BlobAddress) -> None:
        roster = self._runner.roster
        is_own = roster.members[member] == address.replica
        if not is_own or address.block not in roster.contributes(member, address.round):
            reason = f"`{address.block}` of {address.replica} does not belong to this member in round {address.round}"
            raise self._runner.refused(member, reason, Kind.FORBIDDEN)

    def _expect_size(self, member: str, address: BlobAddress, size: int) -> None:
        self._expect_address(member, address)
        most = most_bytes(self._shapes[address.block], self._compression)
        if size > most:
            reason = f"`{address.block}`: found {size} bytes, expected at most {most}"
            raise self._runner.refused(member, reason, Kind.MALFORMED)

    def _is_awaited(self, blob: BlobHeader, caller: Caller) -> bool:
        """Return whether a blob may still be included; if not, the record tells the sender that it was late."""
        coordinator = self._runner.coordinator
        with self._runner.changed:
            self._runner.require_alive()
            self._runner.require_incarnation(caller.name, self._runner.incarnation(caller))
            last_round, current = coordinator.last_round, coordinator.generation_of(caller.name)
        if not 1 <= blob.round <= last_round + 1:
            raise self._runner.refused(caller.name, f"found round {blob.round}, expected {last_round + 1}")
        if blob.round > last_round and blob.generation != current:
            raise Suspended(f"{blob.replica} has a new generation")
        return blob.round > last_round

    def _is_counted(self, blob: BlobHeader, caller: Caller) -> bool:
        """Return whether the blob is included already. Raises Refused if another blob is included in its place."""
        with self._runner.changed:
            known = self._runner.coordinator.deposited(blob.replica, blob.generation, blob.block)
        if known is not None and known.sha256 != blob.sha256:
            raise self._runner.refused(caller.name, f"a second, different `{blob.block}` for round {blob.round}")
        return known is not None

    def _checked(self, blob: BlobHeader, data: bytes, caller: Caller) -> BlobEntry:
        """Decode a blob, and return its entry in a record."""
        shapes = self._shapes[blob.block]
        try:
            with self._checking_small if len(data) < SMALL_BYTES else self._checking:
                received = ReceivedBlob(data, self._address(blob), shapes, self._compression)
                values = [received.values(name) for name in shapes] if self._decodes else []
                return entry_of(blob.block, blob.sha256, len(data), values)
        except MalformedContribution as error:
            raise self._runner.refused(caller.name, str(error), Kind.MALFORMED) from None


def _key(blob: BlobHeader) -> str:
    return blob_key(blob.round, blob.replica, blob.generation, blob.block, blob.sha256)


def _deposited(blob: BlobHeader, caller: Caller, entry: BlobEntry | None) -> e.Deposited:
    assert caller.incarnation is not None
    resumption = blob.resumption if blob.HasField("resumption") else None
    deposited = blob.round, blob.generation, blob.block, entry, blob.steps, resumption
    return e.Deposited(caller.name, caller.incarnation, *deposited)
