"""The rounds of a member that trains: inner steps, the outer round, evaluation; and again."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from hetero_pp.learning_rates import LearningRates
from hetero_pp.link.ends import LinkEnds
from hetero_pp.link.ledger import Ledger
from hetero_pp.links import Direction
from hetero_pp.messages.messages_pb2 import InnerStep, MemberRound
from hetero_pp.run.spec import RunSpec
from replica_groups.exchange.reporter import Reporter
from replica_groups.gate import Gate
from replica_groups.outer_round import OuterRound
from replica_groups.parameter_store import ParameterStore
from replica_groups.round_length import RoundLength
from replica_groups.saved_states import SavedStates
from replica_groups.steps_taken import StepsTaken


class TrainingMember(Protocol):
    """A whole replica, or one stage of one."""

    @property
    def parameters(self) -> ParameterStore:
        """The parameters that it trains."""

    def follow(self, rates: LearningRates) -> None:
        """From the next step on other learning rates."""

    def inner_step(self, round_: int, step: int, global_step: int, is_last: bool = False) -> InnerStep:
        """One inner step; what is known here of loss, norm and learning rate, and whether it was told to be the last.

        `is_last`: who decides how long a round is says that no other step of it follows.
        """

    def end_inner_loop(self, round_: int) -> None:
        """Make sure that every step has been applied."""

    def remember(self) -> None:
        """Where a round starts: copy what `undo` brings back. Synced parameters are in the outer round."""

    def undo(self, outer: OuterRound) -> None:
        """Go back to what was remembered and to theta of the outer round: the round can be trained again, to its bits.

        May be called again. A step that was under way is dropped, wherever it was.
        """

    def relink(self, ends: LinkEnds) -> None:
        """Go on with other links to the stages beside this one, after `undo` or between two inner loops."""

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


LedgerOf = tuple[str, Direction, Ledger]
"""(link, direction, what this member counted of it)"""

SECONDS_BETWEEN_LINK_REPORTS = 0.5


@dataclass(frozen=True)
class TrainingLoop:
    """What a member's rounds are made of."""

    member: TrainingMember
    replica: str
    outer: OuterRound
    reporter: Reporter
    ledgers: Sequence[LedgerOf]
    states: SavedStates
    length: RoundLength
    steps: StepsTaken
    gate: Gate | None = None
    """Asked before every inner step, by members that are threads; what was done before a round is told before."""

    def run(self, rounds: range, spec: RunSpec) -> None:
        """Train these rounds, after what the member starts with was evaluated. They go on from the state before them.

        Raises HeteroPPError if a run goes on after a round of which there is no state here.
        """
        before = rounds.start - 1
        if before > 0:
            self.states.require(before)
            self.member.load(self.states.path(before))
            self.outer.load(self.states.path(before), before)
            self.steps.load(self.states.path(before))
        self.member.start_round(self.outer)
        self._evaluate(before)  # again, if the run goes on: it may have died before it was reported
        if before == 0:
            self._report_links(0)
        for round_ in rounds:
            if self.gate is not None:
                self.reporter.flush()
            self.member.follow(spec.rates_in(round_, self.steps.before(round_), self.steps.last))
            self._train(round_)
            self._finish(round_)
            if self.states.is_due(round_) or round_ == rounds[-1]:  # from the last one the run may be extended
                self.reporter.flush()  # a run that goes on from this state has lost no report from before it
                self.states.save(round_, self._save)
        over = self.reporter.new()
        over.finished.SetInParent()
        self.reporter.send(over)

    def _train(self, round_: int) -> None:
        """The inner steps of a round."""
        reported = time.monotonic()
        first, steps, is_over = self.steps.before(round_), 0, False
        while not is_over:
            if self.gate is not None:
                self.gate.enter(self.reporter.member, round_)
            report = self.reporter.new()
            is_last = self.length.is_last(round_, steps)
            done = self.member.inner_step(round_, steps, first + steps, bool(is_last))
            report.inner_step.CopyFrom(done)
            self.reporter.send(report)
            is_over = self.length.is_over(steps, done.is_last)
            steps += 1
            if time.monotonic() - reported > SECONDS_BETWEEN_LINK_REPORTS:
                self._report_links(round_)
                reported = time.monotonic()
        self.member.end_inner_loop(round_)
        self.steps.end_round(steps)

    def _finish(self, round_: int) -> None:
        """The outer round, and the evaluation of what it comes to."""
        compute, wait = self.member.timing()
        started = time.monotonic()
        self.outer.synchronise(round_)
        self.member.start_round(self.outer)
        synchronised = time.monotonic()
        self._evaluate(round_)
        report = self.reporter.new()
        report.member_round.CopyFrom(
            MemberRound(
                round=round_,
                compute_seconds=compute,
                wait_seconds=wait,
                outer_seconds=synchronised - started,
                evaluation_seconds=time.monotonic() - synchronised,
            )
        )
        self.member.timing()
        self._report_links(round_)  # first: whoever hears that the round is over knows what it sent
        self.reporter.send(report)

    def _save(self, folder: Path) -> None:
        self.member.save(folder)
        self.outer.save(folder)
        self.steps.save(folder)

    def _evaluate(self, round_: int) -> None:
        outcome = self.member.evaluate(round_)
        if outcome is None:
            return
        report = self.reporter.new()
        report.evaluation.replica = self.replica
        report.evaluation.round = round_
        report.evaluation.loss, report.evaluation.tokens = outcome
        self.reporter.send(report)

    def _report_links(self, round_: int) -> None:
        for link, direction, ledger in self.ledgers:
            count = ledger.of_round(round_)
            report = self.reporter.new()
            use = report.link_use
            use.link, use.direction, use.round = link, direction, round_
            use.messages, use.busy_seconds = count.messages, count.busy_seconds
            use.payload_bytes, use.wire_bytes = count.payload_bytes, count.wire_bytes
            self.reporter.send(report)
