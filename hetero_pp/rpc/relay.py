"""The relay: carries what the two ends of a stage link say to each other, where neither can be dialled.

Both dial the exchange. What is carried is a connection of their own, by TLS from end to end: it can be cut here, and
neither read nor changed. Nothing is kept but what is on its way, which is bounded.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping

import grpc

from hetero_pp.errors import AskAgain, Forbidden, MalformedMessage, Refused
from hetero_pp.messages.messages_pb2 import DESCRIPTOR
from hetero_pp.messages.messages_pb2_grpc import RelayServicer
from hetero_pp.rpc.callers import Callers

SERVICE = DESCRIPTOR.services_by_name["Relay"]

LINK = "link"
"""The key of a call's metadata that says what it carries."""

CARRIED_BYTES = 128 << 10
"""In one frame, at most."""

MOST_CARRIED = 16
"""Calls of one member at once: of each of its links what is in use, what is left of those before, and one to come."""

LONGEST_WAIT = 20.0
"""Seconds that a call waits for the other end; who wants to be found asks again."""

LOOK_SECONDS = 1.0
"""After which it is looked again whether who sends is let in."""

_MOST_WAITING = 4
"""Calls of one link that wait: of a machine that was cut off some may not be known to be gone."""

_FRAMES_ON_THEIR_WAY = 8
"""In each direction of a connection; then the sender waits."""


class Relay(RelayServicer):
    """Of one run."""

    def __init__(self, callers: Callers, counts: Mapping[tuple[str, str], str]) -> None:
        """`counts`: (link, direction) -> member that sends there; see Roster."""
        self.carried: Counter[str] = Counter()
        """By link, bytes in both directions."""
        self._callers, self._counts = callers, counts
        self._changed = threading.Condition()
        self._waiting: Mapping[str, deque[_Half]] = defaultdict(deque)

    def carried_for(self, member: str) -> int:
        """Bytes in both directions, of all links of which it is an end."""
        links = {link for (link, _), sender in self._counts.items() if sender == member}
        with self._changed:
            return sum(self.carried[link] for link in links)

    def Carry(  # type: ignore[override]  # a Frame is raw bytes
        self, frames: Iterator[bytes], context: grpc.ServicerContext
    ) -> Iterator[bytes]:
        """Raises Forbidden for who is no end of the link, AskAgain if the other end does not come."""
        link, dials = self._which(context)
        half = _Half(link)
        if not context.add_callback(lambda: self._end(half)):
            return
        other = self._find(half) if dials else self._be_found(half)
        arguments = (self._of_who_is_let_in(frames, context), half, other)
        threading.Thread(target=self._pass_on, args=arguments, name="relay", daemon=True).start()
        try:
            yield from half.frames()
        finally:
            other.close()
        if half.complaint is not None:
            raise half.complaint

    def _which(self, context: grpc.ServicerContext) -> tuple[str, bool]:
        """The link that a call is for, and whether the caller is the one that dials."""
        caller = self._callers.of(context).name
        link = dict(context.invocation_metadata()).get(LINK, "")
        dialler, listener = (self._counts.get((str(link), direction)) for direction in ("forward", "backward"))
        if dialler == listener or caller not in (dialler, listener):
            raise Forbidden(f"{caller} is no end of the link that it asks for")
        return str(link), caller == dialler

    def _be_found(self, half: _Half) -> _Half:
        """Wait for who dials."""
        with self._changed:
            waiting = self._waiting[half.link]
            waiting.append(half)
            if len(waiting) > _MOST_WAITING:
                waiting.popleft().close()
            self._changed.notify_all()
            self._changed.wait_for(lambda: half.peer is not None or half.is_closed, LONGEST_WAIT)
            if half.peer is None:
                if half in waiting:
                    waiting.remove(half)
                raise AskAgain(f"nobody dialled {half.link}")
            return half.peer

    def _find(self, half: _Half) -> _Half:
        """Who waits to be dialled: the last that came is the likeliest to be there."""
        with self._changed:
            waiting = self._waiting[half.link]
            self._changed.wait_for(lambda: waiting or half.is_closed, LONGEST_WAIT)
            if half.is_closed or not waiting:
                raise AskAgain(f"the other end of {half.link} is not there")
            other = waiting.pop()
            other.peer, half.peer = half, other
            self._changed.notify_all()
            return other

    def _end(self, half: _Half) -> None:
        """Its call is over."""
        half.close()
        with self._changed:
            if half in self._waiting[half.link]:
                self._waiting[half.link].remove(half)
            self._changed.notify_all()

    def _of_who_is_let_in(self, frames: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        """The same, until their sender was taken back."""
        due = time.monotonic() + LOOK_SECONDS
        for frame in frames:
            if time.monotonic() >= due:
                self._callers.let_in(context)
                due = time.monotonic() + LOOK_SECONDS
            yield frame

    def _pass_on(self, frames: Iterator[bytes], half: _Half, other: _Half) -> None:
        """Until either end has gone, or says more at once than it may."""
        try:
            for frame in frames:
                if len(frame) > CARRIED_BYTES:
                    raise MalformedMessage(f"found a frame of {len(frame)} bytes, expected at most {CARRIED_BYTES}")
                if not other.put(frame):
                    break
                with self._changed:
                    self.carried[half.link] += len(frame)
        except (MalformedMessage, Refused) as error:
            half.complaint = error
        except grpc.RpcError:
            pass  # cut, as any line may be
        finally:
            other.close()
            half.close()


class _Half:
    """What goes to one end of a connection."""

    def __init__(self, link: str) -> None:
        self.link = link
        self.peer: _Half | None = None
        self.is_closed = False
        self.complaint: MalformedMessage | Refused | None = None
        """Of its end, or of what that has sent."""
        self._frames: deque[bytes] = deque()
        self._changed = threading.Condition()

    def put(self, frame: bytes) -> bool:
        """Once there is room; returns False for an end that is gone."""
        with self._changed:
            self._changed.wait_for(lambda: self.is_closed or len(self._frames) < _FRAMES_ON_THEIR_WAY)
            if not self.is_closed:
                self._frames.append(frame)
                self._changed.notify_all()
            return not self.is_closed

    def frames(self) -> Iterator[bytes]:
        """As they come, until it is closed, and those that are on their way."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self.is_closed or self._frames)
                if not self._frames:
                    return
                frame = self._frames.popleft()
                self._changed.notify_all()
            yield frame

    def close(self) -> None:
        """Nothing more comes."""
        with self._changed:
            self.is_closed = True
            self._changed.notify_all()
