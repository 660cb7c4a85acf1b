"""Limits for one caller of the exchange: open calls, unread data, bytes and waiting time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from bounded import SECRET, Served, _ask, _code
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from members import TIMEOUT
from small_run import SETTINGS, Run

from hetero_pp.core.errors import TooMuch
from hetero_pp.link.framing import header_and_payload_frames
from hetero_pp.messages import messages_pb2 as pb
from hetero_pp.messages.refusals import Kind
from hetero_pp.model.transformer import shapes_by_block, shapes_of
from hetero_pp.pseudo_gradient.contribution import most_bytes
from hetero_pp.rpc.callers import Callers, shown
from hetero_pp.rpc.channels import RECEIVED_BYTES_MAX, make_channel, make_server
from hetero_pp.rpc.identities import Secret
from hetero_pp.rpc.limits import (
    BULK_CALLS_MAX,
    RequestBounds,
    StreamWatch,
)
from hetero_pp.rpc.services import EXCHANGE_SERVICE as SERVICE
from hetero_pp.rpc.services import call_path, service_handler
from replica_groups.exchange import server as served_exchange
from replica_groups.exchange.reports import Watchers
from replica_groups.exchange.server import MOST_OPEN


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with ExitStack() as stack:
        yield Served(tmp_path, stack)


def _followed_by(block: str, size: int) -> pb.BlobHeader:
    following = [pb.FollowingBlob(block=block, size=size)]
    return pb.BlobHeader(round=1, replica="a", block="norm", size=100, following=following)


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


# ---- budgets of one member ----


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
    header = pb.BlobHeader(following=[pb.FollowingBlob()] * 12_000)
    monkeypatch.setattr(served.run.exchange.runner.audits, "expect_file", lambda *_: pytest.fail("it was parsed"))
    with make_channel(served.address) as channel, pytest.raises(grpc.RpcError) as error:
        send: grpc.StreamUnaryMultiCallable[bytes, bytes] = channel.stream_unary(call_path(SERVICE, call))
        send(header_and_payload_frames(header, []), metadata=shown(SECRET.credentials("a"), "run", 1), timeout=TIMEOUT)
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert (error.value.details() or "").startswith(f"found a header of {header.ByteSize()} bytes, expected at most ")


def test_many_and_long_reports_are_sent_in_parts_that_the_exchange_takes(served: Served) -> None:
    """An honest member is never refused for its length, whatever its error messages contain."""
    step = pb.Report(inner_step=pb.InnerStep(replica="a", round=1))
    long = pb.Report(state_saving=pb.StateSaving(round=1, failure="\x07\U0001f40d" * 10_000))
    before = served.run.exchange.reports.watchers.reported
    served.client("a").report([step, long] * 20)
    assert served.run.exchange.reports.watchers.reported == before + 40
    served.client("a").broken("a", 1, "\U0001f40d" * 100_000)
    assert served.refusals == {}


def test_what_no_member_asks_is_refused_in_one_line(served: Served) -> None:
    """These are names that a run checkpoint does not have, and bytes that are no message."""
    for names in ([f"layers.{one}" for one in range(30_000)], ["norm.weight"] * 30_000):
        error = _ask(served, "RunCheckpoint", pb.CheckpointRequest(names=names).SerializeToString())
        assert error.code() in (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.INVALID_ARGUMENT)
        assert len(error.details() or "") < 200
    before = served.refusals.get(Kind.MALFORMED, 0)
    assert _ask(served, "Heartbeat", b"\xff\xff").code() is grpc.StatusCode.INVALID_ARGUMENT
    assert served.refusals[Kind.MALFORMED] == before + 1


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
