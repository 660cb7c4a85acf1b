"""Relay of stage links, for two ends of which neither can be dialled: in the exchange's process, and at both ends.

Each end makes a call that names the link. When both are there, each gets a key, dials the relay's port and shows the
key, and the relay passes on the bytes between the two connections. These bytes are a TLS connection from end to end, so
that the exchange can cut it but neither read nor change it. A call stays open as long as its connection: it tells the
relay at once if its member is gone or no longer admitted.

The bytes do not pass through gRPC, because that takes more than twice the CPU time (benchmarks/link.py). An end that
does not read stops the other one by TCP.

The relay cannot see what it carries, so two ends could use it as a tunnel. So it carries one connection of each link,
while the group of the link trains. Each direction gets a few times the bytes that the run predicts for a round.
"""

from __future__ import annotations

import errno
import math
import secrets
import selectors
import shutil
import socket
import sys
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import grpc

from hetero_pp.config.lines import EXCHANGE
from hetero_pp.core.errors import AskAgain, Forbidden
from hetero_pp.core.proxies import route_to
from hetero_pp.core.sockets import host_and_port, socket_folder
from hetero_pp.messages.messages_pb2 import DESCRIPTOR, RelayedLink, RelayPlace
from hetero_pp.messages.refusals import Kind
from hetero_pp.rpc.callers import Callers, shown
from hetero_pp.rpc.channels import answering, make_channel
from hetero_pp.rpc.identities import Credentials
from hetero_pp.rpc.limits import LONGEST_WAIT
from hetero_pp.rpc.services import Authenticator, calls_of

# Ratio of the bytes that a link may carry in a round to the predicted ones. Some are sent again after a cut, and with
# `outer.overlap` the first two rounds are trained at once.
CARRIED_FACTOR = 3

FREE_BYTES = 128 << 10
"""Bytes that each direction of a link may carry beside these in a round: handshakes, signatures, acknowledgements."""

MESSAGE_BYTES = 512  # bytes of a message beside its tensors: its header, and what gRPC and TLS add
LINE_FACTOR = 1.25  # ratio of the rate at which the relay carries a link to the rate of its configured line

LINE_AHEAD_SECONDS = 1.0
"""Seconds of a line's bytes that the relay carries without delay, because they may have waited elsewhere."""

# Seconds after which a link that has used up a round's bytes may carry as many again, little by little. So a round with
# many cuts ends at last.
REFILL_SECONDS = 600.0


@dataclass(frozen=True)
class LinkLimit:
    """Limit of what one direction of a link may carry."""

    step_bytes: float  # predicted bytes of an inner step
    evaluation_bytes: float = 0.0
    bits_a_second: float | None = None  # rate of the configured line; None: unlimited

    def round_bytes(self, steps: float) -> float:
        """Return the bytes that it may carry in a round."""
        return FREE_BYTES + CARRIED_FACTOR * (steps * self.step_bytes + self.evaluation_bytes)


class TrainedRound(NamedTuple):
    """The round that a group trains. In each round and generation its links may carry a round's bytes."""

    round: int
    generation: int
    steps: float  # largest number of its inner steps


class Budget:
    """Bytes that one direction of a link may carry still. Not thread-safe."""

    def __init__(self, limit: LinkLimit, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit, self._clock = limit, clock
        self._training: TrainedRound | None = None
        self._left = self._at = self._line_free_at = 0.0
        """Bytes that may follow; time at which they were used up; time at which the line has carried everything."""
        self._is_told = False

    def carry(self, count: int, trains: Callable[[], TrainedRound | None]) -> bool:
        """Take bytes from the budget. Return whether more may follow at once; if not, ask again with 0 bytes."""
        now, rate = self._clock(), self._limit.bits_a_second
        self._left -= count
        if rate is not None:
            self._line_free_at = max(now, self._line_free_at) + 8 * count / (LINE_FACTOR * rate)
        if self._left <= 0 and (training := trains()) is not None:
            whole = self._limit.round_bytes(training.steps)
            if training != self._training:
                self._training, self._left, self._at, self._is_told = training, whole, math.inf, False
            else:
                self._left = min(whole, self._left + max(0.0, now - self._at) * whole / REFILL_SECONDS)
                self._at = now
        return self._left > 0 and self._line_free_at <= now + LINE_AHEAD_SECONDS

    def is_newly_used_up(self) -> bool:
        """Return whether the bytes of a round are used up, once for each round."""
        was_told, self._is_told = self._is_told, self._is_told or self._left <= 0
        return self._is_told and not was_told


ROOM_BYTES = 128 << 10  # bytes that are read at once, and memory of one direction of a relayed connection

Check = Callable[[int], None]
"""Gets the number of bytes that were passed on; 0 if a second passed without any. May raise, which ends it."""


def pass_on(source: socket.socket, target: socket.socket, check: Check) -> None:
    """Pass on bytes until `source` ends or one of both is cut. Then tell `target` that nothing follows.

    `check` is called after each part; if sockets have a timeout, also after each timeout.
    """
    room = memoryview(bytearray(ROOM_BYTES))
    with suppress(OSError):
        while True:
            try:
                count = source.recv_into(room)
            except TimeoutError:
                check(0)
                continue
            if count == 0:
                break
            _send(target, room[:count], check)
            check(count)
    with suppress(OSError):
        target.shutdown(socket.SHUT_WR)


def _send(target: socket.socket, rest: memoryview, check: Check) -> None:
    """Send all. Unlike `sendall`, it may be interrupted by a timeout any number of times."""
    while rest:
        try:
            rest = rest[target.send(rest) :]
        except TimeoutError:
            check(0)


def cut(connection: socket.socket) -> None:
    """End a connection that other threads use. The descriptor stays theirs until they close it."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def without_delay(connection: socket.socket) -> socket.socket:
    """Return the connection after small messages on it are sent at once."""
    if connection.family != socket.AF_UNIX:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


KEY_BYTES = 32  # size of a key, which is drawn for one connection and valid once
SECONDS_TO_SHOW = 10.0  # seconds after which a connection that has not shown its key is closed
MOST_UNKNOWN = 256  # Connections that have not shown their key yet. With one more, the oldest of them is closed.
PAUSE = 0.1  # seconds between two attempts to accept a connection while this process has too many open files
_FORMER_KEYS = 1_000  # Keys that nobody expects any more. An honest end may show one when the other end has just gone.

Take = Callable[[socket.socket], None]


class MeetingPoint:
    """Listens at one address with one thread, and gives connections to those that expect their keys."""

    def __init__(self, listen: str) -> None:
        """`listen`: HOST:PORT; port 0: any free one. Raises OSError if it is busy."""
        where = host_and_port(listen)
        self._listener = socket.create_server(where, family=socket.AF_INET6 if ":" in where[0] else socket.AF_INET)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self.refuse: Callable[[str], None] = lambda peer: None
        """Counts a connection with a whole key that is not expected; `peer` is its address."""
        self._lock = threading.Lock()
        self._expected: dict[bytes, Take] = {}
        self._former: deque[bytes] = deque(maxlen=_FORMER_KEYS)
        self._unknown: dict[socket.socket, tuple[float, bytearray]] = {}
        """Connection -> time at which it is closed, and the part of its key that has arrived. Oldest first."""
        self._waker, self._woken = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="meeting point", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Close the port and all connections that have not shown their key."""
        self._waker.close()
        self._thread.join()

    @contextmanager
    def expecting(self, take: Take) -> Iterator[bytes]:
        """Yield a key. While the block runs, the first connection that shows it is given to `take`."""
        key = secrets.token_bytes(KEY_BYTES)
        with self._lock:
            self._expected[key] = take
        try:
            yield key
        finally:
            with self._lock:
                if self._expected.pop(key, None) is not None:
                    self._former.append(key)

    def _run(self) -> None:
        with self._selector, self._listener, self._woken:
            while True:
                for ready, _ in self._selector.select(1.0 if self._unknown else None):
                    if ready.fileobj is self._woken:
                        for connection in list(self._unknown):
                            self._drop(connection)
                        return
                    ready.data()
                now = time.monotonic()
                for connection in [one for one, (until, _) in self._unknown.items() if until <= now]:
                    self._drop(connection)

    def _accept(self) -> None:
        try:
            connection, (host, *_) = self._listener.accept()
        except OSError as error:  # otherwise the caller has gone
            if error.errno in (errno.EMFILE, errno.ENFILE):
                time.sleep(PAUSE)  # the connection stays in the queue, so the listener is ready again at once
            return
        connection.setblocking(False)
        self._unknown[connection] = time.monotonic() + SECONDS_TO_SHOW, bytearray()
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._hear(connection, host))
        if len(self._unknown) > MOST_UNKNOWN:
            self._drop(next(iter(self._unknown)))

    def _hear(self, connection: socket.socket, host: str) -> None:
        """Read what a connection sends until its key is complete. No byte after the key is read."""
        if connection not in self._unknown:
            return  # dropped for a newer one, after the selector had found both ready
        shown = self._unknown[connection][1]
        try:
            found = connection.recv(KEY_BYTES - len(shown))
        except BlockingIOError:
            return
        except OSError:
            found = b""
        shown.extend(found)
        if found and len(shown) < KEY_BYTES:
            return
        key = bytes(shown)
        with self._lock:
            take, is_late = self._expected.pop(key, None), key in self._former
        if take is None:
            self._drop(connection)
            if len(key) == KEY_BYTES and not is_late:  # others only try whether the port is open
                self.refuse(host)
            return
        self._selector.unregister(connection)
        del self._unknown[connection]
        connection.setblocking(True)
        take(connection)

    def _drop(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        del self._unknown[connection]
        connection.close()


SERVICE = DESCRIPTOR.services_by_name["Relay"]

MOST_CARRIED = 8  # open calls of one member: for each link one in use, remains of former ones, and one to come
IDLE_SECONDS = 10.0  # seconds after which a connection is cut whose group does not train

_POLL_SECONDS = 0.05
"""Interval at which an end that has to wait checks whether its group trains, or trains another round."""

LOOK_SECONDS = 1.0  # interval in seconds at which it is checked whether the sender is still admitted

_MOST_WAITING = 4
"""Waiting calls of one link: a machine that was cut off may have left some that are not known to be gone."""

_LAST_BYTES_SECONDS = 10.0  # seconds for an end to read what is in transit, once the other end has gone


class Relay:
    """Relay of one run."""

    def __init__(
        self,
        callers: Callers,
        counts: Mapping[tuple[str, str], str],
        authenticator: Authenticator,
        meeting_point: MeetingPoint,
        limits: Mapping[tuple[str, str], LinkLimit],
        trains: Callable[[str], TrainedRound | None],
    ) -> None:
        """`counts`: (link, direction) -> member that sends there (Roster.counts).

        `limits`: what they may carry; `trains`: what the group of a link trains, None if nothing.
        """
        self.carried: Counter[str] = Counter()  # link -> relayed bytes in both directions
        self._callers, self._counts, self._meeting_point = callers, counts, meeting_point
        self._authenticator, self._trains = authenticator, trains
        self._budgets = {key: Budget(limit) for key, limit in limits.items()}
        self._in_use: dict[str, _End] = {}  # link -> the end that dialled last
        self._changed = threading.Condition()
        self._waiting: Mapping[str, deque[_End]] = defaultdict(deque)
        reason = "found an unknown key at the relay's port"
        meeting_point.refuse = lambda peer: authenticator.refuse(peer, reason, Kind.STRANGER)

    @property
    def port(self) -> int:
        """Port of the exchange's host at which both ends connect."""
        return self._meeting_point.port

    def carried_for(self, member: str) -> int:
        """Return the relayed bytes, in both directions, of all links of a member."""
        links = {link for (link, _), sender in self._counts.items() if sender == member}
        with self._changed:
            return sum(self.carried[link] for link in links)

    def Carry(self, request: RelayedLink, context: grpc.ServicerContext) -> Iterator[RelayPlace]:
        """Relay one connection for its end. Raises Forbidden for a caller that is no end of the link.

        Raises AskAgain if the other end does not come, and Refused once the caller is no longer admitted.
        """
        # Here the stage before is the one that dials; the relay works alike for both.
        caller = self._callers.of(context).name
        dialler, listener = (self._counts.get((request.link, direction)) for direction in ("forward", "backward"))
        if dialler == listener or caller not in (dialler, listener):
            raise Forbidden(f"{caller} is not an end of the requested link")
        dials = caller == dialler
        budget = self._budgets[request.link, "forward" if dials else "backward"]
        end = _End(request.link, caller, budget, self._changed)
        try:
            if not context.add_callback(end.close):
                return
            peer = self._find(end) if dials else self._be_found(end)
            with self._meeting_point.expecting(end.take) as key:
                yield RelayPlace(port=self.port, key=key)
                own, its = end.connected(), peer.connected()
            pass_on(own, its, partial(self._passed, end, context))
            with self._changed:
                end.has_ended = True
                self._changed.notify_all()
                self._changed.wait_for(lambda: peer.has_ended or end.is_closed, _LAST_BYTES_SECONDS)
        finally:  # the last call to leave closes the connections, when no thread uses them any more
            with self._changed:
                end.has_ended = end.has_left = True
                both = [one for one in (end, end.peer) if one is not None]
                for one in both:
                    one.close()
                if end in self._waiting[end.link]:
                    self._waiting[end.link].remove(end)
                if self._in_use.get(end.link) is end:
                    del self._in_use[end.link]
                if all(one.has_left for one in both):
                    for one in both:
                        one.discard()

    def _be_found(self, end: _End) -> _End:
        """Wait for the end that dials, and return it."""
        with self._changed:
            waiting = self._waiting[end.link]
            waiting.append(end)
            if len(waiting) > _MOST_WAITING:
                waiting.popleft().close()
            self._changed.notify_all()
            self._changed.wait_for(lambda: end.peer is not None or end.is_closed, LONGEST_WAIT)
            if end.peer is None:
                raise AskAgain(f"no member dialled {end.link}")
            return end.peer

    def _find(self, end: _End) -> _End:
        """Meet an end that waits to be dialled, and return it: the newest one, which is the likeliest to be there.

        The connection that the link had before is cut, so that it has one.
        """
        until = time.monotonic() + LONGEST_WAIT
        with self._changed:
            waiting = self._waiting[end.link]
            while not waiting or self._trains(end.link) is None:
                if end.is_closed or time.monotonic() > until:
                    why = "is not connected" if not waiting else "is of a group that does not train"
                    raise AskAgain(f"the other end of {end.link} {why}")
                self._changed.wait(_POLL_SECONDS if waiting else 1.0)
            other = waiting.pop()
            other.peer, end.peer = end, other
            if (former := self._in_use.get(end.link)) is not None:
                for one in (former, former.peer):
                    if one is not None:
                        one.close()
            self._in_use[end.link] = end
            self._changed.notify_all()
            return other

    def _passed(self, end: _End, context: grpc.ServicerContext, count: int) -> None:
        """Count bytes of an end, and wait until it may send more.

        Raises Refused if its ticket has been revoked, AskAgain if its group trains no more.
        """
        trains = partial(self._trains, end.link)
        with self._changed:
            self.carried[end.link] += count
            may_send = end.budget.carry(count, trains)
        while True:
            if (now := time.monotonic()) >= end.look_at:
                self._callers.let_in(context)
                end.look_at = now + LOOK_SECONDS
                end.trained_at = now if trains() is not None else end.trained_at
                if now - end.trained_at > IDLE_SECONDS:
                    raise AskAgain(f"the group of {end.link} does not train")
            if may_send or count == 0:
                return
            with self._changed:
                is_counted = end.budget.is_newly_used_up()
            if is_counted:
                reason = f"sends more through the relay than {end.link} may carry in a round"
                self._authenticator.refuse(end.sender, reason, Kind.UNEXPECTED)
            with self._changed:
                if self._changed.wait_for(lambda: end.is_closed, _POLL_SECONDS):
                    return
                may_send = end.budget.carry(0, trains)


class _End:
    """One end of a relayed connection."""

    def __init__(self, link: str, sender: str, budget: Budget, changed: threading.Condition) -> None:
        """`sender`: its member. `budget`: what it may send. `changed`: lock of all ends."""
        self.link, self.sender, self.budget = link, sender, budget
        self.peer: _End | None = None
        self.look_at, self.trained_at = 0.0, time.monotonic()
        """When it is checked next whether its member is admitted; when its group was last seen to train."""
        self.is_closed = False  # whether it was cut
        self.has_ended = False  # whether no byte follows from it
        self.has_left = False  # whether its call no longer uses the connections
        self._changed = changed
        self._connection: socket.socket | None = None

    def take(self, connection: socket.socket) -> None:
        """Take the connection that showed the key of this end."""
        connection.settimeout(LOOK_SECONDS)
        with self._changed:
            if self.is_closed:
                connection.close()
                return
            self._connection = without_delay(connection)
            self._changed.notify_all()

    def connected(self) -> socket.socket:
        """Return the connection once it is there. Raises AskAgain."""
        with self._changed:
            self._changed.wait_for(lambda: self.is_closed or self._connection is not None, LONGEST_WAIT)
            if self.is_closed or self._connection is None:
                raise AskAgain(f"an end of {self.link} did not dial the relay's port")
            return self._connection

    def close(self) -> None:
        """Cut the connection. Its descriptor stays open for the threads that use it."""
        with self._changed:
            self.is_closed = True
            if self._connection is not None:
                cut(self._connection)
            self._changed.notify_all()

    def discard(self) -> None:
        """Close the connection, which no thread uses, and drop the references between both ends."""
        self.peer = None
        if self._connection is not None:
            self._connection.close()


# ---- a member's end: it dials the exchange, and opens no port ----

_AGAIN_SECONDS = 0.5  # pause in seconds before a relay that is gone is called again
_SECONDS_TO_DIAL = 10.0  # seconds for the relay's port to answer
_UNIX = "unix:"

Carrying = Any  # open call of the relay, which is a grpc.Call and an iterator


class LocalAddress:
    """A Unix socket for gRPC, in a folder that only its owner can open."""

    def __init__(self) -> None:
        self._folder = socket_folder()

    def __str__(self) -> str:
        return f"{_UNIX}{self.path}"

    @property
    def path(self) -> str:
        return str(self._folder / "link")

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


class Relayed:
    """Relayed link of one member to one neighbour: what both ends have in common.

    gRPC connects to addresses. So the dialling stage connects to a socket of its own machine, whose bytes go to the
    relay. At the other stage, the bytes from the relay go to a connection to its listener.
    """

    def __init__(self, exchange: str, credentials: Credentials, link: str) -> None:
        """`exchange`: HOST:PORT of each host that may serve it, with commas between them.

        `credentials`: the member's, with an identity.
        """
        self.link = link
        self._exchange, self._credentials = exchange, credentials
        self._dial(exchange.partition(",")[0])
        self._is_closed, self._dialling = threading.Event(), threading.Lock()
        self._has_complained = False

    def close(self) -> None:
        """Cut the connections, and relay nothing more."""
        self._is_closed.set()
        with self._dialling:
            self._channel.close()

    def _dial(self, address: str) -> None:
        self._host, self._channel = address, make_channel(address, self._credentials.identity, EXCHANGE)
        self._carry: Callable[..., Carrying] = calls_of(SERVICE, self._channel)["Carry"]

    def _meet(self) -> tuple[Carrying, RelayPlace]:
        """Wait for the other end; return the call and where to connect. Raises grpc.RpcError or StopIteration."""
        call = self._carry(RelayedLink(link=self.link), metadata=shown(self._credentials))
        try:
            return call, next(call)
        except (grpc.RpcError, StopIteration) as error:
            call.cancel()
            if isinstance(error, grpc.Call) and error.code() is grpc.StatusCode.UNAVAILABLE:
                # Another host may serve the exchange now. Several connections may find that out at the same time.
                found = answering(self._exchange, self._credentials.identity, _SECONDS_TO_DIAL)
                with self._dialling:
                    if found is not None and found != self._host and not self._is_closed.is_set():
                        self._channel.close()
                        self._dial(found)
            raise

    def _relay(self, call: Carrying, place: RelayPlace, connection: socket.socket) -> None:
        """Relay a connection of this machine until one side or the call ends, and close it."""
        host = host_and_port(self._host)[0]
        address = f"[{host}]:{place.port}" if ":" in host else f"{host}:{place.port}"
        try:
            with connection:
                relay = route_to(address).connect(address, _SECONDS_TO_DIAL)
                relay.settimeout(None)
                without_delay(relay).sendall(place.key)
                for one in (connection, relay):
                    if not call.add_callback(partial(cut, one)):
                        relay.close()
                        return
                with relay:
                    ways, ignored = (relay, connection), lambda count: None
                    back = threading.Thread(target=pass_on, args=(*ways, ignored), name="relayed", daemon=True)
                    back.start()
                    pass_on(connection, relay, ignored)
                    back.join()
        except OSError as error:
            # Said once; afterwards it is tried again and again.
            if not self._has_complained and not self._is_closed.is_set():
                self._has_complained = True
                why = f"cannot connect to the relay at {address}, the exchange's second port: {error}"
                print(f"{self._credentials.name}: {why}", file=sys.stderr, flush=True)
        finally:
            call.cancel()


class RelayedDialler(Relayed):
    """End of the stage that dials, at `address`."""

    def __init__(self, exchange: str, credentials: Credentials, link: str) -> None:
        super().__init__(exchange, credentials, link)
        self._address = LocalAddress()
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(self._address.path)
        self._socket.listen()
        threading.Thread(target=self._accept, name=f"relay {link}", daemon=True).start()

    @property
    def address(self) -> str:
        """Address of this machine to dial."""
        return str(self._address)

    def close(self) -> None:
        cut(self._socket)  # wakes the thread that accepts
        self._socket.close()
        self._address.close()
        super().close()

    def _accept(self) -> None:
        def dial(connection: socket.socket) -> None:
            with (
                connection,
                suppress(grpc.RpcError, StopIteration, ValueError),
            ):  # the relay is gone, or this end closed
                self._relay(*self._meet(), connection)

        with suppress(OSError):
            while True:
                connection, _ = self._socket.accept()
                threading.Thread(target=dial, args=(connection,), name="relayed", daemon=True).start()


class RelayedListener(Relayed):
    """End of the stage that is dialled."""

    def __init__(self, exchange: str, credentials: Credentials, link: str, listens: str) -> None:
        """`listens`: address on this machine, as a LocalAddress or HOST:PORT."""
        super().__init__(exchange, credentials, link)
        self._listens = listens
        threading.Thread(target=self._listen, name=f"relay {link}", daemon=True).start()

    def _listen(self) -> None:
        while not self._is_closed.is_set():
            try:
                met = self._meet()
            except (grpc.RpcError, StopIteration, ValueError) as error:
                if not (isinstance(error, grpc.Call) and error.code() is grpc.StatusCode.DEADLINE_EXCEEDED):
                    self._is_closed.wait(_AGAIN_SECONDS)
                continue
            threading.Thread(target=self._join, args=met, name="relayed", daemon=True).start()

    def _join(self, call: Carrying, place: RelayPlace) -> None:
        """Connect a relayed connection to this member's listener."""
        try:
            if self._listens.startswith(_UNIX):
                connection = socket.socket(socket.AF_UNIX)
                connection.connect(self._listens.removeprefix(_UNIX))
            else:
                connection = socket.create_connection(host_and_port(self._listens))
        except OSError:
            call.cancel()
            return
        self._relay(call, place, connection)
