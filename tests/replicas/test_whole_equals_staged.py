"""A replica of the trainer of tables against the same replica cut into stages: gradients for every boundary."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from hetero_pp.model import arithmetic
from hetero_pp.model.inner import InnerSettings
from hetero_pp.model.part_settings import BoundarySettings, StageSpec
from hetero_pp.model.transformer import (
    EMBEDDING,
    ModelSettings,
    RopeScaling,
    Transformer,
    build_part,
    can_compile,
    compile_layers,
    initialise,
)
from hetero_pp.pipeline.coefficients import format_of, noise_key
from hetero_pp.pipeline.subspace import random_basis
from hetero_pp.research.trainer.replica import TableReplica
from stages.anchors import Anchors, anchors_of
from stages.boundary import Boundary
from stages.stage import Stage

SHAPE = ModelSettings(
    width=32,
    heads=4,
    kv_heads=2,
    feed_forward=48,
    layers=4,
    rope_theta=100.0,
    rope_scaling=RopeScaling(factor=8, low_frequency_factor=1, high_frequency_factor=4, original_length=32),
).resolve(64)
RANGES = [range(1), range(1, 3), range(3, 4)]
MICRO_BATCHES = 2
SEED, STEP = 7, 11
BOUNDARIES = {
    "full fp32": {"rank": "full", "dtype": "fp32"},
    "full bf16": {"rank": "full", "dtype": "bf16"},
    "rank 8 fp32": {"rank": 8, "dtype": "fp32"},
    "rank 8 bf16": {"rank": "1/4", "dtype": "bf16"},
    "rank 16 in 4 bits": {"rank": "1/2", "bits": 4},
    "rank 8 in 2 bits": {"rank": 8, "bits": 2},
    "full fp32 with anchors": {"rank": "full", "dtype": "fp32", "anchors": {"rank": "full"}},
    "rank 8 fp32 with anchors": {"rank": 8, "dtype": "fp32", "anchors": {"rank": 4}},
    "rank 16 in 4 bits with anchors": {"rank": "1/2", "bits": 4, "anchors": {"rank": 4}},
}
COMPILES = pytest.mark.starts_processes
"""Mark of the tests that start a C++ compiler."""


def _boundary(settings: BoundarySettings) -> Boundary:
    rank = settings.dimensions(SHAPE.width)
    return Boundary(SHAPE.width, format_of(settings), None if rank is None else random_basis(SHAPE.width, rank, 1))


def _anchors(settings: BoundarySettings) -> list[Anchors]:
    """Return anchors that have learned something."""
    found = [anchors_of(settings.anchors, SHAPE, InnerSettings(), 100, 10, SEED, "home", hop) for hop in range(2)]
    anchors = [one for one in found if one is not None]
    for one in anchors:
        nn.init.normal_(one.table, generator=torch.Generator().manual_seed(6))
    return anchors


def _staged_gradients(
    settings: BoundarySettings, tokens: Tensor, embedding: Tensor, dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    stages, anchors = [], _anchors(settings)
    for index, layers in enumerate(RANGES):
        spec = StageSpec(index, len(RANGES), layers)
        own = anchors[index - 1] if anchors and index else None
        stage = Stage(spec, build_part(SHAPE, spec, dtype), _boundary(settings), InnerSettings(), 100, anchors=own)
        initialise(stage.module, 3)
        stage.split_embedding(embedding)
        stages.append(stage)
    for number, micro_batch in enumerate(tokens.chunk(MICRO_BATCHES)):
        came = None
        for stage in stages:
            output = stage.forward(number, micro_batch, came, MICRO_BATCHES)
            came = None if stage.spec.is_last else stage.boundary.encode_activation(output)
        came = None
        for stage in reversed(stages):
            came = stage.backward(number, came, noise_key(SEED, "home", stage.spec.index - 1, STEP, number))
    found = {name: p.grad for stage in stages for name, p in stage.parameters.items() if p.grad is not None}
    return found | _gradients_of(anchors)


def _gradients_of(anchors: Sequence[Anchors]) -> dict[str, Tensor]:
    named = {f"{hop}.{name}": p for hop, one in enumerate(anchors) for name, p in one.parameters.items()}
    return {name: p.grad for name, p in named.items() if p.grad is not None}


@pytest.mark.parametrize(
    ("name", "compiles"),
    [*((name, False) for name in BOUNDARIES), pytest.param("rank 8 fp32", True, marks=COMPILES)],
)
def test_gradients_agree(name: str, compiles: bool) -> None:
    """Layers are compiled with one boundary, where compilation works.

    Code between the layers is not compiled.

    That boundary does not round, because a last bit can decide which way a value is rounded.
    """
    settings = BoundarySettings.model_validate(BOUNDARIES[name])
    tokens = torch.randint(0, 64, (4, 17), generator=torch.Generator().manual_seed(5))
    module = Transformer(SHAPE)
    initialise(module, 3)
    cuts = [layers.stop - 1 for layers in RANGES[:-1]]
    if compiles and can_compile(torch.device("cpu")):
        compile_layers([module])
    anchors = _anchors(settings)
    whole = TableReplica(
        "home", module, InnerSettings(), 100, MICRO_BATCHES, _boundary(settings), cuts, SEED, anchors=anchors
    )
    whole.split_embedding()
    whole.backward(tokens, STEP)
    gradients = {name: p.grad for name, p in whole.parameters.items()} | _gradients_of(anchors)

    staged = _staged_gradients(settings, tokens, module.state_dict()[EMBEDDING].clone())
    assert set(staged) == set(gradients)
    assert len(staged) - len(whole.parameters) == sum(len(one.parameters) for one in anchors)
    for key, gradient in staged.items():
        expected = gradients[key]
        assert expected is not None
        torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-5, msg=partial("{}: {}".format, key))


@pytest.mark.parametrize("is_in_pieces", [False, True])
@pytest.mark.parametrize("name", BOUNDARIES)
def test_in_bf16_gradients_have_the_same_bits(name: str, is_in_pieces: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole replica recomputes its layers, too."""
    if is_in_pieces:
        monkeypatch.setattr(arithmetic, "PIECE_BYTES", 4 * SHAPE.vocabulary * 10)
    settings = BoundarySettings.model_validate(BOUNDARIES[name])
    tokens = torch.randint(0, 64, (4, 17), generator=torch.Generator().manual_seed(5))
    module = Transformer(SHAPE, compute_dtype=torch.bfloat16, recomputes=True)
    initialise(module, 3)
    cuts, anchors = [layers.stop - 1 for layers in RANGES[:-1]], _anchors(settings)
    whole = TableReplica(
        "home", module, InnerSettings(), 100, MICRO_BATCHES, _boundary(settings), cuts, SEED, anchors=anchors
    )
    whole.split_embedding()
    whole.backward(tokens, STEP)
    gradients = {name: p.grad for name, p in whole.parameters.items()} | _gradients_of(anchors)
    staged = _staged_gradients(settings, tokens, module.state_dict()[EMBEDDING].clone(), torch.bfloat16)
    assert set(staged) == set(gradients)
    for key, gradient in staged.items():
        expected = gradients[key]
        assert expected is not None
        assert torch.equal(gradient, expected), key
        assert gradient.dtype == torch.float32


def test_the_boundaries_matter() -> None:
    """The comparison above would be empty if boundaries changed nothing."""
    tokens = torch.randint(0, 64, (4, 17), generator=torch.Generator().manual_seed(5))
    losses = set()
    for values in BOUNDARIES.values():
        module = Transformer(SHAPE)
        initialise(module, 3)
        settings = BoundarySettings.model_validate(values)
        boundary, anchors = _boundary(settings), _anchors(settings)
        whole = TableReplica(
            "home", module, InnerSettings(), 100, MICRO_BATCHES, boundary, [0, 2], SEED, anchors=anchors
        )
        whole.split_embedding()
        losses.add(whole.backward(tokens, STEP))
    assert len(losses) == len(BOUNDARIES)
