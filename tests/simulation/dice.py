"""Random choices of a history: the size of the run, its rules, and how often which fault happens."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

from hetero_pp.outer.fragments import Fragments
from replica_groups.rounds.rules import Rules, Window

QUORUMS = (0.5, 0.5, 0.5, 0.34, 0.67, 1.0)
LIGHT_SECONDS = 400.0
"""Seconds between two faults of one kind, from which on a history counts as one with few faults."""


@dataclass(frozen=True)
class Faults:
    """Mean seconds between two faults of each kind (None for never), and shares of failing messages and store calls."""

    kills: float | None = None
    freezes: float | None = None
    hangs: float | None = None
    cuts: float | None = None
    coordinator_kills: float | None = None
    coordinator_freezes: float | None = None
    second_coordinators: float | None = None
    outages: float | None = None
    corruptions: float | None = None
    clock_jumps: float | None = None
    power_cuts: float | None = None
    idles: float | None = None
    condemnations: float | None = None
    """Judgements by which a replica is barred, without any effect on its members."""
    has_standby: bool = False
    """Whether a second host waits to coordinate, and a lease decides which one does."""
    lost: float = 0.0
    doubled: float = 0.0
    late: float = 0.0
    """Share of messages that take seconds."""
    store_fails: float = 0.0
    says_died: float = 0.5
    """Probability that a launcher reports the end of a process at once."""
    comes_back: float = 0.9
    """Probability that the launcher soon starts another process."""
    elsewhere: float = 0.1
    """Probability that this happens on a machine without the slot's saved state."""
    torn: float = 0.1
    """Probability that a state is torn if its process ends while it writes the state."""

    @property
    def are_light(self) -> bool:
        """Whether faults are so rare that rounds must include nearly every replica that is present."""
        return (self.lost, self.store_fails) == (0.0, 0.0) and all(
            mean is None or mean >= LIGHT_SECONDS
            for mean in (
                *(self.kills, self.freezes, self.hangs, self.cuts, self.coordinator_kills),
                *(self.coordinator_freezes, self.second_coordinators, self.outages, self.power_cuts, self.idles),
            )
        )


def draw_rules(dice: Random) -> Rules:
    """Draw one to six replicas of one to four slots (`slots`) each."""
    slots, blocks = {}, {}
    for number in range(dice.choice((1, 2, 2, 3, 3, 4, 5, 6))):
        replica = f"r{number}"
        stages = dice.choice((1, 1, 2, 2, 3, 4))
        for stage in range(stages):
            slot = f"{replica}.{stage}" if stages > 1 else replica
            slots[slot] = replica
            blocks[slot] = frozenset(f"layers.{4 * stage + block}" for block in range(dice.choice((1, 1, 2))))
    return Rules(
        slots,
        blocks,
        quorum=dice.choice(QUORUMS),
        grace=Window(3.0, 3.0, 40.0),
        limit=150.0,
        lease=Window(5.0, 15.0, 60.0),
        hang=Window(10.0, 60.0, 120.0),
        joins_at_once=dice.random() < 0.3,
    )


def draw_resumes(dice: Random, rules: Rules) -> Rules:
    """Let replicas begin a round anew whenever they lose a stage, in some histories."""
    return replace(rules, resumes=dice.random() < 0.8)


def draw_fragments(dice: Random, rules: Rules) -> Rules:
    """Let rounds synchronise one of three fragments, in some histories. Most slots have no block of some of these."""
    if dice.random() < 0.6:
        return rules
    fragments, blocks = Fragments(3), dict(rules.blocks)
    for replica in rules.replicas:
        has = set(map(fragments.of, rules.blocks_of(replica, 1)))
        for lacks in set(range(fragments.count)) - has:
            slot = dice.choice(rules.slots_of(replica))
            blocks[slot] |= {f"layers.{99 + lacks}"}
    return replace(rules, blocks=blocks, fragments=fragments)


def draw_optional(dice: Random, rules: Rules) -> Rules:
    """Make some or all replicas optional, in some histories."""
    come_and_go = dice.random() < 0.3
    return replace(rules, optional=frozenset(one for one in rules.replicas if come_and_go and dice.random() < 0.7))


def draw_faults(dice: Random) -> Faults:
    """Draw the faults of a history.

    Each kind is missing from some histories, because one kind may hide the effects of another.
    """
    if dice.random() < 0.1:
        return Faults()
    mean = dice.choice((25.0, 60.0, 150.0, 400.0, 1000.0))

    def every(share: float, scale: float = 1.0) -> float | None:
        seconds = scale * mean * dice.uniform(1.0, 3.0)
        return seconds if dice.random() < share else None

    def some(share: float, most: float) -> float:
        value = dice.uniform(0.0, most)
        return value if dice.random() < share else 0.0

    return Faults(
        kills=every(0.7),
        freezes=every(0.5),
        hangs=every(0.3, 2.0),
        cuts=every(0.4),
        coordinator_kills=every(0.5),
        coordinator_freezes=every(0.3),
        second_coordinators=every(0.5),
        outages=every(0.3),
        corruptions=every(0.3, 2.0),
        clock_jumps=every(0.2),
        power_cuts=every(0.2, 3.0),
        lost=some(0.4, 0.1),
        doubled=some(0.4, 0.3),
        late=some(0.5, 0.3),
        store_fails=some(0.4, 0.5),
        says_died=dice.choice((0.0, 0.5, 1.0)),
        comes_back=dice.choice((0.8, 1.0)),
        elsewhere=dice.choice((0.0, 0.3)),
        torn=dice.choice((0.0, 0.5)),
    )


def draw_idles(dice: Random, faults: Faults) -> Faults:
    """Add members that take rounds and contribute nothing, in some histories."""
    return replace(faults, idles=dice.choice((100.0, 300.0, 1000.0))) if dice.random() < 0.3 else faults


def draw_condemnations(dice: Random, faults: Faults) -> Faults:
    """Add audits that bar replicas, in some histories."""
    return replace(faults, condemnations=dice.choice((100.0, 300.0, 1000.0))) if dice.random() < 0.3 else faults


def draw_standby(dice: Random, faults: Faults) -> Faults:
    """Let a second host wait to coordinate, in some histories."""
    return replace(faults, has_standby=dice.random() < 0.3)


HARSH = Faults(
    kills=100.0,
    freezes=150.0,
    hangs=150.0,
    cuts=150.0,
    coordinator_kills=150.0,
    coordinator_freezes=300.0,
    second_coordinators=200.0,
    outages=300.0,
    corruptions=100.0,
    lost=0.03,
    doubled=0.3,
    late=0.3,
    store_fails=0.1,
)
"""All kinds of faults at once, so that bugs are found soon."""

HANGS = Faults(hangs=100.0)
"""Hangs alone, because most other faults end a process that hangs."""

IDLES = Faults(idles=100.0)
"""Only members that contribute nothing, and members that do not leave when the run is over."""

STANDBY = Faults(
    kills=300.0,
    cuts=300.0,
    coordinator_kills=150.0,
    coordinator_freezes=100.0,
    outages=200.0,
    power_cuts=2000.0,
    lost=0.02,
    doubled=0.1,
    late=0.1,
    store_fails=0.05,
    has_standby=True,
)
"""Two hosts of one exchange, each of which is often killed, frozen or without its store."""
