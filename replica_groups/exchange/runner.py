"""Runs the rules: passes events to the coordinator, carries out its effects in the store, and wakes waiting calls.

The coordinator decides; only contributions that are too large, or that an audit excludes, are rejected here, before
their record is written. The coordinator's answers to members are kept for their calls, which wait for them. The
state of the run beside the coordinator's, and the checks that every request passes, share its lock.
"""

from __future__ import annotations

import contextlib
import math
import sys
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from hetero_pp.config.changes import NO_CHANGES
from hetero_pp.config.lines import EXCHANGE
from hetero_pp.config.spec import Roster, RunSpec
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
from hetero_pp.messages import messages_pb2 as pb
from hetero_pp.messages.messages_pb2 import Refusal, RoundRecord
from hetero_pp.messages.refusals import Kind, Refusals
from hetero_pp.pseudo_gradient.contribution import contribution_digest
from hetero_pp.rpc.exchange_service import Caller, IsAsked, always
from replica_groups.exchange.log import ContributionLog
from replica_groups.exchange.magnitudes import ContributionLimits, bound, remembered_before
from replica_groups.exchange.memberships import Memberships
from replica_groups.rounds import events as e
from replica_groups.rounds.coordinator import Coordinator
from replica_groups.rounds.rules import Rules, most_steps

T = TypeVar("T")

SECONDS_BETWEEN_LOOKS = 5.0
"""Interval at which a waiting call checks whether its caller is there; shorter than the calls' own time limit."""

EVERYBODY = ""  # subject of changes that wake all calls: the run begins, a round closes, the run fails or is through

CLOCK = " "  # Subject of a change of the time at which something is due. No slot has such a name.

_FORGOTTEN = 2 * LONGEST_PAUSE
"""Seconds after which an operation that is not retried any more, because nobody needs it, is forgotten."""

_LONGEST_SLEEP = 1.0
_OVERSLEPT = 3.0  # seconds of oversleeping that show that this process was itself frozen


class Notifier:
    """Waiting calls by subject: the name of a slot, or another text. All share one lock.

    A change wakes only the calls that wait for its subject. With one condition for all, each heartbeat would wake every
    waiting call: a million switches of threads per second with a thousand members.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)  # the lock, and the wait for a change of any subject
        self._waiting: dict[str, set[threading.Condition]] = {}

    def wait_for(self, subject: str, is_so: Callable[[], bool]) -> None:
        """Wait until `is_so`, called with the lock held, returns True. The caller holds the lock."""
        while not is_so():
            self.pause(subject, SECONDS_BETWEEN_LOOKS)

    def pause(self, subject: str, seconds: float) -> None:
        """Wait until the subject changes, or for so many seconds. The caller holds the lock."""
        own = threading.Condition(self.lock)
        waiting = self._waiting.setdefault(subject, set())
        waiting.add(own)
        own.wait(seconds)
        waiting.discard(own)

    def wake(self, subjects: Iterable[str]) -> None:
        """Wake the calls that wait for these subjects, and those that wait for any change."""
        with self.lock:
            for subject in subjects:
                for one in self._waiting.get(subject, ()):
                    one.notify()
            self.changed.notify_all()

    def wake_all(self) -> None:
        self.wake(self._waiting)


class AuditHook:
    """Audits of a run that has none: nothing is attached to blobs, shown, or left out of a round.

    replica_groups/audit has those of others.
    """

    def __init__(self, refused: Callable[[str, str], Refused]) -> None:
        """`refused` counts a refusal of a sender, with its reason."""
        self._refused = refused

    # ---- the run ----

    def admit(self, guests: Memberships | None, authority: bytes | None) -> None:
        """Take the members with a ticket, and the certificate (PEM) of the authority; None: there are none of them."""

    def prepare(self, last_round: int, spec: RunSpec | None) -> None:
        """Do what has to be done before the round after `last_round` opens."""

    def begin(self, last_round: int) -> None:
        """Begin or resume after a round."""

    def end(self) -> None:
        """End all waits, because the members have left after the last round."""

    # ---- a round ----

    def attach(self, member: str, round_: int, generation: int, commitment: pb.Commitment, holder: int) -> str | None:
        """Keep what came with a blob that is awaited; return a complaint if it is to be refused."""
        return None

    def decide(self, record: pb.RoundRecord) -> None:
        """Change a record that nobody has read yet: leave out contributions, set weights, add commitments."""

    def why(self, round_: int, replica: str) -> str:
        """Return why an audit left a replica out of a round; empty if none did."""
        return ""

    def closed(self, record: pb.RoundRecord) -> None:
        """Note that a round is closed. The caller holds the lock of the decisions."""

    def differed(self, replica: str, round_: int) -> None:
        """Note that a replica's parameters after a round differ from the log's, so it begins the next one with them."""

    def judge(self, request: pb.JudgeRequest, caller: Caller) -> pb.Nothing:
        """Take judgements of a validator. Raises Refused for all of them if one is wrong, or nobody asked for any."""
        raise Refused("this run has no audits: its YAML has neither `audit.gauntlet` nor `audit.recompute`")

    # ---- what members show ----

    def asks(self, member: str, holder: int, incarnation: int) -> pb.Asked | None:
        """Return what a member has to show, if there is anything."""
        return None

    def expected(self, member: str) -> bytes:
        """Return the digest of the state with which a member begins the open round; empty: a fresh one."""
        return b""

    def expect_file(self, header: pb.ShownFile, caller: Caller) -> None:
        """Raise Refused for a file that a member was not asked for, or that is too large."""
        reason = "shows a file, and no audit of this run asks for any"
        raise self._refused(caller.name, reason)

    def lacks_room(self, header: pb.ShownFile, caller: Caller) -> None:
        """Note that the exchange has no room for an expected file, which is not the member's fault."""

    def take_file(self, header: pb.ShownFile, path: Path, caller: Caller) -> None:
        """Take a file that has arrived. Raises Refused as `expect_file`, and if a member committed to another."""
        self.expect_file(header, caller)


@dataclass
class _StoreError:
    why: str
    since: float
    tried: float  # time of its last failure
    told: float  # time at which it was last printed


class StoreErrors:
    """Operations of one exchange that fail. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: dict[Hashable, _StoreError] = {}

    def failed(self, operation: Hashable, why: str) -> None:
        """Note that an operation has failed and will be retried. Prints its failures at intervals."""
        with self._lock:
            now, known = time.monotonic(), self._found.get(operation)
            if known is None:
                known = self._found[operation] = _StoreError(why, now, now, -LONGEST_PAUSE)
            is_due = why != known.why or now - known.told >= LONGEST_PAUSE
            known.why, known.tried = why, now
            if is_due:
                known.told = now
        if is_due:
            print(f"{EXCHANGE}: {why}; retrying", file=sys.stderr, flush=True)

    def over(self, operation: Hashable) -> None:
        """Note that an operation has succeeded, or is not needed any more."""
        with self._lock:
            self._found.pop(operation, None)

    def oldest(self) -> tuple[str, float] | None:
        """Return the cause of the operation that has failed for longest, and its seconds; None if nothing fails."""
        with self._lock:
            now = time.monotonic()
            self._found = {key: one for key, one in self._found.items() if now - one.tried < _FORGOTTEN}
            first = min(self._found.values(), key=lambda one: one.since, default=None)
            return None if first is None else (first.why, now - first.since)


class CoordinatorRunner:
    """One coordinator, its clock and its store. Thread-safe; callers must not hold the lock."""

    def __init__(
        self,
        run: str,
        roster: Roster,
        rules: Rules,
        log: ContributionLog,
        rounds: int,
        on_effect: Callable[[e.Effect], None],
        tell_refusal: Callable[[Refusal], None],
        goes_on: bool = False,
        tokens_a_step: Mapping[str, int] | None = None,
        magnitudes: MagnitudeSettings | None = None,
        trains_on: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`on_effect` receives every effect in order, with the lock held. Without `magnitudes` every size is allowed.

        `goes_on`: another process was this run's exchange a moment ago, and members may be there still. `trains_on`: as
        in magnitudes.bound.
        """
        self.run, self.roster, self.log, self.rounds, self.goes_on = run, roster, log, rounds, goes_on
        self.refusals = Refusals(tell_refusal)
        self.changes = NO_CHANGES  # keys that were changed when the run resumed
        self.planned = rounds  # number of rounds to show: an estimate, if the run ends after a number of tokens
        self.begun_after = 0  # last decided round when this exchange began the run
        self.names: frozenset[str] = frozenset()  # names of all parameters, once the run has begun
        self.notifier = Notifier()
        self.failure: str | None = None
        self.store_errors = StoreErrors()
        incarnations = {slot: incarnation for slot, incarnation in log.incarnations().items() if slot in rules.slots}
        self._incarnations_before = {slot: incarnation for slot, incarnation in incarnations.items() if incarnation}
        self._hearing = threading.Lock()
        """A lock of its own, because with the other each frame of a member would wait for all other members."""
        self._heard: dict[str, float] = {}
        self.coordinator = Coordinator(rules, clock(), incarnations, goes_on)
        self._clock, self._on_effect = clock, on_effect
        self._tokens_a_step, self._magnitudes, self._trains_on = tokens_a_step or {}, magnitudes, trains_on
        self.audits = AuditHook(self.refused)  # audits of the run; replaced before the run begins, if it is audited
        self.limits: ContributionLimits | None = None
        """Limits that follow from the configuration, once the run has begun."""
        self._welcomed: dict[str, tuple[str, int]] = {}  # slot -> the process that took it last, and its incarnation
        self._assigned: dict[str, e.Assign] = {}  # by slot, until its holder asks for work again
        self._suspended: dict[str, e.Suspend] = {}
        self._records: dict[int, RoundRecord] = {}
        self._ended = False
        self._writing = threading.Lock()
        self._halted = False
        self._written = 0  # Round of the last record that was written here. The coordinator hears of it a moment later.
        self._timer: threading.Thread | None = None
        self._sleeps_until = math.inf

    @property
    def changed(self) -> threading.Condition:
        """The lock of all state, notified at every change."""
        return self.notifier.changed

    # ---- what every request is checked for ----

    @property
    def has_begun(self) -> bool:
        """Whether the first round of the run is open, or was."""
        return self.coordinator.rounds is not None

    def wait_until_begun(self, is_asked: IsAsked = always) -> None:
        """Wait until all members have joined and the run begins."""
        self.wait_until(lambda: self.has_begun, is_asked, subject=EVERYBODY)

    def require_begun(self, member: str, is_asked: IsAsked = always) -> None:
        """Raise Refused if the run has not begun. An exchange that takes over from another lets members wait."""
        if self.goes_on:
            self.wait_until_begun(is_asked)
        if not self.has_begun:
            raise self.refused(member, "the run has not started: some members have not joined")

    def expect_member(self, member: str) -> None:
        """Raise Refused for a name that is no member's."""
        if member not in self.roster.members:
            raise self.refused(member, "is not a member of this run", Kind.FORBIDDEN)

    def incarnation(self, caller: Caller) -> int:
        """Return the caller's incarnation: the one it names, else the current one of its slot."""
        self.expect_member(caller.name)
        return self.coordinator.slots[caller.name].incarnation if caller.incarnation is None else caller.incarnation

    def group_of(self, member: str) -> Sequence[str]:
        """Return the slots of a member's replica, in the order of stages."""
        return self.coordinator.rules.slots_of(self.roster.members[member])

    def neighbours(self, member: str) -> tuple[str, str]:
        """Return the slots before and after a member's; empty where there is none."""
        slots = ["", *self.group_of(member), ""]
        index = slots.index(member)
        return slots[index - 1], slots[index + 1]

    def refused(self, sender: str, reason: str, kind: Kind = Kind.UNEXPECTED) -> Refused:
        """Count a refusal, and return the error to raise."""
        self.refusals.add(sender, reason, kind)
        return Refused(f"{sender}: {reason}")

    def heard(self, member: str, incarnation: int | None = None) -> None:
        """Note a sign of life of a member, and the incarnation that it says it has.

        A member from before this exchange started shows that the run is under way: its slots are presumed held.
        """
        if member not in self.roster.members:
            return
        with self._hearing:
            self._heard[member] = time.monotonic()
        if self.goes_on or self.has_begun or incarnation is None:
            return
        if incarnation != self._incarnations_before.get(member):
            return
        with self.changed:
            if incarnation == self.coordinator.slots[member].incarnation and not self.goes_on and not self.has_begun:
                self.goes_on = True
                self.coordinator.assume_present(self._clock())
                self.notifier.wake_all()

    @property
    def last_heard(self) -> Mapping[str, float]:
        """Member -> time of its last sign of life, by the monotonic clock."""
        with self._hearing:
            return dict(self._heard)

    # ---- events and effects ----

    def tell(self, event: e.Event) -> Sequence[e.Effect]:
        """Pass an event to the coordinator, carry out the effects, and return the coordinator's answers."""
        answers = self._step(event)
        with self.changed:
            if self._timer is None:
                self._timer = threading.Thread(target=self._keep_time, name="coordinator's clock", daemon=True)
                self._timer.start()
        todo = list(answers)
        while todo:
            follows = self._do(todo.pop(0))
            if follows is not None:
                todo.extend(self._step(follows))
        return answers

    def _step(self, event: e.Event) -> list[e.Effect]:
        with self.changed:
            effects = self.coordinator.step(event, self._clock())
            for effect in effects:
                self._note(effect)
                self._on_effect(effect)
            # Calls that the event concerns: those of its slot and of the slots that were told something.
            if isinstance(event, e.Began | e.Recorded) or self.coordinator.is_through:
                self.notifier.wake_all()
            else:
                self.notifier.wake({slot for one in (event, *effects) if (slot := getattr(one, "slot", None))})
            if (deadline := self.coordinator.deadline()) is not None and deadline < self._sleeps_until:
                self.notifier.wake([CLOCK])
            return effects

    def _note(self, effect: e.Effect) -> None:
        """Keep what calls wait for."""
        match effect:
            case e.Welcome(slot, incarnation, process):
                self._welcomed[slot] = process, incarnation
            case e.Assign(slot):
                self._suspended.pop(slot, None)
                self._assigned[slot] = effect
            case e.Suspend(slot):
                self._suspended[slot] = effect
            case e.Stop(cause):
                self.fail(cause)

    def _do(self, effect: e.Effect) -> e.Event | None:
        """Carry out an effect in the store, and return the event that follows. Called without the lock."""
        match effect:
            case e.ClaimSlot(slot, incarnation, process):
                try:
                    is_first = self.log.claim_incarnation(slot, incarnation)
                except (HeteroPPError, OSError) as error:
                    self.store_errors.failed(("claim", slot), str(error))
                    return e.NotClaimed(slot)
                self.store_errors.over(("claim", slot))
                return e.Claimed(slot, incarnation, process, is_first)
            case e.LookUp(slot):
                with contextlib.suppress(HeteroPPError, OSError):
                    return e.Noted(slot, self.log.incarnations().get(slot, 0))
            case e.Write(record):
                return self._write(record)
            case e.Look(round_):
                with contextlib.suppress(HeteroPPError, OSError):
                    return self._recorded(self.log.read_record(round_))
        return None

    def _write(self, record: RoundRecord) -> e.Event:
        try:
            for one in record.contributions:
                one.tokens = one.steps * self._tokens_a_step.get(one.replica, 0)
                one.digest = contribution_digest(one.blobs)
            self.audits.decide(record)
            if self._magnitudes is not None:
                before, fragments = self._before(record.round), self.coordinator.rules.fragments.count
                bound(record, before, self._magnitudes, self._trains_on, self.limits, fragments)
            record.tokens = self.tokens_until(record)
            with self._writing:
                if self._halted:
                    return e.NotRecorded(record.round)
                kept = self.log.create_record(record)
                self._written = kept.round
        except (HeteroPPError, OSError) as error:
            self.store_errors.failed(("record", record.round), str(error))
            return e.NotRecorded(record.round)
        return self._recorded(kept)

    def tokens_until(self, record: RoundRecord) -> int:
        """Return the tokens of the contributions of all rounds up to a record's.

        Members report their own steps in rounds of a given time, so they count as for weights: one replica cannot end a
        run that ends after a number of tokens.
        """
        known = self._records.get(record.round - 1)
        before = self.log.tokens_after(record.round - 1) if known is None else known.tokens
        most = most_steps([one.steps for one in record.contributions])
        return before + sum(
            min(one.steps, most) * self._tokens_a_step.get(one.replica, 0) for one in record.contributions
        )

    def _before(self, round_: int) -> Iterator[RoundRecord]:
        """Yield the earlier records with which a round's contributions are compared, as far as the log has them."""
        for earlier in remembered_before(round_, self.coordinator.rules.fragments.count):
            with contextlib.suppress(DamagedFile, FileNotFoundError):
                record = self._records.get(earlier) or self.log.read_record(earlier)
                with self.changed:
                    self._records[earlier] = record
                yield record

    def _recorded(self, kept: RoundRecord) -> e.Event:
        self.store_errors.over(("record", kept.round))
        with self.changed:
            self._records[kept.round] = kept
            fragments = self.coordinator.rules.fragments.count
            of_next = (remembered_before(kept.round + 1 + more, fragments) for more in range(fragments))
            wanted = {kept.round}.union(*of_next)
            self._records = {round_: one for round_, one in self._records.items() if round_ in wanted}
        return e.Recorded(kept)

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

        def is_due() -> bool:
            own = self._assigned.get(slot)
            is_assigned = own is not None and own.incarnation == incarnation
            return is_assigned or not self.coordinator.holds(slot, incarnation)

        with self.changed:
            self.wait_until(is_due, is_asked, slot)
            self.require_incarnation(slot, incarnation)
            return self._assigned[slot]  # and leave it: a call whose caller is gone may have waited, too

    def wait_for_record(
        self, round_: int, slot: str | None = None, incarnation: int | None = None, is_asked: IsAsked = always
    ) -> RoundRecord:
        """Wait until a round is decided, and return its record.

        For a member: raises IncarnationOver, and Suspended if its replica has to train the round again. For a round
        that only the log has: raises DamagedFile, FileNotFoundError.
        """

        def is_due() -> bool:
            if round_ <= self.coordinator.last_round or slot is None or incarnation is None:
                return round_ <= self.coordinator.last_round
            return not self.coordinator.holds(slot, incarnation) or self.suspension(slot, incarnation) is not None

        with self.changed:
            self.wait_until(is_due, is_asked, slot or EVERYBODY)
            if round_ > self.coordinator.last_round and slot is not None and incarnation is not None:
                self.require_incarnation(slot, incarnation)
                raise Suspended(self._suspended[slot].cause)
            if round_ in self._records:
                return self._records[round_]
        return self.retry(lambda: self.log.read_record(round_))

    def elapsed(self, round_: int) -> float:
        """Return the seconds since a round opened; 0 if it is not the open one."""
        opened = self.coordinator.open
        return 0.0 if opened is None or opened.number != round_ else self._clock() - opened.opened_at

    def suspension(self, slot: str, incarnation: int) -> e.Suspend | None:
        """Return the order to return to the start of the round, if the member has not asked for work since."""
        with self.changed:
            found = self._suspended.get(slot)
            is_own = found is not None and found.incarnation == incarnation
            return found if is_own and self.coordinator.holds(slot, incarnation) else None

    def asks(self, slot: str, incarnation: int) -> None:
        """Note that a member has returned, and asks for work."""
        with self.changed:
            if self.coordinator.holds(slot, incarnation):
                self._suspended.pop(slot, None)
                self._assigned.pop(slot, None)

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
