"""First snapshot of a run: random weights, or those of a LLaMA checkpoint; and the basis U."""

from __future__ import annotations

from pathlib import Path

from hetero_pp.core.progress import OnProgress, untold
from hetero_pp.hugging_face.reading import read_parameters, require_checkpoint
from hetero_pp.run.snapshot import Snapshot, initial_snapshot
from hetero_pp.run.spec import RunSpec


def require_weights(spec: RunSpec) -> None:
    """Raise ConfigError if the initial weights are missing or do not have the run's shape; reads headers only."""
    if spec.config.model.weights is not None:
        require_checkpoint(Path(spec.config.model.weights), spec.shape, spec.parameter_shapes)


def first_snapshot(spec: RunSpec, on_progress: OnProgress = untold) -> Snapshot:
    """Return the first snapshot of a run, with random weights or those in the folder of `model.weights`.

    The basis U is random in both cases. If boundaries are compressed, the embedding of the checkpoint is split by it.
    """
    require_weights(spec)
    weights, parameters = spec.config.model.weights, None
    if weights is not None:
        parameters = read_parameters(Path(weights), spec.parameter_shapes, on_progress)
    return initial_snapshot(spec.shape, spec.largest_rank, spec.config.seed, parameters)
