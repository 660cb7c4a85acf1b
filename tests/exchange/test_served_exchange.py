"""The exchange over gRPC: every call refuses callers without the token, and callers of another run."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
import torch
from torch import Tensor

from hetero_pp.changed_keys import Changes
from hetero_pp.errors import LinkClosed, LinkTimeout, Refused
from hetero_pp.links import LAUNCHER
from hetero_pp.messages import messages_pb2 as pb
from hetero_pp.messages.messages_pb2_grpc import ExchangeStub
from hetero_pp.outer.exchange_service import Assignment, AvailableStates, HeldBy, Standing
from hetero_pp.pseudo_gradient.contribution import BlobAddress
from hetero_pp.refusals import Kind
from hetero_pp.rpc import exchange as served_exchange
from hetero_pp.rpc.callers import Callers, shown
from hetero_pp.rpc.channels import PROTOCOL_VERSION, make_channel
from hetero_pp.rpc.connections import reports_of, reports_to_members
from hetero_pp.rpc.credentials import Secret
from hetero_pp.rpc.exchange import IsAsked, serve_exchange
from hetero_pp.rpc.exchange_client import ExchangeClient
from hetero_pp.rpc.framing import header_and_payload_frames
from hetero_pp.run.spec import Roster

TIMEOUT = 20.0
RUN = "run"
SECRET, OTHER = Secret("the secret"), Secret("another secret")
ROSTER = Roster(
    {"dc": "dc", "home.0": "home", "home.1": "home"},
    {"dc": frozenset({"a", "norm"}), "home.0": frozenset({"a"}), "home.1": frozenset({"norm"})},
)
TOKEN, WATCHER = SECRET.credentials("dc").token, SECRET.credentials(LAUNCHER)
BLOB = b"a blob of some bytes"
LARGEST = 1000
ADDRESS = BlobAddress(RUN, 3, "dc", "norm")
CHANGES = Changes({"outer.rounds": {1: 2, 5: 9}, "inner.learning_rate": {1: 0.5, 3: 0.25}})
NORM = torch.arange(6.0).view(2, 3)
TERM = 5
WORK = Assignment(
    round=8, epoch=7, downstream="127.0.0.1:7", heals=True, is_first=True, upstream="127.0.0.1:6", trained=8
)
STANDING = Standing(is_over=True, suspended=7, cause="home.0: it ended")

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


class Recorder:
    """An exchange that records its calls and its refusals. Implements WatchedExchange."""

    run, roster = RUN, ROSTER

    def __init__(self) -> None:
        self.asked: list[tuple[object, ...]] = []
        self.reports = [pb.Report(member="dc")]
        self.sounds: list[str] = []
        self.expected: list[tuple[str, BlobAddress, int]] = []
        """Deposits that members announced, with their sizes."""
        self.left_terms: list[int | None] = []
        self.processes: list[str | None] = []
        """Process names that callers gave when they requested a slot."""
        self.stayed, self.woken = threading.Event(), threading.Event()
        self.refused: list[tuple[str, str, Kind]] = []

    def agree(self, member: str, configuration: str, tokens: str) -> str:
        self.asked.append(("agree", member, configuration, tokens))
        return self.run

    def changes(self, is_asked: IsAsked) -> Changes:
        self.asked.append(("changes",))
        return CHANGES

    def join(
        self,
        member: str,
        address: str,
        available: AvailableStates,
        process: str | None,
        is_asked: IsAsked,
        is_guest: bool = False,
    ) -> int:
        self.asked.append(("join", member, address, available))
        self.processes.append(process)
        return TERM

    def dialled(self, member: str, address: str, is_reached: bool | None) -> None:
        self.asked.append(("dialled", member, address, is_reached))

    def last_round(self, is_asked: IsAsked) -> int:
        self.asked.append(("last_round",))
        return 7

    def newest_snapshot(self, is_asked: IsAsked) -> tuple[int, Sequence[str]]:
        self.asked.append(("newest_snapshot",))
        return 6, ["a", "b"]

    def snapshot(self, names: Sequence[str], round_: int | None = None) -> dict[str, Tensor]:
        self.asked.append(("snapshot", round_, *names))
        return dict.fromkeys(names, NORM)

    def assign(
        self,
        member: str,
        holds: int,
        address: str,
        trained: int,
        term: int | None,
        is_asked: IsAsked,
        holder: int = 0,
    ) -> Assignment:
        self.asked.append(("assign", member, holds, address, trained, term))
        return WORK

    def beat(
        self,
        member: str,
        round_: int | None = None,
        epoch: int = 0,
        progress: int = 0,
        computes: bool = False,
        term: int | None = None,
    ) -> Standing:
        self.asked.append(("beat", member, round_, epoch, progress, computes, term))
        return Standing() if round_ is None else STANDING

    def link_broke(self, member: str, epoch: int, cause: str, blames: str, term: int | None = None) -> Sequence[HeldBy]:
        self.asked.append(("broken", member, epoch, cause, term, blames))
        return ()

    def guests_beside(self, member: str) -> Sequence[HeldBy]:
        return ()

    def died(self, member: str, cause: str, term: int | None = None) -> None:
        self.asked.append(("died", member, cause, term))

    def expect(self, member: str, address: BlobAddress, size: int) -> None:
        self.expected.append((member, address, size))
        if size > LARGEST:
            raise Refused(f"found {size} bytes, expected at most {LARGEST}")

    def deposit(
        self,
        member: str,
        address: BlobAddress,
        data: bytes,
        epoch: int | None = None,
        steps: int = 0,
        term: int | None = None,
    ) -> None:
        self.asked.append(("deposit", member, address, data, epoch, steps, term))

    def upload_url(
        self, member: str, address: BlobAddress, sha256: bytes, epoch: int | None = None, term: int | None = None
    ) -> str | None:
        """Return None, as in a run whose store is a folder."""
        self.asked.append(("upload_url", member, address, sha256, epoch, term))
        return None

    def uploaded(
        self,
        member: str,
        address: BlobAddress,
        sha256: bytes,
        epoch: int | None = None,
        steps: int = 0,
        term: int | None = None,
    ) -> None:
        self.asked.append(("uploaded", member, address, sha256, epoch, steps, term))

    def stored(self, member: str, round_: int, replica: str, block: str) -> pb.StoredBlob | None:
        self.asked.append(("stored", member, round_, replica, block))
        return None

    def wake(self) -> None:
        self.woken.set()

    def record(self, round_: int, member: str | None, term: int | None, is_asked: IsAsked) -> pb.RoundRecord:
        self.asked.append(("record", round_, member, term))
        return pb.RoundRecord(round=round_)

    def fetch(self, member: str, round_: int, replica: str, block: str) -> bytes:
        self.asked.append(("fetch", member, round_, replica, block))
        return BLOB

    def confirm(self, member: str, round_: int, sha256: Mapping[str, bytes], term: int | None = None) -> None:
        self.asked.append(("confirm", member, round_, dict(sha256), term))

    def report(self, reports: Sequence[pb.Report], term: int | None = None) -> None:
        self.asked.append(("report", *(report.member for report in reports), term))

    def watch(self, members: Collection[str], is_asked: IsAsked, most_unread: float) -> Iterator[pb.Report]:
        self.asked.append(("watch", *members))
        yield from self.reports

    def heard(self, member: str, term: int | None = None) -> None:
        self.sounds.append(member)

    def stay(self, member: str) -> None:
        self.asked.append(("stay", member))
        self.stayed.set()

    def left(self, member: str, node: str = "", term: int | None = None) -> None:
        self.left_terms.append(term)
        self.asked.append(("left", member, *([node] if node else [])))

    def refuse(self, sender: str, reason: str, kind: Kind) -> None:
        self.refused.append((sender, reason, kind))


class Served:
    """A recorder behind a server."""

    def __init__(self) -> None:
        self.exchange = Recorder()
        self.server, port = serve_exchange(self.exchange, SECRET, "127.0.0.1:0")
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
    """Return every call of the service by its path.

    The server's own table is read, so that later additions are included.
    """
    tables: list[tuple[str, Mapping[str, grpc.RpcMethodHandler[Any, Any]]]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grpc, "method_handlers_generic_handler", lambda *table: tables.append(table))
        served_exchange._Servicer(Recorder(), Callers(SECRET, Recorder().roster)).handler()
    return {f"/{service}/{name}": handler for service, table in tables for name, handler in table.items()}


CALLS = _calls()

REQUESTS: dict[str, list[bytes]] = {
    "/hetero_pp.Exchange/Join": [pb.JoinRequest(version=PROTOCOL_VERSION, address="127.0.0.1:5").SerializeToString()],
    "/hetero_pp.Exchange/Deposit": [
        bytes(frame) for frame in header_and_payload_frames(pb.BlobHeader(round=1, size=len(BLOB)), [BLOB])
    ],
    "/hetero_pp.Exchange/Died": [pb.DiedRequest(member="dc").SerializeToString()],
}
"""Requests of the calls for which an empty message is not a valid request."""


def _call(served: Served, path: str, metadata: Mapping[str, str]) -> None:
    """Make a call of any kind to its end. Raise grpc.RpcError if it fails."""
    handler, request = CALLS[path], REQUESTS.get(path, [b""])
    with make_channel(served.address) as channel:
        kinds: dict[tuple[bool, bool], Callable[[str], Callable[..., Any]]] = {
            (False, False): channel.unary_unary,
            (False, True): channel.unary_stream,
            (True, False): channel.stream_unary,
            (True, True): channel.stream_stream,
        }
        call = kinds[handler.request_streaming, handler.response_streaming](path)
        sent = iter(request) if handler.request_streaming else request[0]
        reply = call(sent, metadata=tuple(metadata.items()), timeout=TIMEOUT)
        if handler.response_streaming:
            list(reply)


def _method(path: str) -> str:
    """Return the exchange's method for a path: /hetero_pp.Exchange/LastRound -> last_round."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", path.rpartition("/")[2]).lower()


def test_the_calls_are_those_that_members_make() -> None:
    """Makes sure that the tests below do not pass because no call was made."""
    made = "Agree Changes Join LastRound Assign Beat Broken Died NewestSnapshot Snapshot Deposit Record Fetch"
    made += " UploadUrl Uploaded Confirm Report Stay Watch"
    assert CALLS.keys() >= {f"/hetero_pp.Exchange/{name}" for name in made.split()}


@pytest.mark.parametrize("path", CALLS)
@pytest.mark.parametrize("known", STRANGERS.values(), ids=STRANGERS)
def test_a_stranger_is_refused_counted_and_reaches_nothing(path: str, known: dict[str, str], served: Served) -> None:
    with pytest.raises(grpc.RpcError) as error:
        _call(served, path, {"name": "dc", "term": "1"} | known)
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
    _call(served, path, {"name": "dc", "token": TOKEN, "term": "1"} | run)
    served.stop()
    asked = [what for what, *_ in served.exchange.asked]
    several = {"Stay": ["stay", "left"], "Snapshot": ["newest_snapshot", "snapshot"]}
    assert asked == several.get(path.rpartition("/")[2], [_method(path)])
    moves = path.rpartition("/")[2] in ("Snapshot", "Deposit", "Fetch")
    assert served.exchange.sounds == ["dc"] * (2 if moves else 1)  # a frame also counts as a sign of life
    assert served.exchange.refused == []


def test_what_a_member_asks_arrives_and_is_answered(served: Served) -> None:
    client = ExchangeClient(served.address, SECRET.credentials("dc"), RUN)
    held = AvailableStates(frozenset({2, 7}), ("round 8 is damaged",))
    assert client.agree("dc", "{}", "of a text") == RUN
    assert client.join("dc", "127.0.0.1:6", held) == TERM
    assert client.changes() == CHANGES
    assert client.last_round() == 7
    assert client.assign("dc", 7, "127.0.0.1:6", trained=8) == WORK
    assert client.beat("dc") == Standing()
    assert client.beat("dc", 8, 7, 6, True) == STANDING
    client.broken("dc", 7, "a cause", "home.1")
    client.died("dc", "another", 4)
    assert client.newest_snapshot() == (6, ["a", "b"])
    assert client.snapshot(["a", "b"])["b"].equal(NORM)
    assert client.snapshot(["a"], 0)["a"].equal(NORM)
    client.deposit("dc", ADDRESS, BLOB, 7, 50)
    assert client.record(3).round == 3
    assert client.fetch("dc", 3, "home", "norm") == BLOB
    client.confirm("dc", 3, {"norm.weight": b"\1" * 32})
    client.report([pb.Report(member="somebody else", finished=pb.Finished())])
    assert [report.member for report in client.watch()] == ["dc"]
    assert served.exchange.stayed.wait(TIMEOUT)  # joining starts it in the background
    client.close()
    served.stop()
    there = [("stay", "dc"), ("left", "dc")]  # a heartbeat starts it again, if the call has ended
    assert all(one in served.exchange.asked for one in there)
    assert sorted((one for one in served.exchange.asked if one not in there), key=str) == sorted(
        [
            ("agree", "dc", "{}", "of a text"),
            ("join", "dc", "127.0.0.1:6", held),
            ("changes",),
            ("last_round",),
            ("assign", "dc", 7, "127.0.0.1:6", 8, TERM),
            ("beat", "dc", None, 0, 0, False, TERM),
            ("beat", "dc", 8, 7, 6, True, TERM),
            ("broken", "dc", 7, "a cause", TERM, "home.1"),
            ("died", "dc", "another", 4),
            ("newest_snapshot",),
            ("newest_snapshot",),
            ("snapshot", 6, "a", "b"),
            ("snapshot", 0, "a"),
            ("deposit", "dc", ADDRESS, BLOB, 7, 50, TERM),
            ("record", 3, "dc", TERM),
            ("fetch", "dc", 3, "home", "norm"),
            ("confirm", "dc", 3, {"norm.weight": b"\1" * 32}, TERM),
            ("report", "dc", TERM),  # the token lets a member speak only for itself
            ("watch",),
        ],
        key=str,
    )
    assert set(served.exchange.left_terms) == {TERM}


def test_a_client_names_itself_so_that_it_may_ask_twice(served: Served) -> None:
    clients = [ExchangeClient(served.address, SECRET.credentials("dc"), RUN) for _ in range(2)]
    for client in (clients[0], clients[0], clients[1]):
        client.join("dc", "")
    for client in clients:
        client.close()
    first, again, other = served.exchange.processes
    assert first == again != other
    assert first and other


@pytest.mark.parametrize(
    ("secret", "run", "words"),
    [(OTHER, RUN, "was started with another token"), (SECRET, "another run", "has another configuration")],
)
def test_a_client_that_is_a_stranger_is_told_so(secret: Secret, run: str, words: str, served: Served) -> None:
    client = ExchangeClient(served.address, secret.credentials("dc"), run)
    for ask in (
        lambda: client.agree("dc", "{}"),
        lambda: client.join("dc", ""),
        lambda: client.changes(),
        lambda: client.last_round(),
        lambda: client.assign("dc", 0),
        lambda: client.beat("dc"),
        lambda: client.broken("dc", 1, "a cause"),
        lambda: client.died("dc", "a cause"),
        lambda: client.newest_snapshot(),
        lambda: client.snapshot(["a"]),
        lambda: client.deposit("dc", ADDRESS, BLOB),
        lambda: client.record(3),
        lambda: client.fetch("dc", 3, "home", "norm"),
        lambda: client.confirm("dc", 3, {}),
        lambda: client.report([]),
        lambda: list(client.watch()),
    ):
        with pytest.raises(Refused, match=words):
            ask()
    client.close()
    served.stop()
    assert len(served.exchange.refused) == 16
    assert served.exchange.asked == []


@pytest.mark.parametrize("version", [PROTOCOL_VERSION - 1, PROTOCOL_VERSION + 1])
def test_a_member_of_another_version_is_refused(version: int, served: Served) -> None:
    request = pb.JoinRequest(version=version, address="127.0.0.1:5")
    with make_channel(served.address) as channel, pytest.raises(grpc.RpcError) as error:
        ExchangeStub(channel).Join(request, metadata=shown(SECRET.credentials("dc")), timeout=TIMEOUT)
    assert error.value.code() is grpc.StatusCode.PERMISSION_DENIED
    expected = f"expected {PROTOCOL_VERSION}: install one version of hetero-pp on all hosts"
    assert error.value.details() == f"found protocol version {version}, {expected}"
    assert served.exchange.asked == []


def test_what_is_large_has_a_connection_of_its_own(served: Served) -> None:
    """On a slow line, a contribution of a minute would delay every heartbeat."""
    stranger = ExchangeClient(served.address, OTHER.credentials("dc"), RUN)
    for ask in (
        lambda: stranger.beat("dc"),
        lambda: stranger.report([]),
        lambda: stranger.fetch("dc", 3, "home", "norm"),
        lambda: stranger.snapshot(["a"]),
    ):
        with pytest.raises(Refused):
            ask()
    stranger.close()
    control, again, bulk, more = (sender for sender, *_ in served.exchange.refused)
    assert control == again != bulk == more


def test_the_version_is_the_one_that_is_documented() -> None:
    text = (Path(__file__).parents[2] / "docs" / "wire-format.md").read_text()
    assert re.findall(r"one version together, (\d+)", text) == [str(PROTOCOL_VERSION)]


def test_who_is_let_in_has_joined(served: Served) -> None:
    stranger, member = (ExchangeClient(served.address, one.credentials("dc"), RUN) for one in (OTHER, SECRET))
    with pytest.raises(Refused):
        stranger.join("dc", "")
    member.join("dc", "")
    assert (stranger.has_joined, member.has_joined) == (False, True)
    stranger.close()
    member.close()


class _EndedCall:
    """The context of a call whose caller is gone."""

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return shown(SECRET.credentials("dc"))

    def add_callback(self, callback: Callable[[], None]) -> bool:
        return False


def test_who_is_gone_before_its_stay_begins_has_left() -> None:
    """gRPC accepts no callback for a call that has ended, so no other event would tell that the member left."""
    exchange = Recorder()
    servicer = served_exchange._Servicer(exchange, Callers(SECRET, exchange.roster))
    servicer.Stay(pb.StayRequest(), cast(grpc.ServicerContext, _EndedCall()))
    assert exchange.asked == [("left", "dc")]


def test_who_watches_waits_for_the_exchange() -> None:
    """The first connection attempt may fail. Reports are followed nevertheless."""
    found: list[pb.Report] = []
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        address = f"127.0.0.1:{nobody.getsockname()[1]}"
        watcher = threading.Thread(target=lambda: found.extend(reports_of(address, WATCHER)), daemon=True)
        watcher.start()
        nobody.accept()[0].close()
    exchange = Recorder()
    server, _ = serve_exchange(exchange, SECRET, address)
    watcher.join(TIMEOUT)
    server.stop(0).wait()
    assert found == exchange.reports


def test_of_some_members_what_they_tell_is_followed_until_they_are_through(served: Served) -> None:
    finished = [pb.Report(member=member, finished=pb.Finished()) for member in ("home.0", "dc", "home.1")]
    served.exchange.reports = [*finished, pb.Report(member="dc")]
    told = reports_to_members(served.address, WATCHER, ["home.0", "home.1"], TIMEOUT, lambda *_: None)
    assert [report.member for report in told] == ["home.0", "dc", "home.1"]
    served.stop()
    assert served.exchange.asked == [("watch", "home.0", "home.1")]


def test_an_exchange_that_ends_before_its_members_are_through_is_missed(served: Served) -> None:
    told = reports_to_members(served.address, WATCHER, ["home.0", "dc"], TIMEOUT, lambda *_: None)
    with pytest.raises(LinkClosed, match="has ended the run"):
        list(told)


def test_a_further_node_is_known_to_be_there(served: Served) -> None:
    node = ExchangeClient(served.address, SECRET.credentials("dc"), RUN)
    node.stay("nodeb")
    assert served.exchange.stayed.wait(TIMEOUT)
    node.close()
    served.stop()
    assert served.exchange.asked == [("stay", "dc"), ("left", "dc", "nodeb")]


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
