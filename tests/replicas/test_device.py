"""Runs of the trainer of tables on `meta`, a device that is not the CPU. Its tensors hold no data."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from table_config import table_config
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from hetero_pp.config.spec import RunSpec
from hetero_pp.data.tokens import prepare_tokens
from hetero_pp.research.trainer.train import AllReplicas

METHODS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "adamw_ddp": ({"method": "adamw_ddp"}, {}),
    "few bits": ({"compression": {"value_bits": 2}}, {"bits": 4}),
    "coefficients": ({}, {"embedding": "coefficients", "ablations": {"weight_projection": "both"}}),
    "diloco": ({"method": "diloco"}, {"ablations": {"modified_adamw": True, "adaptation": "discarded"}}),
    "grassmann": ({}, {"embedding": "coefficients", "ablations": {"grassmann_every": 1}}),
}
"""Settings of the outer rounds and of the boundary."""


class _OneDevice(TorchFunctionMode):
    """Fails on operations between tensors of two devices, where a GPU would fail or copy.

    It also answers questions about values, which `meta` tensors lack: a loss is 1, and no values are tied.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.item:
            return 1.0
        if func is torch.Tensor.__bool__:
            return False
        found = tree_leaves((args, kwargs))
        devices = {value.device for value in found if isinstance(value, torch.Tensor) and value.ndim > 0}
        moves = (torch.Tensor.copy_, torch._has_compatible_shallow_copy_type)  # the second is that of `to_empty`
        assert len(devices) < 2 or func in moves, (func, devices)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def fused_on_meta(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow the fused optimizer on `meta`: torch has this kernel but does not list it."""
    module = importlib.import_module("torch.optim.optimizer")
    monkeypatch.setattr(module, "_get_fused_kernels_supported_devices", lambda: ["meta"])


@pytest.mark.usefixtures("fused_on_meta")
@pytest.mark.parametrize("method", METHODS)
def test_nothing_stays_behind_on_the_cpu(method: str, corpus: Path, tmp_path: Path) -> None:
    outer, boundary = METHODS[method]
    home = {"kind": "participants", "stages": 2, "boundary": {"rank": "1/4", **boundary}}
    config = table_config(
        {
            "name": "t",
            "model": {"width": 32, "heads": 2, "feed_forward": 48, "layers": 2},
            "data": {"corpus": str(corpus), "sequence_length": 32, "validation_share": 0.2, "validation_sequences": 4},
            "inner": {"steps": 1, "warmup_steps": 3, "learning_rate": 0.01},
            "outer": {"rounds": 2, **outer},
            "replicas": [
                home | {"name": "home", "batch_size": 4},
                {"name": "dc", "kind": "datacenter", "batch_size": 4},
            ],
        }
    )
    spec, store = RunSpec(config, 256), prepare_tokens(config.data, tmp_path)
    device = torch.device("meta")
    with _OneDevice():
        group = AllReplicas(spec, store, device=device)
        assert group.round(1)
        assert group.round(2)
        assert group.evaluate() == group.evaluate_compressed() == 1.0
        held = [*group.theta.values(), *group.errors[0].values(), *group.outer.momentum.values(), *group.validation]
        held += [parameter for replica in group.replicas for parameter in replica.parameters.values()]
        optimizers = [optimizer for replica in group.replicas for optimizer in replica.optimizer.optimizers]
        for optimizer in optimizers:
            held += [value for state in optimizer.state.values() for key, value in state.items() if key != "step"]
        assert {tensor.device for tensor in held} == {device}
