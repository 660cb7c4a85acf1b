"""Deposits of blobs by address, and their keys in a log, for tests."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from hetero_pp.messages import messages_pb2 as pb
from hetero_pp.pseudo_gradient.contribution import BlobAddress, join_blobs
from hetero_pp.rpc.exchange_service import Caller, ExchangeService
from replica_groups.exchange.log import blob_key


def deposit(
    exchange: ExchangeService,
    member: str | Caller,
    address: BlobAddress,
    data: bytes,
    generation: int = 0,
    steps: int = 0,
) -> None:
    """Deposit one blob. Generation 0 is the current one, in the exchange's process."""
    deposit_all(exchange, member, {address: data}, generation, steps)


def deposit_all(
    exchange: ExchangeService,
    member: str | Caller,
    blobs: Mapping[BlobAddress, bytes],
    generation: int = 0,
    steps: int = 0,
) -> None:
    """Deposit blobs of one round of a replica in one call."""
    caller, own = member if isinstance(member, Caller) else Caller(member), next(iter(blobs))
    common = pb.BlobHeader(round=own.round, replica=own.replica, generation=generation, steps=steps)
    exchange.deposit_blob(*join_blobs(common, [(address.block, data) for address, data in blobs.items()]), caller)


def keyed(blobs: Mapping[BlobAddress, bytes], generation: int) -> dict[str, bytes]:
    """Return blobs by their keys in a log."""
    return {
        blob_key(own.round, own.replica, generation, own.block, hashlib.sha256(data).digest()): data
        for own, data in blobs.items()
    }
