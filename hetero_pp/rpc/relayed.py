"""Carry stage links through the relay of the exchange. Both ends dial the exchange, and neither opens a port.

gRPC connects to addresses. So the dialling stage connects to a socket of its own machine, whose bytes go to the relay.
At the other stage, the bytes from the relay go to a connection to its listener.
"""

from __future__ import annotations

import shutil
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import grpc

from hetero_pp.config.lines import EXCHANGE
from hetero_pp.core.proxies import route_to
from hetero_pp.core.sockets import host_and_port, socket_folder
from hetero_pp.messages.messages_pb2 import RelayedLink, RelayPlace
from hetero_pp.rpc.callers import shown
from hetero_pp.rpc.channels import make_channel
from hetero_pp.rpc.identities import Credentials
from hetero_pp.rpc.relay import SERVICE, cut, pass_on_both_ways, without_delay
from hetero_pp.rpc.services import calls_of

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
    """Relayed link of one member to one neighbour: what both ends have in common."""

    def __init__(self, exchange: str, credentials: Credentials, link: str) -> None:
        """`exchange`: HOST:PORT; `credentials`: the member's, with an identity."""
        self.link = link
        self._exchange, self._credentials = exchange, credentials
        self._channel = make_channel(exchange, credentials.identity, EXCHANGE)
        self._carry: Callable[..., Carrying] = calls_of(SERVICE, self._channel)["Carry"]
        self._is_closed = threading.Event()
        self._has_complained = False

    def close(self) -> None:
        """Cut the connections, and relay nothing more."""
        self._is_closed.set()
        self._channel.close()

    def _meet(self) -> tuple[Carrying, RelayPlace]:
        """Wait for the other end; return the call and where to connect. Raises grpc.RpcError or StopIteration."""
        call = self._carry(RelayedLink(link=self.link), metadata=shown(self._credentials))
        try:
            return call, next(call)
        except (grpc.RpcError, StopIteration):
            call.cancel()
            raise

    def _relay(self, call: Carrying, place: RelayPlace, connection: socket.socket) -> None:
        """Relay a connection of this machine until one side or the call ends, and close it."""
        host = host_and_port(self._exchange)[0]
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
                pass_on_both_ways(connection, relay)
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
