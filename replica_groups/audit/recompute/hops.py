"""Finds the stage of a group that computed something else, from the transcripts of all stages and a recomputation.

Each stage is judged by its own transcript alone. A stage that says that it received what the recomputation received,
and then sent something else, has computed something else. An honest stage behind it received something else before it
sent something else, so it is never named.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from hetero_pp.model.transformer import block_of
from replica_groups.audit.recompute.group import ReplicaHere
from stages.transcript import Way, records_of

_KEY = ["way", "micro_batch", "step"]
_NEAR = 1 / 4
"""Share of the tolerance within which a received message counts as equal, because computing on widens a difference."""


@dataclass(frozen=True)
class Blame:
    """What a comparison found."""

    member: str
    """Member that computed something else; empty if it is not known."""
    cause: str
    """One line: what differs, and where."""


@dataclass(frozen=True)
class _Compared:
    """The transcript of one stage beside that of its recomputation."""

    member: str
    records: NDArray[np.void]
    """The stage's records [N]."""
    expected: NDArray[np.void]
    differs: NDArray[np.bool_]
    """Which records [N] differ from the recomputation."""

    @property
    def first(self) -> int | None:
        """The first record that differs; None if all are equal."""
        return int(self.differs.argmax()) if self.differs.any() else None

    @property
    def is_guilty(self) -> bool:
        """Whether it sent something else although it had received the same."""
        return self.first is not None and Way(self.records[self.first]["way"]).is_sent

    def of_way(self, *ways: Way) -> NDArray[np.void]:
        """Return the records of messages on these ways."""
        return self.records[np.isin(self.records["way"], ways)]


def blame(
    here: ReplicaHere, messages: Mapping[str, bytes], differing: Collection[str], other_text: bool = False
) -> Blame | None:
    """Return the stage that computed something else than `here`, which has trained the round again; None if all agree.

    `messages`: member -> its transcript, which has the digest that it committed to. A member without one is not judged.
    `differing`: blocks of the contribution that differ from those of `here`.
    `other_text`: whether the first stage committed to another text than the run's.
    """
    recompute = here.spec.config.audit.recompute
    tolerance = 0.0 if recompute is None else recompute.tolerance
    compared: dict[str, _Compared] = {}
    for member in here.members:
        if member in messages:
            found = _compared(member, messages[member], here.members[member].message_digests(), tolerance)
            if isinstance(found, Blame):
                return found
            compared[member] = found
    guilty = [one for one in compared.values() if one.is_guilty]
    if guilty:
        first = min(guilty, key=lambda one: one.records[one.first]["step"])
        what = "read another text, so it " if other_text and first.member == next(iter(here.members)) else ""
        return Blame(first.member, f"{first.member} {what}{_sent(first)}")
    for one in compared.values():
        blocks = sorted({block_of(name) for name in here.outers[one.member].parameters.shapes} & set(differing))
        if one.first is None and blocks:
            cause = f"{one.member} sent the expected messages, but its contribution to {', '.join(blocks)} is another"
            return Blame(one.member, cause)
    return next(_disputes(here.members, compared), None)


def _compared(member: str, data: bytes, expected: bytes, tolerance: float) -> _Compared | Blame:
    """Compare a stage's transcript with its recomputation; blame it for a transcript of other messages."""
    wanted = records_of(expected, tolerance > 0)
    try:
        records = records_of(data, tolerance > 0)
    except ValueError:
        return Blame(member, f"{member} showed {len(data)} bytes that are no transcript of messages")
    if len(records) != len(wanted) or any((records[key] != wanted[key]).any() for key in _KEY):
        return Blame(member, f"{member} showed {len(records)} messages, expected {len(wanted)} in schedule order")
    return _Compared(member, records, wanted, _differs(records, wanted, tolerance))


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


def _disputes(stages: Iterable[str], compared: Mapping[str, _Compared]) -> Iterator[Blame]:
    """Yield each pair of neighbours of which one says that it sent what the other says that it did not receive.

    Either may lie, so neither is named.
    """
    ways = ((Way.SENT_ACTIVATION, Way.RECEIVED_ACTIVATION), (Way.SENT_GRADIENT, Way.RECEIVED_GRADIENT))
    for before, after in pairwise(stages):
        if before not in compared or after not in compared:
            continue
        pair = compared[before], compared[after]
        for (sent, received), (sender, receiver) in zip(ways, (pair, pair[::-1]), strict=True):
            is_sent, is_received = sender.of_way(sent), receiver.of_way(received)
            differs = (is_sent["sha256"] != is_received["sha256"]).any(axis=1)
            if differs.any():
                what = _named(is_received[int(differs.argmax())])
                yield Blame("", f"{receiver.member} says that {sender.member} sent {what} than {sender.member} says")
