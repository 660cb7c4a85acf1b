"""Rounds of a table in which some replicas take part and others wait, compared with explicit formulas."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from table_config import table_config
from torch import Tensor

from hetero_pp.config.run_config import RunConfig
from hetero_pp.config.spec import RunSpec
from hetero_pp.core.errors import ConfigError
from hetero_pp.data.tokens import prepare_tokens
from hetero_pp.outer.step import OuterOptimizer
from hetero_pp.research.experiments.corpus import tokens_read
from hetero_pp.research.experiments.result import facts, token_count
from hetero_pp.research.settings import Every, ResearchConfig
from hetero_pp.research.trainer.measurements import contribution_bytes
from hetero_pp.research.trainer.train import AllReplicas, train_fast

NAMES = ["a", "b", "c"]
BATCHES = {"a": 2, "b": 2, "c": 3}
ROUNDS, STEPS, LENGTH = 6, 2, 16
TAKING_PART = {1: 2, 3: 1, 5: 3}
COUNTS = [2, 2, 1, 1, 3, 3]
SPARSE: dict[str, Any] = {
    "compression": {"density": 1 / 4, "value_bits": 32, "error_feedback_decay": 0.9, "tile": [256, 64]}
}
"""Settings with which every tensor is one chunk."""


def _config(
    corpus: Path, outer: dict[str, Any], exchange: dict[str, Any] | None = None, batches: dict[str, int] = BATCHES
) -> RunConfig:
    return table_config(
        {
            "name": "t",
            "seed": 3,
            "model": {"width": 16, "heads": 2, "feed_forward": 24, "layers": 1},
            "data": {
                "corpus": str(corpus),
                "sequence_length": LENGTH,
                "validation_share": 0.2,
                "validation_sequences": 4,
            },
            "inner": {"steps": STEPS, "warmup_steps": 0, "learning_rate": 0.01},
            "outer": {"rounds": ROUNDS, "taking_part": TAKING_PART, **outer},
            "exchange": exchange or {},
            "replicas": [{"name": name, "kind": "datacenter", "batch_size": batches[name]} for name in NAMES],
        }
    )


def _deltas(group: AllReplicas, round_: int) -> list[dict[str, Tensor]]:
    """Return the changes of copies of the replicas that take part in a round, relative to theta."""
    found = []
    for replica, batches in list(zip(group.replicas, group.batches, strict=True))[: COUNTS[round_ - 1]]:
        twin = copy.deepcopy(replica)
        for step in range((round_ - 1) * STEPS, round_ * STEPS):
            twin.inner_step(batches.train(step), step)
        found.append({name: group.theta[name] - twin.parameters[name].detach() for name in group.theta})
    return found


@pytest.mark.parametrize("weights", ["equal", "tokens"])
def test_rounds_are_those_written_out(weights: str, corpus: Path, tmp_path: Path) -> None:
    """e <- 0.9 e + Delta, D = TopK(e), e <- e - D; theta <- theta - mean of D over the replicas that take part.

    For the other replicas, e stays.
    """
    torch.set_num_threads(1)
    spec = RunSpec(_config(corpus, {**SPARSE, "weights": weights}), 256)
    group = AllReplicas(spec, prepare_tokens(spec.config.data, tmp_path))
    theta = {name: tensor.clone() for name, tensor in group.theta.items()}
    errors = [{name: torch.zeros_like(tensor) for name, tensor in theta.items()} for _ in NAMES]
    for round_, count in enumerate(COUNTS, start=1):
        shares = [BATCHES[name] if weights == "tokens" else 1 for name in NAMES[:count]]
        deltas = _deltas(group, round_)
        assert group.round(round_)
        for name in theta:
            total = torch.zeros_like(theta[name])
            for error, delta, share in zip(errors, deltas, shares, strict=False):
                carried = (0.9 * error[name] + delta[name]).flatten()
                sent = torch.zeros_like(carried)
                where = carried.abs().argsort(descending=True, stable=True)[: max(1, int(carried.numel() / 4 + 0.5))]
                sent[where] = carried[where]
                error[name] = (carried - sent).view_as(total)
                total += share * sent.view_as(total)
            theta[name] -= total / sum(shares)
            torch.testing.assert_close(group.theta[name], theta[name], rtol=0, atol=1e-6)
            for found, error in zip(group.errors, errors, strict=True):
                torch.testing.assert_close(found[name], error[name], rtol=0, atol=1e-6)
        for replica in group.replicas:
            assert all(replica.parameters[name].equal(group.theta[name]) for name in theta)


ADAM = {"optimizer": "adam", "learning_rate": 0.3, "momentum": 0.0, "nesterov": False}
BY_ROUND = {"final_learning_rate_share": 0.5, "warmup_rounds": 2}


@pytest.mark.parametrize("cells", [{}, BY_ROUND, ADAM])
def test_pretraining_is_the_first_replica_alone_and_the_outer_optimizer_begins_after_it(
    cells: dict[str, Any], corpus: Path, tmp_path: Path
) -> None:
    torch.set_num_threads(1)
    dense = {"method": "diloco", "taking_part": {}, **cells}
    spec = RunSpec(_config(corpus, {**dense, "pretraining": 2}), 256)
    store = prepare_tokens(spec.config.data, tmp_path)
    group = AllReplicas(spec, store)
    alone = copy.deepcopy(group.replicas[0])
    assert group.round(1)
    assert group.round(2)
    for step in range(2 * STEPS):
        alone.inner_step(group.batches[0].train(step), step)
    for name, tensor in group.theta.items():
        torch.testing.assert_close(tensor, alone.parameters[name].detach(), rtol=0, atol=1e-6)
    assert not group.outer.momentum
    later = OuterOptimizer(_config(corpus, {**dense, "rounds": ROUNDS - 2}).outer)
    for round_ in range(3, ROUNDS + 1):
        before = {name: tensor.clone() for name, tensor in group.theta.items()}
        twins = [copy.deepcopy(replica) for replica in group.replicas]
        assert group.round(round_)
        for twin, batches in zip(twins, group.batches, strict=True):
            for step in range((round_ - 1) * STEPS, round_ * STEPS):
                twin.inner_step(batches.train(step), step)
        later.begin(round_ - 2, {})
        for name, found in group.theta.items():
            mean = torch.stack([before[name] - twin.parameters[name].detach() for twin in twins]).mean(0)
            later.take(before, name, mean)
            torch.testing.assert_close(found, before[name], rtol=0, atol=2e-5)


def test_it_goes_on_from_a_checkpoint_to_the_same_bits(corpus: Path, tmp_path: Path) -> None:
    spec = RunSpec(_config(corpus, SPARSE), 256)
    store = prepare_tokens(spec.config.data, tmp_path)
    whole = train_fast(spec, store)

    def stop(round_: int, loss: float) -> None:
        if round_ == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_fast(spec, store, stop, checkpoint=tmp_path / "kept", checkpoint_seconds=0.0)
    again = train_fast(spec, store, checkpoint=tmp_path / "kept")
    assert (again.validation_loss, again.uncompressed) == (whole.validation_loss, whole.uncompressed)


def test_all_in_all_rounds_is_what_nobody_says(corpus: Path, tmp_path: Path) -> None:
    store = prepare_tokens(_config(corpus, {}).data, tmp_path)
    said, unsaid = (
        train_fast(RunSpec(_config(corpus, {"taking_part": taking_part}), 256), store) for taking_part in ({1: 3}, {})
    )
    assert said.validation_loss == unsaid.validation_loss
    assert said.tokens == unsaid.tokens == ROUNDS * STEPS * LENGTH * sum(BATCHES.values())


def test_what_is_sent_is_what_those_that_take_part_send(corpus: Path) -> None:
    some, every = (RunSpec(_config(corpus, {"taking_part": one}), 256) for one in (TAKING_PART, {}))
    assert contribution_bytes(some, ROUNDS) * ROUNDS * len(NAMES) == contribution_bytes(every, ROUNDS) * sum(COUNTS)
    trained = sum(BATCHES[name] for count in COUNTS for name in NAMES[:count])
    assert token_count(some) == STEPS * LENGTH * trained
    assert tokens_read(some.config) == STEPS * (LENGTH + 1) * trained
    assert "M = 1 to 3," in facts([some.config], 256)


@pytest.mark.parametrize("ablation", [{"peer": {"method": "resbm"}}, {"grassmann_every": 2}])
def test_what_all_replicas_keep_equal_needs_all_of_them(ablation: dict[str, Any], corpus: Path) -> None:
    config = _config(corpus, {}).model_dump(mode="json")
    config["model"]["layers"] = 2
    config["replicas"][1] = {"name": "b", "kind": "participants", "stages": 2, "boundary": {"rank": "1/4"}}
    config["research"]["ablations"] = ablation
    with pytest.raises(ConfigError, match="found this key with `taking_part` or `pretraining`, expected only") as error:
        ResearchConfig.model_validate(config).check()
    assert error.value.key == ("research", "ablations", next(iter(ablation)))


@pytest.mark.parametrize(
    ("outer", "told"),
    [
        ({"method": "adamw_ddp"}, "found this key with averaged gradients, expected only one of them"),
        ({"overlap": 1}, "found this key with `outer.overlap: 1`, expected only one of them"),
        ({"keep_local": True}, "found this key with `outer.keep_local`, expected only one of them"),
        ({"taking_part": {3: 1}}, "found `taking_part` from round 3 on, expected the number from round 1 on"),
        ({"taking_part": {}, "pretraining": 1, "method": "adamw_ddp"}, "found this key with averaged gradients"),
        ({"pretraining": 1}, "found this key with `density` below 1 or `value_bits` below 32"),
        ({"pretraining": 1, "method": "diloco_lom"}, "found this key with `memory: momentum`"),
        ({"taking_part": {1: 1, 2: 4}}, "found 4, expected at most the number of replicas, 3"),
        ({"memory_drops": 0.5}, "found this key with `memory: error_feedback`"),
    ],
)
def test_what_does_not_fit_is_refused(outer: dict[str, Any], told: str, corpus: Path) -> None:
    with pytest.raises(ConfigError, match=told) as error:
        _config(corpus, outer).check()
    assert error.value.key[0] == "research"


def test_a_bias_is_of_all_replicas(corpus: Path, tmp_path: Path) -> None:
    spec = RunSpec(_config(corpus, {}), 256)
    with pytest.raises(ConfigError, match="`bias_every` compares all"):
        AllReplicas(spec, prepare_tokens(spec.config.data, tmp_path), every=Every(bias=1))
