"""Inputs (events) and outputs (effects) of the coordinator.

Data only; the type of a blob's entry is up to the caller.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass

# ---- decisions ----


@dataclass(frozen=True)
class Contribution:
    """A contribution that a round includes. `blobs`: block -> entry."""

    replica: str
    generation: int
    steps: int
    weight: float
    blobs: Mapping[str, Hashable]
    scale: float = 1.0
    """Factor of its values; less than 1 if the contribution was too large."""


@dataclass(frozen=True)
class Record:
    """Contributions that a round includes, in the order of replica names, and replicas that were late."""

    round: int
    contributions: tuple[Contribution, ...]
    late: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    """Replicas whose contributions were rejected because they were far too large."""

    def of(self, replica: str) -> Contribution | None:
        """Return the included contribution of a replica, or None."""
        return next((one for one in self.contributions if one.replica == replica), None)


# ---- events ----


@dataclass(frozen=True)
class Event:
    """An input."""


@dataclass(frozen=True)
class OfMember(Event):
    """An input that concerns one incarnation of a slot."""

    slot: str
    incarnation: int


@dataclass(frozen=True)
class Began(Event):
    """The run begins (0), or resumes, after a round."""

    round: int
    rounds: int
    """Number of the last round."""


@dataclass(frozen=True)
class Applied(Event):
    """A process asks for a slot. `process` names it, so that repeating the request is harmless."""

    slot: str
    process: str
    is_guest: bool = False
    """Whether it was admitted by a ticket."""


@dataclass(frozen=True)
class Claimed(Event):
    """The store answered whether a process holds a slot in an incarnation."""

    slot: str
    incarnation: int
    process: str
    won: bool


@dataclass(frozen=True)
class NotClaimed(Event):
    """The store failed while a claim was written. Whether the claim is stored is unknown."""

    slot: str


@dataclass(frozen=True)
class Noted(OfMember):
    """The store has this incarnation as the highest one of a slot."""


@dataclass(frozen=True)
class Heard(OfMember):
    """A member sent a heartbeat.

    `round` and `generation` (generation) say what it trains; a `round` of None means nothing.
    """

    round: int | None = None
    generation: int = 0
    progress: int = 0
    """A number that changes whenever the member makes progress."""
    computes: bool = False
    """Whether the member is busy and waits for no other."""


@dataclass(frozen=True)
class Lost(OfMember):
    """The connection of a member has ended: it may be gone, or return."""


@dataclass(frozen=True)
class Died(Event):
    """A member is known to be gone."""

    slot: str
    incarnation: int | None = None
    """Incarnation that is gone; None: the current one."""
    cause: str = "it ended"


@dataclass(frozen=True)
class Asked(OfMember):
    """A member has theta after round `holds`, and asks for work."""

    holds: int
    trained: int = 0
    """Last round that it trained and has no record of, as it trained ahead or was excluded; 0 if there is none."""


@dataclass(frozen=True)
class Broken(OfMember):
    """A member cannot reach a neighbouring stage that is present, as far as the member knows."""

    generation: int
    cause: str
    blames: str = ""
    """Neighbouring slot that sent a malformed message, if neither of the two is held by a ticket; else empty."""


@dataclass(frozen=True)
class Deposited(OfMember):
    """A blob of a member's contribution is in the store, durable."""

    round: int
    generation: int
    block: str
    entry: Hashable
    steps: int


@dataclass(frozen=True)
class Recorded(Event):
    """The store has this record of a round, written by this or another coordinator."""

    record: Record


@dataclass(frozen=True)
class NotRecorded(Event):
    """Writing the record of a round failed. Whether the record is stored is unknown."""

    round: int


@dataclass(frozen=True)
class Confirmed(OfMember):
    """A member reports the hashes of its parameters after a round."""

    round: int
    hashes: Mapping[str, bytes]


@dataclass(frozen=True)
class Audited(Event):
    """Hashes of the parameters after a round, computed by replay of the run log."""

    round: int
    hashes: Mapping[str, bytes]


@dataclass(frozen=True)
class Condemned(Event):
    """An audit found that a replica's contributions harm the run: bar it from rounds before `until`."""

    replica: str
    round: int
    """Round of the contribution that decided it."""
    until: int
    cause: str


@dataclass(frozen=True)
class Left(OfMember):
    """A member has finished the run."""


@dataclass(frozen=True)
class Tick(Event):
    """Time has passed."""


@dataclass(frozen=True)
class Woke(Event):
    """The coordinator itself was suspended for a while, so missing heartbeats mean nothing."""


# ---- effects ----


@dataclass(frozen=True)
class Effect:
    """An output."""


@dataclass(frozen=True)
class ToMember(Effect):
    """An output that concerns one incarnation of a slot."""

    slot: str
    incarnation: int


@dataclass(frozen=True)
class ClaimSlot(Effect):
    """Have the store note that a process holds a slot in an incarnation, unless another process does.

    Answer: Claimed.
    """

    slot: str
    incarnation: int
    process: str


@dataclass(frozen=True)
class LookUp(Effect):
    """Look up the highest incarnation of a slot that another coordinator has assigned. Answer: Noted."""

    slot: str


@dataclass(frozen=True)
class Welcome(Effect):
    """Tell a process that it holds a slot."""

    slot: str
    process: str
    incarnation: int


@dataclass(frozen=True)
class Reject(Effect):
    """Tell a process that asked for a slot, or the holder of an incarnation, why its request is refused."""

    slot: str
    reason: str
    process: str | None = None
    incarnation: int | None = None
    is_over: bool = False
    """Whether the request was valid but came too late, because the replica does something else by now."""


@dataclass(frozen=True)
class Fenced(ToMember):
    """An incarnation is over: messages of its holder have no effect any more."""

    cause: str = ""
    """Why it has ended just now; empty in an answer to a holder whose incarnation ended earlier."""
    silent: bool = False
    """Whether it ended because no heartbeat came, so that its holder may still exist."""


@dataclass(frozen=True)
class Assign(ToMember):
    """Tell a member to train a round in a generation of its replica; round 0 means that the run is over."""

    round: int
    generation: int
    heal: bool = False
    """Whether the member has to recover theta from the run log, because its bits differ from replay."""
    trained: int = 0
    """The `trained` of all members of the replica, if they are equal; else 0."""


@dataclass(frozen=True)
class Suspend(ToMember):
    """Tell a member to return to the start of the round, because a stage of its replica is missing."""

    generation: int
    """Generation that is over."""
    cause: str


@dataclass(frozen=True)
class Write(Effect):
    """Have the store keep a record unless it has one of that round. Answer: Recorded, with the stored record."""

    record: Record


@dataclass(frozen=True)
class Look(Effect):
    """Look for a record that another coordinator may have written. Answer: Recorded, if the store has one."""

    round: int


@dataclass(frozen=True)
class Closed(Effect):
    """A round is decided."""

    record: Record


@dataclass(frozen=True)
class TooLate(Effect):
    """A replica's contribution was complete only after its round had closed: it is restored to error feedback."""

    replica: str
    round: int


@dataclass(frozen=True)
class Bounded(Effect):
    """A replica's contribution was too large: its values are scaled by `scale`; 0 means that it was rejected."""

    replica: str
    round: int
    scale: float
    cause: str = ""
    """Why an audit rejected it, which the coordinator does not know; empty if it was too large."""


@dataclass(frozen=True)
class Paused(Effect):
    """No round can close: fewer replicas are present than a quorum needs."""

    round: int
    there: tuple[str, ...]
    needed: int


@dataclass(frozen=True)
class WentOn(Effect):
    """A quorum is present again."""

    round: int


@dataclass(frozen=True)
class EndRun(Effect):
    """Every round is decided."""

    round: int
    rounds: int
    finishing: tuple[str, ...]
    """Replicas that took part in the last round. The end of the run waits for no other replica."""


@dataclass(frozen=True)
class Heal(ToMember):
    """A member's bits differ from replay. Reported when found; the member recovers with its next round."""

    round: int
    parameter: str


@dataclass(frozen=True)
class Barred(ToMember):
    """A replica is barred from rounds before `until`; it takes part nevertheless if a quorum needs it.

    The bits of a member (`slot`) differed again after a recovery, or too many of its messages were malformed. If an
    audit found that the replica harms the run, `slot` is the replica's first slot.
    """

    round: int
    until: int
    cause: str


@dataclass(frozen=True)
class NotAwaited(Effect):
    """A replica missed `missed` rounds in a row, the last one being `round`.

    Rounds that open within `seconds` do not wait for it, unless it contributes in time again.
    """

    replica: str
    round: int
    missed: int
    seconds: float


@dataclass(frozen=True)
class Stop(Effect):
    """The run must not continue.

    All of the operator's replicas, at least two, differ from replay; or a replica whose links carry malformed messages
    is needed for a quorum.
    """

    cause: str
