"""Training batches and validation rows of a run's replicas."""

from __future__ import annotations

from torch import Tensor

from hetero_pp.core.errors import ConfigError
from hetero_pp.data.batches import Batches, StoreBatches, validation_batches
from hetero_pp.data.shares import Share, SharedBatches
from hetero_pp.data.sources import Source, StreamedCorpus
from hetero_pp.run.spec import MemberSpec, RunSpec


def replica_batches(spec: RunSpec, member: MemberSpec, source: Source) -> tuple[SharedBatches, list[Tensor]]:
    """Return the training batches of a replica, and the validation rows in batches of its micro-batch size.

    Raises ConfigError if the corpus is too small; a streamed corpus needs the validation rows and one document.
    """
    share = spec.share_of(member.replica.name, 1)
    batches = SharedBatches(share, lambda share: batches_of(spec, member, source, share))
    rows = validation_rows(spec, member, source)
    if isinstance(source, StreamedCorpus):
        source.batches(1, share.seed(spec.config.seed), share.replica, share.replicas, 1).stream.order.require_text()
    return batches, rows


def validation_rows(spec: RunSpec, member: MemberSpec, source: Source) -> list[Tensor]:
    """Return the validation rows in batches of the member's micro-batch size."""
    data, rows = spec.config.data, member.replica.batch_size // member.replica.micro_batches
    if isinstance(source, StreamedCorpus):
        return source.validation(rows)
    return validation_batches(source, data.sequence_length, data.validation_sequences, rows)


def batches_of(spec: RunSpec, member: MemberSpec, source: Source, share: Share) -> Batches:
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
            why = "the number of steps is not known beforehand"
            raise ConfigError(("data", "repeat"), f"found false, expected true with `inner.seconds`: {why}")
        batches.require_one_epoch((spec.latest.outer.rounds - share.round + 1) * spec.inner_steps)
    return batches
