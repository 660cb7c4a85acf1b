"""A TCP proxy on loopback that cuts connections at once or after some bytes, also in the middle of a message."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress

_CHUNK = 1 << 16
_RESET = struct.pack("ii", 1, 0)
"""Value of SO_LINGER with which sent data that has not arrived is dropped, as when a router forgets a connection."""


class CuttingProxy:
    """Listens, and forwards every connection to another address."""

    def __init__(self, target: str, next_cut: Callable[[], int | None] = lambda: None) -> None:
        """Start to listen.

        `next_cut` returns after how many bytes in both directions a new connection is cut (None: never).
        """
        host, port = target.rsplit(":", 1)
        self._target = host, int(port)
        self._next_cut = next_cut
        self._lock = threading.Lock()
        self._open: set[_Connection] = set()
        self._flows = threading.Event()
        self._flows.set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.connections = 0
        self.cuts = 0
        threading.Thread(target=self._accept, name="proxy", daemon=True).start()

    def cut(self) -> None:
        """Cut all connections. New ones are forwarded."""
        with self._lock:
            connections = list(self._open)
        for connection in connections:
            connection.cut()

    def freeze(self) -> None:
        """Forward nothing any more, and close nothing: neither an open connection nor a new one."""
        self._flows.clear()

    def close(self) -> None:
        """Cut all connections and accept no more."""
        self._flows.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                self._flows.wait()
                try:
                    far = socket.create_connection(self._target)
                except OSError:
                    near.close()
                    continue
                with self._lock:
                    self.connections += 1
                    connection = _Connection(near, far, self._next_cut(), self._forget, self._flows)
                    self._open.add(connection)
                connection.start()

    def _forget(self, connection: _Connection) -> None:
        with self._lock:
            if connection in self._open:
                self._open.remove(connection)
                self.cuts += connection.was_cut


class _Connection:
    """Both sockets of one connection."""

    def __init__(
        self,
        near: socket.socket,
        far: socket.socket,
        left: int | None,
        forget: Callable[[_Connection], None],
        flows: threading.Event,
    ) -> None:
        self.was_cut = False
        self._sockets = near, far
        self._left = left
        self._forget, self._flows = forget, flows
        self._lock = threading.Lock()

    def start(self) -> None:
        near, far = self._sockets
        for source, target in ((near, far), (far, near)):
            threading.Thread(target=self._carry, args=(source, target), daemon=True).start()

    def cut(self) -> None:
        self.was_cut = True
        self._close()

    def _carry(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(_CHUNK):
                self._flows.wait()
                allowed = self._take(len(data))
                target.sendall(data[:allowed])
                if allowed < len(data):
                    self.cut()
                    return
        self._close()

    def _take(self, count: int) -> int:
        """Return how many of these bytes may pass."""
        with self._lock:
            if self._left is None:
                return count
            allowed = min(count, self._left)
            self._left -= allowed
            return allowed

    def _close(self) -> None:
        for one in self._sockets:
            with suppress(OSError):
                one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        self._forget(self)
