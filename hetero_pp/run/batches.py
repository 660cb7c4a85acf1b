"""What a replica of a run trains on, and what it is evaluated on."""

from __future__ import annotations

from torch import Tensor

from hetero_pp.data.batches import Batches, StoreBatches, validation_batches
from hetero_pp.data.shares import Share, SharedBatches
from hetero_pp.data.sources import Source, StreamedCorpus
from hetero_pp.errors import ConfigError
from hetero_pp.run.spec import MemberSpec, RunSpec


def replica_batches(spec: RunSpec, member: MemberSpec, source: Source) -> tuple[SharedBatches, list[Tensor]]:
    """What a replica trains on, and the validation rows in batches of its micro-batch size.

    Raises ConfigError if the corpus is too small for them; where it is streamed, that is known of the validation rows.
    """
    data, replica = spec.config.data, member.replica
    rows = replica.batch_size // replica.micro_batches
    batches = SharedBatches(spec.share_of(replica.name, 1), lambda share: _batches(spec, member, source, share))
    if isinstance(source, StreamedCorpus):
        return batches, source.validation(rows)
    return batches, validation_batches(source, data.sequence_length, data.validation_sequences, rows)


def _batches(spec: RunSpec, member: MemberSpec, source: Source, share: Share) -> Batches:
    """Of one share."""
    data, size, seed = spec.config.data, member.replica.batch_size, share.seed(spec.config.seed)
    if isinstance(source, StreamedCorpus):
        return source.batches(data.sequence_length, seed, share.replica, share.replicas, size)
    batches = StoreBatches(
        store=source,
        sequence_length=data.sequence_length,
        seed=seed,
        replica=share.replica,
        replicas=share.replicas,
        batch_size=size,
        rotation=share.rotation,
    )
    if not data.repeat:
        if spec.total_steps is None:
            why = "how many steps a replica takes is not known beforehand"
            raise ConfigError(("data", "repeat"), f"found false, expected true with `inner.seconds`: {why}")
        batches.require_one_epoch(spec.total_steps)
    return batches
