"""The services of messages.proto: the handlers of one, from its descriptor, and errors as status codes.

In a call, a Frame of the .proto is one frame of raw bytes; everything else is the message that it says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NoReturn

import grpc
from google.protobuf.descriptor import Descriptor, MethodDescriptor, ServiceDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from hetero_pp.errors import (
    HeteroPPError,
    MalformedMessage,
    Refused,
    ReplicasDiffer,
    RunFailed,
    Suspended,
    TermOver,
    WrongToken,
)
from hetero_pp.messages.messages_pb2 import Frame

Admit = Callable[[str, grpc.ServicerContext], None]
"""Raises a HeteroPPError for who is not let in to the call of this name."""

AdmitHere = Callable[[grpc.ServicerContext], None]

_CODE_OF_ERROR: dict[type[HeteroPPError], grpc.StatusCode] = {
    WrongToken: grpc.StatusCode.UNAUTHENTICATED,
    Refused: grpc.StatusCode.PERMISSION_DENIED,
    MalformedMessage: grpc.StatusCode.INVALID_ARGUMENT,
    RunFailed: grpc.StatusCode.ABORTED,
    ReplicasDiffer: grpc.StatusCode.DATA_LOSS,
    TermOver: grpc.StatusCode.FAILED_PRECONDITION,
    Suspended: grpc.StatusCode.OUT_OF_RANGE,
}
ERROR_OF_CODE: dict[grpc.StatusCode, type[HeteroPPError]] = {
    grpc.StatusCode.PERMISSION_DENIED: Refused,
    grpc.StatusCode.INVALID_ARGUMENT: Refused,
    grpc.StatusCode.ABORTED: RunFailed,
    grpc.StatusCode.DATA_LOSS: ReplicasDiffer,
    grpc.StatusCode.FAILED_PRECONDITION: TermOver,
    grpc.StatusCode.OUT_OF_RANGE: Suspended,
}
"""As what a caller raises an error of the other side."""


def call_path(service: ServiceDescriptor, call: str) -> str:
    """What a call of a service is asked for by."""
    return f"/{service.full_name}/{service.methods_by_name[call].name}"


def service_handler(service: ServiceDescriptor, servicer: object, admit: Admit) -> grpc.GenericRpcHandler:
    """For `make_server`: every call of a service, guarded by `admit`, goes to the servicer's method of its name.

    A HeteroPPError that either raises ends the call with its status code.
    """
    handlers = {call.name: _call_handler(call, getattr(servicer, call.name), admit) for call in service.methods}
    return grpc.method_handlers_generic_handler(service.full_name, handlers)


def _call_handler(call: MethodDescriptor, answer: Callable[..., Any], admit: Admit) -> grpc.RpcMethodHandler[Any, Any]:
    make = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }[call.client_streaming, call.server_streaming]
    guarded = _guarded_stream if call.server_streaming else _guarded
    return make(guarded(answer, partial(admit, call.name)), _parser(call.input_type), _serializer(call.output_type))


def _parser(message: Descriptor) -> Callable[[bytes], Message] | None:
    return None if message is Frame.DESCRIPTOR else GetMessageClass(message).FromString


def _serializer(message: Descriptor) -> Callable[[Message], bytes] | None:
    return None if message is Frame.DESCRIPTOR else GetMessageClass(message).SerializeToString


def _guarded(answer: Callable[..., object], admit: AdmitHere) -> Callable[..., object]:
    def call(request: object, context: grpc.ServicerContext) -> object:
        try:
            admit(context)
            return answer(request, context)
        except HeteroPPError as error:
            _abort(context, error)

    return call


def _guarded_stream(answer: Callable[..., Iterator[object]], admit: AdmitHere) -> Callable[..., Iterator[object]]:
    def call(request: object, context: grpc.ServicerContext) -> Iterator[object]:
        try:
            admit(context)
            yield from answer(request, context)
        except HeteroPPError as error:
            _abort(context, error)

    return call


def _abort(context: grpc.ServicerContext, error: HeteroPPError) -> NoReturn:
    for kind, code in _CODE_OF_ERROR.items():
        if isinstance(error, kind):
            context.abort(code, str(error))
    context.abort(grpc.StatusCode.INTERNAL, str(error))
