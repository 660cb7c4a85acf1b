"""An interrupted run of the trainer of tables resumes with the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from table_config import table_config, tiny

from hetero_pp.config.spec import RunSpec
from hetero_pp.core.errors import ConfigError
from hetero_pp.data.tokens import prepare_tokens
from hetero_pp.research.trainer.train import FastResult, train_fast

METHODS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "sparseloco_signs": ({}, {"ablations": {"adaptation": "stale"}}),
    "diloco": ({"method": "diloco"}, {"anchors": {"rank": 4}}),
    "adamw_ddp": ({"method": "adamw_ddp"}, {}),
    "coefficients": ({}, {"embedding": "coefficients", "ablations": {"modified_adamw": True}}),
    "discarded": ({}, {"embedding": "coefficients", "ablations": {"adaptation": "discarded"}}),
    "resbm": ({}, {"ablations": {"peer": {"method": "resbm"}}}),
    "mapl": ({}, {"ablations": {"peer": {"method": "mapl"}}}),
    "grassmann": ({}, {"embedding": "coefficients", "ablations": {"grassmann_every": 1}}),
    "keep_local": ({"missed": 0.3, "keep_local": True}, {"rank": "full"}),  # `home` misses all rounds but the third
}


class _Interrupted(Exception):
    pass


def _spec(corpus: Path, method: str) -> RunSpec:
    torch.set_num_threads(1)
    outer, boundary = METHODS[method]
    home = {"name": "home", "kind": "participants", "stages": 2, "boundary": {"rank": "1/4", **boundary}}
    config = table_config(
        {
            **tiny(corpus, 32, 2),
            "inner": {"steps": 3, "warmup_steps": 3, "learning_rate": 0.01},
            "outer": {"rounds": 3, **outer},
            "replicas": [home | {"batch_size": 4}, {"name": "dc", "kind": "datacenter", "batch_size": 4}],
        }
    )
    return RunSpec(config, 256)


def _interrupt_after(round_: int) -> Any:
    def on_round(number: int, loss: float) -> None:
        if number == round_:
            raise _Interrupted

    return on_round


def _told(result: FastResult) -> tuple[object, ...]:
    return result.validation_loss, result.uncompressed, result.compressed, result.tokens, result.bias


@pytest.mark.parametrize("method", METHODS)
def test_it_goes_on_to_the_same_bits(method: str, corpus: Path, tmp_path: Path) -> None:
    spec, path = _spec(corpus, method), tmp_path / "rows" / "checkpoint"
    store = prepare_tokens(spec.config.data, tmp_path)
    expected = train_fast(spec, store)
    for round_ in (1, 2):
        with pytest.raises(_Interrupted):
            train_fast(spec, store, _interrupt_after(round_), checkpoint=path, checkpoint_seconds=0)
        assert [file.name for file in path.parent.iterdir()] == ["checkpoint"]
    rounds: list[int] = []
    result = train_fast(spec, store, lambda round_, loss: rounds.append(round_), checkpoint=path)
    assert rounds == [3]
    assert _told(result) == _told(expected)
    assert not list(path.parent.iterdir())


def test_it_is_saved_when_it_is_time(corpus: Path, tmp_path: Path) -> None:
    spec, path = _spec(corpus, "diloco"), tmp_path / "checkpoint"
    with pytest.raises(_Interrupted):
        train_fast(spec, prepare_tokens(spec.config.data, tmp_path), _interrupt_after(2), checkpoint=path)
    assert not path.exists()


def test_a_checkpoint_of_another_run_is_refused(corpus: Path, tmp_path: Path) -> None:
    spec, other, path = _spec(corpus, "diloco"), _spec(corpus, "sparseloco_signs"), tmp_path / "checkpoint"
    store = prepare_tokens(spec.config.data, tmp_path)
    with pytest.raises(_Interrupted):
        train_fast(spec, store, _interrupt_after(1), checkpoint=path, checkpoint_seconds=0)
    with pytest.raises(ConfigError, match="found the checkpoint of another configuration"):
        train_fast(other, store, checkpoint=path)
