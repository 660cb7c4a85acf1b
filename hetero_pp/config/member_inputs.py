"""Devices of the members of a run that start on one host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hetero_pp.config.alike import range_of
from hetero_pp.config.run_config import RunConfig
from hetero_pp.config.spec import MemberSpec, RunSpec
from hetero_pp.config.topology import ParticipantsReplica
from hetero_pp.core.device import CPU, resolved
from hetero_pp.core.errors import ConfigError
from hetero_pp.data.batches import Batches, Share, SharedBatches, StoreBatches, validation_batches
from hetero_pp.data.sources import Source, StreamedCorpus
from hetero_pp.model.arithmetic import compute_dtype
from hetero_pp.model.learning_rates import LearningRates
from hetero_pp.outer.gradient import Compressed, GradientOptimizer
from hetero_pp.outer.step import OuterOptimizer, RoundOptimizer
from hetero_pp.pipeline.subspace import columns_of


def devices_of(spec: RunSpec, names: Sequence[str]) -> dict[str, torch.device]:
    """Return the device of each member that starts on this host, in the order of `names`.

    Members that do not name a device share the accelerators in turn. A stage with several devices has the first here.
    Raises ConfigError for a device that is not there or lacks the member's precision. A rehearsal needs none.
    """
    members = [spec.members[name] for name in names if name in spec.members]
    if spec.config.rehearsal is not None:
        return {member.name: CPU for member in members}
    found = {}
    for turn, member in enumerate(members):
        device, key = member.setting("device")
        try:
            found[member.name], *_ = (resolved(one, turn) for one in ([device] if isinstance(device, str) else device))
        except ConfigError as error:
            raise ConfigError(key, error.message) from None
        if member.replica.precision == "auto":
            continue
        try:
            compute_dtype(member.replica.precision, found[member.name])
        except ConfigError as error:
            raise ConfigError(("replicas", member.replica_index, *error.key), error.message) from None
    return found


def stage_devices(member: MemberSpec, first: torch.device) -> tuple[torch.device, ...]:
    """Return the devices over which a member's layers lie; empty if there is one. `first`: that of `devices_of`."""
    devices, _ = member.setting("device")
    return () if isinstance(devices, str) else (first, *(resolved(one) for one in devices[1:]))


def in_words(devices: Mapping[str, str]) -> str:
    """Return the members and their devices in words, such as `dc on cuda:0; home.0 .. home.3 on cpu`."""
    members: dict[str, dict[str, list[str]]] = {}
    for member, device in devices.items():
        members.setdefault(device, {}).setdefault(member.partition(".")[0], []).append(member)
    return "; ".join(
        f"{range_of([range_of(stages) for stages in same.values()])} on {device}" for device, same in members.items()
    )


# Training batches and validation rows of a run's replicas.


def replica_batches(spec: RunSpec, member: MemberSpec, source: Source | None) -> tuple[SharedBatches, list[Tensor]]:
    """Return the training batches of a replica, and the validation rows in batches of its micro-batch size.

    A rehearsal has no source; its batches are random. Raises ConfigError if the corpus is too small; a streamed corpus
    needs the validation rows and one document.
    """
    share = spec.share_of(member.replica.name, 1)
    if source is None:
        replica, data = member.replica, spec.config.data
        random, size = torch.Generator().manual_seed(0), (replica.batch_size, data.sequence_length + 1)
        tokens = torch.randint(spec.shape.vocabulary, size, generator=random)
        most, sequences = replica.batch_size // replica.micro_batches, data.validation_sequences
        validation = [tokens[: min(most, sequences - first)] for first in range(0, sequences, most)]
        return SharedBatches(share, lambda share: _SameBatch(tokens)), validation
    batches = SharedBatches(share, lambda share: batches_of(spec, member, source, share))
    rows = validation_rows(spec, member, source)
    if isinstance(source, StreamedCorpus):
        source.batches(1, share.seed(spec.config.seed), share.replica, share.replicas, 1).stream.order.require_text()
    return batches, rows


class _SameBatch:
    """One batch that is read again and again, at every position. Implements Batches."""

    def __init__(self, tokens: Tensor) -> None:
        self._tokens = tokens

    def train(self, step: int) -> Tensor:
        return self._tokens

    def read_ahead(self, steps: range) -> None: ...

    def state(self) -> Any:
        return {}

    def load(self, state: Any) -> None: ...


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
            clock = "inner.seconds" if spec.config.inner.steps is None else "outer.tokens"
            raise ConfigError(("data", "repeat"), f"found false, expected true with `{clock}`: {why}")
        steps = spec.steps_of(member.replica.name) or 0
        batches.require_one_epoch((spec.latest.rounds - share.round + 1) * steps)
    return batches


# Outer optimizer that a run's configuration selects.


def require_own_steps(config: RunConfig) -> None:
    """Raise ConfigError if the outer optimizer cannot take the own steps of a replica."""
    for index, replica in enumerate(config.replicas if config.outer.source == "gradient" else ()):
        if isinstance(replica, ParticipantsReplica) and replica.boundary.embedding == "projected":
            key = ("replicas", index, "boundary", "embedding")
            wanted = f"expected `free` or `coefficients` with method {config.outer.method}"
            raise ConfigError(key, f"found `projected`, {wanted}: only the trainer of tables projects its steps")


def round_optimizer(spec: RunSpec, basis: Tensor | None) -> RoundOptimizer:
    """Return the optimizer that computes the parameters after a round; `basis` [D, K'] is the run's."""
    config = spec.config
    require_own_steps(config)
    if config.outer.source == "difference":
        return OuterOptimizer(config.outer, lambda round_: spec.at(round_).outer)
    groups = [one for one in spec.replicas_ever if isinstance(one, ParticipantsReplica) and one.stage_count > 1]
    ranks = {group.name: group.boundary.dimensions(spec.shape.width) for group in groups}
    bases = {rank: columns_of(basis, rank) for rank in set(ranks.values())}
    compressed = {
        group.name: Compressed(own, group.boundary.embedding)
        for group in groups
        if (own := bases[ranks[group.name]]) is not None
    }

    def schedule(round_: int) -> LearningRates:
        return spec.rates_in(round_, round_ - 1, 1)

    return GradientOptimizer(config.outer, config.inner, spec.total_steps, spec.parameter_shapes, compressed, schedule)
