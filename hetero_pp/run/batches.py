"""Training batches and validation rows of a run's replicas."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from torch import Tensor

from hetero_pp.core.errors import ConfigError
from hetero_pp.data.batches import Batches, StoreBatches, validation_batches
from hetero_pp.data.clusters import Clusters, find_clusters
from hetero_pp.data.shares import Share, SharedBatches
from hetero_pp.data.sources import Source, StreamedCorpus, tokens_digest
from hetero_pp.data.tokens import TokenStore
from hetero_pp.run.spec import MemberSpec, RunSpec


def replica_batches(spec: RunSpec, member: MemberSpec, source: Source) -> tuple[SharedBatches, list[Tensor]]:
    """Return the training batches of a replica, and the validation rows in batches of its micro-batch size.

    Raises ConfigError if the corpus is too small; for a streamed corpus, only the validation rows can be checked.
    """
    data, replica = spec.config.data, member.replica
    for round_ in spec.shared_out_since[1:] if data.clusters is not None else ():  # fail before the run begins
        _batches(spec, member, source, spec.share_of(replica.name, round_))
    rows = replica.batch_size // replica.micro_batches
    batches = SharedBatches(spec.share_of(replica.name, 1), lambda share: _batches(spec, member, source, share))
    if isinstance(source, StreamedCorpus):
        return batches, source.validation(rows)
    return batches, validation_batches(source, data.sequence_length, data.validation_sequences, rows)


def examples_in(spec: RunSpec, source: Source, round_: int) -> Mapping[str, int]:
    """Return the number of windows in each replica's shard in a round: its weight with `outer.weights: examples`.

    Raises ConfigError if the corpus is streamed, because the number is then not known.
    """
    if isinstance(source, StreamedCorpus):
        told = f"found `examples` with {spec.config.data.corpus}, which is streamed, expected a corpus encoded once"
        raise ConfigError(("outer", "weights"), told)
    shares = {replica.name: spec.share_of(replica.name, round_) for replica in spec.at(round_).replicas}
    return {name: _store_batches(spec, source, share, 1).shard_size for name, share in shares.items()}


def text_digest(spec: RunSpec, source: Source | None) -> str:
    """Return a digest of the tokens and clusters, by which hosts check that they read the same."""
    clusters = None if source is None else _clusters(spec, source)
    if clusters is None:
        return tokens_digest(source)
    return hashlib.sha256(f"{tokens_digest(source)}/{clusters.digest}".encode()).hexdigest()


def _clusters(spec: RunSpec, source: Source) -> Clusters | None:
    data = spec.config.data
    if data.clusters is None or not isinstance(source, TokenStore):
        return None
    return find_clusters(source, data.sequence_length, data.clusters, spec.config.seed)


def _store_batches(spec: RunSpec, source: TokenStore, share: Share, size: int) -> StoreBatches:
    return StoreBatches(
        store=source,
        sequence_length=spec.config.data.sequence_length,
        seed=share.seed(spec.config.seed),
        replica=share.replica,
        replicas=share.replicas,
        batch_size=size,
        rotation=share.rotation,
        clusters=_clusters(spec, source),
    )


def _batches(spec: RunSpec, member: MemberSpec, source: Source, share: Share) -> Batches:
    """Return the training batches of one share."""
    data, size = spec.config.data, member.replica.batch_size
    if isinstance(source, StreamedCorpus):
        seed = share.seed(spec.config.seed)
        return source.batches(data.sequence_length, seed, share.replica, share.replicas, size)
    batches = _store_batches(spec, source, share, size)
    if not data.repeat:
        if spec.total_steps is None:
            why = "the number of steps is not known beforehand"
            raise ConfigError(("data", "repeat"), f"found false, expected true with `inner.seconds`: {why}")
        batches.require_one_epoch(spec.steps_on(share))
    return batches
