"""Runs the rules: tells the coordinator what happens, does in the store what it asks for, and wakes whom it answers.

Nothing is decided here. What the coordinator answers to members lies ready for their calls, which wait for it.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

from hetero_pp.errors import AskAgain, DamagedFile, HeteroPPError, Refused, RunFailed, StoreError, Suspended, TermOver
from hetero_pp.files import FIRST_PAUSE, LONGEST_PAUSE
from hetero_pp.messages.messages_pb2 import RoundRecord
from hetero_pp.topology import MagnitudeSettings
from replica_groups.exchange.limits import ContributionLimits
from replica_groups.exchange.log import ContributionLog
from replica_groups.exchange.magnitudes import bound, remembered_before
from replica_groups.exchange.obstacles import Obstacles
from replica_groups.exchange.records import from_message, to_message
from replica_groups.protocol import events as e
from replica_groups.protocol.coordinator import Coordinator
from replica_groups.protocol.rules import Rules

T = TypeVar("T")

_LONGEST_SLEEP = 1.0
_OVERSLEPT = 3.0
"""Seconds of sleep beyond which this process was itself frozen."""

OnEffect = Callable[[e.Effect], None]
IsAsked = Callable[[], bool]
"""Whether the caller of something that waits is still there."""


def always() -> bool:
    """Of a caller that is a thread of this process."""
    return True


class Decisions:
    """One coordinator, its clock and its store. Safe to call from many threads; none may hold the lock when it does."""

    def __init__(
        self,
        rules: Rules,
        log: ContributionLog,
        on_effect: OnEffect,
        goes_on: bool = False,
        tokens_a_step: Mapping[str, int] | None = None,
        magnitudes: MagnitudeSettings | None = None,
        trains_on: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`on_effect` is told of every effect, in order, with the lock held. `goes_on`: see Coordinator.

        Without `magnitudes` contributions may be as large as they like; `trains_on`: see magnitudes.bound.
        """
        self.log = log
        self.changed = threading.Condition()
        self.failure: str | None = None
        self.obstacles = Obstacles()
        terms = {place: term for place, term in log.terms().items() if place in rules.places}
        self.coordinator = Coordinator(rules, clock(), terms, goes_on)
        self._clock, self._on_effect = clock, on_effect
        self._tokens_a_step, self._magnitudes, self._trains_on = tokens_a_step or {}, magnitudes, trains_on
        self.limits: ContributionLimits | None = None
        """What bounds contributions beside others and their own history, once the run has begun."""
        self._welcomed: dict[tuple[str, str], int] = {}
        self._assigned: dict[tuple[str, int], e.Assign] = {}
        self._suspended: dict[tuple[str, int], e.Suspended] = {}
        self._records: dict[int, RoundRecord] = {}
        self._ended = False
        self._writing = threading.Lock()
        self._halted = False
        self._written = 0
        """The round of the last record that was written here; the coordinator learns of it a moment later."""
        self._timer: threading.Thread | None = None

    # ---- what happens ----

    def tell(self, event: e.Event) -> Sequence[e.Effect]:
        """Have the coordinator take note, and do what that makes necessary; its answers."""
        answers = self._step(event)
        self._start_clock()
        todo = list(answers)
        while todo:
            follows = self._do(todo.pop(0))
            if follows is not None:
                todo.extend(self._step(follows))
        return answers

    def presume(self) -> None:
        """See Coordinator.presume."""
        with self.changed:
            self.coordinator.presume(self._clock())
            self.changed.notify_all()

    def _step(self, event: e.Event) -> list[e.Effect]:
        with self.changed:
            effects = self.coordinator.step(event, self._clock())
            for effect in effects:
                if not self._is_known(effect):
                    self._note(effect)
                    self._on_effect(effect)
            self.changed.notify_all()
            return effects

    def _is_known(self, effect: e.Effect) -> bool:
        """Whether a member is told again what it has not heard, or not acted upon, yet."""
        return isinstance(effect, e.Suspended) and self._suspended.get((effect.place, effect.term)) == effect

    def _note(self, effect: e.Effect) -> None:
        """What calls wait for."""
        match effect:
            case e.Welcome(place, process, term):
                self._welcomed = {key: value for key, value in self._welcomed.items() if key[0] != place}
                self._welcomed[place, process] = term
            case e.Assign(place, term):
                self._suspended.pop((place, term), None)
                self._assigned[place, term] = effect
            case e.Suspended(place, term):
                self._suspended[place, term] = effect
            case e.Fenced(place, term):
                self._assigned.pop((place, term), None)
                self._suspended.pop((place, term), None)
            case e.Stop(cause):
                self.fail(cause)

    def _do(self, effect: e.Effect) -> e.Event | None:
        """What has to be done in the store, and what came of it. Called without the lock."""
        match effect:
            case e.Claim(place, term, process):
                return self._claim(place, term, process)
            case e.LookUp(place):
                return self._look_up(place)
            case e.Write(record):
                return self._write(record)
            case e.Look(round_):
                return self._look(round_)
        return None

    def _claim(self, place: str, term: int, process: str) -> e.Event:
        operation = ("claim", place)
        try:
            is_first = self.log.claim_term(place, term)
        except (HeteroPPError, OSError) as error:
            self.obstacles.failed(operation, str(error))
            return e.NotClaimed(place)
        self.obstacles.over(operation)
        return e.Claimed(place, term, process, is_first)

    def _look_up(self, place: str) -> e.Event | None:
        with contextlib.suppress(HeteroPPError, OSError):
            return e.Noted(place, self.log.terms().get(place, 0))
        return None

    def _write(self, record: e.Record) -> e.Event:
        try:
            message = to_message(record, self._tokens_a_step)
            if self._magnitudes is not None:
                bound(message, self._before(record.round), self._magnitudes, self._trains_on, self.limits)
            with self._writing:
                if self._halted:
                    return e.NotRecorded(record.round)
                kept = self.log.create_record(message)
                self._written = kept.round
        except (HeteroPPError, OSError) as error:
            self.obstacles.failed(("record", record.round), str(error))
            return e.NotRecorded(record.round)
        return self._recorded(kept)

    def _before(self, round_: int) -> Iterator[RoundRecord]:
        """Return the records that a round's contributions are held against, as far as the log has them."""
        for earlier in remembered_before(round_):
            with contextlib.suppress(DamagedFile, FileNotFoundError):
                record = self._records.get(earlier) or self.log.read_record(earlier)
                with self.changed:
                    self._records[earlier] = record
                yield record

    def _look(self, round_: int) -> e.Event | None:
        with contextlib.suppress(HeteroPPError, OSError):
            return self._recorded(self.log.read_record(round_))
        return None

    def _recorded(self, kept: RoundRecord) -> e.Event:
        self.obstacles.over(("record", kept.round))
        with self.changed:
            self._records[kept.round] = kept
            wanted = {*remembered_before(kept.round + 1), kept.round}
            self._records = {round_: one for round_, one in self._records.items() if round_ in wanted}
        return e.Recorded(from_message(kept))

    def kept(self, round_: int) -> RoundRecord:
        """The record of a round that was closed a moment ago."""
        return self._records[round_]

    def patiently(self, do: Callable[[], T]) -> T:
        """Do what needs the store, and again for as long as that cannot be reached. Raises RunFailed."""
        pause, operation = FIRST_PAUSE, object()
        try:
            while True:
                try:
                    return do()
                except StoreError as error:
                    self.obstacles.failed(operation, str(error))
                with self.changed:
                    self.changed.wait_for(lambda: self.failure is not None, pause)
                self.require_alive()
                pause = min(2 * pause, LONGEST_PAUSE)
        finally:
            self.obstacles.over(operation)

    # ---- what calls wait for ----

    def fail(self, cause: str) -> None:
        """Every call that waits, and every later one, raises RunFailed."""
        with self.changed:
            self.failure = self.failure or cause
            self.changed.notify_all()

    def require_alive(self) -> None:
        """Raise RunFailed if the run has failed."""
        if self.failure is not None:
            raise RunFailed(self.failure)

    def wait_until(self, condition: Callable[[], bool], is_asked: IsAsked = always) -> None:
        """Wait for it, with the lock held while it is asked, as long as somebody asks.

        Raises RunFailed, AskAgain once nobody does.
        """
        with self.changed:
            self.changed.wait_for(lambda: self.failure is not None or condition() or not is_asked())
            self.require_alive()
            if not is_asked() and not condition():
                raise AskAgain("the caller disconnected, or has waited for the longest time of a call")

    def wake(self) -> None:
        """Who has asked may be gone."""
        with self.changed:
            self.changed.notify_all()

    def wait_for_term(self, place: str, process: str, is_asked: IsAsked = always) -> int:
        """Until a process that has applied for a place holds it: the term. Raises Refused if another has since."""
        own = self.coordinator.places[place]
        with self.changed:
            self.wait_until(
                lambda: (place, process) in self._welcomed or (own.applicant != process and not own.claiming), is_asked
            )
            if (place, process) not in self._welcomed:
                raise Refused(f"{place}: another process has requested this slot in the meantime")
            return self._welcomed[place, process]

    def wait_for_work(self, place: str, term: int, is_asked: IsAsked = always) -> e.Assign:
        """Until a member that has asked is told what to train. Raises TermOver."""
        with self.changed:
            self.wait_until(
                lambda: (place, term) in self._assigned or not self.coordinator.holds(place, term), is_asked
            )
            self.require_term(place, term)
            return self._assigned[place, term]  # and leave it: a call whose caller is gone may have waited, too

    def wait_for_record(
        self, round_: int, place: str | None = None, term: int | None = None, is_asked: IsAsked = always
    ) -> RoundRecord:
        """Until a round is decided.

        For a member: raises TermOver, and Suspended if its replica has to train the round again.
        Of a round that only the log has: DamagedFile, FileNotFoundError.
        """

        def is_due() -> bool:
            is_over = term is not None and place is not None and not self.coordinator.holds(place, term)
            return round_ <= self.coordinator.last_round or (place, term) in self._suspended or is_over

        with self.changed:
            self.wait_until(is_due, is_asked)
            if round_ > self.coordinator.last_round and place is not None and term is not None:
                self.require_term(place, term)
                raise Suspended(self._suspended[place, term].cause)
            if round_ in self._records:
                return self._records[round_]
        return self.patiently(lambda: self.log.read_record(round_))

    def elapsed(self, round_: int) -> float:
        """Seconds since a round opened, if it is the open one."""
        open_round = self.coordinator.open
        return self._clock() - open_round.opened_at if open_round is not None and open_round.number == round_ else 0.0

    def suspension(self, place: str, term: int) -> e.Suspended | None:
        """Whether a member has been told to return to the start of the round, and has not asked for work since."""
        with self.changed:
            return self._suspended.get((place, term))

    def asks(self, place: str, term: int) -> None:
        """A member has returned, and asks for work."""
        with self.changed:
            self._suspended.pop((place, term), None)
            self._assigned.pop((place, term), None)

    def require_term(self, place: str, term: int) -> None:
        """Raise TermOver if a term does not act any more."""
        if not self.coordinator.holds(place, term):
            raise TermOver(f"{place}: another process holds this slot now (incarnation {term} has ended)")

    # ---- time ----

    def halt(self) -> int:
        """Close no further round, and return the last closed one; its record can still be asked for.

        Returns after a record under way is written. Members that stop then save their states after the same round.
        """
        with self._writing:
            self._halted = True
            return max(self._written, self.coordinator.last_round)

    def end(self) -> None:
        """Stop the clock."""
        with self.changed:
            self._ended = True
            self.changed.notify_all()

    def _start_clock(self) -> None:
        with self.changed:
            if self._timer is None:
                self._timer = threading.Thread(target=self._keep_time, name="coordinator's clock", daemon=True)
                self._timer.start()

    def _keep_time(self) -> None:
        while True:
            with self.changed:
                deadline, before = self.coordinator.deadline(), self._clock()
                left = _LONGEST_SLEEP if deadline is None else min(_LONGEST_SLEEP, deadline - before)
                if left > 0:
                    self.changed.wait(left)
                if self._ended or self.failure is not None:
                    return
                slept = self._clock() - before
                due = deadline is not None and self._clock() >= deadline
            if slept > max(left, 0.0) + _OVERSLEPT:
                self.tell(e.Woke())
            elif due:
                self.tell(e.Tick())
