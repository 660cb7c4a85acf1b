"""Copies beside the computation: CUDA's streams are played by queues, whose work is done only when somebody waits."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from hetero_pp.core.device import CPU
from stages.sender import BesideCompute, Copies, copies_of

UNKNOWN = -1.0
"""Content of memory before a copy is complete."""


class _Stream:
    """Work in the order in which it was queued."""

    def __init__(self, device: torch.device = CPU) -> None:
        self.work: list[Callable[[], object]] = []
        self.waited_for: list[_Stream] = []

    def wait_stream(self, other: _Stream) -> None:
        self.waited_for.append(other)
        self.work.append(other.run)

    def record_event(self) -> _Event:
        return _Event(self)

    def run(self) -> None:
        while self.work:
            self.work.pop(0)()


class _Event:
    def __init__(self, stream: _Stream) -> None:
        self.synchronize = stream.run


class _Streams(TorchFunctionMode):
    """Plays `torch.cuda`: what is copied without blocking is queued on the current stream."""

    def __init__(self) -> None:
        super().__init__()
        self.compute = self.current = _Stream()
        self.used_by: list[tuple[int, _Stream]] = []
        """(address, stream) of each call of `Tensor.record_stream`."""

    Stream = _Stream

    def current_stream(self, device: torch.device) -> _Stream:
        return self.current

    @contextmanager
    def stream(self, stream: _Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def __torch_function__(self, func: object, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
        kwargs = kwargs or {}
        if not kwargs.get("non_blocking"):
            return func(*args, **kwargs)  # type: ignore[operator]
        target, source = args if func is Tensor.copy_ else (torch.full_like(args[0], UNKNOWN), args[0])
        with torch._C.DisableTorchFunction():
            self.current.work.append(lambda: target.copy_(source))
        return target


def _memory(like: Tensor) -> Tensor:
    return torch.full_like(like, UNKNOWN)


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Streams]:
    with _Streams() as played:
        monkeypatch.setattr(Tensor, "record_stream", lambda one, user: played.used_by.append((one.data_ptr(), user)))
        yield played


def test_a_copy_to_the_host_is_complete_when_it_is_read(streams: _Streams) -> None:
    """It begins after the computation of its source, and the source is kept until it ends."""
    copies, result = BesideCompute(CPU, streams, _memory), torch.zeros(3)
    streams.compute.work.append(lambda: result.fill_(5.0))
    arriving = copies.to_host((result, torch.ones(2)))
    assert result.eq(0).all(), "the caller has waited"
    first, second = arriving()
    assert first.tolist() == [5.0] * 3
    assert second.tolist() == [1.0] * 2


def test_the_computation_waits_for_what_it_needs_from_the_host(streams: _Streams) -> None:
    copies, host = BesideCompute(CPU, streams, _memory), torch.ones(3)
    (own,) = copies.to_device((host,))
    host.zero_()  # the caller's buffer may be used again
    assert own.eq(UNKNOWN).all(), "the caller has waited"
    doubled = torch.zeros(3)
    streams.compute.work.append(lambda: doubled.copy_(own * 2))
    streams.compute.run()
    assert doubled.tolist() == [2.0] * 3
    assert (own.data_ptr(), streams.compute) in streams.used_by, "its memory could be used for something else"


def test_a_copy_of_a_replica_shares_its_streams(streams: _Streams) -> None:
    """torch.cuda, which makes the streams, is a module, and modules cannot be copied."""
    copies = BesideCompute(CPU, streams, _memory)
    assert copy.deepcopy(copies) is copies


def test_where_nothing_is_copied_nothing_waits() -> None:
    copies, one = copies_of(CPU), torch.ones(2)
    assert type(copies) is Copies
    assert copies.to_device((one,))[0] is copies.to_host((one,))()[0] is one
    assert type(copies_of(torch.device("mps"))) is Copies
