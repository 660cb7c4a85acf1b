"""Stages whose copies take place beside the computation: the same bits, and each message as soon as it is complete."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from stage_members import StageMembers, group_spec, links_of
from torch import Tensor

from hetero_pp.config.spec import RunSpec
from hetero_pp.core.errors import HeteroPPError
from hetero_pp.link.in_process import in_process_pair
from hetero_pp.link.protocol import LinkEnds, Message
from hetero_pp.messages.messages_pb2 import Evaluation
from replica_groups.member import trainers
from stages import worker
from stages.sender import Arriving, Copies, Tensors
from stages.worker import StageWorker

SECONDS = 10.0
"""Longest time for which a test waits for another thread."""


@pytest.fixture(autouse=True)
def one_torch_thread() -> Iterator[None]:
    """Use one Torch thread, because each stage already has a thread of its own."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class _Late(Copies):
    """Copies whose memory holds other bits until somebody waits."""

    overlaps = True

    def __init__(self) -> None:
        self.begun: list[Tensors] = []
        self.complete: list[Tensors] = []
        self.hold: Callable[[], object] = lambda: None
        """Called before a copy is complete."""

    def to_host(self, tensors: Tensors) -> Arriving:
        self.begun.append(tensors)
        return _LateTensors(self, tensors)

    def to_device(self, tensors: Tensors) -> Tensors:
        return Copies(torch.device("cpu")).to_device(tensors)


class _LateTensors:
    def __init__(self, copies: _Late, tensors: Tensors) -> None:
        self._copies, self._sources = copies, tensors
        self._rooms = tuple(torch.full_like(tensor, 77) for tensor in tensors)

    def __call__(self) -> Tensors:
        self._copies.hold()
        for room, source in zip(self._rooms, self._sources, strict=True):
            room.copy_(source)
        self._copies.complete.append(self._sources)
        return self._rooms


def _copies(one: StageWorker) -> _Late:
    assert isinstance(one._copies, _Late)
    return one._copies


def _ends(spec: RunSpec) -> list[LinkEnds]:
    pairs = [in_process_pair(link, seed=1) for link in links_of(spec)]
    above = [None, *(second for _, second in pairs)]
    below = [*(first for first, _ in pairs), None]
    return [LinkEnds(*ends) for ends in zip(above, below, strict=True)]


def _group(spec: RunSpec, cache: Path) -> StageMembers:
    return StageMembers(spec, _ends(spec), cache)


def _trained(group: StageMembers) -> tuple[list[float], dict[str, Tensor], Evaluation]:
    losses = [step.loss for step in group.train(1)[-1]]
    return losses, group.parameters(), group.evaluate(1)


def test_the_bits_are_those_without_overlap(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = group_spec(str(corpus), {"anchors": {"rank": 4}}, audit={"recompute": {"tolerance": 0.1}})
    without = _group(spec, tmp_path)
    expected = _trained(without)
    monkeypatch.setattr(worker, "copies_of", lambda device: _Late())
    group = _group(spec, tmp_path)
    losses, parameters, evaluation = _trained(group)
    digests = [[one.message_digests() for one in group_.members] for group_ in (without, group)]
    assert digests[0] == digests[1]
    assert (losses, evaluation) == (expected[0], expected[2])
    for name, tensor in parameters.items():
        assert tensor.equal(expected[1][name]), name
    for copies in (_copies(member.worker) for member in group.members):
        assert len(copies.complete) == len(copies.begun)
        assert len(copies.begun) > 0


def test_a_message_leaves_during_the_next_forward(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first copy is complete only while the second forward runs, and that forward ends when its message is sent."""
    monkeypatch.setattr(worker, "copies_of", lambda device: _Late())
    group, began, sent = _group(group_spec(str(corpus)), tmp_path), threading.Event(), threading.Event()
    first, link = group.members[0].worker, group.ends[0].downstream
    assert link is not None
    forward, send, met = first._actions[worker.Action.FORWARD], link.send, list[bool]()

    def met_forward(step: worker._Step, index: int) -> None:
        if index == 1:
            began.set()
            met.append(sent.wait(SECONDS))
        forward(step, index)

    def noted_send(message: Message) -> None:
        send(message)
        sent.set()

    first._actions[worker.Action.FORWARD] = met_forward
    monkeypatch.setattr(link, "send", noted_send)
    _copies(first).hold = lambda: met.append(began.wait(SECONDS))
    _trained(group)
    assert len(met) > 1
    assert all(met)


def test_a_stage_that_waits_computes_until_its_copies_are_complete(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a stalled device would look like a neighbour that is late."""
    monkeypatch.setattr(worker, "copies_of", lambda device: _Late())
    group = _group(group_spec(str(corpus)), tmp_path)
    last, upstream = group.members[-1], group.ends[-1].upstream
    assert upstream is not None
    receive, waiting, seen = upstream.receive, threading.Event(), list[bool]()

    def met_receive(timeout: float | None = None) -> Message:
        if len(_copies(last.worker).begun) == 1 and not waiting.is_set():
            seen.append(last.activity()[1])
            waiting.set()
        return receive(timeout)

    monkeypatch.setattr(upstream, "receive", met_receive)
    _copies(last.worker).hold = lambda: waiting.wait(SECONDS)
    group.train(1)
    assert seen == [True]
    assert not last.worker._sender.is_busy


def test_what_cannot_be_sent_ends_the_step(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stage waits for a gradient when its activation turns out to be NaN. The next attempt knows nothing of it."""
    spec = group_spec(str(corpus))
    expected = _trained(_group(spec, tmp_path))
    monkeypatch.setattr(worker, "copies_of", lambda device: _Late())
    monkeypatch.setattr(trainers, "RECEIVE_TIMEOUT", SECONDS)
    group = _group(spec, tmp_path)
    with torch.no_grad():
        next(iter(group.members[0].parameters.parameters.values())).fill_(torch.nan)
    with pytest.raises(HeteroPPError, match="stage 0 of home diverged: an activation became infinite"):
        group.train(1)
    group.undo(_ends(spec))
    assert _trained(group)[0] == expected[0]
