"""What one caller can take of the exchange: so many calls, so much that is unread, so many bytes, so long a wait."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
from members import TIMEOUT, in_thread
from small_run import SETTINGS, Run

from hetero_pp.errors import Refused, TooMuch
from hetero_pp.links import LAUNCHER
from hetero_pp.messages import messages_pb2 as pb
from hetero_pp.model import shapes_by_block, shapes_of
from hetero_pp.pseudo_gradient.contribution import BlobAddress, most_bytes
from hetero_pp.refusals import Kind
from hetero_pp.rpc import exchange as served_exchange
from hetero_pp.rpc.callers import shown
from hetero_pp.rpc.channels import make_channel
from hetero_pp.rpc.connections import reports_of
from hetero_pp.rpc.credentials import Credentials, Secret
from hetero_pp.rpc.exchange import MOST_OPEN, MOST_REPORTS, serve_exchange
from hetero_pp.rpc.exchange_client import ExchangeClient
from hetero_pp.rpc.framing import header_and_payload_frames
from hetero_pp.rpc.pace import Pace
from hetero_pp.rpc.services import call_path
from replica_groups.exchange.watchers import REMEMBERED_REPORTS, Watchers

SECRET = Secret("a secret")
SERVICE = served_exchange.SERVICE


class Served:
    """A run of members `a` and `b` behind a server; both train its first round."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.run = Run(folder, {"a": 1, "b": 1}, quorum=1.0)
        self.run.assign(0, "a", "b")
        server, port = serve_exchange(self.run.exchange, SECRET, "127.0.0.1:0")
        self.address, self._stack = f"127.0.0.1:{port}", stack
        stack.callback(lambda: server.stop(None).wait(TIMEOUT))

    def client(self, name: str) -> ExchangeClient:
        client = ExchangeClient(self.address, SECRET.credentials(name), "run")
        client._term = 1
        self._stack.callback(client.close)
        return client

    def half_open(self, call: str, credentials: Credentials) -> Iterator[bytes]:
        """A call that is begun, and sends no request."""
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
        return dict(self.run.exchange._refusals.counts)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with ExitStack() as stack:
        yield Served(tmp_path, stack)


def _code(replies: Iterator[bytes]) -> grpc.StatusCode:
    with pytest.raises(grpc.RpcError) as error:
        next(replies)
    return error.value.code()


@pytest.mark.parametrize("call", ["Beat", "Join", "Deposit", "Watch"])
def test_strangers_that_open_calls_and_send_nothing_keep_nobody_waiting(call: str, served: Served) -> None:
    """More of them than there are threads: each is turned away before its request is waited for."""
    stranger = Secret("another secret").credentials("a")
    count = 3 * MOST_OPEN
    waiting = [served.half_open(call, stranger) for _ in range(count)]
    assert {_code(replies) for replies in waiting} == {grpc.StatusCode.UNAUTHENTICATED}
    assert not served.client("a").beat("a", 1, 1).is_over
    assert served.refusals == {Kind.STRANGER: count}


def test_a_member_that_opens_calls_and_sends_nothing_harms_itself_alone(served: Served) -> None:
    own = SECRET.credentials("a")
    waiting = [served.half_open("Beat", own) for _ in range(MOST_OPEN + 1)]
    with ThreadPoolExecutor(len(waiting)) as pool:
        first = next(as_completed([pool.submit(_code, replies) for replies in waiting]))
        assert first.result() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert not served.client("b").beat("b", 1, 1).is_over
        assert served.refusals == {Kind.FORBIDDEN: 1}
        served._stack.close()  # so that those that wait end


@pytest.mark.parametrize(
    ("header", "kind"),
    [
        (pb.BlobHeader(round=1, replica="a", block="norm", size=4 << 30), Kind.MALFORMED),
        (pb.BlobHeader(round=1, replica="a", block="norm", size=1 << 63), Kind.MALFORMED),
        (pb.BlobHeader(round=1, replica="b", block="norm", size=100), Kind.FORBIDDEN),
        (pb.BlobHeader(round=1, replica="a", block="away", size=100), Kind.FORBIDDEN),
    ],
)
def test_what_is_announced_is_looked_at_before_it_is_read(header: pb.BlobHeader, kind: Kind, served: Served) -> None:
    """One frame only: whoever waited for another would wait for ever."""
    channel, waiting = make_channel(served.address), threading.Event()

    def frames() -> Iterator[bytes]:
        yield next(header_and_payload_frames(header, [bytes(10)]))
        waiting.wait()

    deposit: grpc.StreamUnaryMultiCallable[bytes, bytes] = channel.stream_unary(call_path(SERVICE, "Deposit"))
    with pytest.raises(grpc.RpcError) as error:
        deposit(frames(), metadata=shown(SECRET.credentials("a"), "run", 1), timeout=TIMEOUT)
    waiting.set()
    channel.close()
    assert error.value.code() is grpc.StatusCode.PERMISSION_DENIED
    assert served.refusals == {kind: 1}


def test_the_largest_that_is_let_in_is_that_of_the_shapes(served: Served) -> None:
    address = BlobAddress("run", 1, "a", "norm")
    shapes = shapes_by_block(shapes_of(served.run.snapshot.parameters))["norm"]
    most = most_bytes(address, shapes, SETTINGS.compression)
    served.run.exchange.expect("a", address, most)
    with pytest.raises(Refused, match=f"found {most + 1} bytes, expected at most {most}"):
        served.run.exchange.expect("a", address, most + 1)


def test_a_message_that_is_none_is_refused_and_counted(served: Served) -> None:
    with make_channel(served.address) as channel, pytest.raises(grpc.RpcError) as error:
        beat: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(call_path(SERVICE, "Beat"))
        beat(b"\xff\xff", metadata=shown(SECRET.credentials("a"), "run", 1), timeout=TIMEOUT)
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert served.refusals == {Kind.MALFORMED: 1}


def test_who_waits_is_asked_to_ask_again_and_does(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """The exchange waits a moment; the member, until its round is closed."""
    monkeypatch.setattr(served_exchange, "LONGEST_WAIT", 0.0)
    asked, record = threading.Semaphore(0), served.run.exchange.record

    def counted(*arguments: object) -> pb.RoundRecord:
        asked.release()
        return record(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(served.run.exchange, "record", counted)
    found = in_thread(lambda: served.client("a").record(1, "a"))
    for _ in range(3):
        assert asked.acquire(timeout=TIMEOUT)
    served.run.deposit(1, "a", "b")
    assert found.result(TIMEOUT).round == 1


def test_who_watches_and_is_gone_leaves_no_thread_waiting(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    watchers, ended = served.run.exchange.watchers, threading.Event()
    watch_of = watchers.watch

    def watched(*arguments: Any) -> Iterator[pb.Report]:
        try:
            yield from watch_of(*arguments)
        finally:
            ended.set()

    monkeypatch.setattr(watchers, "watch", watched)
    channel = make_channel(served.address)
    watch: grpc.UnaryStreamMultiCallable[pb.WatchRequest, bytes] = channel.unary_stream(
        call_path(SERVICE, "Watch"), pb.WatchRequest.SerializeToString
    )
    replies = watch(pb.WatchRequest(), metadata=shown(SECRET.credentials(LAUNCHER), "run"))
    next(iter(replies))
    assert watchers.watching == 1
    channel.close()
    assert ended.wait(TIMEOUT)
    assert watchers.watching == 0


def test_who_reads_too_slowly_is_cut() -> None:
    watchers = Watchers()
    slow, quick = watchers.watch(most_unread=100), watchers.watch()
    watchers.tell([pb.Report(member="first")])
    assert next(slow).member == next(quick).member == "first"
    watchers.tell([pb.Report(time=float(number)) for number in range(101)])
    with pytest.raises(TooMuch, match="found 100 reports that were not read"):
        list(slow)
    assert [next(quick).time for _ in range(101)] == [float(number) for number in range(101)]
    assert watchers.watching == 1
    watchers.end()
    assert list(quick) == []


def test_who_was_cut_watches_again(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """And misses nothing that the exchange still remembers."""
    watch, most = served.run.exchange.watch, iter([1, REMEMBERED_REPORTS])
    monkeypatch.setattr(served.run.exchange, "watch", lambda members, is_asked, _: watch(members, is_asked, next(most)))
    served.run.exchange.end_watching()
    told = list(reports_of(served.address, SECRET.credentials(LAUNCHER)))
    assert [one.WhichOneof("event") for one in told] == ["joined", "joined", "begun", "refusal"]


def test_a_callers_pace() -> None:
    """So many a second on average, as many as a burst at once; each caller by itself."""
    now = 100.0
    pace = Pace(10.0, 20, lambda: now)
    assert [pace.due_in("a", count) for count in (20, 5, 10)] == pytest.approx([0.0, 0.5, 1.5])
    assert pace.due_in("b", 20) == 0.0
    now = 101.5
    assert pace.due_in("a", 1) == pytest.approx(0.1)
    now = 1000.0
    assert [pace.due_in("a", 20), pace.due_in("a", 1)] == pytest.approx([0.0, 0.1])
    with pytest.raises(TooMuch, match="a has told 21 at once, expected at most 20"):
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
    flood = [pb.Report(member_round=pb.MemberRound(round=1)) for _ in range(MOST_REPORTS)]
    client = served.client("a")
    client.report(flood)
    in_thread(lambda: client.report(flood))
    assert waits.wait(TIMEOUT)
    before = served.run.exchange.reported
    served.client("b").report(flood[:1])
    assert served.run.exchange.reported == before + 1
