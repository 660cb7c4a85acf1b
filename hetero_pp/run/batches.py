"""What a replica of a run trains on, and what it is evaluated on."""

from __future__ import annotations

from torch import Tensor

from hetero_pp.data.batches import Batches, StoreBatches, validation_batches
from hetero_pp.data.sources import Source, StreamedCorpus
from hetero_pp.errors import ConfigError
from hetero_pp.run.spec import MemberSpec, RunSpec


def replica_batches(spec: RunSpec, member: MemberSpec, source: Source) -> tuple[Batches, list[Tensor]]:
    """What a replica trains on, and the validation rows in batches of its micro-batch size.

    Raises ConfigError if the corpus is too small for them; where it is streamed, that is known of the validation rows.
    """
    data, replica = spec.config.data, member.replica
    rows = replica.batch_size // replica.micro_batches
    count, index = len(spec.config.replicas), member.replica_index
    if isinstance(source, StreamedCorpus):
        streamed = source.batches(data.sequence_length, spec.config.seed, index, count, replica.batch_size)
        return streamed, source.validation(rows)
    batches = StoreBatches(
        store=source,
        sequence_length=data.sequence_length,
        seed=spec.config.seed,
        replica=index,
        replicas=count,
        batch_size=replica.batch_size,
        rotation=_in_turns(spec, member),
    )
    if not data.repeat:
        if spec.total_steps is None:
            why = "how many steps a replica takes is not known beforehand"
            raise ConfigError(("data", "repeat"), f"found false, expected true with `inner.seconds`: {why}")
        batches.require_one_epoch(spec.total_steps)
    return batches, validation_batches(source, data.sequence_length, data.validation_sequences, rows)


def _in_turns(spec: RunSpec, member: MemberSpec) -> tuple[int, ...]:
    """The replicas that come and go as this one does, and are at the same step of the same shard size whenever they
    are there: so none reads what another reads, and few of them read all that many would.
    """
    own = member.replica
    if not own.optional or spec.config.inner.steps is None:
        return ()
    replicas = enumerate(spec.config.replicas)
    return tuple(index for index, one in replicas if one.optional and one.batch_size == own.batch_size)
