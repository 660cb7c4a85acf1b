"""State of a run that the parts of the exchange share, and the checks that they make of every request."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from hetero_pp.config.changes import NO_CHANGES
from hetero_pp.config.spec import Roster
from hetero_pp.core.errors import Refused
from hetero_pp.messages.refusals import Kind, Refusals
from hetero_pp.rpc.exchange_service import Caller, IsAsked, always
from replica_groups.exchange.coordinator_runner import CoordinatorRunner
from replica_groups.exchange.notifier import EVERYBODY


class ExchangeState:
    """State of one run. Its fields change only with the lock `changed` held."""

    def __init__(
        self, run: str, roster: Roster, runner: CoordinatorRunner, refusals: Refusals, rounds: int, goes_on: bool
    ) -> None:
        """`goes_on`: another process was this run's exchange a moment ago, and members may be there still."""
        self.run, self.roster, self.runner, self.refusals = run, roster, runner, refusals
        self.coordinator = runner.coordinator
        self.rounds, self.goes_on = rounds, goes_on
        self.changes = NO_CHANGES
        """Keys that were changed when the run resumed."""
        self.begun_after = 0
        """Last decided round when this exchange began the run."""
        self.names: frozenset[str] = frozenset()
        """Names of all parameters, once the run has begun."""

    @property
    def changed(self) -> threading.Condition:
        """Lock of the decisions, notified when their state or this state changes."""
        return self.runner.changed

    @property
    def has_begun(self) -> bool:
        """Whether the first round of the run is open, or was."""
        return self.coordinator.rounds is not None

    def wait_until_begun(self, is_asked: IsAsked = always) -> None:
        """Wait until all members have joined and the run begins."""
        self.runner.wait_until(lambda: self.has_begun, is_asked, subject=EVERYBODY)

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
        return self.coordinator.slot(caller.name).incarnation if caller.incarnation is None else caller.incarnation

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
