"""Slots and replicas: the holder of each slot, its incarnation, its presence, and its work.

Time limits are learned from the run itself: the delay of late contributions, and the silence of members.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from replica_groups.rounds.rules import Rules, Window

_NO_WINDOW = Window(0.0, 0.0, 0.0)

LEASES_OF_SILENCE = 3.0
"""Leases after which the incarnation of a silent member ends that trains.

Until then a process that was frozen or cut off continues its round where it was, as if nothing had happened.
"""


REMEMBERED = 64
"""Number of recent observations that count."""

QUANTILE = 0.9
"""Share of late contributions for which the grace window suffices."""


class Lateness:
    """Delay of contributions after the quorum; determines the grace window."""

    def __init__(self, window: Window) -> None:
        self._window = window
        self._seen: deque[float] = deque(maxlen=REMEMBERED)
        self.grace = window.of(None)
        """Grace window in seconds; the largest allowed one until something was observed."""

    def came(self, seconds: float) -> None:
        """Note a contribution that came `seconds` after the quorum."""
        self._seen.append(max(0.0, seconds))
        ordered = sorted(self._seen)
        self.grace = self._window.of(ordered[math.ceil(QUANTILE * len(ordered)) - 1])


class Silence:
    """Longest time between two signs of life of a member; determines how long to wait for the next."""

    def __init__(self, window: Window, now: float) -> None:
        self._window = window
        self._gaps: deque[float] = deque(maxlen=REMEMBERED)
        self.since = now
        self.lease = window.of(0.0)
        """Seconds to wait for the next sign."""

    def sign(self, now: float) -> None:
        """Note a sign of life. A silence beyond the lease was a failure: it teaches no more than the lease."""
        self._gaps.append(min(now - self.since, self.lease))
        self.since = now
        self.lease = self._window.of(max(self._gaps))

    def restart(self, now: float) -> None:
        """Note that the member is present, without learning from the time until now."""
        self.since = now

    @property
    def least(self) -> float:
        """The shortest time that is ever waited."""
        return self._window.least


@dataclass
class Slot:
    """Slot of a member: a stage of a group, or a datacenter replica."""

    name: str
    replica: str
    incarnation: int = 0
    """Highest claimed incarnation."""
    held: bool = False
    assumed_present: bool = False
    """Whether the slot is held according to an earlier coordinator, and nothing was heard of the holder yet."""
    process: str | None = None
    """Name of the holding process, if known."""
    applicant: str | None = None
    """Name of the process that waits for the slot."""
    applies_as_guest: bool = False
    """Whether that process was admitted by a ticket."""
    is_guest: bool = True
    """Whether the holder was admitted by a ticket; True if unknown, as another coordinator may have admitted it."""
    claiming: bool = False
    claim_at: float | None = None
    """Time of the next attempt after a failure of the store."""
    asked: int | None = None
    """Round after which the member holds theta, while it waits for work."""
    trained: int = 0
    """Last round that the waiting member trained and has no record of; 0 if there is none."""
    lost: bool = False
    silent: bool = False
    """Whether nothing was heard of the holder for its lease, while its replica trains: nobody waits for it."""
    silence: Silence = field(default_factory=lambda: Silence(_NO_WINDOW, 0.0))
    stillness: Silence = field(default_factory=lambda: Silence(_NO_WINDOW, 0.0))
    progress: int = -1
    computes: bool = False
    differs: bool = False
    """Whether the member's bits differ from replay."""
    healed_for: int | None = None
    """Last round for which the slot recovered theta from the run log, under any holder."""

    def take(self, incarnation: int, process: str | None, now: float, rules: Rules) -> None:
        """Start an incarnation of the slot."""
        self.incarnation, self.process = incarnation, process
        self.held, self.assumed_present, self.lost, self.silent, self.is_guest = True, False, False, False, True
        self.asked, self.progress, self.computes, self.differs = None, -1, False, False
        self.silence, self.stillness = Silence(rules.lease, now), Silence(rules.hang, now)

    def vacate(self) -> None:
        """Free the slot."""
        self.held, self.assumed_present, self.lost, self.silent = False, False, False, False
        self.process, self.asked = None, None

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
    def _silence_allowed(self) -> float:
        lease = self.silence.least if self.lost else self.silence.lease
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
    missed: int = 0
    """Number of consecutive rounds that it took part in without contributing in time."""
    awaited_from: float = 0.0
    """Rounds that open before this time do not wait for the replica, because it missed several in a row."""
    barred_until: int = 0
    """First round in which the replica may take part, after it was barred."""

    @property
    def has_guests(self) -> bool:
        """Whether the holder of any of its slots was admitted by a ticket, as far as is known."""
        return any(slot.is_guest for slot in self.slots)

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
