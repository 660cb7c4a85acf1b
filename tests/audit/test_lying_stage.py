"""Lying middle stages of two groups, over gRPC with TLS: each is named and removed, and its neighbours are not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from group_rounds import flips_activations
from lying_run import LyingRun, lying_spec

from hetero_pp.link.protocol import Message
from hetero_pp.messages.messages_pb2 import FLUSH, LinkHeader, Recomputed
from replica_groups.loop import take_part
from replica_groups.member.participants import StageMember
from stages.transcript import Entry, Transcript, Way
from stages.worker import StageWorker

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
# gRPC raises this in a thread that polls the connectivity of a closed channel.

GROUP = {"kind": "participants", "stages": 3, "boundary": {"rank": "1/4"}}
ROUNDS = 3


class _Whitewashed(Transcript):
    """Says that the stage has sent honest activations, and signs those that it has sent."""

    def __init__(self, own: Transcript) -> None:
        super().__init__(own._place)
        self.sent = Transcript(own._place)

    def begin(self) -> None:
        super().begin()
        self.sent.begin()

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
        if header.purpose == FLUSH or entry is None:
            return honest
        lie = Message(header, (honest.tensors[0], -honest.tensors[1]))
        return transcript.sent.expect(Way.SENT_ACTIVATION, header).note(lie)

    worker._activation = flipped  # type: ignore[method-assign]


LIARS: dict[str, Callable[[StageWorker], None]] = {
    "c.1": lambda worker: flips_activations(worker.stage),
    "d.1": _whitewashes,
}


@pytest.fixture(scope="module")
def run(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LyingRun]:
    """Return a run that is over, in which both liars lied in every round."""
    build = take_part.build_member

    def lying(spec: Any, member: Any, *arguments: Any) -> Any:
        built = build(spec, member, *arguments)
        if member.name in LIARS:
            assert isinstance(built, StageMember)
            LIARS[member.name](built.worker)
        return built

    spec = lying_spec(
        corpus, ROUNDS, {"c": GROUP, "d": GROUP}, layers=3, audit={"recompute": {"share": 1}}, exchange={"quorum": 1.0}
    )
    with LyingRun(spec, tmp_path_factory.mktemp("run")) as run, mock.patch.object(take_part, "build_member", lying):
        run.until_over()
    yield run


def _found(run: LyingRun) -> list[Recomputed]:
    judged = [report.judged for report in run.told if report.HasField("judged")]
    return [one.recomputed for one in judged if one.HasField("recomputed")]


def test_each_liar_is_named_and_nobody_else_is(run: LyingRun) -> None:
    found = _found(run)
    assert {one.member for one in found if not one.is_equal} == set(LIARS), [str(one.standing) for one in run.told if one.HasField("standing")]
    causes = {one.member: one.cause for one in found if not one.is_equal}
    assert "c.1 sent another activation of micro-batch 0 in step 0" in causes["c.1"]
    assert "d.1 sent and signed another activation of micro-batch 0 in step 0 than it says" in causes["d.1"]
