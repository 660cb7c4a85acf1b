"""Rates of one caller of the exchange: calls, bytes, CPU seconds and joins, and limits of its connection."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from types import SimpleNamespace

import grpc
import pytest
from bounded import SECRET, Served, _ask
from members import TIMEOUT, in_thread

from hetero_pp.core.errors import TooMuch
from hetero_pp.messages import messages_pb2 as pb
from hetero_pp.rpc.callers import shown
from hetero_pp.rpc.channels import PROTOCOL_VERSION
from hetero_pp.rpc.limits import (
    BURST,
    CALLS_A_SECOND,
    CPU_SECONDS_AT_ONCE,
    CPU_SHARE,
    CUT_SECONDS,
    DEBT_SECONDS_MAX,
    REQUEST_BYTES_A_SECOND,
    REQUEST_BYTES_AT_ONCE,
    CallRate,
    Pace,
)
from hetero_pp.rpc.services import EXCHANGE_SERVICE as SERVICE
from hetero_pp.rpc.services import call_path
from replica_groups.exchange import server as served_exchange
from replica_groups.exchange.server import MOST_REPORTS


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with ExitStack() as stack:
        yield Served(tmp_path, stack)


def test_a_callers_pace() -> None:
    """Each caller has its own average rate and its own maximum burst."""
    now = 100.0
    pace = Pace(10.0, 20, lambda: now)
    assert [pace.due_in("a", count) for count in (20, 5, 10)] == pytest.approx([0.0, 0.5, 1.5])
    assert pace.due_in("b", 20) == 0.0
    now = 101.5
    assert pace.due_in("a", 1) == pytest.approx(0.1)
    now = 1000.0
    assert [pace.due_in("a", 20), pace.due_in("a", 1)] == pytest.approx([0.0, 0.1])
    with pytest.raises(TooMuch, match="a has sent 21 at once, expected at most 20"):
        pace.due_in("a", 21)


def test_a_member_that_floods_with_reports_waits_and_nobody_else(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits, due_in = threading.Event(), Pace.due_in

    def waited(pace: Pace, caller: str, count: int) -> float:
        due = due_in(pace, caller, count)
        if due > 0:
            waits.set()
        return 10 * TIMEOUT if due > 0 else 0.0

    monkeypatch.setattr(Pace, "due_in", waited)
    flood = [pb.Report(inner_step=pb.InnerStep(replica="a", round=1)) for _ in range(MOST_REPORTS)]
    client = served.client("a")
    client.report(flood)
    in_thread(lambda: client.report(flood))
    assert waits.wait(TIMEOUT)
    before = served.run.exchange.reports.watchers.reported
    served.client("b").report([pb.Report(inner_step=pb.InnerStep(replica="b", round=1))])
    assert served.run.exchange.reports.watchers.reported == before + 1


def test_a_caller_that_has_spent_its_bytes_or_cpu_seconds_waits_and_is_then_refused(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    spent, waited, paces = list[tuple[str, float]](), list[float](), list[Pace]()
    spend = Pace.spend

    def spent_by(pace: Pace, caller: str, amount: float) -> None:
        if amount >= 0:  # a call of an earlier test that ends now began with the real clock
            spent.append((caller, amount))
            paces.append(pace)
        spend(pace, caller, amount)

    clock = SimpleNamespace(sleep=waited.append, thread_time=lambda: 0.0)
    monkeypatch.setattr("hetero_pp.rpc.services.time", clock)
    monkeypatch.setattr(Pace, "spend", spent_by)
    client, request = served.client("a"), pb.HeartbeatRequest(round=1, generation=1)
    client.heartbeat("a", 1, 1)
    assert spent == [("a", request.ByteSize()), ("a", 0.0)]  # bytes of the request, CPU seconds of the call
    bytes_, cpu = paces
    spend(bytes_, "a", REQUEST_BYTES_AT_ONCE + 5 * REQUEST_BYTES_A_SECOND)
    client.heartbeat("a", 1, 1)
    assert waited[-1] == pytest.approx(5.0, abs=1.0)
    spend(cpu, "a", CPU_SECONDS_AT_ONCE + 60 * CPU_SHARE)
    waited.clear()
    error = _ask(served, "Heartbeat", request.SerializeToString())
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert not served.client("b").heartbeat("b", 1, 1).is_over
    assert waited == [DEBT_SECONDS_MAX, 0.0]


def test_a_member_that_joins_in_a_loop_has_to_wait(served: Served) -> None:
    codes = []
    for number in range(served_exchange.JOINS_AT_ONCE + 1):
        request = pb.JoinRequest(version=PROTOCOL_VERSION, process=str(number))
        codes.append(_ask(served, "Join", request.SerializeToString()).code())
    assert set(codes[:-1]) == {grpc.StatusCode.PERMISSION_DENIED}  # the slot is held
    assert codes[-1] is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_a_caller_that_begins_too_many_calls_is_cut_until_it_stops() -> None:
    now = 100.0
    rate = CallRate(lambda: now)
    waits = [rate.due_in("a") for _ in range(BURST)]
    assert waits == [0.0] * BURST
    assert [rate.due_in("a") for _ in range(int(CALLS_A_SECOND))][-1] == pytest.approx(1.0)
    with pytest.raises(TooMuch, match="a began more than 500 calls per second; its connection is closed"):
        rate.due_in("a")
    assert rate.due_in("b") == 0.0
    now += CUT_SECONDS / 2
    with pytest.raises(TooMuch):
        rate.due_in("a")
    now += CUT_SECONDS
    assert rate.due_in("a") <= 1.0


def _short(text: str) -> bytes:
    """Encode a string of at most 126 bytes for HPACK (RFC 7541, 5.2)."""
    return bytes([len(text)]) + text.encode()


def _frame(kind: int, flags: int, body: bytes, stream: int) -> bytes:
    """Encode a frame of HTTP/2 (RFC 9113, 4.1)."""
    return len(body).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + body


def test_the_connection_of_a_member_that_calls_too_often_is_closed(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No other connection is closed, not even one from the same address."""
    due_in, was_refused = CallRate.due_in, threading.Event()
    monkeypatch.setattr(
        served_exchange._Servicer, "refuse", lambda *_: was_refused.set()
    )  # after the connection is closed

    def due(rate: CallRate, caller: str) -> float:
        if caller == "a":
            raise TooMuch("too many")
        return due_in(rate, caller)

    monkeypatch.setattr(CallRate, "due_in", due)
    other = served.client("b")
    assert not other.heartbeat("b", 1, 1).is_over
    headers = {":method": "POST", ":scheme": "http", ":path": call_path(SERVICE, "Heartbeat"), ":authority": "exchange"}
    headers |= {"content-type": "application/grpc", "te": "trailers", **dict(shown(SECRET.credentials("a"), "run", 1))}
    block = b"".join(b"\0" + _short(key) + _short(value) for key, value in headers.items())
    host, _, port = served.address.rpartition(":")
    with suppress(ConnectionError), socket.create_connection((host, int(port)), TIMEOUT) as connection:
        connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(4, 0, b"", 0))
        connection.sendall(_frame(1, 4, block, 1))
        while connection.recv(1 << 16):  # until it is closed, or TIMEOUT
            pass
    assert not other.heartbeat("b", 1, 1).is_over
    assert was_refused.wait(TIMEOUT)


def test_a_connection_has_a_bounded_number_of_streams_and_bounded_headers(served: Served) -> None:
    """The server announces both limits in its settings. It refuses large headers before any call begins."""
    host, _, port = served.address.rpartition(":")
    with socket.create_connection((host, int(port)), TIMEOUT) as connection:
        connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04\x00" + bytes(4))
        head = connection.recv(9, socket.MSG_WAITALL)
        assert head[3] == 4
        body = connection.recv(int.from_bytes(head[:3], "big"), socket.MSG_WAITALL)
    settings = {
        int.from_bytes(body[at : at + 2], "big"): int.from_bytes(body[at + 2 : at + 6], "big")
        for at in range(0, len(body), 6)
    }
    assert settings[3] == 32  # SETTINGS_MAX_CONCURRENT_STREAMS
    assert settings[6] <= 8 << 10  # SETTINGS_MAX_HEADER_LIST_SIZE
