"""Inner moments averaged in each round: the trainer of tables against an explicit mean, and invalid settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from table_config import table_config, tiny

from hetero_pp.config.run_config import RunConfig
from hetero_pp.config.spec import RunSpec
from hetero_pp.core.errors import ConfigError
from hetero_pp.data.tokens import prepare_tokens
from hetero_pp.research.trainer.measurements import contribution_bytes
from hetero_pp.research.trainer.train import MOMENTS, AllReplicas, train_fast

BATCHES = {"a": 2, "b": 6, "c": 4}
HOME = {"name": "d", "kind": "participants", "stages": 2, "batch_size": 2, "boundary": {"rank": "1/4"}}


def _config(corpus: Path, outer: dict[str, Any], inner: dict[str, Any] | None = None, **more: Any) -> RunConfig:
    replicas = [{"name": name, "kind": "datacenter", "batch_size": size} for name, size in BATCHES.items()]
    return table_config(
        {
            **tiny(corpus, 16, 2),
            "inner": {"steps": 2, "warmup_steps": 0, "learning_rate": 0.01} | (inner or {}),
            "outer": {"rounds": 3, "method": "diloco", "averages_moments": True, **outer},
            "replicas": [*replicas, {**HOME, **more.get("home", {})}],
        }
    )


def _moments(group: AllReplicas) -> list[dict[str, dict[str, torch.Tensor]]]:
    found = []
    for replica in group.replicas:
        states = {id(one): kept for part in replica.optimizer.optimizers for one, kept in part.state.items()}
        found.append({name: states[id(own)] for name, own in replica.parameters.items()})
    return found


@pytest.mark.parametrize("weights", ["equal", "tokens"])
def test_each_is_the_mean_of_all_replicas(weights: str, corpus: Path, tmp_path: Path) -> None:
    """Groups and datacenters are alike. In the first round, parameters are as without averaging."""
    torch.set_num_threads(1)
    spec = RunSpec(_config(corpus, {"weights": weights}), 256)
    plain = RunSpec(_config(corpus, {"weights": weights, "averages_moments": False}), 256)
    store = prepare_tokens(spec.config.data, tmp_path)
    averaged, own = AllReplicas(spec, store), AllReplicas(plain, store)
    assert averaged.round(1)
    assert own.round(1)
    shares = [float(size) if weights == "tokens" else 1.0 for size in (*BATCHES.values(), 2)]
    before, after = _moments(own), _moments(averaged)
    for name, theta in averaged.theta.items():
        assert theta.equal(own.theta[name])
        for kind in MOMENTS:
            mean = sum(share * one[name][kind] for share, one in zip(shares, before, strict=True)) / sum(shares)
            assert not before[0][name][kind].equal(before[1][name][kind])
            for found in after:
                torch.testing.assert_close(found[name][kind], mean, rtol=1e-5, atol=1e-12)
    assert averaged.round(2)
    assert own.round(2)
    assert any(not averaged.theta[name].equal(own.theta[name]) for name in own.theta)


def test_they_are_sent_too(corpus: Path) -> None:
    """Moments add eight bytes per parameter to the four of a contribution."""
    averaged, plain = (RunSpec(_config(corpus, {"averages_moments": one}), 256) for one in (True, False))
    size = sum(torch.Size(shape).numel() for shape in plain.parameter_shapes.values())
    assert contribution_bytes(averaged, 3) - contribution_bytes(plain, 3) == 3 * 4 * 8 * size


def test_it_goes_on_from_a_checkpoint_to_the_same_bits(corpus: Path, tmp_path: Path) -> None:
    spec, path = RunSpec(_config(corpus, {}), 256), tmp_path / "checkpoint"
    store = prepare_tokens(spec.config.data, tmp_path)

    def interrupt(round_: int, loss: float) -> None:
        if round_ == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_fast(spec, store, interrupt, checkpoint=path, checkpoint_seconds=0)
    went_on, whole = train_fast(spec, store, checkpoint=path), train_fast(spec, store)
    assert went_on.validation_loss == whole.validation_loss


@pytest.mark.parametrize(
    ("outer", "inner", "ablations"),
    [
        ({"method": "adamw_ddp"}, {"steps": 1}, {}),
        ({"overlap": 1}, {}, {}),
        ({"taking_part": {1: 1}}, {}, {}),
        ({"pretraining": 1}, {}, {}),
        ({"missed": 0.1}, {}, {}),
        ({}, {"optimizer": "muon"}, {}),
        ({}, {"optimizer": "sgd"}, {}),
        ({}, {}, {"modified_adamw": True}),
    ],
)
def test_rounds_that_are_not_of_all_and_other_moments_are_refused(
    outer: dict[str, Any], inner: dict[str, Any], ablations: dict[str, Any], corpus: Path
) -> None:
    home = {"boundary": {"rank": "1/4", **({"ablations": ablations} if ablations else {})}}
    with pytest.raises(ConfigError, match=r"found this key with .*, expected only one of them") as error:
        _config(corpus, outer, inner, home=home).check()
    assert error.value.key == ("research", "averages_moments")


def test_moments_of_coefficients_are_refused(corpus: Path) -> None:
    with pytest.raises(ConfigError, match=r"found this key with `boundary\.embedding: coefficients`, expected"):
        _config(corpus, {}, {}, home={"boundary": {"rank": "1/4", "embedding": "coefficients"}}).check()
