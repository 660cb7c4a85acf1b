"""Equation 5's bias: nothing where nothing is lost, less with fewer compressed replicas, and no effect on training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from hetero_pp.data.tokens import prepare_tokens
from hetero_pp.run.config import RunConfig
from hetero_pp.run.spec import RunSpec
from replica_groups.fast.train import FastResult, train_fast


def _train(corpus: Path, folder: Path, compressed: int, rank: int, every: int | None = 1) -> FastResult:
    torch.set_num_threads(1)
    home = {"kind": "participants", "stages": 2, "boundary": {"rank": rank, "dtype": "fp32"}}
    replicas: list[dict[str, Any]] = [
        {"name": f"r{index}", "batch_size": 4} | (home if index < compressed else {"kind": "datacenter"})
        for index in range(4)
    ]
    config = RunConfig.model_validate(
        {
            "name": "t",
            "model": {"width": 32, "heads": 2, "feed_forward": 48, "layers": 2},
            "data": {"corpus": str(corpus), "sequence_length": 32, "validation_share": 0.2, "validation_sequences": 8},
            "inner": {"steps": 3, "warmup_steps": 3, "learning_rate": 0.01},
            "outer": {"rounds": 3, "compression": {"value_bits": 32}},
            "replicas": replicas,
        }
    )
    return train_fast(RunSpec(config, 256), prepare_tokens(config.data, folder), bias_every=every)


def test_a_full_basis_loses_nothing(corpus: Path, tmp_path: Path) -> None:
    """With k = d the split embedding has no part outside the subspace, and coefficients tell all."""
    result = _train(corpus, tmp_path, 4, 32)
    assert [round_ for round_, _ in result.bias] == [1, 2, 3]
    assert max(share for _, share in result.bias) < 2e-2  # Adam makes much of rounding where gradients are near 0


def test_it_falls_with_the_share_of_compressed_replicas(corpus: Path, tmp_path: Path) -> None:
    firsts = [_train(corpus, tmp_path, compressed, 4).bias[0][1] for compressed in (0, 1, 2, 4)]
    assert firsts[0] == 0
    assert 0.02 < firsts[1] < firsts[2] < firsts[3]


def test_measuring_changes_no_loss(corpus: Path, tmp_path: Path) -> None:
    measured, plain = (_train(corpus, tmp_path, 2, 4, every) for every in (2, None))
    assert measured.validation_loss == plain.validation_loss
    assert [round_ for round_, _ in measured.bias] == [2]
    assert not plain.bias
