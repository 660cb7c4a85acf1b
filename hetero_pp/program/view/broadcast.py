"""Sends what is new in one run to all viewers: one encoding for all, and no viewer waits for another."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

from starlette.responses import StreamingResponse
from starlette.types import Message, Send

from hetero_pp.program.report.recorder import to_json
from hetero_pp.program.view.run_view import RunView, Source

SECONDS_BETWEEN_FRAMES, _LONGEST = 0.5, 0.8
_SHARE = 1 / 200
"""Share of a core for frames: those of large runs come less often, but within _LONGEST seconds."""
_SECONDS_BETWEEN_LOOKS = 0.1
_SECONDS_WHEN_NOTHING_IS_NEW = 5.0
"""Interval of frames while no report arrives: rates sink, and a viewer sees that the server is there."""
_MOST_UNREAD = 32
"""Events that a viewer may leave unread before it is dropped. It may come back, and reads the history again."""
_SECONDS_TO_SEND = 20.0


class Broadcast:
    """The live events of one run."""

    def __init__(self, name: str, source: Source) -> None:
        self._name, self._source = name, source
        self._viewers: set[asyncio.Queue[bytes | None]] = set()
        self._task: asyncio.Task[None] | None = None
        self.is_closing = False
        """Whether the server ends; set by any thread."""
        self._cost = 0.0
        """CPU seconds of the last events."""

    @property
    def has_viewers(self) -> bool:
        return bool(self._viewers)

    async def events(self) -> AsyncIterator[bytes]:
        """Yield server-sent events until the viewer is gone, or is dropped because it reads too slowly."""
        queue: asyncio.Queue[bytes | None] = asyncio.Queue(_MOST_UNREAD)
        view = self._source.view
        assert view is not None
        if not self._viewers:
            view.take_changes(self._name)  # a viewer reads the history after it has begun to listen
        self._viewers.add(queue)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(view))
        try:
            yield _event("frame", view.frame())
            while (found := await queue.get()) is not None:
                yield found
        finally:
            self._viewers.discard(queue)

    async def _run(self, view: RunView) -> None:
        """Tell news while there are viewers. In the end none is left to wait for more: they may come back."""
        try:
            await self._tell(view)
        except Exception as error:  # noqa: BLE001 (viewers see what went wrong, and the run goes on)
            view.complain(f"the page cannot show what is new: {type(error).__name__}: {error}")
        finally:
            for viewer in list(self._viewers):
                self._drop(viewer)

    async def _tell(self, view: RunView) -> None:
        loop, clock = asyncio.get_running_loop(), view.state.clock
        version, told = -1, loop.time()
        while self._viewers:
            await asyncio.sleep(_SECONDS_BETWEEN_LOOKS)
            if self.is_closing:
                return
            now = self._source.view or view
            if now is not view or (clock[0] is not None and now.state.clock != clock):
                version = -1  # it began anew, or a pause or an earlier start became known: all told times are others
                self._send(_event("reset", "{}"))
            view, clock = now, now.state.clock
            due = max(SECONDS_BETWEEN_FRAMES, min(self._cost / _SHARE, _LONGEST))
            if loop.time() < told + (due if view.version != version else _SECONDS_WHEN_NOTHING_IS_NEW):
                continue
            version, told = view.version, loop.time()
            self._send(await asyncio.to_thread(self._news, view))

    def _news(self, view: RunView) -> bytes:
        """Return the events about everything since the last call."""
        was_live, began = view.is_live, time.thread_time()
        news = _event("history", to_json(view.take_changes(self._name))) + _event("frame", view.frame())
        self._cost = time.thread_time() - began
        return news if was_live else news + _event("end", "{}")

    def _send(self, event: bytes) -> None:
        for viewer in list(self._viewers):
            try:
                viewer.put_nowait(event)
            except asyncio.QueueFull:
                self._drop(viewer)

    def _drop(self, viewer: asyncio.Queue[bytes | None]) -> None:
        self._viewers.discard(viewer)
        if viewer.full():
            viewer.get_nowait()
        viewer.put_nowait(None)


def _event(name: str, data: str) -> bytes:
    return f"event: {name}\ndata: {data}\n\n".encode()


class EventStream(StreamingResponse):
    """A stream of server-sent events. A viewer that takes no bytes for a while is cut off."""

    media_type = "text/event-stream"

    async def stream_response(self, send: Send) -> None:
        async def within(message: Message) -> None:
            async with asyncio.timeout(_SECONDS_TO_SEND):
                await send(message)

        await super().stream_response(within)
