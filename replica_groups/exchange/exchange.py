"""The exchange of contributions: takes blobs in, closes rounds with a record, hands blobs out, compares hashes.

One object serves every member, over the network or in process, and is safe to call from many threads. When a round
closes, who holds which place, and what becomes of who is gone, the rules decide (replica_groups.protocol); here is what
members ask, what may be let in, and what is told to whoever watches.
"""

from __future__ import annotations

import hashlib
import json
import math
import secrets
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from hetero_pp.changed_keys import NO_CHANGES, Changes
from hetero_pp.errors import DamagedFile, Refused, RunOver
from hetero_pp.links import EXCHANGE
from hetero_pp.messages.messages_pb2 import (
    CONTRIBUTING,
    FINISHING,
    JOINING,
    Begun,
    BlobEntry,
    Failure,
    Reading,
    Refusal,
    Report,
    RoundRecord,
    RoundVerified,
    StatusReply,
    StoredBlob,
    Waiting,
)
from hetero_pp.model import block_of, shapes_by_block, shapes_of
from hetero_pp.outer.exchange_service import NO_STATES, Assignment, AvailableStates, HeldBy, Standing
from hetero_pp.outer.methods import OuterSettings
from hetero_pp.outer.step import parameters_sha256
from hetero_pp.pseudo_gradient.contribution import BlobAddress
from hetero_pp.refusals import Kind, Refusals
from hetero_pp.report_bounds import ReportBounds
from hetero_pp.run.same import Agreement
from hetero_pp.run.spec import Roster, RunSpec
from hetero_pp.snapshot import Snapshot
from hetero_pp.topology import MagnitudeSettings
from replica_groups.exchange.decisions import Decisions, IsAsked, always
from replica_groups.exchange.deposits import DIGEST_BYTES, Deposits, Offer
from replica_groups.exchange.limits import ContributionLimits
from replica_groups.exchange.log import ContributionLog, key_of
from replica_groups.exchange.member_reports import MemberReports
from replica_groups.exchange.patience import Expected
from replica_groups.exchange.restart import newest_sound
from replica_groups.exchange.standing import reports_of, why_paused
from replica_groups.exchange.text import Text, is_digest
from replica_groups.exchange.uploads import download_url
from replica_groups.exchange.watchers import Watchers
from replica_groups.exchange.ways import Listens, way
from replica_groups.protocol import events as e
from replica_groups.protocol.rules import Rules

_REMEMBERED_CONFIRMATIONS = 4
"""Of how many rounds it is known who has confirmed what."""


class _Formed(NamedTuple):
    """A group as one of its members was told of it."""

    epoch: int
    members: Mapping[str, HeldBy]
    """By place: the member that was told, and its neighbours as far as they were known."""


class Exchange:
    """State of a run as the exchange sees it. Implements ExchangeService.

    A member that is a process of its own says in every call which term it holds; without one, it is whoever holds the
    place.
    """

    def __init__(
        self,
        run: str,
        roster: Roster,
        snapshot: Snapshot | None,
        settings: OuterSettings,
        log: ContributionLog,
        agreement: Agreement | None = None,
        rules: Rules | None = None,
        goes_on: bool = False,
        tokens_a_step: Mapping[str, int] | None = None,
        magnitudes: MagnitudeSettings | None = None,
        text: Path | None = None,
        reads: str = "",
        clock: Callable[[], float] = time.monotonic,
        bounds: ReportBounds | None = None,
    ) -> None:
        """Without a snapshot members can join, but nothing else can be asked until `begin` brings one.

        Without an agreement members are not asked what they were started with. `goes_on`: another process was this
        run's exchange a moment ago, and members may be there still. `text`: the file that says which text it is
        trained on. `reads`: the digest of the text that the exchange reads itself, if it does. `bounds`: what members
        may report.
        """
        self.run = run
        self.roster = roster
        self.settings = settings
        self.log = log
        self.watchers = Watchers()
        self._refusals = Refusals(self._tell_refusal)
        rules = rules or Rules(roster.members, roster.blocks)
        self.decisions = Decisions(
            rules,
            log,
            self._told,
            goes_on,
            tokens_a_step,
            magnitudes=magnitudes,
            trains_on=settings.keep_local,
            clock=clock,
        )
        self.coordinator = self.decisions.coordinator
        self._deposits = Deposits(run, roster, settings.compression, self.decisions, self._refused)
        self._agreement = agreement
        self._text = Text(text, self._is_there, lambda: self.coordinator.last_round > 0, reads)
        self._tokens: dict[str, str] = {}
        """Of members that read a text, the digest that they have told."""
        self._taking = threading.Lock()
        """Of such members one after the other takes its place."""
        self._goes_on = goes_on
        self._terms_before = {name: place.term for name, place in self.coordinator.places.items() if place.term}
        self._rounds = settings.rounds
        self._changes = NO_CHANGES
        self._changed = self.decisions.changed
        self._held: Snapshot | None = None
        self._reading = threading.Lock()
        self._newest = 0
        self._begun_after = 0
        self._names: frozenset[str] = frozenset()
        self._addresses: dict[str, str] = {}
        self._dialled: dict[str, Listens] = {}
        """Where members were dialled, which they may not be by the time they join."""
        self._holders: dict[str, HeldBy] = {}
        """By place, the member that asked for work last."""
        self._formed: dict[str, _Formed] = {}
        """By member, the group of its newest assignment, until the member blames a neighbour."""
        self._available: dict[str, AvailableStates] = {}
        self._confirmed: dict[int, dict[str, Mapping[str, bytes]]] = defaultdict(dict)
        self._here: set[str] = set()
        self._heard: dict[str, float] = {}
        self._steps_told = 0
        self._reports, self._reporting = MemberReports(roster, bounds or ReportBounds()), threading.Lock()
        self._failed: dict[str, str] = {}
        """Member -> replica, of members that reported their failure and whose slot nobody has taken since."""
        if snapshot is not None:
            self.begin(snapshot)

    # ---- the beginning ----

    def meet_members(self) -> bool:
        """Wait until all have joined that the run needs, or one is there that has held its place since before this
        exchange was started; whether there is such a one, and so the run under way.
        """
        self.decisions.wait_until(lambda: self._goes_on or not self._lacking(self._available))
        return self._goes_on

    def wait_until_joined(self) -> Mapping[str, AvailableStates]:
        """Wait until all have joined that the run needs; what each holds that has."""
        self.decisions.wait_until(lambda: not self._lacking(self._available))
        with self._changed:
            return dict(self._available)

    def _lacking(self, here: Collection[str]) -> list[str]:
        """Whom a run needs that begins, and who is not here: if it needs nobody, of the replica that lacks least."""
        rules = self.coordinator.rules
        absent = [place for place in rules.places if place not in here]
        if rules.expected(()):
            return [place for place in absent if rules.places[place] not in rules.optional]
        return min(([one for one in absent if rules.places[one] == name] for name in rules.replicas), key=len)

    def begin(
        self,
        snapshot: Snapshot,
        damaged: Sequence[str] = (),
        spec: RunSpec | None = None,
        last_round: int | None = None,
        note: str = "",
        examples_since: tuple[tuple[int, Mapping[str, int]], ...] = (),
        limits: ContributionLimits | None = None,
    ) -> None:
        """Open the round after a snapshot's, or after a later one that is closed; `damaged` files were passed over.

        `note` says what the run goes on without; `spec` is the run's as it goes on, if something was changed.
        `examples_since`: see Rules. `limits` bound the contributions to rounds after this.
        """
        last_round = snapshot.round if last_round is None else last_round
        with self._changed:
            self._deposits.begin(shapes_by_block(shapes_of(snapshot.parameters)))
            if limits is not None:
                limits.begin(snapshot.parameters, snapshot.round)
                self.decisions.limits = limits
            self._names = frozenset(snapshot.parameters)
            if spec is not None:
                self._rounds, self._changes = spec.latest.outer.rounds, spec.changes
            self._held, self._newest, self._begun_after = snapshot, snapshot.round, last_round
        self.decisions.tell(e.Began(last_round, self._rounds, examples_since))
        begun = Begun(last_round=last_round, damaged=damaged, changes=self._changes.to_json(), note=note)
        self.report([Report(member=EXCHANGE, begun=begun)])

    def _require_begun(self, member: str) -> None:
        """Members of a run that is under way wait for an exchange that takes over."""
        if self._goes_on:
            self.last_round()
        if self.coordinator.rounds is None:
            raise self._refused(member, "the run has not started: some members have not joined")

    def last_round(self, is_asked: IsAsked = always) -> int:
        """See ExchangeService."""
        self.decisions.wait_until(lambda: self.coordinator.rounds is not None, is_asked)
        return self.coordinator.last_round

    def changes(self, is_asked: IsAsked = always) -> Changes:
        """See ExchangeService."""
        self.last_round(is_asked)
        return self._changes

    def snapshot_kept(self, round_: int) -> None:
        """A newer snapshot is in the log."""
        with self._changed:
            self._newest = round_
            self._changed.notify_all()

    def newest_snapshot(self, is_asked: IsAsked = always) -> tuple[int, Sequence[str]]:
        """See ExchangeService."""
        self.last_round(is_asked)
        with self._reading:
            if self._held is None or self._held.round != self._newest:
                damaged: list[str] = []
                try:
                    self._held = self.decisions.patiently(lambda: newest_sound(self.log, self._newest, damaged))
                except FileNotFoundError as error:
                    raise Refused("; ".join([str(error), *damaged])) from None
                for one in damaged:
                    print(f"{EXCHANGE}: {one}; reading an older one", file=sys.stderr, flush=True)
            return self._held.round, list(self._held.tensors())

    def snapshot(self, names: Sequence[str], round_: int | None = None) -> dict[str, Tensor]:
        """See ExchangeService."""
        tensors = self._snapshot("a member", self._newest if round_ is None else round_).tensors()
        unknown = [name for name in names if name not in tensors]
        if unknown:
            more = f" and {len(unknown) - 1} other names" if len(unknown) > 1 else ""
            raise self._refused("a member", f"found no tensor named {unknown[0]:.80}{more} in the snapshot")
        return {name: tensors[name] for name in names}

    def _snapshot(self, sender: str, round_: int) -> Snapshot:
        """After a round, from the log unless it is the one that was asked for last."""
        if self._held is None:
            raise self._refused(sender, "the run has not started: some members have not joined")
        with self._reading:  # not the lock of everything else: this may take minutes
            if self._held.round != round_:
                try:
                    self._held = self.decisions.patiently(lambda: self.log.read_snapshot(round_))
                except (DamagedFile, FileNotFoundError) as error:
                    raise Refused(f"{sender}: no snapshot after round {round_}: {error}") from None
            return self._held

    # ---- whom it waits for ----

    def heard(self, member: str, term: int | None = None) -> None:
        """Something came from a member, which may say which term it holds."""
        if member not in self.roster.members:
            return
        with self._changed:
            self._heard[member] = time.monotonic()
            is_from_before = term is not None and term == self._terms_before.get(member)
            has_begun = self._goes_on or self.coordinator.rounds is not None
            if is_from_before and term == self.coordinator.places[member].term and not has_begun:
                self._goes_on = True
                self.decisions.presume()

    def expected(self) -> Expected:
        """What it waits for now. While nobody has contributed to a round, inner steps are progress, too."""
        return replace(self._expected_of_members(), obstacle=self.decisions.obstacles.oldest())

    def _expected_of_members(self) -> Expected:
        with self._changed:
            members, heard, open_round = self.roster.members, dict(self._heard), self.coordinator.open
            if self.coordinator.rounds is None:
                absent = self._lacking(self._addresses)
                return Expected(JOINING, 0, absent, len(absent), heard)
            if open_round is None:
                left = [member for member in members if self.coordinator.places[member].held]
                return Expected(FINISHING, self._rounds, left, len(left), heard, is_bounded=False)
            counted = {replica: own.blobs for replica, own in open_round.deposits.items()}
            rules = self.coordinator.rules
            awaited = rules.due(open_round.number) - rules.optional.difference(self.coordinator.alive)
            missing = [
                member
                for member, replica in members.items()
                if replica in awaited and not self.roster.blocks[member] <= counted.get(replica, {}).keys()
            ]
            deposited = sum(map(len, counted.values()))
            progress = (open_round.number, deposited, None if deposited else self._steps_told)
            return Expected(CONTRIBUTING, open_round.number, missing, progress, heard, is_bounded=False)

    def tell_waiting(self, waiting: Waiting) -> None:
        """Tell whoever watches whom it waits for."""
        self.report([Report(member=EXCHANGE, waiting=waiting)])

    def tell_reading(self, what: str, share: float) -> None:
        """Tell whoever watches how far something is that members wait for."""
        self.report([Report(member=EXCHANGE, reading=Reading(what=what, share=share))])

    # ---- who may come ----

    def vacant(self) -> list[str]:
        """Places at which nobody is: first of what the run needs, and then of what lacks least to be whole."""
        with self._changed:
            rules, places = self.coordinator.rules, self.coordinator.places
            free = [name for name, place in places.items() if not place.held]
            lacks = Counter(places[name].replica for name in free)
            return sorted(free, key=lambda name: (places[name].replica in rules.optional, lacks[places[name].replica]))

    def require_going_on(self) -> None:
        """Raise RunOver if every round is closed, RunFailed if the run has failed."""
        self.decisions.require_alive()
        if self.coordinator.is_over:
            raise RunOver.after(self.coordinator.last_round, self._rounds)

    def status(self) -> StatusReply:
        """Who is where, after which round."""
        expected = self.expected()
        with self._changed:
            coordinator = self.coordinator
            reply = StatusReply(last_round=coordinator.last_round, rounds=self._rounds, refusals=self.refusals)
            reply.missing.extend(expected.missing)
            reply.has_begun, reply.is_over = coordinator.rounds is not None, coordinator.is_over
            if (paused := coordinator.paused) is not None:
                reply.paused = why_paused(paused.there, len(coordinator.replicas), paused.needed)
            if expected.obstacle is not None:
                reply.obstacle, reply.obstacle_seconds = expected.obstacle
            for name, place in coordinator.places.items():
                address = self._addresses.get(name, "") if place.held else ""
                own = reply.places.add(name=name, replica=place.replica, held=place.held, term=place.term)
                own.round = coordinator.replicas[place.replica].round or 0
                own.address, own.dials = address, self._ways(name)[0] if address else ""
            return reply

    # ---- members ----

    def agree(self, member: str, configuration: str, tokens: str = "") -> str:
        """See ExchangeService."""
        self._expect_member(member)
        try:
            told = json.loads(configuration)
        except (ValueError, RecursionError):
            told = None
        if not isinstance(told, dict):
            raise self._refused(member, "a configuration that is not a JSON object", Kind.MALFORMED)
        complaint = "" if self._agreement is None else self._agreement.complaint(told)
        if complaint:
            raise self._refused(member, f"was started with another configuration than the exchange: {complaint}")
        if tokens and not is_digest(tokens):
            raise self._refused(member, "an invalid digest of tokens", Kind.MALFORMED)
        with self._taking:
            self._tokens[member] = tokens
            self._require_same_text(member)
        return self.run

    def _require_same_text(self, member: str) -> None:
        """Raise Refused for a member that reads another text than the run's."""
        tokens = self._tokens.get(member)
        if tokens and (complaint := self._text.complaint(member, tokens)):
            raise self._refused(member, complaint)

    def _is_there(self, member: str) -> bool:
        """Whether somebody holds a place."""
        return member in self.coordinator.places and self.coordinator.places[member].held

    def join(
        self,
        member: str,
        address: str,
        available: AvailableStates = NO_STATES,
        process: str | None = None,
        is_asked: IsAsked = always,
        is_guest: bool = False,
    ) -> int:
        """See ExchangeService. A second process under one name is refused. `is_guest`: it was let in by a ticket."""
        self._expect_member(member)
        process = process or secrets.token_hex(8)
        with self._taking:
            self._require_same_text(member)
            for answer in self.decisions.tell(e.Applied(member, process, is_guest)):
                if isinstance(answer, e.Refused):
                    raise self._refused(member, answer.reason)
            if tokens := self._tokens.get(member):
                self.decisions.patiently(partial(self._text.note, member, tokens))
        term = self.decisions.wait_for_term(member, process, is_asked)
        with self._changed:
            self._addresses[member] = address
            self._available[member] = available
            self._changed.notify_all()
            self._failed.pop(member, None)
        report = Report(member=member)
        report.joined.address, report.joined.term = address, term
        self._tell([report])
        self.heard(member)
        return term

    def dialled(self, member: str, address: str, is_reached: bool | None) -> None:
        """A member was dialled where it says that it listens, or not (None)."""
        with self._changed:
            self._dialled[member] = Listens(address, is_reached)

    def beat(
        self,
        member: str,
        round_: int | None = None,
        epoch: int = 0,
        progress: int = 0,
        computes: bool = False,
        term: int | None = None,
    ) -> Standing:
        """See ExchangeService."""
        term = self._term(member, term)
        self.heard(member)
        self.decisions.tell(e.Heard(member, term, round_, epoch, progress, computes))
        self.decisions.require_alive()
        found = self.decisions.suspension(member, term)
        is_over = not self.coordinator.holds(member, term)
        return Standing(is_over, None if found is None else found.epoch, "" if found is None else found.cause)

    def broken(self, member: str, epoch: int, cause: str, blames: str = "", term: int | None = None) -> None:
        """See ExchangeService."""
        self.link_broke(member, epoch, cause, blames, term)

    def link_broke(self, member: str, epoch: int, cause: str, blames: str, term: int | None = None) -> Sequence[HeldBy]:
        """As `broken`. Return the two ends of a link with a malformed message; empty if none is to be blamed.

        Nobody can know which of the two ends lies, so both answer for it. A member blames once in each generation.
        """
        term = self._term(member, term)
        ends = self._ends(member, epoch, term, blames) if blames else ()
        trusted = blames if ends and not any(end.holder for end in ends) else ""
        self.decisions.tell(e.Broken(member, term, epoch, cause, trusted))
        return ends

    def _ends(self, member: str, epoch: int, term: int, blamed: str) -> Sequence[HeldBy]:
        """The link between a member and one that it blames, with the holders that its group was formed of."""
        if blamed not in self._beside(member):
            raise self._refused(member, f"blames {blamed}, which is not a neighbouring stage", Kind.FORBIDDEN)
        with self._changed:
            formed = self._formed.get(member)
            if formed is None or formed.epoch != epoch or formed.members[member].term != term:
                return ()
            del self._formed[member]
        return [formed.members[place] for place in (member, blamed) if place in formed.members]

    def guests_beside(self, member: str) -> Sequence[HeldBy]:
        """Return the other members of a member's group that have a ticket."""
        places = self.coordinator.rules.places_of(self.roster.members[member])
        with self._changed:
            found = [self._held_by(place) for place in places if place != member]
        return [one for one in found if one is not None and one.holder]

    def _held_by(self, place: str) -> HeldBy | None:
        """Return the member that acts for a place, if it has asked this exchange for work."""
        found = self._holders.get(place)
        return found if found is not None and self.coordinator.holds(place, found.term) else None

    def died(self, member: str, cause: str, term: int | None = None) -> None:
        """Who started a member's process knows that it has ended, however that was, and perhaps which term it held."""
        self._expect_member(member)
        self.decisions.tell(e.Died(member, term, cause))

    def assign(
        self,
        member: str,
        holds: int,
        address: str = "",
        trained: int = 0,
        term: int | None = None,
        is_asked: IsAsked = always,
        holder: int = 0,
    ) -> Assignment:
        """See ExchangeService. `holder`: number of the caller's ticket at its place, 0 without one."""
        term = self._term(member, term)
        with self._changed:
            if self.coordinator.holds(member, term):
                self._addresses[member], self._holders[member] = address, HeldBy(member, holder, term)
        self.decisions.asks(member, term)
        self.decisions.tell(e.Asked(member, term, holds, trained))
        work = self.decisions.wait_for_work(member, term, is_asked)
        upstream, downstream = self._ways(member)
        with self._changed:
            before, after = map(self._held_by, self._beside(member))
            beside = (HeldBy(member, holder, term), before, after)
            self._formed[member] = _Formed(work.epoch, {one.place: one for one in beside if one is not None})
            return Assignment(
                work.round,
                work.epoch,
                downstream=downstream,
                heals=work.heal,
                is_first=work.round == self._begun_after + 1,
                elapsed=self.decisions.elapsed(work.round),
                upstream=upstream,
                trained=work.trained,
                upstream_holder=None if before is None else before.holder,
                downstream_holder=None if after is None else after.holder,
                changed=self._changes.mark,
            )

    def _beside(self, member: str) -> tuple[str, str]:
        """The stages before and after a member; empty where there is none."""
        places = ["", *self.coordinator.rules.places_of(self.roster.members[member]), ""]
        index = places.index(member)
        return places[index - 1], places[index + 1]

    def _ways(self, member: str) -> tuple[str, str]:
        """Where a stage dials the one before it, and the one after; empty where it is dialled, or there is none."""
        places = self.decisions.coordinator.rules.places_of(self.roster.members[member])
        index = places.index(member)
        with self._changed:
            listens = [self._listens(place) for place in places[max(index - 1, 0) : index + 2]]
        own = listens[min(index, 1)]
        upstream = way(listens[0], own).after if index > 0 else ""
        return upstream, way(own, listens[-1]).before if index + 1 < len(places) else ""

    def _listens(self, member: str) -> Listens:
        is_there = self.coordinator.places[member].held
        address, dialled = self._addresses.get(member, "") if is_there else "", self._dialled.get(member)
        return dialled if dialled is not None and dialled.address == address else Listens(address)

    # ---- contributions ----

    def expect(self, member: str, address: BlobAddress, size: int) -> None:
        """A member is about to send a blob of so many bytes: before any of it is kept, see that it may."""
        self._expect_member(member)
        self._require_begun(member)
        self._deposits.expect(member, address, size)

    def deposit(
        self,
        member: str,
        address: BlobAddress,
        data: bytes,
        epoch: int | None = None,
        steps: int = 0,
        term: int | None = None,
    ) -> None:
        """See ExchangeService."""
        self._deposits.hand_in(self._offer(member, address, hashlib.sha256(data).digest(), epoch, steps, term), data)

    def upload_url(
        self, member: str, address: BlobAddress, sha256: bytes, epoch: int | None = None, term: int | None = None
    ) -> str | None:
        """Where a member may put a blob of this digest into the store itself; None if there is no such place, empty if
        it need not be sent: it is counted already, or late.
        """
        return self._deposits.upload_url(self._offer(member, address, sha256, epoch, 0, term))

    def uploaded(
        self,
        member: str,
        address: BlobAddress,
        sha256: bytes,
        epoch: int | None = None,
        steps: int = 0,
        term: int | None = None,
    ) -> None:
        """A member has put a blob where `upload_url` says; as `deposit` otherwise."""
        self._deposits.uploaded(self._offer(member, address, sha256, epoch, steps, term))

    def _offer(
        self, member: str, address: BlobAddress, sha256: bytes, epoch: int | None, steps: int, term: int | None
    ) -> Offer:
        self._expect_member(member)
        self._require_begun(member)
        current = self.coordinator.replicas[self.roster.members[member]].epoch
        return Offer(member, self._term(member, term), address, current if epoch is None else epoch, sha256, steps)

    def record(
        self, round_: int, member: str | None = None, term: int | None = None, is_asked: IsAsked = always
    ) -> RoundRecord:
        """See ExchangeService."""
        if member is not None:
            term = self._term(member, term)
            if round_ < 1:
                raise self._refused(member, f"asked for the record of round {round_}, expected 1 or later")
        try:
            return self.decisions.wait_for_record(round_, member, term, is_asked)
        except (DamagedFile, FileNotFoundError) as error:
            raise Refused(f"no record of round {round_}: {error}") from None

    def wake(self) -> None:
        """Who has asked, and waits, may be gone."""
        self.decisions.wake()

    def fetch(self, member: str, round_: int, replica: str, block: str) -> bytes:
        """See ExchangeService."""
        key, blob = self._counted(member, round_, replica, block)
        try:
            return self.decisions.patiently(lambda: self.log.read_blob(key, blob.sha256))
        except FileNotFoundError:
            raise Refused(f"the contribution of {replica} to round {round_} is no longer in the log") from None
        except DamagedFile as error:
            raise Refused(str(error)) from None

    def stored(self, member: str, round_: int, replica: str, block: str) -> StoredBlob | None:
        """Where a member may read a blob of a closed round from the store itself; None if there is no such place."""
        key, blob = self._counted(member, round_, replica, block)
        url = self.decisions.patiently(lambda: download_url(self.log, key))
        return None if url is None else StoredBlob(url=url, sha256=blob.sha256, size=blob.size)

    def _counted(self, member: str, round_: int, replica: str, block: str) -> tuple[str, BlobEntry]:
        """The key of a blob, and what the round's record says of it."""
        self.decisions.require_alive()
        self._require_begun(member)
        if 1 <= round_ <= self.coordinator.last_round:
            record = self.record(round_)
            for entry in record.contributions:
                for blob in entry.blobs:
                    if (entry.replica, blob.block) == (replica, block):
                        return key_of(record, entry, blob), blob
        raise self._refused(member, f"no `{block}` of {replica} in a closed round {round_}")

    # ---- agreement ----

    def confirm(self, member: str, round_: int, sha256: Mapping[str, bytes], term: int | None = None) -> None:
        """See ExchangeService. Of members they are held against what replay gives, once the auditor has told that."""
        if member != EXCHANGE:
            self._expect_member(member)
        self._require_begun(member)
        if not 1 <= round_ <= self._rounds or not sha256.keys() <= self._names:
            raise self._refused(member, f"hashes of unknown parameters, or of the unknown round {round_}")
        if member != EXCHANGE and not {block_of(name) for name in sha256} <= self.roster.holds(member):
            raise self._refused(member, "hashes of another member's parameters", Kind.FORBIDDEN)
        if any(len(digest) != DIGEST_BYTES for digest in sha256.values()):
            raise self._refused(member, f"a hash that does not have {DIGEST_BYTES} bytes", Kind.MALFORMED)
        if member == EXCHANGE:
            self.decisions.tell(e.Audited(round_, sha256))
        elif round_ <= self.coordinator.last_round:  # later ones would take the place of those that wait
            self.decisions.tell(e.Confirmed(member, self._term(member, term), round_, sha256))
            self._note_confirmed(member, round_, sha256)
        self.decisions.require_alive()

    def _note_confirmed(self, member: str, round_: int, sha256: Mapping[str, bytes]) -> None:
        """Once all members of a replica have confirmed, tell the replica's hash."""
        replica = self.roster.members[member]
        with self._changed:
            confirmed = self._confirmed[round_]
            confirmed[member] = sha256
            self._changed.notify_all()
            while len(self._confirmed) > _REMEMBERED_CONFIRMATIONS:
                del self._confirmed[min(self._confirmed)]
            members = [one for one, owner in self.roster.members.items() if owner == replica]
            if not all(one in confirmed for one in members):
                return
            hashes = {name: value for one in members for name, value in confirmed[one].items()}
        missing = self._names - hashes.keys()
        if missing:
            raise self._refused(member, f"no member of {replica} confirmed {sorted(missing)} in round {round_}")
        with self._reporting:
            complaint = self._reports.check_verified(member, self.coordinator.last_round)
        if complaint is not None:
            raise self._refused(member, complaint)
        verified = RoundVerified(round=round_, replica=replica, parameters_sha256=parameters_sha256(hashes))
        self.report([Report(member=EXCHANGE, round_verified=verified)])

    # ---- reports, failure and the end ----

    def report(self, reports: Sequence[Report], term: int | None = None) -> None:
        """See ExchangeService. Passes on what is in range, then raises Refused if something was not.

        A failure that is the consequence of another ends nothing: its member joins again. Nor does the failure of a
        process whose slot another process has taken: it cannot join again after its incarnation.
        """
        complaints = []
        for report in reports:
            why = None if report.member == EXCHANGE else self._complaint(report)
            if why is None:
                self._pass_on(report, term)
            else:
                complaints.append(self._refused(report.member, why, Kind.MALFORMED))
        if complaints:
            raise complaints[0]

    def _complaint(self, report: Report) -> str | None:
        """Say why a member's report is refused; None if it is let in."""
        with self._changed:
            newest = min(self.coordinator.last_round + 1 + self.coordinator.rules.overlap, self._rounds)
            if self._goes_on and self.coordinator.rounds is None:
                newest = self._rounds  # members train already, and the log is being read
        with self._reporting:
            return self._reports.check(report, newest)

    def _pass_on(self, report: Report, term: int | None) -> None:
        """Tell a report to everybody who watches, and do what it asks for."""
        if report.HasField("failure") and self._is_over(report.member, term):
            report.failure.consequence = True
        if report.HasField("failure") and not report.failure.consequence and not self._ends_run(report):
            self.died(report.member, report.failure.cause, term)
            return
        self._tell([report])
        self.heard(report.member)
        if report.HasField("inner_step"):
            with self._changed:
                self._steps_told += 1
        if report.HasField("finished") and report.member in self.coordinator.places:
            self.decisions.tell(e.Left(report.member, self._term(report.member, term)))
        if report.HasField("failure") and not report.failure.consequence:
            cause = report.failure.cause
            self.decisions.fail(cause if report.member == EXCHANGE else f"{report.member}: {cause}")

    def _ends_run(self, report: Report) -> bool:
        """Whether a failure leaves too few replicas: then going on would wait for ever.

        Of a member that is not needed, or not alone, the slot becomes vacant instead. Before the run begins every
        needed member has to come, so there its failure ends the beginning.
        """
        replica = self.roster.members.get(report.member)
        if replica is None:
            return True
        rules = self.coordinator.rules
        with self._changed:
            if self.coordinator.rounds is None:
                return replica not in rules.optional
            self._failed[report.member] = replica
            return not self.coordinator.is_over and rules.is_lost_without(self._failed.values())

    def _tell(self, reports: Sequence[Report]) -> None:
        """Date reports by one clock that is never set back, and pass them on in that order."""
        with self._reporting:
            kept = []
            for report in reports:
                if report.member == EXCHANGE:
                    report.time = self._reports.now()
                    kept.append(report)
                elif self._reports.take(report):
                    kept.append(report)
            self.watchers.tell(kept)

    def _told(self, effect: e.Effect) -> None:
        """What the rules decide is told to whoever watches."""
        if isinstance(effect, e.Closed):
            closed = self.decisions.kept(effect.record.round)
            self._tell([Report(member=EXCHANGE, round_closed=closed)])
        else:
            self._tell(list(reports_of(effect, self.roster.members)))

    @property
    def reported(self) -> int:
        """How many reports there were."""
        return self.watchers.reported

    def watch(
        self, members: Collection[str] = (), is_asked: IsAsked = always, most_unread: float = math.inf
    ) -> Iterator[Report]:
        """See Watchers."""
        return self.watchers.watch(members, is_asked, most_unread)

    def end_watching(self) -> None:
        """No report will come any more, and nothing is decided."""
        self._refusals.flush()
        self.watchers.end()
        self.decisions.end()

    def halt(self) -> int:
        """Close no further round, as the run is being stopped, and return the last closed one; see Decisions.halt."""
        return self.decisions.halt()

    def wait_until_applied(self, round_: int, seconds: float) -> None:
        """Wait until the present members of the replicas that a closed round includes have confirmed it.

        Returns after `seconds` at the latest, and at once for a round that an earlier process of the exchange closed.
        """
        if round_ <= self._begun_after:
            return
        included = {one.replica for one in self.record(round_).contributions}
        with self._changed:
            members = [member for member, replica in self.roster.members.items() if replica in included]
            confirmed = self._confirmed[round_]
            self._changed.wait_for(lambda: self._here.intersection(members) <= confirmed.keys(), seconds)

    def fail(self, cause: str) -> None:
        """End the run: every call that waits, and every later one, raises RunFailed."""
        failure = Failure(cause=cause)
        self.report([Report(member=EXCHANGE, failure=failure)])

    def wait_until_finished(self) -> None:
        """Wait until every round is decided, and the members are through whose replicas took part in the last one."""
        self.decisions.wait_until(lambda: self.coordinator.is_through)

    def stay(self, member: str) -> None:
        """A member is there. Wait until it has left, or every member is through all its rounds."""
        self._expect_member(member)
        with self._changed:
            self._here.add(member)
            self._changed.wait_for(lambda: member not in self._here or self.coordinator.is_through)

    def left(self, member: str, node: str = "", term: int | None = None) -> None:
        """A member's connection has ended, or that of one of its nodes: it may be gone, or come back."""
        with self._changed:
            self._here.discard(member)
            self._changed.notify_all()
        if member in self.roster.members:
            self.decisions.tell(e.Lost(member, self._term(member, term)))

    def wait_until_left(self, seconds: float) -> None:
        """Give members that are still there time to hear why the run has ended."""
        with self._changed:
            self._changed.wait_for(lambda: not self._here, seconds)

    @property
    def refusals(self) -> int:
        """How many messages were not let in."""
        return self._refusals.counts.total()

    def refuse(self, sender: str, reason: str, kind: Kind) -> None:
        """Count a message that was not let in; it is told, unless there are many."""
        self._refusals.add(sender, reason, kind)

    def _tell_refusal(self, refusal: Refusal) -> None:
        self.report([Report(member=EXCHANGE, refusal=refusal)])

    def _refused(self, sender: str, reason: str, kind: Kind = Kind.UNEXPECTED) -> Refused:
        self.refuse(sender, reason, kind)
        return Refused(f"{sender}: {reason}")

    def _expect_member(self, member: str) -> None:
        if member not in self.roster.members:
            raise self._refused(member, "is not a member of this run", Kind.FORBIDDEN)

    def _is_over(self, member: str, term: int | None) -> bool:
        """Whether a term does not act, of a member that has named it."""
        return term is not None and member in self.roster.members and not self.coordinator.holds(member, term)

    def _term(self, member: str, term: int | None) -> int:
        self._expect_member(member)
        return self.coordinator.places[member].term if term is None else term
