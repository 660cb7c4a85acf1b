"""Cosines of contributions are equal to torch's and to those of sent values."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from table_config import table_config, tiny
from torch import Tensor

from hetero_pp.config.spec import RunSpec
from hetero_pp.data.tokens import prepare_tokens
from hetero_pp.pseudo_gradient.contribution import DecodedTensor
from hetero_pp.research.settings import Every
from hetero_pp.research.trainer.measurements import Similarities
from hetero_pp.research.trainer.train import AllReplicas

DILOCO = {"method": "diloco"}
SPARSE = {"compression": {"density": "1/16"}}


def _spec(corpus: Path, outer: dict[str, Any]) -> RunSpec:
    torch.set_num_threads(1)
    config = table_config(
        {
            **tiny(corpus, 32, 2),
            "inner": {"steps": 3, "warmup_steps": 3, "learning_rate": 0.01},
            "outer": {"rounds": 4, **outer},
            "replicas": [{"name": f"r{index}", "kind": "datacenter", "batch_size": 4} for index in range(3)],
        }
    )
    return RunSpec(config, 256)


def _cosines(vectors: list[Tensor]) -> Tensor:
    pairs = combinations([vector.double() for vector in vectors], 2)
    return torch.stack([torch.nn.functional.cosine_similarity(a, b, dim=0) for a, b in pairs])


def _all(tensor: Tensor) -> DecodedTensor:
    return DecodedTensor(torch.arange(tensor.numel()), tensor.flatten())


def test_they_are_those_of_torch_over_all_parameters() -> None:
    random = torch.Generator().manual_seed(1)
    shapes = [(4, 6), (5,), (2, 3, 2)]
    each = [[torch.randn(shape, generator=random) for shape in shapes] for _ in range(4)]
    alike = Similarities()
    for number, shape in enumerate(shapes):
        alike.add([_all(tensors[number]) for tensors in each], shape)
    expected = _cosines([torch.cat([tensor.flatten() for tensor in tensors]) for tensors in each])
    assert alike.of_pairs() == pytest.approx((expected.mean().item(), expected.std(correction=0).item()), abs=1e-12)


def test_of_what_is_not_sent_there_is_nothing() -> None:
    one, other = DecodedTensor(torch.tensor([0, 5]), torch.tensor([3.0, 4.0])), _all(torch.tensor([1.0, 0, 0, 0, 0, 2]))
    alike = Similarities()
    alike.add([one, other], (2, 3))
    assert alike.of_pairs() == pytest.approx((11 / (5 * 5**0.5), 0.0))
    silent = Similarities()
    silent.add([one, DecodedTensor(torch.tensor([], dtype=torch.long), torch.tensor([]))], (2, 3))
    assert silent.of_pairs() == (0.0, 0.0)
    assert Similarities().of_pairs() is None
    alone = Similarities()
    alone.add([one], (2, 3))
    assert alone.of_pairs() is None


def test_dense_ones_are_of_where_replicas_have_come_to(corpus: Path, tmp_path: Path) -> None:
    spec = _spec(corpus, DILOCO)
    group = AllReplicas(spec, prepare_tokens(spec.config.data, tmp_path), every=Every(similarity=2))
    found: list[tuple[int, float, float]] = []
    synchronise = group._synchronise

    def first(round_: int) -> None:
        ways = [
            torch.cat([(start - replica.parameters[name].detach()).flatten() for name, start in group.theta.items()])
            for replica in group.replicas
        ]
        cosines = _cosines(ways)
        found.append((round_, cosines.mean().item(), cosines.std(correction=0).item()))
        synchronise(round_)

    group._synchronise = first  # type: ignore[method-assign]
    assert all(group.round(round_) for round_ in range(1, 5))
    assert [round_ for round_, *_ in group.measured.similarity] == [2, 4]
    for measured, expected in zip(group.measured.similarity, found[1::2], strict=True):
        assert measured == pytest.approx(expected, rel=1e-6)
        assert 0 < measured[1] < 1
