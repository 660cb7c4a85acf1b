"""Inputs (events) and outputs (effects) of the coordinator.

Data only. Messages of the run, MembershipEvent and Over, are yielded among the effects: they are told to everybody.
Records are the messages of the run log; the coordinator makes them without their digests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hetero_pp.messages.messages_pb2 import BlobEntry, KeptSteps, MembershipEvent, Over, Resumption, RoundRecord

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
    """The run begins (0), or resumes, after a round. `rounds`: number of the last round.

    With `tokens`, the first round whose record has so many is the last one, and `rounds` is only a limit.
    """

    round: int
    rounds: int
    tokens: int | None = None


@dataclass(frozen=True)
class Applied(Event):
    """A process asks for a slot. `process` names it, so that repeating the request is harmless."""

    slot: str
    process: str
    is_guest: bool = False  # whether it was admitted by a ticket


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
    """A member sent a heartbeat: the round and generation that it trains, None for no round."""

    round: int | None = None
    generation: int = 0
    progress: int = 0  # changes whenever the member makes progress
    computes: bool = False  # whether the member is busy and waits for no other
    resumption: Resumption | None = None  # of the assignment of that round


@dataclass(frozen=True)
class Lost(OfMember):
    """The connection of a member has ended: it may be gone, or return."""


@dataclass(frozen=True)
class Died(Event):
    """A member is gone, or has given its slot back (`has_left`). `incarnation`: by default the current one."""

    slot: str
    incarnation: int | None = None
    cause: str = "it ended"
    has_left: bool = False


@dataclass(frozen=True)
class Asked(OfMember):
    """A member has theta after round `holds`, and asks for work."""

    holds: int
    trained: int = 0  # last round that it trained and has no record of, as it trained ahead or was excluded; 0: none
    kept: KeptSteps | None = None  # inner steps of the round in which its replica was suspended
    differs: bool = False  # whether a coordinator has told it that its bits differ, and it has not recovered since


@dataclass(frozen=True)
class Broken(OfMember):
    """A member cannot reach a neighbouring stage that is present, as far as the member knows."""

    generation: int
    cause: str
    blames: str = ""  # neighbour that sent a malformed message, if neither of the two is held by a ticket; else empty


@dataclass(frozen=True)
class Deposited(OfMember):
    """A blob of a member's contribution is in the store, durable. Without an `entry` it came too late to be kept."""

    round: int
    generation: int
    block: str
    entry: BlobEntry | None
    steps: int
    resumption: Resumption | None = None  # of the assignment of that round


@dataclass(frozen=True)
class Recorded(Event):
    """The store has this record of a round, written by this or another coordinator."""

    record: RoundRecord


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
    """An audit of a round found that a replica's contributions harm the run: bar it from rounds before `until`."""

    replica: str
    round: int
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
class ToMember:
    """An output that concerns one incarnation of a slot."""

    slot: str
    incarnation: int


@dataclass(frozen=True)
class ClaimSlot(ToMember):
    """Have the store note that a process holds a slot, unless another process does. Answer: Claimed."""

    process: str


@dataclass(frozen=True)
class LookUp:
    """Look up the highest incarnation of a slot that another coordinator has assigned. Answer: Noted."""

    slot: str


@dataclass(frozen=True)
class Welcome(ToMember):
    """Tell a process that it holds a slot."""

    process: str


@dataclass(frozen=True)
class Reject:
    """Tell a process that asked for a slot, or the holder of an incarnation, why its request is refused."""

    slot: str
    reason: str
    process: str | None = None
    incarnation: int | None = None
    is_over: bool = False  # the request was valid but came too late, as the replica does something else by now


@dataclass(frozen=True)
class Fenced(ToMember):
    """Tell the holder of an incarnation that ended earlier that its messages have no effect any more."""


@dataclass(frozen=True)
class Assign(ToMember):
    """Tell a member to train a round in a generation of its replica; round 0 means that the run is over."""

    round: int
    generation: int
    heal: bool = False  # the member has to recover theta from the run log, because its bits differ from replay
    trained: int = 0  # the `trained` of all members of the replica, if they are equal; else 0
    resumption: Resumption | None = None  # where the replica resumes within the round; None: it begins the round


@dataclass(frozen=True)
class Suspend(ToMember):
    """Tell a member to train no further: a generation is over, as a stage of its replica is missing.

    The member is told again at each heartbeat, until it asks for work. SUSPENDED tells everybody, once for the replica.
    """

    generation: int
    cause: str


@dataclass(frozen=True)
class Write:
    """Have the store keep a record unless it has one of that round. Answer: Recorded, with the stored record."""

    record: RoundRecord


@dataclass(frozen=True)
class Look:
    """Look for a record that another coordinator may have written. Answer: Recorded, if the store has one."""

    round: int


@dataclass(frozen=True)
class Closed:
    """A round is decided."""

    record: RoundRecord


@dataclass(frozen=True)
class Stop:
    """The run must not continue.

    All of the operator's replicas, at least two, differ from replay; or a replica whose links carry malformed messages
    is needed for a quorum.
    """

    cause: str


Effect = ToMember | LookUp | Reject | Write | Look | Closed | Stop | MembershipEvent | Over
