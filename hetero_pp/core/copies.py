"""Copies between the host and the device that computes. On CUDA they run beside the computation, on their own streams.

Only what crosses a link is copied: symbols, token ids and keys.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

Tensors = tuple[Tensor, ...]


class Arriving(Protocol):
    """Tensors on their way to the host."""

    def wait(self) -> Tensors:
        """Return the tensors in host memory, once they are complete."""


class Copies(Protocol):
    """Copies between the host and one device."""

    overlaps: bool  # whether a copy to the host takes place while the caller goes on, so that a later `wait` saves time

    def to_host(self, tensors: Tensors) -> Arriving:
        """Begin to copy results of the computation to the host. The tensors must not be changed afterwards."""

    def to_device(self, tensors: Tensors) -> Tensors:
        """Return host tensors on the device, for the computation that the caller starts next."""


def copies_of(device: torch.device) -> Copies:
    if device.type in ("cuda", "xpu"):
        return BesideCompute(device, torch.get_device_module(device))
    return Blocking(device)


@dataclass(frozen=True)
class Here:
    """Tensors that are in host memory. Implements Arriving."""

    tensors: Tensors

    def wait(self) -> Tensors:
        return self.tensors


class Blocking:
    """Copies at once, on a device without streams such as `mps`, or nothing if the CPU computes. Implements Copies."""

    overlaps = False

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def to_host(self, tensors: Tensors) -> Arriving:
        return Here(tuple(tensor.cpu() for tensor in tensors))

    def to_device(self, tensors: Tensors) -> Tensors:
        return tuple(tensor.to(self._device) for tensor in tensors)


class Streams(Protocol):
    """The part of `torch.cuda` or `torch.xpu` that copies need."""

    def Stream(self, device: torch.device) -> Any: ...

    def current_stream(self, device: torch.device) -> Any: ...

    def stream(self, stream: Any) -> AbstractContextManager[Any]: ...


def _pinned(like: Tensor) -> Tensor:
    """Return empty host memory for a tensor, that a device can read and write without the CPU."""
    return torch.empty_like(like, device="cpu", memory_format=torch.contiguous_format, pin_memory=True)


class BesideCompute:
    """Copies through pinned memory, on two streams of its own beside the computation. Implements Copies."""

    overlaps = True

    def __init__(self, device: torch.device, streams: Streams, pinned: Callable[[Tensor], Tensor] = _pinned) -> None:
        """`pinned` returns memory for a copy. torch does not use it for anything else before its copies have ended."""
        self._device, self._streams, self._pinned = device, streams, pinned
        self._down, self._up = streams.Stream(device), streams.Stream(device)

    def __deepcopy__(self, memo: dict[int, object]) -> BesideCompute:
        """Return this object: a copy of a replica computes on the same device, and streams cannot be copied."""
        return self

    def to_host(self, tensors: Tensors) -> Arriving:
        self._down.wait_stream(self._streams.current_stream(self._device))
        with self._streams.stream(self._down):
            rooms = tuple(self._pinned(tensor).copy_(tensor, non_blocking=True) for tensor in tensors)
            return _OnItsWay(rooms, self._down.record_event(), [tensors])

    def to_device(self, tensors: Tensors) -> Tensors:
        current = self._streams.current_stream(self._device)
        with self._streams.stream(self._up):
            rooms = [self._pinned(tensor).copy_(tensor) for tensor in tensors]
            found = tuple(room.to(self._device, non_blocking=True) for room in rooms)
        current.wait_stream(self._up)
        for tensor in found:
            tensor.record_stream(current)  # it was allocated for the stream of the copy
        return found


@dataclass(frozen=True)
class _OnItsWay:
    """A copy that runs on a stream. Implements Arriving."""

    rooms: Tensors
    done: Any
    sources: list[Tensors] = field(repr=False)
    """The copied tensors, kept so that their memory is not used for something else meanwhile."""

    def wait(self) -> Tensors:
        self.done.synchronize()
        self.sources.clear()
        return self.rooms
