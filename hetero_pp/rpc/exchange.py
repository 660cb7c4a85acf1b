"""The exchange over gRPC: a server for any ExchangeService; its client is in exchange_client.

Control messages are protobuf; blobs and snapshots are a header and raw frames. Errors cross as status codes and are
raised again as the errors they were.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import grpc
from torch import Tensor

from hetero_pp.changed_keys import Changes
from hetero_pp.errors import ExchangeLost, Forbidden, MalformedMessage, Refused, TooMuch, WrongToken
from hetero_pp.links import EXCHANGE
from hetero_pp.messages import messages_pb2 as pb
from hetero_pp.messages.messages_pb2_grpc import ExchangeServicer
from hetero_pp.outer.exchange_service import Assignment, AvailableStates, HeldBy, Standing
from hetero_pp.pseudo_gradient.contribution import MAX_BLOB_BYTES, BlobAddress
from hetero_pp.refusals import Kind
from hetero_pp.rpc.admission import MOST_BLAMED, Admission, Host, Lobby, Places, Told
from hetero_pp.rpc.admission import SERVICE as ADMISSION
from hetero_pp.rpc.callers import Callers, claimed
from hetero_pp.rpc.channels import PROTOCOL_VERSION, make_server
from hetero_pp.rpc.credentials import Secret
from hetero_pp.rpc.framing import header_and_payload_frames, read_frames
from hetero_pp.rpc.pace import Pace
from hetero_pp.rpc.permissions import CALLS, Whose, require_call, require_process, require_report
from hetero_pp.rpc.plain_text import make_plain, plain
from hetero_pp.rpc.reach import Reach
from hetero_pp.rpc.relay import MOST_CARRIED, Relay
from hetero_pp.rpc.relay import SERVICE as RELAY
from hetero_pp.rpc.services import service_handler
from hetero_pp.rpc.stalled import StreamWatch
from hetero_pp.run.spec import Roster

SERVICE = pb.DESCRIPTOR.services_by_name["Exchange"]

MOST_UNREAD = 50_000
"""Reports that who watches has not read, and is cut: it may watch again."""

REPORTS_A_SECOND, MOST_REPORTS = 1000.0, 10_000
"""Of one caller, and at once; who tells more waits."""

JOINS_A_MINUTE, JOINS_AT_ONCE = 10.0, 20
"""How often one member may join: each time its group is formed anew, and the log keeps a file."""

STATES_MAX = 1_000
"""Saved states that a member may name when it joins."""

SNAPSHOTS_IN_MEMORY_MAX = 3
"""Rounds whose snapshots are sent at the same time, to any number of members."""

LONGEST_WAIT = 20.0
"""Seconds that a call waits for something to happen; who wants to know asks again."""

MOST_OPEN = 16
"""Calls of one caller at once. A member has five at most: it stays, beats, reports, waits, and sends or fetches."""
_SPARE = 8
"""Threads that refuse strangers while everybody has all its calls open."""

MOST_OF_A_NAME = 80
"""Characters of how a caller calls itself."""

_MOST_OPEN_OF_A_TICKET = 2

MOST_OPEN_OF_TICKETS = 32
"""Calls by tickets at once, of each of their two kinds: each call has a thread, and there may be many tickets."""

MOST_OF_AN_ADDRESS = 300
"""Characters: a host's name has at most 253."""

IsAsked = Callable[[], bool]


@dataclass(frozen=True)
class OpenHouse:
    """Of a run that who shows a ticket may join."""

    host: Host
    places: Places
    told: Told
    lobby: Lobby
    unnamed: Collection[str] | None = None
    """The slots that a ticket may take which names none; None: all of them."""


class WatchedExchange(Protocol):
    """The exchange, as the server asks it for all members: see ExchangeService. `term`: which the caller holds.

    What waits for long may ask whether its caller is still there, and is woken when that changes.
    """

    run: str
    roster: Roster

    def agree(self, member: str, configuration: str, tokens: str) -> str: ...

    def join(
        self,
        member: str,
        address: str,
        available: AvailableStates,
        process: str | None,
        is_asked: IsAsked,
        is_guest: bool = False,
    ) -> int: ...

    def dialled(self, member: str, address: str, is_reached: bool | None) -> None:
        """A member was dialled where it says that it listens; None: it was not, as that is not of its own machine."""

    def last_round(self, is_asked: IsAsked) -> int: ...

    def changes(self, is_asked: IsAsked) -> Changes: ...

    def newest_snapshot(self, is_asked: IsAsked) -> tuple[int, Sequence[str]]: ...

    def snapshot(self, names: Sequence[str], round_: int | None = None) -> dict[str, Tensor]: ...

    def assign(
        self,
        member: str,
        holds: int,
        address: str,
        trained: int,
        term: int | None,
        is_asked: IsAsked,
        holder: int = 0,
    ) -> Assignment: ...

    def beat(
        self,
        member: str,
        round_: int | None = None,
        epoch: int = 0,
        progress: int = 0,
        computes: bool = False,
        term: int | None = None,
    ) -> Standing: ...

    def link_broke(self, member: str, epoch: int, cause: str, blames: str, term: int | None = None) -> Sequence[HeldBy]:
        """As ExchangeService.broken. Return both ends of a link with a malformed message, if it has any."""

    def guests_beside(self, member: str) -> Sequence[HeldBy]:
        """Return the other members of a member's group that have a ticket."""

    def died(self, member: str, cause: str, term: int | None = None) -> None:
        """Who started a member's process knows that it has ended."""

    def expect(self, member: str, address: BlobAddress, size: int) -> None:
        """A member is about to send a blob of so many bytes. Raises Refused, before any of it is kept."""

    def deposit(
        self,
        member: str,
        address: BlobAddress,
        data: bytes,
        epoch: int | None = None,
        steps: int = 0,
        term: int | None = None,
    ) -> None: ...

    def upload_url(
        self, member: str, address: BlobAddress, sha256: bytes, epoch: int | None = None, term: int | None = None
    ) -> str | None:
        """Where a member may put a blob into the store itself; None if there is none, empty if it need not be sent."""

    def uploaded(
        self,
        member: str,
        address: BlobAddress,
        sha256: bytes,
        epoch: int | None = None,
        steps: int = 0,
        term: int | None = None,
    ) -> None:
        """A member has put a blob there; as `deposit` otherwise."""

    def record(self, round_: int, member: str | None, term: int | None, is_asked: IsAsked) -> pb.RoundRecord: ...

    def wake(self) -> None:
        """A caller is gone."""

    def fetch(self, member: str, round_: int, replica: str, block: str) -> bytes: ...

    def stored(self, member: str, round_: int, replica: str, block: str) -> pb.StoredBlob | None:
        """Where a member may read a blob from the store itself; None if there is no such place."""

    def confirm(self, member: str, round_: int, sha256: Mapping[str, bytes], term: int | None = None) -> None: ...

    def report(self, reports: Sequence[pb.Report], term: int | None = None) -> None: ...

    def watch(self, members: Collection[str], is_asked: IsAsked, most_unread: float) -> Iterator[pb.Report]:
        """Every report, until the run is over; of some members only theirs, and what concerns everybody.

        Raises TooMuch for who has not read so many of them.
        """

    def heard(self, member: str, term: int | None = None) -> None:
        """Something came from a member, or reached it; which term it holds, if it says so."""

    def refuse(self, sender: str, reason: str, kind: Kind) -> None:
        """Count a message that was not let in."""

    def stay(self, member: str) -> None:
        """A member is there. Wait until it has left, or every member is through."""

    def left(self, member: str, node: str = "", term: int | None = None) -> None:
        """A member's connection has ended, or that of one of its nodes."""


def serve_exchange(
    exchange: WatchedExchange,
    secret: Secret,
    listen: str,
    most_open: int = MOST_OPEN,
    encrypted: bool = False,
    open_house: OpenHouse | None = None,
) -> tuple[grpc.Server, int]:
    """Serve an exchange at HOST:PORT to those whose credentials are of the secret; the server and the port it got.

    Of each caller at most so many calls are open. `encrypted`: by TLS, and with an open house for who shows a ticket,
    too. Raises OSError if the port is busy.
    """
    guests = None if open_house is None else open_house.host
    reach = Reach(secret.authority.identity(EXCHANGE)) if encrypted else None
    servicer = _Servicer(exchange, Callers(secret, exchange.roster, encrypted, guests), most_open, reach, guests)
    threads = _SPARE + most_open * len(servicer.callers)
    if not encrypted:
        return make_server(listen, [servicer.handler()], threads)
    relay = Relay(servicer.callers, exchange.roster.counts, servicer)
    threads += MOST_CARRIED * len(exchange.roster.members)
    handlers = [servicer.handler(), service_handler(RELAY, relay, servicer, MOST_CARRIED)]
    if open_house is not None:
        admission = Admission(
            open_house.host,
            secret.authority,
            servicer.callers,
            open_house.places,
            open_house.told,
            open_house.lobby,
            relay.carried_for,
            open_house.unnamed,
        )
        of_tickets = {call: MOST_OPEN_OF_TICKETS for call, whose in CALLS.items() if whose is Whose.TICKET}
        threads += MOST_OPEN_OF_TICKETS * len(of_tickets) + _MOST_OPEN_OF_A_TICKET * len(servicer.callers)
        handlers.append(service_handler(ADMISSION, admission, servicer, _MOST_OPEN_OF_A_TICKET, of_tickets))
    return make_server(listen, handlers, threads, secret.authority.identity(EXCHANGE))


class _Servicer(ExchangeServicer):
    """One method per call."""

    def __init__(
        self,
        exchange: WatchedExchange,
        callers: Callers,
        most_open: int = MOST_OPEN,
        reach: Reach | None = None,
        guests: Host | None = None,
    ) -> None:
        """With `reach` members are dialled where they say that they listen. `guests`: members with a ticket."""
        self.exchange, self.callers, self._most_open, self._reach = exchange, callers, most_open, reach
        self._guests = guests
        self._pace = Pace(REPORTS_A_SECOND, MOST_REPORTS)
        self._joins = Pace(JOINS_A_MINUTE / 60, JOINS_AT_ONCE)
        self._stalls = StreamWatch()
        self._counting = threading.Lock()
        self._sent: dict[int, list[grpc.ServicerContext]] = {}
        """By round, the calls that send its snapshot."""
        self.process = secrets.token_hex(8)
        """Names this process: one that takes its place knows only what it is told itself."""

    def handler(self) -> grpc.GenericRpcHandler:
        """For `make_server`."""
        return service_handler(SERVICE, self, self, self._most_open)

    def admit(self, call: str, context: grpc.ServicerContext) -> str:
        """See Door. Refused are a stranger, who is of another run, and what is not the caller's to ask."""
        try:
            caller = self.callers.let_in(context)
        except WrongToken as error:
            self.refuse(claimed(context), "found another token than the run's", Kind.STRANGER)
            raise error
        except Refused as error:
            self.refuse(claimed(context), str(error), Kind.FORBIDDEN)
            raise
        if caller.run not in (None, self.exchange.run):
            self.refuse(claimed(context), "another configuration", Kind.UNEXPECTED)
            raise Refused(
                f"{caller.name} has another configuration than the exchange; compare the config.yaml of both hosts"
            )
        try:
            require_call(call, caller)
        except Forbidden as error:
            self.refuse(caller.name, str(error), Kind.FORBIDDEN)
            raise
        self.exchange.heard(caller.name, caller.term)
        return caller.name

    def refuse(self, sender: str, reason: str, kind: Kind) -> None:
        """See Door."""
        self.exchange.refuse(plain(sender, MOST_OF_A_NAME), plain(reason), kind)

    def _member(self, context: grpc.ServicerContext) -> str:
        return self.callers.of(context).name

    def _term(self, context: grpc.ServicerContext) -> int | None:
        return self.callers.of(context).term

    def _end_revoked(self, member: str) -> None:
        """End the incarnation of each place of a member's group that was revoked, so that its links are cut at once."""
        if self._guests is None:
            return
        for place, holder, term in self.exchange.guests_beside(member):
            try:
                self._guests.require_in(place, holder)
            except Refused as error:
                self.exchange.died(place, str(error).removeprefix(f"{place}: "), term)

    def _is_asked(self, context: grpc.ServicerContext) -> IsAsked:
        """Whether a call's caller is there. Else who comes and goes on a bad line would leave all threads waiting."""
        context.add_callback(self.exchange.wake)
        until = time.monotonic() + LONGEST_WAIT
        return lambda: context.is_active() and time.monotonic() < until

    def _moving(self, frames: Iterable[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        """Yield the same frames. Each one shows that the member is there; a stream without any is cut."""
        member = self._member(context)
        for frame in self._stalls.watched(frames, context):
            self.exchange.heard(member)
            yield frame

    def Agree(self, request: pb.AgreeRequest, context: grpc.ServicerContext) -> pb.AgreeReply:
        return pb.AgreeReply(run=self.exchange.agree(self._member(context), request.configuration, request.tokens))

    def Join(self, request: pb.JoinRequest, context: grpc.ServicerContext) -> pb.JoinReply:
        if request.version != PROTOCOL_VERSION:
            raise Refused(
                f"found protocol version {request.version}, expected {PROTOCOL_VERSION}: install one version of "
                "hetero-pp on all hosts"
            )
        if max(len(request.rounds), len(request.damaged)) > STATES_MAX:
            raise MalformedMessage(f"found more than {STATES_MAX} states in a request to join")
        if (seconds := self._joins.refused_for(self._member(context))) > 0:
            raise TooMuch(f"{self._member(context)} joins too often; it may try again in {seconds:.0f} s")
        available = AvailableStates(frozenset(request.rounds), tuple(map(plain, request.damaged)))
        process = request.process or None
        caller, is_asked = self.callers.of(context), self._is_asked(context)
        address = self._listens(context, request.address, is_new=True)
        term = self.exchange.join(caller.name, address, available, process, is_asked, caller.holder > 0)
        return pb.JoinReply(term=term)

    def _listens(self, context: grpc.ServicerContext, address: str, is_new: bool = False) -> str:
        """Where a member says that it listens, once the exchange knows whether it is reached there."""
        member, address = self._member(context), plain(address, MOST_OF_AN_ADDRESS)
        if self._reach is not None:
            is_reached = self._reach.of(member, address, context.peer(), is_new)
            self.exchange.dialled(member, address, is_reached)
        return address

    def LastRound(self, request: pb.LastRoundRequest, context: grpc.ServicerContext) -> pb.LastRoundReply:
        return pb.LastRoundReply(last_round=self.exchange.last_round(self._is_asked(context)))

    def Changes(self, request: pb.ChangesRequest, context: grpc.ServicerContext) -> pb.ChangesReply:
        return pb.ChangesReply(changes=self.exchange.changes(self._is_asked(context)).to_json())

    def Stay(self, request: pb.StayRequest, context: grpc.ServicerContext) -> pb.StayReply:
        """Held open by every member. If the caller is gone before the run is over, the exchange is told."""
        caller = self.callers.of(context)
        member, term = caller.name, caller.term
        if context.add_callback(lambda: self.exchange.left(member, request.node, term)):
            self.exchange.stay(member)
        else:  # the call has ended already
            self.exchange.left(member, request.node, term)
        return pb.StayReply()

    def Assign(self, request: pb.AssignRequest, context: grpc.ServicerContext) -> pb.AssignReply:
        member, is_asked = self._member(context), self._is_asked(context)
        address = self._listens(context, request.address)
        caller = self.callers.of(context)
        work = self.exchange.assign(
            member, request.holds, address, request.trained, caller.term, is_asked, caller.holder
        )
        return pb.AssignReply(
            round=work.round,
            epoch=work.epoch,
            downstream=work.downstream,
            heals=work.heals,
            is_first=work.is_first,
            elapsed=work.elapsed,
            upstream=work.upstream,
            trained=work.trained,
            upstream_holder=work.upstream_holder,
            downstream_holder=work.downstream_holder,
            changed=work.changed,
        )

    def Beat(self, request: pb.BeatRequest, context: grpc.ServicerContext) -> pb.BeatReply:
        self._end_revoked(self._member(context))
        round_ = request.round if request.HasField("round") else None
        found = self.exchange.beat(
            self._member(context), round_, request.epoch, request.progress, request.computes, self._term(context)
        )
        return pb.BeatReply(is_over=found.is_over, suspended=found.suspended, cause=found.cause)

    def Broken(self, request: pb.BrokenRequest, context: grpc.ServicerContext) -> pb.BrokenReply:
        caller, cause = self.callers.of(context), plain(request.cause)
        ends = self.exchange.link_broke(caller.name, request.epoch, cause, plain(request.blames), caller.term)
        for place, holder, term in ends:
            if holder and self._guests is not None and self._guests.blame(place, holder):
                why = f"its ticket was revoked after {MOST_BLAMED} malformed messages: {cause}"
                self.exchange.died(place, why, term)
        return pb.BrokenReply()

    def Died(self, request: pb.DiedRequest, context: grpc.ServicerContext) -> pb.DiedReply:
        require_process(self.callers.of(context), request.member)
        self.exchange.died(request.member, plain(request.cause), request.term if request.HasField("term") else None)
        return pb.DiedReply()

    def NewestSnapshot(
        self, request: pb.NewestSnapshotRequest, context: grpc.ServicerContext
    ) -> pb.NewestSnapshotReply:
        round_, names = self.exchange.newest_snapshot(self._is_asked(context))
        return pb.NewestSnapshotReply(round=round_, names=names)

    def Snapshot(  # type: ignore[override]  # a Frame is raw bytes
        self, request: pb.SnapshotRequest, context: grpc.ServicerContext
    ) -> Iterator[bytes]:
        is_newest = not request.HasField("round")
        round_ = self.exchange.newest_snapshot(self._is_asked(context))[0] if is_newest else request.round
        with self._sending(round_, context):
            yield from self._snapshot(request.names, round_, context)

    @contextmanager
    def _sending(self, round_: int, context: grpc.ServicerContext) -> Iterator[None]:
        """Note a snapshot that is being sent, as each round's is a whole model in memory.

        If too many rounds are, cut the streams of the oldest one: a slow reader keeps nobody from a newer snapshot.
        Raises TooMuch if this round is older than all of them.
        """
        with self._counting:
            if round_ not in self._sent and len(self._sent) >= SNAPSHOTS_IN_MEMORY_MAX:
                if round_ < (oldest := min(self._sent)):
                    raise TooMuch(f"snapshots after the rounds {sorted(self._sent)} are being sent; try again later")
                for slow in self._sent.pop(oldest):
                    slow.cancel()
            self._sent.setdefault(round_, []).append(context)
        try:
            yield
        finally:
            with self._counting:
                left = [one for one in self._sent.pop(round_, []) if one is not context]
                if left:
                    self._sent[round_] = left

    def _snapshot(self, names: Sequence[str], round_: int, context: grpc.ServicerContext) -> Iterator[bytes]:
        if len(names) != len(set(names)):
            raise MalformedMessage("found a tensor named twice, expected unique names")
        tensors = self.exchange.snapshot(names, round_)
        header = pb.SnapshotHeader(names=names)
        for name in names:
            header.tensors.add(dtype=pb.FP32, shape=tensors[name].shape)
        buffers = (tensors[name].contiguous().numpy().reshape(-1).view("uint8").data for name in names)
        yield from self._moving(header_and_payload_frames(header, buffers), context)

    def Deposit(  # type: ignore[override]  # a Frame is raw bytes
        self, frames: Iterator[bytes], context: grpc.ServicerContext
    ) -> pb.DepositReply:
        member = self._member(context)

        def announced(header: pb.BlobHeader) -> int:
            self.exchange.expect(member, self._address(header), header.size)
            return header.size

        header, data = read_frames(self._moving(frames, context), pb.BlobHeader, announced, MAX_BLOB_BYTES)
        address = self._address(header)
        self.exchange.deposit(member, address, bytes(data), header.epoch, header.steps, self._term(context))
        return pb.DepositReply(exchange=self.process)

    def UploadUrl(self, request: pb.Upload, context: grpc.ServicerContext) -> pb.UploadUrlReply:
        address, epoch = self._address(request.blob), request.blob.epoch
        url = self.exchange.upload_url(self._member(context), address, request.sha256, epoch, self._term(context))
        return pb.UploadUrlReply(url=url)

    def Uploaded(self, request: pb.Upload, context: grpc.ServicerContext) -> pb.DepositReply:
        address, epoch, steps = self._address(request.blob), request.blob.epoch, request.blob.steps
        self.exchange.uploaded(self._member(context), address, request.sha256, epoch, steps, self._term(context))
        return pb.DepositReply(exchange=self.process)

    def _address(self, header: pb.BlobHeader) -> BlobAddress:
        return BlobAddress(self.exchange.run, header.round, header.replica, header.block)

    def Record(self, request: pb.RecordRequest, context: grpc.ServicerContext) -> pb.RoundRecord:
        if request.exchange not in ("", self.process):
            raise ExchangeLost(
                "this exchange does not have the contributions that the previous one received; sending them again"
            )
        return self.exchange.record(request.round, self._member(context), self._term(context), self._is_asked(context))

    def Fetch(  # type: ignore[override]  # a Frame is raw bytes
        self, request: pb.FetchRequest, context: grpc.ServicerContext
    ) -> Iterator[bytes]:
        member, which = self._member(context), (request.round, request.replica, request.block)
        stored = self.exchange.stored(member, *which) if request.reaches_store else None
        data = b"" if stored is not None else self.exchange.fetch(member, *which)
        header = pb.BlobHeader(
            round=request.round, replica=request.replica, block=request.block, size=len(data), stored=stored
        )
        yield from self._moving(header_and_payload_frames(header, [data]), context)

    def Confirm(self, request: pb.HashReport, context: grpc.ServicerContext) -> pb.HashReply:
        self.exchange.confirm(self._member(context), request.round, dict(request.sha256), self._term(context))
        return pb.HashReply()

    def Report(self, request: pb.ReportRequest, context: grpc.ServicerContext) -> pb.ReportReply:
        caller = self.callers.of(context)
        seconds = self._pace.due_in(caller.name, len(request.reports))
        if seconds > 0:
            is_gone = threading.Event()
            context.add_callback(is_gone.set)
            is_gone.wait(seconds)
        told, failed = list[pb.Report](), list[pb.Report]()
        for report in request.reports:
            require_report(report, caller.name, self.exchange.roster)
            report.member = caller.name
            report.DiscardUnknownFields()  # reports are remembered, whatever is in them
            make_plain(report)
            (failed if caller.holder and report.HasField("failure") else told).append(report)
        self.exchange.report(told, caller.term)
        for report in failed:  # who was invited ends no run but its own part
            self.exchange.died(caller.name, report.failure.cause, caller.term)
        return pb.ReportReply()

    def Watch(self, request: pb.WatchRequest, context: grpc.ServicerContext) -> Iterator[pb.Report]:
        yield from self.exchange.watch(request.members, self._is_let_in(context), MOST_UNREAD)

    def _is_let_in(self, context: grpc.ServicerContext) -> IsAsked:
        """Whether a call's caller is there, and still let in: who is not any more is refused, within a second or so."""
        due = 0.0

        def is_let_in() -> bool:
            nonlocal due
            if time.monotonic() >= due and context.is_active():
                self.callers.let_in(context)
                due = time.monotonic() + 1.0
            return context.is_active()

        return is_let_in
