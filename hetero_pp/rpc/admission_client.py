"""How a host is let in to a run, and stays it: the client of the calls that rpc.admission serves."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import TypeVar

import grpc

from hetero_pp.errors import HeteroPPError, LinkTimeout, Refused
from hetero_pp.links import EXCHANGE
from hetero_pp.messages import messages_pb2 as pb
from hetero_pp.messages.messages_pb2_grpc import AdmissionStub
from hetero_pp.proxies import Route, route_to
from hetero_pp.rpc.certificates import Identity
from hetero_pp.rpc.channels import PROTOCOL_VERSION, make_channel, readiness
from hetero_pp.rpc.handshake import require_trust
from hetero_pp.units import format_seconds

SECONDS = 30.0
"""Within which an exchange that is there answers."""

Reply = TypeVar("Reply")


def enrol(address: str, identity: Identity, request: bytes) -> pb.EnrolReply:
    """A place and a certificate, for who shows a ticket and asks for a certificate of its key.

    Raises Refused if it gets none, LinkTimeout if the exchange does not answer.
    """
    asked = pb.EnrolRequest(version=PROTOCOL_VERSION, request=request)
    return _ask(address, identity, lambda calls: calls.Enrol(asked, wait_for_ready=True, timeout=SECONDS))


def renew(address: str, identity: Identity) -> str:
    """A certificate, as PEM, that holds for longer. Raises as `enrol`."""
    return _ask(address, identity, lambda calls: calls.Renew(pb.RenewRequest(), timeout=SECONDS)).pem


def give(address: str, identity: Identity) -> None:
    """Give a place back. Raises as `enrol`."""
    _ask(address, identity, lambda calls: calls.Give(pb.GiveRequest(), timeout=SECONDS))


def status(address: str, identity: Identity) -> pb.StatusReply:
    """Who is there. Raises as `enrol`."""
    return _ask(address, identity, lambda calls: calls.Status(pb.StatusRequest(), wait_for_ready=True, timeout=SECONDS))


def _ask(address: str, identity: Identity, call: Callable[[AdmissionStub], Reply]) -> Reply:
    route = route_to(address)
    with closing(make_channel(address, identity, EXCHANGE, route)) as channel:
        with readiness(channel) as ready:
            try:
                ready.result(SECONDS / 10)
            except grpc.FutureTimeoutError:
                require_trust(address, identity, route)
        try:
            return call(AdmissionStub(channel))
        except grpc.RpcError as error:
            raise _translated(error, address, route) from None


def _translated(error: grpc.RpcError, address: str, route: Route) -> HeteroPPError:
    if error.code() in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE):
        return LinkTimeout(f"the exchange at {address} did not answer within {format_seconds(SECONDS)}{route.note}")
    if error.code() is grpc.StatusCode.UNIMPLEMENTED:
        return Refused(f"the exchange at {address} lets nobody in by a ticket")
    return Refused(str(error.details()))
