"""Construction of the engine that a replica's YAML names; reports an extra that is not installed in one line."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path

import torch

from hetero_pp.config.topology import DatacenterReplica, EngineName, ReplicaSettings
from hetero_pp.core.errors import ConfigError
from hetero_pp.model.arithmetic import compute_dtype
from hetero_pp.model.inner import InnerSettings
from hetero_pp.model.part_settings import StageSpec
from hetero_pp.model.transformer import ModelShape, Transformer, build_filled, compile_layers, require_compiler
from replica_groups.engines.engine import Engine, Parameters
from replica_groups.engines.plain import PlainEngine, WholeReplica
from replica_groups.engines.ranks import Ranks


def build_engine(
    replica: DatacenterReplica,
    shape: ModelShape,
    parameters: Parameters,
    inner: InnerSettings,
    total_steps: int | None,
    ranks: Ranks,
    folder: Path | None = None,
) -> Engine:
    """Build a replica's engine on these ranks, starting from the whole model's parameters.

    `folder` holds copies for `undo` (Moments).

    Raises ConfigError if the engine's package is not installed.
    """
    require_engine(replica.engine)
    micro_batches = replica.micro_batches
    if replica.engine == "torchtitan":
        titan = importlib.import_module("replica_groups.engines.titan")
        settings = replica.torchtitan
        return titan.TitanEngine(shape, parameters, inner, total_steps, micro_batches, settings, ranks, folder=folder)
    if replica.engine == "deepspeed":
        os.environ.setdefault("DS_ACCELERATOR", ranks.device.type)  # otherwise DeepSpeed would guess the accelerator
        zero = importlib.import_module("replica_groups.engines.zero")
        rows = replica.batch_size // micro_batches
        return zero.ZeroEngine(
            shape,
            parameters,
            inner,
            total_steps,
            micro_batches,
            rows,
            settings=replica.deepspeed,
            ranks=ranks,
            folder=folder,
        )
    module = build_model(replica, shape, parameters, ranks.device)
    return PlainEngine(WholeReplica(replica.name, module, inner, total_steps, micro_batches), folder)


def build_model(
    replica: ReplicaSettings,
    shape: ModelShape,
    parameters: Parameters,
    device: torch.device,
    stage: StageSpec | None = None,
    devices: Sequence[torch.device] = (),
) -> Transformer:
    """Build what engine `torch` or a stage trains: the whole model, or a stage's part, on a device or several.

    Raises ConfigError if the device or this machine lacks what the replica's settings need.
    """
    module = build_filled(
        shape,
        parameters,
        stage,
        device,
        compute_dtype=compute_dtype(replica.precision, device),
        recomputes=replica.recompute == "layers",
        devices=devices,
    )
    if replica.compile:
        require_compiler(device)
        compile_layers([module])
    return module


def require_engine(engine: EngineName) -> None:
    """Raise ConfigError if the engine's package is not installed."""
    if engine != "torch" and importlib.util.find_spec(engine) is None:
        raise ConfigError(
            (), f"found `{engine}`, which is not installed; install it with: pip install 'hetero-pp[{engine}]'"
        )
