"""Stages whose copies take place beside the computation: the same bits, and no message before its copy is complete."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from stage_members import StageMembers, group_spec, links_of
from torch import Tensor

from hetero_pp.core.copies import Arriving, OneMemory, Tensors
from hetero_pp.link.ends import LinkEnds
from hetero_pp.link.in_process import in_process_pair
from hetero_pp.run.spec import RunSpec
from stages import worker
from stages.worker import StageWorker


@pytest.fixture(autouse=True)
def one_torch_thread() -> Iterator[None]:
    """Use one Torch thread, because each stage already has a thread of its own."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class _Late:
    """Copies whose memory holds other bits until somebody waits. Implements Copies."""

    overlaps = True

    def __init__(self) -> None:
        self.under_way = 0

    def to_host(self, tensors: Tensors) -> Arriving:
        self.under_way += 1
        return _LateTensors(self, tensors)

    def to_device(self, tensors: Tensors) -> Tensors:
        return OneMemory().to_device(tensors)


class _LateTensors:
    def __init__(self, copies: _Late, tensors: Tensors) -> None:
        self._copies, self._sources = copies, tensors
        self._rooms = tuple(torch.full_like(tensor, 77) for tensor in tensors)

    def wait(self) -> Tensors:
        self._copies.under_way -= 1
        for room, source in zip(self._rooms, self._sources, strict=True):
            room.copy_(source)
        return self._rooms


def _group(spec: RunSpec, cache: Path) -> StageMembers:
    pairs = [in_process_pair(link, seed=1) for link in links_of(spec)]
    above = [None, *(second for _, second in pairs)]
    below = [*(first for first, _ in pairs), None]
    return StageMembers(spec, [LinkEnds(*ends) for ends in zip(above, below, strict=True)], cache)


def _trained(group: StageMembers) -> tuple[list[float], dict[str, Tensor], tuple[float, int]]:
    losses = [step.loss for step in group.train(1)[-1]]
    return losses, group.parameters(), group.evaluate(1)


def test_the_bits_are_those_without_overlap(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first stage starts computations while a copy is under way; whether others do depends on what has come."""
    spec = group_spec(str(corpus), {"anchors": {"rank": 4}})
    expected = _trained(_group(spec, tmp_path))
    monkeypatch.setattr(worker, "copies_of", lambda device: _Late())
    group, began = _group(spec, tmp_path), dict[int, int]()
    for member in group.members:
        _count_overlapped(member.worker, began)
    losses, parameters, evaluation = _trained(group)
    assert (losses, evaluation) == (expected[0], expected[2])
    for name, tensor in parameters.items():
        assert tensor.equal(expected[1][name]), name
    assert began[0] > 0
    assert [one.worker._copies.under_way for one in group.members] == [0, 0, 0]  # type: ignore[attr-defined]


def _count_overlapped(one: StageWorker, began: dict[int, int]) -> None:
    """Count the forwards and backwards of a stage that start while a copy is under way."""
    for action in (worker.Action.FORWARD, worker.Action.BACKWARD):
        act = one._actions[action]

        def counted(step: worker._Step, index: int, act: object = act) -> None:
            assert isinstance(one._copies, _Late)
            began[one.stage.spec.index] = began.get(one.stage.spec.index, 0) + (one._copies.under_way > 0)
            act(step, index)  # type: ignore[operator]

        one._actions[action] = counted
