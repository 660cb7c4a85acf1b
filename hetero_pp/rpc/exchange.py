"""The exchange over gRPC: a server for any ExchangeService, and a client that is one.

Control messages are protobuf; blobs and snapshots are a header and raw frames. Errors cross as status codes and are
raised again as the errors they were.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Protocol, TypeVar

import grpc
import torch
from torch import Tensor

from hetero_pp.changed_keys import Changes
from hetero_pp.errors import HeteroPPError, LinkClosed, LinkTimeout, MalformedMessage, Refused, WrongToken
from hetero_pp.messages import messages_pb2 as pb
from hetero_pp.messages.messages_pb2_grpc import ExchangeServicer, ExchangeStub
from hetero_pp.outer.exchange_service import FIRST_TOLD, MOST_BETWEEN, NO_STATES, AvailableStates, ExchangeService
from hetero_pp.pseudo_gradient.contribution import BlobAddress
from hetero_pp.rpc.channels import PROTOCOL_VERSION, make_channel, make_server
from hetero_pp.rpc.framing import header_and_payload_frames, read_frames
from hetero_pp.rpc.services import ERROR_OF_CODE, call_path, service_handler
from hetero_pp.units import format_seconds

SERVICE = pb.DESCRIPTOR.services_by_name["Exchange"]
MAX_BLOB_BYTES = 4 << 30

Request = TypeVar("Request")
Reply = TypeVar("Reply")


class WatchedExchange(ExchangeService, Protocol):
    """What the server needs beyond what members need."""

    run: str

    def watch(self, members: Collection[str] = ()) -> Iterator[pb.Report]:
        """Every report, until the run is over; of some members only theirs, and what concerns everybody."""

    def heard(self, member: str) -> None:
        """Something came from a member, or reached it."""

    def refuse(self, sender: str, reason: str) -> None:
        """Count a message that was not let in."""

    def stay(self, member: str) -> None:
        """A member is there. Wait until it has left, or every member is through."""

    def left(self, member: str, node: str = "") -> None:
        """A member's connection has ended, or that of one of its nodes."""


def serve_exchange(exchange: WatchedExchange, token: str, listen: str, members: int) -> tuple[grpc.Server, int]:
    """Serve an exchange at HOST:PORT to callers who know the token; returns the server and the port it got.

    Raises OSError if the port is busy.
    """
    return make_server(listen, [_Servicer(exchange, token).handler()], max_workers=8 + 5 * members)


class _Servicer(ExchangeServicer):
    """One method per call. Who calls is in the call's metadata."""

    def __init__(self, exchange: WatchedExchange, token: str) -> None:
        self.exchange = exchange
        self.token = token

    def handler(self) -> grpc.GenericRpcHandler:
        """For `make_server`."""
        return service_handler(SERVICE, self, self.admit)

    def admit(self, context: grpc.ServicerContext) -> None:
        """Before every call. Raises Refused for a stranger, and for who is of another run."""
        metadata, member = dict(context.invocation_metadata()), _member(context)
        if metadata.get("token") != self.token:
            self.exchange.refuse(f"{member} at {context.peer()}", "found another token than the run's")
            raise WrongToken("the exchange was started with another token")
        if metadata.get("run", self.exchange.run) != self.exchange.run:
            self.exchange.refuse(f"{member} at {context.peer()}", "another configuration")
            raise Refused(
                f"{member} was started with another configuration than the exchange: compare the config.yaml of both"
            )
        self.exchange.heard(member)

    def _moving(self, frames: Iterable[bytes], member: str) -> Iterator[bytes]:
        """The same frames; each that goes over the link shows that the member is there."""
        for frame in frames:
            self.exchange.heard(member)
            yield frame

    def Agree(self, request: pb.AgreeRequest, context: grpc.ServicerContext) -> pb.AgreeReply:
        return pb.AgreeReply(run=self.exchange.agree(_member(context), request.configuration))

    def Join(self, request: pb.JoinRequest, context: grpc.ServicerContext) -> pb.JoinReply:
        if request.version != PROTOCOL_VERSION:
            raise Refused(f"found protocol version {request.version}, expected {PROTOCOL_VERSION}")
        available = AvailableStates(frozenset(request.rounds), tuple(request.damaged))
        self.exchange.join(_member(context), request.address, available)
        return pb.JoinReply()

    def LastRound(self, request: pb.LastRoundRequest, context: grpc.ServicerContext) -> pb.LastRoundReply:
        return pb.LastRoundReply(last_round=self.exchange.last_round())

    def Changes(self, request: pb.ChangesRequest, context: grpc.ServicerContext) -> pb.ChangesReply:
        return pb.ChangesReply(changes=self.exchange.changes().to_json())

    def Stay(self, request: pb.StayRequest, context: grpc.ServicerContext) -> pb.StayReply:
        """Held open by every member. If the caller is gone before the run is over, the exchange is told."""
        member = _member(context)
        if context.add_callback(lambda: self.exchange.left(member, request.node)):
            self.exchange.stay(member)
        else:  # the call has ended already
            self.exchange.left(member, request.node)
        return pb.StayReply()

    def Locate(self, request: pb.LocateRequest, context: grpc.ServicerContext) -> pb.LocateReply:
        return pb.LocateReply(address=self.exchange.locate(request.member))

    def Snapshot(  # type: ignore[override]  # a Frame is raw bytes
        self, request: pb.SnapshotRequest, context: grpc.ServicerContext
    ) -> Iterator[bytes]:
        tensors = self.exchange.snapshot(request.names)
        header = pb.SnapshotHeader(names=request.names)
        for name in request.names:
            header.tensors.add(dtype=pb.FP32, shape=tensors[name].shape)
        buffers = (tensors[name].contiguous().numpy().reshape(-1).view("uint8").data for name in request.names)
        yield from self._moving(header_and_payload_frames(header, buffers), _member(context))

    def Deposit(  # type: ignore[override]  # a Frame is raw bytes
        self, frames: Iterator[bytes], context: grpc.ServicerContext
    ) -> pb.DepositReply:
        member = _member(context)
        try:
            moving = self._moving(frames, member)
            header, data = read_frames(moving, pb.BlobHeader, lambda header: header.size, MAX_BLOB_BYTES)
        except MalformedMessage as error:
            self.exchange.refuse(member, str(error))
            raise
        address = BlobAddress(self.exchange.run, header.round, header.replica, header.block)
        self.exchange.deposit(member, address, bytes(data))
        return pb.DepositReply()

    def Record(self, request: pb.RecordRequest, context: grpc.ServicerContext) -> pb.RoundRecord:
        return self.exchange.record(request.round)

    def Fetch(  # type: ignore[override]  # a Frame is raw bytes
        self, request: pb.FetchRequest, context: grpc.ServicerContext
    ) -> Iterator[bytes]:
        member = _member(context)
        data = self.exchange.fetch(member, request.round, request.replica, request.block)
        header = pb.BlobHeader(round=request.round, replica=request.replica, block=request.block, size=len(data))
        yield from self._moving(header_and_payload_frames(header, [data]), member)

    def Confirm(self, request: pb.HashReport, context: grpc.ServicerContext) -> pb.HashReply:
        self.exchange.confirm(_member(context), request.round, dict(request.sha256))
        return pb.HashReply()

    def Report(self, request: pb.ReportRequest, context: grpc.ServicerContext) -> pb.ReportReply:
        member = _member(context)
        for report in request.reports:
            report.member = member
        self.exchange.report(request.reports)
        return pb.ReportReply()

    def Watch(self, request: pb.WatchRequest, context: grpc.ServicerContext) -> Iterator[pb.Report]:
        yield from self.exchange.watch(request.members)


def _member(context: grpc.ServicerContext) -> str:
    return str(dict(context.invocation_metadata()).get("member", "a stranger"))


class ExchangeClient:
    """The exchange at an address, as one member sees it. Implements ExchangeService."""

    def __init__(
        self, address: str, token: str, member: str, run: str | None = None, timeout: float | None = None
    ) -> None:
        """`run` is the caller's idea of which run this is, which the exchange compares with its own.

        `timeout`: seconds that `agree` and `join` wait for the exchange to come up; by default without a bound.
        """
        self.address = address
        self._timeout = timeout
        self._channel = channel = make_channel(address)
        self._calls = ExchangeStub(channel)
        # The stub would take frames for messages; without a serializer they are bytes, and stay them.
        self._snapshot: grpc.UnaryStreamMultiCallable[pb.SnapshotRequest, bytes] = channel.unary_stream(
            call_path(SERVICE, "Snapshot"), pb.SnapshotRequest.SerializeToString
        )
        self._deposit: grpc.StreamUnaryMultiCallable[bytes, pb.DepositReply] = channel.stream_unary(
            call_path(SERVICE, "Deposit"), response_deserializer=pb.DepositReply.FromString
        )
        self._fetch: grpc.UnaryStreamMultiCallable[pb.FetchRequest, bytes] = channel.unary_stream(
            call_path(SERVICE, "Fetch"), pb.FetchRequest.SerializeToString
        )
        self._metadata: tuple[tuple[str, str], ...] = (
            ("token", token),
            ("member", member),
            *(() if run is None else (("run", run),)),
        )
        self._stay: grpc.Future[pb.StayReply] | None = None

    @property
    def has_joined(self) -> bool:
        """Whether the exchange has let this member in."""
        return self._stay is not None

    def close(self) -> None:
        """End the connection; calls under way fail."""
        if self._stay is not None:
            self._stay.cancel()
        self._channel.close()

    def agree(self, member: str, configuration: str) -> str:
        """See ExchangeService. Waits for the exchange to come up; the run is named in every later call.

        Raises LinkTimeout if it does not come up in time.
        """
        run = self._ask(self._calls.Agree, pb.AgreeRequest(configuration=configuration), wait=True).run
        self._metadata = (*(pair for pair in self._metadata if pair[0] != "run"), ("run", run))
        return run

    def join(self, member: str, address: str, available: AvailableStates = NO_STATES) -> None:
        """See ExchangeService. Waits for the exchange to come up, and from then on is known to be there.

        Raises LinkTimeout if it does not come up in time.
        """
        request = pb.JoinRequest(
            version=PROTOCOL_VERSION, address=address, rounds=sorted(available.rounds), damaged=available.damaged
        )
        self._ask(self._calls.Join, request, wait=True)
        self.stay()

    def stay(self, node: str = "") -> None:
        """From now on, be known to be there; with `node`, as a host beside the one that has joined for the member."""
        self._stay = self._calls.Stay.future(pb.StayRequest(node=node), metadata=self._metadata)

    def last_round(self) -> int:
        """See ExchangeService."""
        return self._ask(self._calls.LastRound, pb.LastRoundRequest()).last_round

    def changes(self) -> Changes:
        """See ExchangeService."""
        return Changes.from_json(self._ask(self._calls.Changes, pb.ChangesRequest()).changes)

    def locate(self, member: str) -> str:
        """See ExchangeService."""
        return self._ask(self._calls.Locate, pb.LocateRequest(member=member)).address

    def snapshot(self, names: Sequence[str]) -> dict[str, Tensor]:
        """See ExchangeService."""
        frames = self._stream(self._snapshot, pb.SnapshotRequest(names=names))
        header, data = read_frames(frames, pb.SnapshotHeader, _snapshot_bytes, MAX_BLOB_BYTES)
        if list(header.names) != list(names):
            raise MalformedMessage(f"asked for the tensors {list(names)}, got {list(header.names)}")
        everything, start, tensors = torch.frombuffer(data, dtype=torch.float32), 0, {}
        for name, tensor in zip(header.names, header.tensors, strict=True):
            size = math.prod(tensor.shape)
            tensors[name] = everything[start : start + size].view(*tensor.shape).clone()
            start += size
        return tensors

    def deposit(self, member: str, address: BlobAddress, data: bytes) -> None:
        """See ExchangeService."""
        header = pb.BlobHeader(round=address.round, replica=address.replica, block=address.block, size=len(data))
        try:
            self._deposit(header_and_payload_frames(header, [data]), metadata=self._metadata)
        except grpc.RpcError as error:
            raise self._translate(error) from None

    def record(self, round_: int) -> pb.RoundRecord:
        """See ExchangeService."""
        return self._ask(self._calls.Record, pb.RecordRequest(round=round_))

    def fetch(self, member: str, round_: int, replica: str, block: str) -> bytes:
        """See ExchangeService."""
        request = pb.FetchRequest(round=round_, replica=replica, block=block)
        frames = self._stream(self._fetch, request)
        _, data = read_frames(frames, pb.BlobHeader, lambda header: header.size, MAX_BLOB_BYTES)
        return bytes(data)

    def confirm(self, member: str, round_: int, sha256: Mapping[str, bytes]) -> None:
        """See ExchangeService."""
        self._ask(self._calls.Confirm, pb.HashReport(round=round_, sha256=sha256))

    def report(self, reports: Sequence[pb.Report]) -> None:
        """See ExchangeService."""
        self._ask(self._calls.Report, pb.ReportRequest(reports=reports))

    def wait_until_ready(self, seconds: float, on_wait: Callable[[float], None] = lambda _: None) -> None:
        """Wait for the connection to the exchange; `on_wait` is told at growing intervals for how long already.

        Raises LinkTimeout.
        """
        ready, waited, more = grpc.channel_ready_future(self._channel), 0.0, FIRST_TOLD
        while waited < seconds:
            more = min(more, seconds - waited)
            try:
                return ready.result(more)
            except grpc.FutureTimeoutError:
                waited += more
                on_wait(waited)
                more = min(waited, MOST_BETWEEN)
        raise self._does_not_answer(seconds)

    def _does_not_answer(self, seconds: float) -> LinkTimeout:
        return LinkTimeout(
            f"gave up waiting for the exchange at {self.address}: it did not answer within {format_seconds(seconds)}"
        )

    def watch(self, members: Sequence[str] = ()) -> Iterator[pb.Report]:
        """Every report, until the run is over; of some members only theirs, and what concerns everybody."""
        return self._stream(self._calls.Watch, pb.WatchRequest(members=members))

    def _ask(self, call: grpc.UnaryUnaryMultiCallable[Request, Reply], request: Request, wait: bool = False) -> Reply:
        try:
            return call(request, metadata=self._metadata, wait_for_ready=wait, timeout=self._timeout if wait else None)
        except grpc.RpcError as error:
            if self._timeout is not None and error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise self._does_not_answer(self._timeout) from None
            raise self._translate(error) from None

    def _stream(self, call: grpc.UnaryStreamMultiCallable[Request, Reply], request: Request) -> Iterator[Reply]:
        try:
            yield from call(request, metadata=self._metadata)
        except grpc.RpcError as error:
            raise self._translate(error) from None

    def _translate(self, error: grpc.RpcError) -> HeteroPPError:
        code, details = error.code(), error.details()
        if code is grpc.StatusCode.UNAUTHENTICATED:
            return WrongToken(f"the exchange at {self.address} was started with another token")
        if code in ERROR_OF_CODE:
            return ERROR_OF_CODE[code](details)
        return LinkClosed(f"the exchange at {self.address} does not answer ({code.name.lower()}: {details})")


def _snapshot_bytes(header: pb.SnapshotHeader) -> int:
    if any(tensor.dtype != pb.FP32 for tensor in header.tensors) or len(header.names) != len(header.tensors):
        raise MalformedMessage("a snapshot holds named tensors in fp32")
    return sum(4 * math.prod(tensor.shape) for tensor in header.tensors)
