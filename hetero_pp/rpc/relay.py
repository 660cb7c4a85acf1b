"""Relay of stage links, for two ends of which neither can be dialled. It is part of the exchange's server.

Both ends dial the exchange. The relayed bytes are a TLS connection from end to end, so that the exchange can cut it but
neither read nor change it. Only bytes in transit are kept, and these are bounded: an end sends only as much as it has
credit for. Otherwise gRPC would keep unread bytes, tens of megabytes a call.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import grpc

from hetero_pp.core.errors import AskAgain, Forbidden, MalformedMessage, Refused
from hetero_pp.messages.messages_pb2 import DESCRIPTOR
from hetero_pp.messages.refusals import Kind
from hetero_pp.rpc.callers import Callers
from hetero_pp.rpc.services import LONGEST_WAIT, Door

SERVICE = DESCRIPTOR.services_by_name["Relay"]

LINK = "link"
"""Metadata key that names the link of a call."""

CARRIED_BYTES = 512 << 10
"""Largest frame in bytes. Each frame costs CPU time beside its bytes, at every process on the way."""

CREDIT = 2 << 20
"""Bytes that an end may have sent and the other end has not read."""

TAKEN_BYTES = 512 << 10
"""Bytes of credit that an empty frame grants to their sender. The first are granted when both ends have met."""

LEAST_COST = 1 << 10
"""Bytes of credit that a small frame costs, because it takes memory, too."""

MOST_CARRIED = 8
"""Open calls of one member: for each link one in use, remains of former ones, and one to come."""

LOOK_SECONDS = 1.0
"""Interval in seconds at which it is checked whether the sender is still admitted."""

_MOST_WAITING = 4
"""Waiting calls of one link: a machine that was cut off may have left some that are not known to be gone."""

_LAST_WORD_SECONDS = 1.0
"""Seconds for the error to reach an end that exceeded its credit; then its call is cut."""

_LAST_FRAMES_SECONDS = 10.0
"""Seconds for an end to read what is in transit, once the other end has gone."""


def cost_of(frame: bytes) -> int:
    """Return the credit in bytes that a frame costs."""
    return max(len(frame), LEAST_COST)


class Relay:
    """Relay of one run."""

    def __init__(self, callers: Callers, counts: Mapping[tuple[str, str], str], door: Door) -> None:
        """`counts`: (link, direction) -> member that sends there (Roster.counts)."""
        self.carried: Counter[str] = Counter()
        """Link -> relayed bytes in both directions."""
        self._callers, self._counts, self._door = callers, counts, door
        self._changed = threading.Condition()
        self._waiting: Mapping[str, deque[_Half]] = defaultdict(deque)

    def carried_for(self, member: str) -> int:
        """Return the relayed bytes, in both directions, of all links of a member."""
        links = {link for (link, _), sender in self._counts.items() if sender == member}
        with self._changed:
            return sum(self.carried[link] for link in links)

    def Carry(self, frames: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        """Relay a call. Raises Forbidden for a caller that is no end of the link, AskAgain if the other is away."""
        caller, link, dials = self._which(context)
        half = _Half(caller, link, context.cancel)
        if not context.add_callback(partial(self._is_over, half)):
            return
        threading.Thread(target=self._read, args=(frames, context, half), name="relay", daemon=True).start()
        if dials:
            self._find(half)
        else:
            self._be_found(half)
        yield from half.frames()
        if half.complaint is not None:
            raise half.complaint

    def _which(self, context: grpc.ServicerContext) -> tuple[str, str, bool]:
        """Return the caller, the link of its call, and whether the caller is the end that dials.

        Here the stage before is the one that dials; the relay works alike for both.
        """
        caller = self._callers.of(context).name
        link = dict(context.invocation_metadata()).get(LINK, "")
        dialler, listener = (self._counts.get((str(link), direction)) for direction in ("forward", "backward"))
        if dialler == listener or caller not in (dialler, listener):
            raise Forbidden(f"{caller} is not an end of the requested link")
        return caller, str(link), caller == dialler

    def _be_found(self, half: _Half) -> None:
        """Wait for the end that dials."""
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
                raise half.complaint or AskAgain(f"no member dialled {half.link}")

    def _find(self, half: _Half) -> None:
        """Meet an end that waits to be dialled: the newest one, which is the likeliest to be there."""
        with self._changed:
            waiting = self._waiting[half.link]
            self._changed.wait_for(lambda: waiting or half.is_closed, LONGEST_WAIT)
            if half.is_closed or not waiting:
                raise half.complaint or AskAgain(f"the other end of {half.link} is not connected")
            other = waiting.pop()
            other.peer, half.peer = half, other
            self._changed.notify_all()
        for met in (half, other):
            met.earn(CREDIT // TAKEN_BYTES)

    def _is_over(self, half: _Half) -> None:
        half.is_over.set()
        self._end(half)
        half.forget()

    def _end(self, half: _Half) -> None:
        """End a connection for both ends."""
        with self._changed:
            for end in (half, half.peer):
                if end is not None:
                    end.close()
            if half in self._waiting[half.link]:
                self._waiting[half.link].remove(half)
            self._changed.notify_all()

    def _of_who_is_let_in(self, frames: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        """Yield the same frames until their sender's ticket is revoked."""
        due = time.monotonic() + LOOK_SECONDS
        for frame in frames:
            if time.monotonic() >= due:
                self._callers.let_in(context)
                due = time.monotonic() + LOOK_SECONDS
            yield frame

    def _read(self, frames: Iterator[bytes], context: grpc.ServicerContext, half: _Half) -> None:
        """Pass on the frames of an end until one end is gone or the sender exceeds its credit.

        Frames are always read, so that they wait only where their bytes are counted.
        """
        try:
            for frame in self._of_who_is_let_in(frames, context):
                if not half.say(frame):
                    break
                with self._changed:
                    self.carried[half.link] += len(frame)
        except (MalformedMessage, Refused) as error:
            kind = Kind.MALFORMED if isinstance(error, MalformedMessage) else Kind.FORBIDDEN
            self._door.refuse(half.caller, str(error), kind)
            half.complaint = Refused(str(error))
        except grpc.RpcError:
            pass  # cut, as any line may be
        self._end(half)
        if not half.is_over.wait(_LAST_FRAMES_SECONDS if half.complaint is None else _LAST_WORD_SECONDS):
            half.cut()
        if half.peer is not None and not half.peer.is_over.wait(_LAST_FRAMES_SECONDS):
            half.peer.cut()


class _Half:
    """One end of a relayed connection, and the frames on their way to it."""

    def __init__(self, caller: str, link: str, cut: Callable[[], object]) -> None:
        """`cut` ends its call."""
        self.caller, self.link, self.cut = caller, link, cut
        self.peer: _Half | None = None
        self.is_closed = False
        self.is_over = threading.Event()
        """Ends its call."""
        self.complaint: Refused | None = None
        self._frames: deque[bytes] = deque()
        self._held, self._taken, self._due = 0, 0, 0
        """Credit that its unread frames cost, credit that it has not granted back yet, and empty frames to send."""
        self._changed = threading.Condition()

    def say(self, frame: bytes) -> bool:
        """Pass a frame to the other end; return False if that is gone. Raises MalformedMessage."""
        if not 0 < len(frame) <= CARRIED_BYTES:
            raise MalformedMessage(f"found a frame of {len(frame)} bytes, expected 1 to {CARRIED_BYTES}")
        peer = self.peer
        if self.is_closed:
            return False
        if peer is None:
            raise MalformedMessage("found a frame before the other end was connected, expected none")
        return peer.put(frame)

    def put(self, frame: bytes) -> bool:
        """Keep a frame for this end; return False if it is gone. Raises MalformedMessage beyond the sender's credit."""
        with self._changed:
            if self._held + cost_of(frame) > CREDIT:
                raise MalformedMessage(f"found more than {CREDIT} bytes at once, expected at most the credit")
            if not self.is_closed:
                self._held += cost_of(frame)
                self._frames.append(frame)
                self._changed.notify_all()
            return not self.is_closed

    def earn(self, frames: int) -> None:
        """Grant credit to this end, by so many empty frames."""
        with self._changed:
            self._due += frames
            self._changed.notify_all()

    def frames(self) -> Iterator[bytes]:
        """Yield frames as they come until the end is closed, and then those in transit."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self.is_closed or self._frames or self._due)
                if self._due:
                    self._due -= 1
                    frame = b""
                elif self._frames:
                    frame = self._frames.popleft()
                else:
                    return
            yield frame
            if frame:
                self._take(cost_of(frame))

    def _take(self, cost: int) -> None:
        """Note that this end has received a frame."""
        with self._changed:
            self._held -= cost
            full, self._taken = divmod(self._taken + cost, TAKEN_BYTES)
            peer = self.peer
        if full and peer is not None:
            peer.earn(full)

    def forget(self) -> None:
        """Drop the references between both ends, which would keep megabytes until the garbage collector runs."""
        with self._changed:
            self._frames.clear()

    def close(self) -> None:
        """Close this end: no frame follows."""
        with self._changed:
            self.is_closed = True
            self._changed.notify_all()
