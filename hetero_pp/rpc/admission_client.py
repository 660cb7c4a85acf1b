"""Admission of a host to a run: client of the calls of `service Admission`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import Any

import grpc
from google.protobuf.message import Message

from hetero_pp.config.links import EXCHANGE
from hetero_pp.core.errors import HeteroPPError, LinkTimeout, Refused, RunFailed, RunOver, StoreError, TooMuch
from hetero_pp.core.proxies import Route, route_to
from hetero_pp.core.units import format_seconds
from hetero_pp.messages import messages_pb2 as pb
from hetero_pp.rpc.certificates import Identity
from hetero_pp.rpc.channels import PROTOCOL_VERSION, is_reached, make_channel
from hetero_pp.rpc.handshake import require_trust
from hetero_pp.rpc.services import ADMISSION_SERVICE, calls_of

SECONDS = 30.0
"""Seconds within which an exchange that is there answers."""

_ERRORS: dict[grpc.StatusCode, type[HeteroPPError]] = {
    grpc.StatusCode.NOT_FOUND: RunOver,
    grpc.StatusCode.ABORTED: RunFailed,
    grpc.StatusCode.RESOURCE_EXHAUSTED: TooMuch,
    grpc.StatusCode.INTERNAL: StoreError,
}
"""Error for each status code of an exchange that answers; Refused for all others."""


def enrol(
    address: str,
    identity: Identity,
    request: bytes,
    seconds: float | None = None,
    on_wait: Callable[[float, float], None] = lambda *_: None,
) -> pb.EnrolReply:
    """Exchange a ticket, and a request for a certificate of a key, for a slot and the certificate.

    Raises Refused if there is no slot, RunOver or RunFailed if the run has ended. Raises StoreError if a disk or a
    store fails there, TooMuch if the host may ask again later. Raises LinkTimeout if the exchange does not answer
    within `seconds` (by default SECONDS). `on_wait` is called once if connecting takes long, with the seconds so far
    and in all.
    """
    asked = pb.EnrolRequest(version=PROTOCOL_VERSION, request=request)
    reply: pb.EnrolReply = _ask(address, identity, "Enrol", asked, seconds, on_wait, waits=True)
    return reply


def renew(address: str, identity: Identity) -> str:
    """Return a certificate, as PEM, that is valid for longer. Raises as `enrol`."""
    renewed: pb.Certificate = _ask(address, identity, "Renew", pb.RenewRequest())
    return renewed.pem


def give(address: str, identity: Identity) -> None:
    """Free a slot. Raises as `enrol`."""
    _ask(address, identity, "Give", pb.GiveRequest())


def status(address: str, identity: Identity, seconds: float | None = None) -> pb.StatusReply:
    """Return the run's status. Raises as `enrol`."""
    reply: pb.StatusReply = _ask(address, identity, "Status", pb.StatusRequest(), seconds, waits=True)
    return reply


class _NotServed(Refused):
    """The exchange has no such call."""


def preview(address: str, identity: Identity, seconds: float) -> pb.PreviewReply | None:
    """Return what a host can check before it joins; takes no slot. Raises as `enrol`.

    None means that the exchange is of an earlier version, which does not have this call.
    """
    try:
        reply: pb.PreviewReply = _ask(address, identity, "Preview", pb.PreviewRequest(), seconds, waits=True)
    except _NotServed:
        return None
    return reply


def _ask(
    address: str,
    identity: Identity,
    call: str,
    request: Message,
    seconds: float | None = None,
    on_wait: Callable[[float, float], None] = lambda *_: None,
    waits: bool = False,
) -> Any:
    """Make a call. `waits`: also wait for a connection that is not there yet."""
    seconds, route = SECONDS if seconds is None else seconds, route_to(address)
    with closing(make_channel(address, identity, EXCHANGE, route)) as channel:
        if not is_reached(channel, seconds / 10):
            require_trust(address, identity, route)
            on_wait(seconds / 10, seconds)
        try:
            return calls_of(ADMISSION_SERVICE, channel)[call](request, wait_for_ready=waits, timeout=seconds)
        except grpc.RpcError as error:
            raise _translated(error, address, seconds, route) from None


def _translated(error: grpc.RpcError, address: str, seconds: float, route: Route) -> HeteroPPError:
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return LinkTimeout(f"the exchange at {address} did not answer within {format_seconds(seconds)}{route.note}")
    if error.code() is grpc.StatusCode.UNAVAILABLE:
        return LinkTimeout(f"the exchange at {address} does not answer{route.note}")
    if error.code() is grpc.StatusCode.UNIMPLEMENTED:
        return _NotServed(f"the exchange at {address} does not admit hosts by tickets")
    return _ERRORS.get(error.code(), Refused)(str(error.details()))
