"""Finds the stage of a group that computed something else, from the transcripts of all stages and a recomputation.

Each stage is judged by its own transcript. A stage that says that it received what the recomputation received, and then
sent something else, has computed something else. An honest stage behind it received something else before it sent
something else, so it is never named.

Two neighbours may say different things about a message. The receiver then has to show the sender's signature under what
it says that it received. If it can, the sender has lied, else the receiver. Without certificates neither is named.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from hetero_pp.core.errors import MalformedMessage
from hetero_pp.messages.messages_pb2 import StageMessages
from hetero_pp.rpc.identities import check_statement
from replica_groups.audit.recompute.replica import ReplicaHere
from stages.transcript import GroupPosition, Way, records_of

NO_HOLDERS: Mapping[str, int] = MappingProxyType({})
"""Holder numbers of members that were all started with the run's secret."""

_KEY = ["way", "micro_batch", "step"]
_NEAR = 1 / 4
"""Share of the tolerance within which a received message counts as equal, because computing on widens a difference."""


@dataclass(frozen=True)
class Blame:
    """Outcome of a comparison."""

    member: str
    """Member that computed something else; empty if it is not known."""
    cause: str
    """One line: what differs, and where."""


@dataclass(frozen=True)
class _Compared:
    """The transcript of one stage beside that of its recomputation."""

    position: GroupPosition
    shown: StageMessages
    records: NDArray[np.void]
    """The stage's records [N]."""
    differs: NDArray[np.bool_]
    """Whether each record [N] differs from the recomputation."""

    @property
    def member(self) -> str:
        return self.position.member

    @property
    def first(self) -> int | None:
        """The first record that differs; None if all are equal."""
        return int(self.differs.argmax()) if self.differs.any() else None

    @property
    def is_guilty(self) -> bool:
        """Whether it sent something else although it had received the same."""
        return self.first is not None and Way(self.records[self.first]["way"]).is_sent

    def of_way(self, way: Way) -> NDArray[np.void]:
        """Return the records of messages on a way."""
        return self.records[self.records["way"] == way]


def blame(
    here: ReplicaHere,
    messages: Mapping[str, bytes],
    differing: Collection[str],
    other_text: bool = False,
    generation: int = 0,
    authority: str | None = None,
    holders: Mapping[str, int] = NO_HOLDERS,
) -> Blame | None:
    """Return the stage that computed something else than `here`, which has trained the round again; None if all agree.

    `messages`: member -> its transcript, which has the digest that it committed to. A member without one is not judged.
    `differing`: blocks of the contribution that differ from those of `here`.
    `other_text`: whether the first stage committed to another text than the run's.
    `generation`: of the replica, in the round record. `authority`: certificate (PEM) of the authority of the run; None
    if members have no certificates. `holders`: member -> holder number with which it committed; 0 without a ticket.
    """
    recompute = here.spec.config.audit.recompute
    tolerance = 0.0 if recompute is None else recompute.tolerance
    compared: dict[str, _Compared] = {}
    for stage, member in enumerate(here.members):
        if member in messages:
            position = GroupPosition(here.spec.run, list(here.members), stage)
            found = _compared(position, messages[member], here.members[member].message_digests(), tolerance)
            if isinstance(found, Blame):
                return found
            compared[member] = found
    guilty = [one for one in compared.values() if one.is_guilty]
    if guilty:
        first = min(guilty, key=lambda one: one.records[one.first]["step"])
        what = "read another text, so it " if other_text and first.position.stage == 0 else ""
        return Blame(first.member, f"{first.member} {what}{_sent(first)}")
    for member, one in compared.items():
        blocks = sorted(here.outers[member].blocks & set(differing))
        if one.first is None and blocks:
            cause = f"{member} sent the expected messages, but its contribution to {', '.join(blocks)} is another"
            return Blame(member, cause)
    for before, after in pairwise(here.members):
        if before in compared and after in compared:
            for dispute in _disputes(compared[before], compared[after]):
                return dispute.settled(here.start.round, generation, authority, holders)
    return None


def _compared(position: GroupPosition, data: bytes, expected: bytes, tolerance: float) -> _Compared | Blame:
    """Compare a stage's transcript with its recomputation; blame it for a transcript of other messages."""
    member, wanted = position.member, records_of(StageMessages.FromString(expected), tolerance > 0)
    try:
        records = records_of(shown := StageMessages.FromString(data), tolerance > 0)
    except (ValueError, DecodeError):
        return Blame(member, f"{member} showed {len(data)} bytes that are no transcript of messages")
    if len(records) != len(wanted) or any((records[key] != wanted[key]).any() for key in _KEY):
        return Blame(member, f"{member} showed {len(records)} messages, expected {len(wanted)} in schedule order")
    return _Compared(position, shown, records, _differs(records, wanted, tolerance))


def _differs(records: NDArray[np.void], wanted: NDArray[np.void], tolerance: float) -> NDArray[np.bool_]:
    """Return which records differ: in a bit; or with a tolerance, by more than that in the sketch or the norm."""
    if tolerance == 0:
        return (records["sha256"] != wanted["sha256"]).any(axis=1)
    allowed = np.where(np.isin(wanted["way"], [way for way in Way if way.is_sent]), tolerance, _NEAR * tolerance)
    sketches, expected = records["sketch"].astype(float), wanted["sketch"].astype(float)
    apart = np.linalg.norm(sketches - expected, axis=1)
    by_norm = np.abs(records["norm"] - wanted["norm"])
    has_norm = np.isfinite(wanted["norm"])
    with np.errstate(invalid="ignore"):
        is_near = apart <= allowed * np.linalg.norm(expected, axis=1)
        is_near &= ~has_norm | (by_norm <= allowed * np.abs(wanted["norm"]))
    return ~is_near | (np.isfinite(records["norm"]) != has_norm)


def _sent(one: _Compared) -> str:
    assert one.first is not None
    return f"sent {_named(one.records[one.first])}, although it had received the expected messages until then"


def _named(record: np.void) -> str:
    what = "gradient" if Way(record["way"]) in (Way.SENT_GRADIENT, Way.RECEIVED_GRADIENT) else "activation"
    return f"another {what} of micro-batch {record['micro_batch']} in step {record['step']}"


@dataclass(frozen=True)
class _Dispute:
    """Two neighbours that say different things about a message."""

    sender: _Compared
    receiver: _Compared
    way: Way
    """As the receiver sees it."""
    message: str

    def settled(self, round_: int, generation: int, authority: str | None, holders: Mapping[str, int]) -> Blame:
        """Return which of the two has lied.

        Neither is named if members have no certificates (`authority` is None), or if another holder of the sender's
        slot has signed. The sender may have an older certificate, or the receiver may know the other holder.
        """
        sender, receiver = self.sender.member, self.receiver.member
        if authority is None:
            return Blame("", f"{receiver} says that {sender} sent {self.message} than {sender} says")
        is_forward = self.way is Way.RECEIVED_ACTIVATION
        statement = self.receiver.shown.from_previous if is_forward else self.receiver.shown.from_next
        signed = self.receiver.position.signed(self.way, round_, generation, self.receiver.records)
        try:
            holder = check_statement(statement, signed, sender, authority)
        except MalformedMessage:
            return Blame(receiver, f"{receiver} says that {sender} sent {self.message}, without its signature")
        if holder != holders.get(sender, 0):
            cause = f"{receiver} says that {sender} sent {self.message}, with the signature of another holder"
            return Blame("", cause)
        return Blame(sender, f"{sender} sent and signed {self.message} than it says")


def _disputes(before: _Compared, after: _Compared) -> Iterator[_Dispute]:
    """Yield a dispute of two neighbours for each direction in which they have one."""
    for sender, sent, receiver, received in (
        (before, Way.SENT_ACTIVATION, after, Way.RECEIVED_ACTIVATION),
        (after, Way.SENT_GRADIENT, before, Way.RECEIVED_GRADIENT),
    ):
        found = receiver.of_way(received)
        differs = (sender.of_way(sent)["sha256"] != found["sha256"]).any(axis=1)
        if differs.any():
            yield _Dispute(sender, receiver, received, _named(found[int(differs.argmax())]))
