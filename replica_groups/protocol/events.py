"""What the rules are told, and what they answer with. Data only; a blob's entry is whatever the caller keeps of it."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass

# ---- what is decided ----


@dataclass(frozen=True)
class Contribution:
    """What was counted of one replica. `blobs`: block -> entry."""

    replica: str
    epoch: int
    steps: int
    weight: float
    blobs: Mapping[str, Hashable]
    scale: float = 1.0
    """What its values are multiplied by, if it was too large."""


@dataclass(frozen=True)
class Record:
    """What was counted in a round, in the order of the replicas' names, and who was waited for in vain."""

    round: int
    contributions: tuple[Contribution, ...]
    late: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    """Whose contributions were far too large."""

    def of(self, replica: str) -> Contribution | None:
        """What it counts of a replica."""
        return next((one for one in self.contributions if one.replica == replica), None)


# ---- what happens ----


@dataclass(frozen=True)
class Began:
    """The run begins (0), or goes on, after a round."""

    round: int
    rounds: int
    """The last round that there will be."""
    examples_since: tuple[tuple[int, Mapping[str, int]], ...] = ()
    """See Rules."""


@dataclass(frozen=True)
class Applied:
    """A process wants a place. It names itself by `process`, so that asking twice is asking once."""

    place: str
    process: str
    is_guest: bool = False
    """Whether it was let in by a ticket."""


@dataclass(frozen=True)
class Claimed:
    """The store has noted, or not, that a process holds a place for the `term`-th time."""

    place: str
    term: int
    process: str
    won: bool


@dataclass(frozen=True)
class NotClaimed:
    """The store has failed to note it; nobody knows whether it did."""

    place: str


@dataclass(frozen=True)
class Noted:
    """The highest term of a place that the store has noted."""

    place: str
    term: int


@dataclass(frozen=True)
class Heard:
    """Who holds a place is there. `round` and `epoch` say what it trains, `None` that it trains nothing."""

    place: str
    term: int
    round: int | None = None
    epoch: int = 0
    progress: int = 0
    """Another number whenever it has done something."""
    computes: bool = False
    """Whether it is busy, and waits for nobody."""


@dataclass(frozen=True)
class Lost:
    """The connection of who holds a place has ended: it may be gone, or come back."""

    place: str
    term: int


@dataclass(frozen=True)
class Died:
    """Who holds a place is known to be gone."""

    place: str
    term: int | None = None
    """None: whoever it was."""
    cause: str = "it ended"


@dataclass(frozen=True)
class Asked:
    """Who holds a place holds theta after a round, and has nothing to do."""

    place: str
    term: int
    holds: int
    trained: int = 0
    """The last round whose training it has, and no record: it was trained ahead, or not counted; 0 if there is none."""


@dataclass(frozen=True)
class Broken:
    """Who holds a place cannot reach a neighbour that is there, as far as it knows."""

    place: str
    term: int
    epoch: int
    cause: str
    blames: str = ""
    """The place beside it that sent a malformed message, if neither of the two is held by a ticket."""


@dataclass(frozen=True)
class Deposited:
    """A blob of a place's contribution is in the store, durable."""

    place: str
    term: int
    round: int
    epoch: int
    block: str
    entry: Hashable
    steps: int


@dataclass(frozen=True)
class Recorded:
    """The store has this record of a round, whoever wrote it."""

    record: Record


@dataclass(frozen=True)
class NotRecorded:
    """The record of a round could not be written; nobody knows whether it is there."""

    round: int


@dataclass(frozen=True)
class Confirmed:
    """Who holds a place holds parameters of these hashes after a round."""

    place: str
    term: int
    round: int
    hashes: Mapping[str, bytes]


@dataclass(frozen=True)
class Audited:
    """What replay gives after a round."""

    round: int
    hashes: Mapping[str, bytes]


@dataclass(frozen=True)
class Left:
    """Who holds a place is through with the run."""

    place: str
    term: int


@dataclass(frozen=True)
class Tick:
    """Time has passed."""


@dataclass(frozen=True)
class Woke:
    """The coordinator itself did nothing for a while: that it heard nobody says nothing."""


Event = (
    Began
    | Applied
    | Claimed
    | NotClaimed
    | Noted
    | Heard
    | Lost
    | Died
    | Asked
    | Broken
    | Deposited
    | Recorded
    | NotRecorded
    | Confirmed
    | Audited
    | Left
    | Tick
    | Woke
)


# ---- what is to be done ----


@dataclass(frozen=True)
class Claim:
    """Have the store note that a process holds a place for the `term`-th time, if nobody has been noted so; then say
    Claimed."""

    place: str
    term: int
    process: str


@dataclass(frozen=True)
class LookUp:
    """Say Noted of a place: somebody holds it for a term that is not known here, as another coordinator let it in."""

    place: str


@dataclass(frozen=True)
class Welcome:
    """Tell a process that it holds a place."""

    place: str
    process: str
    term: int


@dataclass(frozen=True)
class Refused:
    """Tell a process that asked for a place, or the holder of a term, that it is not let in, and why."""

    place: str
    reason: str
    process: str | None = None
    term: int | None = None
    is_over: bool = False
    """Whether there is nothing wrong with what was asked, but that it comes too late: the replica does something else
    by now."""


@dataclass(frozen=True)
class Fenced:
    """A term is over: what its holder sends changes nothing any more."""

    place: str
    term: int
    cause: str = ""
    """Why it has ended now; empty in an answer to who holds one that has ended before."""
    silent: bool = False
    """Whether it has ended as nothing was heard of its holder, who may be there."""


@dataclass(frozen=True)
class Assign:
    """Tell who holds a place to train a round, with its replica formed so and so often; round 0: the run is over."""

    place: str
    term: int
    round: int
    epoch: int
    heal: bool = False
    """Whether it has to take theta from the log again, as it holds other bits than replay gives."""
    trained: int = 0
    """What all of the replica has asked with, if that is the same; 0 else."""


@dataclass(frozen=True)
class Suspended:
    """Tell who holds a place to return to the start of the round: a stage of its replica is missing."""

    place: str
    term: int
    epoch: int
    """That is over."""
    cause: str


@dataclass(frozen=True)
class Write:
    """Have the store keep a record, unless it has one of that round; then say Recorded with the one it has."""

    record: Record


@dataclass(frozen=True)
class Look:
    """If the store has a record of a round, say Recorded: another coordinator may have written it."""

    round: int


@dataclass(frozen=True)
class Closed:
    """A round is decided."""

    record: Record


@dataclass(frozen=True)
class TooLate:
    """A replica's contribution was whole after its round had closed: it goes back into error feedback."""

    replica: str
    round: int


@dataclass(frozen=True)
class Bounded:
    """A replica's contribution was too large: its values are multiplied by a number; 0: it goes back, uncounted."""

    replica: str
    round: int
    scale: float


@dataclass(frozen=True)
class Paused:
    """No round can close: fewer replicas are there than a quorum is."""

    round: int
    there: tuple[str, ...]
    needed: int


@dataclass(frozen=True)
class WentOn:
    """A quorum is there again."""

    round: int


@dataclass(frozen=True)
class Over:
    """Every round is decided."""

    round: int
    rounds: int
    finishing: tuple[str, ...]
    """Replicas that took part in the last round. The end of the run waits for no others."""


@dataclass(frozen=True)
class Heal:
    """Who holds a place holds other bits than replay gives: told when it is found; it is healed with its next round."""

    place: str
    term: int
    round: int
    parameter: str


@dataclass(frozen=True)
class Excluded:
    """Who holds a place held other bits again after it was healed: its replica takes part in no round before `until`,
    unless a quorum needs it.
    """

    place: str
    term: int
    round: int
    until: int


@dataclass(frozen=True)
class NotAwaited:
    """A replica missed so many rounds in a row, the last one `round`: rounds that open within so many seconds do not
    wait for it, unless it contributes in time again.
    """

    replica: str
    round: int
    missed: int
    seconds: float


@dataclass(frozen=True)
class Stop:
    """The run must not go on: all replicas of the operator, which are several, hold other bits than replay gives."""

    cause: str


Effect = (
    Claim
    | LookUp
    | Welcome
    | Refused
    | Fenced
    | Assign
    | Suspended
    | Write
    | Look
    | Closed
    | TooLate
    | Bounded
    | Paused
    | WentOn
    | Over
    | Heal
    | Excluded
    | NotAwaited
    | Stop
)
