"""`compile: true` of a replica compiles what it trains, and is refused where torch.compile does not work."""

from __future__ import annotations

import pytest
import torch

from hetero_pp.config.topology import DatacenterReplica, ParticipantsReplica, ReplicaSettings
from hetero_pp.core.errors import ConfigError
from hetero_pp.model import transformer
from hetero_pp.model.arithmetic import gradient_of_logits
from hetero_pp.model.part_settings import StageSpec
from hetero_pp.model.transformer import ModelSettings, Transformer, initialise
from replica_groups.engines.build import build_model

SHAPE = ModelSettings(width=32, heads=2, feed_forward=48, layers=4).resolve(64)
CPU = torch.device("cpu")
LAST = StageSpec(1, 2, range(2, 4))


def _model(compiles: bool, stage: StageSpec | None) -> Transformer:
    whole = Transformer(SHAPE)
    initialise(whole, 1)
    kind = DatacenterReplica if stage is None else ParticipantsReplica
    values = {"name": "one", "kind": "datacenter", "compile": compiles}
    if stage is not None:
        values |= {"kind": "participants", "stages": 2}
    replica: ReplicaSettings = kind.model_validate(values)
    return build_model(replica, SHAPE, whole.state_dict(), CPU, stage)


@pytest.mark.parametrize("stage", [None, LAST], ids=["whole", "stage"])
def test_layers_and_loss_are_compiled(stage: StageSpec | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformer, "can_compile", lambda device: True)
    for compiles in (False, True):
        module = _model(compiles, stage)
        assert [block._compiled_call_impl is not None for block in module.layers.values()] == [compiles] * len(
            module.layers
        )
        assert (module.gradient_of_logits is not gradient_of_logits) == compiles


def test_a_machine_without_a_compiler_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformer, "can_compile", lambda device: False)
    with pytest.raises(ConfigError, match=r"found `true` without a C\+\+ compiler, .*; expected `false`"):
        _model(True, None)
