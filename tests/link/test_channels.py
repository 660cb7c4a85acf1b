"""Channels are closed without a traceback of gRPC's polling thread."""

from __future__ import annotations

import threading

import grpc
import pytest

from hetero_pp.core.errors import HeteroPPError
from hetero_pp.rpc import admission_client
from hetero_pp.rpc.certificates import Authority
from hetero_pp.rpc.channels import close_polled, make_channel, make_server, readiness

SECONDS = 20.0


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


def test_a_channel_to_ask_for_admission_is_closed_after_its_poll(monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[grpc.Channel]()

    def make(address: str, *_: object) -> grpc.Channel:
        made.append(make_channel(address))
        return made[-1]

    monkeypatch.setattr(admission_client, "make_channel", make)
    server, port = make_server("127.0.0.1:0", [], 1)
    with pytest.raises(HeteroPPError, match="does not admit hosts by tickets"):
        admission_client.status(f"127.0.0.1:{port}", Authority("a secret").identity("home.0"), SECONDS)
    server.stop(None).wait()
    (channel,) = made
    assert not channel._connectivity_state.polling  # type: ignore[attr-defined]


class _Names(grpc.UnaryUnaryClientInterceptor):
    """An interceptor, as a tracing library adds to every channel."""

    def intercept_unary_unary(self, continuation, details, request):  # type: ignore[no-untyped-def]
        return continuation(details, request)


def test_a_channel_that_hides_its_poll_is_closed() -> None:
    inner = make_channel("127.0.0.1:1")
    close_polled(grpc.intercept_channel(inner, _Names()))
    with pytest.raises(ValueError, match="closed channel"):
        inner.unary_unary("/any/Call")(b"")  # type: ignore[arg-type]
