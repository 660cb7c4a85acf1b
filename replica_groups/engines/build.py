"""The engine that a YAML names; an extra that is not installed is missed in one line."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Mapping
from typing import Any

import torch

from hetero_pp.engine_settings import EngineName, TorchtitanSettings
from hetero_pp.errors import ConfigError
from hetero_pp.inner import InnerSettings
from hetero_pp.model import ModelShape, Transformer
from replica_groups.engines.engine import Engine, Parameters
from replica_groups.engines.plain import PlainEngine
from replica_groups.ranks import Ranks
from replica_groups.whole import WholeReplica


def build_engine(
    engine: EngineName,
    shape: ModelShape,
    parameters: Parameters,
    inner: InnerSettings,
    total_steps: int,
    micro_batches: int,
    micro_batch_size: int,
    torchtitan: TorchtitanSettings,
    deepspeed: Mapping[str, Any],
    ranks: Ranks,
) -> Engine:
    """An engine on these ranks that starts from the whole model's parameters.

    Raises ConfigError if the engine's package is not installed.
    """
    require_engine(engine)
    if engine == "torchtitan":
        titan = importlib.import_module("replica_groups.engines.titan")
        return titan.TitanEngine(shape, parameters, inner, total_steps, micro_batches, torchtitan, ranks)
    if engine == "deepspeed":
        os.environ.setdefault("DS_ACCELERATOR", ranks.device.type)  # it would look for one, and guess
        zero = importlib.import_module("replica_groups.engines.zero")
        return zero.ZeroEngine(shape, parameters, inner, total_steps, micro_batches, micro_batch_size, deepspeed, ranks)
    return PlainEngine(_plain(shape, parameters, inner, total_steps, micro_batches, ranks.device))


def require_engine(engine: EngineName) -> None:
    """Raise ConfigError if the engine's package is not installed."""
    if engine != "torch" and importlib.util.find_spec(engine) is None:
        raise ConfigError((), f"`engine: {engine}` needs it installed: pip install hetero-pp[{engine}]")


def _plain(
    shape: ModelShape,
    parameters: Parameters,
    inner: InnerSettings,
    total_steps: int,
    micro_batches: int,
    device: torch.device,
) -> WholeReplica:
    with torch.device("meta"):
        module = Transformer(shape)
    module.to_empty(device=device)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(parameters[name])
    return WholeReplica("replica", module, inner, total_steps, micro_batches)
