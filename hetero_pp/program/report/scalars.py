"""Derives the curves of a run from its reports."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from hetero_pp.messages.messages_pb2 import Evaluation, InnerStep, LinkUse, Report
from hetero_pp.program.report.sinks.sink import Scalar, Sink
from hetero_pp.program.report.state import RunState


class Scalars:
    """Passes scalars to sinks, one value per tag and step.

    The step is the global inner step for inner steps, and the round for everything else.
    """

    def __init__(self, state: RunState, sinks: Sequence[Sink]) -> None:
        self._state, self._sinks = state, sinks
        self._newest: dict[str, int] = {}
        """Step of the last passed value, by tag."""
        self._uses: dict[tuple[str, str], tuple[float, LinkUse]] = {}
        self._tokens: dict[int, dict[str, int]] = {}
        """Tokens up to the end of a round, by round and replica, until those of all replicas are passed."""
        self._written: dict[str, tuple[int, float]] = {}
        """Last passed (tokens, training seconds), by replica and for all."""

    def on_report(self, report: Report) -> None:
        event = report.WhichOneof("event")
        if event == "inner_step":
            self._inner_step(report.time, report.inner_step)
        elif event == "evaluation":
            self._evaluation(report.time, report.evaluation)
        elif event == "link_use":
            self._link_use(report.time, report.link_use)
        elif event == "member_round":
            self._member_round(report.time, report.member, report.member_round.round)

    def _scalar(self, when: float, tag: str, value: float, step: int, axis: Literal["inner_step", "round"]) -> None:
        if step > self._newest.get(tag, -1):  # a resumed run evaluates again what it resumes from
            self._newest[tag] = step
            for sink in self._sinks:
                sink.write(Scalar(when, tag, value, step, axis))

    def _inner_step(self, when: float, step: InnerStep) -> None:
        replica = self._state.replicas.get(step.replica)
        index = 0 if replica is None else replica.index(step.round, step.step)
        for field, tag in (("loss", "training_loss"), ("gradient_norm",) * 2, ("learning_rate",) * 2):
            if step.HasField(field):
                self._scalar(when, f"{tag}/{step.replica}", getattr(step, field), index, "inner_step")

    def _evaluation(self, when: float, evaluation: Evaluation) -> None:
        self._scalar(when, f"validation_loss/{evaluation.replica}", evaluation.loss, evaluation.round, "round")
        mean = self._state.mean_validation_loss(evaluation.round)
        if mean is not None:
            self._scalar(when, "validation_loss/mean", mean, evaluation.round, "round")

    def _member_round(self, when: float, member: str, round_: int) -> None:
        """Write a replica's tokens once its first member has finished a round, having reported all of its steps."""
        for name, replica in self._state.replicas.items():
            if member in (name, f"{name}.0"):
                tokens = replica.tokens_until(round_)
                self._tokens.setdefault(round_, {})[name] = tokens
                self._write_tokens(when, name, tokens, round_)
        for told in sorted(self._tokens):
            if told < round_ - 1 or self._tokens[told].keys() >= self._state.replicas.keys():
                self._write_tokens(when, "all", sum(self._tokens.pop(told).values()), told)

    def _write_tokens(self, when: float, name: str, tokens: int, round_: int) -> None:
        """Write the tokens up to a round, and their rate since the round before."""
        seconds = self._state.training_seconds(when)
        tokens_before, seconds_before = self._written.get(name, (0, 0.0))
        self._written[name] = tokens, seconds
        self._scalar(when, f"tokens/{name}", tokens, round_, "round")
        if seconds > seconds_before:
            rate = (tokens - tokens_before) / (seconds - seconds_before)
            self._scalar(when, f"tokens_per_second/{name}", rate, round_, "round")

    def _link_use(self, when: float, use: LinkUse) -> None:
        """Write the final count of a round when the first count of the next round arrives: counts are cumulative."""
        key = (use.link, use.direction)
        if key in self._uses and self._uses[key][1].round != use.round:
            self._round_over(*self._uses[key])
        self._uses[key] = (when, use)

    def _round_over(self, when: float, use: LinkUse) -> None:
        self._scalar(when, f"wire_bytes/{use.link}/{use.direction}", use.wire_bytes, use.round, "round")
        link = self._state.links.get(use.link)
        for way, direction in link.directions.items() if link is not None else ():
            share = direction.busy_share(self._state.training_seconds(when))
            if way == use.direction and share is not None:
                self._scalar(when, f"busy_share/{use.link}/{way}", share, use.round, "round")

    def close(self) -> None:
        """Write the last round of each link. The sinks stay open."""
        for when, use in self._uses.values():
            self._round_over(when, use)
        self._uses.clear()
