"""A stage that lies, and dies in each round so that nobody can compute it again, over gRPC with TLS."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

from group_rounds import flips_gradients
from lying_run import LyingRun, lying_spec

from hetero_pp.core.errors import HeteroPPError
from hetero_pp.messages.messages_pb2 import ContributionEntry
from hetero_pp.store.faults import Faults
from replica_groups.audit import commitments
from replica_groups.member import trainers
from replica_groups.member.trainers import StageMember

GROUP = {"kind": "participants", "stages": 2, "boundary": {"rank": "1/4"}}
LIAR, ROUNDS = "c.1", 4
MOST = 2


class _DiesOnce(Faults):
    """Lets each process of a stage die in the second step of a round in which none has died, up to round `last`."""

    def __init__(self, last: int, died: set[int]) -> None:
        self._last, self._died = last, died

    def computes(self, round_: int, step: int, micro_batch: int, is_forward: bool) -> None:
        if step == 1 and round_ <= self._last and round_ not in self._died:
            self._died.add(round_)
            raise HeteroPPError("it pretends to have failed")


def test_a_liar_that_dies_in_each_round_is_left_out_until_it_can_be_computed_again(
    corpus: Path, tmp_path: Path
) -> None:
    build, died = trainers.build_member, set[int]()

    def lying(spec: Any, member: Any, *arguments: Any) -> Any:
        built = build(spec, member, *arguments)
        if member.name == LIAR:
            assert isinstance(built, StageMember)
            flips_gradients(built.worker.stage)
            built.worker.faults = _DiesOnce(MOST + 1, died)
        return built

    audit = {"recompute": {"share": 1}}
    spec = lying_spec(corpus, ROUNDS, {"c": GROUP}, layers=2, audit=audit, exchange={"quorum": 1.0})
    with (
        mock.patch.object(commitments, "MOST_RESTARTED", MOST),
        mock.patch.object(trainers, "build_member", lying),
        LyingRun(spec, tmp_path) as run,
    ):
        run.until_over()
        records = [run.exchange.log.read_record(round_) for round_ in range(1, ROUNDS + 1)]
        has_ticket = run.memberships.held_by(LIAR) is not None
    found = [[one for one in record.contributions if one.replica == "c"] for record in records]
    assert [[_restarts(one) for one in own] for own in found] == [[[LIAR]], [[LIAR]], [], [[]]]
    assert list(records[MOST].left_out) == ["c"]
    judged = [one.judged for one in run.told if one.HasField("judged") and one.judged.replica == "c"]
    assert [(one.round, one.recomputed.is_equal, one.recomputed.member) for one in judged] == [(ROUNDS, False, LIAR)]
    assert not has_ticket


def _restarts(entry: ContributionEntry) -> list[str]:
    return [one.slot for one in entry.restarts]
