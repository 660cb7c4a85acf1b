"""Reports: checks those of members, acts on failures and on ends, and passes all on to the watchers.

Members may send too many reports, or false numbers and times, so each report is checked before it is used. Decisions of
the rules become reports of the exchange itself.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError

from hetero_pp.config.lines import EXCHANGE
from hetero_pp.config.spec import Roster
from hetero_pp.core.errors import DamagedFile, StoreError, TooMuch
from hetero_pp.core.files import write_whole
from hetero_pp.core.progress import steady_clock
from hetero_pp.messages import messages_pb2 as pb
from hetero_pp.messages.messages_pb2 import Report
from hetero_pp.messages.refusals import Kind
from hetero_pp.messages.report_bounds import ReportBounds, complaint, limit_diverged
from hetero_pp.rpc.exchange_service import Caller, IsAsked, always
from hetero_pp.store.store import Store
from replica_groups.exchange.log import ContributionLog
from replica_groups.exchange.runner import CoordinatorRunner
from replica_groups.exchange.tally import Tally
from replica_groups.rounds import events as e

REMEMBERED_REPORTS = 10_000  # number of past reports that a new watcher receives

SECONDS_BETWEEN_LOOKS = 0.5  # interval at which it is checked whether a watcher is still there

_CONCERN_ALL = ("joined", "waiting", "begun", "reading", "failure", "membership_event", "over", "so_far")

TRIES = 8  # number of times that one round may be reported, because a replica that reforms trains its round again
ROUNDS_BEFORE = 8  # rounds added to those of the run, for reports before the first round and after the last
_LINK_REPORTS_A_SECOND = 4.0  # Reports per second for one direction of one link. A member sends two while it trains.
_ACTIVITIES_A_SECOND = 4.0  # a member sends at most two
_REFUSALS_A_SECOND, _REFUSALS_AT_ONCE = 2.0, 100
"""A member reports 20 refusals at once and then one a second; each process that takes its slot may do so again."""

DEVICE_CHARACTERS = 80  # characters of the name of a device
REFUSAL_CHARACTERS = 200
"""Characters of each text of a reported refusal. Only refusals grow with time instead of with rounds."""


class Reports:
    """Reports of one run. Thread-safe."""

    def __init__(
        self,
        runner: CoordinatorRunner,
        bounds: ReportBounds,
        so_far: Path | None = None,
        shared: Store | None = None,
    ) -> None:
        """`so_far`: file that keeps the counters of the run; without one they end with this process.

        `shared`: store that gets a copy of it.
        """
        roster, optional = runner.roster.members, runner.coordinator.rules.optional
        self.tally = Tally(roster, lambda round_: set(roster.values()) - optional)
        self.watchers = Watchers(self.tally, self.now)
        self._so_far, self._shared = so_far, shared
        self.steps_told = 0  # number of inner steps that members have reported
        self.devices: dict[str, str] = {}
        """Member -> name of the device on which it computes, as its present process has reported."""
        self._runner = runner
        self._reports, self._reporting = MemberReports(runner.roster, bounds), threading.Lock()
        self._failed: dict[str, str] = {}
        """Member -> replica, of members that reported their failure and whose slot nobody has taken since."""

    def report(self, request: pb.ReportRequest, caller: Caller) -> pb.Nothing:
        """Pass on what is in range, then raise Refused if something was not.

        A failure that is the consequence of another ends nothing, because its member joins again. Nor does the failure
        of a process whose slot another process has taken: it cannot join again after its incarnation.
        """
        complaints = []
        for report in request.reports:
            why = None if report.member == EXCHANGE else self._complaint(report)
            if why is None:
                self._pass_on(report, caller.incarnation)
            else:
                complaints.append(self._runner.refused(report.member, why, Kind.MALFORMED))
        if complaints:
            raise complaints[0]
        return pb.Nothing()

    def _complaint(self, report: pb.Report) -> str | None:
        """Return why a member's report is refused; None if it is not."""
        runner = self._runner
        with runner.changed:
            newest = min(runner.coordinator.last_round + 1 + runner.coordinator.rules.overlap, runner.rounds)
            if runner.goes_on and not runner.has_begun:
                newest = runner.rounds  # members train already, and the log is being read
        with self._reporting:
            return self._reports.check(report, newest)

    def check_verified(self, member: str) -> str | None:
        """Return why a hash that a member's confirmation completes is not reported; None if it is."""
        with self._reporting:
            return self._reports.count(member, "round_verified", self._runner.coordinator.last_round)

    def _pass_on(self, report: pb.Report, incarnation: int | None) -> None:
        member, runner, coordinator = report.member, self._runner, self._runner.coordinator
        is_member = member in runner.roster.members
        if report.HasField("failure") and is_member and incarnation is not None:
            # Another process has taken the slot since, or the exchange has given the member up.
            report.failure.consequence |= not coordinator.holds(member, incarnation)
        fails = report.HasField("failure") and not report.failure.consequence
        if fails and is_member and not self._ends_run(member):
            runner.tell(e.Died(member, incarnation, report.failure.cause))
            return
        self._tell([report])
        runner.heard(member)
        match report.WhichOneof("event"):
            case "computes":
                self.devices[member] = report.computes.device
            case "inner_step":
                with runner.changed:
                    self.steps_told += 1
            case "finished" if is_member:
                runner.tell(e.Left(member, runner.incarnation(Caller(member, incarnation))))
            case "failure" if fails:
                cause = report.failure.cause
                runner.fail(cause if member == EXCHANGE else f"{member}: {cause}")

    def _ends_run(self, member: str) -> bool:
        """Return whether a failure leaves too few replicas, so that the run would wait forever.

        Otherwise the slot becomes vacant. Before the run begins, the failure of any required member ends it.
        """
        runner = self._runner
        replica, rules = runner.roster.members[member], runner.coordinator.rules
        with runner.changed:
            if not runner.has_begun:
                return replica not in rules.optional
            self._failed[member] = replica
            return not runner.coordinator.is_over and rules.is_lost_without(self._failed.values())

    def joined(self, member: str, address: str, incarnation: int) -> None:
        """Report that a process has taken a slot, and forget the failure of the one before."""
        with self._runner.changed:
            self._failed.pop(member, None)
            self.devices.pop(member, None)
        self._tell([pb.Report(member=member, joined=pb.Joined(address=address, incarnation=incarnation))])

    def now(self) -> float:
        """Return the seconds since 1970, by the clock that dates reports."""
        with self._reporting:
            return self._reports.now()

    def keep_so_far(self) -> None:
        """Write the counters to the disk. A disk that does not take them fails nothing: records have the rounds."""
        if self._so_far is not None:
            told = pb.ReportRequest(reports=self.watchers.so_far()).SerializeToString()
            with suppress(OSError, StoreError):
                write_whole(self._so_far, told)
                if self._shared is not None:
                    self._shared.put(self._so_far.name, told)

    def count_on(self, log: ContributionLog, last_round: int) -> None:
        """Continue to count where an earlier process of the exchange has ended; the run goes on after `last_round`.

        Rounds beyond those of the file, or all if it has later ones that are undone, are counted from their records.
        """
        kept, now, holds = pb.ReportRequest(), self.now(), self._runner.goes_on
        if self._so_far is not None:
            with suppress(OSError, DecodeError):
                kept = pb.ReportRequest.FromString(self._so_far.read_bytes())
        if not (kept.reports or last_round):
            return  # a new run
        *newest, last = [*kept.reports] or [pb.Report(time=now)]
        told, since = last.so_far, max(0.0, now - last.time) if holds else 0.0  # members were there all the time
        told.seconds += since
        told.training_seconds += since if told.training_seconds else 0.0
        if told.last_round > last_round:
            told.last_round = 0
            told.ClearField("credits")
        records = []
        for round_ in range(told.last_round + 1, last_round + 1):
            with suppress(DamagedFile, FileNotFoundError):
                records.append(log.read_record(round_))
        self.watchers.count_on(told, newest if holds else [], records, now)

    def tell_own(self, **event: Any) -> None:
        """Pass on a report of the exchange itself, given by the field of its event."""
        self._tell([pb.Report(member=EXCHANGE, **event)])

    def _tell(self, reports: Sequence[pb.Report]) -> None:
        """Date reports by one clock that is never set back, and pass them on in that order."""
        with self._reporting:
            for report in reports:
                if report.member == EXCHANGE:
                    report.time = self._reports.now()
                else:
                    self._reports.take(report)
            self.watchers.tell(reports)


class MemberReports:
    """Checks reports of members: their numbers, how many there are, and their times. Not thread-safe."""

    def __init__(self, roster: Roster, bounds: ReportBounds, clock: Callable[[], float] | None = None) -> None:
        """`clock`: seconds since 1970, by default those of a steady clock."""
        self._roster, self._bounds, self._clock = roster, bounds, clock or steady_clock()
        self._directions = Counter(roster.counts.values())
        self._told: Counter[tuple[str, str]] = Counter()  # (member, event) -> accepted reports
        self._newest: dict[str, float] = {}  # member -> time of its newest report, by this process's clock
        self._now = self._first = self._clock()

    def now(self) -> float:
        """Return the seconds since 1970, never less than before."""
        self._now = max(self._now, self._clock())
        return self._now

    def check(self, report: pb.Report, last_round: int) -> str | None:
        """Return why a report is refused; None if it is accepted. `last_round`: newest round that may be trained."""
        if (found := complaint(report, last_round, self._bounds)) is not None:
            return found
        if report.HasField("refusal") and report.refusal.kind not in frozenset(Kind):
            return f"`refusal.kind`: got `{report.refusal.kind[:40]}`, expected one of: {', '.join(Kind)}"
        return self.count(report.member, report.WhichOneof("event") or "", last_round)

    def count(self, sender: str, event: str, last_round: int) -> str | None:
        """Count one more report; return why it is refused, if a member cannot have sent as many by now."""
        most, seconds = TRIES * (last_round + ROUNDS_BEFORE), self._clock() - self._first
        match event:
            case "inner_step":
                most *= self._bounds.steps
            case "link_use":
                most = max(1, self._directions[sender]) * (most + math.ceil(_LINK_REPORTS_A_SECOND * seconds))
            case "activity":
                most += math.ceil(_ACTIVITIES_A_SECOND * seconds)
            case "refusal":
                most = _REFUSALS_AT_ONCE + math.ceil(_REFUSALS_A_SECOND * seconds)
        if self._told[sender, event] >= most:
            return f"`{event}`: got more than {most} reports up to round {last_round}"
        self._told[sender, event] += 1
        return None

    def take(self, report: pb.Report) -> None:
        """Date an accepted report, and bring its numbers into their ranges.

        Its time becomes the exchange's time of its arrival, less its age when it was sent. A member cannot date a
        report before its previous one.
        """
        now = self.now()
        age = report.sent - report.time if report.HasField("sent") else 0.0
        made = now - age if 0 < age < math.inf else now
        if report.HasField("refusal"):
            refusal = report.refusal
            refusal.sender, refusal.reason = (text[:REFUSAL_CHARACTERS] for text in (refusal.sender, refusal.reason))
        if report.HasField("computes"):
            report.computes.device = report.computes.device[:DEVICE_CHARACTERS]
        report.time = self._newest[report.member] = max(made, self._newest.get(report.member, self._first))
        limit_diverged(report)


class _WatchCall:
    """Reports on their way to one watcher: a bounded number. A watcher that reads too slowly is cut."""

    def __init__(self, most: float, is_of_members: bool = False) -> None:
        """`is_of_members`: it gets the reports of some members only, and so cannot count for the whole run."""
        self.is_cut, self.is_of_members = False, is_of_members
        self._most = most
        self._reports: queue.SimpleQueue[Report | bytes | None] = queue.SimpleQueue()

    def put(self, report: Report | bytes | None) -> None:
        """Queue a report; None: the last one."""
        if self._reports.qsize() >= self._most:
            self.is_cut = True
        if not self.is_cut:
            self._reports.put(report)

    def get(self) -> Report | None:
        """Return a report. Raises queue.Empty after a while, TooMuch if the watcher is cut."""
        if self.is_cut:
            raise TooMuch(f"found {self._most} unread reports, expected fewer")
        found = self._reports.get(timeout=SECONDS_BETWEEN_LOOKS)
        return Report.FromString(found) if isinstance(found, bytes) else found


class Watchers:
    """Distributes every report to all watchers. Thread-safe."""

    def __init__(self, tally: Tally | None = None, clock: Callable[[], float] = time.time) -> None:
        self.reported = 0  # number of reports so far
        self._tally, self._clock = tally or Tally({}, lambda _: ()), clock
        self._lock = threading.Lock()
        self._watchers: list[_WatchCall] = []
        self._reports: deque[bytes] = deque(maxlen=REMEMBERED_REPORTS)  # as messages they would take five times as much
        self._ended = False

    def tell(self, reports: Sequence[Report]) -> None:
        """Pass reports to all watchers, in this order."""
        with self._lock:
            self._reports.extend(report.SerializeToString() for report in reports)
            self.reported += len(reports)
            for report in reports:
                self._tally.apply(report)
                for watcher in self._watchers:
                    if report.HasField("over") and watcher.is_of_members:
                        watcher.put(self._told(report.time))
                    watcher.put(report)

    def so_far(self) -> list[Report]:
        """Return the state of the run: the newest report on each thing that holds now, and then the counters."""
        now = self._clock()
        with self._lock:
            return [*self._tally.newest(), self._told(now)]

    def last_change(self, slot: str) -> tuple[float, str] | None:
        """Return the seconds since a slot was taken, lost or suspended, and why it was; None if it never was."""
        now = self._clock()
        with self._lock:
            found = self._tally.last_change(slot)
        return None if found is None else (max(0.0, now - found.time), found.membership_event.cause)

    def _told(self, now: float) -> Report:
        return Report(time=now, member=EXCHANGE, so_far=self._tally.told(now))

    def count_on(self, told: pb.SoFar, newest: Sequence[Report], records: Sequence[pb.RoundRecord], now: float) -> None:
        """Begin with the counters of an earlier process and the reports that still hold, and count `records`."""
        with self._lock:
            for report in newest:
                self._tally.apply(report)
            self._tally.count_on(told, now)
            for record in records:
                self._tally.apply(Report(time=now, round_closed=record))

    def watch(
        self,
        members: Collection[str] = (),
        is_asked: IsAsked = always,
        most_unread: float = math.inf,
        so_far: bool = False,
    ) -> Iterator[Report]:
        """Yield the remembered reports and all later ones, until there are no more or the watcher is gone.

        With `members` only theirs, and those that concern all members. With `so_far`, the state of the run takes the
        place of the remembered reports. A watcher of all members gets both, and the state before and after the reports.
        A watcher of some members gets the counters again before the end of the run. Raises TooMuch for a watcher that
        leaves `most_unread` reports unread.
        """
        watcher, now = _WatchCall(most_unread, so_far and bool(members)), self._clock()
        with self._lock:
            before = list[Report | bytes](self._reports)  # as bytes, which is all that one that does not read occupies
            if so_far:
                newest = self._tally.newest(0 if members else len(self._reports))
                before = [*newest] if members else [self._told(now), *newest, *before]
                before.append(self._told(now))  # corrects what was counted from the reports before it
            for report in before:
                watcher.put(report)
            if self._ended:
                watcher.put(None)
            self._watchers.append(watcher)
        try:
            while is_asked():
                try:
                    one = watcher.get()
                except queue.Empty:
                    continue
                if one is None:
                    return
                if not members or one.member in members or one.WhichOneof("event") in _CONCERN_ALL:
                    yield one
        finally:
            with self._lock:
                self._watchers.remove(watcher)

    def end(self) -> None:
        """End all streams: no report follows."""
        with self._lock:
            self._ended = True
            for watcher in self._watchers:
                watcher.put(None)
