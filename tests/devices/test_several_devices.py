"""A stage whose layers lie on several devices of its host (`device: [cuda:0, cuda:1]`)."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from mixed_run import MIXED, RESULTS, summary_in, train
from started import run_program
from torch import nn

from hetero_pp.config.member_inputs import devices_of
from hetero_pp.config.run_config import RunConfig
from hetero_pp.config.spec import RunSpec
from hetero_pp.core.errors import ConfigError
from hetero_pp.model import transformer
from hetero_pp.model.part_settings import StageSpec
from hetero_pp.model.transformer import ModelShape, build_part
from hetero_pp.simulator.prediction import predict


def _config(stages: Any, **changes: Any) -> RunConfig:
    values = {
        "name": "several",
        "model": {"width": 32, "heads": 2, "feed_forward": 48, "layers": 4},
        "data": {"corpus": "none", "sequence_length": 32},
        "outer": {"rounds": 2},
        "replicas": [{"name": "home", "kind": "participants", "stages": stages, "batch_size": 4, "hardware": "h100"}],
    }
    return RunConfig.model_validate(values | changes)


@pytest.mark.starts_processes
def test_over_grpc_its_bits_are_those_of_one_device(corpus: Path, tmp_path: Path) -> None:
    """The other device of tests/devices/test_second_device.py has other bits than a CPU."""
    one, several = "[{layers: 2}, {layers: 1}]", "[{layers: 2, device: [cpu, cpu]}, {layers: 1}]"
    changes = [f"--set=replicas.1.stages={several}", f"--set=data.corpus={corpus}"]
    done = run_program("launch", str(MIXED), "--runs", str(tmp_path / "grpc"), *changes)
    assert done.returncode == 0, done.stdout + done.stderr
    found = summary_in(tmp_path / "grpc" / "mixed")
    alone = train(corpus, tmp_path / "alone", f"replicas.1.stages={one}")
    assert {key: found[key] for key in RESULTS} == {key: alone[key] for key in RESULTS}


def test_each_device_has_about_as_many_parameters_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = ModelShape(width=32, layers=8, heads=2, feed_forward=64, vocabulary=256)
    placed, held = list[int](), Counter[int]()

    def noted(part: nn.Module, device: torch.device) -> None:
        placed.append(device.index)
        held[device.index] += sum(parameter.numel() for parameter in part.parameters())

    monkeypatch.setattr(transformer, "materialise", noted)
    with torch.device("meta"):
        module = build_part(shape, StageSpec(0, 1, range(8)))
    module.place([torch.device("cpu", number) for number in range(3)])
    assert placed == sorted(placed)
    layer = sum(parameter.numel() for parameter in module.layers["0"].parameters())
    assert [abs(held[number] - held.total() / 3) <= layer for number in range(3)] == [True] * 3


@pytest.mark.parametrize(
    ("stages", "told"),
    [
        (
            {"count": 2, "device": ["cpu", "cuda:0"]},
            "replicas[0].stages.device: found `[cpu, cuda:0]`, ",
        ),
        (
            [{}, {"device": ["cuda", "cuda"]}],
            "replicas[0].stages[1].device: found `[cuda, cuda]`, ",
        ),
        (
            {"count": 2, "device": ["cpu"] * 3},
            "replicas[0].stages.device: found 3 devices, expected at most the 2",
        ),
    ],
)
def test_devices_that_cannot_be_are_a_located_error(stages: Any, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        _config(stages).check()
    assert str(caught.value).startswith(told)


def test_a_device_that_this_machine_lacks_is_a_located_error() -> None:
    spec = RunSpec(_config([{}, {"device": ["cuda:998", "cuda:999"]}]), 256)
    with pytest.raises(ConfigError) as caught:
        devices_of(spec, ["home.0", "home.1"])
    assert str(caught.value).startswith("replicas[0].stages[1].device: found `cuda:998`, expected")


def test_a_prediction_has_the_memory_of_all_of_them() -> None:
    one, two = (
        predict(RunSpec(_config([{}, device]), 256)).replicas[0].stages
        for device in ({}, {"device": ["cuda:0", "cuda:1"]})
    )
    assert [b.memory_capacity_bytes / a.memory_capacity_bytes for a, b in zip(one, two, strict=True)] == [1, 2]
