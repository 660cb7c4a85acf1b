"""The schedule of faults: a pure function of the file of faults, its seeds, and the members."""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random

from fault_injection.settings import (
    AtRate,
    Corrupt,
    Cut,
    Delay,
    Fault,
    FaultFile,
    Fill,
    Freeze,
    Kill,
    Kind,
    Miss,
)
from hetero_pp.config.lines import EXCHANGE
from hetero_pp.config.spec import RunSpec
from hetero_pp.core.seeds import seed_of

Point = tuple[int, str]
"""(round, FaultPhase or point within the inner loop)"""


@dataclass(frozen=True, order=True)
class Injection:
    """One fault: its kind, target and parameters."""

    kind: Kind
    member: str
    """Process that is the target, or injects the fault: a member's or the exchange."""
    link: str = ""
    seconds: float = 0.0
    by: float = 0.0
    rank: int | None = None
    what: str = ""

    def __str__(self) -> str:
        """Describe the fault, as in `cut of home.0-1 for 5 s`."""
        whom = self.link or self.member
        rank = "" if self.rank is None else f", rank {self.rank}"
        what = f"'s {self.what}" if self.what else ""
        return f"{self.kind} of {whom}{what}{rank}" + (f" for {self.seconds:g} s" if self.seconds else "")


@dataclass(frozen=True)
class Schedule:
    """All faults of a run."""

    at: Mapping[tuple[str, Point], Sequence[Injection]]
    """Faults by (member, point of a round).

    Faults under the exchange's name are due when the first member reaches the point.
    """
    file: FaultFile
    spec: RunSpec

    def timed(self) -> Iterator[tuple[float, Injection]]:
        """Yield (seconds after training began, fault) in order of time; may never end."""
        once = sorted(
            (fault.after, _injection(fault, self.spec))
            for fault in self.file.faults
            if isinstance(fault, Fault) and fault.after is not None
        )
        at_rates = [
            _drawn(fault, self.spec, index) for index, fault in enumerate(self.file.faults) if isinstance(fault, AtRate)
        ]
        return heapq.merge(once, *at_rates)

    def fills(self, member: str) -> bool:
        """Whether a fault ever fills the member's disk."""
        return any(isinstance(fault, Fill) and fault.fill == member for fault in self.file.faults)

    @property
    def has_links(self) -> bool:
        """Whether any fault cuts or slows down links."""
        return any(
            isinstance(fault, Cut | Delay) or (isinstance(fault, AtRate) and {"cut", "delay"} & set(fault.of))
            for fault in self.file.faults
        )


def schedule_of(file: FaultFile, spec: RunSpec) -> Schedule:
    at: dict[tuple[str, Point], list[Injection]] = defaultdict(list)
    for fault in file.faults:
        if isinstance(fault, Fault) and fault.at is not None:
            injection = _injection(fault, spec)
            at[injection.member, (fault.at.round, fault.at.point)].append(injection)
    return Schedule(dict(at), file, spec)


def missed(file: FaultFile) -> Mapping[str, frozenset[int]]:
    """Return replica -> rounds in which its contribution is held back."""
    rounds: dict[str, set[int]] = defaultdict(set)
    for fault in file.faults:
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
    """Draw faults from a Poisson process, determined by the seed, the entry's index in the file, and the members."""
    random = Random(seed_of("chaos", fault.seed, index))
    members = fault.members or [EXCHANGE, *spec.needed]
    dialled = {name: [link.name for link in spec.links.values() if link.source == name] for name in members}
    time = 0.0
    while True:
        time -= math.log(1.0 - random.random()) / fault.rate
        kind, member = Kind(random.choice(fault.of)), random.choice(members)
        if kind in (Kind.CUT, Kind.DELAY):
            if not dialled[member]:
                continue  # the exchange dials no other process
            yield time, Injection(kind, member, random.choice(dialled[member]), fault.lasts, fault.by)
        else:
            yield time, Injection(kind, member, seconds=0.0 if kind is Kind.KILL else fault.lasts)
