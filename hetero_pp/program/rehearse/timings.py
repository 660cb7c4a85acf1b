"""Collects times and bytes from the reports of a run, by round. Pure: every time comes from a report."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean

from hetero_pp.config.links import Direction
from hetero_pp.messages.messages_pb2 import MeasuredLine, MemberRound, Report
from hetero_pp.run.spec import RunSpec

NOTHING_TIMED = "no round of the rehearsal was complete, so nothing is known of the group"
"""Line in place of a comparison, if members left or did not report."""


class Timings:
    """Times and bytes of the rounds of one run.

    The first round contains the start of the connections, and with `outer.overlap` nothing overlaps with the last one.
    So the means are over the others if there are any.
    """

    def __init__(self, spec: RunSpec) -> None:
        self._spec = spec
        self._rounds: dict[str, dict[int, MemberRound]] = defaultdict(dict)
        self._steps: dict[str, dict[int, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
        self._closed: dict[int, float] = {}
        self._bytes: dict[tuple[str, str], dict[int, int]] = defaultdict(dict)
        self.lines: dict[str, MeasuredLine] = {}
        """Lines that hosts measured before they joined, by member."""

    def apply(self, report: Report) -> None:
        """Take in one report. A later report on the same round replaces an earlier one."""
        match report.WhichOneof("event"):
            case "member_round":
                self._rounds[report.member][report.member_round.round] = report.member_round
            case "inner_step":
                step = report.inner_step
                self._steps[report.member][step.round][step.step] = report.time
            case "round_closed":
                self._closed[report.round_closed.round] = report.time
            case "link_use":
                use = report.link_use
                self._bytes[use.link, use.direction][use.round] = use.wire_bytes
            case "measured_line":
                self.lines[report.member] = report.measured_line

    @property
    def timed(self) -> Sequence[int]:
        """Rounds that all members have finished, without the first and, with overlap, the last if there are others."""
        known = [set(self._rounds[member]) for member in self._spec.needed]
        rounds = sorted(set.intersection(*known) & self._closed.keys()) if known else []
        later = rounds[1:] or rounds
        return (later[:-1] or later) if self._spec.config.outer.overlap else later

    @property
    def round_seconds(self) -> float:
        """Seconds from the close of a round to the next close. For a single round: all that a member did in it."""
        pairs = [(round_ - 1, round_) for round_ in self.timed if round_ - 1 in self._closed]
        if pairs:
            return fmean(self._closed[later] - self._closed[sooner] for sooner, later in pairs)
        whole = ("compute_seconds", "wait_seconds", "outer_seconds", "evaluation_seconds")
        return max(sum(self.of_member(name, part) for part in whole) for name in self._spec.needed)

    def of_member(self, member: str, field: str) -> float:
        """Return the mean over the timed rounds of a field of MemberRound."""
        return fmean(float(getattr(self._rounds[member][round_], field)) for round_ in self.timed)

    def step_seconds(self, member: str) -> float | None:
        """Return the mean time between two inner steps of a member; None if its rounds have only one."""
        times = [sorted(own.values()) for round_, own in self._steps[member].items() if round_ in self.timed]
        means = [(own[-1] - own[0]) / (len(own) - 1) for own in times if len(own) > 1]
        return fmean(means) if means else None

    def steps(self, member: str) -> float:
        """Return the mean number of inner steps that a member took in a timed round."""
        return fmean(len(self._steps[member][round_]) for round_ in self.timed)

    def wire_bytes(self, link: str, way: Direction) -> float:
        """Return the mean bytes that a link carried in a timed round."""
        return fmean(self._bytes[link, way].get(round_, 0) for round_ in self.timed)
