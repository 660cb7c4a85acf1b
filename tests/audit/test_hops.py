"""A stage that lies in a drawn round is named, its neighbours never are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from group_rounds import (
    GROUP,
    STAGES,
    Alter,
    Contributed,
    GroupRounds,
    flips_activations,
    flips_gradients,
    freezes,
    group_spec,
    judged,
    starts_elsewhere,
    trains_faster,
)

from replica_groups.audit.recompute.group import ReplicaHere

FIRST, MIDDLE, LAST = 0, 2, STAGES - 1


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def rounds(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> GroupRounds:
    """Return a group before its second round, with moments and error feedback."""
    rounds = GroupRounds(group_spec(corpus), tmp_path_factory.mktemp("cache"))
    rounds.go_on()
    return rounds


@pytest.fixture(scope="module")
def again(rounds: GroupRounds) -> ReplicaHere:
    """Return the recomputed round."""
    here = rounds.here()
    here.train(2)
    return here


@pytest.fixture(scope="module")
def honest(rounds: GroupRounds) -> Contributed:
    here = rounds.here()
    blobs = here.train(2)
    return Contributed(dict(blobs), {name: member.message_digests() for name, member in here.members.items()})


def _of(stage: int) -> str:
    return f"{GROUP}.{stage}"


def test_nobody_is_named_in_an_honest_round(again: ReplicaHere, honest: Contributed) -> None:
    assert honest.blobs == again.blobs
    assert judged(again, honest) is None


@pytest.mark.parametrize(
    ("lie", "stage", "cause"),
    [
        (flips_activations, FIRST, "another activation of micro-batch 0 in step 0"),
        (flips_activations, MIDDLE, "another activation of micro-batch 0 in step 0"),
        (flips_gradients, MIDDLE, "another gradient of micro-batch 0 in step 0"),
        (flips_gradients, LAST, "another gradient of micro-batch 0 in step 0"),
        (freezes, FIRST, "another activation of micro-batch 0 in step 1"),
        (freezes, MIDDLE, "another activation of micro-batch 0 in step 1"),
        (freezes, LAST, "another gradient of micro-batch 0 in step 1"),
        (trains_faster, FIRST, "in step 1"),
        (trains_faster, MIDDLE, "in step 1"),
        (trains_faster, LAST, "in step 1"),
        (starts_elsewhere, MIDDLE, "in step 1"),
    ],
)
def test_the_stage_is_named(lie: Alter, stage: int, cause: str, rounds: GroupRounds, again: ReplicaHere) -> None:
    found = judged(again, rounds.lie(stage, lie))
    assert found is not None and (found.member, cause in found.cause) == (_of(stage), True), found
