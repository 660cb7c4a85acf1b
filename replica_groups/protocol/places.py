"""Who holds each place, for the how-manyeth time, whether it is there, and what it has to do."""

from __future__ import annotations

from dataclasses import dataclass, field

from replica_groups.protocol.learnt import Silence
from replica_groups.protocol.rules import Rules, Window

_NO_WINDOW = Window(0.0, 0.0, 0.0)


@dataclass
class Place:
    """A stage of a group, or a datacenter replica."""

    name: str
    replica: str
    term: int = 0
    """The highest that was claimed."""
    held: bool = False
    presumed: bool = False
    """Held as far as is known from before; nothing was heard yet."""
    process: str | None = None
    """Who holds it, as far as it has named itself."""
    applicant: str | None = None
    """Who waits for it."""
    applies_as_guest: bool = False
    """Whether that process was let in by a ticket."""
    is_guest: bool = True
    """Whether its holder was, as far as is known: another coordinator may have let it in."""
    claiming: bool = False
    claim_at: float | None = None
    """When to try again, if the store has failed."""
    asked: int | None = None
    """The round after which it holds theta, while it waits for work."""
    trained: int = 0
    """The last round whose training it has then, and no record; 0 if there is none."""
    lost: bool = False
    silence: Silence = field(default_factory=lambda: Silence(_NO_WINDOW, 0.0))
    stillness: Silence = field(default_factory=lambda: Silence(_NO_WINDOW, 0.0))
    progress: int = -1
    computes: bool = False
    differs: bool = False
    """Whether it holds other bits than replay gives."""
    healed_for: int | None = None
    """The last round that it took theta from the log again for, whoever held the slot."""

    def take(self, term: int, process: str | None, now: float, rules: Rules) -> None:
        """Somebody holds it from now on."""
        self.term, self.process = term, process
        self.held, self.presumed, self.lost, self.is_guest = True, False, False, True
        self.asked, self.progress, self.computes, self.differs = None, -1, False, False
        self.silence, self.stillness = Silence(rules.lease, now), Silence(rules.hang, now)

    def vacate(self) -> None:
        """Nobody holds it."""
        self.held, self.presumed, self.process, self.asked, self.lost = False, False, None, None, False

    def is_there(self, now: float) -> None:
        """It has said something, whatever it was."""
        self.lost = False
        self.silence.sign(now)

    def rests(self, now: float) -> None:
        """It has done what it had to, and computes no more."""
        self.computes = False
        self.stillness.restart(now)

    def hear(self, now: float, progress: int, computes: bool) -> None:
        """What it says of its progress."""
        self.presumed = False
        if progress != self.progress and self.computes and computes:
            self.stillness.sign(now)
        elif progress != self.progress or not computes:
            self.stillness.restart(now)
        self.progress, self.computes = progress, computes

    def ends_at(self) -> float:
        """When its term ends unless something is heard or done."""
        silent = self.silence.since + self._silence_allowed
        return min(silent, self.stillness.since + self.stillness.lease) if self.computes else silent

    def why_it_ends(self) -> str:
        """In words."""
        if self.ends_at() < self.silence.since + self._silence_allowed:
            return f"it made no progress for {self.stillness.lease:.0f} s"
        return f"no heartbeat came for {self._silence_allowed:.0f} s"

    @property
    def _silence_allowed(self) -> float:
        return self.silence.least if self.lost else self.silence.lease


@dataclass
class Replica:
    """All places that hold one copy of the model together."""

    name: str
    places: list[Place]
    round: int | None = None
    """The one it trains, or has contributed to; None while it is formed anew, or waits for a round to open."""

    trained: int | None = 0
    """What all of its places had asked with when it was given that round; None if another coordinator knows."""
    missed: int = 0
    """Rounds in a row that it took part in and did not contribute to in time."""
    awaited_from: float = 0.0
    """Rounds that open before this time do not wait for it, as it missed several in a row."""
    excluded_until: int = 0
    """The first round that it may take part in."""

    @property
    def has_guests(self) -> bool:
        """Whether a place of it is held by somebody who was let in by a ticket, as far as is known."""
        return any(place.is_guest for place in self.places)

    @property
    def epoch(self) -> int:
        """How often it was formed: grows with every term of every place."""
        return sum(place.term for place in self.places)

    @property
    def alive(self) -> bool:
        """Whether every place is held."""
        return False not in [place.held for place in self.places]

    @property
    def waits(self) -> bool:
        """Whether all of it has nothing to do."""
        return self.alive and all(place.asked is not None for place in self.places)
