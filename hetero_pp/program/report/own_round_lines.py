"""Lines that a host with some members of a run prints: their rounds, and what the run waits for."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence

from hetero_pp.config.links import DIRECTIONS, LinkSpec
from hetero_pp.core.errors import RunOver
from hetero_pp.core.units import format_bytes, format_count, format_names, format_seconds, format_share
from hetero_pp.messages.messages_pb2 import MemberRound, Report
from hetero_pp.program.report.live_view import trouble_lines
from hetero_pp.program.report.membership_event_lines import MembershipEventLines
from hetero_pp.program.report.reading import now_and_then
from hetero_pp.program.report.round_lines import divergence_line, joined_line, speeds, waiting_line
from hetero_pp.program.report.state import MemberPresence, RunState
from hetero_pp.run.spec import RunSpec

_SHOWN = 4
"""Largest number of replicas that a line names."""


class OwnRoundLines:
    """Turns reports of this host's members, and reports about the whole run, into lines.

    Needs no reports of other members.
    """

    def __init__(self, spec: RunSpec, members: Sequence[str], say: Callable[[str], None]) -> None:
        self.state = RunState(spec)
        """State of the run, as far as this host gets reports."""
        self._event_lines = MembershipEventLines(spec)
        self._members = members
        self.say = say
        self._is_told = self._has_begun = self._is_over = False
        self._diverged_told: set[str] = set()
        self._reading = now_and_then(say, time.monotonic)

    def on_report(self, report: Report) -> None:
        """Take in one report, and print what is new. Reports before the first state of the run are not new."""
        had_joined = self.state.joined_at is not None
        self.state.apply(report)
        lines = [*self._event_lines.lines(report)]
        if not had_joined and self.state.joined_at is not None:
            lines.append(joined_line(self.state))
        if report.HasField("waiting") and self.state.waiting is not None:
            lines.append(waiting_line(self.state, sees_all=False))
        if report.HasField("begun"):
            if report.begun.last_round and not self._has_begun:
                lines.append(f"resuming after round {report.begun.last_round}")
            self._has_begun = True
        if report.HasField("member_round") and report.member in self._members:
            lines.append(self._line(report.member, report.member_round))
        if report.HasField("so_far") and not self._is_told:
            self._is_told, lines = True, [*self._present(report.time)]
        self._is_over |= report.HasField("over")
        if report.HasField("over") and not self._take_part(report.over.finishing):
            self.say(f"{self.state.spec.config.name}: {RunOver.after(report.over.round, report.over.rounds)}")
        if self._is_told and report.HasField("reading"):
            self._reading(report.reading.what, report.reading.share)
        lines += self._divergence() if self._is_told else ()
        for line in lines if self._is_told else ():
            self.say(line)

    def _divergence(self) -> Iterator[str]:
        """Yield a line on this host's replicas that have diverged, once for each."""
        own = {self.state.spec.members[one].replica.name for one in self._members} - self._diverged_told
        if due := [one for name, one in self.state.diverged.items() if name in own]:
            self._diverged_told |= {one.replica for one in due}
            yield divergence_line(due)

    def _present(self, now: float) -> Iterator[str]:
        """Yield lines on the state of the run as this host comes."""
        state = self.state
        if not (self._has_begun or state.rounds):
            yield joined_line(state) if state.waiting is None else waiting_line(state, now, sees_all=False)
            return
        if state.has_closed_all_rounds:
            return
        members = state.spec.needed.keys() | state.joined
        there = sum(state.presence(one) in (MemberPresence.PRESENT, MemberPresence.FINISHED) for one in members)
        here = f"{there} of {format_count(len(members), 'member')} {'is' if there == 1 else 'are'} present"
        yield f"round {state.rounds + 1} of {state.rounds_planned} is open; {here}"
        yield from trouble_lines(state, now)
        if state.waiting is not None:
            yield waiting_line(state, now, sees_all=False)

    def _take_part(self, finishing: Collection[str]) -> bool:
        """Return whether a member of this host took part in the last round."""
        return any(self.state.spec.members[member].replica.name in finishing for member in self._members)

    def farewell(self) -> str:
        """Return what this host's replicas added to a run that is over, and where its model is; empty otherwise."""
        spec, credits = self.state.spec, self.state.tally.credits
        if not self._is_over or spec.config.rehearsal is not None:
            return ""
        own = dict.fromkeys(spec.members[one].replica.name for one in self._members)
        whole = sum(one.tokens for one in credits.values())
        added = [
            f"{name} added {one.tokens:,} tokens in {one.included:,} rounds, {format_share(one.tokens / whole)} of all"
            for name in own
            if (one := credits.get(name)) is not None and one.tokens
        ] or [f"no round includes {format_names(list(own), _SHOWN)}"]
        model = (
            f"the exchange's host has the model, and writes it with: hetero-pp export {spec.config.name} --to FOLDER"
        )
        return f"{'; '.join(added)}; {model}"

    def _line(self, member: str, told: MemberRound) -> str:
        """Return the line of a member's round.

        It is of the form `round 3/16: home.1: training loss 4.2, 12 s (waiting for neighbours 3 s, exchange with other
        replicas 2 s), 1,700 tokens/s, sent 1.2 MB`.
        """
        replica = self.state.spec.members[member].replica
        known = self.state.replicas.get(replica.name)
        steps = self.state.inner_steps or (0 if known is None else known.steps(told.round))
        tokens = steps * replica.batch_size * self.state.spec.config.data.sequence_length
        whole = told.compute_seconds + told.wait_seconds + told.outer_seconds + told.evaluation_seconds
        shares = {"waiting for neighbours": told.wait_seconds, "exchange with other replicas": told.outer_seconds}
        within = ", ".join(f"{what} {format_seconds(seconds)}" for what, seconds in shares.items() if seconds)
        parts = [
            *self._losses(member, told.round),
            f"{format_seconds(whole)} ({within})",
            *speeds(self.state, told.round, [member], tokens, whole),
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
