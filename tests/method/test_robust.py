"""Robust means against float64, by hand, and with hostile contributions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from pydantic import ValidationError

from hetero_pp.outer import robust
from hetero_pp.outer.methods import OuterSettings
from hetero_pp.outer.robust import CLIPPINGS, products_of, robust_mean
from hetero_pp.outer.step import mean_of
from hetero_pp.pseudo_gradient.contribution import DecodedTensor

SHAPE, SIZE = (60, 50), 3000
MEANS = ("trimmed_mean", "centred_clipping", "geometric_median")
Sent = list[tuple[float, DecodedTensor]]
Vectors = NDArray[np.float64]


def _settings(mean: str, **cells: Any) -> OuterSettings:
    return OuterSettings.model_validate({"rounds": 1, "aggregation": mean, **cells})


def _sent(replicas: int, density: float, seed: int = 0) -> Sent:
    """Return contributions around one direction; each replica sends other coordinates."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for index in range(replicas):
        where = torch.randperm(SIZE, generator=generator)[: int(SIZE * density)]
        values = torch.randn(len(where), generator=generator) * (1 + index / 8) + 0.5
        found.append((1.0, DecodedTensor(where, values)))
    return found


def _dense(sent: Sent) -> Vectors:
    return np.stack([mean_of((SIZE,), [(1.0, one)]).double().numpy() for _, one in sent])


def _trimmed(vectors: Vectors) -> Vectors:
    """Return the trimmed mean with a share of 1/4, one coordinate after the other."""
    norms = np.linalg.norm(vectors, axis=1)
    shortened = vectors * np.minimum(1, sorted(norms)[(len(norms) - 1) // 2] / norms)[:, None]
    found = []
    for column in shortened.T:
        values = sorted(column[column != 0])
        out = min(math.ceil(len(values) / 4), max(0, (len(values) - 1) // 2))
        kept = values[out : len(values) - out]
        found.append(sum(kept) / max(1, len(kept)) * len(values) / len(column))
    return np.array(found)


def _clipped(vectors: Vectors) -> Vectors:
    """Return the result of centred clipping as in the paper's algorithm 2."""
    centre = np.zeros(vectors.shape[1])
    for _ in range(CLIPPINGS):
        distances = np.linalg.norm(vectors - centre, axis=1)
        within = np.minimum(1, sorted(distances)[(len(distances) - 1) // 2] / distances)
        centre = centre + ((vectors - centre) * within[:, None]).mean(0)
    return centre


def _median(vectors: Vectors, weights: Sequence[float] | None = None) -> Vectors:
    """Return the geometric median after so many steps that it does not move any more."""
    centre, weighs = np.zeros(vectors.shape[1]), np.ones(len(vectors)) if weights is None else np.array(weights)
    for _ in range(500):
        near = weighs / np.linalg.norm(vectors - centre, axis=1)
        centre = near @ vectors / near.sum()
    return centre


REFERENCES: dict[str, Callable[[Vectors], Vectors]] = dict(zip(MEANS, (_trimmed, _clipped, _median), strict=True))


@pytest.mark.parametrize("density", [1.0, 0.25])
@pytest.mark.parametrize("mean", MEANS)
def test_it_is_the_mean_in_float64(mean: str, density: float) -> None:
    for replicas in (3, 8):
        sent = _sent(replicas, density)
        found = robust_mean(SHAPE, sent, _settings(mean))
        assert found.shape == SHAPE
        np.testing.assert_allclose(found.flatten().numpy(), REFERENCES[mean](_dense(sent)), atol=1e-6)


@pytest.mark.parametrize("mean", MEANS)
def test_parts_have_the_bits_of_the_whole(mean: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts are the rows of a rank, and the coordinates that are dense at the same time."""
    sent, settings = _sent(8, 0.25), _settings(mean)
    whole = robust_mean(SHAPE, sent, settings)
    for first, last in ((0, 13), (13, 60), (60, 60)):
        assert robust_mean(SHAPE, sent, settings, range(first, last)).equal(whole[first:last])
    monkeypatch.setattr(robust, "_AT_ONCE", 8 * 137)
    assert robust_mean(SHAPE, sent, settings).equal(whole)


@pytest.mark.parametrize("mean", MEANS)
def test_the_order_of_coordinates_changes_no_bit(mean: str) -> None:
    """Libraries add in other orders on other machines. With values of one size, all digits of the products count."""
    generator, sent, moved = torch.Generator().manual_seed(5), _sent(8, 0.9), list[tuple[float, DecodedTensor]]()
    order = torch.randperm(SIZE, generator=generator)
    for weight, one in sent:
        one.values.uniform_(1, 2, generator=generator)
        own = torch.randperm(len(one.values), generator=generator)
        moved.append((weight, DecodedTensor(order[one.indices[own]], one.values[own])))
    settings, of = _settings(mean), [[one for _, one in each] for each in (sent, moved)]
    assert products_of(of[0], SIZE) == products_of(of[1], SIZE)
    assert robust_mean((SIZE,), moved, settings)[order].equal(robust_mean((SIZE,), sent, settings))


def test_products_are_exact() -> None:
    """Compares with fractions, for values that are integers of few bits."""
    generator = torch.Generator().manual_seed(0)
    values = [torch.randint(-999, 999, (SIZE,), generator=generator).float() * 2.0**power for power in (-30, 0, 99)]
    found = products_of([DecodedTensor(torch.arange(SIZE), one) for one in values], SIZE)
    for own, row in zip(values, found, strict=True):
        exact = [
            sum(Fraction(a) * Fraction(b) for a, b in zip(own.tolist(), one.tolist(), strict=True)) for one in values
        ]
        assert row == [float(one) for one in exact]


@pytest.mark.parametrize("size", [1e3, 1e30])
@pytest.mark.parametrize("density", [1.0, 0.25])
@pytest.mark.parametrize("mean", MEANS)
def test_two_of_eight_move_it_by_a_bound(mean: str, density: float, size: float) -> None:
    """The bound is that of the geometric median (RFA, lemma 1): 2 x 6/8 / (1 - 2 x 2/8) = 3 times the largest norm."""
    sent = _sent(8, density)
    for index in (1, 6):
        sent[index] = (1.0, sent[index][1].scaled(-size))
    honest = [float(one.values.norm()) for index, (_, one) in enumerate(sent) if index not in (1, 6)]
    assert float(robust_mean(SHAPE, sent, _settings(mean)).norm()) < 3 * max(honest)
    assert float(mean_of(SHAPE, sent).norm()) > 10 * max(honest)


def test_of_coordinates_with_few_senders_little_is_trimmed() -> None:
    """Two senders' mean counts as 2/8 with eight replicas, and three senders' median as 3/8; all norms are 10."""
    sent: Sent = []
    for index in range(8):
        values = torch.tensor([3.0 + index, 4.0 * index, 1.0 + index % 4])
        values[:2].mul_(torch.tensor([index < 2, index < 3]))
        where = values.nonzero().view(-1)
        rest = math.sqrt(100 - float(values.square().sum()))
        sent.append(
            (
                1.0,
                DecodedTensor(
                    torch.cat([where, where.new_tensor([3 + index])]),
                    torch.cat([values[where], values.new_tensor([rest])]),
                ),
            )
        )
    found = robust_mean((12,), sent, _settings("trimmed_mean")).tolist()
    assert found[:3] == pytest.approx([2 / 8 * 3.5, 3 / 8 * 4.0, 2.5], rel=1e-6)
    assert found[11] == 0.0


def test_a_weight_of_the_median_is_as_good_as_a_copy() -> None:
    sent = _sent(4, 0.5)
    weighted = robust_mean(SHAPE, [(2.0, sent[0][1]), *sent[1:]], _settings("geometric_median", weights="tokens"))
    twice = robust_mean(SHAPE, [sent[0], *sent], _settings("geometric_median"))
    torch.testing.assert_close(weighted, twice, atol=1e-6, rtol=0)
    assert not torch.allclose(weighted, robust_mean(SHAPE, sent, _settings("geometric_median")), atol=1e-3)


@pytest.mark.parametrize(
    ("cells", "told"),
    [
        ({"aggregation": "trimmed_mean", "weights": "tokens"}, "weights `tokens` with `aggregation: trimmed_mean`"),
        ({"aggregation": "centred_clipping", "weights": "tokens"}, "which has no weights, expected `equal`"),
        ({"aggregation": "geometric_median", "divides_by": "senders"}, "found `divides_by: senders`"),
        ({"aggregation": "trimmed_mean", "method": "adamw_ddp"}, "with averaged gradients"),
        ({"aggregation": "trimmed_mean", "trim": 0.5}, "less than 0.5"),
        ({"aggregation": "centred_clipping", "radius": 0}, "greater than 0"),
    ],
)
def test_cells_that_do_not_fit_are_refused(cells: dict[str, Any], told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        OuterSettings.model_validate({"rounds": 1, **cells})
