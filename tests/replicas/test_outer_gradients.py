"""Norm of the outer gradient, and cosines with a reference momentum, equal the formulas. Measuring changes nothing."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from table_config import table_config, tiny
from torch import Tensor

from hetero_pp.config.spec import RunSpec
from hetero_pp.core.errors import ConfigError
from hetero_pp.data.tokens import prepare_tokens
from hetero_pp.pseudo_gradient.compression import CompressionSettings
from hetero_pp.research.settings import Every
from hetero_pp.research.trainer.measurements import OuterGradients
from hetero_pp.research.trainer.train import AllReplicas, train_fast

LOM = {"method": "diloco_lom"}
SPARSE = {"compression": {"density": "1/16", "error_feedback_decay": 0.8}}


def _spec(corpus: Path, outer: dict[str, Any]) -> RunSpec:
    torch.set_num_threads(1)
    config = table_config(
        {
            **tiny(corpus, 32, 1),
            "inner": {"steps": 2, "warmup_steps": 3, "learning_rate": 0.01},
            "outer": {"rounds": 4, **outer},
            "replicas": [{"name": f"r{index}", "kind": "datacenter", "batch_size": 4} for index in range(3)],
        }
    )
    return RunSpec(config, 256)


def _measured(vectors: list[Tensor], weights: list[float], decay: float = 0.0) -> OuterGradients:
    """Return the measurement of one round in which replicas contribute these vectors, which are their memories, too."""
    gradients = OuterGradients(CompressionSettings(error_feedback_decay=decay), 1)
    gradients.begin(1)
    for part in (0, 1):
        for number, (vector, weight) in enumerate(zip(vectors, weights, strict=True)):
            own = vector.chunk(2)[part]
            gradients.contribution(f"r{number}", weight, own, own, 0 * own)
        gradients.parameter(f"p{part}", sum(weights))
    gradients.finish()
    return gradients


@pytest.mark.parametrize("count", [1, 2, 4, 8, 16])
def test_orthogonal_contributions_have_a_mean_of_the_inverse_root_and_equal_ones_of_one(count: int) -> None:
    orthogonal = _measured([3 * vector for vector in torch.eye(16)[:count]], [0.5] * count)
    assert orthogonal.found == [
        (1, pytest.approx(3 / math.sqrt(count)), pytest.approx(3 / math.sqrt(count)), None, None)
    ]
    equal = _measured([3 * torch.eye(16)[0]] * count, [2.0] * count)
    assert equal.found == [(1, pytest.approx(3.0), pytest.approx(3 / math.sqrt(count)), None, None)]


def test_correlated_ones_follow_the_formula_with_their_cosine_and_weights_count() -> None:
    cosine, count = 0.3, 5
    common = math.sqrt(cosine) * torch.eye(8)[7]
    vectors = [common + math.sqrt(1 - cosine) * vector for vector in torch.eye(8)[:count]]
    [(_, norm, uncorrelated, *_)] = _measured(vectors, [1.0] * count).found
    assert norm == pytest.approx(math.sqrt((1 + (count - 1) * cosine) / count))
    assert uncorrelated == pytest.approx(1 / math.sqrt(count))
    [(_, norm, uncorrelated, *_)] = _measured(list(torch.eye(4)[:2]), [3.0, 1.0]).found
    assert norm == pytest.approx(math.sqrt(10) / 4)
    assert uncorrelated == pytest.approx(math.sqrt(10) / 4)


def test_a_memory_has_the_cosine_of_its_angle_to_the_mean_and_nothing_left_has_none() -> None:
    [(*_, before, after)] = _measured(list(torch.eye(4)[:2]), [1.0, 1.0], decay=0.9).found
    assert before == pytest.approx(1 / math.sqrt(2))
    assert after == 0.0


@pytest.mark.parametrize(
    "outer",
    [LOM, LOM | {"memory_drops": 0.25}, SPARSE, SPARSE | {"missed": 0.4}],
    ids=["LOM", "LOM-Sub-k", "SparseLoCo", "SparseLoCo with missed ones"],
)
def test_a_run_is_measured_by_the_formulas(outer: dict[str, Any], corpus: Path, tmp_path: Path) -> None:
    spec = _spec(corpus, outer)
    group = AllReplicas(spec, prepare_tokens(spec.config.data, tmp_path), every=Every(outer=2))
    decay = spec.config.outer.compression.error_feedback_decay
    names = list(group.theta)
    reference = torch.zeros(sum(tensor.numel() for tensor in group.theta.values()))
    expected = []

    def flat(tensors: dict[str, Tensor]) -> Tensor:
        return torch.cat([tensors[name].detach().flatten() for name in names])

    synchronise = group._synchronise

    def followed(round_: int) -> None:
        nonlocal reference
        deltas = [flat(group.theta) - flat(dict(replica.parameters)) for replica in group.replicas]
        before = [decay * flat(error) + delta for error, delta in zip(group.errors, deltas, strict=True)]
        synchronise(round_)
        here = [number for number, own in enumerate(group.settings) if own.name not in group.contributions.missed]
        mean = torch.stack([deltas[number] for number in here]).mean(0)
        reference = decay * reference + mean
        cosines = [
            torch.stack([torch.cosine_similarity(memories[number], reference, dim=0) for number in here]).mean().item()
            for memories in (before, [flat(error) for error in group.errors])
        ]
        own = math.sqrt(sum(deltas[number].norm().item() ** 2 for number in here)) / len(here)
        expected.append((round_, mean.norm().item(), own, *cosines))

    group._synchronise = followed  # type: ignore[method-assign]
    assert all(group.round(round_) for round_ in range(1, 5))
    assert group.measured.outer is not None
    assert group.measured.outer.found == [pytest.approx(one, rel=1e-4) for one in expected[1::2]]
    _, _, _, first, last = expected[-1]
    assert (first == pytest.approx(last, rel=1e-4)) == (outer == LOM)


@pytest.mark.parametrize(
    "outer", [LOM, SPARSE, {"method": "diloco"}, {"overlap": 1}, {**SPARSE, "missed": 0.4, "keep_local": True}]
)
def test_nothing_depends_on_any_measurement_and_a_row_that_goes_on_keeps_it(
    outer: dict[str, Any], corpus: Path, tmp_path: Path
) -> None:
    spec, path, every = _spec(corpus, outer), tmp_path / "checkpoint", Every(outer=1, similarity=1, volume=2)
    tokens = prepare_tokens(spec.config.data, tmp_path)
    plain, measured = train_fast(spec, tokens), train_fast(spec, tokens, every=every)
    assert plain.validation_loss == measured.validation_loss
    assert plain.outer_gradients == plain.similarity == plain.volume == []
    assert [round_ for round_, *_ in measured.outer_gradients] == [1, 2, 3, 4]
    assert [round_ for round_, *_ in measured.volume] == [2, 4]
    assert len(measured.similarity) >= (2 if outer.get("keep_local") else 4)
    assert (measured.outer_gradients[0][3] is None) == (outer == {"method": "diloco"})

    def interrupt(round_: int, loss: float) -> None:
        if round_ == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_fast(spec, tokens, interrupt, checkpoint=path, checkpoint_seconds=0, every=every)
    went_on = train_fast(spec, tokens, checkpoint=path, every=every)
    assert (went_on.validation_loss, went_on.outer_gradients) == (plain.validation_loss, measured.outer_gradients)
    assert (went_on.similarity, went_on.volume) == (measured.similarity, measured.volume)


def test_coefficients_of_a_transform_are_refused() -> None:
    with pytest.raises(ConfigError, match="found transform dct, expected contributions without transform"):
        OuterGradients(CompressionSettings(transform="dct"), 1)
