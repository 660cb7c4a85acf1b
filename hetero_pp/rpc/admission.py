"""Who is let in to a run that goes on: tickets become certificates, which are renewed, and given back.

Served beside the exchange. Whose each call is, is in permissions.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import grpc

from hetero_pp.errors import Refused
from hetero_pp.messages import messages_pb2 as pb
from hetero_pp.messages.messages_pb2_grpc import AdmissionServicer
from hetero_pp.rpc.callers import Callers, Guests, shown_certificate
from hetero_pp.rpc.certificates import Authority, certified_key, digest_of, requested_key
from hetero_pp.rpc.channels import PROTOCOL_VERSION

SERVICE = pb.DESCRIPTOR.services_by_name["Admission"]

CERTIFICATE_SECONDS = 24 * 3600.0
"""For so long a certificate holds that was asked for by a ticket; who holds it renews it at half of that."""


class Holder(Protocol):
    """Of a place, by an invitation."""

    @property
    def place(self) -> str: ...

    @property
    def number(self) -> int: ...

    @property
    def until(self) -> float: ...


class Host(Guests, Protocol):
    """Who decides whom to let in, and remembers it."""

    def enrol(self, ticket: str, key: bytes, vacant: Collection[str], seconds: float) -> Holder: ...

    def renew(self, place: str, number: int, key: bytes, seconds: float) -> Holder: ...

    def end(self, place: str, number: int, why: str) -> None: ...

    def held_by(self, place: str) -> Holder | None:
        """Who holds a place; None if nobody does that was invited."""


class Places(Protocol):
    """Of a run that goes on."""

    def vacant(self) -> Sequence[str]:
        """Those at which nobody is."""

    def status(self) -> pb.StatusReply:
        """Who is where."""

    def died(self, member: str, cause: str, term: int | None = None) -> None: ...


@dataclass(frozen=True)
class Told:
    """What whoever is let in is told of the run."""

    configuration: str
    """As JSON, without what is of the exchange's host alone."""
    tokenizer: Mapping[str, bytes] = field(default_factory=dict)
    """Its files, by name."""


class Admission(AdmissionServicer):
    """One method per call."""

    def __init__(
        self,
        host: Host,
        authority: Authority,
        callers: Callers,
        places: Places,
        told: Told,
        relayed: Callable[[str], int],
    ) -> None:
        """`relayed`: by member, bytes that went through the relay."""
        self._host, self._authority, self._callers, self._places, self._told = host, authority, callers, places, told
        self._relayed = relayed

    def Enrol(self, request: pb.EnrolRequest, context: grpc.ServicerContext) -> pb.EnrolReply:
        if request.version != PROTOCOL_VERSION:
            found = f"found version {request.version} of the protocol, expected {PROTOCOL_VERSION}"
            raise Refused(f"{found}: install the version of hetero-pp that the run has")
        ticket, key = self._callers.of(context).ticket, requested_key(request.request)
        assert ticket is not None
        holder = self._host.enrol(ticket, digest_of(key), self._places.vacant(), CERTIFICATE_SECONDS)
        return pb.EnrolReply(
            place=holder.place,
            certificate=pb.Certificate(pem=self._authority.sign(key, holder.place, holder.number, holder.until)),
            configuration=self._told.configuration,
            tokenizer=self._told.tokenizer,
        )

    def Renew(self, request: pb.RenewRequest, context: grpc.ServicerContext) -> pb.Certificate:
        caller, key = self._callers.of(context), certified_key(shown_certificate(context))
        holder = self._host.renew(caller.name, caller.holder, digest_of(key), CERTIFICATE_SECONDS)
        return pb.Certificate(pem=self._authority.sign(key, holder.place, holder.number, holder.until))

    def Give(self, request: pb.GiveRequest, context: grpc.ServicerContext) -> pb.GiveReply:
        caller = self._callers.of(context)
        self._host.end(caller.name, caller.holder, "it was given back")
        self._places.died(caller.name, "it has left", caller.term)
        return pb.GiveReply()

    def Status(self, request: pb.StatusRequest, context: grpc.ServicerContext) -> pb.StatusReply:
        reply = self._places.status()
        for place in reply.places:
            holder = self._host.held_by(place.name)
            place.holder = 0 if holder is None else holder.number
            place.relayed_bytes = self._relayed(place.name)
        return reply
