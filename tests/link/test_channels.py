"""Channels connect over slow lines, and are closed without a traceback of gRPC's polling thread."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress

import grpc
import pytest

from hetero_pp.config.links import EXCHANGE
from hetero_pp.rpc.channels import close_polled, make_channel, make_server, readiness
from hetero_pp.rpc.credentials import Secret

SECONDS = 20.0
SLOW_SECONDS = 5.0
"""Seconds after which the server's first answer arrives on a slow line."""


class SlowLine:
    """Passes one connection on to a server at an address, whose first answer comes late."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.attempts = 0
        self._again = threading.Event()
        """Set once the client has given up its first attempt, and dials again."""
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self.attempts += 1
                if self.attempts > 1:
                    self._again.set()
                host, _, port = self._address.rpartition(":")
                server = socket.create_connection((host, int(port)))
                threading.Thread(target=self._pass_on, args=(client, server), daemon=True).start()
                threading.Thread(target=self._pass_back, args=(server, client), daemon=True).start()

    def _pass_back(self, server: socket.socket, client: socket.socket) -> None:
        first = server.recv(1 << 16)
        self._again.wait(SLOW_SECONDS)
        with suppress(OSError):
            client.sendall(first)
        self._pass_on(server, client)

    def _pass_on(self, source: socket.socket, to: socket.socket) -> None:
        with suppress(OSError), source:
            while data := source.recv(1 << 16):
                to.sendall(data)


def test_a_handshake_that_takes_seconds_is_not_begun_again() -> None:
    """Otherwise a member with a full line, or on a busy machine, would never connect."""
    secret = Secret("a secret")
    server, port = make_server("127.0.0.1:0", [], 1, secret.authority.identity(EXCHANGE))
    line = SlowLine(f"127.0.0.1:{port}")
    channel = make_channel(line.address, secret.authority.identity("a"), EXCHANGE)
    with readiness(channel) as ready:
        ready.result(SLOW_SECONDS + SECONDS)
    assert line.attempts == 1
    close_polled(channel)
    line.close()
    server.stop(None).wait()


def test_a_channel_that_was_waited_for_twice_is_closed_after_its_poll(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting again within 0.2 s makes gRPC look once more, also if the channel is closed by then."""
    failed = list[threading.ExceptHookArgs]()
    monkeypatch.setattr(threading, "excepthook", failed.append)
    server, port = make_server("127.0.0.1:0", [], 1)
    channel = make_channel(f"127.0.0.1:{port}")
    for _ in range(2):
        with readiness(channel) as ready:
            ready.result(SECONDS)
    state = channel._connectivity_state  # type: ignore[attr-defined]
    assert state.polling
    close_polled(channel)
    assert not state.polling and not failed
    server.stop(None).wait()


class _Names(grpc.UnaryUnaryClientInterceptor):
    """An interceptor, as a tracing library adds to every channel."""

    def intercept_unary_unary(self, continuation, details, request):  # type: ignore[no-untyped-def]
        return continuation(details, request)


def test_a_channel_that_hides_its_poll_is_closed() -> None:
    inner = make_channel("127.0.0.1:1")
    close_polled(grpc.intercept_channel(inner, _Names()))
    with pytest.raises(ValueError, match="closed channel"):
        inner.unary_unary("/any/Call")(b"")  # type: ignore[arg-type]
