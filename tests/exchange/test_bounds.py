"""Limits for one caller of the exchange: open calls, unread data, bytes and waiting time."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from members import TIMEOUT, in_thread
from small_run import SETTINGS, Run

from hetero_pp.config.lines import LAUNCHER
from hetero_pp.core.errors import Refused, TooMuch
from hetero_pp.link.framing import header_and_payload_frames
from hetero_pp.messages import messages_pb2 as pb
from hetero_pp.messages.refusals import Kind
from hetero_pp.model.transformer import shapes_by_block, shapes_of
from hetero_pp.pseudo_gradient.contribution import most_bytes
from hetero_pp.rpc.callers import Callers, shown
from hetero_pp.rpc.channels import PROTOCOL_VERSION, RECEIVED_BYTES_MAX, make_channel, make_server
from hetero_pp.rpc.connections import reports_of
from hetero_pp.rpc.exchange_client import ExchangeClient
from hetero_pp.rpc.exchange_service import Caller
from hetero_pp.rpc.identities import Credentials, Secret
from hetero_pp.rpc.limits import (
    BULK_CALLS_MAX,
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
    RequestBounds,
    StreamWatch,
)
from hetero_pp.rpc.services import EXCHANGE_SERVICE as SERVICE
from hetero_pp.rpc.services import call_path, service_handler
from replica_groups.exchange import server as served_exchange
from replica_groups.exchange.memberships import MOST_BLAMED
from replica_groups.exchange.reports import REMEMBERED_REPORTS, Watchers
from replica_groups.exchange.server import MOST_OPEN, MOST_REPORTS, serve_exchange

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


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with ExitStack() as stack:
        yield Served(tmp_path, stack)


def _followed_by(block: str, size: int) -> pb.BlobHeader:
    following = [pb.FollowingBlob(block=block, size=size)]
    return pb.BlobHeader(round=1, replica="a", block="norm", size=100, following=following)


def _code(replies: Iterator[bytes]) -> grpc.StatusCode:
    with pytest.raises(grpc.RpcError) as error:
        next(replies)
    return error.value.code()


@pytest.mark.parametrize("call", ["Heartbeat", "Join", "Deposit", "Watch"])
def test_strangers_that_open_calls_and_send_nothing_keep_nobody_waiting(call: str, served: Served) -> None:
    """There are more such calls than threads. Each caller is refused before the server waits for its request."""
    stranger = Secret("another secret").credentials("a")
    count = 3 * MOST_OPEN
    waiting = [served.half_open(call, stranger) for _ in range(count)]
    assert {_code(replies) for replies in waiting} == {grpc.StatusCode.UNAUTHENTICATED}
    assert not served.client("a").heartbeat("a", 1, 1).is_over
    assert served.refusals == {Kind.STRANGER: count}


def test_a_member_that_opens_calls_and_sends_nothing_harms_itself_alone(served: Served) -> None:
    own = SECRET.credentials("a")
    waiting = [served.half_open("Heartbeat", own) for _ in range(MOST_OPEN + 1)]
    with ThreadPoolExecutor(len(waiting)) as pool:
        first = next(as_completed([pool.submit(_code, replies) for replies in waiting]))
        assert first.result() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert not served.client("b").heartbeat("b", 1, 1).is_over
        assert served.refusals == {Kind.FORBIDDEN: 1}
        served._stack.close()  # so that the waiting calls end


@pytest.mark.parametrize(
    ("header", "kind"),
    [
        (pb.BlobHeader(round=1, replica="a", block="norm", size=4 << 30), Kind.MALFORMED),
        (pb.BlobHeader(round=1, replica="a", block="norm", size=1 << 63), Kind.MALFORMED),
        (pb.BlobHeader(round=1, replica="b", block="norm", size=100), Kind.FORBIDDEN),
        (pb.BlobHeader(round=1, replica="a", block="away", size=100), Kind.FORBIDDEN),
        (_followed_by("layers.0", 1 << 63), Kind.MALFORMED),
        (_followed_by("layers.0", 1 << 20), Kind.MALFORMED),  # larger than its shapes allow, and than the limit is not
        (_followed_by("norm", 100), Kind.MALFORMED),
        (_followed_by("away", 100), Kind.FORBIDDEN),
    ],
)
def test_what_is_announced_is_looked_at_before_it_is_read(header: pb.BlobHeader, kind: Kind, served: Served) -> None:
    """The test sends one frame only. A server that waited for a second frame would wait forever."""
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
    shapes = shapes_by_block(shapes_of(served.run.checkpoint.parameters))["norm"]
    most = most_bytes(shapes, SETTINGS.compression)
    header = pb.BlobHeader(round=1, replica="a", block="norm", size=most)
    served.run.exchange.inbox.expect(header, Caller("a"))
    header.size += 1
    with pytest.raises(Refused, match=f"found {most + 1} bytes, expected at most {most}"):
        served.run.exchange.inbox.expect(header, Caller("a"))


def test_a_message_that_is_none_is_refused_and_counted(served: Served) -> None:
    with make_channel(served.address) as channel, pytest.raises(grpc.RpcError) as error:
        heartbeat: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(call_path(SERVICE, "Heartbeat"))
        heartbeat(b"\xff\xff", metadata=shown(SECRET.credentials("a"), "run", 1), timeout=TIMEOUT)
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert served.refusals == {Kind.MALFORMED: 1}


def test_who_waits_is_asked_to_ask_again_and_does(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """The exchange waits for a moment only. The member asks again until its round is closed."""
    monkeypatch.setattr(served_exchange, "LONGEST_WAIT", 0.0)
    asked, call = threading.Semaphore(0), served.run.exchange.call

    def counted(request: Message, caller: Caller) -> Any:
        if isinstance(request, pb.RecordRequest):
            asked.release()
        return call(request, caller)

    monkeypatch.setattr(served.run.exchange, "call", counted)
    found = in_thread(lambda: served.client("a").record(1, "a"))
    for _ in range(3):
        assert asked.acquire(timeout=TIMEOUT)
    served.run.deposit(1, "a", "b")
    assert found.result(TIMEOUT).round == 1


def test_who_watches_and_is_gone_leaves_no_thread_waiting(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    watchers, ended = served.run.exchange.reports.watchers, threading.Event()
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
    assert len(watchers._watchers) == 1
    channel.close()
    assert ended.wait(TIMEOUT)
    assert len(watchers._watchers) == 0


def test_who_reads_too_slowly_is_cut() -> None:
    watchers = Watchers()
    slow, quick = watchers.watch(most_unread=100), watchers.watch()
    watchers.tell([pb.Report(member="first")])
    assert next(slow).member == next(quick).member == "first"
    watchers.tell([pb.Report(time=float(number)) for number in range(101)])
    with pytest.raises(TooMuch, match="found 100 unread reports"):
        list(slow)
    assert [next(quick).time for _ in range(101)] == [float(number) for number in range(101)]
    assert len(watchers._watchers) == 1
    watchers.end()
    assert list(quick) == []


def test_who_was_cut_watches_again(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """It misses no event that the exchange still remembers."""
    watch, most = served.run.exchange.watch, iter([1, REMEMBERED_REPORTS])
    monkeypatch.setattr(
        served.run.exchange, "watch", lambda members, is_asked, *_: watch(members, is_asked, next(most))
    )
    served.run.exchange.end_watching()
    told = list(reports_of(served.address, SECRET.credentials(LAUNCHER)))
    assert [one.WhichOneof("event") for one in told] == ["joined", "joined", "begun", "refusal"]


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


def test_a_refused_caller_owes_nothing_for_having_asked() -> None:
    """A member that retries each second is admitted as often as the rate allows."""
    now = 100.0
    pace = Pace(0.1, 2, lambda: now)
    let_in = []
    for now in range(100, 141):
        let_in += [now] if pace.refused_for("a") == 0 else []
    assert let_in == [100, 101, 110, 120, 130, 140]
    assert pace.refused_for("a") == pytest.approx(10.0)
    assert pace.refused_for("b") == 0


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


# ---- budgets of one member ----


def _ask(served: Served, call: str, request: bytes) -> grpc.RpcError:
    """Return the error of a raw request by member `a`."""
    with make_channel(served.address) as channel, pytest.raises(grpc.RpcError) as error:
        ask: grpc.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(call_path(SERVICE, call))
        list(ask(request, metadata=shown(SECRET.credentials("a"), "run", 1), timeout=TIMEOUT))
    return error.value


NAME, TEXT, DIGEST = 320 * "n", 2_001 * "\U0001f40d", bytes(32)
"""The longest name, text and digest."""


def _fullest(run: Run) -> Iterator[tuple[str, Message]]:
    """Yield the largest honest request of the calls whose requests have lists or long texts."""
    parameters, replicas = len(run.checkpoint.parameters), len(set(run.exchange.roster.members.values()))
    blocks = max(map(len, run.exchange.roster.blocks.values()))
    finding = pb.Recomputed(member=NAME, cause=TEXT, evidence=NAME)
    commitment = pb.Commitment(member=NAME, before=DIGEST, after=DIGEST, text=DIGEST, messages=DIGEST, rest=DIGEST)
    following = [pb.FollowingBlob(replica=NAME, block=NAME, size=1 << 60)] * blocks
    blob = pb.BlobHeader(replica=NAME, block=NAME, sha256=DIGEST, commitment=commitment, following=following)
    yield "Agree", pb.AgreeRequest(configuration=2 * run.exchange._configuration_bytes * "x", tokens=64 * "x")
    yield "Join", pb.JoinRequest(address=300 * "x", rounds=range(16), damaged=[TEXT] * 16, process=64 * "x")
    yield "RunCheckpoint", pb.CheckpointRequest(names=[NAME + 32 * "x"] * (3 * parameters + 1), round=1 << 31)
    hashes = {f"{one:0320}": DIGEST for one in range(parameters)}
    yield "Confirm", pb.HashReport(round=1 << 31, sha256=hashes)
    judgement = pb.Judgement(round=1 << 31, replica=NAME, recomputed=finding)
    yield "Judge", pb.JudgeRequest(judgements=[judgement] * (8 * replicas))
    yield "Watch", pb.WatchRequest(members=[NAME] * (2 * len(run.exchange.roster.members) + 1), so_far=True)
    yield "Broken", pb.BrokenRequest(generation=1 << 60, cause=TEXT, blames=NAME)
    yield "Died", pb.DiedRequest(member=NAME, cause=TEXT, incarnation=1)
    yield "Enrol", pb.EnrolRequest(request=bytes(4 << 10))
    yield from ((call, blob) for call in ("UploadUrl", "Uploaded"))


REQUESTS = {
    call.name: call
    for service in ("Exchange", "Admission", "Relay")
    for call in pb.DESCRIPTOR.services_by_name[service].methods
    if call.input_type is not pb.Frame.DESCRIPTOR
}


class Anything:
    """It admits everybody, and a service that answers every request with nothing."""

    def __init__(self, requests: RequestBounds) -> None:
        self.request_bytes_max = requests.of
        self.taken, self.blamed = list[Message](), list[str]()

    def __getattr__(self, call: str) -> Any:
        def answer(request: Message, _: object) -> Any:
            self.taken.append(request)
            return iter(()) if REQUESTS[call].server_streaming else GetMessageClass(REQUESTS[call].output_type)()

        return answer

    def admit(self, *_: object) -> str:
        return "a"

    def refuse(self, *_: object) -> None:
        pass

    def blame(self, _: object, reason: str) -> None:
        self.blamed.append(reason)


def test_the_largest_request_of_each_call_is_taken_and_a_longer_one_is_not_parsed(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = served.run.exchange.requests
    anything, services = (
        Anything(requests),
        {call.containing_service.name: call.containing_service for call in REQUESTS.values()},
    )
    handlers = [service_handler(service, anything, anything, 4) for service in services.values()]
    server, port = make_server("127.0.0.1:0", handlers, 4)
    served._stack.callback(lambda: server.stop(None).wait(TIMEOUT))
    channel = served._stack.enter_context(make_channel(f"127.0.0.1:{port}"))

    def send(call: str, request: bytes) -> None:
        ask: grpc.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(
            call_path(REQUESTS[call].containing_service, call)
        )
        list(ask(request, timeout=TIMEOUT))

    fullest = dict(_fullest(served.run))
    for call, request in fullest.items():
        assert request.ByteSize() <= requests.of(call) < RECEIVED_BYTES_MAX, call
        send(call, request.SerializeToString())
    assert anything.taken == list(fullest.values())
    assert fullest["UploadUrl"].ByteSize() <= requests.of("Deposit")
    monkeypatch.setattr("hetero_pp.rpc.services.GetMessageClass", lambda _: pytest.fail("it was parsed"))
    for call in REQUESTS:
        with pytest.raises(grpc.RpcError, match="INVALID_ARGUMENT"):
            send(call, bytes(requests.of(call) + 1))
    assert len(anything.blamed) == len(REQUESTS)


@pytest.mark.parametrize("call", ["Deposit", "Show"])
def test_a_header_that_is_too_long_is_not_parsed(call: str, served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    header = pb.BlobHeader(following=[pb.FollowingBlob()] * 4_000)
    monkeypatch.setattr(served.run.exchange.runner.audits, "expect_file", lambda *_: pytest.fail("it was parsed"))
    with make_channel(served.address) as channel, pytest.raises(grpc.RpcError) as error:
        send: grpc.StreamUnaryMultiCallable[bytes, bytes] = channel.stream_unary(call_path(SERVICE, call))
        send(header_and_payload_frames(header, []), metadata=shown(SECRET.credentials("a"), "run", 1), timeout=TIMEOUT)
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert (error.value.details() or "").startswith(f"found a header of {header.ByteSize()} bytes, expected at most ")


def test_a_member_that_sends_oversized_requests_again_and_again_loses_its_incarnation(served: Served) -> None:
    """As one that sends malformed messages to its neighbours. The size of a confirmation follows from the model."""
    names = {f"{number:x}": b"" for number in range(3_000)}
    request = pb.HashReport(round=1, sha256=names).SerializeToString()
    shapes = shapes_of(served.run.checkpoint.parameters)
    assert served.run.exchange.requests.of("Confirm") < 400 * len(shapes) < len(request)
    for _ in range(MOST_BLAMED):
        assert served.run.exchange.coordinator.slots["a"].is_heard
        assert _ask(served, "Confirm", request).code() is grpc.StatusCode.INVALID_ARGUMENT
    assert not served.run.exchange.coordinator.slots["a"].is_heard
    assert served.run.exchange.coordinator.slots["b"].is_heard


def test_a_caller_that_has_spent_its_bytes_or_cpu_seconds_waits_and_is_then_refused(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    spent, waited, paces = list[tuple[str, float]](), list[float](), list[Pace]()
    spend = Pace.spend

    def spent_by(pace: Pace, caller: str, amount: float) -> None:
        spent.append((caller, amount))
        paces.append(pace)
        spend(pace, caller, amount)

    monkeypatch.setattr(Pace, "spend", spent_by)
    clock = SimpleNamespace(sleep=waited.append, thread_time=lambda: 0.0)
    monkeypatch.setattr("hetero_pp.rpc.services.time", clock)
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


def test_many_and_long_reports_are_sent_in_parts_that_the_exchange_takes(served: Served) -> None:
    """An honest member is never refused for its length, whatever its error messages contain."""
    step = pb.Report(inner_step=pb.InnerStep(replica="a", round=1))
    long = pb.Report(state_saving=pb.StateSaving(round=1, failure="\x07\U0001f40d" * 10_000))
    before = served.run.exchange.reports.watchers.reported
    served.client("a").report([step, long] * 20)
    assert served.run.exchange.reports.watchers.reported == before + 40
    served.client("a").broken("a", 1, "\U0001f40d" * 100_000)
    assert served.refusals == {}


def test_a_member_that_joins_in_a_loop_has_to_wait(served: Served) -> None:
    codes = []
    for number in range(served_exchange.JOINS_AT_ONCE + 1):
        request = pb.JoinRequest(version=PROTOCOL_VERSION, process=str(number))
        codes.append(_ask(served, "Join", request.SerializeToString()).code())
    assert set(codes[:-1]) == {grpc.StatusCode.PERMISSION_DENIED}  # the slot is held
    assert codes[-1] is grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize("names", [[f"layers.{one}" for one in range(30_000)], ["norm.weight"] * 30_000])
def test_a_checkpoint_is_refused_in_one_line_for_names_that_it_does_not_have(names: list[str], served: Served) -> None:
    error = _ask(served, "RunCheckpoint", pb.CheckpointRequest(names=names).SerializeToString())
    assert error.code() in (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.INVALID_ARGUMENT)
    assert len(error.details() or "") < 200


class _Context:
    """A call that can be cancelled."""

    def __init__(self) -> None:
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True


def test_few_rounds_have_their_checkpoints_in_memory_and_slow_readers_keep_nobody_from_a_newer_one(
    served: Served,
) -> None:
    servicer: Any = served_exchange._Servicer(served.run.exchange, Callers(SECRET, served.run.exchange.roster))
    with ExitStack() as sending:
        calls = {round_: _Context() for round_ in (5, 6, 7)}
        for round_, call in calls.items():
            sending.enter_context(servicer._sending(round_, call))
        sending.enter_context(servicer._sending(5, same := _Context()))  # the same run checkpoint
        with pytest.raises(TooMuch, match=r"^run checkpoints after the rounds \[5, 6, 7\] are being sent; try again"):
            sending.enter_context(servicer._sending(4, _Context()))
        assert not any(one.is_cancelled for one in (same, *calls.values()))
        sending.enter_context(servicer._sending(9, _Context()))
        assert [call.is_cancelled for call in (calls[5], same, calls[6], calls[7])] == [True, True, False, False]
        assert sorted(servicer._sent) == [6, 7, 9]
    assert servicer._sent == {}


def _half_sent(served: Served) -> Iterator[bytes]:
    """Begin a deposit of member `a` of which only the header is sent."""
    shapes = shapes_by_block(shapes_of(served.run.checkpoint.parameters))["norm"]
    size = most_bytes(shapes, SETTINGS.compression)
    header = pb.BlobHeader(round=1, replica="a", block="norm", size=size, steps=1)
    channel, waiting = make_channel(served.address), threading.Event()
    served._stack.callback(channel.close)
    served._stack.callback(waiting.set)

    def frames() -> Iterator[bytes]:
        yield next(iter(header_and_payload_frames(header, [bytes(header.size)])))[: 4 + header.ByteSize()]
        waiting.wait()

    begin: grpc.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(call_path(SERVICE, "Deposit"))
    return iter(begin(frames(), metadata=shown(SECRET.credentials("a"), "run", 1)))


def test_a_deposit_that_stands_still_is_cut(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    monkeypatch.setattr(served_exchange, "StreamWatch", partial(StreamWatch, 0.2))
    served: Served = request.getfixturevalue("served")  # its server is made with that monitor

    def waits(frames: Iterator[bytes], *_: object) -> Any:
        return next(frames), next(frames)

    monkeypatch.setattr(served_exchange, "read_frames", waits)
    assert _code(_half_sent(served)) is grpc.StatusCode.CANCELLED


def test_a_member_has_few_streams_open(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    entered = threading.Semaphore(0)

    def waits(frames: Iterator[bytes], *_: object) -> Any:
        entered.release()
        return next(frames), next(frames)

    monkeypatch.setattr(served_exchange, "read_frames", waits)
    held = [_half_sent(served) for _ in range(BULK_CALLS_MAX)]
    for _ in held:
        assert entered.acquire(timeout=TIMEOUT)
    assert _code(_half_sent(served)) is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_a_stream_that_moves_is_not_cut() -> None:
    class Context:
        cancelled = threading.Event()

        def cancel(self) -> None:
            self.cancelled.set()

    context: Any = Context()
    monitor = StreamWatch(0.05)
    frames = monitor.watched(iter([b"a", b"b"]), context)
    assert list(frames) == [b"a", b"b"]
    stalled = monitor.watched(iter([b"a", b"b"]), context)
    assert next(stalled) == b"a" and not context.cancelled.is_set()
    assert context.cancelled.wait(TIMEOUT)


# ---- call rates, and limits of one connection ----


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


def test_a_call_beyond_the_rate_waits(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    client, waited = served.client("a"), list[float]()
    clock = SimpleNamespace(sleep=waited.append, thread_time=time.thread_time)
    monkeypatch.setattr("hetero_pp.rpc.services.time", clock)
    monkeypatch.setattr(CallRate, "due_in", lambda *_: 0.75)
    assert not client.heartbeat("a", 1, 1).is_over
    assert waited == [0.75]


def test_a_refused_call_counts_for_its_connection(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = list[str]()

    def due(_: CallRate, caller: str) -> float:
        counted.append(caller)
        return 0.0

    monkeypatch.setattr(CallRate, "due_in", due)
    stranger = served.half_open("Heartbeat", Secret("another secret").credentials("a"))
    assert _code(stranger) is grpc.StatusCode.UNAUTHENTICATED
    assert [one.rpartition(":")[0] for one in counted] == ["ipv4:127.0.0.1"]


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
    monkeypatch.setattr(served.run.exchange, "refuse", lambda *_: was_refused.set())  # after the connection is closed

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
