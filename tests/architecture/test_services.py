"""The servers' methods agree with messages.proto: their names, and the messages that they take and return."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_type_hints

import grpc
import pytest
from google.protobuf.descriptor import Descriptor, MethodDescriptor, ServiceDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from hetero_pp.messages.messages_pb2 import Frame
from hetero_pp.rpc import relay, services, stage_link
from replica_groups.exchange import admission, server

SERVERS: list[tuple[ServiceDescriptor, type]] = [
    (services.EXCHANGE_SERVICE, server._Servicer),
    (services.ADMISSION_SERVICE, admission.Admission),
    (relay.SERVICE, relay.Relay),
    (stage_link.SERVICE, stage_link._NeighbourAuthenticator),
]


def _of(message: Descriptor, is_stream: bool) -> object:
    one = bytes if message is Frame.DESCRIPTOR else GetMessageClass(message)
    return Iterator[one] if is_stream else one  # type: ignore[valid-type]


@pytest.mark.parametrize(
    ("call", "server"),
    [(call, server) for service, server in SERVERS for call in service.methods],
    ids=lambda one: one.full_name if isinstance(one, MethodDescriptor) else "",
)
def test_a_method_takes_and_returns_what_its_call_does(call: MethodDescriptor, server: type) -> None:
    hints = list(get_type_hints(getattr(server, call.name)).values())
    if hints == [Message, grpc.ServicerContext, Any]:
        return  # answers several calls alike
    asked, reply = _of(call.input_type, call.client_streaming), _of(call.output_type, call.server_streaming)
    assert hints == [asked, grpc.ServicerContext, reply]
