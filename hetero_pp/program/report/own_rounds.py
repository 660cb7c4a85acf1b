"""Lines that a host with some members of a run prints: their rounds, and what the run waits for."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Sequence

from hetero_pp.config.links import DIRECTIONS, LinkSpec
from hetero_pp.core.errors import RunOver
from hetero_pp.core.units import format_bytes, format_seconds
from hetero_pp.messages.messages_pb2 import MemberRound, Report
from hetero_pp.program.report.happenings import Happenings
from hetero_pp.program.report.reading import now_and_then
from hetero_pp.program.report.round_lines import joined_line, waiting_line
from hetero_pp.program.report.state import RunState
from hetero_pp.run.spec import RunSpec


class OwnRounds:
    """Turns reports of this host's members, and reports about the whole run, into lines.

    Needs no reports of other members.
    """

    def __init__(
        self, spec: RunSpec, members: Sequence[str], say: Callable[[str], None], since: float = -math.inf
    ) -> None:
        """`since`: when this host started these members, in seconds since 1970.

        Their rounds before that are summed up in one line.
        """
        self._since = since
        self._earlier: dict[str, int] = {}
        """Last round that each member reported before this start."""
        self.state = RunState(spec)
        """State of the run, as far as this host gets reports."""
        self._happenings = Happenings(spec)
        self._members = members
        self.say = say
        self._has_begun = False
        self._reading = now_and_then(say, time.monotonic)

    def on_report(self, report: Report) -> None:
        """Take in one report, and print what is new."""
        had_joined = self.state.joined_at is not None
        self.state.apply(report)
        for line in self._happenings.lines(report):
            self.say(line)
        if not had_joined and self.state.joined_at is not None:
            self.say(joined_line(self.state))
        if report.HasField("waiting") and self.state.waiting is not None:
            self.say(waiting_line(self.state, sees_all=False))
        if report.HasField("reading"):
            self._reading(report.reading.what, report.reading.share)
        if report.HasField("begun"):
            if report.begun.last_round and not self._has_begun:
                self.say(f"resuming after round {report.begun.last_round}")
            self._has_begun = True
        if report.HasField("over") and not self._take_part(report.over.finishing):
            self.say(f"{self.state.spec.config.name}: {RunOver.after(report.over.round, report.over.rounds)}")
        if report.HasField("member_round") and report.member in self._members:
            sent = report.sent if report.HasField("sent") else report.time
            self._round(sent, report.member, report.member_round)

    def _round(self, sent: float, member: str, told: MemberRound) -> None:
        """Print the line of a round. `sent`: when a member of this host sent the report, by this host's clock."""
        if sent < self._since:
            self._earlier[member] = max(told.round, self._earlier.get(member, 0))
            return
        for name, last in self._earlier.items():
            self.say(f"{name} trained up to round {last} in an earlier start")
        self._earlier.clear()
        self.say(self._line(member, told))

    def _take_part(self, finishing: Collection[str]) -> bool:
        """Return whether a member of this host took part in the last round."""
        return any(self.state.spec.members[member].replica.name in finishing for member in self._members)

    def _line(self, member: str, told: MemberRound) -> str:
        """Return the line of a member's round.

        It is of the form `round 3/16: home.1: training loss 4.2, 12 s (waiting for neighbours 3 s, exchange with other
        replicas 2 s), sent 1.2 MB`.
        """
        whole = told.compute_seconds + told.wait_seconds + told.outer_seconds + told.evaluation_seconds
        shares = {"waiting for neighbours": told.wait_seconds, "exchange with other replicas": told.outer_seconds}
        within = ", ".join(f"{what} {format_seconds(seconds)}" for what, seconds in shares.items() if seconds)
        parts = [
            *self._losses(member, told.round),
            f"{format_seconds(whole)} ({within})",
            f"sent {format_bytes(self._sent(member, told.round))}",
        ]
        return f"round {told.round}/{self.state.rounds_planned}: {member}: {', '.join(parts)}"

    def _losses(self, member: str, round_: int) -> Iterator[str]:
        """Yield the losses of a round that are known on this host. A rehearsal has none."""
        replica = self.state.replicas.get(self.state.spec.members[member].replica.name)
        if replica is None or self.state.spec.config.rehearsal is not None:
            return
        if round_ in replica.validation_loss:
            yield f"validation loss {replica.validation_loss[round_]:.4f}"
        loss = replica.round_loss(round_)
        if loss is not None:
            yield f"training loss {loss:.4f}"

    def _sent(self, member: str, round_: int) -> int:
        """Return the bytes on the wire of a round, over all links on which the member sends."""
        return sum(
            link.directions[way].wire_bytes_of_round(round_)
            for link in self.state.links.values()
            for way in DIRECTIONS
            if sender(link.spec, way) == member
        )


def sender(link: LinkSpec, way: str) -> str:
    """Return the member, or the exchange, that sends in a direction of a link."""
    return link.source if way == "forward" else link.target
