"""Sends a stage's messages in order, each as soon as its tensors are in host memory, while the stage computes.

Copies between the host and the device that computes run beside the computation on CUDA, on their own streams. Only what
crosses a link is copied: symbols, token ids and keys.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import torch
from torch import Tensor

from hetero_pp.core.device import use
from hetero_pp.link.protocol import LinkEnd, Message

Tensors = tuple[Tensor, ...]
Arriving = Callable[[], Tensors]  # returns tensors that are on their way to the host, once they are complete
MakeMessage = Callable[[Tensors], Message]
"""Makes a message from its tensors in host memory. Raises what `LinkEnd.send` does, or HeteroPPError."""


def copies_of(device: torch.device) -> Copies:
    if device.type in ("cuda", "xpu"):
        return BesideCompute(device, torch.get_device_module(device))
    return Copies(device)


class Copies:
    """Copies at once, between the host and a device without streams such as `mps`, or nothing if the CPU computes."""

    overlaps = False
    """Whether a copy to the host takes place while the caller goes on, so that waiting later saves time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def to_host(self, tensors: Tensors) -> Arriving:
        """Begin to copy results of the computation to the host. The tensors must not be changed afterwards."""
        here = tuple(tensor.cpu() for tensor in tensors)
        return lambda: here

    def to_device(self, tensors: Tensors) -> Tensors:
        """Return host tensors on the device, for the computation that the caller starts next."""
        return tuple(tensor.to(self._device) for tensor in tensors)


def _pinned(like: Tensor) -> Tensor:
    """Return empty host memory for a tensor, that a device can read and write without the CPU."""
    return torch.empty_like(like, device="cpu", memory_format=torch.contiguous_format, pin_memory=True)


class BesideCompute(Copies):
    """Copies through pinned memory, on two streams of its own beside the computation."""

    overlaps = True

    def __init__(self, device: torch.device, streams: Any, pinned: Callable[[Tensor], Tensor] = _pinned) -> None:
        """`streams`: `torch.cuda` or `torch.xpu`.

        `pinned` returns memory for a copy. torch does not use it for anything else before its copies have ended.
        """
        super().__init__(device)
        self._streams, self._pinned = streams, pinned
        self._down, self._up = streams.Stream(device), streams.Stream(device)

    def __deepcopy__(self, memo: dict[int, object]) -> BesideCompute:
        """Return this object: a copy of a replica computes on the same device, and streams cannot be copied."""
        return self

    def to_host(self, tensors: Tensors) -> Arriving:
        self._down.wait_stream(self._streams.current_stream(self._device))
        with self._streams.stream(self._down):
            rooms = tuple(self._pinned(tensor).copy_(tensor, non_blocking=True) for tensor in tensors)
            done, sources = self._down.record_event(), [tensors]

        def wait() -> Tensors:
            done.synchronize()
            sources.clear()  # kept until now, so that their memory is not used for something else meanwhile
            return rooms

        return wait

    def to_device(self, tensors: Tensors) -> Tensors:
        current = self._streams.current_stream(self._device)
        with self._streams.stream(self._up):
            rooms = [self._pinned(tensor).copy_(tensor) for tensor in tensors]
            found = tuple(room.to(self._device, non_blocking=True) for room in rooms)
        current.wait_stream(self._up)
        for tensor in found:
            tensor.record_stream(current)  # it was allocated for the stream of the copy
        return found


class Sender:
    """One thread that waits for copies to the host and sends them.

    After the first failure nothing more is sent. Every link that lacks a message is aborted, so that the stage does not
    wait for an answer.
    """

    def __init__(self, device: torch.device) -> None:
        self._thread = ThreadPoolExecutor(1, "sender", use, (device,))
        self._newest: Future[None] | None = None
        self._failure: Exception | None = None
        self._copied_at = -math.inf

    @property
    def is_busy(self) -> bool:
        """Whether a message is not yet sent."""
        newest = self._newest
        return newest is not None and not newest.done()

    @property
    def copied_at(self) -> float:
        """Time (time.perf_counter) at which the newest copy was complete; now, if messages are not yet sent."""
        return time.perf_counter() if self.is_busy else self._copied_at

    def begin(self) -> None:
        """Forget the failure of a step that was cut off, once its messages are gone."""
        if self._newest is not None:
            wait([self._newest])
        self._newest = self._failure = None

    def post(self, link: LinkEnd, arriving: Arriving, message_of: MakeMessage) -> None:
        """Queue a message and return at once."""
        self._newest = self._thread.submit(self._send, link, arriving, message_of)

    def finish(self) -> None:
        """Wait until all messages are sent. Raises the first failure."""
        if self._newest is not None:
            self._newest.result()
        if self._failure is not None:
            raise self._failure

    def _send(self, link: LinkEnd, arriving: Arriving, message_of: MakeMessage) -> None:
        try:
            if self._failure is None:
                tensors = arriving()
                self._copied_at = time.perf_counter()
                link.send(message_of(tensors))
                return
        except Exception as error:  # noqa: BLE001 (the stage's thread raises it)
            self._failure = error
        link.abort(f"a message could not be sent: {self._failure}")
