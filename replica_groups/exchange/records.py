"""Conversion between the protocol's record of a round and the message RoundRecord."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from hetero_pp.messages.messages_pb2 import BlobEntry, ContributionEntry, RoundRecord
from hetero_pp.pseudo_gradient.contribution import contribution_digest, scale_of
from replica_groups.protocol.events import Contribution, Record


def to_message(record: Record, tokens_a_step: Mapping[str, int]) -> RoundRecord:
    """Return the message, without its digest. `tokens_a_step`: replica -> tokens, where known."""
    message = RoundRecord(round=record.round, late=record.late)
    for one in record.contributions:
        blobs = [cast(BlobEntry, entry) for entry in one.blobs.values()]
        message.contributions.append(
            ContributionEntry(
                replica=one.replica,
                epoch=one.epoch,
                weight=one.weight,
                steps=one.steps,
                tokens=one.steps * tokens_a_step.get(one.replica, 0),
                digest=contribution_digest(blobs),
                blobs=blobs,
            )
        )
    return message


def from_message(message: RoundRecord) -> Record:
    """Return the protocol's record."""
    counted = tuple(
        Contribution(
            one.replica, one.epoch, one.steps, one.weight, {blob.block: blob for blob in one.blobs}, scale_of(one)
        )
        for one in message.contributions
    )
    return Record(message.round, counted, tuple(message.late), tuple(message.left_out))
