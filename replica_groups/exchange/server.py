"""Server of an exchange over gRPC; its client is in exchange_client.

Blobs and run checkpoints are sent as a header and raw frames, all else as one message. Errors cross as status codes,
and the client raises them again as the errors they were.
"""

from __future__ import annotations

import mmap
import os
import secrets
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.message import Message

from hetero_pp.config.checkpoint import OpenCheckpoint
from hetero_pp.config.lines import EXCHANGE
from hetero_pp.core.errors import ExchangeLost, Forbidden, MalformedMessage, Refused, TooMuch, WrongToken
from hetero_pp.link.framing import header_and_payload_frames, read_frames, read_into
from hetero_pp.messages import messages_pb2 as pb
from hetero_pp.messages.refusals import Kind
from hetero_pp.pseudo_gradient.contribution import MAX_BLOB_BYTES, payload_bytes
from hetero_pp.rpc.callers import (
    CALLS,
    Callers,
    RemoteCaller,
    Whose,
    claimed,
    require_call,
    require_process,
    require_report,
)
from hetero_pp.rpc.channels import PROTOCOL_VERSION, Reach, make_server
from hetero_pp.rpc.exchange_service import HeldBy
from hetero_pp.rpc.identities import Secret
from hetero_pp.rpc.limits import ADDRESS_BYTES_MAX, LONGEST_WAIT, STATES_MAX, Pace, StreamWatch, make_plain, plain
from hetero_pp.rpc.relay import MOST_CARRIED, MeetingPoint, Relay
from hetero_pp.rpc.relay import SERVICE as RELAY
from hetero_pp.rpc.services import ADMISSION_SERVICE, EXCHANGE_SERVICE, service_handler
from replica_groups.exchange.admission import Admission, OpenHouse
from replica_groups.exchange.exchange import Exchange
from replica_groups.exchange.memberships import MOST_BLAMED, Memberships

MOST_UNREAD = 50_000  # unread reports at which a stream of reports is cut; its reader may open another

REPORTS_A_SECOND, MOST_REPORTS = 1000.0, 10_000
"""Reports that one caller may send per second and at once; calls with more wait."""

JOINS_A_MINUTE, JOINS_AT_ONCE = 10.0, 20
"""Joins of one member per minute and at once, because each reforms its group and adds a file to the run log."""

CHECKPOINTS_SENT_MAX = 3  # number of rounds whose run checkpoints are sent at the same time, to any number of members

MOST_OPEN = 16
"""Open calls of one caller. A member has at most five: stay, heartbeat, report, one that waits, one with a payload."""
_SPARE = 8  # threads that refuse strangers while all callers have all their calls open

MOST_OF_A_NAME = 80  # characters of the name that a caller claims

_MOST_OPEN_OF_A_TICKET = 2

MOST_OPEN_OF_TICKETS = 32
"""Calls by tickets at once, of each of their kinds: each call has a thread, and there may be many tickets."""


def serve_exchange(
    exchange: Exchange,
    secret: Secret,
    listen: str,
    most_open: int = MOST_OPEN,
    encrypted: bool = False,
    open_house: OpenHouse | None = None,
    meeting_point: MeetingPoint | None = None,
) -> tuple[grpc.Server, int]:
    """Serve an exchange at HOST:PORT to callers with credentials of the secret; return the server and its port.

    `most_open`: calls that one caller may have open. `encrypted`: use TLS. `open_house`: also serve ticket holders,
    which needs TLS. `meeting_point`: also relay links, which needs TLS; the caller closes it after the server. Raises
    OSError if the port is busy.
    """
    guests = None if open_house is None else open_house.host
    exchange.runner.audits.admit(guests, secret.authority.certificate.encode() if encrypted else None)
    reach = Reach(secret.authority.identity(EXCHANGE)) if encrypted else None
    servicer = _Servicer(exchange, Callers(secret, exchange.roster, encrypted, guests), reach, guests)
    threads = _SPARE + most_open * len(servicer.callers)
    handlers = [service_handler(EXCHANGE_SERVICE, servicer, servicer, most_open)]
    if not encrypted:
        return make_server(listen, handlers, threads)
    relay = None
    if meeting_point is not None:
        limits, trains = exchange.link_limits, exchange.trains
        relay = Relay(servicer.callers, exchange.roster.counts, servicer, meeting_point, limits, trains)
        threads += MOST_CARRIED * len(exchange.roster.members)
        handlers.append(service_handler(RELAY, relay, servicer, MOST_CARRIED))
    if open_house is not None:
        admission = Admission(open_house, secret.authority, servicer.callers, exchange, relay)
        of_tickets = {
            call: MOST_OPEN_OF_TICKETS for call, whose in CALLS.items() if whose in (Whose.TICKET, Whose.ANYONE)
        }
        threads += MOST_OPEN_OF_TICKETS * len(of_tickets) + _MOST_OPEN_OF_A_TICKET * len(servicer.callers)
        handlers.append(service_handler(ADMISSION_SERVICE, admission, servicer, _MOST_OPEN_OF_A_TICKET, of_tickets))
    return make_server(listen, handlers, threads, secret.authority.identity(EXCHANGE))


class _Servicer:
    """The calls of the service, and what each is checked for before the exchange answers it."""

    def __init__(
        self,
        exchange: Exchange,
        callers: Callers,
        reach: Reach | None = None,
        guests: Memberships | None = None,
    ) -> None:
        """`reach`: dials members where they say that they listen. `guests`: members with a ticket."""
        self.exchange, self.callers, self._reach, self._guests = exchange, callers, reach, guests
        self._pace = Pace(REPORTS_A_SECOND, MOST_REPORTS)
        self._joins = Pace(JOINS_A_MINUTE / 60, JOINS_AT_ONCE)
        self._stalls = StreamWatch()
        self._counting = threading.Lock()
        self._sent: dict[int, list[grpc.ServicerContext]] = {}  # round -> calls that send its run checkpoint
        self._blamed: Counter[str] = Counter()  # member without a ticket -> requests that no honest member sends
        self.process = secrets.token_hex(8)
        """Name of this process. Another one in its place does not know what members told this one."""

    def admit(self, call: str, context: grpc.ServicerContext) -> str:
        """Return the caller's name. Raises Refused for strangers, members of other runs, and forbidden calls."""
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
        self.exchange.runner.heard(caller.name, caller.incarnation)
        return caller.name

    def refuse(self, sender: str, reason: str, kind: Kind) -> None:
        """Count a refusal, with bounds on the texts that the caller chose."""
        self.exchange.runner.refusals.add(plain(sender, MOST_OF_A_NAME), plain(reason), kind)

    def request_bytes_max(self, call: str) -> int:
        return self.exchange.requests.of(call)

    def blame(self, context: grpc.ServicerContext, reason: str) -> None:
        """Count it by the caller's ticket. With the last of MOST_BLAMED the ticket and the slot are revoked.

        A member that has the run's secret loses its incarnation at the same number.
        """
        caller = self.callers.of(context)
        if self._guests is not None and (caller.ticket is not None or caller.holder):
            ticket = caller.ticket or self._guests.ticket_of(caller.name, caller.holder)
            is_revoked, lost = ticket is not None and self._guests.blame(ticket), "ticket was revoked"
        else:
            with self._counting:
                self._blamed[caller.name] += 1
                is_revoked, lost = self._blamed[caller.name] % MOST_BLAMED == 0, "incarnation is over"
        if is_revoked and caller.is_member:
            why = f"its {lost} after {MOST_BLAMED} requests that no honest member sends: {reason}"
            self.exchange.end_incarnation(caller.name, why, caller.incarnation)

    def _waiting(self, context: grpc.ServicerContext) -> RemoteCaller:
        """Return the caller, to ask it whether it is there, so that lost callers do not keep all threads.

        The answer is no after LONGEST_WAIT seconds, too.
        """
        caller, until = self.callers.of(context), time.monotonic() + LONGEST_WAIT
        context.add_callback(lambda: self.exchange.runner.notifier.wake([caller.name]))
        return replace(caller, is_asked=lambda: context.is_active() and time.monotonic() < until)

    def _answer(self, request: Message, context: grpc.ServicerContext) -> Any:
        """Answer a request that needs no check beside the permission of its caller."""
        return self.exchange.call(request, self.callers.of(context))

    def _answer_later(self, request: Message, context: grpc.ServicerContext) -> Any:
        """Answer a request whose reply may have to wait."""
        return self.exchange.call(request, self._waiting(context))

    Agree = Confirm = _answer
    LastRound = NewestCheckpoint = _answer_later

    def _end_revoked(self, guests: Iterable[HeldBy]) -> None:
        """End the incarnations of ticket holders that are admitted no more, so that their links are cut at once."""
        for one in guests:
            assert self._guests is not None
            try:
                self._guests.require_in(one.slot, one.holder)
            except Refused as error:
                self.exchange.end_incarnation(one.slot, str(error).removeprefix(f"{one.slot}: "), one.incarnation)

    def _moving(self, frames: Iterable[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        """Yield the same frames. Each one shows that the member is there; a stream without any is cut."""
        member = self.callers.of(context).name
        for frame in self._stalls.watched(frames, context):
            self.exchange.runner.heard(member)
            yield frame

    def Join(self, request: pb.JoinRequest, context: grpc.ServicerContext) -> pb.JoinReply:
        if request.version != PROTOCOL_VERSION:
            raise Refused(
                f"found protocol version {request.version}, expected {PROTOCOL_VERSION}: install one version of "
                "hetero-pp on all hosts"
            )
        if max(len(request.rounds), len(request.damaged)) > STATES_MAX:
            raise MalformedMessage(f"found more than {STATES_MAX} states in a request to join")
        caller = self._waiting(context)
        if (seconds := self._joins.refused_for(caller.name)) > 0:
            raise TooMuch(f"{caller.name} joins too often; it may try again in {seconds:.0f} s")
        request.damaged[:] = map(plain, request.damaged)
        request.address = self._listens(context, request.address, is_new=True)
        # The caller was let in as the newest holder of its slot. The exchange may not have heard yet that the holder
        # before is over, whose admission ends in the memberships first: the caller would be a second process of it.
        former = self.exchange.held_by(caller.name)
        if caller.holder and former is not None and former.holder:
            self._end_revoked([former])
        reply = self.exchange.call(request, caller)
        if self._guests is not None and caller.holder:
            self._guests.joined(caller.name, caller.holder)
        return reply

    def _listens(self, context: grpc.ServicerContext, address: str, is_new: bool = False) -> str:
        """Return where a member says that it listens. The exchange then knows whether the member is reached there."""
        member, address = self.callers.of(context).name, plain(address, ADDRESS_BYTES_MAX)
        if self._reach is not None:
            is_reached = self._reach.of(member, address, context.peer(), is_new)
            self.exchange.dialled(member, address, is_reached)
        return address

    def Stay(self, request: pb.StayRequest, context: grpc.ServicerContext) -> pb.Nothing:
        """Wait with a member until the run is over. Tell the exchange if the member is gone before."""
        caller = self.callers.of(context)
        member, incarnation = caller.name, caller.incarnation
        if context.add_callback(lambda: self.exchange.left(member, incarnation)):
            self.exchange.stay(member)
        else:  # the call has ended already
            self.exchange.left(member, incarnation)
        return pb.Nothing()

    def Assign(self, request: pb.AssignRequest, context: grpc.ServicerContext) -> pb.AssignReply:
        caller = self._waiting(context)
        request.address = self._listens(context, request.address)
        return self.exchange.call(request, caller)

    def Heartbeat(self, request: pb.HeartbeatRequest, context: grpc.ServicerContext) -> pb.HeartbeatReply:
        if self._guests is not None:
            self._end_revoked(self.exchange.neighbouring_guests(self.callers.of(context).name))
        return self._answer(request, context)

    def Broken(self, request: pb.BrokenRequest, context: grpc.ServicerContext) -> pb.Nothing:
        request.cause, request.blames = plain(request.cause), plain(request.blames)
        ends = {one.slot: one for one in self.exchange.link_broke(request, self.callers.of(context))}
        if self._guests is not None and len(ends) == 2:
            parted = self._guests.part({slot: one.holder for slot, one in ends.items()})
            for slot, why in parted.items():
                self.exchange.end_incarnation(slot, f"{why}: {request.cause}", ends[slot].incarnation)
        return pb.Nothing()

    def Died(self, request: pb.DiedRequest, context: grpc.ServicerContext) -> pb.Nothing:
        require_process(self.callers.of(context), request.member)
        request.cause = plain(request.cause)
        return self._answer(request, context)

    def RunCheckpoint(self, request: pb.CheckpointRequest, context: grpc.ServicerContext) -> Iterator[bytes]:
        if not request.HasField("round"):
            newest: pb.NewestCheckpointReply = self._answer_later(pb.NewestCheckpointRequest(), context)
            request.round = newest.round
        names = request.names
        with self._sending(request.round, context):
            if len(names) != len(set(names)):
                raise MalformedMessage("found a tensor named twice, expected unique names")
            checkpoint = self.exchange.decided.open_checkpoint(request, self._waiting(context))
            header = pb.CheckpointHeader(names=names)
            for name in names:
                header.tensors.add(dtype=pb.FP32, shape=checkpoint.shapes[name])
            if request.reaches_store and isinstance(checkpoint, OpenCheckpoint):
                header.url = self.exchange.decided.stored_at(checkpoint) or ""
            if header.url and isinstance(checkpoint, OpenCheckpoint):
                # A model of 28 GB would take hours on the line of a home. The member compares the digests.
                header.starts.extend(checkpoint.starts[name] for name in names)
                header.sha256.extend(checkpoint.hashes[name] for name in names)
                yield from header_and_payload_frames(header, [])
                return
            buffers = (piece for name in names for piece in checkpoint.pieces(name))
            yield from self._moving(header_and_payload_frames(header, buffers), context)

    @contextmanager
    def _sending(self, round_: int, context: grpc.ServicerContext) -> Iterator[None]:
        """Note a run checkpoint that is being sent, because each round's takes disk until it is sent.

        If there are too many rounds, cut the streams of the oldest one: a slow reader keeps nobody from a newer
        run checkpoint. Raises TooMuch if this round is older than all of them.
        """
        with self._counting:
            if round_ not in self._sent and len(self._sent) >= CHECKPOINTS_SENT_MAX:
                if round_ < (oldest := min(self._sent)):
                    raise TooMuch(
                        f"run checkpoints after the rounds {sorted(self._sent)} are being sent; try again later"
                    )
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

    def Deposit(self, frames: Iterator[bytes], context: grpc.ServicerContext) -> pb.DepositReply:
        caller = self.callers.of(context)

        def announced(header: pb.BlobHeader) -> int:
            self.exchange.inbox.expect(header, caller)
            return payload_bytes(header)

        most, moving = self.exchange.requests.of("Deposit"), self._moving(frames, context)
        header, data = read_frames(moving, pb.BlobHeader, announced, MAX_BLOB_BYTES, most)
        self.exchange.inbox.take(header, bytes(data), caller)
        return pb.DepositReply(exchange=self.process)

    def Show(self, frames: Iterator[bytes], context: grpc.ServicerContext) -> pb.Nothing:
        """Take a file by way of the disk: a checkpoint may be larger than the memory of this machine."""
        caller = self.callers.of(context)
        with tempfile.NamedTemporaryFile(prefix="hetero-pp-shown-") as file:

            def room_for(header: pb.ShownFile) -> Iterator[memoryview]:
                header.name = plain(header.name, MOST_OF_A_NAME)
                audits = self.exchange.runner.audits
                audits.expect_file(header, caller)
                try:  # room on the disk: a write into the file's memory would otherwise end the process (SIGBUS)
                    if hasattr(os, "posix_fallocate"):
                        os.posix_fallocate(file.fileno(), 0, header.size)
                    else:
                        os.ftruncate(file.fileno(), header.size)
                except OSError as error:
                    audits.lacks_room(header, caller)
                    raise TooMuch(f"the exchange has no room for a file of {header.size} bytes: {error}") from None
                yield memoryview(mmap.mmap(file.fileno(), header.size))

            most, moving = self.exchange.requests.of("Show"), self._moving(frames, context)
            header = read_into(moving, pb.ShownFile, room_for, max_header_bytes=most)
            self.exchange.show_file(header, Path(file.name), caller)
        return pb.Nothing()

    def UploadUrl(self, request: pb.BlobHeader, context: grpc.ServicerContext) -> pb.DepositReply:
        return pb.DepositReply(url=self.exchange.inbox.upload_url(request, self.callers.of(context)))

    def Uploaded(self, request: pb.BlobHeader, context: grpc.ServicerContext) -> pb.DepositReply:
        self.exchange.inbox.uploaded(request, self.callers.of(context))
        return pb.DepositReply(exchange=self.process)

    def Record(self, request: pb.RecordRequest, context: grpc.ServicerContext) -> pb.RoundRecord:
        if request.exchange not in ("", self.process):
            raise ExchangeLost(
                "this exchange does not have the contributions that the previous one received; sending them again"
            )
        return self.exchange.decided.record(request, self._waiting(context))

    def Fetch(self, request: pb.FetchRequest, context: grpc.ServicerContext) -> Iterator[bytes]:
        caller = self.callers.of(context)
        stored = self.exchange.decided.stored(request, caller) if request.reaches_store else None
        if stored is not None:
            header, parts = stored, list[memoryview]()
        else:
            header, parts = self.exchange.decided.fetch_many(request, caller)
        yield from self._moving(header_and_payload_frames(header, parts), context)

    def Report(self, request: pb.ReportRequest, context: grpc.ServicerContext) -> pb.Nothing:
        caller = self.callers.of(context)
        seconds = self._pace.due_in(caller.name, len(request.reports))
        if seconds > 0:
            is_gone = threading.Event()
            context.add_callback(is_gone.set)
            is_gone.wait(seconds)
        for report in request.reports:
            require_report(report, caller.name, self.exchange.roster)
            report.member = caller.name
            report.DiscardUnknownFields()  # reports are remembered, whatever is in them
            make_plain(report)
        failed = [one for one in request.reports if caller.holder and one.HasField("failure")]
        if failed:
            request = pb.ReportRequest(reports=[one for one in request.reports if not one.HasField("failure")])
        self.exchange.call(request, caller)
        for report in failed:  # a member with a ticket does not end the run, only its own part
            self.exchange.end_incarnation(caller.name, report.failure.cause, caller.incarnation)
        return pb.Nothing()

    def Judge(self, request: pb.JudgeRequest, context: grpc.ServicerContext) -> pb.Nothing:
        make_plain(request)
        return self._answer(request, context)

    def Watch(self, request: pb.WatchRequest, context: grpc.ServicerContext) -> Iterator[pb.Report]:
        due = 0.0

        def is_let_in() -> bool:
            """Return whether the caller is there. Raises Refused once it is not admitted any more."""
            nonlocal due
            if time.monotonic() >= due and context.is_active():
                self.callers.let_in(context)
                due = time.monotonic() + 1.0
            return context.is_active()

        yield from self.exchange.watch(request.members, is_let_in, MOST_UNREAD, request.so_far)
