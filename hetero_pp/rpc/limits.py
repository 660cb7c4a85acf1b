"""Deadlines and sizes of all calls, and what each caller of a server may do.

gRPC bounds no rate of calls: a stream that is opened and reset at once costs its sender two small frames, and the
server a Python call. The connection of a caller that exceeds the rate of calls is closed. No other caller is affected.
The largest request of each call follows from a run's configuration. Texts from others become fit for a terminal: short,
on one line, and without control characters.
"""

from __future__ import annotations

import math
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from urllib.parse import unquote

import grpc
import psutil
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from hetero_pp.config.spec import Roster
from hetero_pp.core.errors import TooMuch
from hetero_pp.core.proxies import numeric_address
from hetero_pp.core.text import escaped

MOST_CHARACTERS = 2_000
TEXT_BYTES_MAX = 4 * (MOST_CHARACTERS + 1)  # bytes of a text that `plain` has returned, in UTF-8


def plain(text: str, most: int = MOST_CHARACTERS) -> str:
    """Return at most `most` characters, all printable: white space as blanks, other characters as their escapes."""
    cut = text[:most]
    if not cut.isprintable():
        cut = "".join(one if one.isprintable() else " " if one.isspace() else escaped(one) for one in cut)
    return cut[:most] + ("…" if max(len(text), len(cut)) > most else "")


def make_plain(message: Message) -> None:
    """Apply `plain` to every text in a message, at any depth."""
    for field, value in message.ListFields():
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            for one in [value] if isinstance(value, Message) else value:
                make_plain(one)
        elif field.type == FieldDescriptor.TYPE_STRING:
            if isinstance(value, str):
                setattr(message, field.name, plain(value))
            else:
                value[:] = [plain(one) for one in value]


STALL_SECONDS = 60.0  # Seconds without a frame after which a stream is cut. A frame of 1 MiB takes 0.4 s at 20 Mbit/s.
LONGEST_WAIT = 20.0  # seconds after which a call that waits ends; the caller repeats it

REQUEST_SECONDS = STALL_SECONDS
"""Seconds after which a call whose request has not arrived is cut. 4 MiB take 34 s at 1 Mbit/s."""

# Streams of frames that one caller may have open. Each of its threads sends or fetches one at a time: the one that
# trains, with overlap the one that carries a round, and one whose round was given up. A stream may end later here than
# there, or be one of a lost connection that the server has not noticed yet.
BULK_CALLS_MAX = 4

STANDSTILL = 60.0  # seconds without progress after which an upload or a download is given up

ANSWER_SECONDS = LONGEST_WAIT + 10.0
"""Seconds after which an unanswered call is repeated. The exchange itself waits at most LONGEST_WAIT."""

STREAM_SECONDS = 6 * 3600.0  # seconds within which a contribution or a run checkpoint has to cross, on any line
AGAIN_SECONDS = 0.1  # pause between two attempts if an exchange or a listener ends the call at once

SECONDS_BETWEEN_LOOKS = 30.0
"""Longest time between two checks whether another run answers at the address of an exchange that is waited for."""

HEARTBEAT_TIMEOUT = 5.0  # seconds after which an unanswered heartbeat counts as lost; the next one may get through
CONNECT_TIMEOUT = 120.0  # seconds in which an exchange or a neighbour that is expected comes up
DIRECT_SECONDS = 10.0  # seconds for which a neighbour is dialled directly before the relay is used
CUT_OFF_SECONDS = 60.0  # seconds for which a link that is cut is dialled again, because the neighbour may live
HELLO_SECONDS, HELLO_BYTES_MAX = 10.0, 4096  # seconds within which the hello of a link arrives, and its largest size
PART_SECONDS = 0.5  # seconds that a listener may take to learn that a link is over
CLOSE_SECONDS = 5.0  # seconds for which a stage that closes a link waits until its peer has everything
STOP_SECONDS = 1.0  # seconds that an ended link may take to tell its peer why

CALLS_A_SECOND, BURST = 500.0, 2_000
"""Calls that one caller may begin: on average, and at once. An honest member begins about ten per second."""

BACKLOG_SECONDS_MAX = 1.0
"""A caller whose calls would have to wait longer than this is cut. With 16 calls open at once none has to."""

CUT_SECONDS = 10.0  # a caller that was cut is cut again at each call for this long

REQUEST_BYTES_A_SECOND, REQUEST_BYTES_AT_ONCE = float(1 << 20), 16 << 20
"""Bytes of requests that one caller may send, without frames of payload. Honest members send some KB per second."""

CPU_SHARE, CPU_SECONDS_AT_ONCE = 0.25, 10
"""Share of one core, and seconds of it at once, that the calls of one caller may take."""

DEBT_SECONDS_MAX = 10.0
"""Seconds that a call waits for bytes or CPU seconds of earlier ones. If it had to wait longer, it is then refused."""

_CALLERS_MAX = 1_000  # callers that are remembered before those whose budget is full again are forgotten


_LOOKS = 4  # number of checks within that time


class Pace:
    """A bucket for each caller that fills at a rate, up to a burst. Thread-safe."""

    def __init__(self, a_second: float, burst: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate, self._burst, self._clock = a_second, burst, clock
        self._lock = threading.Lock()
        self._empty_until: dict[str, float] = {}
        """Caller -> time at which its bucket was or will be empty; it fills from then on."""

    def due_in(self, caller: str, count: int) -> float:
        """Return the seconds to wait before `count` more are allowed. Raises TooMuch for more than a burst."""
        if count > self._burst:
            raise TooMuch(f"{caller} has sent {count} at once, expected at most {self._burst}")
        return self.spend(caller, count)

    def refused_for(self, caller: str) -> float:
        """Take one in and return 0, or take nothing in and return the seconds until one would be.

        A refused caller owes nothing for having asked. Otherwise one that retries faster than the rate would never be
        let in again.
        """
        with self._lock:
            now = self._clock()
            since = self._empty_after(caller, 1, now)
            if since <= now:
                self._empty_until[caller] = since
        return max(0.0, since - now)

    def spend(self, caller: str, amount: float) -> float:
        """Take out of a bucket what a call has cost; return the seconds for which it is then less than empty."""
        with self._lock:
            now = self._clock()
            since = self._empty_until[caller] = self._empty_after(caller, amount, now)
        return max(0.0, since - now)

    def debt_seconds(self, caller: str) -> float:
        """Return the seconds until a bucket is not less than empty."""
        with self._lock:
            return max(0.0, self._empty_until.get(caller, -math.inf) - self._clock())

    def _empty_after(self, caller: str, count: float, now: float) -> float:
        """Return when the caller's bucket is empty once so much is taken from it."""
        full = now - self._burst / self._rate
        if len(self._empty_until) > _CALLERS_MAX:  # those whose buckets are full again are like new ones
            self._empty_until = {caller: since for caller, since in self._empty_until.items() if since > full}
        return max(self._empty_until.get(caller, -math.inf), full) + count / self._rate


class CallRate(Pace):
    """The calls that each caller may begin on one server. Safe to use from many threads."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(CALLS_A_SECOND, BURST, clock)

    def due_in(self, caller: str, count: int = 1) -> float:
        """Return the seconds that a call has to wait. Raises TooMuch for a caller that has to be cut."""
        with self._lock:
            now = self._clock()
            since = self._empty_after(caller, count, now)
            is_cut = since - now > BACKLOG_SECONDS_MAX
            self._empty_until[caller] = max(since, now + CUT_SECONDS) if is_cut else since
        if is_cut:
            raise TooMuch(f"{caller} began more than {CALLS_A_SECOND:g} calls per second; its connection is closed")
        return max(0.0, since - now)


class OpenCalls:
    """Open calls on one server, so that no caller occupies the threads of others."""

    def __init__(self, most: int, what: str = "calls") -> None:
        """`most`: open calls of each caller; `what`: their plural in error messages."""
        self._most, self._what = most, what
        self._open: Counter[str] = Counter()
        self._lock = threading.Lock()

    @contextmanager
    def one_more(self, caller: str) -> Iterator[None]:
        """Count one more call while the block runs. Raises TooMuch."""
        with self._lock:
            if self._open[caller] >= self._most:
                raise TooMuch(f"{caller} has {self._most} {self._what} open, expected no more")
            self._open[caller] += 1
        try:
            yield
        finally:
            with self._lock:
                self._open[caller] -= 1


def close_connection(peer: str) -> bool:
    """Close this process's TCP connection to a peer, named as gRPC names it; return whether there was one.

    gRPC for Python cannot close a single connection. The socket is shut down through a second descriptor, which is
    compared with the peer again: the first one may belong to another connection by then.
    """
    host, _, port = unquote(peer).partition(":")[2].rpartition(":")
    if not port.isdecimal():
        return False
    wanted = numeric_address(host.strip("[]")), int(port)
    for one in psutil.Process().net_connections("tcp"):
        if not one.raddr or (numeric_address(one.raddr[0]), one.raddr[1]) != wanted or one.fd < 0:
            continue
        with suppress(OSError), socket.socket(fileno=os.dup(one.fd)) as connection:
            found, at = connection.getpeername()[:2]
            if (numeric_address(found), at) == wanted:
                connection.shutdown(socket.SHUT_RDWR)
                return True
    return False


@dataclass(eq=False)
class _OpenStream:
    context: grpc.ServicerContext
    moved: float


class StreamWatch:
    """Watches the open streams of one server with one thread, which ends when no stream is open."""

    def __init__(self, seconds: float = STALL_SECONDS) -> None:
        self._seconds = seconds
        self._lock = threading.Lock()
        self._streams: set[_OpenStream] = set()
        self._is_watching = False

    def watched(self, frames: Iterable[bytes], context: grpc.ServicerContext) -> Generator[bytes, None, None]:
        """Yield the same frames, and cancel their call if none is taken, or none comes, for too long."""

        def watch() -> None:
            while True:
                time.sleep(self._seconds / _LOOKS)
                with self._lock:
                    if not self._streams:
                        self._is_watching = False
                        return
                    late = [one for one in self._streams if time.monotonic() - one.moved >= self._seconds]
                for one in late:
                    one.context.cancel()

        stream = _OpenStream(context, time.monotonic())
        with self._lock:
            self._streams.add(stream)
            if not self._is_watching:
                self._is_watching = True
                threading.Thread(target=watch, name="stalled streams", daemon=True).start()
        try:
            for frame in frames:
                stream.moved = time.monotonic()
                yield frame
                stream.moved = time.monotonic()
        finally:
            with self._lock:
                self._streams.discard(stream)


STATES_MAX = 16
"""Saved states that a member names when it joins. It keeps two, and may have been interrupted while it moved others."""

ADDRESS_BYTES_MAX = 300  # bytes of an address; a host name has at most 253
REPORTS_BYTES_MAX = 32 << 10  # Bytes of the reports in one call. Members send more in several calls.

_REQUEST_BYTES_MAX = 16 << 10
"""Bytes of a request without a list: a few numbers and names, and one text (TEXT_BYTES_MAX)."""

_NAME_BYTES, _DIGEST_BYTES, _FIELD_BYTES = 320, 32, 32
"""Bytes of a name of a run (or more, if it has longer ones), of a digest, and of numbers and lengths beside them."""

_JUDGEMENTS_A_REPLICA = 8


class RequestBounds:
    """Bytes of the largest requests of one run: longer ones are refused unread."""

    def __init__(self, roster: Roster, parameters: Collection[str], configuration_bytes: int) -> None:
        """`parameters`: names of all parameters; `configuration_bytes`: size of the configuration that hosts show."""
        names = {*roster.members, *roster.members.values(), *(link for link, _ in roster.counts), *parameters}
        names |= {block for blocks in roster.blocks.values() for block in blocks}
        name = max([_NAME_BYTES, *(len(one.encode()) for one in names)]) + _FIELD_BYTES
        blocks = max(map(len, roster.blocks.values()), default=0)
        judgements = _JUDGEMENTS_A_REPLICA * len(set(roster.members.values()))
        # Of a blob with a commitment, and with those that follow it; 32 names are those of restarted slots.
        header = (8 + 32 + 2 * blocks) * name
        self._most = {
            "Agree": 2 * configuration_bytes + (64 << 10),  # another configuration is told in which keys it differs
            "Join": STATES_MAX * (TEXT_BYTES_MAX + _FIELD_BYTES) + _REQUEST_BYTES_MAX,
            "RunCheckpoint": (3 * len(parameters) + 1) * (name + _FIELD_BYTES),  # with momentum and the basis
            "Confirm": len(parameters) * (name + _DIGEST_BYTES) + _FIELD_BYTES,
            "Deposit": header,
            "UploadUrl": header,
            "Uploaded": header,
            "Show": 2 * name,
            "Judge": judgements * (3 * name + TEXT_BYTES_MAX),
            "Report": REPORTS_BYTES_MAX,
            "Watch": (2 * len(roster.members) + 2) * name,
        }

    def of(self, call: str) -> int:
        """Return the bytes of the largest request of a call; of one that begins with a header, those of the header."""
        return self._most.get(call, _REQUEST_BYTES_MAX)
