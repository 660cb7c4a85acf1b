"""The exchange over gRPC: every call refuses callers without the token, and callers of another run."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
import torch
from deposits import deposit
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from hetero_pp.config.changes import Changes
from hetero_pp.config.checkpoint import RunCheckpoint
from hetero_pp.config.lines import LAUNCHER, LinkShape, LinkSpec
from hetero_pp.config.spec import Roster
from hetero_pp.core.errors import LinkTimeout, Refused
from hetero_pp.link.framing import header_and_payload_frames
from hetero_pp.messages import messages_pb2 as pb
from hetero_pp.messages.refusals import Kind
from hetero_pp.pseudo_gradient.contribution import BlobAddress
from hetero_pp.rpc.callers import Callers, shown
from hetero_pp.rpc.channels import PROTOCOL_VERSION, make_channel
from hetero_pp.rpc.connections import reports_to_members
from hetero_pp.rpc.exchange_client import ExchangeClient
from hetero_pp.rpc.exchange_service import Caller, HeldBy, IsAsked, call_of
from hetero_pp.rpc.identities import Secret
from hetero_pp.rpc.limits import RequestBounds
from hetero_pp.rpc.services import EXCHANGE_SERVICE, calls_of, service_handler
from hetero_pp.rpc.services import EXCHANGE_SERVICE as SERVICE
from replica_groups.exchange import server as served_exchange
from replica_groups.exchange.exchange import Exchange
from replica_groups.exchange.server import serve_exchange
from replica_groups.member.session import ExchangeLine, MemberSession

TIMEOUT = 20.0
RUN = "run"
SECRET, OTHER = Secret("the secret"), Secret("another secret")
ROSTER = Roster(
    {"dc": "dc", "home.0": "home", "home.1": "home"},
    {"dc": frozenset({"a", "norm"}), "home.0": frozenset({"a"}), "home.1": frozenset({"norm"})},
)
TOKEN, WATCHER = SECRET.credentials("dc").token, SECRET.credentials(LAUNCHER)
BLOB = b"a blob of some bytes"
ADDRESS = BlobAddress(RUN, 3, "dc", "norm")
CHANGES = Changes({"outer.rounds": {1: 2, 5: 9}, "inner.learning_rate": {1: 0.5, 3: 0.25}})
HEADER = pb.BlobHeader(round=3, replica="dc", block="norm", size=len(BLOB), generation=7, steps=50)
NORM = torch.arange(6.0).view(2, 3)
INCARNATION = 5

STRANGERS: dict[str, dict[str, str]] = {
    "wrong token": {"token": "another token", "run": RUN},
    "empty token": {"token": "", "run": RUN},
    "longer token": {"token": TOKEN + "!", "run": RUN},
    "no token": {"run": RUN},
    "another's token": {"token": SECRET.credentials("home.0").token, "run": RUN},
    "a member that is none": {"name": "away", "token": SECRET.credentials("away").token, "run": RUN},
    "nothing": {},
    "another run": {"token": TOKEN, "run": "another run"},
}
"""Metadata of strangers. They name themselves `dc` unless stated otherwise."""


REPLIES: dict[type[Message], Message] = {
    pb.JoinRequest: pb.JoinReply(incarnation=INCARNATION),
    pb.LastRoundRequest: pb.LastRoundReply(last_round=7, changes=CHANGES.to_json()),
    pb.NewestCheckpointRequest: pb.NewestCheckpointReply(round=6, names=["a", "b"]),
}
"""Replies that are not empty."""


class Recorder:
    """An exchange that records its calls and its refusals, in place of Exchange and of all its parts."""

    run, roster = RUN, ROSTER

    def __init__(self) -> None:
        self.asked: list[tuple[object, ...]] = []
        """(call, caller, its incarnation, request, ...)"""
        self.reports = [pb.Report(member="dc")]
        self.sounds: list[str] = []
        self.stayed = threading.Event()
        self.refused: list[tuple[str, str, Kind]] = []
        self.inbox = self.decided = self.runner = self.notifier = self.audits = self.refusals = self

    def _note(self, call: str, caller: Caller, *what: object) -> None:
        self.asked.append((call, caller.name, caller.incarnation, *what))

    def call(self, request: Message, caller: Caller) -> Any:
        call = call_of(request)
        if isinstance(request, pb.JoinRequest):
            request.process = ""
        self._note(call.name, caller, request)
        return REPLIES.get(type(request), GetMessageClass(call.output_type)())

    def record(self, request: pb.RecordRequest, caller: Caller) -> Any:
        request.exchange = ""  # names the server's process
        return self.call(request, caller)

    def open_checkpoint(self, request: pb.CheckpointRequest, caller: Caller) -> RunCheckpoint:
        self._note("RunCheckpoint", caller, request)
        return RunCheckpoint(0, dict.fromkeys(request.names, NORM), None)

    def link_broke(self, request: pb.BrokenRequest, caller: Caller) -> Sequence[HeldBy]:
        self._note("Broken", caller, request)
        return ()

    def held_by(self, slot: str) -> HeldBy | None:
        return None

    def admit(self, guests: object, authority: bytes | None) -> None:
        assert guests is None

    def expect_file(self, header: pb.ShownFile, caller: Caller) -> None:
        assert header.size == len(BLOB)

    def expect(self, header: pb.BlobHeader, caller: Caller) -> None:
        assert header.size == len(BLOB)

    def take(self, header: pb.BlobHeader, data: bytes, caller: Caller) -> None:
        self._note("Deposit", caller, header, data)

    @property
    def requests(self) -> RequestBounds:
        return RequestBounds(self.roster, ["norm.weight"], 1000)

    def show_file(self, header: pb.ShownFile, file: Path, caller: Caller) -> None:
        self._note("Show", caller, header, file.read_bytes())

    def upload_url(self, request: pb.BlobHeader, caller: Caller) -> str | None:
        """Return None, as in a run whose store is a folder."""
        self._note("UploadUrl", caller, request)
        return None

    def uploaded(self, request: pb.BlobHeader, caller: Caller) -> None:
        self._note("Uploaded", caller, request)

    def wake(self, slots: Collection[str]) -> None:
        pass

    def fetch_many(self, request: pb.FetchRequest, caller: Caller) -> tuple[pb.BlobHeader, list[memoryview]]:
        self._note("Fetch", caller, request)
        return pb.BlobHeader(size=len(BLOB)), [memoryview(BLOB)]

    def watch(
        self, members: Collection[str], is_asked: IsAsked, most_unread: float, so_far: bool
    ) -> Iterator[pb.Report]:
        self.asked.append(("Watch", *members))
        yield from self.reports

    def heard(self, member: str, incarnation: int | None = None) -> None:
        self.sounds.append(member)

    def stay(self, member: str) -> None:
        self.asked.append(("stay", member))
        self.stayed.set()

    def left(self, member: str, incarnation: int | None = None) -> None:
        self.asked.append(("left", member, incarnation))

    def add(self, sender: str, reason: str, kind: Kind) -> None:
        self.refused.append((sender, reason, kind))


class Served:
    """A recorder behind a server."""

    def __init__(self) -> None:
        self.exchange = Recorder()
        self.server, port = serve_exchange(cast(Exchange, self.exchange), SECRET, "127.0.0.1:0")
        self.address = f"127.0.0.1:{port}"

    def stop(self) -> None:
        """Stop the server and wait until all cleanup after its calls is done."""
        self.server.stop(None).wait(TIMEOUT)


@pytest.fixture
def served() -> Iterator[Served]:
    served = Served()
    yield served
    served.stop()


def _calls() -> dict[str, grpc.RpcMethodHandler[Any, Any]]:
    """Return every call of the service by its path, from the server's own table, so that additions are included."""
    tables: list[tuple[str, Mapping[str, grpc.RpcMethodHandler[Any, Any]]]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grpc, "method_handlers_generic_handler", lambda *table: tables.append(table))
        servicer = served_exchange._Servicer(cast(Exchange, Recorder()), Callers(SECRET, Recorder().roster))
        service_handler(EXCHANGE_SERVICE, servicer, servicer, served_exchange.MOST_OPEN)
    return {f"/{service}/{name}": handler for service, table in tables for name, handler in table.items()}


CALLS = _calls()

REQUESTS: dict[str, list[bytes]] = {
    "/hetero_pp.Exchange/Join": [pb.JoinRequest(version=PROTOCOL_VERSION, address="127.0.0.1:5").SerializeToString()],
    "/hetero_pp.Exchange/Deposit": [
        bytes(frame) for frame in header_and_payload_frames(pb.BlobHeader(round=1, size=len(BLOB)), [BLOB])
    ],
    "/hetero_pp.Exchange/Show": [
        bytes(frame) for frame in header_and_payload_frames(pb.ShownFile(round=1, size=len(BLOB)), [BLOB])
    ],
    "/hetero_pp.Exchange/Died": [pb.DiedRequest(member="dc").SerializeToString()],
}
"""Requests of the calls for which an empty message is not a valid request."""


def _call(served: Served, path: str, metadata: Mapping[str, str]) -> None:
    """Make a call of any kind to its end. Raise grpc.RpcError if it fails."""
    handler, request = CALLS[path], REQUESTS.get(path, [b""])
    with make_channel(served.address) as channel:
        streams = handler.request_streaming, handler.response_streaming
        kinds = ["stream" if one else "unary" for one in streams]
        call = getattr(channel, "_".join(kinds))(path)
        sent = iter(request) if handler.request_streaming else request[0]
        reply = call(sent, metadata=tuple(metadata.items()), timeout=TIMEOUT)
        if handler.response_streaming:
            list(reply)


def test_the_calls_are_those_that_members_make() -> None:
    """Makes sure that the tests below do not pass because no call was made."""
    made = "Agree Join LastRound Assign Heartbeat Broken Died NewestCheckpoint RunCheckpoint Deposit Record Fetch"
    made += " UploadUrl Uploaded Confirm Report Show Stay Watch"
    assert CALLS.keys() >= {f"/hetero_pp.Exchange/{name}" for name in made.split()}


@pytest.mark.parametrize("path", CALLS)
@pytest.mark.parametrize("known", STRANGERS.values(), ids=STRANGERS)
def test_a_stranger_is_refused_counted_and_reaches_nothing(path: str, known: dict[str, str], served: Served) -> None:
    with pytest.raises(grpc.RpcError) as error:
        _call(served, path, {"name": "dc", "incarnation": "1"} | known)
    knows = known.get("token") == TOKEN
    expected = grpc.StatusCode.PERMISSION_DENIED if knows else grpc.StatusCode.UNAUTHENTICATED
    assert error.value.code() is expected
    served.stop()
    [(sender, reason, kind)] = served.exchange.refused
    assert sender.startswith(f"{known.get('name', 'dc')} at ipv4:127.0.0.1:")
    assert reason == ("another configuration" if knows else "found another token than the run's")
    assert kind is (Kind.UNEXPECTED if knows else Kind.STRANGER)
    assert served.exchange.asked == served.exchange.sounds == []


@pytest.mark.parametrize("path", CALLS)
@pytest.mark.parametrize("run", [{"run": RUN}, {}], ids=["run", "no run"])
def test_with_the_token_every_call_gets_through(path: str, run: dict[str, str], served: Served) -> None:
    name = path.rpartition("/")[2]
    caller = "validator.first" if name == "Judge" else "dc"
    _call(served, path, {"name": caller, "token": SECRET.credentials(caller).token, "incarnation": "1"} | run)
    served.stop()
    asked = [what for what, *_ in served.exchange.asked]
    several = {"Stay": ["stay", "left"], "RunCheckpoint": ["NewestCheckpoint", "RunCheckpoint"]}
    assert asked == several.get(name, [name])
    sounds = 2 if name in ("RunCheckpoint", "Deposit", "Fetch", "Show") else 1  # a frame shows that it is there, too
    assert served.exchange.sounds == [caller] * sounds
    assert served.exchange.refused == []


def test_what_a_member_asks_arrives_and_is_answered(served: Served) -> None:
    """These calls move data, report or watch. Every field of the others is compared below."""
    client = ExchangeClient(served.address, SECRET.credentials("dc"), RUN)
    assert client.join("dc", "127.0.0.1:6") == INCARNATION
    assert client.changes() == CHANGES
    assert client.checkpoint(["a", "b"])["b"].equal(NORM)
    assert client.checkpoint(["a"], 0)["a"].equal(NORM)
    deposit(client, "dc", ADDRESS, BLOB, 7, 50)
    assert client.fetch("dc", 3, "home", "norm") == BLOB
    client.report([pb.Report(member="somebody else", finished=pb.Nothing())])
    assert [report.member for report in client.watch()] == ["dc"]
    assert served.exchange.stayed.wait(TIMEOUT)  # joining starts it in the background
    client.close()
    served.stop()
    there = [("stay", "dc"), ("left", "dc", INCARNATION)]
    asked = [one for one in served.exchange.asked if one[0] not in ("Join", "LastRound", "NewestCheckpoint")]
    assert all(one in asked for one in there)
    assert [one for one in asked if one not in there] == [
        ("RunCheckpoint", "dc", INCARNATION, pb.CheckpointRequest(names=["a", "b"], round=6)),
        ("RunCheckpoint", "dc", INCARNATION, pb.CheckpointRequest(names=["a"], round=0)),
        ("Deposit", "dc", INCARNATION, HEADER, BLOB),
        ("Fetch", "dc", INCARNATION, pb.FetchRequest(round=3, replica="home", block="norm")),
        # whoever knows the token speaks for itself only
        ("Report", "dc", INCARNATION, pb.ReportRequest(reports=[pb.Report(member="dc", finished=pb.Nothing())])),
        ("Watch",),
    ]


_VALUES = {
    FieldDescriptor.TYPE_STRING: "text",
    FieldDescriptor.TYPE_BYTES: b"bytes",
    FieldDescriptor.TYPE_BOOL: True,
    FieldDescriptor.TYPE_FLOAT: 1.5,
    FieldDescriptor.TYPE_DOUBLE: 1.5,
}


def _filled(kind: type[Message]) -> Message:
    """Return a message in which every field has a value that is not its default."""
    message, fields = kind(), cast(Any, kind.DESCRIPTOR.fields)
    for field in fields:
        value: Any = _VALUES.get(field.type, 7)
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            getattr(message, field.name)["norm.weight"] = bytes(32)
        elif field.message_type is not None and not field.is_repeated:
            getattr(message, field.name).CopyFrom(_filled(GetMessageClass(field.message_type)))
        elif field.message_type is not None:
            getattr(message, field.name).append(_filled(GetMessageClass(field.message_type)))
        elif field.is_repeated:
            getattr(message, field.name).append(value)
        else:
            setattr(message, field.name, value)
    return message


def _asked_by_one_message() -> list[str]:
    """Return the calls of `ExchangeService.call`, apart from reports, whose fields depend on their sender."""
    apart = {"UploadUrl", "Uploaded", "Stay", "Report"}
    return [
        one.name
        for one in SERVICE.methods
        if pb.Frame.DESCRIPTOR not in (one.input_type, one.output_type)
        and not one.server_streaming
        and one.name not in apart
    ]


@pytest.mark.parametrize("call", _asked_by_one_message())
def test_every_field_crosses_in_both_directions(call: str, served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """A field that is added to a message needs no change of any object between a member and the exchange."""
    method = SERVICE.methods_by_name[call]
    request, reply = _filled(GetMessageClass(method.input_type)), _filled(GetMessageClass(method.output_type))
    if isinstance(request, pb.DiedRequest):
        request.member = "dc"
    if isinstance(request, pb.RecordRequest):
        request.exchange = ""
    sent = type(request).FromString(request.SerializeToString())
    monkeypatch.setitem(REPLIES, type(request), reply)
    caller = "validator.first" if call == "Judge" else "dc"
    client = ExchangeClient(served.address, SECRET.credentials(caller), RUN)
    client._incarnation = INCARNATION
    link = LinkSpec("dc-exchange", "dc", "exchange", LinkShape(), LinkShape())
    exchange = MemberSession(client, "dc", "dc", RUN, ExchangeLine(link, seed=1), overlaps=True)
    assert exchange.call(request, Caller(caller)) == reply
    client.close()
    if isinstance(sent, pb.JoinRequest):
        sent.version, sent.process = PROTOCOL_VERSION, ""
    assert next(one for one in served.exchange.asked if one[0] == call)[3] == sent


@pytest.mark.parametrize(
    ("secret", "run", "words"),
    [(OTHER, RUN, "was started with another token"), (SECRET, "another run", "has another configuration")],
)
def test_a_client_that_is_a_stranger_is_told_so(secret: Secret, run: str, words: str, served: Served) -> None:
    client = ExchangeClient(served.address, secret.credentials("dc"), run)
    for ask in (
        lambda: client.agree("dc", "{}"),
        lambda: client.join("dc", ""),
        lambda: deposit(client, "dc", ADDRESS, BLOB),
        lambda: client.fetch("dc", 3, "home", "norm"),
        lambda: list(client.watch()),
    ):
        with pytest.raises(Refused, match=words):
            ask()
    client.close()
    served.stop()
    assert len(served.exchange.refused) == 5
    assert served.exchange.asked == []


@pytest.mark.parametrize("version", [PROTOCOL_VERSION - 1, PROTOCOL_VERSION + 1])
def test_a_member_of_another_version_is_refused(version: int, served: Served) -> None:
    request = pb.JoinRequest(version=version, address="127.0.0.1:5")
    with make_channel(served.address) as channel, pytest.raises(grpc.RpcError) as error:
        calls_of(SERVICE, channel)["Join"](request, metadata=shown(SECRET.credentials("dc")), timeout=TIMEOUT)
    assert error.value.code() is grpc.StatusCode.PERMISSION_DENIED
    expected = f"expected {PROTOCOL_VERSION}: install one version of hetero-pp on all hosts"
    assert error.value.details() == f"found protocol version {version}, {expected}"
    assert served.exchange.asked == []


def test_what_is_large_has_a_connection_of_its_own(served: Served) -> None:
    """On a slow line, a contribution of a minute would delay every heartbeat."""
    stranger = ExchangeClient(served.address, OTHER.credentials("dc"), RUN)
    for ask in (
        lambda: stranger.heartbeat("dc"),
        lambda: stranger.report([]),
        lambda: stranger.fetch("dc", 3, "home", "norm"),
    ):
        with pytest.raises(Refused):
            ask()
    stranger.close()
    control, again, bulk = (sender for sender, *_ in served.exchange.refused)
    assert control == again != bulk


def test_the_version_is_the_one_that_is_documented() -> None:
    text = (Path(__file__).parents[2] / "docs" / "wire-format.md").read_text()
    assert re.findall(r"one version together, (\d+)", text) == [str(PROTOCOL_VERSION)]


class _EndedCall:
    """The context of a call whose caller is gone."""

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return shown(SECRET.credentials("dc"))

    def add_callback(self, callback: Callable[[], None]) -> bool:
        return False


def test_who_is_gone_before_its_stay_begins_has_left() -> None:
    """gRPC accepts no callback for a call that has ended, so no other event would tell that the member left."""
    exchange = Recorder()
    servicer = served_exchange._Servicer(cast(Exchange, exchange), Callers(SECRET, exchange.roster))
    servicer.Stay(pb.StayRequest(), cast(grpc.ServicerContext, _EndedCall()))
    assert exchange.asked == [("left", "dc", None)]


def test_of_some_members_what_they_tell_is_followed_until_they_are_through(served: Served) -> None:
    finished = [pb.Report(member=member, finished=pb.Nothing()) for member in ("home.0", "dc", "home.1")]
    served.exchange.reports = [*finished, pb.Report(member="dc")]
    told = reports_to_members(served.address, WATCHER, ["home.0", "home.1"], TIMEOUT, lambda *_: None)
    assert [report.member for report in told] == ["home.0", "dc", "home.1"]
    served.stop()
    assert served.exchange.asked == [("Watch", "home.0", "home.1")]


def test_nobody_waits_without_a_bound_for_an_exchange_that_does_not_come_up() -> None:
    """The client also reports that it waits."""
    told: list[float] = []
    client = ExchangeClient("127.0.0.1:1", SECRET.credentials("dc"), RUN, timeout=0.1)
    words = r"the exchange at 127\.0\.0\.1:1 did not answer within 100 ms; giving up"
    with pytest.raises(LinkTimeout, match=words):
        client.join("dc", "")
    with pytest.raises(LinkTimeout, match=words):
        client.wait_until_ready(0.1, told.append)
    client.close()
    assert told == [0.1]
