"""Replicas that take their inner steps in one batch, against the same replicas one after another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from table_config import table_config

from hetero_pp.data.tokens import TokenStore, prepare_tokens
from hetero_pp.pipeline.coefficients import Floats
from hetero_pp.research.vectorized.all_replicas import AllReplicas
from hetero_pp.research.vectorized.stack import is_faster
from hetero_pp.research.vectorized.train import train_fast
from hetero_pp.run.spec import RunSpec


class _Interrupted(Exception):
    pass


def _spec(
    corpus: Path,
    folder: Path,
    compressed: int,
    outer: dict[str, Any] | None = None,
    boundary: dict[str, Any] | None = None,
) -> tuple[RunSpec, TokenStore]:
    torch.set_num_threads(1)
    home = {"kind": "participants", "stages": 2, "micro_batches": 2, "boundary": {"rank": "1/4", **(boundary or {})}}
    config = table_config(
        {
            "name": "t",
            "model": {"width": 32, "heads": 4, "kv_heads": 2, "head_width": 16, "feed_forward": 48, "layers": 2},
            "data": {"corpus": str(corpus), "sequence_length": 32, "validation_share": 0.2, "validation_sequences": 8},
            "inner": {"steps": 3, "warmup_steps": 3, "learning_rate": 0.01, "clip_norm": 0.5},
            "outer": {"rounds": 2, "compression": {"value_bits": 32}, **(outer or {})},
            "replicas": [
                {"name": f"r{index}", "batch_size": 4} | (home if index < compressed else {"kind": "datacenter"})
                for index in range(4)
            ],
        }
    )
    return RunSpec(config, 256), prepare_tokens(config.data, folder)


@pytest.mark.parametrize("compressed", [0, 2, 4])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_gradients_agree(compressed: int, dtype: str, corpus: Path, tmp_path: Path) -> None:
    spec, store = _spec(corpus, tmp_path, compressed, boundary={"dtype": dtype})
    looped, stacked = AllReplicas(spec, store), AllReplicas(spec, store, stacks=True)
    assert [len(stack.replicas) for stack in stacked.stacks] == ([4] if compressed in (0, 4) else [2, 2])
    assert stacked.loose == []
    for replica, batches in zip(looped.replicas, looped.batches, strict=True):
        replica.backward(batches.train(0), 0)
    for stack in stacked.stacks:
        stack.backward(0)
        stack.give_gradients()
    for ours, expected in zip(stacked.replicas, looped.replicas, strict=True):
        for name, parameter in expected.parameters.items():
            torch.testing.assert_close(ours.parameters[name].grad, parameter.grad, rtol=1e-5, atol=1e-5, msg=name)


@pytest.mark.parametrize(
    ("method", "compressed"), [*(("sparseloco", count) for count in (0, 2, 4)), ("diloco", 2), ("adamw_ddp", 2)]
)
def test_losses_agree(method: str, compressed: int, corpus: Path, tmp_path: Path) -> None:
    """Coefficients are fp32, because rounding to bf16 amplifies small differences."""
    spec, store = _spec(corpus, tmp_path, compressed, {"method": method}, {"dtype": "fp32"})
    looped, stacked = train_fast(spec, store), train_fast(spec, store, stacks=True)
    assert (looped.stacked, stacked.stacked) == (False, True)
    assert stacked.validation_loss == pytest.approx(looped.validation_loss, rel=1e-4)
    assert stacked.uncompressed == pytest.approx(looped.uncompressed, rel=1e-4)


@pytest.fixture(scope="module")
def free(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Return the losses of a run without constraints."""
    return train_fast(*_spec(corpus, tmp_path_factory.mktemp("free"), 4)).validation_loss


@pytest.mark.parametrize(
    "boundary",
    [
        {"embedding": "coefficients"},
        {"embedding": "projected"},
        {"embedding": "coefficients", "ablations": {"weight_projection": "both"}},
    ],
)
def test_losses_with_constraints_agree(
    boundary: dict[str, Any], corpus: Path, tmp_path: Path, free: list[float]
) -> None:
    spec, store = _spec(corpus, tmp_path, 4, None, {"dtype": "fp32", **boundary})
    looped, stacked = train_fast(spec, store), train_fast(spec, store, stacks=True)
    assert (looped.stacked, stacked.stacked) == (False, True)
    assert stacked.validation_loss == pytest.approx(looped.validation_loss, rel=1e-4)
    assert stacked.validation_loss != pytest.approx(free, rel=1e-4)


def test_what_cannot_be_stacked_is_not(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Boundaries with few bits have one scale per message, and their format says so. One replica alone is no stack."""
    spec, store = _spec(corpus, tmp_path, 3, boundary={"bits": 4})
    assert AllReplicas(spec, store, stacks=True).loose == [0, 1, 2, 3]
    spec, store = _spec(corpus, tmp_path, 4)
    with monkeypatch.context() as other:
        other.setattr(Floats, "is_elementwise", False)
        assert AllReplicas(spec, store, stacks=True).loose == [0, 1, 2, 3]
    spec, store = _spec(corpus, tmp_path, 2, boundary={"ablations": {"modified_adamw": True}})
    group = AllReplicas(spec, store, stacks=True)
    assert (group.loose, len(group.stacks)) == ([0, 1], 1)
    assert group.round(1)
    assert not AllReplicas(spec, store).is_stacked


def test_nothing_is_held_twice(corpus: Path, tmp_path: Path) -> None:
    spec, store = _spec(corpus, tmp_path, 2)
    group = AllReplicas(spec, store, stacks=True)
    assert group.round(1)
    for stack in group.stacks:
        for name, whole in stack.parameters.items():
            held = {replica.parameters[name].untyped_storage().data_ptr() for replica in stack.replicas}
            assert held == {whole.untyped_storage().data_ptr()}
        assert len({id(replica.optimizer.perpendicular) for replica in stack.replicas}) == 1
    assert not any(part.state for replica in group.replicas for part in replica.optimizer.optimizers)


def test_a_measurement_leaves_no_trace(corpus: Path, tmp_path: Path) -> None:
    spec, store = _spec(corpus, tmp_path, 2)
    measured, plain = AllReplicas(spec, store, stacks=True), AllReplicas(spec, store, stacks=True)
    assert is_faster(measured.stacks, measured.theta) in (True, False)
    for group in (measured, plain):
        assert group.round(1)
    assert measured.evaluate() == plain.evaluate()


@pytest.mark.parametrize("method", ["sparseloco", "adamw_ddp"])
def test_an_interrupted_run_goes_on_to_the_same_bits(method: str, corpus: Path, tmp_path: Path) -> None:
    spec, store = _spec(corpus, tmp_path, 2, {"method": method})
    path = tmp_path / "checkpoint"

    def interrupt(round_: int, loss: float) -> None:
        raise _Interrupted

    with pytest.raises(_Interrupted):
        train_fast(spec, store, interrupt, checkpoint=path, checkpoint_seconds=0, stacks=True)
    resumed = train_fast(spec, store, checkpoint=path)
    assert resumed.stacked
    assert resumed.validation_loss == train_fast(spec, store, stacks=True).validation_loss
