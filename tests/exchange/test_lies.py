"""Every field of every message of a member is set to invalid values, in a live run.

No value may change the result, stall the run or fail it. The run ends with the bits of honest contributions alone, and
no honest member is blamed.

No call ends by an unexpected exception, and the exchange's memory stays bounded.
"""

from __future__ import annotations

import gc
import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import MethodDescriptor
from lying_run import LyingRun, Replacer, lying_spec
from members import TIMEOUT

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from lies import HEADERS, RAW, WORST, Call, fields_of, lies_about, lying, raw_lies, sent_by

from hetero_pp.config.lines import EXCHANGE
from hetero_pp.link.framing import header_and_payload_frames
from hetero_pp.messages import messages_pb2 as pb
from hetero_pp.rpc.admission_client import PROBE_BYTES
from hetero_pp.rpc.callers import CALLS, Whose
from hetero_pp.rpc.channels import PROTOCOL_VERSION, make_channel
from hetero_pp.rpc.identities import new_key, signing_request
from hetero_pp.rpc.relay import SERVICE as RELAY
from hetero_pp.rpc.services import ADMISSION_SERVICE as ADMISSION
from hetero_pp.rpc.services import EXCHANGE_SERVICE as SERVED
from hetero_pp.rpc.services import call_path

ROUNDS: Mapping[bool, int] = {False: 20, True: 26}
"""Rounds of a run, by whether rounds overlap. They suffice for all lies, although liars miss some rounds."""
AT_ONCE = 8
"""Concurrent false calls beside a member's own calls. A member may have 16 calls open."""
TEMPLATES_AT_ONCE = 3
"""Kinds of calls that `c` makes in one round only to lie about them."""
INSTEAD: Mapping[bool, Mapping[str, Mapping[str, bool]]] = {
    False: {"d": {"Assign": True, "Heartbeat": False}, "e": {"Record": True, "Report": False}},
    True: {name: {"Deposit": True, "Confirm": True} for name in ("d", "e")},
}
"""Calls in which a member lies, by member and by whether rounds overlap.

The value is true if the member lies only once per round, because the lie may make it fail.
"""
WAITED = 0.3
"""Seconds to wait for calls that only return when some event happens."""
WAIT = {"Assign", "Carry", "Join", "Record", "Stay", "Watch"}
ESCAPED = {"UNKNOWN", "INTERNAL", "UNIMPLEMENTED", "DATA_LOSS"}
"""Status codes of calls that end by an unexpected exception."""
MOST_GROWTH = 16e6
"""Bytes that the exchange may keep of all lies. A new watcher gets 10,000 old reports again."""

METHODS: Mapping[str, MethodDescriptor] = {
    one.name: one for service in (SERVED, ADMISSION, RELAY) for one in service.methods
}
FRAMES: Mapping[str, list[bytes]] = {
    "Probe": [bytes(PROBE_BYTES // 16)] * 16,
    "Measure": [bytes(PROBE_BYTES // 16)] * 16,
}
"""Valid frames of the calls that send raw frames."""


# ---- honest calls, from which lies are made ----


class Liar:
    """The member `c`: it sends lies beside its honest calls and records how they ended."""

    def __init__(self, run: LyingRun) -> None:
        self._run = run
        self.sent: set[tuple[str, str]] = set()
        """Pairs of a method and a field that were lied about."""
        self.escaped: list[str] = []
        self._lock = threading.Lock()
        self._assigned = 0

    def change(self, call: Call) -> Call:
        """Lie beside the first honest call of each method.

        For methods that `c` never calls, lie beside a later call.
        """
        with self._lock:
            calls = [] if self._is_lied_about(call.name) else [call]
            if call.name == "Assign":
                self._assigned += 1
                left = [name for name in (*FRAMES, *TEMPLATES) if not self._is_lied_about(name)]
                if self._assigned > 2:  # by now `c` has made each call that it makes by itself
                    others = FRAMES.keys() | TEMPLATES.keys()
                    left += [name for name in METHODS if name not in others and not self._is_lied_about(name)]
                    calls += [self._template(name, call) for name in left[:TEMPLATES_AT_ONCE]]
            for one in calls:
                self.sent.add((one.name, ""))
        for one in calls:
            self.lie_beside(one)
        return call

    def _is_lied_about(self, method: str) -> bool:
        return (method, "") in self.sent

    def _template(self, method: str, call: Call) -> Call:
        """Return a valid call that `c` is allowed to make but does not make in this run."""
        path = call_path(METHODS[method].containing_service, method)
        if method in FRAMES:
            return Call(path, None, FRAMES[method], call.metadata)
        message = TEMPLATES[method](self._run) if method in TEMPLATES else None
        assert message is not None, f"no honest call of {method} to lie about: add one to TEMPLATES"
        frames = [message.SerializeToString()]
        if method in HEADERS:
            frames = list(header_and_payload_frames(message, [b""]))
        return Call(path, message, frames, call.metadata)

    def lie_beside(self, honest: Call) -> None:
        """Make the same call with each of its fields changed, or with other raw frames."""
        own = self._run.ticket() if CALLS[honest.name] is Whose.TICKET else self._run.credentials["c"]
        with (
            closing(make_channel(self._run.address, own.identity, EXCHANGE)) as channel,
            ThreadPoolExecutor(AT_ONCE) as pool,
        ):
            list(pool.map(lambda lie: self._send(channel, honest, *lie), _lies_beside(honest)))

    def _send(self, channel: grpc.Channel, honest: Call, path: str, what: str, frames: Sequence[bytes]) -> None:
        code = made(channel, honest.path, frames, honest.metadata, WAITED if honest.name in WAIT else TIMEOUT)
        with self._lock:
            self.sent.add((honest.name, path))
            if code.partition(":")[0] in ESCAPED:
                self.escaped.append(f"{honest.name}: {path} {what}: {code}")


def _lies_beside(honest: Call) -> Iterator[tuple[str, str, Sequence[bytes]]]:
    """Yield the field that is changed, what it is changed to, and the frames of the call."""
    if honest.message is None:
        yield from (("", what, frames) for what, frames in raw_lies(honest.frames))
        return
    tried: dict[str, str] = {}

    def is_wanted(path: str, what: str) -> bool:
        """Select the worst values of every field, and every other value for one field of a call.

        Some headers are not sent with a text that is far too long, so one that is a bit too long is sent, too.
        """
        return what in WORST or what == "one too long" or tried.setdefault(what, path) == path

    for lie in lies_about(honest.message, is_wanted):
        with suppress(ValueError):  # longer than a header may be: the receiver would not read it
            yield lie.path, lie.what, honest.saying(lie.message).frames


def made(channel: grpc.Channel, path: str, frames: Any, metadata: Any, timeout: float) -> str:
    """Return the status and the details with which a call ended."""
    call: grpc.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(path)
    try:
        for _ in call(iter(frames), metadata=metadata, timeout=timeout):
            pass
        return "OK"
    except grpc.RpcError as error:
        return f"{error.code().name}: {error.details()}"


def _blob(run: LyingRun, sha256: bytes = b"") -> pb.BlobHeader:
    round_ = run.exchange.coordinator.last_round + 1
    block = sorted(run.exchange.roster.blocks["c"])[0]
    generation = run.exchange.coordinator.replicas["c"].generation
    return pb.BlobHeader(
        round=round_, replica="c", block=block, size=100, generation=generation, steps=2, sha256=sha256
    )


TEMPLATES: Mapping[str, Callable[[LyingRun], Any]] = {
    "UploadUrl": lambda run: _blob(run, sha256=bytes(32)),
    "Uploaded": lambda run: _blob(run, sha256=bytes(32)),
    "Show": lambda run: pb.ShownFile(
        round=max(1, run.exchange.coordinator.last_round), name="before.safetensors", size=0
    ),
    "Judge": lambda run: pb.JudgeRequest(judgements=[pb.Judgement(round=1, replica="a")]),
    "Watch": lambda run: pb.WatchRequest(members=["a"]),
    "Enrol": lambda run: pb.EnrolRequest(version=PROTOCOL_VERSION, request=signing_request(new_key())),
    "Renew": lambda run: pb.Nothing(),
    "Status": lambda run: pb.Nothing(),
    "Preview": lambda run: pb.Nothing(),
    "Broken": lambda run: pb.BrokenRequest(
        generation=run.exchange.coordinator.replicas["c"].generation, cause="made up"
    ),
    "Died": lambda run: pb.DiedRequest(
        member="c", cause="made up", incarnation=run.exchange.coordinator.slots["c"].incarnation
    ),
    "Carry": lambda run: pb.RelayedLink(link="c-exchange"),
    "Give": lambda run: pb.Nothing(),
}
"""Valid requests of methods that members may call but do not call in a run of datacenter replicas.

The last one ends the membership of `c`.
"""


# ---- what the exchange keeps ----


def kept_bytes(root: object) -> int:
    """Return the bytes of all objects that can be reached from an object, without code and modules."""
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
    yield method, ""
    yield from ((method, path) for path in ([] if sent is None else fields_of(sent)))


def test_every_call_that_a_member_may_make_is_lied_about() -> None:
    """This includes methods that are added later."""
    assert CALLS.keys() == METHODS.keys()
    assert FRAMES.keys() == RAW


@pytest.mark.parametrize("overlap", [False, True])
def test_no_lie_to_the_exchange_bends_stalls_or_ends_a_run(corpus: Path, tmp_path: Path, overlap: bool) -> None:
    """`d` and `e` lie instead of their honest calls, fail by some lies, and are started again. They share all lies.

    If rounds do not overlap, `c` lies beside its honest calls. The exchange serves these in the same way in both kinds.
    """
    instead = INSTEAD[overlap]
    names = [*instead] if overlap else ["c", *instead]
    liars = {name: {"kind": "datacenter"} for name in names}
    exchange = {"grace": {"least": "20 s", "most": "20 s"}, "lease": {"least": "60 s", "most": "60 s"}}
    spec = lying_spec(corpus, ROUNDS[overlap], liars, overlap=overlap, exchange=exchange)
    with LyingRun(spec, tmp_path) as run, ExitStack() as stack:
        beside, told = Liar(run), set[tuple[str, str, str]]()
        replacers = {name: Replacer(run, paced, told) for name, paced in instead.items()}
        before = kept_bytes(run.exchange)
        stack.enter_context(lying("c", beside.change))
        for name, replacer in replacers.items():
            stack.enter_context(lying(name, replacer.change))
        run.until_over()
        grown = kept_bytes(run.exchange) - before
        harm = run.harm()
    assert harm == []
    assert beside.escaped == []
    assert grown < MOST_GROWTH
    left = [field for name in METHODS for field in _fields(name) if field not in beside.sent]
    assert overlap or left == [], [repr(error) for error in run.errors["c"]]
    calls = {call for paced in instead.values() for call in paced if call != "Report"}
    fields = {field for call in calls for field in _fields(call) if field[1]}
    assert fields - {(call, path) for call, path, _ in told} == set()
