"""A TCP forwarder between two ends of a link that can be cut and slowed down."""

from __future__ import annotations

import queue
import socket
import threading
import time
from contextlib import suppress

_CHUNK = 1 << 18
_QUEUED = 256
"""Chunks in flight per direction; the sender blocks beyond them."""


class Wire:
    """Listens on loopback, and forwards every connection to `target` unless it is cut."""

    def __init__(self, address: str) -> None:
        """Start to listen. `address`: HOST:PORT of the other end, which need not listen yet."""
        self.target = address
        self._delay = 0.0
        self._lock = threading.Lock()
        self._is_cut = threading.Event()
        self._sockets: set[socket.socket] = set()
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listening.getsockname()[1]}"
        threading.Thread(target=self._accept, name=f"wire to {address}", daemon=True).start()

    def cut(self) -> None:
        """Break all connections, and refuse new ones until `mend`."""
        with self._lock:
            self._is_cut.set()
            broken, self._sockets = self._sockets, set()
        for one in broken:
            _end(one)

    def mend(self) -> None:
        """Accept connections again."""
        self._is_cut.clear()

    def slow_down(self, seconds: float) -> None:
        """Delay every later byte by this many seconds, in each direction."""
        self._delay = seconds

    def _accept(self) -> None:
        while True:
            near, _ = self._listening.accept()
            threading.Thread(target=self._connect, args=(near,), name="wire", daemon=True).start()

    def _connect(self, near: socket.socket) -> None:
        host, _, port = self.target.rpartition(":")
        try:
            far = socket.create_connection((host, int(port)))
        except OSError:
            _end(near)
            return
        with self._lock:
            is_cut = self._is_cut.is_set()
            if not is_cut:
                self._sockets |= {near, far}
        if is_cut:
            _end(near)
            _end(far)
            return
        for source, target in ((near, far), (far, near)):
            source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            chunks: queue.Queue[tuple[float, bytes]] = queue.Queue(_QUEUED)
            threading.Thread(target=self._read, args=(source, chunks), name="wire", daemon=True).start()
            threading.Thread(target=self._write, args=(source, target, chunks), name="wire", daemon=True).start()

    def _read(self, source: socket.socket, chunks: queue.Queue[tuple[float, bytes]]) -> None:
        data = b"not yet"
        while data:
            try:
                data = source.recv(_CHUNK)
            except OSError:
                data = b""
            chunks.put((time.monotonic() + self._delay, data))

    def _write(self, source: socket.socket, target: socket.socket, chunks: queue.Queue[tuple[float, bytes]]) -> None:
        """Forward chunks until the source ends.

        After a failed send the remaining chunks are dropped, not left in the queue, so that the reader never blocks.
        """
        is_open = True
        while True:
            due, data = chunks.get()
            if not data:
                break
            if is_open:
                time.sleep(max(0.0, due - time.monotonic()))
                try:
                    target.sendall(data)
                except OSError:
                    is_open = False
        _end(source)
        _end(target)
        with self._lock:
            self._sockets -= {source, target}


def _end(one: socket.socket) -> None:
    with suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)
    one.close()
