"""Clients and handlers of the services in messages.proto, made from their descriptors, and errors as status codes.

A `Frame` of messages.proto stands for one frame of raw bytes; all other messages are what they say.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from typing import Any, Protocol

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
    BULK_CALLS_MAX,
    CPU_SECONDS_AT_ONCE,
    CPU_SHARE,
    DEBT_SECONDS_MAX,
    REQUEST_BYTES_A_SECOND,
    REQUEST_BYTES_AT_ONCE,
    REQUEST_SECONDS,
    CallRate,
    OpenCalls,
    Pace,
    StreamWatch,
    close_connection,
)

EXCHANGE_SERVICE = DESCRIPTOR.services_by_name["Exchange"]
ADMISSION_SERVICE = DESCRIPTOR.services_by_name["Admission"]


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

_DETAILS_MAX = 2_000  # characters of an error. gRPC drops the status of a call whose details are too long


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
            call_path(service, call.name),
            _serializer(call.input_type),
            None if call.output_type is Frame.DESCRIPTOR else GetMessageClass(call.output_type).FromString,
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
    gate = _Gate(authenticator, most_open, most_in_all or {})
    handlers = {call.name: gate.handler(call, getattr(servicer, call.name)) for call in service.methods}
    return grpc.method_handlers_generic_handler(service.full_name, handlers)


class _Gate:
    """The checks that every call of a service passes: admission, and the limits of each caller."""

    def __init__(self, authenticator: Authenticator, most_open: int, most_in_all: Mapping[str, int]) -> None:
        self._authenticator = authenticator
        self._open_calls = OpenCalls(most_open)
        self._open_streams = OpenCalls(min(most_open, BULK_CALLS_MAX), "streams")
        self._in_all = {call: OpenCalls(most) for call, most in most_in_all.items()}
        """Counts a call of all callers together."""
        self._rate, self._requests = CallRate(), StreamWatch(REQUEST_SECONDS)
        self._sent_bytes = Pace(REQUEST_BYTES_A_SECOND, REQUEST_BYTES_AT_ONCE)
        self._cpu_seconds = Pace(CPU_SHARE, CPU_SECONDS_AT_ONCE)

    def handler(self, call: MethodDescriptor, answer: Callable[..., Any]) -> grpc.RpcMethodHandler[Any, Any]:
        """Return the handler of a call. Requests are read as streams: gRPC would wait for one before `admit`."""

        def one(messages: Iterator[bytes], context: grpc.ServicerContext) -> object:
            with self._entered(call, context) as caller:
                return answer(self._request(call, caller, messages, context), context)

        def many(messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[object]:
            with self._entered(call, context) as caller:
                yield from answer(self._request(call, caller, messages, context), context)

        serializer = _serializer(call.output_type)
        if call.server_streaming:
            return grpc.stream_stream_rpc_method_handler(many, None, serializer)
        return grpc.stream_unary_rpc_method_handler(one, None, serializer)

    @contextmanager
    def _entered(self, call: MethodDescriptor, context: grpc.ServicerContext) -> Iterator[str]:
        """Admit a caller, and turn errors of the block into status codes. Yields the caller's name."""
        caller, began = None, time.thread_time()
        try:
            try:
                caller = self._authenticator.admit(call.name, context)
            except HeteroPPError:
                self._due_in(context.peer(), context)  # counts for its connection: anybody may claim any name
                raise
            due = self._due_in(caller, context)
            with ExitStack() as stack:
                stack.enter_context(self._open_calls.one_more(caller))
                if (call.input_type is Frame.DESCRIPTOR) != (call.output_type is Frame.DESCRIPTOR):
                    stack.enter_context(self._open_streams.one_more(caller))  # a payload in frames in one direction
                if call.name in self._in_all:
                    stack.enter_context(self._in_all[call.name].one_more(f"`{call.name}`"))
                time.sleep(min(due, DEBT_SECONDS_MAX))  # it holds one of the caller's own open calls
                if due > DEBT_SECONDS_MAX:
                    raise TooMuch(f"{caller} has spent its bytes or CPU seconds; it may call in {due:.0f} s")
                yield caller
        except HeteroPPError as error:
            if caller is not None:
                if isinstance(error, MalformedMessage):
                    self._authenticator.refuse(caller, str(error), Kind.MALFORMED)
                elif isinstance(error, Forbidden | TooMuch):
                    self._authenticator.refuse(caller, str(error), Kind.FORBIDDEN)
                most = _STREAMED_SECONDS_MAX if call.server_streaming else math.inf
                self._cpu_seconds.spend(caller, min(time.thread_time() - began, most))
                if isinstance(error, InvalidRequest):
                    self._authenticator.blame(context, str(error))
            code = next((code for kind, code in _CODE_OF_ERROR.items() if isinstance(error, kind)), None)
            context.abort(code or grpc.StatusCode.INTERNAL, str(error)[:_DETAILS_MAX])
        if not call.server_streaming and call.name not in _DEPOSITS:
            self._cpu_seconds.spend(caller, time.thread_time() - began)

    def _due_in(self, caller: str, context: grpc.ServicerContext) -> float:
        """Return the seconds that a call has to wait. Closes the connection of a caller that calls too often."""
        try:
            due = self._rate.due_in(caller)
        except TooMuch:
            close_connection(context.peer())
            raise
        return max(due, self._sent_bytes.debt_seconds(caller), self._cpu_seconds.debt_seconds(caller))

    def _request(
        self, call: MethodDescriptor, caller: str, messages: Iterator[bytes], context: grpc.ServicerContext
    ) -> object:
        """Return the request; for streams and raw frames, the iterator of messages."""
        if call.client_streaming:
            return messages
        kind, most = call.input_type, self._authenticator.request_bytes_max(call.name)
        try:
            with closing(self._requests.watched(messages, context)) as watched:
                message = next(watched, None)
        except grpc.RpcError:  # it was too long for gRPC, or the caller has canceled the call
            self._sent_bytes.spend(caller, RECEIVED_BYTES_MAX)
            raise
        self._sent_bytes.spend(caller, len(message or b""))
        if message is None:
            raise MalformedMessage("found the end of the call, expected a request")
        if len(message) > most:  # refused by its length, because parsing can take a hundred times as much memory
            raise InvalidRequest(f"found {len(message)} bytes of {kind.name}, expected at most {most}")
        try:
            return GetMessageClass(kind).FromString(message)
        except DecodeError:
            raise InvalidRequest(f"found {len(message)} bytes that are no {kind.name}") from None


def _serializer(message: Descriptor) -> Callable[[Message], bytes] | None:
    return None if message is Frame.DESCRIPTOR else GetMessageClass(message).SerializeToString
