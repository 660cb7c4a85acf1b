"""A replica that takes fewer inner steps in a round than the others (`replicas[].steps`)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from mixed_run import MIXED, RESULTS, summary_in, train
from started import run_program

from hetero_pp.config.checkpoint import open_checkpoint
from hetero_pp.config.folder import RunFolder
from hetero_pp.config.run_config import RunConfig
from hetero_pp.config.spec import RunSpec
from hetero_pp.core.errors import ConfigError
from hetero_pp.data.batches import StoreBatches
from hetero_pp.data.tokens import prepare_tokens
from hetero_pp.messages.messages_pb2 import Report
from hetero_pp.model.transformer import Transformer, initialise
from hetero_pp.program.launch.in_process import run_in_process
from hetero_pp.simulator.prediction import predict
from replica_groups.exchange.host import rules_of

H, ROUNDS, WARMUP = 4, 3, 6
STEPS = {"fast": H, "slow": 1, "middle": 3}


def _config(corpus: Path, **changes: object) -> RunConfig:
    values = {
        "name": "unequal",
        "seed": 5,
        "model": {"width": 32, "heads": 2, "feed_forward": 48, "layers": 2},
        "data": {"corpus": str(corpus), "sequence_length": 32, "validation_share": 0.1, "validation_sequences": 4},
        "inner": {"steps": H, "learning_rate": 0.5, "warmup_steps": WARMUP, "optimizer": "sgd", "weight_decay": 0.0},
        "outer": {"rounds": ROUNDS, "method": "diloco", "learning_rate": 1.0, "momentum": 0.0, "nesterov": False},
        "replicas": [
            {"name": name, "kind": "datacenter", "batch_size": 4} | ({} if steps == H else {"steps": steps})
            for name, steps in STEPS.items()
        ],
    }
    return RunConfig.model_validate(values | changes)


def _rate(share: float) -> float:
    """Return the learning rate of a step that begins at `share` of the run, by hand: linear, then a cosine to a tenth.

    During warm-up it is the rate at the end of the step.
    """
    warm = WARMUP / (H * ROUNDS)
    cosine = 0.1 + 0.9 * 0.5 * (1 + torch.cos(torch.tensor(torch.pi * (share - warm) / (1 - warm))).item())
    return 0.5 * cosine


def test_it_is_a_plain_loop_of_fewer_steps_with_the_rate_of_the_same_share_of_the_round(
    corpus: Path, tmp_path: Path
) -> None:
    torch.set_num_threads(1)
    config = _config(corpus)
    spec, reports = RunSpec(config, 256), list[Report]()
    run_in_process(spec, RunFolder(tmp_path / "run"), reports.append)

    store, whole = prepare_tokens(config.data, tmp_path), Transformer(spec.shape)
    initialise(whole, 5)
    expected_rates = dict[tuple[str, int, int], float]()
    for round_ in range(ROUNDS):
        mean = {name: torch.zeros_like(one) for name, one in whole.named_parameters()}
        for index, (replica, steps) in enumerate(STEPS.items()):
            batches = StoreBatches(
                store=store, sequence_length=32, seed=5, replica=index, replicas=len(STEPS), batch_size=4
            )
            local = Transformer(spec.shape)
            local.load_state_dict(whole.state_dict())
            for step in range(steps):
                over, warm = (round_ + step / steps) / ROUNDS, WARMUP / (H * ROUNDS)
                rate = _rate(over) if over >= warm else 0.5 * min(1, (over + 1 / (steps * ROUNDS)) / warm)
                expected_rates[replica, round_ + 1, step] = rate
                tokens = batches.train(round_ * steps + step)
                F.cross_entropy(local(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
                torch.nn.utils.clip_grad_norm_(local.parameters(), 1.0)
                with torch.no_grad():
                    for parameter in local.parameters():
                        assert parameter.grad is not None
                        parameter.sub_(parameter.grad, alpha=rate)
                        parameter.grad = None
            for name, parameter in local.named_parameters():
                mean[name] += parameter.detach() / len(STEPS)
        whole.load_state_dict(mean)

    told = [report.inner_step for report in reports if report.HasField("inner_step")]
    rates = {(one.replica, one.round, one.step): one.learning_rate for one in told}
    assert rates == pytest.approx(expected_rates, rel=1e-6)
    saved = open_checkpoint(tmp_path / "run" / "log" / f"checkpoint-{ROUNDS:06}.safetensors").checkpoint().parameters
    for name, parameter in whole.named_parameters():
        torch.testing.assert_close(saved[name], parameter.detach(), atol=2e-6, rtol=1e-5)


@pytest.mark.starts_processes
def test_over_grpc_its_bits_are_those_in_process_and_a_recomputation_finds_them(corpus: Path, tmp_path: Path) -> None:
    """A contribution counts by its tokens, and half of the steps of a group are trained again by the validator."""
    settings = ["replicas.1.steps=2", "outer.weights=tokens"]
    audited = [*settings, f"data.corpus={corpus}", "audit.recompute={share: 1}"]
    changes = [f"--set={one}" for one in audited]
    done = run_program("launch", str(MIXED), "--runs", str(tmp_path / "grpc"), *changes)
    assert done.returncode == 0, done.stdout + done.stderr
    over_grpc, alone = summary_in(tmp_path / "grpc" / "mixed"), train(corpus, tmp_path / "alone", *settings)
    assert {key: over_grpc[key] for key in RESULTS} == {key: alone[key] for key in RESULTS}
    assert len(set(alone["parameters_sha256"].values())) == 1
    steps = {one["name"]: one["steps"] for one in alone["replicas"]}
    assert steps == {"dc": [3, 3, 3], "home": [2, 2, 2]}
    record = json.loads((tmp_path / "alone" / "mixed" / "log" / "round-000002" / "record.json").read_text())
    weights = {one["replica"]: one["weight"] for one in record["contributions"]}
    assert weights["dc"] == pytest.approx(1.5 * weights["home"])  # of 3 and 2 steps of as many tokens
    audit = over_grpc["audit"]
    assert (audit["checks"], audit["failed_checks"]) == (6, [])


def test_a_contribution_of_another_number_of_steps_is_refused(corpus: Path) -> None:
    rules = rules_of(RunSpec(_config(corpus), 256))
    assert [rules.complaint_of_steps(name, steps) for name, steps in STEPS.items()] == [None] * 3
    assert rules.complaint_of_steps("slow", H) == "found 4 inner steps, expected 1"
    assert rules.complaint_of_steps("fast", 1) == "found 1 inner steps, expected 4"


@pytest.mark.parametrize(
    ("steps", "inner", "told"),
    [
        (H + 1, {"steps": H}, "replicas[0].steps: found 5, expected at most the 4 of `inner.steps`"),
        (2, {"seconds": 3}, "replicas[0].steps: found 2, expected none with `inner.seconds`: as many as fit"),
    ],
)
def test_a_number_that_does_not_fit_the_round_is_a_located_error(
    steps: int, inner: dict[str, object], told: str, corpus: Path
) -> None:
    replicas = [{"name": "a", "kind": "datacenter", "batch_size": 4, "steps": steps}]
    with pytest.raises(ConfigError) as caught:
        _config(corpus, replicas=replicas, inner=inner).check()
    assert str(caught.value) == told


def test_a_prediction_and_a_rehearsal_take_its_share_of_the_steps(corpus: Path) -> None:
    full = _config(corpus, inner={"steps": 40, "warmup_steps": 2})
    replicas: list[dict[str, object]] = [
        {"name": name, "kind": "datacenter", "batch_size": 4, "hardware": "cpu-core"} for name in ("a", "b")
    ]
    equal = full.model_copy(update={"replicas": _config(corpus, replicas=replicas).replicas})
    fewer = _config(corpus, inner={"steps": 40}, replicas=[replicas[0], replicas[1] | {"steps": 10}])
    times = [
        {one.name: one.inner_seconds for one in predict(RunSpec(config, 256)).replicas} for config in (equal, fewer)
    ]
    assert times[1]["a"] == pytest.approx(times[0]["a"])
    assert times[1]["b"] == pytest.approx(times[0]["b"] / 4)
    rehearsed = RunSpec(fewer.as_rehearsal(2, 4), 256)
    assert [rehearsed.steps_of(name) for name in ("a", "b")] == [4, 1]
