"""The method in one file (docs/het_pp_in_one_file.py) and a run of this package train the same model."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from hetero_pp.config.checkpoint import open_checkpoint
from hetero_pp.config.folder import RunFolder
from hetero_pp.config.run_config import RunConfig
from hetero_pp.config.spec import RunSpec
from hetero_pp.data.batches import StoreBatches
from hetero_pp.data.tokens import prepare_tokens
from hetero_pp.messages.messages_pb2 import Report
from hetero_pp.program.launch.in_process import run_in_process

FILE = Path(__file__).parents[2] / "docs" / "het_pp_in_one_file.py"
ROUNDS, H = 3, 4


@pytest.fixture
def one_file() -> ModuleType:
    spec = importlib.util.spec_from_file_location("het_pp_in_one_file", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_losses_and_parameters_are_those_of_a_run(one_file: ModuleType, corpus: Path, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    config = RunConfig.model_validate(
        {
            "name": "one-file",
            "seed": 5,
            "model": {"width": 64, "heads": 2, "feed_forward": 96, "layers": 3},
            "data": {
                "corpus": str(corpus),
                "sequence_length": 32,
                "validation_share": 0.1,
                "validation_sequences": 4,
            },
            "inner": {"steps": H, "learning_rate": 0.01, "warmup_steps": 3},
            "outer": {"rounds": ROUNDS, "method": "het_pp", "compression": {"density": 1 / 32}},
            "replicas": [
                {"name": "dc", "kind": "datacenter", "batch_size": 4},
                {
                    "name": "home",
                    "kind": "participants",
                    "stages": [{"layers": 1}, {"layers": 2}],
                    "batch_size": 4,
                    "micro_batches": 1,
                    "boundary": {"rank": "1/4", "dtype": "fp32"},
                },
            ],
            "checkpoints": {"every": 1, "keep": ROUNDS},
        }
    )
    spec, reports = RunSpec(config, 256), list[Report]()
    run_in_process(spec, RunFolder(tmp_path / "run"), reports.append)
    losses: dict[str, list[float]] = {"dc": [], "home": []}
    for report in reports:
        if report.HasField("inner_step") and report.member != "home.0":  # the last stage computes the loss
            losses[report.member.partition(".")[0]].append(report.inner_step.loss)
    saved = [
        open_checkpoint(tmp_path / "run" / "log" / f"checkpoint-{round_:06d}.safetensors").checkpoint()
        for round_ in range(ROUNDS + 1)
    ]

    settings = one_file.Settings(
        width=64,
        layers=3,
        heads=2,
        feed_forward=96,
        sequence_length=32,
        batch_size=4,
        steps=H,
        rounds=ROUNDS,
        warmup_steps=3,
        rank=16,
        stages=(1, 2),
    )
    theta = {name: one.clone() for name, one in saved[0].parameters.items()}
    subspace = one_file.Subspace(settings, saved[0].basis)
    replicas = [one_file.Replica(settings, theta), one_file.Replica(settings, theta, subspace)]
    store = prepare_tokens(config.data, tmp_path)
    batches = [
        StoreBatches(store=store, sequence_length=32, seed=5, replica=index, replicas=2, batch_size=4)
        for index in range(2)
    ]
    for round_ in range(ROUNDS):
        for name, replica, text in zip(("dc", "home"), replicas, batches, strict=True):
            for step in range(round_ * H, (round_ + 1) * H):
                assert replica.step(step, text.train(step)) == pytest.approx(losses[name][step], rel=1e-5), (name, step)
        one_file.outer_round(theta, replicas, settings)
        for name, parameter in saved[round_ + 1].parameters.items():
            torch.testing.assert_close(theta[name], parameter, atol=1e-5, rtol=0, msg=f"{name}, round {round_ + 1}")


def test_the_file_trains_on_text_by_itself(
    one_file: ModuleType, corpus: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    small = one_file.Settings(width=16, feed_forward=32, rank=4, sequence_length=16, rounds=2)
    monkeypatch.setattr(one_file, "Settings", lambda: small)
    one_file.main(str(corpus))
    first, last = capsys.readouterr().out.splitlines()
    assert float(last.split()[4]) < float(first.split()[4])
