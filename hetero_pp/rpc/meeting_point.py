"""Port of the relay: TCP connections from both ends of relayed links, each of which shows a key first."""

from __future__ import annotations

import errno
import secrets
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hetero_pp.core.sockets import host_and_port

KEY_BYTES = 32
"""Size of a key, which is drawn for one connection and valid once."""

SECONDS_TO_SHOW = 10.0
"""Seconds after which a connection that has not shown its key is closed."""

MOST_UNKNOWN = 256
"""Connections that have not shown their key yet. With one more, the oldest of them is closed."""

PAUSE = 0.1
"""Seconds between two attempts to accept a connection while this process has too many open files."""

_FORMER_KEYS = 1_000
"""Keys that nobody expects any more. An honest end may show one when the other end has just gone."""

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
