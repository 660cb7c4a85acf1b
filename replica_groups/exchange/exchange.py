"""The exchange of a run: takes contributions, closes rounds with a record, and returns what the records include.

One object serves every member, over the network or in process, and is thread-safe. The rules (replica_groups.rounds)
decide when a round closes, and the holder of each slot; the runner carries that out. The inbox takes blobs, the decided
rounds are read from the log, and reports pass to watchers. Every other request is answered here, by one method each.
"""

from __future__ import annotations

import json
import math
import re
import secrets
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from google.protobuf.message import Message
from torch import Tensor

from hetero_pp.config.changes import LAST, Agreement
from hetero_pp.config.checkpoint import RunCheckpoint
from hetero_pp.config.lines import EXCHANGE, RELAYED, is_loopback
from hetero_pp.config.spec import Roster, RunSpec
from hetero_pp.config.topology import MagnitudeSettings
from hetero_pp.core.errors import RunOver
from hetero_pp.messages import messages_pb2 as pb
from hetero_pp.messages.refusals import Kind
from hetero_pp.messages.report_bounds import ReportBounds
from hetero_pp.model.transformer import block_of, shapes_by_block, shapes_of
from hetero_pp.outer.methods import OuterSettings
from hetero_pp.outer.step import parameters_sha256
from hetero_pp.rpc.exchange_service import (
    Arrived,
    AvailableStates,
    Caller,
    ExchangeService,
    HeldBy,
    IsAsked,
    always,
    untold,
)
from hetero_pp.rpc.limits import RequestBounds
from hetero_pp.rpc.relay import LinkLimit, TrainedRound
from replica_groups.exchange.contribution_inbox import DIGEST_BYTES, ContributionInbox
from replica_groups.exchange.decided import DecidedRounds
from replica_groups.exchange.log import ContributionLog
from replica_groups.exchange.magnitudes import ContributionLimits
from replica_groups.exchange.reports import Reports
from replica_groups.exchange.runner import EVERYBODY, CoordinatorRunner
from replica_groups.exchange.stall_detector import Expected
from replica_groups.exchange.text import Text
from replica_groups.rounds import events as e
from replica_groups.rounds.rules import Rules

FIRST_STEPS, STEPS_GROW = 100, 4
"""Inner steps for which the relay carries a group's links in a round of a fixed time. The first round has the largest
number divided by the first value, which is 10 a second. A later round has the steps of the last contribution times the
second value.
"""

_REMEMBERED_CONFIRMATIONS = 4  # number of recent rounds whose confirmations are kept


class Listens(NamedTuple):
    """Where a stage says that it listens."""

    address: str = ""  # HOST:PORT; empty or `relay`: nowhere
    is_reached: bool | None = None  # whether the exchange has reached the stage there; None: not known

    @property
    def hope(self) -> int:
        """Likelihood that the stage is reached: higher is better."""
        if self.address in ("", RELAYED):
            return 0
        if is_loopback(self.address):  # a stage on the same machine also reaches its other addresses
            return 1
        return {False: 2, None: 3, True: 4}[self.is_reached]


def is_before_dialled(before: Listens, after: Listens) -> bool:
    """Return whether the stage before is dialled by the one after, because it is more likely to be reached.

    In doubt the stage after is dialled. A stage that the exchange does not reach may still be reached by a neighbour
    beside it.
    """
    return before.hope > after.hope


class _Formed(NamedTuple):
    """A group as one of its members was told of it."""

    generation: int
    members: Mapping[str, HeldBy]  # by slot: the member that was told, and its neighbours as far as they were known


class Exchange(ExchangeService):
    """The exchange of one run.

    A member that is a process of its own names its incarnation in every call; without one, it is the current holder of
    its slot.
    """

    def __init__(
        self,
        run: str,
        roster: Roster,
        checkpoint: RunCheckpoint | None,
        settings: OuterSettings,
        log: ContributionLog,
        agreement: Agreement | None = None,
        rules: Rules | None = None,
        goes_on: bool = False,
        tokens_a_step: Mapping[str, int] | None = None,
        magnitudes: MagnitudeSettings | None = None,
        text: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
        bounds: ReportBounds | None = None,
        rehearsed: Mapping[str, tuple[int, ...]] | None = None,
        so_far: Path | None = None,
        link_limits: Mapping[tuple[str, str], LinkLimit] | None = None,
        parameters: Collection[str] = (),
        is_shared: bool = False,
    ) -> None:
        """Create an exchange. Without a run checkpoint, members can only join until `begin` brings one.

        `goes_on`: another process was this run's exchange a moment ago, and members may be there still. `bounds`: what
        members may report. Without an `agreement`, members are not asked what they were started with. `text`: the file
        that says which text the run is trained on. `rehearsed`: shapes of the parameters in a rehearsal, whose run
        checkpoints have none. `so_far`: as in Reports. `link_limits`: (link, direction) -> what the relay may carry.
        `parameters`: names of all parameters, if members may call before the run checkpoint is there. `is_shared`: the
        store gets copies of the files `text` and `so_far`, because another host may serve the run later.
        """
        self.run, self.roster, self.settings, self.log = run, roster, settings, log
        self.link_limits = link_limits or {}
        self._last_steps: dict[str, int] = {}  # inner steps of the last contribution of each replica
        self.runner = CoordinatorRunner(
            run,
            roster,
            rules or Rules(roster.members, roster.blocks),
            log,
            settings.rounds or LAST,
            self._on_effect,
            lambda refusal: self.reports.tell_own(refusal=refusal),
            goes_on=goes_on,
            tokens_a_step=tokens_a_step,
            magnitudes=magnitudes,
            trains_on=settings.keep_local,
            clock=clock,
        )
        self.coordinator, self.changed = self.runner.coordinator, self.runner.changed
        shared = log.store if is_shared else None
        self.reports = Reports(self.runner, bounds or ReportBounds(), so_far, shared)
        self.inbox, self.rehearsed = ContributionInbox(self.runner, settings.compression), rehearsed
        self.decided = DecidedRounds(self.runner)
        self.here: set[str] = set()  # members whose connection is open
        # joining
        self._agreement = agreement
        self.text = Text(text, self._is_there, lambda: self.coordinator.last_round > 0, shared)
        self._agreed: str | None = None
        """The last configuration that agreed: usually those of all members, so that few are parsed."""
        self._tokens: dict[str, str] = {}  # digest of the text that each member reads, of members that read one
        self._taking = threading.Lock()  # serializes joins of members that read a text
        self._available: dict[str, AvailableStates] = {}
        self._least = len(self.lacking(()))
        # assignments
        self._addresses: dict[str, str] = {}  # where each member listens that has joined
        self._dialled: dict[str, Listens] = {}
        """Result of dialling each member, which may not be where the member listens by the time it joins."""
        self._holders: dict[str, HeldBy] = {}  # by slot, the member that joined or asked for work last
        self._formed: dict[str, _Formed] = {}
        """By member, the group of its newest assignment, until the member blames a neighbour."""
        self._confirmed: dict[int, dict[str, Mapping[str, bytes]]] = defaultdict(dict)
        self._configuration_bytes = 0 if agreement is None else agreement.configuration_bytes
        self.requests = RequestBounds(roster, parameters, self._configuration_bytes)  # largest request of each call
        decided = self.decided
        self._answers: Mapping[type[Message], Callable[[Any, Caller], Message]] = {
            pb.AgreeRequest: self._agree,
            pb.JoinRequest: self._join,
            pb.LastRoundRequest: self._last_round,
            pb.NewestCheckpointRequest: decided.newest_checkpoint,
            pb.AssignRequest: self._assign,
            pb.HeartbeatRequest: self._heartbeat,
            pb.BrokenRequest: self._broken,
            pb.DiedRequest: self._died,
            pb.RecordRequest: decided.record,
            pb.HashReport: self._confirm,
            pb.ReportRequest: self.reports.report,
            pb.JudgeRequest: lambda request, caller: self.runner.audits.judge(request, caller),
        }
        if checkpoint is not None:
            self.begin(checkpoint)

    def begin(
        self,
        checkpoint: RunCheckpoint,
        damaged: Sequence[str] = (),
        spec: RunSpec | None = None,
        last_round: int | None = None,
        note: str = "",
        limits: ContributionLimits | None = None,
    ) -> None:
        """Open the round after a run checkpoint's, or after the later `last_round`; `damaged` files were skipped.

        `note` says without which data the run goes on; `spec` is the changed run, if something was changed.
        `limits` bound the contributions to rounds after this.
        """
        runner, last_round = self.runner, checkpoint.round if last_round is None else last_round
        with self.changed:
            shapes = self.rehearsed or shapes_of(checkpoint.parameters)
            self.inbox.begin(shapes_by_block(shapes), decodes=self.rehearsed is None)
            if limits is not None:
                limits.begin(checkpoint.parameters, checkpoint.round)
                runner.limits = limits
            runner.names = frozenset(checkpoint.parameters)
            self.requests = RequestBounds(self.roster, shapes, self._configuration_bytes)
            if spec is not None:
                runner.changes, runner.planned, self.settings = spec.changes, spec.latest.rounds, spec.latest.outer
                self.reports.tally.awaited = spec.awaited_in
            self.decided.begin(checkpoint)
            runner.begun_after = last_round
        runner.retry(partial(self.reports.count_on, self.log, last_round))
        runner.audits.prepare(last_round, spec)
        runner.rounds = self.settings.rounds or LAST
        has_tokens = self.settings.tokens is not None
        if has_tokens and (tokens := runner.retry(partial(self.log.tokens_after, last_round))):
            runner.planned = self.settings.planned(last_round, tokens)
            if self.settings.is_over(last_round, tokens):
                runner.rounds = last_round
        runner.tell(e.Began(last_round, runner.rounds, self.settings.tokens))
        self.runner.audits.begin(last_round)
        begun = pb.Begun(last_round=last_round, damaged=damaged, changes=runner.changes.to_json(), note=note)
        self.reports.tell_own(begun=begun)

    def _on_effect(self, effect: e.Effect) -> None:
        """Report a decision of the rules, and tell the audits of it."""
        match effect:
            case e.Closed(record):
                self.reports.tell_own(round_closed=record)
                self._last_steps |= {one.replica: one.steps for one in record.contributions}
                self.runner.audits.closed(record)
                self.runner.planned = self.settings.planned(record.round, record.tokens)
            case pb.Over():
                self.reports.tell_own(over=effect)
            case pb.MembershipEvent():
                if effect.what == pb.LEFT_OUT:
                    effect.cause = self.runner.audits.why(effect.round, effect.replica)
                self.reports.tell_own(membership_event=effect)
                if effect.what == pb.HEALED:
                    self.runner.audits.differed(effect.replica, effect.round)

    # ---- requests of members ----

    def call(self, request: Message, caller: Caller) -> Any:
        return self._answers[type(request)](request, caller)

    def read_checkpoint(
        self, request: pb.CheckpointRequest, caller: Caller, arrived: Arrived = untold
    ) -> dict[str, Tensor]:
        checkpoint = self.decided.open_checkpoint(request, caller)
        tensors = {}
        for name in request.names:
            tensors[name] = checkpoint.tensor(name)
            arrived(tensors[name].nbytes)
        return tensors

    def deposit_blob(self, header: pb.BlobHeader, data: bytes, caller: Caller) -> None:
        self.inbox.take(header, data, caller)

    def fetch_blob(self, request: pb.FetchRequest, caller: Caller) -> bytes:
        return self.decided.fetch(request, caller)

    def show_file(self, header: pb.ShownFile, path: Path, caller: Caller) -> None:
        self.runner.audits.take_file(header, path, caller)

    # ---- joining: agreement on the configuration and the text, and slots for processes ----

    def _agree(self, request: pb.AgreeRequest, caller: Caller) -> pb.AgreeReply:
        """Compare a member's configuration and text with the run's."""
        member = caller.name
        self.runner.expect_member(member)
        if request.configuration != self._agreed:
            try:
                configuration = json.loads(request.configuration)
            except (ValueError, RecursionError):
                configuration = None
            if not isinstance(configuration, dict):
                raise self.runner.refused(member, "a configuration that is not a JSON object", Kind.MALFORMED)
            if complaint := "" if self._agreement is None else self._agreement.complaint(configuration):
                reason = f"was started with another configuration than the exchange: {complaint}"
                raise self.runner.refused(member, reason)
            self._agreed = request.configuration
        if request.tokens and re.fullmatch("[0-9a-f]{64}", request.tokens) is None:  # a sha256
            raise self.runner.refused(member, "an invalid digest of tokens", Kind.MALFORMED)
        with self._taking:
            self._tokens[member] = request.tokens
            self._require_same_text(member)
        return pb.AgreeReply(run=self.run)

    def _require_same_text(self, member: str) -> None:
        tokens = self._tokens.get(member)
        if tokens and (complaint := self.text.complaint(member, tokens)):
            raise self.runner.refused(member, complaint)

    def _is_there(self, member: str) -> bool:
        return member in self.roster.members and self.coordinator.slots[member].is_heard

    def _join(self, request: pb.JoinRequest, caller: Caller) -> pb.JoinReply:
        """Give a slot to a process, once the slot is vacant. A second process under one name is refused."""
        member, runner = caller.name, self.runner
        runner.expect_member(member)
        process = request.process or secrets.token_hex(8)
        with self._taking:
            self._require_same_text(member)
            for answer in runner.tell(e.Applied(member, process, caller.holder > 0)):
                if isinstance(answer, e.Reject):
                    raise runner.refused(member, answer.reason)
            if tokens := self._tokens.get(member):
                runner.retry(partial(self.text.note, member, tokens))
        incarnation = runner.wait_for_incarnation(member, process, caller.is_asked)
        with self.changed:
            self._addresses[member] = request.address
            if self.coordinator.holds(member, incarnation):
                self._holders[member] = HeldBy(member, caller.holder, incarnation)
            self._available[member] = AvailableStates(frozenset(request.rounds), tuple(request.damaged))
            self.changed.notify_all()
        self.reports.joined(member, request.address, incarnation)
        runner.heard(member)
        return pb.JoinReply(incarnation=incarnation)

    def _last_round(self, request: pb.LastRoundRequest, caller: Caller) -> pb.LastRoundReply:
        self.runner.wait_until_begun(caller.is_asked)
        return pb.LastRoundReply(last_round=self.coordinator.last_round, changes=self.runner.changes.to_json())

    def wait_until_joined(self) -> Mapping[str, AvailableStates]:
        """Wait until all required members have joined; return the states of all that have."""
        self.runner.wait_until(self.has_met)
        with self.changed:
            return dict(self._available)

    def has_met(self) -> bool:
        """Return whether all required members have joined. The count comes first: this is asked after every join."""
        return len(self._available) >= self._least and not self.lacking(self._available)

    def lacking(self, here: Collection[str]) -> list[str]:
        """Return the required members that are not in `here`.

        If all replicas are optional, return the missing members of the most complete replica.
        """
        rules = self.coordinator.rules
        absent = [slot for slot in rules.slots if slot not in here]
        if rules.expected(()):
            return [slot for slot in absent if rules.slots[slot] not in rules.optional]
        return min(([one for one in absent if rules.slots[one] == name] for name in rules.replicas), key=len)

    # ---- assignments, and which of two neighbours dials the other ----

    def _assign(self, request: pb.AssignRequest, caller: Caller) -> pb.AssignReply:
        """Return a member's next task, once all members of its replica ask for one."""
        member, runner = caller.name, self.runner
        incarnation = runner.incarnation(caller)
        own = HeldBy(member, caller.holder, incarnation)
        with self.changed:
            if self.coordinator.holds(member, incarnation):
                self._addresses[member], self._holders[member] = request.address, own
        runner.asks(member, incarnation)
        # Steps of members that do not know of a change of the run yet are not those of others.
        is_kept = request.HasField("kept") and request.kept.changed == runner.changes.mark
        kept = request.kept if is_kept else None
        runner.tell(e.Asked(member, incarnation, request.holds, request.trained, kept, request.differs))
        work = runner.wait_for_work(member, incarnation, caller.is_asked)
        shows = self.runner.audits.asks(member, caller.holder, incarnation)
        with self.changed:
            upstream, downstream = self._to_dial(member)
            before, after = map(self.held_by, runner.neighbours(member))
            self._formed[member] = _Formed(work.generation, {one.slot: one for one in (own, before, after) if one})
            return pb.AssignReply(
                round=work.round,
                generation=work.generation,
                downstream=downstream,
                heals=work.heal,
                is_first=work.round == runner.begun_after + 1,
                elapsed=runner.elapsed(work.round),
                upstream=upstream,
                trained=work.trained,
                upstream_holder=None if before is None else before.holder,
                downstream_holder=None if after is None else after.holder,
                changed=runner.changes.mark,
                shows=shows,
                committed=self.runner.audits.expected(member),
                resumption=work.resumption,
            )

    def _to_dial(self, member: str) -> tuple[str, str]:
        """Return where a stage dials the one before it and the one after. The caller holds the lock.

        An address is empty if that neighbour dials, or does not exist.
        """
        up, down = (self._listens(one) if one else Listens() for one in self.runner.neighbours(member))
        own = self._listens(member)
        return up.address if is_before_dialled(up, own) else "", "" if is_before_dialled(own, down) else down.address

    def _address(self, member: str) -> str:
        """Return where the holder of a slot listens; empty if the slot is free or the holder does not listen."""
        return self._addresses.get(member, "") if self.coordinator.slots[member].is_heard else ""

    def _listens(self, member: str) -> Listens:
        address, dialled = self._address(member), self._dialled.get(member)
        return dialled if dialled is not None and dialled.address == address else Listens(address)

    def dialled(self, member: str, address: str, is_reached: bool | None) -> None:
        """Note whether a member was reached at an address; None: it was not dialled."""
        with self.changed:
            self._dialled[member] = Listens(address, is_reached)

    def held_by(self, slot: str) -> HeldBy | None:
        """Return the holder of a slot, if it has joined this exchange or asked it for work."""
        found = self._holders.get(slot)
        return found if found is not None and self.coordinator.holds(slot, found.incarnation) else None

    def neighbouring_guests(self, member: str) -> Sequence[HeldBy]:
        """Return the other members of a member's group that have a ticket."""
        with self.changed:
            found = [self.held_by(slot) for slot in self.runner.group_of(member) if slot != member]
        return [one for one in found if one is not None and one.holder]

    def _broken(self, request: pb.BrokenRequest, caller: Caller) -> pb.Nothing:
        self.link_broke(request, caller)
        return pb.Nothing()

    def link_broke(self, request: pb.BrokenRequest, caller: Caller) -> Sequence[HeldBy]:
        """Note that a member cannot reach a neighbour.

        Return the two ends of a link with a malformed message; empty if none is to be blamed. Nobody can know which of
        the two ends lies, so both answer for it. A member blames once in each generation.
        """
        member, blamed, ends = caller.name, request.blames, list[HeldBy]()
        incarnation = self.runner.incarnation(caller)
        if blamed and blamed not in self.runner.neighbours(member):
            raise self.runner.refused(member, f"blames {blamed}, which is not a neighbouring stage", Kind.FORBIDDEN)
        with self.changed:
            formed = self._formed.get(member)
            if (
                blamed
                and formed is not None
                and formed.generation == request.generation
                and formed.members[member].incarnation == incarnation
            ):
                del self._formed[member]
                ends = [formed.members[slot] for slot in (member, blamed) if slot in formed.members]
        trusted = blamed if ends and not any(end.holder for end in ends) else ""
        self.runner.tell(e.Broken(member, incarnation, request.generation, request.cause, trusted))
        return ends

    # ---- presence: heartbeats, connections, and the ends of processes ----

    def _heartbeat(self, request: pb.HeartbeatRequest, caller: Caller) -> pb.HeartbeatReply:
        """Take a heartbeat, and return whether the member has to stop what it trains."""
        member, incarnation, runner = caller.name, self.runner.incarnation(caller), self.runner
        runner.heard(member)
        round_ = request.round if request.HasField("round") else None
        told = request.generation, request.progress, request.computes
        resumption = request.resumption if request.HasField("resumption") else None
        runner.tell(e.Heard(member, incarnation, round_, *told, resumption))
        runner.require_alive()
        suspension = runner.suspension(member, incarnation)
        holds = self.coordinator.holds(member, incarnation)
        reply = pb.HeartbeatReply(is_over=not holds, differs=holds and self.coordinator.slots[member].differs)
        if suspension is not None:
            reply.suspended, reply.cause = suspension.generation, suspension.cause
        return reply

    def _died(self, request: pb.DiedRequest, caller: Caller) -> pb.Nothing:
        incarnation = request.incarnation if request.HasField("incarnation") else None
        self.end_incarnation(request.member, request.cause, incarnation)
        return pb.Nothing()

    def end_incarnation(self, member: str, cause: str, incarnation: int | None, has_left: bool = False) -> None:
        """End an incarnation of a member, by default the current one. `has_left`: its holder gave the slot back."""
        self.runner.expect_member(member)
        self.runner.tell(e.Died(member, incarnation, cause, has_left))

    def stay(self, member: str) -> None:
        """Note that a member is there. Wait until it has left, or every member is through all its rounds."""
        self.runner.expect_member(member)
        with self.changed:
            self.here.add(member)
            self.runner.notifier.wait_for(member, lambda: member not in self.here or self.coordinator.is_through)

    def left(self, member: str, incarnation: int | None = None) -> None:
        """Note that the connection of a member, or of one of its nodes, has ended: it may be gone, or come back."""
        with self.changed:
            self.here.discard(member)
            self.runner.notifier.wake([member])
        if member in self.roster.members:
            self.runner.tell(e.Lost(member, self.runner.incarnation(Caller(member, incarnation))))

    # ---- confirmations: hashes of the parameters that members, and the auditor, hold after a round ----

    def _confirm(self, request: pb.HashReport, caller: Caller) -> pb.Nothing:
        """Take the hashes of a member, which the rules compare with the auditor's, or those of the auditor."""
        member, round_, sha256, runner = caller.name, request.round, dict(request.sha256), self.runner
        if member != EXCHANGE:
            runner.expect_member(member)
        runner.require_begun(member)
        if not 1 <= round_ <= runner.rounds or not sha256.keys() <= runner.names:
            raise runner.refused(member, f"hashes of unknown parameters, or of the unknown round {round_}")
        if member != EXCHANGE and not {block_of(name) for name in sha256} <= self.roster.holds(member):
            raise runner.refused(member, "hashes of another member's parameters", Kind.FORBIDDEN)
        if any(len(digest) != DIGEST_BYTES for digest in sha256.values()):
            raise runner.refused(member, f"a hash that does not have {DIGEST_BYTES} bytes", Kind.MALFORMED)
        if member == EXCHANGE:
            runner.tell(e.Audited(round_, sha256))
        elif round_ <= self.coordinator.last_round:  # later ones would take the place of those that wait
            runner.tell(e.Confirmed(member, runner.incarnation(caller), round_, sha256))
            self._note_confirmed(member, round_, sha256)
        runner.require_alive()
        return pb.Nothing()

    def _note_confirmed(self, member: str, round_: int, sha256: Mapping[str, bytes]) -> None:
        """Report a replica's hash once all its members have confirmed."""
        replica = self.roster.members[member]
        with self.changed:
            confirmed = self._confirmed[round_]
            confirmed[member] = sha256
            self.changed.notify_all()
            while len(self._confirmed) > _REMEMBERED_CONFIRMATIONS:
                del self._confirmed[min(self._confirmed)]
            members = self.runner.group_of(member)
            if not all(one in confirmed for one in members):
                return
            hashes = {name: value for one in members for name, value in confirmed[one].items()}
        if missing := self.runner.names - hashes.keys():
            reason = f"no member of {replica} confirmed {sorted(missing)} in round {round_}"
            raise self.runner.refused(member, reason)
        if (complaint := self.reports.check_verified(member)) is not None:
            raise self.runner.refused(member, complaint)
        verified = pb.RoundVerified(round=round_, replica=replica, parameters_sha256=parameters_sha256(hashes))
        self.reports.tell_own(round_verified=verified)

    def wait_until_applied(self, round_: int, seconds: float) -> None:
        """Wait until the present members of the replicas that a closed round includes have confirmed it.

        Returns after `seconds` at the latest, and at once for a round that an earlier process of the exchange closed.
        """
        if round_ > self.runner.begun_after:
            included = {one.replica for one in self.record(round_).contributions}
            members = {member for member, replica in self.roster.members.items() if replica in included}
            with self.changed:
                confirmed = self._confirmed[round_]
                self.changed.wait_for(lambda: self.here & members <= confirmed.keys(), seconds)

    # ---- overview ----

    def expected(self) -> Expected:
        """Return what the exchange waits for. While no blob of a round has come, inner steps are progress, too."""
        coordinator, heard, error = self.coordinator, self.runner.last_heard, self.runner.store_errors.oldest()
        with self.changed:
            if not self.runner.has_begun:
                absent = self.lacking(self._addresses)
                return Expected(pb.JOINING, 0, absent, len(absent), heard, store_error=error)
            if (opened := coordinator.open) is None:
                left = [name for name, slot in coordinator.slots.items() if slot.is_heard]
                return Expected(pb.FINISHING, self.runner.planned, left, len(left), heard, False, store_error=error)
            not_there, came = coordinator.rules.optional - coordinator.alive, opened.deposits
            missing = [
                member
                for member, replica in self.roster.members.items()
                if replica not in not_there
                and (own := self.roster.contributes(member, opened.number))
                and (replica not in came or own.difference(came[replica].blobs))
            ]
            blobs = sum(len(own.blobs) for own in came.values())
            progress = (opened.number, blobs, None if blobs else self.reports.steps_told)
            computing = [name for name, slot in coordinator.slots.items() if slot.held and slot.computes]
            return Expected(pb.CONTRIBUTING, opened.number, missing, progress, heard, False, computing, error)

    def vacant(self) -> list[str]:
        """Return the free slots: first those of required replicas, then those of the most complete replica."""
        with self.changed:
            free = [slot for slot in self.coordinator.slots.values() if not slot.is_heard]
        lacks, optional = Counter(slot.replica for slot in free), self.coordinator.rules.optional
        free.sort(key=lambda slot: (slot.replica in optional, lacks[slot.replica]))
        return [slot.name for slot in free]

    def require_going_on(self) -> None:
        """Raise RunOver if every round is closed, RunFailed if the run has failed."""
        self.runner.require_alive()
        if self.coordinator.is_over:
            raise RunOver.after(self.coordinator.last_round, self.runner.planned)

    def status(self) -> pb.StatusReply:
        """Return the run's progress, and the holder and the addresses of each slot."""
        expected, coordinator, so_far = self.expected(), self.coordinator, self.reports.watchers.so_far()[-1].so_far
        with self.changed:
            reply = pb.StatusReply(
                last_round=coordinator.last_round,
                rounds=self.runner.planned,
                refusals=self.runner.refusals.counts.total(),
                missing=expected.missing,
                has_begun=self.runner.has_begun,
                is_over=coordinator.is_over,
                credits=so_far.credits,
                training_seconds=so_far.training_seconds,
                paused=coordinator.why_paused,
            )
            if expected.store_error is not None:
                reply.store_error, reply.store_error_seconds = expected.store_error
            for slot in coordinator.slots.values():
                address = self._address(slot.name)
                dials = self._to_dial(slot.name)[0] if address else ""
                seconds, cause = self.reports.watchers.last_change(slot.name) or (None, "")
                reply.slots.add(
                    name=slot.name,
                    replica=slot.replica,
                    held=slot.is_heard,
                    incarnation=slot.incarnation,
                    round=coordinator.replicas[slot.replica].round or 0,
                    address=address,
                    dials=dials,
                    device=self.reports.devices.get(slot.name, ""),
                    seconds=seconds,
                    cause=cause,
                )
            return reply

    # ---- reports and refusals ----

    def watch(
        self,
        members: Collection[str] = (),
        is_asked: IsAsked = always,
        most_unread: float = math.inf,
        so_far: bool = False,
    ) -> Iterator[pb.Report]:
        return self.reports.watchers.watch(members, is_asked, most_unread, so_far)

    # ---- the host's part ----

    def trains(self, link: str) -> TrainedRound | None:
        """Return what the group of a stage link trains or evaluates; None if a member is missing or no work is given.

        After the last round its members evaluate until they leave. So do those that another process of the exchange
        has told of the last record, until they ask this one for work.
        """
        replica = self.coordinator.replicas[self.roster.members[self.roster.counts[link, "forward"]]]
        if not all(slot.held for slot in replica.slots):
            return None
        goes_on = self.runner.goes_on and self.coordinator.last_round == self.runner.begun_after
        evaluates = any(slot.assumed_present or (goes_on and slot.asked is None) for slot in replica.slots)
        if replica.round is None and not (self.coordinator.is_over or evaluates):
            return None
        steps, last = self.coordinator.rules.steps_of(replica.name), self._last_steps.get(replica.name)
        most = steps[-1] if len(steps) == 1 else steps[-1] / FIRST_STEPS if last is None else STEPS_GROW * last
        return TrainedRound(replica.round or 0, replica.generation, most)

    def fail(self, cause: str) -> None:
        """End the run: every call that waits, and every later one, raises RunFailed."""
        self.reports.tell_own(failure=pb.Failure(cause=cause))
        self.runner.fail(cause)

    def wait_until_finished(self) -> None:
        """Wait until every round is decided, and the members of all replicas in the last round are through."""
        self.runner.wait_until(lambda: self.coordinator.is_through, subject=EVERYBODY)
        self.runner.audits.end()

    def end_watching(self) -> None:
        """End the streams of reports, and decide nothing any more."""
        self.runner.refusals.flush()
        self.reports.watchers.end()
        self.runner.end()
