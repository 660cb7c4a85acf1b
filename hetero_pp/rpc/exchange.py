"""The exchange over gRPC: a server for any ExchangePort, and a client that is one.

Control messages are protobuf; blobs and snapshots are a header and raw frames. Errors cross as status codes and are
raised again as the errors they were.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, Protocol

import grpc
import torch
from google.protobuf.message import Message
from torch import Tensor

from hetero_pp.errors import HeteroPPError, LinkClosed, MalformedMessage, Refused, ReplicasDiffer, RunFailed
from hetero_pp.messages import messages_pb2 as pb
from hetero_pp.outer.exchange_port import NOTHING, ExchangePort, HeldStates
from hetero_pp.pseudo_gradient.contribution import BlobAddress
from hetero_pp.rpc.channels import make_channel, make_server
from hetero_pp.rpc.framing import header_and_payload_frames, read_frames

SERVICE = "hetero_pp.Exchange"
VERSION = 2
MAX_BLOB_BYTES = 4 << 30

_CODE_OF_ERROR: dict[type[HeteroPPError], grpc.StatusCode] = {
    Refused: grpc.StatusCode.PERMISSION_DENIED,
    MalformedMessage: grpc.StatusCode.INVALID_ARGUMENT,
    RunFailed: grpc.StatusCode.ABORTED,
    ReplicasDiffer: grpc.StatusCode.DATA_LOSS,
}
_ERROR_OF_CODE: dict[grpc.StatusCode, type[HeteroPPError]] = {
    grpc.StatusCode.PERMISSION_DENIED: Refused,
    grpc.StatusCode.INVALID_ARGUMENT: Refused,
    grpc.StatusCode.ABORTED: RunFailed,
    grpc.StatusCode.DATA_LOSS: ReplicasDiffer,
}


class WatchedExchange(ExchangePort, Protocol):
    """What the server needs beyond what members need."""

    run: str

    def watch(self) -> Iterator[pb.Report]:
        """Every report, until the run is over."""

    def refuse(self, sender: str, reason: str) -> None:
        """Count a message that was not let in."""

    def stay(self, member: str) -> None:
        """A member is there. Wait until it has left, or every member is through."""

    def left(self, member: str) -> None:
        """A member's connection has ended."""


def serve_exchange(exchange: WatchedExchange, token: str, listen: str, members: int) -> tuple[grpc.Server, int]:
    """Serve an exchange at HOST:PORT to callers who know the token; returns the server and the port it got.

    Raises OSError if the port is busy.
    """
    return make_server(listen, [_Handlers(exchange, token).generic()], max_workers=8 + 4 * members)


class _Handlers:
    """One method per call; `member` comes from the call's metadata."""

    def __init__(self, exchange: WatchedExchange, token: str) -> None:
        self.exchange = exchange
        self.token = token

    def generic(self) -> grpc.GenericRpcHandler:
        def one_to_one(method: Callable[..., Message], request: type[Message]) -> grpc.RpcMethodHandler:
            return grpc.unary_unary_rpc_method_handler(
                self._guarded(method), request.FromString, lambda reply: reply.SerializeToString()
            )

        def one_to_frames(method: Callable[..., Iterator[bytes]], request: type[Message]) -> grpc.RpcMethodHandler:
            return grpc.unary_stream_rpc_method_handler(self._guarded_stream(method), request.FromString)

        return grpc.method_handlers_generic_handler(
            SERVICE,
            {
                "Join": one_to_one(self._join, pb.JoinRequest),
                "LastRound": one_to_one(self._last_round, pb.LastRoundRequest),
                "Locate": one_to_one(self._locate, pb.LocateRequest),
                "Snapshot": one_to_frames(self._snapshot, pb.SnapshotRequest),
                "Deposit": grpc.stream_unary_rpc_method_handler(
                    self._guarded(self._deposit), None, lambda reply: reply.SerializeToString()
                ),
                "Record": one_to_one(self._record, pb.RecordRequest),
                "Fetch": one_to_frames(self._fetch, pb.FetchRequest),
                "Confirm": one_to_one(self._confirm, pb.HashReport),
                "Report": one_to_one(self._report, pb.ReportRequest),
                "Stay": grpc.unary_unary_rpc_method_handler(
                    self._stay, pb.StayRequest.FromString, lambda reply: reply.SerializeToString()
                ),
                "Watch": grpc.unary_stream_rpc_method_handler(
                    self._guarded_stream(self._watch),
                    pb.WatchRequest.FromString,
                    lambda report: report.SerializeToString(),
                ),
            },
        )

    def _guarded(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(request: Any, context: grpc.ServicerContext) -> Any:
            try:
                return method(request, self._caller(context))
            except HeteroPPError as error:
                return _abort(context, error)

        return call

    def _guarded_stream(self, method: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
        def call(request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
            try:
                yield from method(request, self._caller(context))
            except HeteroPPError as error:
                _abort(context, error)

        return call

    def _caller(self, context: grpc.ServicerContext) -> str:
        metadata = dict(context.invocation_metadata())
        member = str(metadata.get("member", "a stranger"))
        if metadata.get("token") != self.token:
            self.exchange.refuse(f"{member} at {context.peer()}", "a call from another run")
            raise Refused("the exchange serves another run")
        if metadata.get("run", self.exchange.run) != self.exchange.run:
            self.exchange.refuse(f"{member} at {context.peer()}", "another configuration")
            raise Refused(
                f"{member} was started with another configuration than the exchange: compare the config.yaml of both"
            )
        return member

    def _join(self, request: pb.JoinRequest, member: str) -> pb.JoinReply:
        if request.version != VERSION:
            raise Refused(f"found protocol version {request.version}, expected {VERSION}")
        held = HeldStates(frozenset(request.rounds), tuple(request.damaged))
        self.exchange.join(member, request.address, held)
        return pb.JoinReply()

    def _last_round(self, request: pb.LastRoundRequest, member: str) -> pb.LastRoundReply:
        return pb.LastRoundReply(last_round=self.exchange.last_round())

    def _stay(self, request: pb.StayRequest, context: grpc.ServicerContext) -> pb.StayReply:
        """Held open by every member. If the caller is gone before the run is over, the exchange is told."""
        try:
            member = self._caller(context)
            if context.add_callback(lambda: self.exchange.left(member)):
                self.exchange.stay(member)
            else:  # the call has ended already
                self.exchange.left(member)
        except HeteroPPError as error:
            return _abort(context, error)
        return pb.StayReply()

    def _locate(self, request: pb.LocateRequest, member: str) -> pb.LocateReply:
        return pb.LocateReply(address=self.exchange.locate(request.member))

    def _snapshot(self, request: pb.SnapshotRequest, member: str) -> Iterator[bytes]:
        tensors = self.exchange.snapshot(request.names)
        header = pb.SnapshotHeader(names=request.names)
        for name in request.names:
            header.tensors.add(dtype=pb.FP32, shape=tensors[name].shape)
        buffers = (tensors[name].contiguous().numpy().reshape(-1).view("uint8").data for name in request.names)
        yield from header_and_payload_frames(header, buffers)

    def _deposit(self, frames: Iterator[bytes], member: str) -> pb.DepositReply:
        try:
            header, data = read_frames(frames, pb.BlobHeader, lambda header: header.size, MAX_BLOB_BYTES)
        except MalformedMessage as error:
            self.exchange.refuse(member, str(error))
            raise
        address = BlobAddress(self.exchange.run, header.round, header.replica, header.block)
        self.exchange.deposit(member, address, bytes(data))
        return pb.DepositReply()

    def _record(self, request: pb.RecordRequest, member: str) -> pb.RoundRecord:
        return self.exchange.record(request.round)

    def _fetch(self, request: pb.FetchRequest, member: str) -> Iterator[bytes]:
        data = self.exchange.fetch(member, request.round, request.replica, request.block)
        header = pb.BlobHeader(round=request.round, replica=request.replica, block=request.block, size=len(data))
        yield from header_and_payload_frames(header, [data])

    def _confirm(self, request: pb.HashReport, member: str) -> pb.HashReply:
        self.exchange.confirm(member, request.round, dict(request.sha256))
        return pb.HashReply()

    def _report(self, request: pb.ReportRequest, member: str) -> pb.ReportReply:
        for report in request.reports:
            report.member = member
        self.exchange.report(request.reports)
        return pb.ReportReply()

    def _watch(self, request: pb.WatchRequest, member: str) -> Iterator[pb.Report]:
        yield from self.exchange.watch()


def _abort(context: grpc.ServicerContext, error: HeteroPPError) -> NoReturn:
    for kind, code in _CODE_OF_ERROR.items():
        if isinstance(error, kind):
            context.abort(code, str(error))
    context.abort(grpc.StatusCode.INTERNAL, str(error))
    raise AssertionError("abort always raises")


class ExchangeClient:
    """The exchange at an address, as one member sees it. Implements ExchangePort."""

    def __init__(self, address: str, token: str, member: str, run: str | None = None) -> None:
        """`run` is the caller's idea of which run this is, which the exchange compares with its own."""
        self.address = address
        self._channel = make_channel(address)
        self._metadata = (("token", token), ("member", member), *(() if run is None else (("run", run),)))
        self._stay: grpc.Future | None = None

    @property
    def has_joined(self) -> bool:
        """Whether the exchange has let this member in."""
        return self._stay is not None

    def close(self) -> None:
        """End the connection; calls under way fail."""
        if self._stay is not None:
            self._stay.cancel()
        self._channel.close()

    def join(self, member: str, address: str, held: HeldStates = NOTHING) -> None:
        """See ExchangePort. Waits for the exchange to come up, and from then on is known to be there."""
        request = pb.JoinRequest(version=VERSION, address=address, rounds=sorted(held.rounds), damaged=held.damaged)
        self._ask("Join", request, pb.JoinReply, wait=True)
        call = self._channel.unary_unary(
            f"/{SERVICE}/Stay", lambda message: message.SerializeToString(), pb.StayReply.FromString
        )
        self._stay = call.future(pb.StayRequest(), metadata=self._metadata)

    def last_round(self) -> int:
        """See ExchangePort."""
        return self._ask("LastRound", pb.LastRoundRequest(), pb.LastRoundReply).last_round

    def locate(self, member: str) -> str:
        """See ExchangePort."""
        return self._ask("Locate", pb.LocateRequest(member=member), pb.LocateReply).address

    def snapshot(self, names: Sequence[str]) -> dict[str, Tensor]:
        """See ExchangePort."""
        frames = self._stream("Snapshot", pb.SnapshotRequest(names=names), None)
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
        """See ExchangePort."""
        header = pb.BlobHeader(round=address.round, replica=address.replica, block=address.block, size=len(data))
        call = self._channel.stream_unary(f"/{SERVICE}/Deposit", None, pb.DepositReply.FromString)
        try:
            call(header_and_payload_frames(header, [data]), metadata=self._metadata)
        except grpc.RpcError as error:
            raise self._translate(error) from None

    def record(self, round_: int) -> pb.RoundRecord:
        """See ExchangePort."""
        return self._ask("Record", pb.RecordRequest(round=round_), pb.RoundRecord)

    def fetch(self, member: str, round_: int, replica: str, block: str) -> bytes:
        """See ExchangePort."""
        request = pb.FetchRequest(round=round_, replica=replica, block=block)
        frames = self._stream("Fetch", request, None)
        _, data = read_frames(frames, pb.BlobHeader, lambda header: header.size, MAX_BLOB_BYTES)
        return bytes(data)

    def confirm(self, member: str, round_: int, sha256: Mapping[str, bytes]) -> None:
        """See ExchangePort."""
        self._ask("Confirm", pb.HashReport(round=round_, sha256=sha256), pb.HashReply)

    def report(self, reports: Sequence[pb.Report]) -> None:
        """See ExchangePort."""
        self._ask("Report", pb.ReportRequest(reports=reports), pb.ReportReply)

    def watch(self) -> Iterator[pb.Report]:
        """Every report, until the run is over."""
        return self._stream("Watch", pb.WatchRequest(), pb.Report.FromString)

    def _ask(self, method: str, request: Message, reply: Any, wait: bool = False) -> Any:
        call = self._channel.unary_unary(
            f"/{SERVICE}/{method}", lambda message: message.SerializeToString(), reply.FromString
        )
        try:
            return call(request, metadata=self._metadata, wait_for_ready=wait)
        except grpc.RpcError as error:
            raise self._translate(error) from None

    def _stream(self, method: str, request: Message, parse: Callable[[bytes], Any] | None) -> Iterator[Any]:
        call = self._channel.unary_stream(f"/{SERVICE}/{method}", lambda message: message.SerializeToString(), parse)
        try:
            yield from call(request, metadata=self._metadata)
        except grpc.RpcError as error:
            raise self._translate(error) from None

    def _translate(self, error: grpc.RpcError) -> HeteroPPError:
        code, details = error.code(), error.details()
        if code in _ERROR_OF_CODE:
            return _ERROR_OF_CODE[code](details)
        return LinkClosed(f"the exchange at {self.address} does not answer ({code.name.lower()}: {details})")


def _snapshot_bytes(header: pb.SnapshotHeader) -> int:
    if any(tensor.dtype != pb.FP32 for tensor in header.tensors) or len(header.names) != len(header.tensors):
        raise MalformedMessage("a snapshot holds named tensors in fp32")
    return sum(4 * math.prod(tensor.shape) for tensor in header.tensors)
