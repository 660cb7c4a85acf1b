"""The bias of Equation 5: zero without loss, less with fewer compressed replicas, free of noise, and without effect."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from table_config import tiny

from hetero_pp.config.run_config import RunConfig
from hetero_pp.config.spec import RunSpec
from hetero_pp.data.tokens import prepare_tokens
from hetero_pp.research.settings import Every
from hetero_pp.research.trainer.measurements import BiasMeter, Products, uncompressed_twin
from hetero_pp.research.trainer.train import AllReplicas, FastResult, train_fast


def _train(
    corpus: Path,
    folder: Path,
    compressed: int,
    rank: int,
    every: int | None = 1,
    embedding: str = "free",
    rounds: int = 2,
) -> FastResult:
    spec = _spec(corpus, compressed, rank, embedding, rounds)
    return train_fast(spec, prepare_tokens(spec.config.data, folder), every=Every(bias=every))


def _spec(corpus: Path, compressed: int, rank: int, embedding: str = "free", rounds: int = 2) -> RunSpec:
    torch.set_num_threads(1)
    boundary = {"rank": rank, "dtype": "fp32", "embedding": embedding}
    home = {"kind": "participants", "stages": 2, "boundary": boundary}
    replicas: list[dict[str, Any]] = [
        {"name": f"r{index}", "batch_size": 4} | (home if index < compressed else {"kind": "datacenter"})
        for index in range(4)
    ]
    config = RunConfig.model_validate(
        {
            **tiny(corpus, 32, 2),
            "inner": {"steps": 3, "warmup_steps": 3, "learning_rate": 0.01},
            "outer": {"rounds": rounds, "compression": {"value_bits": 32}},
            "replicas": replicas,
        }
    )
    return RunSpec(config, 256)


@pytest.mark.parametrize("embedding", ["free", "coefficients", "projected"])
def test_a_full_basis_loses_nothing(embedding: str, corpus: Path, tmp_path: Path) -> None:
    """With k = d, the split embedding has no part outside the subspace, and coefficients are complete."""
    result = _train(corpus, tmp_path, 4, 32, embedding=embedding)
    assert [round_ for round_, _ in result.bias] == [1, 2]
    assert max(abs(share) for _, share in result.bias) < 2e-2  # Adam amplifies rounding where gradients are near 0


def test_it_falls_with_the_share_of_compressed_replicas(corpus: Path, tmp_path: Path) -> None:
    firsts = [_train(corpus, tmp_path, compressed, 4, rounds=1).bias[0][1] for compressed in (0, 1, 2, 4)]
    assert firsts[0] == 0
    assert 0.02 < firsts[1] < firsts[2] < firsts[3]


@pytest.mark.parametrize("count", [2, 3, 7])
def test_products_are_those_of_all_pairs(count: int) -> None:
    vectors = torch.randn(count, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    products = Products()
    for part in (slice(0, 2), slice(2, 5)):
        products.add(vectors[0, part], [vector[part] for vector in vectors])
    pairs = [vectors[i] @ vectors[j] for i in range(count) for j in range(count) if i != j]
    assert products.mean(count) == pytest.approx(float(sum(pairs)) / len(pairs))


def test_noise_is_no_part_of_a_mean_product() -> None:
    """A vector of length 1 has noise of length 10, so the norm of the mean of four is 5."""
    random = torch.Generator().manual_seed(2)
    whole = torch.zeros(10_000)
    whole[0] = 1.0
    found = []
    for _ in range(50):
        products = Products()
        products.add(whole, [whole + 0.1 * torch.randn(10_000, generator=random) for _ in range(4)])
        found.append(products.mean(4))
    assert sum(found) / 50 == pytest.approx(1.0, abs=0.3)


def test_a_share_is_that_of_the_two_runs_of_each_compressed_replica(corpus: Path, tmp_path: Path) -> None:
    """Computed by hand for replicas that have taken the steps of one round."""
    spec, store = _spec(corpus, 2, 4), prepare_tokens(_spec(corpus, 2, 4).config.data, tmp_path)
    group = AllReplicas(spec, store)
    twins = [uncompressed_twin(replica) for replica in group.replicas[:2]]
    meter = BiasMeter(group.replicas, group.batches, range(3), 6, 2)
    for index, one in enumerate([*group.replicas, *twins]):
        for step in range(3):
            one.inner_step(group.batches[index % 4].train(step), step)
    own, unbiased = (
        [torch.cat([(group.theta[name] - p.detach()).flatten() for name, p in one.parameters.items()]) for one in those]
        for those in (group.replicas, [*twins, *group.replicas[2:]])
    )
    bias = [b - a for a, b in zip(own, unbiased, strict=True)]
    squared = (2 / 4) ** 2 * bias[0] @ bias[1]
    whole = sum(a @ b for i, a in enumerate(unbiased) for j, b in enumerate(unbiased) if i != j) / 12
    assert squared > 0
    assert meter.share(group.theta) == pytest.approx(float(squared / whole) ** 0.5, rel=1e-3)


def test_measuring_changes_no_loss(corpus: Path, tmp_path: Path) -> None:
    measured, plain = (_train(corpus, tmp_path, 2, 4, every) for every in (2, None))
    assert measured.validation_loss == plain.validation_loss
    assert [round_ for round_, _ in measured.bias] == [2]
    assert not plain.bias
