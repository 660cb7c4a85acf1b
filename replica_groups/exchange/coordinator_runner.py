"""Runs the rules: passes events to the coordinator, carries out its effects in the store, and wakes waiting calls.

The coordinator decides; only contributions that are too large, or that an audit excludes, are rejected here, before
their record is written. The coordinator's answers to members are kept for their calls, which wait for them.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar, cast

from hetero_pp.config.topology import MagnitudeSettings
from hetero_pp.core.errors import (
    AskAgain,
    DamagedFile,
    HeteroPPError,
    IncarnationOver,
    Refused,
    RunFailed,
    StoreError,
    Suspended,
)
from hetero_pp.core.files import FIRST_PAUSE, LONGEST_PAUSE
from hetero_pp.messages.messages_pb2 import BlobEntry, RoundRecord
from hetero_pp.pseudo_gradient.contribution import contribution_digest, scale_of
from hetero_pp.rpc.exchange_service import IsAsked, always
from replica_groups.exchange.limits import ContributionLimits
from replica_groups.exchange.log import ContributionLog
from replica_groups.exchange.magnitudes import bound, remembered_before
from replica_groups.exchange.notifier import CLOCK, EVERYBODY, Notifier
from replica_groups.exchange.stall_detector import StoreErrors
from replica_groups.rounds import events as e
from replica_groups.rounds.coordinator import Coordinator
from replica_groups.rounds.rules import Rules

T = TypeVar("T")

_LONGEST_SLEEP = 1.0
_OVERSLEPT = 3.0
"""Seconds of oversleeping that show that this process was itself frozen."""

OnEffect = Callable[[e.Effect], None]


class CoordinatorRunner:
    """One coordinator, its clock and its store. Thread-safe; callers must not hold the lock."""

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
        """`on_effect` receives every effect in order, with the lock held. Without `magnitudes` every size is allowed.

        `goes_on`: as in Coordinator; `trains_on`: as in magnitudes.bound.
        """
        self.log = log
        self.notifier = Notifier()
        self.failure: str | None = None
        self.store_errors = StoreErrors()
        incarnations = {slot: incarnation for slot, incarnation in log.incarnations().items() if slot in rules.slots}
        self.coordinator = Coordinator(rules, clock(), incarnations, goes_on)
        self._clock, self._on_effect = clock, on_effect
        self._tokens_a_step, self._magnitudes, self._trains_on = tokens_a_step or {}, magnitudes, trains_on
        self.decide_by_audits: Callable[[RoundRecord], None] = lambda record: None
        """Leaves out contributions of a record, sets weights and adds commitments, before it is written."""
        self.limits: ContributionLimits | None = None
        """Limits that follow from the configuration, once the run has begun."""
        self._welcomed: dict[str, tuple[str, int]] = {}
        """Slot -> the process that took it last, and its incarnation."""
        self._assigned: dict[tuple[str, int], e.Assign] = {}
        self._suspended: dict[tuple[str, int], e.Suspend] = {}
        self._records: dict[int, RoundRecord] = {}
        self._ended = False
        self._writing = threading.Lock()
        self._halted = False
        self._written = 0
        """Round of the last record that was written here. The coordinator hears of it a moment later."""
        self._timer: threading.Thread | None = None
        self._sleeps_until = math.inf

    @property
    def changed(self) -> threading.Condition:
        """The lock of all state, notified at every change."""
        return self.notifier.changed

    # ---- events and effects ----

    def tell(self, event: e.Event) -> Sequence[e.Effect]:
        """Pass an event to the coordinator, carry out the effects, and return the coordinator's answers."""
        answers = self._step(event)
        self._start_clock()
        todo = list(answers)
        while todo:
            follows = self._do(todo.pop(0))
            if follows is not None:
                todo.extend(self._step(follows))
        return answers

    def assume_present(self) -> None:
        """Take the holders of slots under an earlier coordinator as present (Coordinator.assume_present)."""
        with self.changed:
            self.coordinator.assume_present(self._clock())
            self.notifier.wake_all()

    def _step(self, event: e.Event) -> list[e.Effect]:
        with self.changed:
            effects = self.coordinator.step(event, self._clock())
            for effect in effects:
                if not self._is_known(effect):
                    self._note(effect)
                    self._on_effect(effect)
            self._wake(event, effects)
            return effects

    def _wake(self, event: e.Event, effects: Sequence[e.Effect]) -> None:
        """Wake the calls that an event concerns: those of its slot and of the slots that were told something."""
        if isinstance(event, e.Began | e.Recorded) or self.coordinator.is_through:
            self.notifier.wake_all()
        else:
            self.notifier.wake({slot for one in (event, *effects) if (slot := getattr(one, "slot", None))})
        if (deadline := self.coordinator.deadline()) is not None and deadline < self._sleeps_until:
            self.notifier.wake([CLOCK])

    def _is_known(self, effect: e.Effect) -> bool:
        """Return whether a member was told this already, and has not acted on it yet."""
        return isinstance(effect, e.Suspend) and self._suspended.get((effect.slot, effect.incarnation)) == effect

    def _note(self, effect: e.Effect) -> None:
        """Keep what calls wait for."""
        match effect:
            case e.Welcome(slot, process, incarnation):
                self._welcomed[slot] = process, incarnation
            case e.Assign(slot, incarnation):
                self._suspended.pop((slot, incarnation), None)
                self._assigned[slot, incarnation] = effect
            case e.Suspend(slot, incarnation):
                self._suspended[slot, incarnation] = effect
            case e.Fenced(slot, incarnation):
                self._assigned.pop((slot, incarnation), None)
                self._suspended.pop((slot, incarnation), None)
            case e.Stop(cause):
                self.fail(cause)

    def _do(self, effect: e.Effect) -> e.Event | None:
        """Carry out an effect in the store, and return the event that follows. Called without the lock."""
        match effect:
            case e.ClaimSlot(slot, incarnation, process):
                return self._claim(slot, incarnation, process)
            case e.LookUp(slot):
                return self._look_up(slot)
            case e.Write(record):
                return self._write(record)
            case e.Look(round_):
                return self._look(round_)
        return None

    def _claim(self, slot: str, incarnation: int, process: str) -> e.Event:
        operation = ("claim", slot)
        try:
            is_first = self.log.claim_incarnation(slot, incarnation)
        except (HeteroPPError, OSError) as error:
            self.store_errors.failed(operation, str(error))
            return e.NotClaimed(slot)
        self.store_errors.over(operation)
        return e.Claimed(slot, incarnation, process, is_first)

    def _look_up(self, slot: str) -> e.Event | None:
        with contextlib.suppress(HeteroPPError, OSError):
            return e.Noted(slot, self.log.incarnations().get(slot, 0))
        return None

    def _write(self, record: e.Record) -> e.Event:
        try:
            message = _message_of(record, self._tokens_a_step)
            self.decide_by_audits(message)
            if self._magnitudes is not None:
                bound(message, self._before(record.round), self._magnitudes, self._trains_on, self.limits)
            with self._writing:
                if self._halted:
                    return e.NotRecorded(record.round)
                kept = self.log.create_record(message)
                self._written = kept.round
        except (HeteroPPError, OSError) as error:
            self.store_errors.failed(("record", record.round), str(error))
            return e.NotRecorded(record.round)
        return self._recorded(kept)

    def _before(self, round_: int) -> Iterator[RoundRecord]:
        """Yield the earlier records with which a round's contributions are compared, as far as the log has them."""
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
        self.store_errors.over(("record", kept.round))
        with self.changed:
            self._records[kept.round] = kept
            wanted = {*remembered_before(kept.round + 1), kept.round}
            self._records = {round_: one for round_, one in self._records.items() if round_ in wanted}
        return e.Recorded(_record_of(kept))

    def kept(self, round_: int) -> RoundRecord:
        """Return the record of a round that was closed a moment ago."""
        return self._records[round_]

    def retry(self, do: Callable[[], T]) -> T:
        """Do what needs the store, and retry while the store cannot be reached. Raises RunFailed."""
        pause, operation = FIRST_PAUSE, object()
        try:
            while True:
                try:
                    return do()
                except StoreError as error:
                    self.store_errors.failed(operation, str(error))
                with self.changed:
                    self.changed.wait_for(lambda: self.failure is not None, pause)
                self.require_alive()
                pause = min(2 * pause, LONGEST_PAUSE)
        finally:
            self.store_errors.over(operation)

    # ---- what calls wait for ----

    def fail(self, cause: str) -> None:
        """Let every call that waits, and every later one, raise RunFailed."""
        with self.changed:
            self.failure = self.failure or cause
            self.notifier.wake_all()

    def require_alive(self) -> None:
        """Raise RunFailed if the run has failed."""
        if self.failure is not None:
            raise RunFailed(self.failure)

    def wait_until(self, condition: Callable[[], bool], is_asked: IsAsked = always, subject: str | None = None) -> None:
        """Wait until a condition holds, which is checked with the lock held, after each change of the subject.

        Without a `subject`, it is checked after every change. Raises RunFailed, or AskAgain once the caller is gone.
        """

        def is_due() -> bool:
            return self.failure is not None or condition() or not is_asked()

        with self.changed:
            if subject is None:
                self.changed.wait_for(is_due)
            else:
                self.notifier.wait_for(subject, is_due)
            self.require_alive()
            if not is_asked() and not condition():
                raise AskAgain("the caller disconnected, or has waited for the longest time of a call")

    def wake(self, slot: str) -> None:
        """Wake the waiting calls of a slot, because their caller may be gone."""
        self.notifier.wake([slot])

    def wait_for_incarnation(self, slot: str, process: str, is_asked: IsAsked = always) -> int:
        """Wait until an applicant holds a slot; return its incarnation. Raises Refused if another has applied since."""
        with self.changed:
            self.wait_until(
                lambda: self._incarnation_of(slot, process) is not None or not self.coordinator.applies(process, slot),
                is_asked,
                slot,
            )
            if (incarnation := self._incarnation_of(slot, process)) is None:
                raise Refused(f"{slot}: another process has requested this slot in the meantime")
            return incarnation

    def _incarnation_of(self, slot: str, process: str) -> int | None:
        """Return the incarnation with which a process took a slot, if it was the last one to take it."""
        newest, incarnation = self._welcomed.get(slot, ("", 0))
        return incarnation if newest == process else None

    def wait_for_work(self, slot: str, incarnation: int, is_asked: IsAsked = always) -> e.Assign:
        """Wait for the assignment of a member that has asked for work. Raises IncarnationOver."""
        with self.changed:
            self.wait_until(
                lambda: (slot, incarnation) in self._assigned or not self.coordinator.holds(slot, incarnation),
                is_asked,
                slot,
            )
            self.require_incarnation(slot, incarnation)
            return self._assigned[slot, incarnation]  # and leave it: a call whose caller is gone may have waited, too

    def wait_for_record(
        self, round_: int, slot: str | None = None, incarnation: int | None = None, is_asked: IsAsked = always
    ) -> RoundRecord:
        """Wait until a round is decided, and return its record.

        For a member: raises IncarnationOver, and Suspended if its replica has to train the round again. For a round
        that only the log has: raises DamagedFile, FileNotFoundError.
        """

        def is_due() -> bool:
            is_over = incarnation is not None and slot is not None and not self.coordinator.holds(slot, incarnation)
            return round_ <= self.coordinator.last_round or (slot, incarnation) in self._suspended or is_over

        with self.changed:
            self.wait_until(is_due, is_asked, slot or EVERYBODY)
            if round_ > self.coordinator.last_round and slot is not None and incarnation is not None:
                self.require_incarnation(slot, incarnation)
                raise Suspended(self._suspended[slot, incarnation].cause)
            if round_ in self._records:
                return self._records[round_]
        return self.retry(lambda: self.log.read_record(round_))

    def elapsed(self, round_: int) -> float:
        """Return the seconds since a round opened; 0 if it is not the open one."""
        opened_at = self.coordinator.opened_at(round_)
        return 0.0 if opened_at is None else self._clock() - opened_at

    def suspension(self, slot: str, incarnation: int) -> e.Suspend | None:
        """Return the order to return to the start of the round, if the member has not asked for work since."""
        with self.changed:
            return self._suspended.get((slot, incarnation))

    def asks(self, slot: str, incarnation: int) -> None:
        """Note that a member has returned, and asks for work."""
        with self.changed:
            self._suspended.pop((slot, incarnation), None)
            self._assigned.pop((slot, incarnation), None)

    def require_incarnation(self, slot: str, incarnation: int) -> None:
        """Raise IncarnationOver if an incarnation is over."""
        if not self.coordinator.holds(slot, incarnation):
            raise IncarnationOver(f"{slot}: another process holds this slot now (incarnation {incarnation} has ended)")

    # ---- time ----

    def halt(self) -> int:
        """Close no further round, and return the last closed one; its record can still be read.

        Returns after a record in progress is written, so that members that stop save their states after the same round.
        """
        with self._writing:
            self._halted = True
            return max(self._written, self.coordinator.last_round)

    def end(self) -> None:
        """Stop the clock."""
        with self.changed:
            self._ended = True
            self.notifier.wake([CLOCK])

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
                    self._sleeps_until = before + left
                    self.notifier.pause(CLOCK, left)
                    self._sleeps_until = -math.inf
                if self._ended or self.failure is not None:
                    return
                slept = self._clock() - before
                due = deadline is not None and self._clock() >= deadline
            if slept > max(left, 0.0) + _OVERSLEPT:
                self.tell(e.Woke())
            elif due:
                self.tell(e.Tick())


def _message_of(record: e.Record, tokens_a_step: Mapping[str, int]) -> RoundRecord:
    """Return the message of a record, without its digest. `tokens_a_step`: replica -> tokens, where known."""
    message = RoundRecord(round=record.round, late=record.late)
    for one in record.contributions:
        blobs = [cast(BlobEntry, entry) for entry in one.blobs.values()]
        message.contributions.add(
            replica=one.replica,
            generation=one.generation,
            weight=one.weight,
            steps=one.steps,
            tokens=one.steps * tokens_a_step.get(one.replica, 0),
            digest=contribution_digest(blobs),
            blobs=blobs,
        )
    return message


def _record_of(message: RoundRecord) -> e.Record:
    """Return the record that the rules take from a message."""
    included = []
    for one in message.contributions:
        blobs = {blob.block: blob for blob in one.blobs}
        included.append(e.Contribution(one.replica, one.generation, one.steps, one.weight, blobs, scale_of(one)))
    return e.Record(message.round, tuple(included), tuple(message.late), tuple(message.left_out))
