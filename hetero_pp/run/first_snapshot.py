"""First snapshot of a run: random weights, or those of a LLaMA checkpoint; and the basis U."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from hetero_pp.core.progress import OnProgress, untold
from hetero_pp.hugging_face.reading import read_parameters, require_checkpoint
from hetero_pp.model.transformer import EMBEDDING
from hetero_pp.run.snapshot import Snapshot, initial_snapshot
from hetero_pp.run.spec import RunSpec


def require_weights(spec: RunSpec) -> Sequence[str]:
    """Raise ConfigError if the initial weights are missing or do not have the run's shape; reads headers only.

    Returns notes on what changes when they are read.
    """
    folder = spec.config.model.weights
    if folder is None or not require_checkpoint(Path(folder), spec.shape, spec.parameter_shapes).is_tied:
        return ()
    added = math.prod(spec.parameter_shapes[EMBEDDING])
    return (
        f"model.weights: {folder} ties its head to its token embedding; from here on they train apart, which makes "
        f"{added:,} more parameters",
    )


def first_snapshot(spec: RunSpec, on_progress: OnProgress = untold) -> Snapshot:
    """Return the first snapshot of a run, with random weights or those in the folder of `model.weights`.

    The basis U is random in both cases. If boundaries are compressed, the embedding of the checkpoint is split by it.
    That of a rehearsal has no tensors.
    """
    if spec.config.rehearsal is not None:
        return Snapshot(0, {}, None)
    require_weights(spec)
    weights, parameters = spec.config.model.weights, None
    if weights is not None:
        parameters = read_parameters(Path(weights), spec.parameter_shapes, on_progress)
    return initial_snapshot(spec.shape, spec.largest_rank, spec.config.seed, parameters)
