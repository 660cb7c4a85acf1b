"""The exchange of a run: takes contributions, closes rounds with a record, and returns what the records include.

One object serves every member, over the network or in process, and is thread-safe. The rules (replica_groups.rounds)
decide when a round closes, and the holder of each slot. Each other file of this folder answers one kind of request.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from google.protobuf.message import Message
from torch import Tensor

from hetero_pp.config.changes import Agreement
from hetero_pp.config.checkpoint import OpenCheckpoint, RunCheckpoint
from hetero_pp.config.spec import Roster, RunSpec
from hetero_pp.config.topology import MagnitudeSettings
from hetero_pp.messages import messages_pb2 as pb
from hetero_pp.messages.refusals import Kind, Refusals
from hetero_pp.messages.report_bounds import ReportBounds
from hetero_pp.model.transformer import shapes_by_block, shapes_of
from hetero_pp.outer.methods import OuterSettings
from hetero_pp.rpc.exchange_service import Arrived, Caller, ExchangeService, IsAsked, always, untold
from hetero_pp.rpc.limits import RequestBounds
from hetero_pp.rpc.relay import LinkLimit, TrainedRound
from replica_groups.exchange.assignments import Addresses, Assignments
from replica_groups.exchange.commitments import Commitments
from replica_groups.exchange.confirmations import Confirmations
from replica_groups.exchange.contribution_inbox import ContributionInbox
from replica_groups.exchange.coordinator_runner import CoordinatorRunner
from replica_groups.exchange.decided import Checkpoints, DecidedRounds
from replica_groups.exchange.exchange_state import ExchangeState
from replica_groups.exchange.joining import Joining
from replica_groups.exchange.limits import ContributionLimits
from replica_groups.exchange.log import ContributionLog
from replica_groups.exchange.no_audits import NoAudits
from replica_groups.exchange.notifier import EVERYBODY
from replica_groups.exchange.overview import Overview
from replica_groups.exchange.presence import Presence
from replica_groups.exchange.reports import Reports
from replica_groups.exchange.showing import Showing, Shows, settings_sha256
from replica_groups.rounds import events as e
from replica_groups.rounds.rules import Rules

FIRST_STEPS, STEPS_GROW = 100, 4
"""Inner steps for which the relay carries a group's links in a round of a fixed time. The first round has the largest
number divided by the first value, which is 10 a second. A later round has the steps of the last contribution times the
second value.
"""


class Exchange(ExchangeService):
    """The parts of the exchange of one run, and the part that answers each request.

    A member that is a process of its own names its incarnation in every call; without one, it is the current holder of
    its slot. Servers also call methods of the parts that answer no request.
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
        shows: Shows | None = None,
        rehearsed: Mapping[str, tuple[int, ...]] | None = None,
        so_far: Path | None = None,
        link_limits: Mapping[tuple[str, str], LinkLimit] | None = None,
        parameters: Collection[str] = (),
    ) -> None:
        """Create an exchange. Without a run checkpoint, members can only join until `begin` brings one.

        `goes_on`: another process was this run's exchange a moment ago, and members may be there still. `bounds`: what
        members may report. `shows`: settings of draws, if rounds are computed again. `agreement`, `text`: as in
        Joining. `rehearsed`: shapes of the parameters in a rehearsal, whose run checkpoints have none. `so_far`: as in
        Reports. `link_limits`: (link, direction) -> what the relay may carry. `parameters`: names of all parameters, if
        members may call before the run checkpoint is there.
        """
        self.run, self.roster, self.settings, self.log = run, roster, settings, log
        self.link_limits = link_limits or {}
        self._last_steps: dict[str, int] = {}
        """Inner steps of the last contribution of each replica."""
        self.runner = CoordinatorRunner(
            rules or Rules(roster.members, roster.blocks),
            log,
            self._on_effect,
            goes_on,
            tokens_a_step,
            magnitudes=magnitudes,
            trains_on=settings.keep_local,
            clock=clock,
        )
        self.coordinator = self.runner.coordinator
        self._refusals = Refusals(lambda refusal: self.reports.tell_own(refusal=refusal))
        self.state = state = ExchangeState(run, roster, self.runner, self._refusals, settings.rounds, goes_on)
        self.presence = Presence(state)
        self.reports = Reports(state, self.presence, bounds or ReportBounds(), so_far)
        self.addresses = Addresses(state)
        self.joining = Joining(state, self.presence, self.reports, self.addresses, agreement, text)
        self.checkpoints = Checkpoints(state, log)
        self.assignments = Assignments(state, self.addresses)
        self.inbox, self._rehearsed = ContributionInbox(state, log, settings.compression), rehearsed
        self.showing: Showing | None = None
        if shows is not None:
            self.inbox.commitments = Commitments(roster.members, shows.readers, shows.fresh)
            self.assignments.commitments = self.inbox.commitments
            self.assignments.showing = self.showing = Showing(state, log, shows)
            self.showing.accuse = lambda found: self.audits.unshown(found)
        self.decided = DecidedRounds(state, log)
        self.confirmations = Confirmations(state, self.reports)
        self.audits = NoAudits()
        """Replaced before the run begins, if it is audited."""
        self.runner.decide_by_audits = self._decide_by_audits
        self.overview = Overview(state, self.presence, self.joining, self.addresses, self.reports)
        self._configuration_bytes = 0 if agreement is None else agreement.configuration_bytes
        self.requests = RequestBounds(roster, parameters, self._configuration_bytes)
        """Largest request of each call."""
        self._answers = self._table()
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
        state, last_round = self.state, checkpoint.round if last_round is None else last_round
        with state.changed:
            shapes = self._rehearsed or shapes_of(checkpoint.parameters)
            self.inbox.begin(shapes_by_block(shapes), decodes=self._rehearsed is None)
            if limits is not None:
                limits.begin(checkpoint.parameters, checkpoint.round)
                self.runner.limits = limits
            state.names = frozenset(checkpoint.parameters)
            self.requests = RequestBounds(self.roster, shapes, self._configuration_bytes)
            if spec is not None:
                state.rounds, state.changes = spec.latest.outer.rounds, spec.changes
                self.reports.tally.awaited = spec.awaited_in
            self.checkpoints.begin(checkpoint)
            state.begun_after = last_round
        self.reports.count_on(self.log, last_round)
        if self.showing is not None and (commitments := self.inbox.commitments) is not None:
            self.showing.begin(last_round, "" if spec is None else settings_sha256(spec))
            retry, read = self.runner.retry, self.log.read_record
            commitments.begin(last_round, lambda round_: retry(partial(read, round_)))
        self.runner.tell(e.Began(last_round, state.rounds))
        self.audits.begin(last_round)
        begun = pb.Begun(last_round=last_round, damaged=damaged, changes=state.changes.to_json(), note=note)
        self.reports.tell_own(begun=begun)

    def _decide_by_audits(self, record: pb.RoundRecord) -> None:
        """Let the audits change a record before it is written."""
        if self.inbox.commitments is not None:
            self.inbox.commitments.add_to(record)
        self.audits.decide(record, {} if self.showing is None else self.showing.owing(record))

    def _on_effect(self, effect: e.Effect) -> None:
        """Report a decision of the rules, and tell the audits of it."""
        if isinstance(effect, e.Bounded) and effect.scale == 0:
            effect = replace(effect, cause=self.audits.why(effect.round, effect.replica))
        self.reports.tell_effect(effect)
        if isinstance(effect, e.Closed):
            self._last_steps |= {one.replica: one.steps for one in effect.record.contributions}
            self.audits.closed(effect.record.round)
            if self.inbox.commitments is not None:
                self.inbox.commitments.closed(self.runner.kept(effect.record.round))
        elif isinstance(effect, e.Heal):
            self.audits.differed(self.roster.members[effect.slot], effect.round)

    # ---- requests of members ----

    def _table(self) -> Mapping[type[Message], Callable[[Any, Caller], Message]]:
        """Return the method that answers each type of request."""
        return {
            pb.AgreeRequest: self.joining.agree,
            pb.JoinRequest: self.joining.join,
            pb.LastRoundRequest: self._last_round,
            pb.NewestCheckpointRequest: self.checkpoints.newest,
            pb.AssignRequest: self.assignments.assign,
            pb.HeartbeatRequest: self.presence.heartbeat,
            pb.BrokenRequest: self.assignments.broken,
            pb.DiedRequest: self.presence.died,
            pb.RecordRequest: self.decided.record,
            pb.HashReport: self.confirmations.confirm,
            pb.ReportRequest: self.reports.report,
            pb.JudgeRequest: lambda request, caller: self.audits.judge(request, caller),
        }

    def call(self, request: Message, caller: Caller) -> Any:
        return self._answers[type(request)](request, caller)

    def read_checkpoint(
        self, request: pb.CheckpointRequest, caller: Caller, arrived: Arrived = untold
    ) -> dict[str, Tensor]:
        checkpoint = self.checkpoints.open(request, caller)
        tensors = {}
        for name in request.names:
            tensors[name] = checkpoint.tensor(name)
            arrived(tensors[name].nbytes)
        return tensors

    def open_checkpoint(self, request: pb.CheckpointRequest, caller: Caller) -> RunCheckpoint | OpenCheckpoint:
        """Return a run checkpoint that has the tensors of a request, to send them in pieces."""
        return self.checkpoints.open(request, caller)

    def deposit_blob(self, header: pb.BlobHeader, data: bytes, caller: Caller) -> None:
        self.inbox.take(header, data, caller)

    def fetch_blob(self, request: pb.FetchRequest, caller: Caller) -> bytes:
        return self.decided.fetch(request, caller)

    def shown_by(self, caller: Caller) -> Showing:
        """Return the part that takes files of checkpoints. Raises Refused in a run without recomputation."""
        if self.showing is None:
            raise self.state.refused(caller.name, "shows a checkpoint, and this run is not audited by recomputation")
        self.state.require_begun(caller.name)
        return self.showing

    def show_file(self, header: pb.ShownFile, path: Path, caller: Caller) -> None:
        self.shown_by(caller).take(header, path, caller)

    def _last_round(self, request: pb.LastRoundRequest, caller: Caller) -> pb.LastRoundReply:
        self.state.wait_until_begun(caller.is_asked)
        return pb.LastRoundReply(last_round=self.coordinator.last_round, changes=self.state.changes.to_json())

    # ---- reports and refusals ----

    def refuse(self, sender: str, reason: str, kind: Kind) -> None:
        self._refusals.add(sender, reason, kind)

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

        After the last round its members evaluate until they leave.
        """
        replica = self.coordinator.replicas[self.roster.members[self.roster.counts[link, "forward"]]]
        if not all(slot.held for slot in replica.slots):
            return None
        if replica.round is None and not (
            self.coordinator.is_over or any(slot.assumed_present for slot in replica.slots)
        ):
            return None
        steps, last = self.coordinator.rules.steps, self._last_steps.get(replica.name)
        most = steps[-1] if len(steps) == 1 else steps[-1] / FIRST_STEPS if last is None else STEPS_GROW * last
        return TrainedRound(replica.round or 0, replica.generation, most)

    @property
    def is_rehearsal(self) -> bool:
        """Whether nothing is trained."""
        return self._rehearsed is not None

    @property
    def refusals(self) -> int:
        """Number of refused messages."""
        return self._refusals.counts.total()

    def halt(self) -> int:
        """Close no further round, as the run is being stopped, and return the last closed one."""
        return self.runner.halt()

    def wait_until_applied(self, round_: int, seconds: float) -> None:
        """Wait until the present members of the replicas that a closed round includes have confirmed it.

        Returns after `seconds` at the latest, and at once for a round that an earlier process of the exchange closed.
        """
        if round_ > self.state.begun_after:
            self.confirmations.wait_for(self.record(round_), self.presence.here, seconds)

    def fail(self, cause: str) -> None:
        """End the run: every call that waits, and every later one, raises RunFailed."""
        self.reports.tell_own(failure=pb.Failure(cause=cause))

    def wait_until_finished(self) -> None:
        """Wait until every round is decided, and the members of all replicas in the last round are through."""
        self.runner.wait_until(lambda: self.coordinator.is_through, subject=EVERYBODY)
        if self.showing is not None:
            self.showing.end()

    def end_watching(self) -> None:
        """End the streams of reports, and decide nothing any more."""
        self._refusals.flush()
        self.reports.watchers.end()
        self.runner.end()
