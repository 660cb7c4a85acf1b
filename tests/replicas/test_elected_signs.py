"""Means of elected signs, and a second warm-up after pretraining: the trainer of tables against formulas."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from table_config import table_config, tiny

from hetero_pp.config.run_config import RunConfig
from hetero_pp.config.spec import RunSpec
from hetero_pp.core.errors import ConfigError
from hetero_pp.data.tokens import prepare_tokens
from hetero_pp.research.trainer.train import AllReplicas

STEPS = 2


def _config(corpus: Path, outer: dict[str, Any], warmup_steps: int = 0) -> RunConfig:
    return table_config(
        {
            **tiny(corpus, 16, 1),
            "inner": {"steps": STEPS, "warmup_steps": warmup_steps, "learning_rate": 0.01},
            "outer": {"rounds": 4, "method": "diloco", "momentum": 0, "nesterov": False, "learning_rate": 1, **outer},
            "replicas": [
                {"name": name, "kind": "datacenter", "batch_size": size}
                for name, size in (("a", 2), ("b", 4), ("c", 2))
            ],
        }
    )


@pytest.mark.parametrize("weights", ["equal", "tokens"])
def test_a_coordinate_is_the_mean_of_those_with_the_sign_of_the_sum(weights: str, corpus: Path, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    spec = RunSpec(_config(corpus, {"elects_signs": True, "weights": weights}), 256)
    group = AllReplicas(spec, prepare_tokens(spec.config.data, tmp_path))
    theta = {name: tensor.clone() for name, tensor in group.theta.items()}
    twins = [copy.deepcopy(replica) for replica in group.replicas]
    assert group.round(1)
    for twin, batches in zip(twins, group.batches, strict=True):
        for step in range(STEPS):
            twin.inner_step(batches.train(step), step)
    share = torch.tensor([1.0, 2.0, 1.0] if weights == "tokens" else [1.0] * 3)
    for name, before in theta.items():
        deltas = torch.stack([before - twin.parameters[name].detach() for twin in twins]).flatten(1)
        sign = torch.where((share @ deltas) >= 0, 1.0, -1.0)
        agree = (deltas * sign > 0) * share[:, None]
        mean = (agree * deltas).sum(0) / agree.sum(0).clamp_min(1e-9)
        torch.testing.assert_close(group.theta[name].flatten(), before.flatten() - mean, rtol=0, atol=1e-6)


def test_the_learning_rate_rises_once_more_after_pretraining(corpus: Path, tmp_path: Path) -> None:
    """It is the run's own rate times (s + 1) / warm-up in step s after pretraining, and unchanged before and later."""
    spec = RunSpec(_config(corpus, {"pretraining": 2, "warms_up_again": True}, warmup_steps=3), 256)
    group = AllReplicas(spec, prepare_tokens(spec.config.data, tmp_path))
    own = [spec.config.inner.rates(spec.total_steps or 0).at(step) for step in range(8)]
    factors = [1, 1, 1, 1, 1 / 3, 2 / 3, 1, 1]
    for replica in group.replicas:
        found = [replica.optimizer.rates.at(step) for step in range(8)]
        assert found == pytest.approx([rate * factor for rate, factor in zip(own, factors, strict=True)])


@pytest.mark.parametrize(
    ("outer", "key", "words"),
    [
        ({"warms_up_again": True}, "warms_up_again", "found this key with no `pretraining`"),
        ({"method": "adamw_ddp", "elects_signs": True}, "elects_signs", "found this key with averaged gradients"),
        (
            {"aggregation": "trimmed_mean", "elects_signs": True},
            "elects_signs",
            "found this key with `outer.aggregation: ",
        ),
    ],
)
def test_what_has_no_effect_is_refused(outer: dict[str, Any], key: str, words: str, corpus: Path) -> None:
    with pytest.raises(ConfigError, match=words) as error:
        _config(corpus, outer).check()
    assert error.value.key == ("research", key)
