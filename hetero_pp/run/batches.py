"""What a replica of a run trains on, and what it is evaluated on."""

from __future__ import annotations

from torch import Tensor

from hetero_pp.data.batches import Batches, StoreBatches, validation_batches
from hetero_pp.data.sources import Source, StreamedCorpus
from hetero_pp.run.spec import MemberPlan, RunPlan


def replica_batches(plan: RunPlan, member: MemberPlan, source: Source) -> tuple[Batches, list[Tensor]]:
    """What a replica trains on, and the validation rows in batches of its micro-batch size.

    Raises ConfigError if the corpus is too small for them; where it is streamed, that is known of the validation rows.
    """
    data, replica = plan.config.data, member.replica
    rows = replica.batch_size // replica.micro_batches
    count, index = len(plan.config.replicas), member.replica_index
    if isinstance(source, StreamedCorpus):
        streamed = source.batches(data.sequence_length, plan.config.seed, index, count, replica.batch_size)
        return streamed, source.validation(rows)
    batches = StoreBatches(
        store=source,
        sequence_length=data.sequence_length,
        seed=plan.config.seed,
        replica=index,
        replicas=count,
        batch_size=replica.batch_size,
    )
    if not data.repeat:
        batches.require_one_epoch(plan.total_steps)
    return batches, validation_batches(source, data.sequence_length, data.validation_sequences, rows)
