"""Lying middle stages of two groups, over gRPC with TLS: each is named and removed, and its neighbours are not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from group_rounds import flips_activations
from lying_run import HONEST, LyingRun, lying_spec

from hetero_pp.link.protocol import Message
from hetero_pp.messages.messages_pb2 import EVALUATION, FLUSH, Judgement, LinkHeader
from replica_groups.member import trainers
from replica_groups.member.trainers import StageMember
from stages.transcript import Entry, Transcript, Way
from stages.worker import StageWorker

GROUP = {"kind": "participants", "stages": 3, "boundary": {"rank": "1/4"}}
ROUNDS = 2


class _Whitewashed(Transcript):
    """Says that the stage has sent honest activations, and signs those that it has sent."""

    def __init__(self, own: Transcript) -> None:
        super().__init__(own._position)
        self.sent = Transcript(own._position)

    def begin(self, step: int = 0) -> None:
        super().begin(step)
        self.sent.begin(step)

    def sign(self, way: Way, header: LinkHeader) -> None:
        if way is Way.SENT_ACTIVATION:
            self.sent._generation, self.sent._signer = self._generation, self._signer
            self.sent.expect(way, LinkHeader(purpose=FLUSH, round=header.round)).note(Message(header))
        else:
            super().sign(way, header)


def _whitewashes(worker: StageWorker) -> None:
    """The stage flips its activations, and commits to those that it should have sent."""
    assert isinstance(worker.transcript, Transcript)
    worker.transcript = transcript = _Whitewashed(worker.transcript)
    activation = worker._activation

    def flipped(header: LinkHeader, packed: Any, source: Any, entry: Entry, symbols: Any) -> Message:
        honest = activation(header, packed, source, entry, symbols)
        if header.purpose == EVALUATION:
            return honest
        lie = Message(header, (honest.tensors[0], -honest.tensors[1]))
        return transcript.sent.expect(Way.SENT_ACTIVATION, header).note(lie)

    worker._activation = flipped  # type: ignore[method-assign]


LIARS: dict[str, Callable[[StageWorker], None]] = {
    "c.1": lambda worker: flips_activations(worker.stage),
    "d.1": _whitewashes,
}


@dataclass(frozen=True)
class Outcome:
    """A run that is over, in which both liars lied in every round."""

    judged: list[Judgement]
    without_ticket: set[str]


@pytest.fixture(scope="module")
def outcome(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    build = trainers.build_member

    def lying(spec: Any, member: Any, *arguments: Any) -> Any:
        built = build(spec, member, *arguments)
        if member.name in LIARS:
            assert isinstance(built, StageMember)
            LIARS[member.name](built.worker)
        return built

    audit = {"recompute": {"share": 1}}
    spec = lying_spec(corpus, ROUNDS, {"c": GROUP, "d": GROUP}, layers=3, audit=audit, exchange={"quorum": 1.0})
    with LyingRun(spec, tmp_path_factory.mktemp("run")) as run, mock.patch.object(trainers, "build_member", lying):
        run.until_over()
        gone = {name for name in spec.members if name not in HONEST and run.memberships.held_by(name) is None}
    return Outcome([report.judged for report in run.told if report.HasField("judged")], gone)


def test_each_liar_is_named_and_loses_its_ticket_and_nobody_else_does(outcome: Outcome) -> None:
    found = [(one.replica, one.recomputed) for one in outcome.judged if not one.recomputed.is_equal]
    assert {(replica, one.member) for replica, one in found} == {("c", "c.1"), ("d", "d.1")}
    causes = {one.member: one.cause for _, one in found}
    assert "c.1 sent another activation of micro-batch 0 in step 0" in causes["c.1"]
    assert "d.1 sent and signed another activation of micro-batch 0 in step 0 than it says" in causes["d.1"]
    assert outcome.without_ticket == set(LIARS)
