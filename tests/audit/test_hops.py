"""A stage that lies in a drawn round is named, its neighbours never are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from group_rounds import (
    GROUP,
    STAGES,
    STEPS,
    Alter,
    Contributed,
    GroupRounds,
    flips_activations,
    flips_gradients,
    freezes,
    group_spec,
    honest,
    judged,
    poisons,
    starts_elsewhere,
    trains_faster,
)
from torch import Tensor

from hetero_pp.messages.messages_pb2 import StageMessages
from hetero_pp.model.transformer import block_of
from replica_groups.audit.recompute import ReplicaHere, blame
from replica_groups.member.trainers import StageMember
from stages.transcript import RECORD, Way, records_of

PAIR = (ord("t"), ord("h"))
FIRST, MIDDLE, LAST = 0, 2, STAGES - 1


def _of(stage: int) -> str:
    return f"{GROUP}.{stage}"


@pytest.fixture(scope="module")
def rounds(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> GroupRounds:
    """Return a group before its second round, with moments and error feedback."""
    torch.set_num_threads(1)
    rounds = GroupRounds(group_spec(corpus), tmp_path_factory.mktemp("rounds"))
    rounds.go_on()
    return rounds


@pytest.fixture(scope="module")
def again(rounds: GroupRounds) -> ReplicaHere:
    """Return the recomputed round."""
    here = rounds.here()
    here.train(STEPS)
    return here


@pytest.fixture(scope="module")
def right(rounds: GroupRounds) -> Contributed:
    """Return the contribution of honest members."""
    return rounds.lie(MIDDLE, honest)


@pytest.fixture(scope="module")
def flipped(rounds: GroupRounds) -> Contributed:
    """Return the contribution of a group in which a middle stage flips activations."""
    return rounds.lie(MIDDLE, flips_activations)


def test_nobody_is_named_in_an_honest_round(again: ReplicaHere, right: Contributed) -> None:
    assert right.blobs == again.blobs
    assert judged(again, right) is None


@pytest.mark.parametrize(
    ("lie", "stage", "cause"),
    [
        (flips_activations, FIRST, "another activation of micro-batch 0 in step 0"),
        (flips_gradients, MIDDLE, "another gradient of micro-batch 0 in step 0"),
        (flips_gradients, LAST, "another gradient of micro-batch 0 in step 0"),
        (freezes, FIRST, "another activation of micro-batch 0 in step 1"),
        (freezes, LAST, "another gradient of micro-batch 0 in step 1"),
        (trains_faster, MIDDLE, "another activation of micro-batch 0 in step 1"),
        (starts_elsewhere, MIDDLE, "another activation of micro-batch 0 in step 1"),
    ],
)
def test_the_stage_is_named(lie: Alter, stage: int, cause: str, rounds: GroupRounds, again: ReplicaHere) -> None:
    found = judged(again, rounds.lie(stage, lie))
    assert found is not None and (found.member, cause in found.cause) == (_of(stage), True), found


def test_a_stage_that_poisons_one_token_pair_is_named(rounds: GroupRounds, again: ReplicaHere) -> None:
    """The first activation that differs is that of the first micro-batch with the pair."""
    batches = again.members[_of(FIRST)].batches
    assert batches is not None
    tokens = torch.cat([batches.train(STEPS + step) for step in range(STEPS)])
    pairs = [pair for row in tokens[:, :-1].unfold(1, 2, 1).tolist() for pair in map(tuple, row)]
    rare = min(set(pairs[len(pairs) // 2 :]) - set(pairs[: len(pairs) // 2]), key=pairs.count)
    hits: list[tuple[int, int]] = []
    found = judged(again, rounds.lie(MIDDLE, poisons(rare, hits)))
    assert 1 <= len(hits) < 4, "the pair is not rare"
    call, micro_batch = hits[0]
    assert found is not None and found.member == _of(MIDDLE)
    assert f"another activation of micro-batch {micro_batch} in step {call // 2}," in found.cause


@pytest.mark.parametrize("stage", [FIRST, MIDDLE, LAST])
def test_a_stage_that_lies_in_its_contribution_alone_is_named(
    stage: int, again: ReplicaHere, right: Contributed
) -> None:
    block = block_of(next(iter(again.outers[_of(stage)].parameters.shapes)))
    found = judged(again, replace(right, blobs=right.blobs | {block: b"made up"}))
    assert found is not None and (found.member, block in found.cause) == (_of(stage), True)


def _claims(found: Contributed, member: str, change: Callable[[StageMessages], object]) -> Contributed:
    """Return the contribution with another transcript of one member."""
    claimed = StageMessages.FromString(found.messages[member])
    change(claimed)
    return replace(found, messages=found.messages | {member: claimed.SerializeToString()})


def _says_it_sent_right(flipped: Contributed, again: ReplicaHere) -> Contributed:
    """Return the contribution with a transcript in which the middle stage has sent the right activations."""
    expected = records_of(StageMessages.FromString(again.members[_of(MIDDLE)].message_digests()), is_sketched=False)

    def whitewash(claimed: StageMessages) -> None:
        records = records_of(claimed, is_sketched=False).copy()
        is_sent = records["way"] == Way.SENT_ACTIVATION
        records[is_sent] = expected[is_sent]
        claimed.records = records.tobytes()

    return _claims(flipped, _of(MIDDLE), whitewash)


def test_a_stage_that_says_it_sent_what_it_should_have_sent_is_convicted_by_its_signature(
    again: ReplicaHere, flipped: Contributed
) -> None:
    """It flips activations, and commits to those of an honest stage. Without signatures nobody is named."""
    lies = _says_it_sent_right(flipped, again)
    found = judged(again, lies)
    assert found is not None and found.member == _of(MIDDLE)
    assert "sent and signed another activation of micro-batch 0 in step 0" in found.cause
    undecided = judged(again, lies, authority=None)
    assert undecided is not None and undecided.member == ""
    assert _of(MIDDLE) in undecided.cause and _of(LAST) in undecided.cause


def test_the_signature_of_another_holder_of_the_slot_convicts_neither(again: ReplicaHere, flipped: Contributed) -> None:
    """A former holder of the sender's slot may have signed for the receiver."""
    found = judged(again, _says_it_sent_right(flipped, again), holders={_of(MIDDLE): 2})
    assert found is not None and found.member == ""
    assert "with the signature of another holder" in found.cause


@pytest.mark.parametrize("generation", [3, 4])
def test_a_stage_that_says_it_received_something_else_is_convicted_without_a_signature(
    generation: int, again: ReplicaHere, flipped: Contributed
) -> None:
    """It excuses its flipped activations by an input that its neighbour did not send, or not in this generation."""

    def excuse(claimed: StageMessages) -> None:
        records = records_of(claimed, is_sketched=False).copy()
        records["sha256"][records["way"] == Way.RECEIVED_ACTIVATION] ^= 1
        claimed.records = records.tobytes()

    lies = _claims(flipped, _of(MIDDLE), excuse)
    found = judged(again, lies, generation=generation)
    assert found is not None and found.member == _of(MIDDLE)
    assert "says that home.1 sent another activation" in found.cause and "without its signature" in found.cause


def test_an_earlier_attempts_signature_convicts_nobody(again: ReplicaHere, flipped: Contributed) -> None:
    """A receiver cannot use what its neighbour signed in another generation of the group."""
    found = judged(again, _says_it_sent_right(flipped, again), generation=4)
    assert found is not None and found.member == _of(LAST)


def test_a_stage_with_the_whole_transcript_of_an_honest_one_is_convicted_by_its_contribution(
    again: ReplicaHere, flipped: Contributed
) -> None:
    messages = flipped.messages | {_of(MIDDLE): again.members[_of(MIDDLE)].message_digests()}
    found = judged(again, replace(flipped, messages=messages), authority=None)
    assert found is not None and found.member == _of(MIDDLE)
    assert "sent the expected messages, but its contribution to layers.2 is another" in found.cause


@pytest.mark.parametrize(
    ("data", "cause"),
    [
        (b"\xff\xff", "no transcript"),
        (StageMessages(records=bytes(RECORD.itemsize + 1)).SerializeToString(), "no transcript"),
        (StageMessages(records=bytes(RECORD.itemsize)).SerializeToString(), "showed 1 messages, expected 20"),
    ],
)
def test_a_stage_without_a_transcript_of_its_messages_is_named(
    data: bytes, cause: str, again: ReplicaHere, right: Contributed
) -> None:
    found = judged(again, replace(right, messages=right.messages | {_of(1): data}))
    assert found is not None and (found.member, cause in found.cause) == (_of(1), True), found


def _on_another_machine(here: ReplicaHere) -> ReplicaHere:
    """Let all stages round differently, so that no message has the bits of another machine."""
    for member in here.members.values():
        assert isinstance(member, StageMember)
        stage = member.worker.stage
        stage._compute = partial(_scaled, stage._compute)  # type: ignore[method-assign]
    return here


def _scaled(compute: Callable[[Tensor, Tensor], Tensor], inputs: Tensor, tokens: Tensor) -> Tensor:
    return compute(inputs, tokens) * (1 + 1e-6)


def test_with_a_tolerance_honest_differences_name_nobody_and_lies_do(corpus: Path, tmp_path: Path) -> None:
    rounds = GroupRounds(group_spec(corpus, tolerance=0.1), tmp_path)
    rounds.go_on()
    again = _on_another_machine(rounds.here())
    again.train(STEPS)
    right = rounds.lie(MIDDLE, honest)
    assert right.messages[_of(LAST)] != again.members[_of(LAST)].message_digests()
    assert blame(again, right.messages, []) is None
    for lie in (flips_gradients, freezes, poisons(PAIR, [])):
        found = blame(again, rounds.lie(MIDDLE, lie).messages, [])
        assert found is not None and found.member == _of(MIDDLE), lie


def test_a_stage_that_only_widens_a_difference_is_not_named(corpus: Path, tmp_path: Path) -> None:
    """It received messages that differ by less than the tolerance, and sent some that differ by more."""
    rounds = GroupRounds(group_spec(corpus, tolerance=0.1), tmp_path)
    again = rounds.here()
    again.train(STEPS)

    def widen(claimed: StageMessages) -> None:
        records = records_of(claimed, is_sketched=True).copy()
        records["sketch"][records["way"] == Way.RECEIVED_ACTIVATION] *= 1.06
        records["sketch"][records["way"] == Way.SENT_ACTIVATION] *= 1.12
        claimed.records = records.tobytes()

    right = rounds.lie(MIDDLE, honest)
    assert blame(again, _claims(right, _of(MIDDLE), widen).messages, []) is None
