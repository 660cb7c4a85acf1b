"""Every field of every message that a member sends, set to values that it should not have, in a live run.

No number may bend, stall or end the run: it ends, with the bits of honest contributions alone, nobody honest is blamed,
no call escapes as an error that nobody expected, and the exchange's memory stays bounded.
"""

from __future__ import annotations

import gc
import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import grpc
import pytest
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message
from lying_run import LyingRun, lying_spec
from members import TIMEOUT

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from lies import HEADERS, RAW, WORST, Call, Lie, fields_of, lies_about, link_lies, lying, sent_by

from hetero_pp.links import EXCHANGE
from hetero_pp.messages import messages_pb2 as pb
from hetero_pp.rpc import neighbour
from hetero_pp.rpc.admission import SERVICE as ADMISSION
from hetero_pp.rpc.certificates import new_key, signing_request
from hetero_pp.rpc.channels import PROTOCOL_VERSION, make_channel
from hetero_pp.rpc.exchange import SERVICE as SERVED
from hetero_pp.rpc.framing import header_and_payload_frames
from hetero_pp.rpc.permissions import CALLS, Whose
from hetero_pp.rpc.services import call_path
from hetero_pp.rpc.stage_link import StageLinkServer

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
# of gRPC, which asks a connection that was closed whether it is connected

ROUNDS = 14
AT_ONCE = 8
"""Calls beside a member's own, of which it may have 16 open."""
WAITED = 0.3
"""Seconds that calls which wait for something to happen are waited for."""
WAIT = {"Assign", "Join", "Record", "Stay", "Watch"}
ESCAPED = {"UNKNOWN", "INTERNAL", "UNIMPLEMENTED", "DATA_LOSS"}
"""How calls end by an exception that nobody expected."""
MOST_GROWTH = 16e6
"""Bytes that the exchange may keep of all lies: who watches is told 10,000 reports again."""

EXPECTED_FAILURES: Mapping[str, str] = {
    "stage links": "the honest stage beside the liar fails by hellos that it refuses, and starts again",
}
"""What a lie does to a run, for as long as that is not mended. To be empty."""

METHODS: Mapping[str, MethodDescriptor] = {one.name: one for service in (SERVED, ADMISSION) for one in service.methods}
NOT_SENT: Mapping[str, str] = {
    "Give": "a member that gives its place back is out of the run, whatever it says: there is nothing in the request",
    "Probe": "frames without a message: tests/exchange/test_admission.py",
}


# ---- honest calls, of which lies are made ----


class Liar:
    """The member `c`: sends lies beside its honest calls, and remembers how they ended."""

    def __init__(self, run: LyingRun) -> None:
        self._run = run
        self.sent: set[tuple[str, str]] = set()
        """(method, field) that were lied about."""
        self.escaped: list[str] = []
        self._lock = threading.Lock()
        self._assigned = 0
        self._channel = make_channel(run.address, run.credentials["c"].identity, EXCHANGE)

    def change(self, call: Call) -> Call:
        """Lie beside the first honest call of each method; beside a later one in those that `c` never makes."""
        with self._lock:
            calls = [] if self._is_lied_about(call.name) else [call]
            if call.name == "Assign":
                self._assigned += 1
                left = [name for name in TEMPLATES if not self._is_lied_about(name)]
                if self._assigned > 2:  # those that `c` makes it has made by now
                    left += [name for name in METHODS if name not in TEMPLATES and not self._is_lied_about(name)]
                    calls += [self._template(name, call) for name in left[:1]]
            for one in calls:
                self.sent.add((one.name, ""))
        for one in calls:
            self.lie_beside(one)
        return call

    def _is_lied_about(self, method: str) -> bool:
        return method in NOT_SENT or (method, "") in self.sent

    def _template(self, method: str, call: Call) -> Call:
        """An honest call that `c` does not make in this run, and may make."""
        message = TEMPLATES[method](self._run) if method in TEMPLATES else None
        assert message is not None, f"no honest call of {method} to lie about: add one to TEMPLATES"
        service = SERVED if method in SERVED.methods_by_name else ADMISSION
        frames = [message.SerializeToString()]
        if method in HEADERS:
            frames = list(header_and_payload_frames(message, [b""]))
        return Call(call_path(service, method), message, frames, call.metadata)

    def lie_beside(self, honest: Call) -> None:
        """Make the same call with each of its fields changed."""
        assert honest.message is not None
        is_ticket = CALLS[honest.name] is Whose.TICKET
        channel = self._channel
        if is_ticket:
            channel = make_channel(self._run.address, self._run.ticket().identity, EXCHANGE)
        with ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(lambda lie: self._send(channel, honest, lie), lies_about(honest.message)))
        if is_ticket:
            channel.close()

    def _send(self, channel: grpc.Channel, honest: Call, lie: Lie) -> None:
        try:
            frames = honest.saying(lie.message).frames
        except ValueError:  # longer than a header may be: the other end would not read it
            return
        code = made(channel, honest.path, frames, honest.metadata, WAITED if honest.name in WAIT else TIMEOUT)
        with self._lock:
            self.sent.add((honest.name, lie.path))
            if code.partition(":")[0] in ESCAPED:
                self.escaped.append(f"{honest.name}: {lie.path} {lie.what}: {code}")

    def close(self) -> None:
        """End its connection."""
        self._channel.close()


class Replacer:
    """A member that says one of the worst lies instead of an honest message, once each."""

    def __init__(self, run: LyingRun, paced: Mapping[str, bool]) -> None:
        """`paced`: by call or message that is lied about, whether so only once in a round, as the member may fail by it
        and has to come back.
        """
        self._run, self._paced = run, paced
        self.said: set[tuple[str, str]] = set()
        """(call or message, field) that were lied about."""
        self._done: set[tuple[str, str, str]] = set()
        self._round = 0
        self._lock = threading.Lock()

    def change(self, call: Call) -> Call:
        """Change a call to the exchange, if that is due."""
        assert call.message is not None
        lie = self._due(call.name, call.message)
        return call if lie is None else call.saying(lie.message)

    def change_message(self, message: Message) -> Message:
        """Change a message to a neighbouring stage, if that is due."""
        lie = self._due(type(message).__name__, message)
        return message if lie is None else lie.message

    def _due(self, name: str, message: Message) -> Lie | None:
        with self._lock:
            last_round, is_paced = self._run.exchange.coordinator.last_round, self._paced.get(name)
            if is_paced is None or (is_paced and self._round > last_round):
                return None
            for lie in lies_about(message):
                key = (name, lie.path, lie.what)
                is_mended = f"{name}: {lie.path} {lie.what}" not in EXPECTED_FAILURES
                if lie.what in WORST and is_mended and key not in self._done and _is_usual(lie, message):
                    self._done.add(key)
                    self.said.add((name, lie.path))
                    self._round = last_round + 1 if is_paced else self._round
                    return lie
        return None


def _is_usual(lie: Lie, message: Message) -> bool:
    """Whether a report is changed to no other event than its own: those are said beside honest calls."""
    _, _, inner = lie.path.partition(".")
    event, _, field = inner.partition(".")
    return not isinstance(message, pb.ReportRequest) or not field or message.reports[0].WhichOneof("event") == event


def made(channel: grpc.Channel, path: str, frames: Any, metadata: Any, timeout: float) -> str:
    """How a call ended, and with which words."""
    call: grpc.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(path)
    try:
        for _ in call(iter(frames), metadata=metadata, timeout=timeout):
            pass
        return "OK"
    except grpc.RpcError as error:
        return f"{error.code().name}: {error.details()}"


def _blob(run: LyingRun) -> pb.BlobHeader:
    round_ = run.exchange.coordinator.last_round + 1
    block = sorted(run.exchange.roster.blocks["c"])[0]
    epoch = run.exchange.coordinator.replicas["c"].epoch
    return pb.BlobHeader(round=round_, replica="c", block=block, size=100, epoch=epoch, steps=2)


TEMPLATES: Mapping[str, Callable[[LyingRun], Any]] = {
    "UploadUrl": lambda run: pb.Upload(blob=_blob(run), sha256=bytes(32)),
    "Uploaded": lambda run: pb.Upload(blob=_blob(run), sha256=bytes(32)),
    "Watch": lambda run: pb.WatchRequest(members=["a"]),
    "Enrol": lambda run: pb.EnrolRequest(version=PROTOCOL_VERSION, request=signing_request(new_key())),
    "Renew": lambda run: pb.RenewRequest(),
    "Status": lambda run: pb.StatusRequest(),
    "Broken": lambda run: pb.BrokenRequest(epoch=run.exchange.coordinator.replicas["c"].epoch, cause="made up"),
    "Died": lambda run: pb.DiedRequest(member="c", cause="made up", term=run.exchange.coordinator.places["c"].term),
}
"""Of methods that a member may call, and does not call in a run of datacenter replicas."""


# ---- what the exchange keeps ----


def kept_bytes(root: object) -> int:
    """Bytes of all that can be reached from an object, but for code and modules."""
    seen, left, total = set[int](), [root], 0
    while left:
        one = left.pop()
        if id(one) in seen or isinstance(one, type | types.ModuleType | types.FunctionType | types.CodeType):
            continue
        seen.add(id(one))
        total += sys.getsizeof(one)
        left += gc.get_referents(one)
    return total


# ---- the tests ----


def _fields(method: str) -> Iterator[tuple[str, str]]:
    sent = sent_by(METHODS[method])
    assert sent is not None
    yield method, ""
    yield from ((method, path) for path in fields_of(sent))


def test_every_call_that_a_member_may_make_is_lied_about() -> None:
    """A new method is, too, or says why not."""
    assert CALLS.keys() == METHODS.keys() | RAW - {"Probe"}
    assert not [name for name, method in METHODS.items() if name not in NOT_SENT and sent_by(method) is None]


def test_no_lie_beside_honest_calls_bends_stalls_or_ends_a_run(corpus: Path, tmp_path: Path) -> None:
    with LyingRun(lying_spec(corpus, ROUNDS, {"kind": "datacenter"}), tmp_path) as run:
        liar = Liar(run)
        before = kept_bytes(run.exchange)
        with lying("c", liar.change):
            run.until_over()
        liar.close()
        grown = kept_bytes(run.exchange) - before
        harm = run.harm()
    assert harm == []
    assert [one for one in liar.escaped if not one.startswith(tuple(EXPECTED_FAILURES))] == []
    assert grown < MOST_GROWTH
    missed = [field for name in METHODS if name not in NOT_SENT for field in _fields(name) if field not in liar.sent]
    assert missed == []


def test_no_lie_instead_of_an_honest_call_bends_stalls_or_ends_a_run(corpus: Path, tmp_path: Path) -> None:
    """The member fails by some of them, and is started again, as by a supervisor."""
    paced = {"Assign": True, "Deposit": True, "Record": True, "Confirm": True, "Beat": False, "Report": False}
    with LyingRun(lying_spec(corpus, 80, {"kind": "datacenter"}), tmp_path) as run:
        liar = Replacer(run, paced)
        with lying("c", liar.change):
            run.until_over()
        harm = run.harm()
    assert harm == []
    missed = {field for name in paced if name != "Report" for field in _fields(name) if field[1]} - liar.said
    assert missed == set()


@pytest.mark.parametrize(("name", "honest"), [("c.0", "c.1"), ("c.1", "c.0")])
def test_no_lie_on_a_stage_link_bends_stalls_or_ends_a_run(
    name: str, honest: str, corpus: Path, tmp_path: Path
) -> None:
    """No round closes without the group: each has its bits, however often it is formed anew."""
    group = {"kind": "participants", "stages": 2, "boundary": {"rank": "1/4"}}
    exchange = {"quorum": 1.0, "lease": {"least": "60 s", "most": "60 s"}}
    with LyingRun(lying_spec(corpus, 24, group, exchange=exchange), tmp_path) as run, ExitStack() as stack:
        liar, opened = Replacer(run, {"LinkHello": False, "LinkHeader": True}), StageLinkServer.open

        def stream(frames: Iterator[bytes]) -> Iterator[bytes]:
            return link_lies(frames, liar.change_message)

        def answered(server: StageLinkServer, requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
            frames = opened(server, requests, context)
            return stream(frames) if name == "c.1" else frames

        for what in ("CONNECT_TIMEOUT", "DIRECT_SECONDS", "CUT_OFF_SECONDS"):
            stack.enter_context(mock.patch.object(neighbour, what, 1.0))
        stack.enter_context(mock.patch.object(StageLinkServer, "open", answered))
        stack.enter_context(lying(name, change_stream=stream))
        run.until_over()
        harm, failed = run.harm(), list(map(repr, run.errors[honest]))
    assert harm == []
    if "stage links" not in EXPECTED_FAILURES:
        assert failed == []
    sent = {("LinkHello", path) for path in fields_of(pb.LinkHello.DESCRIPTOR)}
    sent |= {("LinkHeader", path) for path in fields_of(pb.LinkHeader.DESCRIPTOR)}
    assert sent - liar.said == set()
