"""Cost of the audits of a run, shown before it starts."""

from __future__ import annotations

import math
from collections.abc import Iterator

from hetero_pp.core.units import format_bytes, format_count
from hetero_pp.run.spec import RunSpec
from replica_groups.audit.gauntlet.cost import share_of_compute

_COPIES = 3
"""Copies of the parameters in the memory of a validator: those before the round, the model, and contributions."""


def audit_lines(spec: RunSpec) -> Iterator[str]:
    """Yield a line for each audit of a run."""
    audit, replicas = spec.config.audit, spec.config.replicas
    where = "beside the exchange" if audit.by == "exchange" else "by each `hetero-pp validate`"
    if audit.gauntlet is not None:
        sequences = spec.inner_steps * sum(replica.batch_size for replica in replicas)
        share = share_of_compute(audit.gauntlet, len(replicas), sequences)
        memory = 4 * _COPIES * sum(math.prod(shape) for shape in spec.parameter_shapes.values())
        tried = format_count(min(audit.gauntlet.evaluated, len(replicas)), "contribution")
        costs = f"{100 * share:.2g} % of the replicas' compute, and {format_bytes(memory)} of memory"
        yield f"Scores: {tried} of each round tried {where}, on 2 x {audit.gauntlet.sequences} sequences: {costs}"
    if audit.recompute is not None:
        yield f"Recomputation: {100 * audit.recompute.share:.2g} % of the replicas' rounds are computed again {where}"
