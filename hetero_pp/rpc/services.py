"""Clients and handlers of the services in messages.proto, made from their descriptors, and errors as status codes.

A `Frame` of messages.proto stands for one frame of raw bytes; all other messages are what they say.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import grpc
from google.protobuf.descriptor import Descriptor, MethodDescriptor, ServiceDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from hetero_pp.core.errors import (
    AskAgain,
    ExchangeLost,
    Forbidden,
    HeteroPPError,
    IncarnationOver,
    InvalidRequest,
    MalformedMessage,
    Refused,
    ReplicasDiffer,
    RunFailed,
    RunOver,
    Suspended,
    TooMuch,
    WrongToken,
)
from hetero_pp.messages.messages_pb2 import DESCRIPTOR, Frame
from hetero_pp.messages.refusals import Kind
from hetero_pp.rpc.channels import RECEIVED_BYTES_MAX
from hetero_pp.rpc.limits import (
    CPU_SECONDS_AT_ONCE,
    CPU_SHARE,
    DEBT_SECONDS_MAX,
    REQUEST_BYTES_A_SECOND,
    REQUEST_BYTES_AT_ONCE,
    STALL_SECONDS,
    CallRate,
    OpenCalls,
    Pace,
    StreamWatch,
    close_connection,
)

EXCHANGE_SERVICE = DESCRIPTOR.services_by_name["Exchange"]
ADMISSION_SERVICE = DESCRIPTOR.services_by_name["Admission"]

LONGEST_WAIT = 20.0
"""Seconds after which a call that waits ends; the caller repeats it."""


class IncomingFrames(Iterator[bytes], Protocol):
    """Frames that are received on a stream."""

    def cancel(self) -> bool: ...


class Authenticator(Protocol):
    """Admission of callers to a service, and what is done about their requests."""

    def admit(self, call: str, context: grpc.ServicerContext) -> str:
        """Return the caller of a call. Raises Refused for callers that may not make it."""

    def refuse(self, sender: str, reason: str, kind: Kind) -> None:
        """Count a refusal."""

    def request_bytes_max(self, call: str) -> int:
        """Return the size of the largest request of a call."""

    def blame(self, context: grpc.ServicerContext, reason: str) -> None:
        """Count a request that no honest caller sends against the caller that proved to be its sender."""


_CODE_OF_ERROR: dict[type[HeteroPPError], grpc.StatusCode] = {
    WrongToken: grpc.StatusCode.UNAUTHENTICATED,
    Refused: grpc.StatusCode.PERMISSION_DENIED,
    MalformedMessage: grpc.StatusCode.INVALID_ARGUMENT,
    RunFailed: grpc.StatusCode.ABORTED,
    ReplicasDiffer: grpc.StatusCode.DATA_LOSS,
    IncarnationOver: grpc.StatusCode.FAILED_PRECONDITION,
    Suspended: grpc.StatusCode.OUT_OF_RANGE,
    AskAgain: grpc.StatusCode.DEADLINE_EXCEEDED,
    TooMuch: grpc.StatusCode.RESOURCE_EXHAUSTED,
    RunOver: grpc.StatusCode.NOT_FOUND,
    ExchangeLost: grpc.StatusCode.UNAVAILABLE,
}
ERROR_OF_CODE: dict[grpc.StatusCode, type[HeteroPPError]] = {
    grpc.StatusCode.PERMISSION_DENIED: Refused,
    grpc.StatusCode.INVALID_ARGUMENT: Refused,
    grpc.StatusCode.ABORTED: RunFailed,
    grpc.StatusCode.DATA_LOSS: ReplicasDiffer,
    grpc.StatusCode.FAILED_PRECONDITION: IncarnationOver,
    grpc.StatusCode.OUT_OF_RANGE: Suspended,
    grpc.StatusCode.DEADLINE_EXCEEDED: AskAgain,
    grpc.StatusCode.NOT_FOUND: RunOver,
}
"""Error that a caller raises for each status code."""


_DEPOSITS = ("Deposit", "Uploaded", "Show")
"""Calls whose work is useful once, and large in a large model. It costs no CPU budget if it is accepted."""

_STREAMED_SECONDS_MAX = 1.0
"""CPU seconds that a refused call with many replies counts for: it may have been open for long."""

REQUEST_SECONDS = STALL_SECONDS
"""Seconds after which a call whose request has not arrived is cut. 4 MiB take 34 s at 1 Mbit/s."""

BULK_CALLS_MAX = 3
"""Streams of frames that one caller may have open. It sends or fetches one at a time, and may retry after a lost
connection that the server has not noticed yet.
"""

_DETAILS_MAX = 2_000
"""Characters of an error. gRPC drops the status of a call whose details are too long."""


def call_path(service: ServiceDescriptor, call: str) -> str:
    return f"/{service.full_name}/{service.methods_by_name[call].name}"


def calls_of(service: ServiceDescriptor, channel: grpc.Channel) -> Mapping[str, Any]:
    """Return the calls of a service over a channel, by name: multicallables of gRPC that send and return messages."""
    makers = {
        (False, False): channel.unary_unary,
        (False, True): channel.unary_stream,
        (True, False): channel.stream_unary,
        (True, True): channel.stream_stream,
    }
    return {
        call.name: makers[call.client_streaming, call.server_streaming](
            call_path(service, call.name), _serializer(call.input_type), _parser(call.output_type)
        )
        for call in service.methods
    }


def service_handler(
    service: ServiceDescriptor,
    servicer: object,
    authenticator: Authenticator,
    most_open: int,
    most_in_all: Mapping[str, int] | None = None,
) -> grpc.GenericRpcHandler:
    """Return the handler of a service, for `make_server`. Each call goes to the servicer's method of its name.

    `authenticator` admits callers. `most_open`: calls that one caller may have open; `most_in_all`: call -> how many of
    all callers may be open. A HeteroPPError ends a call with its status code.
    """
    open_calls, open_streams = OpenCalls(most_open), OpenCalls(min(most_open, BULK_CALLS_MAX), "streams")
    rate, requests = CallRate(), StreamWatch(REQUEST_SECONDS)
    sent_bytes, cpu_seconds = Pace(REQUEST_BYTES_A_SECOND, REQUEST_BYTES_AT_ONCE), Pace(CPU_SHARE, CPU_SECONDS_AT_ONCE)
    in_all = {call: OpenCalls(most) for call, most in (most_in_all or {}).items()}
    handlers = {
        call.name: _call_handler(
            _Call(
                call,
                getattr(servicer, call.name),
                authenticator,
                open_calls,
                open_streams if _is_bulk(call) else None,
                in_all.get(call.name),
                rate,
                requests,
                sent_bytes=sent_bytes,
                cpu_seconds=cpu_seconds,
            )
        )
        for call in service.methods
    }
    return grpc.method_handlers_generic_handler(service.full_name, handlers)


@dataclass(frozen=True)
class _Call:
    """One call of a service."""

    method: MethodDescriptor
    answer: Callable[..., Any]
    authenticator: Authenticator
    open_calls: OpenCalls
    open_streams: OpenCalls | None
    """Counts the streams of frames of each caller; None for other calls."""
    in_all: OpenCalls | None
    """Counts this call of all callers; None if only each caller's own calls are bounded."""
    rate: CallRate
    requests: StreamWatch
    """Cuts calls whose request does not arrive."""
    sent_bytes: Pace
    cpu_seconds: Pace

    @contextmanager
    def entered(self, context: grpc.ServicerContext) -> Iterator[str]:
        """Admit a caller, and turn errors of the block into status codes. Yields the caller's name."""
        caller, began = None, time.thread_time()
        try:
            caller = self._admitted(context)
            due = self._due_in(caller, context)
            with self.open_calls.one_more(caller), self._one_more_stream(caller), self._one_more_of_all():
                time.sleep(min(due, DEBT_SECONDS_MAX))  # it holds one of the caller's own open calls
                if due > DEBT_SECONDS_MAX:
                    raise TooMuch(f"{caller} has spent its bytes or CPU seconds; it may call in {due:.0f} s")
                yield caller
        except HeteroPPError as error:
            if caller is not None and isinstance(error, MalformedMessage):
                self.authenticator.refuse(caller, str(error), Kind.MALFORMED)
            elif caller is not None and isinstance(error, Forbidden | TooMuch):
                self.authenticator.refuse(caller, str(error), Kind.FORBIDDEN)
            if caller is not None:
                most = _STREAMED_SECONDS_MAX if self.method.server_streaming else math.inf
                self.cpu_seconds.spend(caller, min(time.thread_time() - began, most))
                if isinstance(error, InvalidRequest):
                    self.authenticator.blame(context, str(error))
            _abort(context, error)
        if not self.method.server_streaming and self.method.name not in _DEPOSITS:
            self.cpu_seconds.spend(caller, time.thread_time() - began)

    def _one_more_stream(self, caller: str) -> AbstractContextManager[None]:
        return nullcontext() if self.open_streams is None else self.open_streams.one_more(caller)

    def _one_more_of_all(self) -> AbstractContextManager[None]:
        return nullcontext() if self.in_all is None else self.in_all.one_more(f"`{self.method.name}`")

    def _admitted(self, context: grpc.ServicerContext) -> str:
        """Return the caller. A refused call counts for its connection, because anybody may claim any name."""
        try:
            return self.authenticator.admit(self.method.name, context)
        except HeteroPPError:
            self._due_in(context.peer(), context)
            raise

    def _due_in(self, caller: str, context: grpc.ServicerContext) -> float:
        """Return the seconds that a call has to wait. Closes the connection of a caller that calls too often."""
        try:
            due = self.rate.due_in(caller)
        except TooMuch:
            close_connection(context.peer())
            raise
        return max(due, self.sent_bytes.debt_seconds(caller), self.cpu_seconds.debt_seconds(caller))

    def request(self, caller: str, messages: Iterator[bytes], context: grpc.ServicerContext) -> object:
        """Return the request; for streams and raw frames, the iterator of messages."""
        if self.method.client_streaming:
            return messages
        most = self.authenticator.request_bytes_max(self.method.name)
        try:
            with closing(self.requests.watched(messages, context)) as watched:
                message = next(watched, None)
        except grpc.RpcError:  # it was too long for gRPC, or the caller has canceled the call
            self.sent_bytes.spend(caller, RECEIVED_BYTES_MAX)
            raise
        self.sent_bytes.spend(caller, len(message or b""))
        return _parsed(self.method.input_type, message, most)


def _call_handler(call: _Call) -> grpc.RpcMethodHandler[Any, Any]:
    """Return the handler of a call. Requests are read as streams: gRPC would wait for a single one before `admit`."""

    def one(messages: Iterator[bytes], context: grpc.ServicerContext) -> object:
        with call.entered(context) as caller:
            return call.answer(call.request(caller, messages, context), context)

    def many(messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[object]:
        with call.entered(context) as caller:
            yield from call.answer(call.request(caller, messages, context), context)

    serializer = _serializer(call.method.output_type)
    if call.method.server_streaming:
        return grpc.stream_stream_rpc_method_handler(many, None, serializer)
    return grpc.stream_unary_rpc_method_handler(one, None, serializer)


def _is_bulk(call: MethodDescriptor) -> bool:
    """Return whether a call sends a payload in frames in one direction."""
    return (call.input_type is Frame.DESCRIPTOR) != (call.output_type is Frame.DESCRIPTOR)


def _parsed(kind: Descriptor, message: bytes | None, most: int) -> Message:
    if message is None:
        raise MalformedMessage("found the end of the call, expected a request")
    if len(message) > most:
        raise InvalidRequest(f"found {len(message)} bytes of {kind.name}, expected at most {most}")
    try:
        return GetMessageClass(kind).FromString(message)
    except DecodeError:
        raise InvalidRequest(f"found {len(message)} bytes that are no {kind.name}") from None


def _serializer(message: Descriptor) -> Callable[[Message], bytes] | None:
    return None if message is Frame.DESCRIPTOR else GetMessageClass(message).SerializeToString


def _parser(message: Descriptor) -> Callable[[bytes], Message] | None:
    return None if message is Frame.DESCRIPTOR else GetMessageClass(message).FromString


def _abort(context: grpc.ServicerContext, error: HeteroPPError) -> NoReturn:
    for kind, code in _CODE_OF_ERROR.items():
        if isinstance(error, kind):
            context.abort(code, str(error)[:_DETAILS_MAX])
    context.abort(grpc.StatusCode.INTERNAL, str(error)[:_DETAILS_MAX])
