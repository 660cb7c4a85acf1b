"""Transcripts of stages: what they hold, when they are complete, and the signatures of neighbours."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from group_rounds import AUTHORITY, GENERATION, GROUP, STAGES, STEPS, GroupRounds, group_spec
from torch import Tensor

from hetero_pp.core.errors import MalformedMessage, PeerAtFault
from hetero_pp.link.in_process import InProcessLinkEnd
from hetero_pp.link.protocol import Message
from hetero_pp.messages.messages_pb2 import ACTIVATION, EVALUATION, GRADIENT, LinkHeader, StageMessages, Statement
from hetero_pp.model.part_settings import BoundarySettings
from hetero_pp.pipeline.coefficients import format_of
from hetero_pp.pipeline.schedule import Action, one_forward_one_backward
from hetero_pp.rpc.identities import Authority, IdentitySigner, check_statement
from replica_groups.audit.recompute import ReplicaHere
from replica_groups.member.trainers import StageMember
from stages.transcript import GroupPosition, Sketches, Transcript, Way, records_of

WAYS = {
    Action.RECEIVE_ACTIVATION: Way.RECEIVED_ACTIVATION,
    Action.SEND_ACTIVATION: Way.SENT_ACTIVATION,
    Action.RECEIVE_GRADIENT: Way.RECEIVED_GRADIENT,
    Action.SEND_GRADIENT: Way.SENT_GRADIENT,
}
FLUSHES = [Way.SENT_GRADIENT, Way.RECEIVED_ACTIVATION, Way.SENT_ACTIVATION, Way.RECEIVED_GRADIENT]


def _transcript(sketches: Sketches | None = None) -> Transcript:
    return Transcript(GroupPosition("run", ["home.0", "home.1", "home.2"], 1), sketches)


def _records(transcript: Transcript) -> Any:
    return records_of(StageMessages.FromString(transcript.to_bytes()), is_sketched=False)


def _worker(here: ReplicaHere, stage: int) -> Any:
    member = here.members[f"{GROUP}.{stage}"]
    assert isinstance(member, StageMember)
    return member.worker


@pytest.fixture(scope="module")
def rounds(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> GroupRounds:
    torch.set_num_threads(1)
    return GroupRounds(group_spec(corpus), tmp_path_factory.mktemp("rounds"))


class _Lazy:
    """A thread that digests a message only when somebody waits for it."""

    def submit(self, do: Callable[..., Any], *arguments: Any) -> _Later:
        return _Later(partial(do, *arguments))


class _Later:
    def __init__(self, do: Callable[[], Any]) -> None:
        self.result = cache(do)


def test_both_ends_of_each_link_hold_the_same_messages_in_schedule_order(
    rounds: GroupRounds, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Messages are digested before their memory is used again: here it is overwritten at once."""
    receive = InProcessLinkEnd.receive

    def copied(end: InProcessLinkEnd, timeout: float | None = None) -> Message:
        message = receive(end, timeout)
        return Message(message.header, tuple(tensor.clone() for tensor in message.tensors))

    def overwritten(end: InProcessLinkEnd, message: Message) -> None:
        for tensor in message.tensors:
            tensor.fill_(1)

    monkeypatch.setattr(InProcessLinkEnd, "receive", copied)
    monkeypatch.setattr(InProcessLinkEnd, "recycle", overwritten)
    here = rounds.here()
    for stage in range(STAGES):
        _worker(here, stage).transcript._thread = _Lazy()
    here.train(STEPS)
    found = [_records(_worker(here, stage).transcript) for stage in range(STAGES)]
    for before, after in pairwise(found):
        for sent, received in ((before, after), (after, before)):
            way = Way.SENT_ACTIVATION if sent is before else Way.SENT_GRADIENT
            there = sent[sent["way"] == way]
            here_ = received[received["way"] == way - 1]
            assert len(there) == STEPS * 2 + 1
            assert (there["sha256"] == here_["sha256"]).all()
    events = one_forward_one_backward(1, STAGES, micro_batches=2)
    expected = [
        (WAYS[event.action], step, event.micro_batch)
        for step in range(STEPS)
        for event in events
        if event.action in WAYS
    ]
    expected += [(way, STEPS, 0) for way in FLUSHES]
    assert [(one["way"], one["step"], one["micro_batch"]) for one in found[1]] == expected


def test_without_the_audit_nothing_is_kept_and_no_message_is_added(corpus: Path, tmp_path: Path) -> None:
    here = GroupRounds(group_spec(corpus, tolerance=None), tmp_path).here()
    here.train(STEPS)
    assert [member.message_digests() for member in here.members.values()] == [b""] * STAGES
    counts = [
        (_worker(here, stage)._downstream.ledger.of_round(1), _worker(here, stage + 1)._upstream.ledger.of_round(1))
        for stage in range(STAGES - 1)
    ]
    assert {(forward.messages, backward.messages) for forward, backward in counts} == {(STEPS * 2 + 1, STEPS * 2)}


def _header(**changes: Any) -> LinkHeader:
    return LinkHeader(**{"purpose": ACTIVATION, "step": 1, "micro_batch": 2, "rows": 4, "gradient_norm": 0.5} | changes)


def _digest(header: LinkHeader, *tensors: Tensor) -> bytes:
    transcript = _transcript()
    transcript.received(Way.RECEIVED_ACTIVATION, Message(header, tensors))
    return bytes(_records(transcript)[0]["sha256"])


def test_a_digest_is_that_of_all_that_the_receiver_uses() -> None:
    tokens, values = torch.arange(3, dtype=torch.uint8), torch.ones(2, 3, dtype=torch.bfloat16)[:, ::2]
    expected = hashlib.sha256(struct.pack("<I?d", 4, False, 0.5) + bytes([0, 1, 2]) + b"\x80\x3f" * 4).digest()
    assert _digest(_header(), tokens, values) == expected
    others = [_header(rows=5), _header(is_last=True), _header(gradient_norm=0.25), _header(gradient_norm=None)]
    digests = {_digest(header, tokens, values) for header in others} | {_digest(_header(), tokens)}
    assert len(digests - {expected}) == 5


def test_a_transcript_forgets_a_cut_off_loop_and_leaves_evaluations_out() -> None:
    transcript = _transcript()
    transcript.expect(Way.SENT_ACTIVATION, _header())  # and is never sent
    transcript.begin()
    transcript.received(Way.RECEIVED_ACTIVATION, Message(_header(purpose=EVALUATION)))
    transcript.received(Way.RECEIVED_GRADIENT, Message(LinkHeader(purpose=GRADIENT, squared_norm=3.0)))
    [record] = _records(transcript)
    assert (record["way"], record["norm"]) == (Way.RECEIVED_GRADIENT, 3.0)


@pytest.mark.parametrize("boundary", [{"bits": 4}, {"dtype": "bf16"}])
def test_a_sketch_tells_one_changed_token_from_honest_differences(boundary: dict[str, Any]) -> None:
    format_ = format_of(BoundarySettings.model_validate({"rank": "full"} | boundary))
    sketches = Sketches(format_, 3, GROUP)
    values = torch.randn(4, 64, 32, generator=torch.Generator().manual_seed(1))
    right = sketches.of(format_.activation(values))
    poisoned = values.clone()
    poisoned[1, 7] = -poisoned[1, 7]

    def apart(other: Tensor) -> float:
        return ((sketches.of(format_.activation(other)) - right).norm() / right.norm()).item()

    assert apart(poisoned) > 0.02 > 4 * apart(values * (1 + 1e-6))
    assert apart(-values) > 1.9
    assert torch.equal(Sketches(format_, 3, GROUP).of(format_.activation(values)), right)


def test_a_stage_refuses_a_neighbour_that_signs_something_else(rounds: GroupRounds) -> None:
    here = rounds.here()
    for stage in range(STAGES):
        signer = IdentitySigner(AUTHORITY.identity(f"{GROUP}.{stage}"))
        _worker(here, stage).transcript.enter(GENERATION + (stage == 2), signer)
    with pytest.raises(PeerAtFault, match=r"found no signature of home\.[123] under what it sent"):
        here.train(STEPS)


def test_a_neighbour_signs_as_the_present_holder_of_its_slot() -> None:
    signer = IdentitySigner(AUTHORITY.identity("home.1"))
    for holder in (None, 0):
        signer.check(signer.sign(b"sent"), b"sent", "home.1", holder)
    with pytest.raises(MalformedMessage, match=r"found the signature of holder 0 of home\.1, expected 2"):
        signer.check(signer.sign(b"sent"), b"sent", "home.1", 2)


def test_a_statement_is_of_its_member_its_authority_and_its_bytes() -> None:
    statement = IdentitySigner(AUTHORITY.identity("home.1")).sign(b"sent")
    check_statement(statement, b"sent", "home.1", AUTHORITY.certificate)
    other = Authority("another secret").certificate
    for claimed, data, member, authority in (
        (statement, b"other", "home.1", AUTHORITY.certificate),
        (statement, b"sent", "home.2", AUTHORITY.certificate),
        (statement, b"sent", "home.1", other),
        (Statement(), b"sent", "home.1", AUTHORITY.certificate),
        (Statement(certificate=b"x" * 5000), b"sent", "home.1", AUTHORITY.certificate),
    ):
        with pytest.raises(MalformedMessage, match=r"found (no|the) signature of home"):
            check_statement(claimed, data, member, authority)
