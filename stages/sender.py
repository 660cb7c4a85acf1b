"""Sends a stage's messages in order, each as soon as its tensors are in host memory, while the stage computes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

import torch

from hetero_pp.core.copies import Arriving, Tensors
from hetero_pp.core.device import use
from hetero_pp.link.protocol import LinkEnd, Message

MakeMessage = Callable[[Tensors], Message]
"""Makes a message from its tensors in host memory. Raises what `LinkEnd.send` does, or HeteroPPError."""


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
