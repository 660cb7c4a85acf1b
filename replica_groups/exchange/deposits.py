"""What members hand in for the open round: let in, decoded, kept in the log, and only then told to the rules."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from hetero_pp.errors import MalformedContribution, Refused, Suspended
from hetero_pp.messages.messages_pb2 import BlobEntry
from hetero_pp.model import Shapes
from hetero_pp.pseudo_gradient.compression import CompressionSettings
from hetero_pp.pseudo_gradient.contribution import BlobAddress, ReceivedBlob, entry_of, most_bytes
from hetero_pp.refusals import Kind
from hetero_pp.run.spec import Roster
from replica_groups.exchange.decisions import Decisions
from replica_groups.exchange.log import blob_key
from replica_groups.exchange.uploads import take_upload, upload_url
from replica_groups.protocol import events as e

DIGEST_BYTES = hashlib.sha256().digest_size


@dataclass(frozen=True)
class Offer:
    """A blob that a member has for a round, whichever way it comes."""

    member: str
    term: int
    address: BlobAddress
    epoch: int
    sha256: bytes
    steps: int = 0

    @property
    def key(self) -> str:
        """Where the log keeps it."""
        own = self.address
        return blob_key(own.round, own.replica, self.epoch, own.block, self.sha256)


class Deposits:
    """Of one run. Safe to call from many threads; every call raises Refused, RunFailed, TermOver, Suspended."""

    def __init__(
        self,
        run: str,
        roster: Roster,
        compression: CompressionSettings,
        decisions: Decisions,
        refused: Callable[[str, str, Kind], Refused],
    ) -> None:
        """`refused` counts and tells what was not let in of whom, and why."""
        self._run, self._roster, self._compression = run, roster, compression
        self._decisions, self._log, self._refused = decisions, decisions.log, refused
        self._shapes: Mapping[str, Shapes] = {}
        self._being_kept: set[tuple[BlobAddress, int]] = set()

    def begin(self, shapes: Mapping[str, Shapes]) -> None:
        """What the parameters are from now on, by block."""
        self._shapes = shapes

    def hand_in(self, offer: Offer, data: bytes) -> None:
        """A blob as it came. It is decoded before it is kept, so that no receiver meets a malformed one."""

        def keep() -> BlobEntry:
            entry = self._checked(offer, data)
            self._decisions.patiently(lambda: self._log.write_blob(offer.address, offer.epoch, data))
            return entry

        self._take(offer, keep)

    def upload_url(self, offer: Offer) -> str | None:
        """Where a member may put the blob; None if the store has no such URLs, empty if it need not be sent: it is
        counted already, or counts no more.
        """
        self._expect_own(offer)
        if not self._is_awaited(offer) or self._is_counted(offer):
            return ""
        return self._decisions.patiently(lambda: upload_url(self._log, offer.key))

    def uploaded(self, offer: Offer) -> None:
        """A member says that the blob is in the store."""

        most = most_bytes(offer.address, self._shapes.get(offer.address.block, {}), self._compression)

        def keep() -> BlobEntry:
            try:
                data = self._decisions.patiently(lambda: take_upload(self._log, offer.key, offer.sha256, most))
            except MalformedContribution as error:
                raise self._refused(offer.member, f"`{offer.address.block}`: {error}", Kind.MALFORMED) from None
            except FileNotFoundError:
                raise self._refused(
                    offer.member, f"`{offer.address.block}` was not uploaded", Kind.UNEXPECTED
                ) from None
            return self._checked(offer, data)

        self._take(offer, keep)

    def _take(self, offer: Offer, keep: Callable[[], BlobEntry]) -> None:
        """It counts once it is kept. That is waited for by who hands it in, and by nobody else."""
        self._expect_own(offer)
        if (complaint := self._decisions.coordinator.rules.complaint_of_steps(offer.steps)) is not None:
            raise self._refused(offer.member, f"`{offer.address.block}`: {complaint}", Kind.UNEXPECTED)
        if not self._is_awaited(offer):
            self._decisions.tell(_deposited(offer, None))  # what comes late is learnt from: how long to wait next
        elif self._begins_to_keep(offer):
            try:
                self._count(offer, keep())
            finally:
                with self._decisions.changed:
                    self._being_kept.discard((offer.address, offer.epoch))
                    self._decisions.changed.notify_all()

    def expect(self, member: str, address: BlobAddress, size: int) -> None:
        """Raise Refused for a blob that is not a member's, or larger than any of its shapes comes to."""
        self._expect_address(member, address)
        most = most_bytes(address, self._shapes[address.block], self._compression)
        if size > most:
            reason = f"`{address.block}`: found {size} bytes, expected at most {most}"
            raise self._refused(member, reason, Kind.MALFORMED)

    def _expect_own(self, offer: Offer) -> None:
        self._expect_address(offer.member, offer.address)
        if len(offer.sha256) != DIGEST_BYTES:
            reason = f"found a digest of {len(offer.sha256)} bytes, expected {DIGEST_BYTES}"
            raise self._refused(offer.member, reason, Kind.MALFORMED)

    def _expect_address(self, member: str, address: BlobAddress) -> None:
        if self._roster.members[member] != address.replica or address.block not in self._roster.blocks[member]:
            raise self._refused(
                member, f"`{address.block}` of {address.replica} does not belong to this member", Kind.FORBIDDEN
            )
        if address.run != self._run:
            raise self._refused(member, "a contribution to another run", Kind.UNEXPECTED)

    def _is_awaited(self, offer: Offer) -> bool:
        """Whether a blob may still count: False in a round that is closed, where its sender finds that it was late."""
        replica, round_ = offer.address.replica, offer.address.round
        with self._decisions.changed:
            self._decisions.require_alive()
            self._decisions.require_term(offer.member, offer.term)
            coordinator = self._decisions.coordinator
            last_round, current = coordinator.last_round, coordinator.replicas[replica].epoch
        if not 1 <= round_ <= last_round + 1:
            reason = f"found round {round_}, expected {last_round + 1}"
            raise self._refused(offer.member, reason, Kind.UNEXPECTED)
        if round_ > last_round and offer.epoch != current:
            raise Suspended(f"{replica} has a new generation")
        return round_ > last_round

    def _begins_to_keep(self, offer: Offer) -> bool:
        """Whether the blob is new, and the caller the only one who keeps it; False if it is counted already.

        Waits for another deposit of the same blob: until that is over, it is not known whether it counts.
        """
        key = (offer.address, offer.epoch)
        with self._decisions.changed:
            self._decisions.wait_until(lambda: key not in self._being_kept)
            if not self._is_counted(offer):
                self._being_kept.add(key)
                return True
        return False

    def _is_counted(self, offer: Offer) -> bool:
        """Raises Refused if another blob is."""
        address = offer.address
        with self._decisions.changed:
            open_round = self._decisions.coordinator.open
            own = None if open_round is None else open_round.deposits.get(address.replica)
            known = None if own is None or own.epoch != offer.epoch else own.blobs.get(address.block)
        if isinstance(known, BlobEntry) and known.sha256 != offer.sha256:
            reason = f"a second, different `{address.block}` for round {address.round}"
            raise self._refused(offer.member, reason, Kind.UNEXPECTED)
        return known is not None

    def _checked(self, offer: Offer, data: bytes) -> BlobEntry:
        shapes = self._shapes[offer.address.block]
        try:
            blob = ReceivedBlob(data, offer.address, shapes, self._compression)
            return entry_of(offer.address, data, [blob.tensor(name).values for name in shapes])
        except MalformedContribution as error:
            raise self._refused(offer.member, str(error), Kind.MALFORMED) from None

    def _count(self, offer: Offer, entry: BlobEntry) -> None:
        self._decisions.require_alive()
        for answer in self._decisions.tell(_deposited(offer, entry)):
            if isinstance(answer, e.Refused) and answer.place == offer.member:
                if answer.is_over:
                    raise Suspended(answer.reason)
                raise self._refused(offer.member, answer.reason, Kind.UNEXPECTED)
        self._decisions.require_alive()


def _deposited(offer: Offer, entry: BlobEntry | None) -> e.Deposited:
    address = offer.address
    return e.Deposited(offer.member, offer.term, address.round, offer.epoch, address.block, entry, offer.steps)
