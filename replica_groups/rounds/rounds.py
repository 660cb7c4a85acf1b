"""State of one open round: its deposits, the replicas that it waits for, and its closing time."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator
from dataclasses import dataclass, field
from statistics import median_low

from replica_groups.rounds.events import Contribution, Record
from replica_groups.rounds.rules import MOST_TIMES_THE_STEPS, Rules


@dataclass
class GenerationDeposits:
    """Deposits of one generation of a replica."""

    generation: int
    steps: int
    blobs: dict[str, Hashable] = field(default_factory=dict)


@dataclass
class OpenRound:
    """The undecided round."""

    number: int
    opened_at: float
    taking_part: set[str] = field(default_factory=set)
    """Replicas that train the round or are about to."""
    deposits: dict[str, GenerationDeposits] = field(default_factory=dict)
    whole: dict[str, float] = field(default_factory=dict)
    """Replica -> time at which its contribution was complete."""
    quorum_at: float | None = None
    """Time at which a quorum had contributed."""
    quorum: int = 0
    """Number of contributions at that time."""
    writing: bool = False
    """Whether its record is being written to the store."""
    retry_at: float | None = None
    unawaited: frozenset[str] = frozenset()
    """Replicas that the round does not wait for, because they missed several rounds in a row."""
    is_overdue: bool = False
    """Whether the round has been open for longer than `limit`."""
    optional: frozenset[str] = frozenset()
    """Optional replicas that count for the quorum while they take part."""
    missing: set[str] = field(init=False)
    """Replicas that take part and have not contributed."""
    counting: set[str] = field(init=False)
    """Replicas of `optional` that count for the quorum now, and other optional ones that have contributed."""

    def __post_init__(self) -> None:
        self.missing = set(self.taking_part)
        self.counting = self.taking_part & self.optional

    def join(self, replica: str, is_heard: bool) -> None:
        """Note that a replica trains the round, and whether all its members are heard."""
        self.taking_part.add(replica)
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
        if replica not in self.whole:
            self.counting.discard(replica)

    def becomes_overdue(self) -> None:
        """From now on, an optional replica counts for the quorum only once it has contributed."""
        self.is_overdue = True
        self.counting &= self.whole.keys()

    def deposit(
        self, replica: str, generation: int, block: str, entry: Hashable, steps: int, rules: Rules, now: float
    ) -> str | None:
        """Note a blob; return a complaint if it contradicts an earlier one. Repeating a deposit is harmless."""
        if (complaint := rules.complaint_of_steps(steps)) is not None:
            return f"`{block}`: {complaint}"
        known = self.deposits.get(replica)
        if known is not None and known.generation != generation and replica in self.whole:
            return (
                f"a contribution to round {self.number} of generation {generation}, after a complete one of "
                f"generation {known.generation}"
            )
        if known is None or known.generation != generation:
            known = self.deposits[replica] = GenerationDeposits(generation, steps)
        if known.blobs.get(block, entry) != entry:
            return f"a second, different `{block}` for round {self.number}"
        if known.steps != steps:
            return f"`{block}` of {steps} steps, expected {known.steps} as in the replica's other blobs"
        known.blobs[block] = entry
        if replica not in self.whole and known.blobs.keys() >= rules.blocks_of(replica):
            self.whole[replica] = now
            self.missing.discard(replica)
            if replica in rules.optional:
                self.counting.add(replica)
        return None

    def count(self, needed: int, now: float) -> None:
        """Note the time and the number of contributions once `needed` replicas have contributed."""
        if self.quorum_at is None and len(self.whole) >= needed:
            self.quorum_at, self.quorum = now, len(self.whole)

    def withdraw(self, replica: str) -> None:
        """Remove a replica from the round, with its incomplete deposits."""
        self.leave(replica)
        self.deposits.pop(replica, None)

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

    def record(self, rules: Rules) -> Record:
        """Return the record of the complete contributions.

        A contribution's steps count at most MOST_TIMES_THE_STEPS times the median of all steps.
        """
        counted = []
        most = MOST_TIMES_THE_STEPS * median_low([self.deposits[one].steps for one in self.whole]) if self.whole else 0
        for replica in sorted(self.whole):
            own = self.deposits[replica]
            blobs = {block: own.blobs[block] for block in sorted(own.blobs)}
            weight = rules.weight(replica, min(own.steps, most))
            counted.append(Contribution(replica, own.generation, own.steps, weight, blobs))
        late = tuple(sorted(self.taking_part - self.whole.keys()))
        return Record(self.number, tuple(counted), late)
