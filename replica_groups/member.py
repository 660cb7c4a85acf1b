"""The life of a member that trains: H inner steps, the outer round, evaluation; and again."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from hetero_pp.link.ledger import Ledger
from hetero_pp.messages.messages_pb2 import InnerStep, MemberRound
from hetero_pp.topology import Direction
from replica_groups.exchange.reporter import Reporter
from replica_groups.held import Held
from replica_groups.outer_round import OuterRound
from replica_groups.saved_states import SavedStates


class TrainingMember(Protocol):
    """A whole replica, or one stage of one."""

    @property
    def held(self) -> Held:
        """The parameters that it trains."""

    def inner_step(self, round_: int, step: int, global_step: int) -> InnerStep:
        """One inner step; what is known here of loss, norm and learning rate."""

    def end_inner_loop(self, round_: int) -> None:
        """Make sure that every step has been applied."""

    def start_round(self, outer: OuterRound) -> None:
        """Derive what follows from the synced parameters: the split of the token embedding."""

    def evaluate(self, round_: int) -> tuple[float, int] | None:
        """Loss of the synced parameters in this replica's own forward, and tokens seen; None where it is not known."""

    def save(self, folder: Path) -> None:
        """Write all that its next step depends on and no snapshot has."""

    def load(self, folder: Path) -> None:
        """Go on from what `save` wrote, in a member that started from the snapshot of that round."""

    def timing(self) -> tuple[float, float]:
        """Seconds of compute and of waiting for links since the last call."""


LedgerView = Iterable[tuple[str, Direction, Ledger]]
"""(link, direction, what this member counted of it)"""


def run_member(
    member: TrainingMember,
    replica: str,
    outer: OuterRound,
    reporter: Reporter,
    ledgers: LedgerView,
    rounds: int,
    inner_steps: int,
    states: SavedStates,
    last_round: int = 0,
) -> None:
    """Train the rounds after `last_round`, whose state is among `states`. Round 0 evaluates the initial weights."""
    ledgers = list(ledgers)
    if last_round > 0:
        states.require(last_round)
        member.load(states.path(last_round))
        outer.load(states.path(last_round), last_round)
    member.start_round(outer)
    _evaluate(member, replica, reporter, last_round)  # again, if the run goes on: it may have died before it was told
    if last_round == 0:
        _tell_links(reporter, ledgers, 0)
    for round_ in range(last_round + 1, rounds + 1):
        told = time.monotonic()
        for step in range(inner_steps):
            report = reporter.new()
            report.inner_step.CopyFrom(member.inner_step(round_, step, (round_ - 1) * inner_steps + step))
            reporter.tell(report)
            if time.monotonic() - told > 0.5:
                _tell_links(reporter, ledgers, round_)
                told = time.monotonic()
        member.end_inner_loop(round_)
        compute, wait = member.timing()
        started = time.monotonic()
        outer.synchronise(round_)
        member.start_round(outer)
        synchronised = time.monotonic()
        _evaluate(member, replica, reporter, round_)
        report = reporter.new()
        report.member_round.CopyFrom(
            MemberRound(
                round=round_,
                compute_seconds=compute,
                wait_seconds=wait,
                outer_seconds=synchronised - started,
                evaluation_seconds=time.monotonic() - synchronised,
            )
        )
        member.timing()
        reporter.tell(report)
        _tell_links(reporter, ledgers, round_)
        if states.is_due(round_):
            reporter.flush()  # a run that goes on from this state has lost no report from before it
            states.save(round_, lambda folder: _save(member, outer, folder))


def _save(member: TrainingMember, outer: OuterRound, folder: Path) -> None:
    member.save(folder)
    outer.save(folder)


def _evaluate(member: TrainingMember, replica: str, reporter: Reporter, round_: int) -> None:
    outcome = member.evaluate(round_)
    if outcome is None:
        return
    report = reporter.new()
    report.evaluation.replica = replica
    report.evaluation.round = round_
    report.evaluation.loss, report.evaluation.tokens = outcome
    reporter.tell(report)


def _tell_links(reporter: Reporter, ledgers: LedgerView, round_: int) -> None:
    for link, direction, ledger in ledgers:
        count = ledger.of_round(round_)
        report = reporter.new()
        use = report.link_use
        use.link, use.direction, use.round = link, direction, round_
        use.messages, use.busy_seconds = count.messages, count.busy_seconds
        use.payload_bytes, use.wire_bytes = count.payload_bytes, count.wire_bytes
        reporter.tell(report)
