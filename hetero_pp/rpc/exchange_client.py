"""Client of the exchange at an address, for one member: makes the calls of `service Exchange`."""

from __future__ import annotations

import hashlib
import math
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import grpc
import torch
from google.protobuf.message import Message
from torch import Tensor

from hetero_pp.config.lines import EXCHANGE
from hetero_pp.core.errors import (
    AskAgain,
    ExchangeLost,
    LinkTimeout,
    MalformedMessage,
    Refused,
    StoreError,
    WrongToken,
)
from hetero_pp.core.proxies import route_to
from hetero_pp.core.units import format_seconds
from hetero_pp.link.framing import header_and_payload_frames, read_frames, read_into
from hetero_pp.link.protocol import FRAME_BYTES
from hetero_pp.messages import messages_pb2 as pb
from hetero_pp.pseudo_gradient.contribution import MAX_BLOB_BYTES, payload_bytes, split_blobs
from hetero_pp.rpc.callers import Metadata, shown
from hetero_pp.rpc.channels import PROTOCOL_VERSION, answering, is_reached, make_channel, new_run, require_trust
from hetero_pp.rpc.exchange_service import (
    FIRST_TOLD,
    MOST_BETWEEN,
    Arrived,
    Caller,
    ExchangeService,
    call_of,
    untold,
)
from hetero_pp.rpc.identities import Credentials
from hetero_pp.rpc.limits import (
    AGAIN_SECONDS,
    ANSWER_SECONDS,
    HEARTBEAT_TIMEOUT,
    REPORTS_BYTES_MAX,
    SECONDS_BETWEEN_LOOKS,
    STANDSTILL,
    STATES_MAX,
    STREAM_SECONDS,
    make_plain,
)
from hetero_pp.rpc.services import ERROR_OF_CODE, EXCHANGE_SERVICE, calls_of
from hetero_pp.store.presigned import download, download_range, is_of, upload, without_signature


class ExchangeWires:
    """The two connections to an exchange, and their calls."""

    def __init__(self, address: str, credentials: Credentials) -> None:
        self.address, self.identity = address, None if credentials.identity is None else credentials.identity.latest
        self.route = route_to(address)
        self.control = make_channel(address, self.identity, EXCHANGE, self.route)
        # A second connection for payloads, which would delay everything else on a slow line.
        self.bulk = make_channel(address, self.identity, EXCHANGE, self.route)
        bulk = calls_of(EXCHANGE_SERVICE, self.bulk)
        self.calls = {**calls_of(EXCHANGE_SERVICE, self.control), **{name: bulk[name] for name in _BULK}}

    def close(self) -> None:
        """Close both connections; calls in progress fail."""
        self.control.close()
        self.bulk.close()


_BULK = ("RunCheckpoint", "Deposit", "Show", "Fetch")  # calls with payloads
_ENTRY_BYTES = 6  # largest tag and length of a report in a request
SECONDS_OF_A_URL = 300.0
"""Seconds after which a new URL is asked for. An exchange signs for longer, but clocks differ."""
_AT_ONCE = 1.0  # seconds to connect before looking for the reason why there is no connection

Answer = TypeVar("Answer")


class ExchangeClient(ExchangeService):
    """The exchange at an address, as one member sees it. The credentials name the caller, whatever `caller` says."""

    def __init__(
        self,
        address: str,
        credentials: Credentials,
        run: str | None = None,
        timeout: float | None = None,
        stores: Sequence[str] = (),
    ) -> None:
        """`address`: HOST:PORT of each host that may serve the exchange, with commas between them.

        `run`: the run that the caller expects, which the exchange compares with its own.

        `stores`: allowed targets of the URLs that the exchange signs, as SCHEME://HOST[:PORT]; without any,
        contributions pass through the exchange. `timeout`: seconds that `agree` and `join` wait for the exchange to
        come up; None: no limit.
        """
        self.address = address
        self._timeout = timeout
        self._credentials, self._run = credentials, run
        self._wires = ExchangeWires(address.partition(",")[0], credentials)
        self._moving = threading.Lock()
        self._was_trusted = False  # whether the exchange has ever proved to be of this process's run
        self._incarnation: int | None = None
        self._stay: grpc.Future[pb.Nothing] | None = None
        self._process = secrets.token_hex(8)
        self._stores = stores
        self._reaches_store = bool(stores)
        """Whether blobs go by the store; False once the store failed or the exchange signs no URLs."""
        self._ahead: dict[tuple[int, str, str], bytes] = {}
        """Blobs that came with the last one that was fetched, by round, replica and block."""
        self._told: set[str] = set()  # exchange processes that took a deposit since the last request for a record
        self._closed = threading.Event()

    @property
    def has_joined(self) -> bool:
        """Whether the exchange has admitted this member."""
        return self._stay is not None

    def close(self) -> None:
        """Close the connections; calls in progress fail."""
        self._closed.set()
        if self._stay is not None:
            self._stay.cancel()
        self._wires.close()

    @property
    def _metadata(self) -> Metadata:
        return shown(self._credentials, self._run, self._incarnation)

    def call(self, request: Message, caller: Caller) -> Any:
        """Make a call as this client's member, and repeat it until an exchange that is gone for a while has answered.

        `agree` and `join` also wait for an exchange that has never answered; they raise LinkTimeout if it does not come
        up in time. A heartbeat is sent once: it raises LinkClosed if the exchange does not answer at once.
        """
        match request:
            case pb.HeartbeatRequest():
                try:
                    reply = self._once("Heartbeat", request, HEARTBEAT_TIMEOUT)
                except (AskAgain, ExchangeLost):
                    # A host that is frozen keeps its connections, and calls of this member would wait for a minute.
                    if "," in self.address:
                        self._has_reached(_AT_ONCE)
                    raise ExchangeLost(f"the exchange at {self.address} does not answer at once") from None
                if self._stay is not None and self._stay.done() and not self._closed.is_set():
                    self.stay()  # the exchange was gone, and is there again
                return reply
            case pb.RecordRequest():
                return self._record(request)
            case pb.JoinRequest():
                request.version, request.process = PROTOCOL_VERSION, request.process or self._process
                request.rounds[:], request.damaged[:] = request.rounds[-STATES_MAX:], request.damaged[-STATES_MAX:]
                make_plain(request)
                joined: pb.JoinReply = self._ask(request, wait=True)
                self._incarnation = joined.incarnation
                self.stay()
                return joined
            case pb.ReportRequest():
                # In parts that the exchange takes, with texts as long as it takes them.
                part, size = pb.ReportRequest(), 0
                for report in request.reports:
                    make_plain(report)
                    own = report.ByteSize() + _ENTRY_BYTES
                    if part.reports and size + own > REPORTS_BYTES_MAX:
                        self._ask(part)
                        part, size = pb.ReportRequest(), 0
                    part.reports.append(report)
                    size += own
                return self._ask(part)
            case pb.BrokenRequest() | pb.DiedRequest():
                make_plain(request)
            case pb.AgreeRequest():
                agreed: pb.AgreeReply = self._ask(request, wait=True)
                self._run = agreed.run
                return agreed
        return self._ask(request)

    def stay(self, node: str = "") -> None:
        """Show from now on that this process is there; `node`: as a host beside the one that has joined."""
        if self._stay is not None:
            self._stay.cancel()
        self._stay = self._wires.calls["Stay"].future(pb.StayRequest(node=node), metadata=self._metadata)

    def read_checkpoint(
        self, request: pb.CheckpointRequest, caller: Caller, arrived: Arrived = untold
    ) -> dict[str, Tensor]:
        tensors, by_store = dict[str, Tensor](), True
        while any(name not in tensors for name in request.names):
            try:
                self._again(partial(self._read_tensors, request, by_store, tensors, arrived))
            except StoreError as error:
                self._do_without(error)
            except FileNotFoundError:
                by_store = False  # it was removed meanwhile, and the exchange has it open
        return {name: tensors[name] for name in request.names}

    def _read_tensors(
        self, request: pb.CheckpointRequest, by_store: bool, tensors: dict[str, Tensor], arrived: Arrived
    ) -> None:
        """Add tensors of a run checkpoint to `tensors`: all that it lacks, or as many as come while a URL is valid."""
        asked = pb.CheckpointRequest(names=[name for name in request.names if name not in tensors])
        if request.HasField("round"):  # else the next request might be for a later run checkpoint
            asked.round, asked.reaches_store = request.round, by_store and self._reaches_store
        until, came = time.monotonic() + SECONDS_OF_A_URL, dict[str, Tensor]()

        def room_for(header: pb.CheckpointHeader) -> Iterator[memoryview]:
            """Return as much memory as the exchange says: it is trusted with the model's size."""
            if header.names != asked.names:
                raise MalformedMessage(f"found the tensors {list(header.names)}, expected {list(asked.names)}")
            if any(tensor.dtype != pb.FP32 for tensor in header.tensors) or len(header.tensors) != len(header.names):
                raise MalformedMessage("a run checkpoint holds named tensors in fp32")
            if header.url and {len(header.starts), len(header.sha256)} != {len(header.names)}:
                raise MalformedMessage("found a URL without a place and a digest of each tensor")
            shapes = zip(header.names, header.tensors, strict=True)
            came.update({name: torch.empty(*tensor.shape) for name, tensor in shapes} if not header.url else {})
            return map(_bytes_of, came.values())

        frames = self._stream("RunCheckpoint", asked, STREAM_SECONDS)
        header = read_into(frames, pb.CheckpointHeader, room_for, arrived)
        tensors.update(came)
        if not header.url:
            return
        self._require_store(header.url)
        for name, part, start, digest in zip(header.names, header.tensors, header.starts, header.sha256, strict=True):
            tensor = torch.empty(*part.shape)
            download_range(header.url, start, _bytes_of(tensor), STANDSTILL, arrived)
            if hashlib.sha256(_bytes_of(tensor)).digest() != digest:
                raise StoreError(f"{without_signature(header.url)}: {name} does not match its digest")
            tensors[name] = tensor
            if time.monotonic() > until:  # the URL is for some minutes, the rest of a large model may take hours
                return

    def deposit_blob(self, header: pb.BlobHeader, data: bytes, caller: Caller) -> None:
        """Deposit blobs: together, but by the store each has its own URL."""
        if header.following and self._reaches_store:
            for one in split_blobs(header, data):
                self.deposit_blob(*one, caller)
            return
        taken = self._again(lambda: self._upload(header, data) or self._send("Deposit", header, [data]))
        self._told.add(taken.exchange)

    def _upload(self, header: pb.BlobHeader, data: bytes) -> pb.DepositReply | None:
        """Deposit a blob by way of the store; return None if that cannot be done."""
        if not self._reaches_store:
            return None
        request = pb.BlobHeader(sha256=hashlib.sha256(data).digest())
        request.MergeFrom(header)
        try:
            reply: pb.DepositReply = self._once("UploadUrl", request)
            if not reply.HasField("url"):
                self._reaches_store = False
                return None
            if reply.url:
                self._require_store(reply.url)
                upload(reply.url, data, STANDSTILL)
            return cast("pb.DepositReply", self._once("Uploaded", request))
        except StoreError as error:
            self._do_without(error)
            return None

    def _require_store(self, url: str) -> None:
        """Raise StoreError unless a URL is of this run's store: an exchange sends its members nowhere else."""
        if not is_of(url, self._stores):
            raise StoreError(f"found {without_signature(url)}, expected a URL of {' or '.join(self._stores)}")

    def _do_without(self, error: StoreError) -> None:
        """Go through the exchange from now on, because this member does not reach the store."""
        self._reaches_store = False
        print(
            f"{error}; contributions and run checkpoints go through the exchange from now on",
            file=sys.stderr,
            flush=True,
        )

    def _send(self, call: str, header: Message, buffers: Iterable[bytes]) -> Any:
        with self._translated():
            frames = header_and_payload_frames(header, buffers)
            return self._wires.calls[call](frames, metadata=self._metadata, timeout=STREAM_SECONDS)

    def _record(self, request: pb.RecordRequest) -> pb.RoundRecord:
        """Wait for a record. Raises ExchangeLost if the exchange was gone meanwhile, once it is there again.

        The deposits of the round may then have to be repeated.
        """
        told, self._told = self._told, set()
        if len(told) > 1:
            raise ExchangeLost(f"the exchange at {self.address} disconnected during round {request.round}")
        request.exchange = "".join(told)
        while True:
            try:
                return cast("pb.RoundRecord", self._once("Record", request))
            except AskAgain:
                continue
            except ExchangeLost as lost:
                self._await_return(lost)
                raise

    def fetch_blob(self, request: pb.FetchRequest, caller: Caller) -> bytes:
        """Return one blob of a closed round. Small blobs come many at a time, because each call has its own cost."""
        ahead = self._ahead.pop((request.round, request.replica, request.block), None)
        return self._again(lambda: self._fetch(request, self._reaches_store)) if ahead is None else ahead

    def _fetch(self, request: pb.FetchRequest, by_store: bool) -> bytes:
        request.reaches_store = by_store
        frames = self._stream("Fetch", request, STREAM_SECONDS)
        header, data = read_frames(frames, pb.BlobHeader, payload_bytes, MAX_BLOB_BYTES)
        if not header.url:
            self._ahead, start = {}, header.size
            for one in header.following:
                self._ahead[request.round, one.replica, request.block] = bytes(data[start : start + one.size])
                start += one.size
            return bytes(data[: header.size])
        try:
            self._require_store(header.url)
            if header.size > MAX_BLOB_BYTES:
                raise MalformedMessage(
                    f"found a contribution of {header.size:,} bytes, expected at most {MAX_BLOB_BYTES:,}"
                )
            stored = download(header.url, header.size, STANDSTILL)
            if hashlib.sha256(stored).digest() != header.sha256:
                raise StoreError(f"{without_signature(header.url)} does not match its digest")
            return stored
        except StoreError as error:
            self._do_without(error)
        except FileNotFoundError:
            pass  # the exchange says why
        return self._fetch(request, by_store=False)

    def show_file(self, header: pb.ShownFile, path: Path, caller: Caller) -> None:
        def send() -> None:
            with path.open("rb") as file:
                self._send("Show", header, iter(partial(file.read, FRAME_BYTES), b""))

        self._again(send)

    def wait_until_ready(
        self,
        seconds: float,
        on_wait: Callable[[float], None] = lambda _: None,
        on_refused: Callable[[str], None] = lambda cause: print(cause, file=sys.stderr, flush=True),
    ) -> None:
        """Wait for the connection to the exchange. `on_wait` gets the seconds waited so far, at growing intervals.

        Raises LinkTimeout, or Refused if the two are not of one run. Once the exchange has been trusted, `on_refused`
        gets the reason and Refused is raised only after `seconds`, so that another server at the exchange's address
        cannot end a member.
        """
        waited, due = 0.0, FIRST_TOLD
        refused: Refused | None = None
        if self._has_reached(min(_AT_ONCE, seconds)):
            return
        while waited < seconds and not self._closed.is_set():
            before, refused, identity = refused, None, self._credentials.identity
            try:  # find out why no connection is possible, if one attempt shows it
                latest = None if identity is None else identity.latest
                require_trust(self._wires.address, latest, self._wires.route)
            except WrongToken as error:
                refused = self._new_run() if self._was_trusted else error
            except Refused as error:
                refused = error
            if refused is not None and not self._was_trusted:
                raise refused
            if refused is not None and str(refused) != str(before):
                on_refused(str(refused))
            step = min(due - waited, SECONDS_BETWEEN_LOOKS, seconds - waited)
            if self._has_reached(step):
                return
            waited += step
            if waited >= min(due, seconds):
                on_wait(waited)
                due = waited + min(waited, MOST_BETWEEN)
        raise refused or self._does_not_answer(seconds)

    def _has_reached(self, seconds: float) -> bool:
        """Return whether the exchange answers within some seconds. Moves to the one of several hosts that does."""
        found = answering(self.address, self._wires.identity, seconds)
        with self._moving:
            if found is not None and found != (wires := self._wires).address and not self._closed.is_set():
                self._wires = ExchangeWires(found, self._credentials)
                wires.close()
        self._was_trusted |= (reached := found is not None and is_reached(self._wires.control, seconds))
        return reached

    def _new_run(self) -> Refused:
        return new_run(self.address, "token", "copy the new token to this host")

    def _does_not_answer(self, seconds: float) -> LinkTimeout:
        within = f"{format_seconds(seconds)}{self._wires.route.note}"
        return LinkTimeout(f"the exchange at {self.address} did not answer within {within}; giving up")

    def watch(self, members: Sequence[str] = (), so_far: bool = False) -> Iterator[pb.Report]:
        """Yield reports as `Watchers.watch` does, until the run is over."""
        return self._stream("Watch", pb.WatchRequest(members=members, so_far=so_far))

    def _once(self, call: str, request: Message, seconds: float = ANSWER_SECONDS) -> Any:
        with self._translated():
            return self._wires.calls[call](request, metadata=self._metadata, timeout=seconds)

    def _ask(self, request: Message, wait: bool = False) -> Any:
        """Make a call. `wait`: also wait for an exchange that has never answered."""
        name = call_of(request).name
        limit = self._timeout if wait and self._timeout is not None else math.inf
        until = time.monotonic() + limit
        if wait:
            self.wait_until_ready(limit)

        def ask() -> Any:
            if (left := until - time.monotonic()) <= 0:
                raise self._does_not_answer(limit)
            with self._translated():
                ask_once, seconds = self._wires.calls[name], min(left, ANSWER_SECONDS)
                return ask_once(request, metadata=self._metadata, wait_for_ready=wait, timeout=seconds)

        return self._again(ask, wait)

    def _again(self, ask: Callable[[], Answer], waits: bool = False) -> Answer:
        """Repeat a call until an exchange that is gone for a while has answered; if it `waits`, before joining, too."""
        while True:
            try:
                return ask()
            except AskAgain:
                continue
            except ExchangeLost as lost:
                self._await_return(lost, waits)
                self.pause()

    def pause(self) -> None:
        """Pause before a failed call is repeated."""
        self._closed.wait(AGAIN_SECONDS)

    def _await_return(self, lost: ExchangeLost, waits: bool = False) -> None:
        """Wait until the exchange is there again. Raises `lost` if it is closed, or has not joined and not `waits`."""
        if not (self.has_joined or waits) or self._closed.is_set():
            raise lost
        used = self._wires.identity
        if used is not None and used.latest != used:  # renewed since, so that these connections cannot be restored
            self._wires.close()
            self._wires = ExchangeWires(self._wires.address, self._credentials)
        wires = None
        while wires is not self._wires:  # another thread may move to another host meanwhile
            self.wait_until_ready(math.inf if self._timeout is None else self._timeout)
            wires = self._wires
            if is_reached(wires.bulk, self._timeout):  # what failed may have gone over the other connection
                return
        raise self._does_not_answer(self._timeout or math.inf)

    def _stream(self, call: str, request: Message, timeout: float | None = None) -> Iterator[Any]:
        with self._translated():
            yield from self._wires.calls[call](request, metadata=self._metadata, timeout=timeout)

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """Raise the error that a status code stands for."""
        try:
            yield
        except grpc.RpcError as error:
            code, details = error.code(), error.details()
            if code is grpc.StatusCode.UNAUTHENTICATED and self.has_joined:
                raise self._new_run() from None
            if code is grpc.StatusCode.UNAUTHENTICATED:
                raise WrongToken(f"the exchange at {self.address} was started with another token") from None
            if code in ERROR_OF_CODE:
                raise ERROR_OF_CODE[code](details) from None
            cause = f"({code.name.lower()}: {details}){self._wires.route.note}"
            raise ExchangeLost(f"the exchange at {self.address} does not answer {cause}") from None


def _bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous tensor, which can be written to."""
    data: memoryview = tensor.view(-1).view(torch.uint8).numpy().data
    return data
