"""Connections of a member to its exchange: one for calls, and one for payloads."""

from __future__ import annotations

import grpc

from hetero_pp.config.links import EXCHANGE
from hetero_pp.core.proxies import route_to
from hetero_pp.messages import messages_pb2 as pb
from hetero_pp.rpc.channels import make_channel
from hetero_pp.rpc.credentials import Credentials
from hetero_pp.rpc.services import EXCHANGE_SERVICE, calls_of


class ExchangeWires:
    """The two connections to an exchange, and their calls."""

    def __init__(self, address: str, credentials: Credentials) -> None:
        self._identity = None if credentials.identity is None else credentials.identity.latest
        self.route = route_to(address)
        self.control = make_channel(address, self._identity, EXCHANGE, self.route)
        self.calls = calls_of(EXCHANGE_SERVICE, self.control)
        # A second connection for payloads, which would delay everything else on a slow line.
        self.bulk = make_channel(address, self._identity, EXCHANGE, self.route)
        bulk = calls_of(EXCHANGE_SERVICE, self.bulk)
        self.checkpoint: grpc.UnaryStreamMultiCallable[pb.CheckpointRequest, bytes] = bulk["RunCheckpoint"]
        self.deposit: grpc.StreamUnaryMultiCallable[bytes, pb.DepositReply] = bulk["Deposit"]
        self.show: grpc.StreamUnaryMultiCallable[bytes, pb.ShownReply] = bulk["Show"]
        self.fetch: grpc.UnaryStreamMultiCallable[pb.FetchRequest, bytes] = bulk["Fetch"]

    @property
    def are_outdated(self) -> bool:
        """Whether the connections use a certificate that was renewed since, so that they cannot be restored."""
        return self._identity is not None and self._identity.latest != self._identity

    def close(self) -> None:
        """Close both connections; calls in progress fail."""
        self.control.close()
        self.bulk.close()
