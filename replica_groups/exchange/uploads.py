"""Contributions that members put into the store themselves, so that they do not pass the exchange on their way in.

A member asks for a URL that the exchange signs, uploads its blob there, and tells the exchange what it was. What it
says counts for nothing: the blob is read from the store, as whoever decodes it will.
"""

from __future__ import annotations

import hashlib

from hetero_pp.errors import MalformedContribution
from hetero_pp.messages.messages_pb2 import BlobEntry
from hetero_pp.model import Shapes
from hetero_pp.pseudo_gradient.compression import CompressionSettings
from hetero_pp.pseudo_gradient.contribution import BlobAddress, ReceivedBlob, entry_of
from replica_groups.exchange.log import ContributionLog, blob_key

URL_SECONDS = 3600.0
"""How long a URL lets a blob be uploaded: 50 MB at 1 Mbit/s take seven minutes, and may be tried again."""


def upload_url(log: ContributionLog, address: BlobAddress, epoch: int) -> str | None:
    """Where the holder of this epoch may put one blob, and nothing else; None if the store has no such URLs."""
    return log.store.sign("PUT", blob_key(address.round, address.replica, epoch, address.block), URL_SECONDS)


def uploaded_entry(
    log: ContributionLog, address: BlobAddress, epoch: int, sha256: bytes, shapes: Shapes, settings: CompressionSettings
) -> BlobEntry:
    """The entry of a blob that a member says is in the store, with this digest.

    Raises MalformedContribution if something else is there, or what no receiver could decode; FileNotFoundError if
    nothing is.
    """
    data = log.read_blob(address.round, address.replica, epoch, address.block)
    if hashlib.sha256(data).digest() != sha256:
        raise MalformedContribution(f"`{address.block}` of {address.replica} in the store is not what was said")
    return received_entry(data, address, shapes, settings)


def received_entry(data: bytes, address: BlobAddress, shapes: Shapes, settings: CompressionSettings) -> BlobEntry:
    """The entry of a blob, which is decoded first. Raises MalformedContribution."""
    blob = ReceivedBlob(data, address, shapes, settings)
    return entry_of(address, data, sum(len(blob.tensor(name).values) for name in shapes))
