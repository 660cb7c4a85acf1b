"""Contributions weighted by tokens: the trainer of tables against an explicit mean."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from table_config import table_config, tiny

from hetero_pp.config.spec import RunSpec
from hetero_pp.data.tokens import prepare_tokens
from hetero_pp.outer.methods import OuterSettings
from hetero_pp.research.trainer.participation import missed_in
from hetero_pp.research.trainer.train import AllReplicas

BATCHES = {"a": 2, "b": 6, "c": 4}
STEPS, ROUNDS, SEED = 2, 3, 3


def _group(corpus: Path, folder: Path, outer: dict[str, Any]) -> AllReplicas:
    torch.set_num_threads(1)
    config = table_config(
        {
            **tiny(corpus, 16, 1, seed=SEED),
            "inner": {"steps": STEPS, "warmup_steps": 0, "learning_rate": 0.01},
            "outer": {"rounds": ROUNDS, "compression": {"density": 1.0, "value_bits": 32}, **outer},
            "replicas": [{"name": name, "kind": "datacenter", "batch_size": size} for name, size in BATCHES.items()],
        }
    )
    return AllReplicas(RunSpec(config, 256), prepare_tokens(config.data, folder))


@pytest.mark.parametrize("missed", [0.0, 0.5])
def test_a_mean_weighs_by_tokens(missed: float, corpus: Path, tmp_path: Path) -> None:
    """The mean covers included replicas. If everything is sent, theta is the weighted mean of the replicas."""
    group = _group(corpus, tmp_path, {"weights": "tokens", "missed": missed, "returned": 0.0})
    counts = set()
    for round_ in range(1, ROUNDS + 1):
        twins = [copy.deepcopy(replica) for replica in group.replicas]
        for twin, batches in zip(twins, group.batches, strict=True):
            for step in range((round_ - 1) * STEPS, round_ * STEPS):
                twin.inner_step(batches.train(step), step)
        gone = missed_in(round_, list(BATCHES), missed, SEED)
        weights = [0 if name in gone else size for name, size in BATCHES.items()]
        counts.add(len(gone))
        before = {name: tensor.clone() for name, tensor in group.theta.items()}
        assert group.round(round_)
        for name, found in group.theta.items():
            own = [twin.parameters[name].detach() - before[name] for twin in twins]
            mean = sum(weight * change for weight, change in zip(weights, own, strict=True)) / sum(weights)
            torch.testing.assert_close(found, before[name] + mean, rtol=0, atol=1e-6)
    assert len(counts) > 1 or missed == 0


def test_equal_weights_are_what_they_were(corpus: Path, tmp_path: Path) -> None:
    """Each weight is 1, so that no rounding differs."""
    assert set(_group(corpus, tmp_path, {}).weights.values()) == {1.0}
    assert _group(corpus, tmp_path, {"weights": "tokens"}).weights == {
        name: STEPS * size * 16.0 for name, size in BATCHES.items()
    }


def test_averaged_gradients_weigh_the_same() -> None:
    with pytest.raises(ValidationError, match="found weights `tokens` with averaged gradients, expected `equal`"):
        OuterSettings(rounds=1, method="adamw_ddp", weights="tokens")
