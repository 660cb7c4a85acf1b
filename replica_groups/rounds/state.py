"""State of the rules: slots and their holders, replicas, the open round, and limits of time learned from the run."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from hetero_pp.messages.messages_pb2 import BlobEntry, KeptSteps, Restart, Resumption, RoundRecord
from replica_groups.rounds.events import Deposited
from replica_groups.rounds.rules import Rules, Window, most_steps

_NO_WINDOW = Window(0.0, 0.0, 0.0)

LEASES_OF_SILENCE = 3.0
"""Leases after which the incarnation of a silent member ends that trains.

Until then a process that was frozen or cut off continues its round where it was, as if nothing had happened.
"""


REMEMBERED = 64  # number of recent observations that count

QUANTILE = 0.9  # share of late contributions for which the grace window suffices


class Lateness:
    """Delay of contributions after the quorum; determines the grace window."""

    def __init__(self, window: Window) -> None:
        self._window = window
        self._seen: deque[float] = deque(maxlen=REMEMBERED)
        self.grace = window.of(None)  # grace window in seconds; the largest allowed one until something was observed

    def came(self, seconds: float) -> None:
        """Note a contribution that came `seconds` after the quorum."""
        self._seen.append(max(0.0, seconds))
        ordered = sorted(self._seen)
        self.grace = self._window.of(ordered[math.ceil(QUANTILE * len(ordered)) - 1])


class Silence:
    """Longest time between two signs of life of a member; determines how long to wait for the next."""

    def __init__(self, window: Window, now: float) -> None:
        self.window = window
        self._gaps: deque[float] = deque(maxlen=REMEMBERED)
        self.since = now
        self.lease = window.of(0.0)  # seconds to wait for the next sign

    def sign(self, now: float) -> None:
        """Note a sign of life. A silence beyond the lease was a failure: it teaches no more than the lease."""
        self._gaps.append(min(now - self.since, self.lease))
        self.since = now
        self.lease = self.window.of(max(self._gaps))

    def restart(self, now: float) -> None:
        """Note that the member is present, without learning from the time until now."""
        self.since = now


@dataclass
class Slot:
    """Slot of a member: a stage of a group, or a datacenter replica."""

    name: str
    replica: str
    incarnation: int = 0  # highest claimed incarnation
    held: bool = False
    assumed_present: bool = False
    """Whether the slot is held according to an earlier coordinator, and nothing was heard of the holder yet."""
    process: str | None = None  # name of the holding process, if known
    applicant: str | None = None  # name of the process that waits for the slot
    applies_as_guest: bool = False  # whether that process was admitted by a ticket
    is_guest: bool = True
    """Whether the holder was admitted by a ticket; True if unknown, as another coordinator may have admitted it."""
    claiming: bool = False
    claim_at: float | None = None  # time of the next attempt after a failure of the store
    asked: int | None = None  # round after which the member holds theta, while it waits for work
    trained: int = 0  # last round that the waiting member trained and has no record of; 0 if there is none
    kept: KeptSteps | None = None  # inner steps that the waiting member keeps of the round in which it was suspended
    lost: bool = False
    silent: bool = False
    """Whether nothing was heard of the holder for its lease, while its replica trains: nobody waits for it."""
    silence: Silence = field(default_factory=lambda: Silence(_NO_WINDOW, 0.0))
    stillness: Silence = field(default_factory=lambda: Silence(_NO_WINDOW, 0.0))
    progress: int = -1
    computes: bool = False
    differs: bool = False  # whether the member's bits differ from replay
    healed_for: int | None = None  # last round for which the slot recovered theta from the run log, under any holder

    def take(self, incarnation: int, process: str | None, now: float, rules: Rules) -> None:
        """Start an incarnation of the slot."""
        self.incarnation, self.process = incarnation, process
        self.held, self.assumed_present, self.lost, self.silent, self.is_guest = True, False, False, False, True
        self.asked, self.kept, self.progress, self.computes, self.differs = None, None, -1, False, False
        self.silence, self.stillness = Silence(rules.lease, now), Silence(rules.hang, now)

    def vacate(self) -> None:
        """Free the slot."""
        self.held, self.assumed_present, self.lost, self.silent = False, False, False, False
        self.process, self.asked, self.kept = None, None, None

    def is_there(self, now: float) -> None:
        """Note that the member has sent any message."""
        self.lost = self.silent = False
        self.silence.sign(now)

    def rests(self, now: float) -> None:
        """Note that the member has finished its work and does not compute."""
        self.computes = False
        self.stillness.restart(now)

    def hear(self, now: float, progress: int, computes: bool) -> None:
        """Note the progress that the member reports."""
        self.assumed_present = False
        if progress != self.progress and self.computes and computes:
            self.stillness.sign(now)
        elif progress != self.progress or not computes:
            self.stillness.restart(now)
        self.progress, self.computes = progress, computes

    def ends_at(self) -> float:
        """Return when the incarnation is silent, or ends, unless a heartbeat or progress comes before."""
        silent = self.silence.since + self._silence_allowed
        return min(silent, self.stillness.since + self.stillness.lease) if self.computes else silent

    def due_at(self) -> float:
        """Return when the incarnation ends or the slot is claimed again, whichever comes first."""
        ends = self.ends_at() if self.held else math.inf
        return ends if self.claim_at is None else min(ends, self.claim_at)

    @property
    def is_only_silent(self) -> bool:
        """Whether it is silence, and no lack of progress, for which the incarnation would end."""
        return self.ends_at() == self.silence.since + self._silence_allowed

    def why_it_ends(self) -> str:
        """Return the cause of the end in words."""
        if not self.is_only_silent:
            return f"it made no progress for {self.stillness.lease:.0f} s"
        return f"no heartbeat arrived for {self._silence_allowed:.0f} s"

    @property
    def is_heard(self) -> bool:
        """Whether a member holds the slot and is not silent."""
        return self.held and not self.silent

    @property
    def _silence_allowed(self) -> float:
        lease = self.silence.window.least if self.lost else self.silence.lease
        return LEASES_OF_SILENCE * lease if self.silent else lease


@dataclass
class Replica:
    """All slots that together hold one copy of the model."""

    name: str
    slots: list[Slot]
    round: int | None = None
    """Round that the replica trains or has contributed to; None while it reforms or waits for a round to open."""

    trained: int | None = 0
    """The equal `trained` of its slots when that round was assigned, else 0; None if another coordinator did."""
    resumption: Resumption | None = None  # where it resumed within that round; None: it began at the start
    missed: int = 0  # number of consecutive rounds that it took part in without contributing in time
    awaited_from: float = 0.0
    """Rounds that open before this time do not wait for the replica, because it missed several in a row."""
    barred_until: int = 0  # first round in which the replica may take part, after it was barred

    @property
    def generation(self) -> int:
        """Generation of the replica: the sum of the incarnations of its slots, so it grows with each."""
        return sum(slot.incarnation for slot in self.slots)

    @property
    def alive(self) -> bool:
        """Whether every slot is held by a member that is heard."""
        return False not in [slot.held and not slot.silent for slot in self.slots]

    @property
    def waits(self) -> bool:
        """Whether all its members wait for work."""
        return self.alive and all(slot.asked is not None for slot in self.slots)


def with_name(slot: str, cause: str) -> str:
    """Return a cause that begins with the slot's name, such as `home.1 was killed by SIGKILL`."""
    return cause if cause.startswith((f"{slot} ", f"{slot}:")) else f"{slot}: {cause}"


@dataclass
class GenerationDeposits:
    """Deposits of one generation of a replica."""

    generation: int
    steps: int
    restarts: Sequence[Restart] = ()  # slots whose holders began within the round
    blobs: dict[str, BlobEntry] = field(default_factory=dict)


@dataclass
class OpenRound:
    """The undecided round."""

    number: int
    opened_at: float
    taking_part: set[str] = field(default_factory=set)  # replicas that train the round or are about to
    deposits: dict[str, GenerationDeposits] = field(default_factory=dict)
    whole: dict[str, float] = field(default_factory=dict)  # replica -> time at which its contribution was complete
    quorum_at: float | None = None  # time at which a quorum had contributed
    quorum: int = 0  # number of contributions at that time
    writing: bool = False  # whether its record is being written to the store
    retry_at: float | None = None
    unawaited: frozenset[str] = frozenset()
    """Replicas that the round does not wait for, because they missed several rounds in a row."""
    is_overdue: bool = False  # whether the round has been open for longer than `limit`
    optional: frozenset[str] = frozenset()  # optional replicas that count for the quorum while they take part
    reforming: dict[str, float] = field(default_factory=dict)
    """Replicas of `taking_part` that lost a stage and may resume -> time until which the round waits for a new holder.

    It is infinite until the coordinator knows the time.
    """
    missing: set[str] = field(init=False)  # replicas that take part and have not contributed
    counting: set[str] = field(init=False)
    """Replicas of `optional` that count for the quorum now, and other optional ones that have contributed."""

    def __post_init__(self) -> None:
        self.missing = set(self.taking_part)
        self.counting = self.taking_part & self.optional

    def join(self, replica: str, is_heard: bool) -> None:
        """Note that a replica trains the round, and whether all its members are heard."""
        self.taking_part.add(replica)
        self.reforming.pop(replica, None)
        if replica not in self.whole:
            self.missing.add(replica)
            self.is_heard(replica, is_heard)

    def is_heard(self, replica: str, is_heard: bool) -> None:
        """Note whether an optional replica that trains the round counts for the quorum: it does while it is heard."""
        if replica in self.missing:
            counts = is_heard and replica in self.optional and not self.is_overdue
            (self.counting.add if counts else self.counting.discard)(replica)

    def leave(self, replica: str) -> None:
        """Note that a replica does not train the round any more."""
        self.taking_part.discard(replica)
        self.missing.discard(replica)
        self.reforming.pop(replica, None)
        if replica not in self.whole:
            self.counting.discard(replica)

    def deposit(self, replica: Replica, blob: Deposited, rules: Rules, now: float) -> str | None:
        """Note a blob; return a complaint if it contradicts an earlier one. Repeating a deposit is harmless."""
        assert blob.entry is not None
        name, resumed = replica.name, replica.resumption
        if (complaint := rules.complaint_of_steps(name, blob.steps)) is not None:
            return f"`{blob.block}`: {complaint}"
        if resumed is not None and blob.steps < resumed.step:
            return f"`{blob.block}`: found {blob.steps} inner steps, expected at least {resumed.step}"
        known = self.deposits.get(name)
        if known is not None and known.generation != blob.generation and name in self.whole:
            return (
                f"a contribution to round {self.number} of generation {blob.generation}, after a complete one of "
                f"generation {known.generation}"
            )
        if known is None or known.generation != blob.generation:
            known = self.deposits[name] = GenerationDeposits(
                blob.generation, blob.steps, () if resumed is None else tuple(resumed.restarts)
            )
        if known.blobs.get(blob.block, blob.entry) != blob.entry:
            return f"a second, different `{blob.block}` for round {self.number}"
        if known.steps != blob.steps:
            return f"`{blob.block}` of {blob.steps} steps, expected {known.steps} as in the replica's other blobs"
        known.blobs[blob.block] = blob.entry
        if name not in self.whole and known.blobs.keys() >= rules.blocks_of(name, self.number):
            self.whole[name] = now
            self.missing.discard(name)
            if name in rules.optional:
                self.counting.add(name)
        return None

    def count(self, needed: int, now: float) -> None:
        """Note the time and the number of contributions once `needed` replicas have contributed."""
        if self.quorum_at is None and len(self.whole) >= needed:
            self.quorum_at, self.quorum = now, len(self.whole)

    def waited_for(self, alive: Collection[str]) -> Iterator[str]:
        """Yield the present replicas that take part, have not contributed, and are waited for."""
        return (replica for replica in self.missing if replica in alive and replica not in self.unawaited)

    def closes_at(self, waits: bool, grace: float, limit: float) -> float | None:
        """Return when the round closes if nothing more comes; None while a quorum is missing."""
        if self.quorum_at is None:
            return None
        if not waits:
            return self.quorum_at
        return min(self.quorum_at + grace, max(self.quorum_at, self.opened_at + limit))

    def record(self, rules: Rules) -> RoundRecord:
        """Return the record of the complete contributions, in the order of replica names, without digests.

        A contribution's steps count at most MOST_TIMES_THE_STEPS times the median of all steps.
        """
        late = sorted(self.taking_part - self.whole.keys())
        record = RoundRecord(round=self.number, late=late)
        most = most_steps([self.deposits[one].steps for one in self.whole])
        for replica in sorted(self.whole):
            own = self.deposits[replica]
            weight = rules.weight(replica, min(own.steps, most))
            blobs = [own.blobs[block] for block in sorted(own.blobs)]
            entry = record.contributions.add(
                replica=replica, generation=own.generation, steps=own.steps, weight=weight, blobs=blobs
            )
            entry.restarts.extend(own.restarts)
            since = {block: one.step for one in own.restarts for block in rules.blocks[one.slot]}
            # The last holder of its slot trained a block. If that began at the end, its block has error feedback alone,
            # and counts as one step: with no weight, a mean over this replica would be 0/0, and that would be lost.
            for blob in entry.blobs:
                blob.steps = max(1, own.steps - since[blob.block]) if blob.block in since else 0
        return record
