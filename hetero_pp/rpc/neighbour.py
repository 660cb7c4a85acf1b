"""A neighbouring stage, which dials the member or is dialled by it, directly or through the relay."""

from __future__ import annotations

import sys

from hetero_pp.config.links import RELAYED, LinkSpec, is_loopback
from hetero_pp.core.errors import LinkTimeout
from hetero_pp.link.shared_lines import Lines
from hetero_pp.rpc.credentials import Credentials
from hetero_pp.rpc.link_end import GrpcLinkEnd, LinkSide, OnRefusal
from hetero_pp.rpc.relayed import RelayedDialler, RelayedListener
from hetero_pp.rpc.stage_link import StageLinkDialer, StageLinkServer
from hetero_pp.store.faults import Faults

CONNECT_TIMEOUT = 120.0
DIRECT_SECONDS = 10.0
"""Seconds for which a neighbour is dialled directly before the relay is used."""
CUT_OFF_SECONDS = 60.0
"""Seconds for which a link that is cut is dialled again, because the neighbour may live."""


class Neighbour:
    """A neighbour, with one link for each generation. In each generation another end may dial."""

    def __init__(
        self,
        spec: LinkSpec,
        credentials: Credentials,
        exchange: str,
        seed: int,
        lines: Lines,
        faults: Faults,
        on_refusal: OnRefusal,
    ) -> None:
        """`exchange`: HOST:PORT of the relay, if there is one."""
        own, patience = credentials.of_link(spec.name), CUT_OFF_SECONDS
        side = LinkSide(spec, own, credentials.name, seed, lines, patience, on_refusal=on_refusal)
        self.server = StageLinkServer(side)
        """Server that the neighbour dials, once it listens."""
        self.listens = ""
        """Address of this machine at which the server listens."""
        self._dialer = StageLinkDialer(side)
        self._spec, self._credentials, self._exchange, self._faults = spec, credentials, exchange, faults
        self._unreached = set[str]()
        self._to_relay: RelayedDialler | None = None
        self._from_relay: RelayedListener | None = None

    def dial(self, address: str, generation: int, holder: int | None = None) -> GrpcLinkEnd:
        """Dial the neighbour directly or through the relay. Arguments and errors as of StageLinkDialer.dial."""
        self.server.give_up(generation, f"this member is at generation {generation}")
        if self._from_relay is not None:  # two that wait to be found would find each other
            self._from_relay.close()
            self._from_relay = None
        if address != RELAYED and address not in self._unreached:
            is_relayed = self._may_be_relayed(address)
            routed = self._faults.route(self._spec.name, address)
            try:
                return self._dialer.dial(routed, generation, DIRECT_SECONDS if is_relayed else CONNECT_TIMEOUT, holder)
            except LinkTimeout as error:
                if not is_relayed:
                    raise
                self._unreached.add(address)
                print(f"{self._credentials.name}: {error}; connecting through the relay", file=sys.stderr, flush=True)
        if self._to_relay is None:
            self._to_relay = RelayedDialler(self._exchange, self._credentials, self._spec.name)
        return self._dialer.dial(self._to_relay.address, generation, CONNECT_TIMEOUT, holder)

    def be_found(self, generation: int) -> None:
        """Prepare for the neighbour, which is about to dial this member."""
        self._dialer.give_up(generation, f"this member is at generation {generation}")
        if self._to_relay is not None:
            self._to_relay.close()
            self._to_relay = None
        if self._from_relay is None and self._may_be_relayed(self.listens):
            self._from_relay = RelayedListener(self._exchange, self._credentials, self._spec.name, self.listens)

    def accept(self, generation: int) -> GrpcLinkEnd:
        """Wait for the neighbour. Raises as StageLinkServer.accept."""
        return self.server.accept(CONNECT_TIMEOUT, generation)

    def give_up(self, before: int, cause: str) -> None:
        """End the links of generations before this one."""
        self._dialer.give_up(before, cause)
        self.server.give_up(before, cause)

    def part(self) -> None:
        """Wait a bounded time until the neighbour knows that the link is over. Call it after the link has ended."""
        self._dialer.close()

    def close(self) -> None:
        """Relay nothing more."""
        for relayed in (self._to_relay, self._from_relay):
            if relayed is not None:
                relayed.close()

    def _may_be_relayed(self, address: str) -> bool:
        """Return whether an address may be out of reach: on another machine, in a run with a relay."""
        return self._credentials.identity is not None and not is_loopback(address)
