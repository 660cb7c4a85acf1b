"""What is done when: a pure function of the file of faults, its seeds, and who takes part."""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random

from hetero_pp.faults import Phase
from hetero_pp.links import EXCHANGE
from hetero_pp.program.chaos.settings import (
    AtRate,
    Chaos,
    Corrupt,
    Cut,
    Delay,
    Fault,
    Fill,
    Freeze,
    Kill,
    Kind,
    Miss,
)
from hetero_pp.run.spec import RunSpec
from hetero_pp.seeds import seed_of

Point = tuple[int, Phase]
"""(round, phase)"""


@dataclass(frozen=True, order=True)
class Injection:
    """One fault: what is done to whom."""

    kind: Kind
    member: str
    """Whose process it is done to, or in."""
    link: str = ""
    seconds: float = 0.0
    by: float = 0.0
    rank: int | None = None
    what: str = ""

    def __str__(self) -> str:
        """As in `cut of home.0-1 for 5 s`."""
        whom = self.link or self.member
        rank = "" if self.rank is None else f", rank {self.rank}"
        what = f"'s {self.what}" if self.what else ""
        return f"{self.kind} of {whom}{what}{rank}" + (f" for {self.seconds:g} s" if self.seconds else "")


@dataclass(frozen=True)
class Schedule:
    """Everything that is done to a run."""

    at: Mapping[tuple[str, Point], Sequence[Injection]]
    """By the member that comes to a point of a round; by the exchange's name, whoever is the first."""
    chaos: Chaos
    spec: RunSpec

    def timed(self) -> Iterator[tuple[float, Injection]]:
        """What is done so many seconds after the run began to train, the earliest first; may never end."""
        once = sorted(
            (fault.after, _injection(fault, self.spec))
            for fault in self.chaos.faults
            if isinstance(fault, Fault) and fault.after is not None
        )
        at_rates = [
            _drawn(fault, self.spec, index)
            for index, fault in enumerate(self.chaos.faults)
            if isinstance(fault, AtRate)
        ]
        return heapq.merge(once, *at_rates)

    def fills(self, member: str) -> bool:
        """Whether the member's disk is ever full."""
        return any(isinstance(fault, Fill) and fault.fill == member for fault in self.chaos.faults)

    @property
    def has_links(self) -> bool:
        """Whether anything is done to links."""
        return any(
            isinstance(fault, Cut | Delay) or (isinstance(fault, AtRate) and {"cut", "delay"} & set(fault.of))
            for fault in self.chaos.faults
        )


def schedule_of(chaos: Chaos, spec: RunSpec) -> Schedule:
    """Of a run."""
    at: dict[tuple[str, Point], list[Injection]] = defaultdict(list)
    for fault in chaos.faults:
        if isinstance(fault, Fault) and fault.at is not None:
            injection = _injection(fault, spec)
            at[injection.member, (fault.at.round, fault.at.phase)].append(injection)
    return Schedule(dict(at), chaos, spec)


def missed(chaos: Chaos) -> Mapping[str, frozenset[int]]:
    """replica -> rounds in which its contribution is held back"""
    rounds: dict[str, set[int]] = defaultdict(set)
    for fault in chaos.faults:
        if isinstance(fault, Miss):
            rounds[fault.miss].update(fault.rounds)
    return {replica: frozenset(found) for replica, found in rounds.items()}


def _injection(fault: Fault, spec: RunSpec) -> Injection:
    match fault:
        case Kill():
            return Injection(Kind.KILL, fault.kill, rank=fault.rank)
        case Freeze():
            return Injection(Kind.FREEZE, fault.freeze, seconds=fault.lasts)
        case Cut():
            return Injection(Kind.CUT, spec.links[fault.cut].source, fault.cut, fault.lasts)
        case Delay():
            return Injection(Kind.DELAY, spec.links[fault.delay].source, fault.delay, fault.lasts, fault.by)
        case Corrupt():
            return Injection(Kind.CORRUPT, fault.corrupt, what=fault.what)
        case Fill():
            return Injection(Kind.FILL, fault.fill, seconds=fault.lasts)
    raise TypeError(f"{type(fault).__name__} has no moment")


def _drawn(fault: AtRate, spec: RunSpec, index: int) -> Iterator[tuple[float, Injection]]:
    """A Poisson process; the same for the same seed, place in the file, and members."""
    random = Random(seed_of("chaos", fault.seed, index))
    members = fault.members or [EXCHANGE, *spec.needed]
    dialled = {name: [link.name for link in spec.links.values() if link.source == name] for name in members}
    time = 0.0
    while True:
        time -= math.log(1.0 - random.random()) / fault.rate
        kind, member = Kind(random.choice(fault.of)), random.choice(members)
        if kind in (Kind.CUT, Kind.DELAY):
            if not dialled[member]:
                continue  # the exchange dials nobody
            yield time, Injection(kind, member, random.choice(dialled[member]), fault.lasts, fault.by)
        else:
            yield time, Injection(kind, member, seconds=0.0 if kind is Kind.KILL else fault.lasts)
