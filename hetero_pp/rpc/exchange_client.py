"""The exchange at an address, as one member sees it: the client of the calls that rpc.exchange serves."""

from __future__ import annotations

import hashlib
import math
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TypeVar

import grpc
import torch
from torch import Tensor

from hetero_pp.changed_keys import Changes
from hetero_pp.errors import (
    AskAgain,
    ExchangeLost,
    HeteroPPError,
    LinkTimeout,
    MalformedMessage,
    Refused,
    StoreError,
    WrongToken,
)
from hetero_pp.links import EXCHANGE
from hetero_pp.messages import messages_pb2 as pb
from hetero_pp.messages.messages_pb2_grpc import ExchangeStub
from hetero_pp.outer.exchange_service import (
    FIRST_TOLD,
    MOST_BETWEEN,
    NO_STATES,
    Assignment,
    AvailableStates,
    Standing,
)
from hetero_pp.proxies import route_to
from hetero_pp.pseudo_gradient.contribution import MAX_BLOB_BYTES, BlobAddress
from hetero_pp.rpc.callers import Metadata, shown
from hetero_pp.rpc.channels import PROTOCOL_VERSION, make_channel, readiness
from hetero_pp.rpc.credentials import Credentials
from hetero_pp.rpc.exchange import LONGEST_WAIT, SERVICE
from hetero_pp.rpc.framing import header_and_payload_frames, read_frames, read_into
from hetero_pp.rpc.handshake import new_run, require_trust
from hetero_pp.rpc.services import ERROR_OF_CODE, call_path
from hetero_pp.store.presigned import download, is_of, upload, without_signature
from hetero_pp.units import format_seconds

STANDSTILL = 60.0
"""Seconds after which an upload or a download of which nothing moves is given up."""

ANSWER_SECONDS = LONGEST_WAIT + 10.0
"""A call that is not answered in this time is made again: the exchange waits no longer than LONGEST_WAIT itself."""

STREAM_SECONDS = 6 * 3600.0
"""Within which a contribution or a snapshot has crossed, however slow the line."""

AGAIN_SECONDS = 0.1
"""Between two attempts, where an exchange is there and ends the call at once."""

_AT_ONCE = 1.0
"""Seconds within which a connection is made that is possible."""

SECONDS_BETWEEN_LOOKS = 30.0
"""At most, while the exchange is waited for, between two looks at whether another run answers at its address."""

BEAT_TIMEOUT = 5.0
"""Seconds after which a beat that is not answered counts as lost: the next one may get through."""

Request = TypeVar("Request")
Reply = TypeVar("Reply")
Answer = TypeVar("Answer")


class ExchangeClient:
    """The exchange at an address, as one member sees it. Implements ExchangeService."""

    def __init__(
        self,
        address: str,
        credentials: Credentials,
        run: str | None = None,
        timeout: float | None = None,
        stores: Sequence[str] = (),
    ) -> None:
        """`run` is the caller's idea of which run this is, which the exchange compares with its own.

        `stores`: where the URLs that the exchange signs may lead, as SCHEME://HOST[:PORT]; without any, contributions
        pass through the exchange. `timeout`: seconds that `agree` and `join` wait for the exchange to come up; by
        default without a bound.
        """
        self.address = address
        self._timeout = timeout
        self._credentials, self._run = credentials, run
        self._wires = _Wires(address, credentials)
        self._was_trusted = False
        """Whether the exchange has shown once that it is of this process's run."""
        self._term: int | None = None
        self._stay: grpc.Future[pb.StayReply] | None = None
        self._process = secrets.token_hex(8)
        self._stores = stores
        self._reaches_store = bool(stores)
        """As far as is known; what cannot be had from there, or brought there, goes by the exchange."""
        self._told: set[str] = set()
        """The exchange's processes that have noted something since the last record was asked for."""
        self._closed = threading.Event()

    @property
    def has_joined(self) -> bool:
        """Whether the exchange has let this member in."""
        return self._stay is not None

    def close(self) -> None:
        """End the connection; calls under way fail."""
        self._closed.set()
        if self._stay is not None:
            self._stay.cancel()
        self._wires.close()

    def agree(self, member: str, configuration: str, tokens: str = "") -> str:
        """See ExchangeService. Waits for the exchange to come up; the run is named in every later call.

        Raises LinkTimeout if it does not come up in time.
        """
        request = pb.AgreeRequest(configuration=configuration, tokens=tokens)
        self._run = self._ask(lambda calls: calls.Agree, request, wait=True).run
        return self._run

    @property
    def _metadata(self) -> Metadata:
        """Of every call."""
        return shown(self._credentials, self._run, self._term)

    def join(
        self, member: str, address: str, available: AvailableStates = NO_STATES, process: str | None = None
    ) -> int:
        """See ExchangeService. Waits for the exchange to come up, and from then on is known to be there.

        Raises LinkTimeout if it does not come up in time.
        """
        request = pb.JoinRequest(
            version=PROTOCOL_VERSION,
            address=address,
            rounds=sorted(available.rounds),
            damaged=available.damaged,
            process=process or self._process,
        )
        self._term = term = self._ask(lambda calls: calls.Join, request, wait=True).term
        self.stay()
        return term

    def stay(self, node: str = "") -> None:
        """From now on, be known to be there; with `node`, as a host beside the one that has joined for the member."""
        if self._stay is not None:
            self._stay.cancel()
        self._stay = self._wires.calls.Stay.future(pb.StayRequest(node=node), metadata=self._metadata)

    def last_round(self) -> int:
        """See ExchangeService."""
        return self._ask(lambda calls: calls.LastRound, pb.LastRoundRequest()).last_round

    def changes(self) -> Changes:
        """See ExchangeService."""
        return Changes.from_json(self._ask(lambda calls: calls.Changes, pb.ChangesRequest()).changes)

    def newest_snapshot(self) -> tuple[int, Sequence[str]]:
        """See ExchangeService."""
        reply = self._ask(lambda calls: calls.NewestSnapshot, pb.NewestSnapshotRequest())
        return reply.round, list(reply.names)

    def assign(self, member: str, holds: int, address: str = "", trained: int = 0) -> Assignment:
        """See ExchangeService."""
        reply = self._ask(lambda calls: calls.Assign, pb.AssignRequest(holds=holds, address=address, trained=trained))
        return Assignment(
            reply.round,
            reply.epoch,
            downstream=reply.downstream,
            heals=reply.heals,
            is_first=reply.is_first,
            elapsed=reply.elapsed,
            upstream=reply.upstream,
            trained=reply.trained,
            upstream_holder=reply.upstream_holder if reply.HasField("upstream_holder") else None,
            downstream_holder=reply.downstream_holder if reply.HasField("downstream_holder") else None,
            changed=reply.changed,
        )

    def beat(
        self, member: str, round_: int | None = None, epoch: int = 0, progress: int = 0, computes: bool = False
    ) -> Standing:
        """See ExchangeService. Raises LinkClosed if the exchange does not answer at once."""
        request = pb.BeatRequest(round=round_, epoch=epoch, progress=progress, computes=computes)
        try:
            reply = self._wires.calls.Beat(request, metadata=self._metadata, timeout=BEAT_TIMEOUT)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise ExchangeLost(f"the exchange at {self.address} does not answer at once") from None
            raise self._translate(error) from None
        if self._stay is not None and self._stay.done() and not self._closed.is_set():
            self.stay()  # the exchange was gone, and is there again
        return Standing(reply.is_over, reply.suspended if reply.HasField("suspended") else None, reply.cause)

    def broken(self, member: str, epoch: int, cause: str, blames: str = "") -> None:
        """See ExchangeService."""
        self._ask(lambda calls: calls.Broken, pb.BrokenRequest(epoch=epoch, cause=cause, blames=blames))

    def died(self, member: str, cause: str, term: int | None = None) -> None:
        """Tell that the process of a member has ended, as who started it knows; and which term it held."""
        self._ask(lambda calls: calls.Died, pb.DiedRequest(member=member, cause=cause, term=term))

    def snapshot(self, names: Sequence[str], round_: int | None = None) -> dict[str, Tensor]:
        """See ExchangeService."""
        return self._again(lambda: self._read_snapshot(names, round_))

    def _read_snapshot(self, names: Sequence[str], round_: int | None) -> dict[str, Tensor]:
        frames = self._stream(self._wires.snapshot, pb.SnapshotRequest(names=names, round=round_), STREAM_SECONDS)
        tensors: dict[str, Tensor] = {}

        def room_for(header: pb.SnapshotHeader) -> Iterator[memoryview]:
            if list(header.names) != list(names):
                raise MalformedMessage(f"found the tensors {list(header.names)}, expected {list(names)}")
            tensors.update(_empty(header))
            return (tensor.view(-1).view(torch.uint8).numpy().data for tensor in tensors.values())

        read_into(frames, pb.SnapshotHeader, room_for)
        return tensors

    def deposit(self, member: str, address: BlobAddress, data: bytes, epoch: int | None = None, steps: int = 0) -> None:
        """See ExchangeService."""
        header = pb.BlobHeader(
            round=address.round,
            replica=address.replica,
            block=address.block,
            size=len(data),
            epoch=epoch or 0,
            steps=steps,
        )

        self._told.add(self._again(lambda: self._upload(header, data) or self._send(header, data)).exchange)

    def _upload(self, header: pb.BlobHeader, data: bytes) -> pb.DepositReply | None:
        """Hand in a blob by way of the store; None if that cannot be done."""
        if not self._reaches_store:
            return None
        request = pb.Upload(blob=header, sha256=hashlib.sha256(data).digest())
        try:
            reply = self._wires.calls.UploadUrl(request, metadata=self._metadata, timeout=ANSWER_SECONDS)
            if not reply.HasField("url"):
                self._reaches_store = False
                return None
            if reply.url:
                self._require_store(reply.url)
                upload(reply.url, data, STANDSTILL)
            return self._wires.calls.Uploaded(request, metadata=self._metadata, timeout=ANSWER_SECONDS)
        except grpc.RpcError as error:
            raise self._translate(error) from None
        except StoreError as error:
            self._do_without(error)
            return None

    def _require_store(self, url: str) -> None:
        """Raise StoreError unless a URL is of this run's store: an exchange sends its members nowhere else."""
        if not is_of(url, self._stores):
            raise StoreError(f"found {without_signature(url)}, expected a URL of {' or '.join(self._stores)}")

    def _do_without(self, error: StoreError) -> None:
        """From now on blobs go by the exchange: the store is where this member does not reach."""
        self._reaches_store = False
        print(f"{error}; contributions are sent through the exchange from now on", file=sys.stderr, flush=True)

    def _send(self, header: pb.BlobHeader, data: bytes) -> pb.DepositReply:
        try:
            frames = header_and_payload_frames(header, [data])
            return self._wires.deposit(frames, metadata=self._metadata, timeout=STREAM_SECONDS)
        except grpc.RpcError as error:
            raise self._translate(error) from None

    def record(self, round_: int, member: str | None = None) -> pb.RoundRecord:
        """See ExchangeService. Raises ExchangeLost once an exchange that was gone meanwhile is there again: it may have
        to hear again what was deposited.
        """
        told, self._told = self._told, set()
        if len(told) > 1:
            raise ExchangeLost(f"the exchange at {self.address} disconnected during round {round_}")
        request = pb.RecordRequest(round=round_, exchange="".join(told))
        while True:
            try:
                return self._wires.calls.Record(request, metadata=self._metadata, timeout=ANSWER_SECONDS)
            except grpc.RpcError as error:
                found = self._translate(error)
            if isinstance(found, ExchangeLost):
                self._await_return(found)
            if not isinstance(found, AskAgain):
                raise found

    def fetch(self, member: str, round_: int, replica: str, block: str) -> bytes:
        """See ExchangeService."""

        def read(by_store: bool) -> bytes:
            request = pb.FetchRequest(round=round_, replica=replica, block=block, reaches_store=by_store)
            frames = self._stream(self._wires.fetch, request, STREAM_SECONDS)
            header, data = read_frames(frames, pb.BlobHeader, lambda header: header.size, MAX_BLOB_BYTES)
            if not header.HasField("stored"):
                return bytes(data)
            try:
                self._require_store(header.stored.url)
                return _downloaded(header.stored)
            except StoreError as error:
                self._do_without(error)
            except FileNotFoundError:
                pass  # the exchange says why
            return read(by_store=False)

        return self._again(lambda: read(self._reaches_store))

    def confirm(self, member: str, round_: int, sha256: Mapping[str, bytes]) -> None:
        """See ExchangeService."""
        self._ask(lambda calls: calls.Confirm, pb.HashReport(round=round_, sha256=sha256))

    def report(self, reports: Sequence[pb.Report]) -> None:
        """See ExchangeService."""
        self._ask(lambda calls: calls.Report, pb.ReportRequest(reports=reports))

    def wait_until_ready(
        self,
        seconds: float,
        on_wait: Callable[[float], None] = lambda _: None,
        on_refused: Callable[[str], None] = lambda cause: print(cause, file=sys.stderr, flush=True),
    ) -> None:
        """Wait for the connection to the exchange; `on_wait` is told at growing intervals for how long already.

        Raises LinkTimeout; Refused if the two cannot connect, as they are not of one run. Once the exchange has been
        trusted, only `on_refused` is told at first, and Refused is raised after `seconds`: whoever can answer at the
        address of the exchange must not be able to end a member.
        """
        with readiness(self._wires.control) as ready:
            self._wait_for(ready, seconds, on_wait, on_refused)
        self._was_trusted = True

    def _wait_for(
        self,
        ready: grpc.Future,
        seconds: float,
        on_wait: Callable[[float], None],
        on_refused: Callable[[str], None],
    ) -> None:
        waited, due = 0.0, FIRST_TOLD
        refused: Refused | None = None
        with suppress(grpc.FutureTimeoutError):
            return ready.result(min(_AT_ONCE, seconds))
        while waited < seconds:
            before, refused = refused, self._refusal()
            if refused is not None and not self._was_trusted:
                raise refused
            if refused is not None and str(refused) != str(before):
                on_refused(str(refused))
            step = min(due - waited, SECONDS_BETWEEN_LOOKS, seconds - waited)
            try:
                return ready.result(step)
            except grpc.FutureTimeoutError:
                waited += step
            if waited >= min(due, seconds):
                on_wait(waited)
                due = waited + min(waited, MOST_BETWEEN)
        raise refused or self._does_not_answer(seconds)

    def _refusal(self) -> Refused | None:
        """Why a connection to the exchange does not come about, if that can be seen; connects once to find out."""
        identity = self._credentials.identity
        try:
            require_trust(self.address, None if identity is None else identity.latest, self._wires.route)
        except WrongToken as error:
            return self._new_run() if self._was_trusted else error
        except Refused as error:
            return error
        return None

    def _new_run(self) -> Refused:
        return new_run(self.address, "token", "copy the new token to this host")

    def _does_not_answer(self, seconds: float) -> LinkTimeout:
        within = f"{format_seconds(seconds)}{self._wires.route.note}"
        return LinkTimeout(f"the exchange at {self.address} did not answer within {within}; giving up")

    def watch(self, members: Sequence[str] = ()) -> Iterator[pb.Report]:
        """Every report, until the run is over; of some members only theirs, and what concerns everybody."""
        return self._stream(self._wires.calls.Watch, pb.WatchRequest(members=members))

    def _ask(
        self,
        call: Callable[[ExchangeStub], grpc.UnaryUnaryMultiCallable[Request, Reply]],
        request: Request,
        wait: bool = False,
    ) -> Reply:
        """`wait`: for an exchange that has never answered. One that has is waited for until it is there again."""
        limit = self._timeout if wait and self._timeout is not None else math.inf
        until = time.monotonic() + limit
        if wait:
            self.wait_until_ready(limit)

        def ask() -> Reply:
            if (left := until - time.monotonic()) <= 0:
                raise self._does_not_answer(limit)
            try:
                ask_once, seconds = call(self._wires.calls), min(left, ANSWER_SECONDS)
                return ask_once(request, metadata=self._metadata, wait_for_ready=wait, timeout=seconds)
            except grpc.RpcError as error:
                raise self._translate(error) from None

        return self._again(ask)

    def _again(self, ask: Callable[[], Answer]) -> Answer:
        """What may be asked twice, as often as it takes: the exchange may be gone for a while, and come back."""
        while True:
            try:
                return ask()
            except AskAgain:
                continue
            except ExchangeLost as lost:
                self._await_return(lost)
                self.pause()

    def pause(self) -> None:
        """A moment, before what failed is asked again."""
        self._closed.wait(AGAIN_SECONDS)

    def _await_return(self, lost: ExchangeLost) -> None:
        """Wait until the exchange is there again. Raises what was `lost` if it never was, or is not wanted any more."""
        if not self.has_joined or self._closed.is_set():
            raise lost
        if self._wires.are_outdated:
            self._wires.close()
            self._wires = _Wires(self.address, self._credentials)
        self.wait_until_ready(math.inf if self._timeout is None else self._timeout)
        with readiness(self._wires.bulk) as ready:  # what failed may have gone over the other connection
            try:
                ready.result(self._timeout)
            except grpc.FutureTimeoutError:
                raise self._does_not_answer(self._timeout or math.inf) from None

    def _stream(
        self, call: grpc.UnaryStreamMultiCallable[Request, Reply], request: Request, timeout: float | None = None
    ) -> Iterator[Reply]:
        try:
            yield from call(request, metadata=self._metadata, timeout=timeout)
        except grpc.RpcError as error:
            raise self._translate(error) from None

    def _translate(self, error: grpc.RpcError) -> HeteroPPError:
        code, details = error.code(), error.details()
        if code is grpc.StatusCode.UNAUTHENTICATED and self.has_joined:
            return self._new_run()
        if code is grpc.StatusCode.UNAUTHENTICATED:
            return WrongToken(f"the exchange at {self.address} was started with another token")
        if code in ERROR_OF_CODE:
            return ERROR_OF_CODE[code](details)
        cause = f"({code.name.lower()}: {details}){self._wires.route.note}"
        return ExchangeLost(f"the exchange at {self.address} does not answer {cause}")


class _Wires:
    """The two connections to an exchange, and the calls that cross them."""

    def __init__(self, address: str, credentials: Credentials) -> None:
        self._identity = None if credentials.identity is None else credentials.identity.latest
        self.route = route_to(address)
        self.control = make_channel(address, self._identity, EXCHANGE, self.route)
        self.calls = ExchangeStub(self.control)
        # A connection of their own for what is large: on a slow line it would lie in front of everything else.
        self.bulk = bulk = make_channel(address, self._identity, EXCHANGE, self.route)
        # The stub would take frames for messages; without a serializer they are bytes, and stay them.
        self.snapshot: grpc.UnaryStreamMultiCallable[pb.SnapshotRequest, bytes] = bulk.unary_stream(
            call_path(SERVICE, "Snapshot"), pb.SnapshotRequest.SerializeToString
        )
        self.deposit: grpc.StreamUnaryMultiCallable[bytes, pb.DepositReply] = bulk.stream_unary(
            call_path(SERVICE, "Deposit"), response_deserializer=pb.DepositReply.FromString
        )
        self.fetch: grpc.UnaryStreamMultiCallable[pb.FetchRequest, bytes] = bulk.unary_stream(
            call_path(SERVICE, "Fetch"), pb.FetchRequest.SerializeToString
        )

    @property
    def are_outdated(self) -> bool:
        """Whether the certificate was renewed by which they were made: once they break they stay so."""
        return self._identity is not None and self._identity.latest != self._identity

    def close(self) -> None:
        """Calls under way fail."""
        self.control.close()
        self.bulk.close()


def _downloaded(stored: pb.StoredBlob) -> bytes:
    if stored.size > MAX_BLOB_BYTES:
        raise MalformedMessage(f"found a contribution of {stored.size:,} bytes, expected at most {MAX_BLOB_BYTES:,}")
    data = download(stored.url, stored.size, STANDSTILL)
    if hashlib.sha256(data).digest() != stored.sha256:
        raise StoreError(f"{without_signature(stored.url)} does not match its digest")
    return data


def _empty(header: pb.SnapshotHeader) -> dict[str, Tensor]:
    """Room for the tensors of a snapshot: as large as the model, which is what the exchange is trusted with."""
    if any(tensor.dtype != pb.FP32 for tensor in header.tensors) or len(header.names) != len(header.tensors):
        raise MalformedMessage("a snapshot holds named tensors in fp32")
    return {name: torch.empty(*tensor.shape) for name, tensor in zip(header.names, header.tensors, strict=True)}
