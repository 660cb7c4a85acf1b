"""Channels are closed without a traceback of gRPC's polling thread."""

from __future__ import annotations

import threading

import pytest

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
