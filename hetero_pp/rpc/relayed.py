"""How the two ends of a stage link reach each other through the relay of the exchange: both dial it, and nobody else.

gRPC dials and is dialled by addresses. So the stage that dials does so at a socket of this machine, and what is said
there goes to the relay, as far as there is credit for it; the other has what comes from it dial where it listens.
"""

from __future__ import annotations

import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from typing import Protocol

import grpc

from hetero_pp.links import EXCHANGE
from hetero_pp.rpc.callers import shown
from hetero_pp.rpc.channels import make_channel
from hetero_pp.rpc.credentials import Credentials
from hetero_pp.rpc.relay import CARRIED_BYTES, LINK, SERVICE, TAKEN_BYTES, cost_of
from hetero_pp.rpc.services import call_path
from hetero_pp.sockets import socket_folder

_AGAIN_SECONDS = 0.5
"""After which a relay that is gone is asked again."""
_UNIX = "unix:"


class _Call(Iterator[bytes], Protocol):
    """What comes through the relay."""

    def cancel(self) -> bool: ...


class LocalAddress:
    """Of this machine, for gRPC: a socket in a folder of its own, into which only its owner can look."""

    def __init__(self) -> None:
        self._folder = socket_folder()

    def __str__(self) -> str:
        return f"{_UNIX}{self.path}"

    @property
    def path(self) -> str:
        """Of the socket."""
        return str(self._folder / "link")

    def close(self) -> None:
        """It is needed no more."""
        shutil.rmtree(self._folder, ignore_errors=True)


class Relayed:
    """Of one member to one neighbour: what its two kinds have in common."""

    def __init__(self, exchange: str, credentials: Credentials, link: str) -> None:
        """`exchange`: HOST:PORT; `credentials`: the member's, with an identity."""
        self.link = link
        self._metadata = ((LINK, link), *shown(credentials))
        self._channel = make_channel(exchange, credentials.identity, EXCHANGE)
        self._carry: grpc.StreamStreamMultiCallable[bytes, bytes] = self._channel.stream_stream(
            call_path(SERVICE, "Carry")
        )
        self._is_closed = threading.Event()

    def close(self) -> None:
        """Cut what is carried, and carry nothing more."""
        self._is_closed.set()
        self._channel.close()

    def _open(self) -> _Connection:
        return _Connection(lambda frames: self._carry(frames, metadata=self._metadata))


class RelayedDialler(Relayed):
    """Of the stage that dials, at `address`."""

    def __init__(self, exchange: str, credentials: Credentials, link: str) -> None:
        super().__init__(exchange, credentials, link)
        self._address = LocalAddress()
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(self._address.path)
        self._socket.listen()
        threading.Thread(target=self._accept, name=f"relay {link}", daemon=True).start()

    @property
    def address(self) -> str:
        """Of this machine."""
        return str(self._address)

    def close(self) -> None:
        """See Relayed."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes who accepts
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
    """Of the stage that is dialled."""

    def __init__(self, exchange: str, credentials: Credentials, link: str, listens: str) -> None:
        """`listens`: where on this machine, as a LocalAddress or HOST:PORT."""
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
        """Have what comes dial this member."""
        try:
            connection = _connected(self._listens)
        except OSError:
            relayed.cut()
            return
        with connection:
            relayed.join(connection)


class _Connection:
    """One through the relay."""

    def __init__(self, carry: Callable[[Iterator[bytes]], _Call]) -> None:
        self._changed = threading.Condition()
        self._credit, self._is_cut = 0, False
        self._connection: Future[socket.socket] = Future()
        """Of this machine, whose words it carries."""
        self._frames = carry(self._said())

    def meet(self) -> None:
        """Wait for the other end. Raises grpc.RpcError, and StopIteration, if it does not come."""
        try:
            next(self._frames)
            self._earn()
        except (grpc.RpcError, StopIteration):
            self.cut()
            raise

    def join(self, connection: socket.socket) -> None:
        """Pass on what comes through the relay and what is said on a connection, until either is cut."""
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
        """It is over."""
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
        """On the connection, until it is cut, as there is credit for it."""
        with suppress(OSError, CancelledError):
            connection = self._connection.result()
            while (said := connection.recv(CARRIED_BYTES)) and self._spend(cost_of(said)):
                yield said

    def _spend(self, cost: int) -> bool:
        """Wait for so much credit; returns False once it is cut."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_cut or self._credit >= cost)
            self._credit -= cost
            return not self._is_cut


def _connected(address: str) -> socket.socket:
    """A connection to an address of this machine. Raises OSError."""
    if address.startswith(_UNIX):
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(address.removeprefix(_UNIX))
        return connection
    host, _, port = address.rpartition(":")
    return socket.create_connection((host.strip("[]"), int(port)))
