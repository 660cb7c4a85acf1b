"""Port of the relay: which connections it gives to those that expect them, and which it closes or counts."""

from __future__ import annotations

import errno
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from queue import SimpleQueue
from typing import Any
from unittest import mock

import pytest
from heard import heard
from members import TIMEOUT

from hetero_pp.rpc import relay
from hetero_pp.rpc.relay import MeetingPoint


@pytest.fixture
def point() -> Iterator[MeetingPoint]:
    found = MeetingPoint("127.0.0.1:0")
    yield found
    found.close()


def _connected(point: MeetingPoint) -> socket.socket:
    return socket.create_connection(("127.0.0.1", point.port), TIMEOUT)


def test_a_key_may_arrive_in_parts_and_what_follows_it_is_not_read(point: MeetingPoint) -> None:
    taken: SimpleQueue[socket.socket] = SimpleQueue()
    with point.expecting(taken.put) as key, _connected(point) as caller:
        for start in range(0, len(key), 5):
            caller.sendall(key[start : start + 5])
        caller.sendall(b"and more")
        with taken.get(timeout=TIMEOUT) as connection:
            assert heard(connection, 8) == b"and more"


def test_a_key_that_nobody_expects_any_more_is_not_taken(point: MeetingPoint) -> None:
    """It is not counted either, because an honest end may be late."""
    taken, refused = SimpleQueue[socket.socket](), SimpleQueue[str]()
    point.refuse = refused.put
    with point.expecting(taken.put) as key:
        pass
    for words in (key, bytes(len(key))):
        with _connected(point) as caller:
            caller.sendall(words)
            assert heard(caller, 1) == b""
    assert refused.get(timeout=TIMEOUT) == "127.0.0.1"
    assert (refused.empty(), taken.empty()) == (True, True)


def test_a_connection_that_shows_no_whole_key_is_not_counted(point: MeetingPoint) -> None:
    """`check` connects to see whether the port answers. The connection with a whole key comes after the others."""
    refused = SimpleQueue[str]()
    point.refuse = refused.put
    for words in (b"", b"GET / HTTP/1.1", b"x" * relay.KEY_BYTES):
        with _connected(point) as caller:
            caller.sendall(words)
            caller.shutdown(socket.SHUT_WR)
            assert heard(caller, 1) == b""
    assert refused.get(timeout=TIMEOUT) == "127.0.0.1"
    assert refused.empty()


def test_a_flood_does_not_end_the_port(point: MeetingPoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection is dropped for a newer one although the selector has found it ready, too."""
    monkeypatch.setattr(relay, "MOST_UNKNOWN", 1)
    taken = SimpleQueue[socket.socket]()
    with _connected(point) as silent:
        is_found, may_go_on, select_ready = threading.Event(), threading.Event(), point._selector.select

        def hold(timeout: float | None = None) -> Any:
            found = select_ready(timeout)
            if not is_found.is_set():
                is_found.set()
                assert may_go_on.wait(TIMEOUT)
                found = sorted(select_ready(0), key=lambda one: one[0].fileobj is not point._listener)
            return found

        monkeypatch.setattr(point._selector, "select", hold)
        silent.sendall(b"a")
        assert is_found.wait(TIMEOUT)
        with point.expecting(taken.put) as key, _connected(point) as caller:
            may_go_on.set()
            caller.sendall(key)
            taken.get(timeout=TIMEOUT).close()


def test_connections_without_a_key_are_closed_in_time(point: MeetingPoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are dropped oldest first, so that a flood of them keeps no caller with a key out."""
    monkeypatch.setattr(relay, "MOST_UNKNOWN", 3)
    monkeypatch.setattr(relay, "SECONDS_TO_SHOW", 10 * TIMEOUT)
    taken: SimpleQueue[socket.socket] = SimpleQueue()
    with ExitStack() as stack:
        silent = [stack.enter_context(_connected(point)) for _ in range(5)]
        assert [heard(one, 1) for one in silent[:2]] == [b"", b""]
        with point.expecting(taken.put) as key, _connected(point) as caller:
            caller.sendall(key)
            taken.get(timeout=TIMEOUT).close()
        monkeypatch.setattr(relay, "SECONDS_TO_SHOW", 0.0)
        stack.enter_context(_connected(point))
        late = stack.enter_context(_connected(point))
        assert heard(late, 1) == b""


def test_the_port_rests_while_no_connection_can_be_accepted(
    point: MeetingPoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise its thread would try again without end. The connection is accepted once there is a file descriptor."""
    failures, rests, taken = [errno.EMFILE, errno.ENFILE], list[float](), SimpleQueue[socket.socket]()

    class Full:
        """The listener of a process that has too many open files, twice."""

        def accept(self) -> Any:
            if failures:
                raise OSError(failures.pop(), "too many open files")
            return listener.accept()

    listener = point._listener
    monkeypatch.setattr(point, "_listener", Full())
    monkeypatch.setattr(relay, "time", mock.Mock(wraps=time, sleep=rests.append))  # other threads sleep, too
    with point.expecting(taken.put) as key, _connected(point) as caller:
        caller.sendall(key)
        taken.get(timeout=TIMEOUT).close()
    assert rests == [relay.PAUSE] * 2
