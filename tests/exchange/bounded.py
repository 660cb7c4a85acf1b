"""A run of two members behind a server without TLS, for tests of its limits."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest
from members import TIMEOUT
from small_run import Run

from hetero_pp.messages.refusals import Kind
from hetero_pp.rpc.callers import shown
from hetero_pp.rpc.channels import make_channel
from hetero_pp.rpc.exchange_client import ExchangeClient
from hetero_pp.rpc.identities import Credentials, Secret
from hetero_pp.rpc.services import EXCHANGE_SERVICE as SERVICE
from hetero_pp.rpc.services import call_path
from replica_groups.exchange.server import serve_exchange

SECRET = Secret("a secret")


class Served:
    """A run of members `a` and `b` behind a server. Both train its first round."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.run = Run(folder, {"a": 1, "b": 1}, quorum=1.0)
        self.run.assign(0, "a", "b")
        server, port = serve_exchange(self.run.exchange, SECRET, "127.0.0.1:0")
        self.address, self._stack = f"127.0.0.1:{port}", stack
        stack.callback(lambda: server.stop(None).wait(TIMEOUT))

    def client(self, name: str) -> ExchangeClient:
        client = ExchangeClient(self.address, SECRET.credentials(name), "run")
        client._incarnation = 1
        self._stack.callback(client.close)
        return client

    def half_open(self, call: str, credentials: Credentials) -> Iterator[bytes]:
        """Open a call and send no request."""
        channel, waiting = make_channel(self.address), threading.Event()
        self._stack.callback(channel.close)
        self._stack.callback(waiting.set)

        def nothing() -> Iterator[bytes]:
            waiting.wait()
            yield from ()

        begin: grpc.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(call_path(SERVICE, call))
        return iter(begin(nothing(), metadata=shown(credentials, "run", 1)))

    @property
    def refusals(self) -> dict[Kind, int]:
        return dict(self.run.exchange.runner.refusals.counts)


def _code(replies: Iterator[bytes]) -> grpc.StatusCode:
    with pytest.raises(grpc.RpcError) as error:
        next(replies)
    return error.value.code()


def _ask(served: Served, call: str, request: bytes) -> grpc.RpcError:
    """Return the error of a raw request by member `a`."""
    with make_channel(served.address) as channel, pytest.raises(grpc.RpcError) as error:
        ask: grpc.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(call_path(SERVICE, call))
        list(ask(request, metadata=shown(SECRET.credentials("a"), "run", 1), timeout=TIMEOUT))
    return error.value
