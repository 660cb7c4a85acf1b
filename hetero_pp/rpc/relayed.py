"""How the two ends of a stage link reach each other through the relay of the exchange: both dial it, and nobody else.

gRPC dials and is dialled by addresses. So the stage before dials a socket of this machine, and what is said there goes
to the relay; the stage after has what comes from the relay dial where it listens.
"""

from __future__ import annotations

import shutil
import socket
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import grpc

from hetero_pp.links import EXCHANGE
from hetero_pp.rpc.callers import shown
from hetero_pp.rpc.channels import make_channel
from hetero_pp.rpc.credentials import Credentials
from hetero_pp.rpc.relay import CARRIED_BYTES, LINK, SERVICE
from hetero_pp.rpc.services import call_path

_AGAIN_SECONDS = 0.5
"""After which a relay that is gone is asked again."""
_UNIX = "unix:"


class _Call(Iterator[bytes], Protocol):
    """What comes through the relay."""

    def cancel(self) -> bool: ...


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
        self._folder = Path(tempfile.mkdtemp(prefix="hetero-pp-"))  # which only its owner can look into

    @property
    def address(self) -> str:
        """Of this machine, for gRPC: a socket in a folder of its own."""
        return f"{_UNIX}{self._folder / 'link'}"

    def close(self) -> None:
        """Cut what is carried, and carry nothing more."""
        self._is_closed.set()
        self._channel.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _open(self, frames: Iterator[bytes]) -> _Call:
        return self._carry(frames, metadata=self._metadata)


class RelayedDialler(Relayed):
    """Of the stage before, which dials `address`."""

    def __init__(self, exchange: str, credentials: Credentials, link: str) -> None:
        super().__init__(exchange, credentials, link)
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(self.address.removeprefix(_UNIX))
        self._socket.listen()
        threading.Thread(target=self._accept, name=f"relay {link}", daemon=True).start()

    def close(self) -> None:
        """See Relayed."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes who accepts
        self._socket.close()
        super().close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._socket.accept()
                threading.Thread(target=self._dial, args=(connection,), name="relayed", daemon=True).start()

    def _dial(self, connection: socket.socket) -> None:
        with suppress(ValueError):  # closed meanwhile
            _pass_on(self._open(_said(connection)), connection)
        connection.close()


class RelayedListener(Relayed):
    """Of the stage after, which listens at `address`, or where else it is dialled, too."""

    def __init__(self, exchange: str, credentials: Credentials, link: str, listens: str = "") -> None:
        """`listens`: HOST:PORT of this machine, if not at `address`."""
        super().__init__(exchange, credentials, link)
        self._listens = listens or self.address
        threading.Thread(target=self._listen, name=f"relay {link}", daemon=True).start()

    def _listen(self) -> None:
        while not self._is_closed.is_set():
            reached: Future[socket.socket] = Future()
            try:
                call = self._open(_said_later(reached))
                first = next(call)
            except (grpc.RpcError, StopIteration, ValueError) as error:
                reached.cancel()
                if not (isinstance(error, grpc.Call) and error.code() is grpc.StatusCode.DEADLINE_EXCEEDED):
                    self._is_closed.wait(_AGAIN_SECONDS)
                continue
            threading.Thread(target=self._join, args=(call, first, reached), name="relayed", daemon=True).start()

    def _join(self, call: _Call, first: bytes, reached: Future[socket.socket]) -> None:
        """Have what comes dial this member, and pass on what either says."""
        try:
            connection = _connected(self._listens)
        except OSError:
            reached.cancel()
            call.cancel()
            return
        reached.set_result(connection)
        with suppress(OSError):
            connection.sendall(first)
            _pass_on(call, connection)
        connection.close()


def _connected(address: str) -> socket.socket:
    """A connection to an address of this machine. Raises OSError."""
    if address.startswith(_UNIX):
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(address.removeprefix(_UNIX))
        return connection
    host, _, port = address.rpartition(":")
    return socket.create_connection((host.strip("[]"), int(port)))


def _said(connection: socket.socket) -> Iterator[bytes]:
    """On a connection, until it is cut."""
    with suppress(OSError):
        while said := connection.recv(CARRIED_BYTES):
            yield said


def _said_later(reached: Future[socket.socket]) -> Iterator[bytes]:
    """The same, on one that is to come."""
    with suppress(CancelledError):
        yield from _said(reached.result())


def _pass_on(call: _Call, connection: socket.socket) -> None:
    """What comes through the relay, until either side is cut."""
    try:
        for frame in call:
            connection.sendall(frame)
    except (grpc.RpcError, OSError):
        pass
    finally:
        call.cancel()
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
