"""Channels that are waited for and closed, by one thread or by two, without a traceback of a thread of gRPC."""

from __future__ import annotations

import threading
import time

import grpc
import pytest

from hetero_pp.rpc.channels import is_reached, make_channel, make_server

SECONDS = 20.0


@pytest.fixture
def failed(monkeypatch: pytest.MonkeyPatch) -> list[threading.ExceptHookArgs]:
    """Errors with which threads end."""
    failed = list[threading.ExceptHookArgs]()
    monkeypatch.setattr(threading, "excepthook", failed.append)
    return failed


def test_a_server_that_starts_later_is_reached_and_the_channel_closed_at_once(
    failed: list[threading.ExceptHookArgs],
) -> None:
    server, port = make_server("127.0.0.1:0", [], 1)
    server.stop(None).wait()
    channel = make_channel(f"127.0.0.1:{port}")
    assert not is_reached(channel, 0.3)
    server, _ = make_server(f"127.0.0.1:{port}", [], 1)
    assert is_reached(channel, SECONDS) and is_reached(channel, None)
    channel.close()
    time.sleep(0.5)  # gRPC looks at a channel that it polls every 0.2 s
    assert not is_reached(channel, SECONDS) and not failed
    server.stop(None).wait()


def test_whoever_waits_for_a_channel_that_is_closed_learns_it_at_once(failed: list[threading.ExceptHookArgs]) -> None:
    """A member closes its connections while its other threads wait for the exchange to come back."""
    channel, reached = make_channel("127.0.0.1:1"), list[bool]()
    waits = [threading.Thread(target=lambda: reached.append(is_reached(channel, None))) for _ in range(4)]
    for thread in waits:
        thread.start()
    time.sleep(0.1)
    channel.close()
    for thread in waits:
        thread.join(SECONDS)
    time.sleep(0.5)
    assert reached == [False] * 4 and not failed


class _Names(grpc.UnaryUnaryClientInterceptor):
    """An interceptor, as a tracing library adds to every channel."""

    def intercept_unary_unary(self, continuation, details, request):  # type: ignore[no-untyped-def]
        return continuation(details, request)


def test_a_channel_with_an_interceptor_is_reached_and_closed() -> None:
    server, port = make_server("127.0.0.1:0", [], 1)
    channel = grpc.intercept_channel(make_channel(f"127.0.0.1:{port}"), _Names())
    assert is_reached(channel, SECONDS)
    channel.close()
    assert not is_reached(channel, SECONDS)
    server.stop(None).wait()
