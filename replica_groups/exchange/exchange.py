"""The exchange of contributions: takes blobs in, closes rounds with a record, hands blobs out, compares hashes.

One object serves every member, over the network or in process, and is safe to call from many threads. A round closes
when every replica's contribution is whole. What members report is passed on to whoever watches.
"""

from __future__ import annotations

import json
import queue
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from torch import Tensor

from hetero_pp.changed_keys import NO_CHANGES, Changes
from hetero_pp.errors import MalformedContribution, Refused, ReplicasDiffer, RunFailed
from hetero_pp.links import EXCHANGE
from hetero_pp.messages.messages_pb2 import (
    CONTRIBUTING,
    FINISHING,
    JOINING,
    Begun,
    BlobEntry,
    ContributionEntry,
    Failure,
    Reading,
    Refusal,
    Report,
    RoundRecord,
    RoundVerified,
    Waiting,
)
from hetero_pp.model import shapes_by_block, shapes_of
from hetero_pp.outer.exchange_service import NO_STATES, AvailableStates
from hetero_pp.outer.methods import OuterSettings
from hetero_pp.outer.step import parameters_sha256
from hetero_pp.pseudo_gradient.contribution import BlobAddress, ReceivedBlob, contribution_digest, entry_of
from hetero_pp.run.same import Agreement
from hetero_pp.run.spec import Roster, RunSpec
from hetero_pp.snapshot import Snapshot
from replica_groups.exchange.log import ContributionLog
from replica_groups.exchange.patience import Expected
from replica_groups.exchange.replay import Shapes

_CONCERN_ALL = ("joined", "waiting", "begun", "reading", "failure")

EPOCH = 1
"""Of every replica: none is formed anew."""

REMEMBERED_REPORTS = 10_000
"""How far back a watcher that comes late can see."""


class Exchange:
    """State of a run as the exchange sees it. Implements ExchangeService."""

    def __init__(
        self,
        run: str,
        roster: Roster,
        snapshot: Snapshot | None,
        settings: OuterSettings,
        log: ContributionLog,
        agreement: Agreement | None = None,
    ) -> None:
        """Without a snapshot members can join, but nothing else can be asked until `begin` brings one.

        Without an agreement members are not asked what they were started with.
        """
        self.run = run
        self.roster = roster
        self.settings = settings
        self.log = log
        self.refusals = 0
        self.reported = 0
        """How many reports there were."""
        self._agreement = agreement
        self._rounds = settings.rounds
        self._changes = NO_CHANGES
        self._changed = threading.Condition()
        self._begun: Snapshot | None = None
        self._shapes: dict[str, Shapes] = {}
        self._names: frozenset[str] = frozenset()
        self._failure: str | None = None
        self._addresses: dict[str, str] = {}
        self._available: dict[str, AvailableStates] = {}
        self._entries: dict[int, dict[tuple[str, str], BlobEntry]] = defaultdict(dict)
        self._being_written: set[BlobAddress] = set()
        self._records: dict[int, RoundRecord] = {}
        self._hashes: dict[int, dict[str, tuple[bytes, str]]] = defaultdict(dict)
        self._confirmed: dict[int, dict[str, Mapping[str, bytes]]] = defaultdict(dict)
        self._finished: set[str] = set()
        self._here: set[str] = set()
        self._heard: dict[str, float] = {}
        self._steps_told = 0
        self._watchers: list[queue.SimpleQueue[Report | None]] = []
        self._reports: deque[Report] = deque(maxlen=REMEMBERED_REPORTS)
        if snapshot is not None:
            self.begin(snapshot)

    # ---- the beginning ----

    def wait_until_joined(self) -> Mapping[str, AvailableStates]:
        """Wait until every member has joined; what each holds."""
        with self._changed:
            self._wait_until(lambda: self._available.keys() >= self.roster.members.keys())
            return dict(self._available)

    def begin(self, snapshot: Snapshot, damaged: Sequence[str] = (), spec: RunSpec | None = None) -> None:
        """Open the round after a snapshot's; `damaged` files were passed over to find it.

        `spec` is the run's as it goes on, if something was changed since it began.
        """
        with self._changed:
            self._shapes = shapes_by_block(shapes_of(snapshot.parameters))
            self._names = frozenset(snapshot.parameters)
            if spec is not None:
                self._rounds, self._changes = spec.latest.outer.rounds, spec.changes
            self._begun = snapshot
        begun = Begun(last_round=snapshot.round, damaged=damaged, changes=self._changes.to_json())
        self.report([Report(time=time.time(), member=EXCHANGE, begun=begun)])

    def last_round(self) -> int:
        """See ExchangeService."""
        with self._changed:
            self._wait_until(lambda: self._begun is not None and self._available.keys() >= self.roster.members.keys())
        return self._snapshot("a member").round

    def changes(self) -> Changes:
        """See ExchangeService."""
        self.last_round()
        return self._changes

    def _snapshot(self, sender: str) -> Snapshot:
        """Of the last round before the run began, or went on."""
        if self._begun is None:
            raise self._refused(sender, "the run has not begun: not all members have joined")
        return self._begun

    # ---- whom it waits for ----

    def heard(self, member: str) -> None:
        """Something came from a member."""
        if member in self.roster.members:
            with self._changed:
                self._heard[member] = time.monotonic()

    def expected(self) -> Expected:
        """What it waits for now. While nobody has contributed to a round, inner steps are progress, too."""
        with self._changed:
            members, begun, heard = self.roster.members, self._begun, dict(self._heard)
            absent = [member for member in members if member not in self._addresses]
            if absent or begun is None:
                return Expected(JOINING, 0, absent, len(absent), heard)
            open_round = begun.round + len(self._records) + 1
            if open_round > self._rounds:
                left = [member for member in members if member not in self._finished]
                return Expected(FINISHING, self._rounds, left, len(left), heard)
            counted = self._entries.get(open_round, {})
            missing = [
                member
                for member, replica in members.items()
                if any((replica, block) not in counted for block in self.roster.blocks[member])
            ]
            progress = (open_round, len(counted), None if counted else self._steps_told)
            return Expected(CONTRIBUTING, open_round, missing, progress, heard)

    def tell_waiting(self, waiting: Waiting) -> None:
        """Tell whoever watches whom it waits for."""
        self.report([Report(time=time.time(), member=EXCHANGE, waiting=waiting)])

    def tell_reading(self, what: str, share: float) -> None:
        """Tell whoever watches how far something is that members wait for."""
        self.report([Report(time=time.time(), member=EXCHANGE, reading=Reading(what=what, share=share))])

    # ---- members ----

    def agree(self, member: str, configuration: str) -> str:
        """See ExchangeService."""
        self._expect_member(member)
        complaint = "" if self._agreement is None else self._agreement.complaint(json.loads(configuration))
        if complaint:
            raise self._refused(member, f"was started with another configuration than the exchange: {complaint}")
        return self.run

    def join(self, member: str, address: str, available: AvailableStates = NO_STATES) -> None:
        """See ExchangeService. A second process under one name is refused."""
        self._expect_member(member)
        with self._changed:
            if member in self._addresses:
                raise self._refused(member, f"found a second `{member}`")
            self._addresses[member] = address
            self._available[member] = available
            self._changed.notify_all()
        report = Report(time=time.time(), member=member)
        report.joined.address = address
        self.report([report])

    def locate(self, member: str) -> str:
        """See ExchangeService."""
        self._expect_member(member)
        with self._changed:
            self._wait_until(lambda: member in self._addresses)
            return self._addresses[member]

    def snapshot(self, names: Sequence[str]) -> dict[str, Tensor]:
        """See ExchangeService."""
        tensors = self._snapshot("a member").tensors()
        unknown = [name for name in names if name not in tensors]
        if unknown:
            raise self._refused("a member", f"no tensors {unknown} in the snapshot")
        return {name: tensors[name] for name in names}

    # ---- contributions ----

    def deposit(self, member: str, address: BlobAddress, data: bytes) -> None:
        """See ExchangeService. The blob is decoded before it is kept, so no receiver meets a malformed one.

        It counts once it is on the disk. That is waited for by who deposits the blob, and by nobody else.
        """
        self._expect_member(member)
        if self.roster.members[member] != address.replica or address.block not in self.roster.blocks[member]:
            raise self._refused(member, f"`{address.block}` of {address.replica} is not this member's")
        if address.run != self.run:
            raise self._refused(member, "a contribution to another run")
        open_round = self._snapshot(member).round + len(self._records) + 1
        if address.round != open_round:
            raise self._refused(member, f"found round {address.round}, expected {open_round}")
        shapes = self._shapes[address.block]
        try:
            blob = ReceivedBlob(data, address, shapes, self.settings.compression)
            kept = sum(len(blob.tensor(name).values) for name in shapes)
        except MalformedContribution as error:
            raise self._refused(member, str(error)) from None
        entry = entry_of(address, data, kept)
        if self._begins_to_write(member, address, entry):
            self._write_and_count(address, data, entry)

    def _begins_to_write(self, member: str, address: BlobAddress, entry: BlobEntry) -> bool:
        """Whether the blob is new, and the caller the only one who writes it; False if it is counted already.

        Waits for another deposit of the same blob: until that is over, it is not known whether it counts.
        """
        with self._changed:
            self._wait_until(lambda: address not in self._being_written)
            known = self._entries[address.round].get((address.replica, address.block))
            if known is not None and known != entry:
                raise self._refused(member, f"a second, different `{address.block}` for round {address.round}")
            if known is None:
                self._being_written.add(address)
            return known is None

    def _write_and_count(self, address: BlobAddress, data: bytes, entry: BlobEntry) -> None:
        """Only for whom `_begins_to_write` said so. Nothing counts that is not on the disk, whatever fails."""
        try:
            self.log.write_blob(address, EPOCH, data)
            with self._changed:
                self._check_alive()
                entries = self._entries[address.round]
                entries[address.replica, address.block] = entry
                is_whole = len(entries) == len(self.roster.replicas) * len(self._shapes)
        finally:
            with self._changed:
                self._being_written.discard(address)
                self._changed.notify_all()
        if is_whole:  # by this blob, so nobody else closes the round
            self._close(address.round)

    def record(self, round_: int) -> RoundRecord:
        """See ExchangeService."""
        with self._changed:
            self._wait_until(lambda: round_ in self._records)
            return self._records[round_]

    def fetch(self, member: str, round_: int, replica: str, block: str) -> bytes:
        """See ExchangeService."""
        with self._changed:
            self._check_alive()
            record = self._records.get(round_) if (replica, block) in self._entries[round_] else None
        if record is None:
            raise self._refused(member, f"no `{block}` of {replica} in a closed round {round_}")
        return self.log.blobs_of(record)(replica, block)

    def _close(self, round_: int) -> None:
        """Close a round of which every blob is counted: none can be added or replaced any more."""
        entries = self._entries[round_]
        record = RoundRecord(round=round_)
        for replica in self.roster.replicas:
            blobs = [entries[replica, block] for block in self._shapes]
            record.contributions.append(
                ContributionEntry(
                    replica=replica, weight=1.0, digest=contribution_digest(blobs), blobs=blobs, epoch=EPOCH
                )
            )
        # On the disk before anybody is told: members go on from it, and a run that is resumed has to find it.
        record = self.log.create_record(record)
        with self._changed:
            self._records[round_] = record
            self._changed.notify_all()
            self.report([Report(time=time.time(), member=EXCHANGE, round_closed=record)])

    # ---- agreement ----

    def confirm(self, member: str, round_: int, sha256: Mapping[str, bytes]) -> None:
        """See ExchangeService. The first holder of a parameter sets what the others must equal."""
        if member != EXCHANGE:
            self._expect_member(member)
        with self._changed:
            self._check_alive()
            if not 1 <= round_ <= self._rounds or not sha256.keys() <= self._names:
                raise self._refused(member, f"hashes of unknown parameters, or of the unknown round {round_}")
            known = self._hashes[round_]
            for name, value in sha256.items():
                first, holder = known.setdefault(name, (value, member))
                if first != value:
                    cause = f"{name} differs between {holder} and {member} after round {round_}"
                    self._fail(cause)
                    raise ReplicasDiffer(cause)
            self._confirmed[round_][member] = sha256
            if member != EXCHANGE:
                self._report_verified(round_, self.roster.members[member])

    def _report_verified(self, round_: int, replica: str) -> None:
        """Once all members of a replica have confirmed, tell the replica's hash. Call with the lock held."""
        members = [member for member, owner in self.roster.members.items() if owner == replica]
        confirmed = self._confirmed[round_]
        if not all(member in confirmed for member in members):
            return
        hashes = {name: value for member in members for name, value in confirmed[member].items()}
        missing = self._names - hashes.keys()
        if missing:
            self.fail(f"nobody in {replica} confirmed {sorted(missing)} in round {round_}")
            return
        verified = RoundVerified(round=round_, replica=replica, parameters_sha256=parameters_sha256(hashes))
        self.report([Report(time=time.time(), member=EXCHANGE, round_verified=verified)])

    # ---- reports, failure and the end ----

    def report(self, reports: Sequence[Report]) -> None:
        """See ExchangeService."""
        with self._changed:
            self._reports.extend(reports)
            self.reported += len(reports)
            for report in reports:
                self.heard(report.member)
                for watcher in self._watchers:
                    watcher.put(report)
                self._steps_told += report.HasField("inner_step")
                if report.HasField("finished"):
                    self._finished.add(report.member)
                if report.HasField("failure"):
                    cause = report.failure.cause
                    self._fail(cause if report.member == EXCHANGE else f"{report.member}: {cause}")
            self._changed.notify_all()

    def watch(self, members: Collection[str] = ()) -> Iterator[Report]:
        """Every report from the start of the run on, until the run is over.

        Of some members only what they tell, and what concerns everybody: who has joined, waits, begins and failures.
        """
        watcher: queue.SimpleQueue[Report | None] = queue.SimpleQueue()
        with self._changed:
            for report in self._reports:
                watcher.put(report)
            self._watchers.append(watcher)
        while (report_or_end := watcher.get()) is not None:
            if not members or report_or_end.member in members or report_or_end.WhichOneof("event") in _CONCERN_ALL:
                yield report_or_end

    def end_watching(self) -> None:
        """No report will come any more."""
        with self._changed:
            for watcher in self._watchers:
                watcher.put(None)

    def fail(self, cause: str) -> None:
        """End the run: every call that waits, and every later one, raises RunFailed."""
        failure = Failure(cause=cause)
        self.report([Report(time=time.time(), member=EXCHANGE, failure=failure)])

    def wait_until_finished(self) -> None:
        """Wait until every member is through all its rounds."""
        with self._changed:
            self._wait_until(self._is_through)

    def stay(self, member: str) -> None:
        """A member is there. Wait until it has left, or every member is through all its rounds."""
        self._expect_member(member)
        with self._changed:
            self._here.add(member)
            self._changed.wait_for(lambda: member not in self._here or self._is_through())

    def left(self, member: str, node: str = "") -> None:
        """A member's connection has ended, or that of one of its nodes. Before its last round that ends the run."""
        with self._changed:
            self._here.discard(member)
            self._changed.notify_all()
            is_early = member in self._addresses and member not in self._finished and self._failure is None
        if is_early:
            where = f" on {node}" if node else ""
            self.fail(f"{member}{where} is gone: its connection to the exchange ended")

    def wait_until_left(self, seconds: float) -> None:
        """Give members that are still there time to hear why the run has ended."""
        with self._changed:
            self._changed.wait_for(lambda: not self._here, seconds)

    def _is_through(self) -> bool:
        return self._finished >= set(self.roster.members)

    def refuse(self, sender: str, reason: str) -> None:
        """Count and tell a message that was not let in."""
        with self._changed:
            self.refusals += 1
        refusal = Refusal(sender=sender, reason=reason)
        self.report([Report(time=time.time(), member=EXCHANGE, refusal=refusal)])

    def _refused(self, sender: str, reason: str) -> Refused:
        self.refuse(sender, reason)
        return Refused(f"{sender}: {reason}")

    def _expect_member(self, member: str) -> None:
        if member not in self.roster.members:
            raise self._refused(member, "is no member of this run")

    def _fail(self, cause: str) -> None:
        if self._failure is None:
            self._failure = cause
        self._changed.notify_all()

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise RunFailed(self._failure)

    def _wait_until(self, condition: Callable[[], bool]) -> None:
        self._changed.wait_for(lambda: self._failure is not None or condition())
        self._check_alive()
