"""Attacks on a live run, one function each. They run in a process of their own, with a member's own credentials."""

from __future__ import annotations

import os
import resource
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import cycle
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event

import grpc
from google.protobuf.message import Message

from hetero_pp.errors import HeteroPPError
from hetero_pp.messages import messages_pb2 as pb
from hetero_pp.rpc.callers import Metadata, shown
from hetero_pp.rpc.channels import PROTOCOL_VERSION, make_channel
from hetero_pp.rpc.credentials import Credentials, Secret
from hetero_pp.rpc.dialling import SERVICE as LINK_SERVICE
from hetero_pp.rpc.exchange import SERVICE
from hetero_pp.rpc.exchange_client import ExchangeClient
from hetero_pp.rpc.framing import header_and_payload_frames
from hetero_pp.rpc.services import call_path

CALLS_A_SECOND = 300
"""Of one attack: what is refused costs the exchange's processor, which others here need, too."""
LARGE_A_SECOND = 10
"""Of messages of megabytes: 44 MB a second, which is more than most lines carry."""
REPORTS_A_SECOND = 10
"""Twenty reports each: a hundred times as many as an honest member has."""
IN_FLIGHT = 64
TIMEOUT = 10.0
NICENESS = 10
"""Beyond that of the run: an attack comes from elsewhere, and takes no processor of those that it attacks."""
CONNECTIONS = 10_000
FILES_FOR_ITSELF = 200

Frames = Sequence[bytes]


@dataclass(frozen=True)
class Target:
    """A run, and what a member of it knows."""

    address: str
    run: str
    guest: Credentials
    """Of a member, who attacks."""
    honest: str
    """Another member, a replica of its own."""
    blocks: Sequence[str]
    """That either contributes."""
    parameters: Sequence[str]
    link_address: str
    """Where a stage listens."""
    neighbour: Credentials
    """Of the stage that may dial it."""
    link: str
    connections: int = CONNECTIONS


@dataclass
class Stretch:
    """One attack for a while: how long, and what came of it."""

    codes: Counter[str] = field(default_factory=Counter)
    """Calls by the status that they ended with; connections that were held."""
    is_over: threading.Event = field(default_factory=threading.Event)
    is_under_way: threading.Event = field(default_factory=threading.Event)

    def paced(self, a_second: float = CALLS_A_SECOND) -> Iterator[int]:
        """So many a second, until the stretch is over."""
        begun = time.monotonic()
        number = 0
        while not self.is_over.wait(max(0.0, begun + number / a_second - time.monotonic())):
            yield number
            number += 1
            self.is_under_way.set()


# ---- by what an attack reaches a run ----


def channel_to(address: str) -> grpc.Channel:
    """The one place in which attacks make channels."""
    return make_channel(address)


def credentials_of(name: str, secret: str = "another secret") -> Credentials:
    """Of a stranger who calls itself so: of another run, as it has another secret. The one place that makes some."""
    return Secret(secret).credentials(name)


@contextmanager
def seated(target: Target) -> Iterator[tuple[ExchangeClient, int]]:
    """The guest in its place, and the term that it holds; it leaves as one that has died."""
    client = ExchangeClient(target.address, target.guest, target.run, timeout=TIMEOUT)
    name = target.guest.name
    try:
        yield client, client.join(name, "")
    finally:
        with suppress(HeteroPPError):
            client.died(name, "it has ended")
        client.close()


@dataclass(frozen=True)
class Call:
    """One call, as it crosses: a single frame is a single request."""

    path: str
    frames: Frames
    metadata: Metadata


def asked(call: str, request: Message, metadata: Metadata) -> Call:
    """A call of the exchange whose request is one message."""
    return Call(call_path(SERVICE, call), [request.SerializeToString()], metadata)


def flood(address: str, stretch: Stretch, calls: Sequence[Call], a_second: float = CALLS_A_SECOND) -> None:
    """Make these calls in turn, paced, many at once."""
    room = threading.Semaphore(IN_FLIGHT)

    def done(call: grpc.Future[bytes]) -> None:
        stretch.codes[code_of(call)] += 1
        room.release()

    with channel_to(address) as channel:
        for _, call in zip(stretch.paced(a_second), cycle(calls), strict=False):
            room.acquire()
            begin(channel, call).add_done_callback(done)
        for _ in range(IN_FLIGHT):
            room.acquire(timeout=TIMEOUT)


def begin(channel: grpc.Channel, call: Call) -> grpc.Future[bytes]:
    """Make a call. Of one that is answered by many frames the first is read only."""
    if len(call.frames) == 1:
        one: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(call.path)
        return one.future(call.frames[0], metadata=call.metadata, timeout=TIMEOUT)
    many: grpc.StreamUnaryMultiCallable[bytes, bytes] = channel.stream_unary(call.path)
    return many.future(iter(call.frames), metadata=call.metadata, timeout=TIMEOUT)


def code_of(call: grpc.Future[bytes]) -> str:
    """How a call ended."""
    if call.cancelled():
        return "CANCELLED"
    error = call.exception()
    return error.code().name if isinstance(error, grpc.RpcError) else "OK"


# ---- who is not of the run ----


def no_credentials(target: Target, stretch: Stretch) -> None:
    """Calls that show nothing."""
    flood(target.address, stretch, [asked("Beat", pb.BeatRequest(), ()), asked("Watch", pb.WatchRequest(), ())])


def another_runs_token(target: Target, stretch: Stretch) -> None:
    """Credentials of another run, in a member's name; and a member's own, for another run."""
    strange = shown(credentials_of(target.honest), target.run, 1)
    elsewhere = shown(target.guest, "another run", 1)
    flood(target.address, stretch, [asked("Beat", pb.BeatRequest(), one) for one in (strange, strange, elsewhere)])


def half_open(target: Target, stretch: Stretch) -> None:
    """Calls that are begun and send nothing: of a stranger, and more than a member may have open."""
    with seated(target) as (_, term), ExitStack() as channels:
        known = [shown(credentials_of(target.honest), target.run, 1), shown(target.guest, target.run, term)]
        pairs = [(channels.enter_context(channel_to(target.address)), metadata) for metadata in known]
        room, never = threading.Semaphore(IN_FLIGHT), threading.Event()
        for _, (channel, metadata) in zip(stretch.paced(), cycle(pairs), strict=False):
            if room.acquire(blocking=False):
                _half_open(channel, metadata, stretch, room, never)
        never.set()


def _half_open(
    channel: grpc.Channel, metadata: Metadata, stretch: Stretch, room: threading.Semaphore, never: threading.Event
) -> None:
    """One call that sends nothing, until it is ended by the other side."""

    def nothing() -> Iterator[bytes]:
        never.wait()
        yield from ()

    def done(call: grpc.Future[bytes]) -> None:
        if not never.is_set():
            stretch.codes[code_of(call)] += 1
        room.release()

    beat: grpc.StreamUnaryMultiCallable[bytes, bytes] = channel.stream_unary(call_path(SERVICE, "Beat"))
    beat.future(nothing(), metadata=metadata).add_done_callback(done)


def connections(target: Target, stretch: Stretch) -> None:
    """As many connections as this process may have, which say nothing, or only that they speak HTTP/2."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    host, _, port = target.address.rpartition(":")
    with ExitStack() as held:
        for number in range(min(target.connections, most - FILES_FOR_ITSELF)):
            try:
                one = held.enter_context(socket.create_connection((host, int(port)), TIMEOUT))
                if number % 2:
                    one.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00")
                stretch.codes["connected"] += 1
            except OSError:
                stretch.codes["not connected"] += 1
            if stretch.is_over.is_set():
                return
        stretch.is_under_way.set()
        stretch.is_over.wait()


# Of who shows no certificate, that of another authority or one that has expired: functions of their own, here.


# ---- a member that goes beyond its own ----


def anothers_place(target: Target, stretch: Stretch) -> None:
    """A member in another's name, or for another's blob, or telling of its death."""
    with seated(target) as (_, term):
        own = shown(target.guest, target.run, term)
        named = shown(Credentials(target.honest, target.guest.token), target.run, 1)
        blob = pb.BlobHeader(round=1, replica=target.honest, block=target.blocks[0], size=9, epoch=1, steps=1)
        calls = [
            asked("Beat", pb.BeatRequest(), named),
            asked("Join", pb.JoinRequest(version=PROTOCOL_VERSION), named),
            asked("Died", pb.DiedRequest(member=target.honest, cause="it is mine now"), own),
            asked("Uploaded", pb.Upload(blob=blob, sha256=bytes(32)), own),
        ]
        flood(target.address, stretch, calls)


def old_term(target: Target, stretch: Stretch) -> None:
    """Who has held a place before acts on."""
    with seated(target) as (client, old):
        client.died(target.guest.name, "another takes its place")
        with seated(target):
            before = shown(target.guest, target.run, old)
            blob = pb.BlobHeader(round=1, replica=target.guest.name, block=target.blocks[0], size=9, epoch=1, steps=1)
            calls = [
                asked("Assign", pb.AssignRequest(), before),
                asked("Record", pb.RecordRequest(round=1 << 20), before),
                asked("Uploaded", pb.Upload(blob=blob, sha256=bytes(32)), before),
                asked("Broken", pb.BrokenRequest(epoch=old, cause="it is mine"), before),
            ]
            flood(target.address, stretch, calls)


def slow_readers(target: Target, stretch: Stretch) -> None:
    """A member watches as often as it may, and reads nothing of what it tells itself."""
    with seated(target) as (_, term), channel_to(target.address) as channel:
        own = shown(target.guest, target.run, term)
        watch: grpc.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(call_path(SERVICE, "Watch"))
        watched = [watch(b"", metadata=own) for _ in range(12)]
        reports = [pb.Report(member_round=pb.MemberRound(round=number)) for number in range(20)]
        flood(target.address, stretch, [asked("Report", pb.ReportRequest(reports=reports), own)], REPORTS_A_SECOND)
        for one in watched:
            one.cancel()
        stretch.codes["not read"] += len(watched)


def abandoned_waits(target: Target, stretch: Stretch) -> None:
    """A member asks for what has not happened yet, and is gone."""
    with seated(target) as (_, term), channel_to(target.address) as channel:
        own = shown(target.guest, target.run, term)
        record: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(call_path(SERVICE, "Record"))
        request = pb.RecordRequest(round=1 << 20).SerializeToString()
        for _ in stretch.paced():
            call = record.future(request, metadata=own, timeout=TIMEOUT)
            if not stretch.is_over.wait(0.005) and not call.done():
                call.cancel()
            stretch.codes[code_of(call)] += 1


def forged_reports(target: Target, stretch: Stretch) -> None:
    """A member tells what the exchange alone tells, or of another's steps."""
    other = target.honest
    forged = [
        pb.Report(round_verified=pb.RoundVerified(round=1, replica=other, parameters_sha256=bytes(32))),
        pb.Report(inner_step=pb.InnerStep(replica=other, round=1, loss=0.0)),
        pb.Report(standing=pb.Standing(what=pb.GIVEN_UP, place=other)),
        pb.Report(member=other, joined=pb.Joined(term=9)),
    ]
    with seated(target) as (_, term):
        own = shown(target.guest, target.run, term)
        flood(target.address, stretch, [asked("Report", pb.ReportRequest(reports=[one]), own) for one in forged])


def forged_hashes(target: Target, stretch: Stretch) -> None:
    """A member confirms what no member holds: other digests, of too many bytes, of no parameter, of none at all."""
    names = target.parameters
    forged: Sequence[Mapping[str, bytes]] = [
        dict.fromkeys(names, b"\1" * 31),
        dict.fromkeys(names, b"\1" * 1_000),
        {"nothing.weight": bytes(32)},
        dict.fromkeys(names, b"\1" * 32),
        {names[0]: b"\1" * 32},
        {},
    ]
    with seated(target) as (_, term):
        own = shown(target.guest, target.run, term)
        calls = [asked("Confirm", pb.HashReport(round=1, sha256=one), own) for one in forged]
        flood(target.address, stretch, calls)


def oversized(target: Target, stretch: Stretch) -> None:
    """A member announces terabytes, or sends messages beyond what any is."""
    deposit, megabytes = call_path(SERVICE, "Deposit"), bytes(1 << 20)
    with seated(target) as (_, term):
        own = shown(target.guest, target.run, term)
        calls = []
        for size in (1 << 24, 1 << 40, 1 << 63):
            header = pb.BlobHeader(round=1, replica=target.guest.name, block=target.blocks[0], size=size, epoch=term)
            frames = [next(header_and_payload_frames(header, [megabytes])), *[megabytes] * 3]
            calls.append(Call(deposit, frames, own))
        calls += [Call(call_path(SERVICE, "Beat"), [bytes(9 << 20)], own)]
        calls += [asked("Agree", pb.AgreeRequest(configuration="[" * (1 << 20)), own)]
        flood(target.address, stretch, calls, LARGE_A_SECOND)


def link_frames(target: Target, stretch: Stretch) -> None:
    """Hostile frames on a stage link: of strangers, and of who knows its token."""
    token = target.neighbour.links[target.link]
    right = pb.LinkHello(
        version=PROTOCOL_VERSION, token=token, link=target.link, sender=target.neighbour.name, epoch=1, session=b"other"
    )
    wrong = [copied(right) for _ in range(4)]
    wrong[0].version, wrong[1].link, wrong[2].sender, wrong[3].token = 1, "x", "dc", "no"
    hostile = [*(one.SerializeToString() for one in (*wrong, right)), b"\xff" * 100, bytes(5000), b""]
    path, shows = call_path(LINK_SERVICE, "Open"), (("token", token),)
    calls = [Call(path, [hello, bytes(1 << 10)], shows) for hello in hostile]
    calls += [Call(path, [right.SerializeToString()], ()), Call(path, [b"", b""], (("token", "no"),))]
    flood(target.link_address, stretch, calls)


def copied(hello: pb.LinkHello) -> pb.LinkHello:
    """The same again."""
    return pb.LinkHello.FromString(hello.SerializeToString())


ATTACKS: dict[str, Callable[[Target, Stretch], None]] = {
    one.__name__: one
    for one in (
        no_credentials,
        another_runs_token,
        anothers_place,
        old_term,
        half_open,
        slow_readers,
        abandoned_waits,
        forged_reports,
        forged_hashes,
        oversized,
        connections,
        link_frames,
    )
}


def last_refused(target: Target, door: str) -> Sequence[Call]:
    """One call for each kind of refusal: what was not told of before is told with it."""
    if door == "link":
        path, token = call_path(LINK_SERVICE, "Open"), (("token", target.neighbour.links[target.link]),)
        hello = pb.LinkHello(token=target.neighbour.links[target.link]).SerializeToString()
        return [Call(path, [b"", b""], ()), Call(path, [hello, b""], token)]
    own = shown(target.guest, target.run)
    return [
        asked("Beat", pb.BeatRequest(), ()),
        asked("Beat", pb.BeatRequest(), own),
        Call(call_path(SERVICE, "Beat"), [b"\xff"], shown(target.guest, target.run, 1)),
        asked("Beat", pb.BeatRequest(), shown(target.guest, "another run", 1)),
    ]


# ---- in a process of their own ----


def attack_main(parent: Connection, name: str, target: Target, is_over: Event) -> None:
    """Attack whenever the parent says so, until `is_over`, which it sets, and clears again; tell what came of it."""
    os.nice(NICENESS)
    while parent.recv():
        stretch = Stretch()
        attack = threading.Thread(target=ATTACKS[name], args=(target, stretch), daemon=True)
        attack.start()
        while not stretch.is_under_way.wait(0.1) and attack.is_alive():
            pass
        parent.send(attack.is_alive())
        begun = time.monotonic()
        is_over.wait()
        seconds = time.monotonic() - begun
        stretch.is_over.set()
        attack.join(2 * TIMEOUT)
        parent.send((seconds, stretch.codes))
