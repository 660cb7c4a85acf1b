"""Channels that are waited for and closed, by one thread or by several, without a thread of gRPC that outlives them."""

from __future__ import annotations

import threading

import grpc

from hetero_pp.rpc.channels import is_reached, make_channel, make_server

SECONDS = 20.0


class _Counts(grpc.UnaryUnaryClientInterceptor):
    """An interceptor, as a tracing library adds to every channel; it counts the calls that have begun."""

    def __init__(self) -> None:
        self.begun = threading.Semaphore(0)

    def intercept_unary_unary(self, continuation, details, request):  # type: ignore[no-untyped-def]
        self.begun.release()
        return continuation(details, request)


def test_a_server_that_starts_later_is_reached_and_no_thread_is_left_to_poll_it() -> None:
    """gRPC's own thread would print a traceback when it finds the channel closed."""
    before = set(threading.enumerate())
    server, port = make_server("127.0.0.1:0", [], 1)
    server.stop(None).wait()
    channel = make_channel(f"127.0.0.1:{port}")
    assert not is_reached(channel, 0.3)
    server, _ = make_server(f"127.0.0.1:{port}", [], 1)
    assert is_reached(channel, SECONDS) and is_reached(channel, None)
    new = [thread.name for thread in set(threading.enumerate()) - before]
    assert not [name for name in new if name.endswith("(_run)")]  # the server's are named otherwise
    channel.close()
    assert not is_reached(channel, SECONDS)
    server.stop(None).wait()


def test_all_threads_that_wait_for_a_channel_that_is_closed_learn_it_at_once() -> None:
    """A member closes its connections while its other threads wait for the exchange to come back."""
    counts, reached = _Counts(), list[bool]()
    channel = grpc.intercept_channel(make_channel("127.0.0.1:1"), counts)
    waits = [threading.Thread(target=lambda: reached.append(is_reached(channel, None))) for _ in range(4)]
    for thread in waits:
        thread.start()
    assert all(counts.begun.acquire(timeout=SECONDS) for _ in waits)
    channel.close()
    for thread in waits:
        thread.join(SECONDS)
    assert reached == [False] * 4


def test_a_channel_with_an_interceptor_is_reached_and_closed() -> None:
    server, port = make_server("127.0.0.1:0", [], 1)
    channel = grpc.intercept_channel(make_channel(f"127.0.0.1:{port}"), _Counts())
    assert is_reached(channel, SECONDS)
    channel.close()
    assert not is_reached(channel, SECONDS)
    server.stop(None).wait()
