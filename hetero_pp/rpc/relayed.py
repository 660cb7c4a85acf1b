"""Stage links through the relay of the exchange: both ends dial the exchange, and no port is open.

gRPC connects to addresses. So the dialling stage connects to a socket of its own machine, whose bytes go to the relay
as far as there is credit. At the other stage, the bytes from the relay go to a connection to its listener.
"""

from __future__ import annotations

import select
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from contextlib import suppress

import grpc

from hetero_pp.config.links import EXCHANGE
from hetero_pp.core.sockets import socket_folder
from hetero_pp.rpc.callers import shown
from hetero_pp.rpc.channels import make_channel
from hetero_pp.rpc.credentials import Credentials
from hetero_pp.rpc.relay import CARRIED_BYTES, LINK, SERVICE, TAKEN_BYTES, cost_of
from hetero_pp.rpc.services import IncomingFrames, calls_of

_AGAIN_SECONDS = 0.5
"""Pause in seconds before a relay that is gone is called again."""
_MANY_BYTES = 64 << 10
"""Bytes received at once after which more are likely to come."""
_MORE_MILLISECONDS = 1
"""Time to wait for them."""
_UNIX = "unix:"


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
    """Relayed link of one member to one neighbour: what both ends have in common."""

    def __init__(self, exchange: str, credentials: Credentials, link: str) -> None:
        """`exchange`: HOST:PORT; `credentials`: the member's, with an identity."""
        self.link = link
        self._metadata = ((LINK, link), *shown(credentials))
        self._channel = make_channel(exchange, credentials.identity, EXCHANGE)
        self._carry: grpc.StreamStreamMultiCallable[bytes, bytes] = calls_of(SERVICE, self._channel)["Carry"]
        self._is_closed = threading.Event()

    def close(self) -> None:
        """Cut the connections, and relay nothing more."""
        self._is_closed.set()
        self._channel.close()

    def _open(self) -> _Connection:
        return _Connection(lambda frames: self._carry(frames, metadata=self._metadata))


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
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._socket.close()
        self._address.close()
        super().close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._socket.accept()
                threading.Thread(target=self._dial, args=(connection,), name="relayed", daemon=True).start()

    def _dial(self, connection: socket.socket) -> None:
        with connection, suppress(ValueError):  # closed meanwhile
            self._open().join(connection)


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
                relayed = self._open()
                relayed.meet()
            except (grpc.RpcError, StopIteration, ValueError) as error:
                if not (isinstance(error, grpc.Call) and error.code() is grpc.StatusCode.DEADLINE_EXCEEDED):
                    self._is_closed.wait(_AGAIN_SECONDS)
                continue
            threading.Thread(target=self._join, args=(relayed,), name="relayed", daemon=True).start()

    def _join(self, relayed: _Connection) -> None:
        """Connect each relayed connection to this member's listener."""
        try:
            connection = _connected(self._listens)
        except OSError:
            relayed.cut()
            return
        with connection:
            relayed.join(connection)


class _Connection:
    """One connection through the relay."""

    def __init__(self, carry: Callable[[Iterator[bytes]], IncomingFrames]) -> None:
        self._changed = threading.Condition()
        self._credit, self._is_cut = 0, False
        self._connection: Future[socket.socket] = Future()
        """Connection on this machine whose bytes are relayed."""
        self._frames = carry(self._said())

    def meet(self) -> None:
        """Wait for the other end. Raises grpc.RpcError or StopIteration if it does not come."""
        try:
            next(self._frames)
            self._earn()
        except (grpc.RpcError, StopIteration):
            self.cut()
            raise

    def join(self, connection: socket.socket) -> None:
        """Pass on bytes in both directions until either side is cut."""
        self._connection.set_result(connection)
        try:
            for frame in self._frames:
                if frame:
                    connection.sendall(frame)
                else:
                    self._earn()
        except (grpc.RpcError, OSError):
            pass
        finally:
            self.cut()
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def cut(self) -> None:
        """Cut both sides."""
        with self._changed:
            self._is_cut = True
            self._changed.notify_all()
        self._connection.cancel()
        self._frames.cancel()

    def _earn(self) -> None:
        with self._changed:
            self._credit += TAKEN_BYTES
            self._changed.notify_all()

    def _said(self) -> Iterator[bytes]:
        """Yield the bytes of the connection, as far as there is credit, until it is cut."""
        with suppress(OSError, CancelledError):
            for said in _frames_of(self._connection.result()):
                if not self._spend(cost_of(said)):
                    return
                yield said

    def _spend(self, cost: int) -> bool:
        """Wait for so much credit; return False once the connection is cut."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_cut or self._credit >= cost)
            self._credit -= cost
            return not self._is_cut


def _frames_of(connection: socket.socket) -> Iterator[bytes]:
    """Yield the bytes of a connection until it ends, at most CARRIED_BYTES at once. Raises OSError.

    A socket holds less than that. So after many bytes more are awaited, for a moment, as long as many come.
    """
    room = memoryview(bytearray(CARRIED_BYTES))
    more = select.poll()
    more.register(connection, select.POLLIN)
    while came := connection.recv_into(room):
        count = came
        while came >= _MANY_BYTES and count < CARRIED_BYTES and more.poll(_MORE_MILLISECONDS):
            came = connection.recv_into(room[count:])
            count += came
        yield bytes(room[:count])


def _connected(address: str) -> socket.socket:
    """Return a connection to an address of this machine. Raises OSError."""
    if address.startswith(_UNIX):
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(address.removeprefix(_UNIX))
        return connection
    host, _, port = address.rpartition(":")
    return socket.create_connection((host.strip("[]"), int(port)))
