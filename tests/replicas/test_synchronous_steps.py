"""Synchronous methods: every replica steps by the mean gradient within its own constraint; then all are averaged.

The expected values are AdamW written out in fp64, for each replica alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from table_config import table_config, tiny
from torch import Tensor

from hetero_pp.config.spec import RunSpec
from hetero_pp.data.tokens import prepare_tokens
from hetero_pp.model.inner import InnerSettings
from hetero_pp.model.part_settings import EmbeddingTraining
from hetero_pp.model.transformer import EMBEDDING
from hetero_pp.outer.gradient import Compressed, GradientOptimizer
from hetero_pp.outer.methods import OuterSettings
from hetero_pp.pipeline.subspace import random_basis
from hetero_pp.research.trainer.train import AllReplicas

RATE, DECAY, BETAS, STEPS = 0.01, 0.1, (0.9, 0.95), 3


class AdamW:
    """AdamW on one matrix, as in its paper; `decays` is what weight decay acts on."""

    def __init__(self) -> None:
        self.mean, self.square, self.steps = torch.zeros(()), torch.zeros(()), 0

    def step(self, gradient: Tensor, decays: Tensor) -> Tensor:
        self.steps += 1
        self.mean = BETAS[0] * self.mean + (1 - BETAS[0]) * gradient
        self.square = BETAS[1] * self.square + (1 - BETAS[1]) * gradient**2
        mean, square = self.mean / (1 - BETAS[0] ** self.steps), self.square / (1 - BETAS[1] ** self.steps)
        return -RATE * (DECAY * decays + mean / (square**0.5 + 1e-8))


def own_step(embedding: Tensor, gradient: Tensor, basis: Tensor, constraint: str, adamw: AdamW) -> Tensor:
    """Return a replica's embedding after its own step. Section 2.4 of Het-PP: T_perp is fixed, T_S = C U^T."""
    inside = basis @ basis.T
    if constraint == "none":
        return embedding + adamw.step(gradient, embedding)
    if constraint == "coefficients":
        return embedding + adamw.step(gradient @ basis, embedding @ basis) @ basis.T
    moved = adamw.step(gradient, embedding @ inside)
    return embedding + (moved if constraint == "free" else moved @ inside)


@pytest.mark.parametrize("names", ["a", "b", "ab", "abbb", "abc"])
@pytest.mark.parametrize("first", ["free", "coefficients"])
def test_holders_of_theta_apply_the_mean_step_of_the_round(names: str, first: EmbeddingTraining) -> None:
    """Replicas `a` and `c` are compressed, to different ranks. A round includes those of `names`, with their counts."""
    inner = InnerSettings(steps=1, warmup_steps=0, learning_rate=RATE, final_learning_rate_share=1.0, clip_norm=None)
    basis, generator = random_basis(16, 8, seed=3), torch.Generator().manual_seed(4)
    compressed = {"a": Compressed(basis[:, :4], first), "c": Compressed(basis)}
    theta = {EMBEDDING: torch.randn(40, 16, generator=generator)}
    outer = OuterSettings(rounds=STEPS, method="adamw_ddp")
    ours = GradientOptimizer(outer, inner, STEPS, {EMBEDDING: (40, 16)}, compressed)
    alone = {name: AdamW() for name in "abc"}
    for step in range(STEPS):
        gradient, before = torch.randn(40, 16, generator=generator), theta[EMBEDDING].double()
        expected = torch.zeros(40, 16).double()
        for name, adamw in alone.items():
            one = compressed.get(name)
            own = own_step(
                before, gradient.double(), *(one.basis.double(), one.embedding) if one else (basis, "none"), adamw
            )
            expected += own * names.count(name) / len(names)
        ours.begin(step + 1, {name: float(names.count(name)) for name in names})
        ours.take(theta, EMBEDDING, gradient.clone())
        ours.finish(theta)
        torch.testing.assert_close(theta[EMBEDDING].double(), expected, rtol=0, atol=1e-6)


def _group(corpus: Path, folder: Path, constraint: str, compressed: int, whole: int) -> AllReplicas:
    home = {"kind": "participants", "stages": 2, "boundary": {"rank": 8, "embedding": constraint}}
    kinds: list[dict[str, Any]] = [home] * compressed + [{"kind": "datacenter"}] * whole
    config = table_config(
        {
            **tiny(corpus, 32, 2, seed=2),
            "inner": {"steps": STEPS, "warmup_steps": 0, "learning_rate": RATE, "final_learning_rate_share": 1.0},
            "outer": {"rounds": 1, "method": "adamw_ddp"},
            "replicas": [{"name": f"r{index}", "batch_size": 4, **kind} for index, kind in enumerate(kinds)],
        }
    )
    torch.set_num_threads(1)
    store = prepare_tokens(config.data, folder)
    return AllReplicas(RunSpec(config, store.vocabulary), store)


def _mean_gradient(group: AllReplicas, theta: Mapping[str, Tensor], step: int) -> Tensor:
    """Return the embedding's part [V, D] of the mean gradient at theta, clipped by the norm of all of it."""
    sums = dict.fromkeys(theta, torch.zeros(()).double())
    for replica, batches in zip(group.replicas, group.batches, strict=True):
        with torch.no_grad():
            for name, parameter in replica.parameters.items():
                parameter.copy_(theta[name])
        replica.split_embedding()
        replica.backward(batches.train(step), step)
        sums = {name: one + replica.parameters[name].grad.double() for name, one in sums.items()}  # type: ignore[union-attr]
        replica.drop()
    means = {name: one / len(group.replicas) for name, one in sums.items()}
    norm = sum(float(one.square().sum()) for one in means.values()) ** 0.5
    return means[EMBEDDING] * min(1.0, 1 / (norm + 1e-6))


@pytest.mark.parametrize(("compressed", "whole"), [(1, 1), (1, 2), (2, 1)])
@pytest.mark.parametrize("constraint", ["free", "coefficients", "projected"])
def test_every_replica_steps_within_its_own_constraint(
    constraint: str, compressed: int, whole: int, corpus: Path, tmp_path: Path
) -> None:
    group, other = (_group(corpus, tmp_path, constraint, compressed, whole) for _ in range(2))
    assert group.replicas[0].boundary is not None and group.replicas[0].boundary.basis is not None
    basis, share = group.replicas[0].boundary.basis.double(), compressed / (compressed + whole)
    outside = torch.eye(32).double() - basis @ basis.T
    theta = {name: tensor.clone() for name, tensor in group.theta.items()}
    start = embedding = theta[EMBEDDING].double()
    inner, alone = AdamW(), AdamW()
    for step in range(STEPS):
        gradient = _mean_gradient(other, theta, step)
        of_compressed = own_step(embedding, gradient, basis, constraint, inner)
        of_whole = own_step(embedding, gradient, basis, "none", alone)
        group._synchronous_step(step)
        theta = {name: parameter.detach().clone() for name, parameter in group.replicas[0].parameters.items()}
        if constraint != "free":
            moved, of_one = ((after - embedding) @ outside for after in (theta[EMBEDDING].double(), of_whole))
            torch.testing.assert_close(moved, (1 - share) * of_one, rtol=0, atol=1e-5)
        embedding = share * of_compressed + (1 - share) * of_whole
        torch.testing.assert_close(theta[EMBEDDING].double(), embedding, rtol=0, atol=1e-5)
    assert ((embedding - start) @ outside).norm() > 0.01
    for replica in group.replicas:
        assert all(parameter.equal(theta[name]) for name, parameter in replica.parameters.items())
