"""Admission to a run that has begun: exchanges tickets for certificates, renews them, and frees slots.

Served beside the exchange. Permissions of each call are in permissions.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import grpc
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey

from hetero_pp.config.lines import RELAYED
from hetero_pp.core.errors import AskAgain, HeteroPPError, Refused
from hetero_pp.messages import messages_pb2 as pb
from hetero_pp.rpc.admission_client import BUSY, MEASURE_SECONDS, PROBE_SECONDS, Probe, answer_measurement
from hetero_pp.rpc.callers import Callers, RemoteCaller, shown_certificate
from hetero_pp.rpc.channels import PROTOCOL_VERSION, version_complaint
from hetero_pp.rpc.identities import Authority, certified_key, digest_of, requested_key
from hetero_pp.rpc.limits import Pace
from hetero_pp.rpc.relay import Relay
from replica_groups.exchange.exchange import Exchange
from replica_groups.exchange.memberships import GONE, LEFT, Holder, Memberships
from replica_groups.exchange.waiting_room import FORGET_SECONDS, WaitingRoom

CERTIFICATE_SECONDS = 24 * 3600.0
"""Seconds for which a certificate obtained with a ticket is valid; its holder renews it at half of that."""

GONE_SECONDS = 30.0
"""Seconds for which a ticket holder may be gone before another one that waits takes its slot."""

PREVIEWS_A_MINUTE, PREVIEWS_AT_ONCE = 20.0, 20
"""Calls of `Preview` that one caller may make: each has the whole configuration."""

MEASUREMENTS_A_MINUTE, MEASUREMENTS_AT_ONCE = 4.0, 4
"""Calls of `Measure` that one caller may make: two for each measurement of its line."""

ALL_MEASUREMENTS_A_MINUTE, ALL_MEASUREMENTS_AT_ONCE = 8.0, 32
"""The same of all callers together: 32 MiB a minute. Otherwise many tickets could fill the line of the exchange."""
_TOGETHER = "all callers"


@dataclass(frozen=True)
class RunForGuests:
    """The part of the run that an admitted host is told."""

    configuration: str  # the configuration as JSON, without what concerns only the exchange's host
    tokenizer: Mapping[str, bytes] = field(default_factory=dict)  # files of the tokenizer, by name
    vocabulary: int = 0  # vocabulary of the model


@dataclass(frozen=True)
class OpenHouse:
    """Parts of a run that ticket holders may join."""

    host: Memberships
    told: RunForGuests
    waiting_room: WaitingRoom
    unnamed: Collection[str] | None = None  # slots that a ticket without a slot may take; None: all


class Admission:
    """The calls of the service."""

    def __init__(
        self,
        house: OpenHouse,
        authority: Authority,
        callers: Callers,
        exchange: Exchange,
        relay: Relay | None,
    ) -> None:
        self._host, self._told, self._waiting_room = house.host, house.told, house.waiting_room
        self._unnamed = exchange.coordinator.slots if house.unnamed is None else house.unnamed
        self._authority, self._callers, self._exchange, self._relay = authority, callers, exchange, relay
        self._giving_slots = threading.Lock()  # held from the choice of a free slot until it is taken
        self._gone: dict[str, tuple[float, float]] = {}
        """Slot of a ticket holder that is gone -> when a host that waits for a slot asked first since, and last."""
        self._measuring = threading.Lock()
        self._previews = Pace(PREVIEWS_A_MINUTE / 60, PREVIEWS_AT_ONCE)
        self._measurements = Pace(MEASUREMENTS_A_MINUTE / 60, MEASUREMENTS_AT_ONCE)
        self._all_measurements = Pace(ALL_MEASUREMENTS_A_MINUTE / 60, ALL_MEASUREMENTS_AT_ONCE)

    def Enrol(self, request: pb.EnrolRequest, context: grpc.ServicerContext) -> pb.EnrolReply:
        if complaint := version_complaint(request.version, PROTOCOL_VERSION):
            raise Refused(complaint)
        ticket, key = self._callers.of(context).ticket, requested_key(request.request)
        assert ticket is not None
        holder = self._give_slot(ticket, digest_of(key))
        if isinstance(holder, pb.InWaitingRoom):
            status = self._exchange.status()
            holder.last_round, holder.rounds = status.last_round, status.rounds
            return pb.EnrolReply(in_waiting_room=holder)
        return pb.EnrolReply(
            slot=holder.slot,
            certificate=self._certificate(key, holder),
            configuration=self._told.configuration,
            tokenizer=self._told.tokenizer,
        )

    def _give_slot(self, ticket: str, key: bytes) -> Holder | pb.InWaitingRoom:
        """Return the holder of a slot for a ticket, or its state in the waiting room. Raises RunOver, RunFailed."""
        self._require_going_on(ticket)
        with self._giving_slots:
            vacant: Sequence[str] = self._exchange.vacant()
            if (own := self._host.wants(ticket, key, vacant)) is not None:
                slots, free = self._exchange.coordinator.slots, []
                found = own or self._open_to_all(vacant, self._left(vacant))
                for slot in found:  # no slot beside a host from which this one was parted
                    both = [one for one in self._exchange.runner.neighbours(slot) if one]
                    beside = {one: one not in vacant or not slots[one].is_guest for one in both}
                    if self._host.may_be_neighbour(ticket, beside):
                        free.append(slot)
                if found and not free:
                    why = "waiting for a slot that is not beside a host with which it exchanged malformed messages"
                    return pb.InWaitingRoom(here=1, probed=True, why=why)
                given = self._waiting_room.slot_for(ticket, free)
                if isinstance(given, pb.InWaitingRoom):
                    if not free:
                        awaited = f"waiting for the slot of a host that is gone: {', '.join(self._gone)}"
                        given.why = awaited if self._gone else self._why_none_is_open(vacant)
                    return given
                vacant = [given]
                if (gone := self._host.held_by(given)) is not None:
                    self._host.end(given, gone.number, GONE)
            holder = self._host.enrol(ticket, key, vacant, CERTIFICATE_SECONDS)
            self._waiting_room.has_slot(ticket)
            return holder

    def _left(self, vacant: Sequence[str]) -> list[str]:
        """Return the slots of ticket holders that have been gone for GONE_SECONDS while others asked for a slot."""
        now, gone = time.monotonic(), dict[str, tuple[float, float]]()
        for slot in vacant:
            holder = self._host.held_by(slot)
            if holder is not None and holder.joins_by is None and slot in self._unnamed:
                first, last = self._gone.get(slot, (now, now))
                gone[slot] = (first if now - last < FORGET_SECONDS else now), now
        self._gone = gone
        return [slot for slot, (first, last) in gone.items() if last - first >= GONE_SECONDS]

    def _open_to_all(self, vacant: Sequence[str], left: Sequence[str] = ()) -> Sequence[str]:
        """Return the free slots that a ticket without a slot may take, and those that others have `left`."""
        free = [slot for slot in vacant if self._host.held_by(slot) is None]
        return [slot for slot in [*free, *left] if slot in self._unnamed]

    def _why_none_is_open(self, vacant: Sequence[str]) -> str:
        """Return why a ticket without a slot has to wait, and what its owner may ask for."""
        run, free = json.loads(self._told.configuration)["name"], [one for one in vacant if not self._host.held_by(one)]
        if free:
            found_free = f"every stage of a group is taken; {', '.join(free)} is free for a ticket that names it"
            return f"{found_free}: ask the operator of the run for `hetero-pp invite {run} --slot {free[0]}`, or wait"
        may = f"the operator of the run may free one (`hetero-pp revoke {run} SLOT`), or add a replica to its YAML"
        return f"every slot of the run is taken, and this host waits for one; {may}"

    def _require_going_on(self, ticket: str) -> None:
        try:
            self._exchange.require_going_on()
        except HeteroPPError:
            self._waiting_room.told(ticket)
            raise

    def Probe(self, frames: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        """Measure one line at a time, so that each is measured alone. Raises AskAgain while another is measured."""
        ticket = self._callers.of(context).ticket
        assert ticket is not None
        self._require_going_on(ticket)
        over = threading.Timer(PROBE_SECONDS, context.cancel)
        over.start()
        try:
            probe = Probe(frames)  # returns with the first frame, so that a silent caller keeps no line busy
            self._waiting_room.begin_probe(ticket, context.cancel)
            try:
                yield from probe.frames()
                self._waiting_room.probed(ticket, probe.up, probe.down)
            finally:
                self._waiting_room.end_probe(ticket)
        finally:
            over.cancel()

    def Preview(self, request: pb.Nothing, context: grpc.ServicerContext) -> pb.PreviewReply:
        self._exchange.require_going_on()
        caller = self._callers.of(context)
        if (seconds := self._previews.refused_for(caller.name)) > 0:
            raise Refused(f"this host has asked too often; it may again in {max(1.0, seconds):.0f} s")
        slots, refusal = self._slots_of(caller)
        status = self._exchange.status()
        groups = {slot.replica for slot in status.slots if slot.name in slots}
        return pb.PreviewReply(
            version=PROTOCOL_VERSION,
            clock=time.time(),
            configuration=self._told.configuration,
            vocabulary=self._told.vocabulary,
            slots=slots,
            refusal=refusal,
            tokens=self._exchange.text.tokens,
            neighbours={
                slot.name: slot.address
                for slot in status.slots
                if slot.replica in groups and slot.name not in slots and slot.address not in ("", RELAYED)
            },
            relay_port=0 if self._relay is None else self._relay.port,
            lost="" if caller.ticket is None else self._host.lost(caller.ticket),
        )

    def _slots_of(self, caller: RemoteCaller) -> tuple[Sequence[str], str]:
        """Return the caller's slot, or the slots that its ticket may take, and why it may not take one now."""
        if caller.ticket is None:
            return ([caller.name] if caller.is_member else []), ""
        try:
            own, vacant = self._host.slot_of(caller.ticket), self._exchange.vacant()
        except Refused as error:
            return [], str(error)
        if own is not None:
            return [own], ""
        if opened := self._open_to_all(vacant):
            return opened, ""
        every = [slot for slot in self._exchange.coordinator.slots if slot in self._unnamed]
        return every, self._why_none_is_open(vacant)

    def Measure(self, frames: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        """Answer a caller that measures its line, one caller at a time. Raises AskAgain for all others."""
        caller = self._callers.of(context).name
        if not self._measuring.acquire(timeout=MEASURE_SECONDS / 3):  # the caller's call before may be about to end
            raise AskAgain(BUSY)
        over = threading.Timer(MEASURE_SECONDS, context.cancel)
        try:
            over.start()
            if (seconds := self._measurements.refused_for(caller)) > 0:
                raise AskAgain(f"this line was measured a moment ago; it can be measured again in {seconds:.0f} s")
            if (seconds := self._all_measurements.refused_for(_TOGETHER)) > 0:
                raise AskAgain(f"many hosts have measured their lines; this one can be measured in {seconds:.0f} s")
            yield from answer_measurement(frames)
        finally:
            over.cancel()
            self._measuring.release()

    def Renew(self, request: pb.Nothing, context: grpc.ServicerContext) -> pb.EnrolReply:
        caller, key = self._callers.of(context), certified_key(shown_certificate(context))
        holder = self._host.renew(caller.name, caller.holder, digest_of(key), CERTIFICATE_SECONDS)
        return pb.EnrolReply(certificate=self._certificate(key, holder))

    def _certificate(self, key: EllipticCurvePublicKey, holder: Holder) -> str:
        """Sign a certificate, dated by the clock that decides how long the holder is let in."""
        signed = holder.until - CERTIFICATE_SECONDS
        return self._authority.sign(key, holder.slot, holder.number, holder.until, signed)

    def Give(self, request: pb.Nothing, context: grpc.ServicerContext) -> pb.Nothing:
        caller = self._callers.of(context)
        self._host.end(caller.name, caller.holder, LEFT)
        self._exchange.end_incarnation(caller.name, LEFT, caller.incarnation, has_left=True)
        return pb.Nothing()

    def Status(self, request: pb.Nothing, context: grpc.ServicerContext) -> pb.StatusReply:
        reply = self._exchange.status()
        reply.rehearsal = self._exchange.rehearsed is not None
        reply.in_waiting_room, reply.needed_in_lobby = self._waiting_room.here, self._waiting_room.needed
        for ticket, seconds in self._waiting_room.guests:
            reply.guests.add(ticket=ticket, seconds=seconds)
        for slot in reply.slots:
            holder = self._host.held_by(slot.name)
            slot.holder = 0 if holder is None else holder.number
            slot.relayed_bytes = 0 if self._relay is None else self._relay.carried_for(slot.name)
        return reply
