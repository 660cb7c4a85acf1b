"""A run that ends after a number of tokens (`outer.tokens`), which are the clock of its learning rates, too."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from mixed_run import MIXED, RESULTS, summary_in, train
from started import run_program

from hetero_pp.config.checkpoint import open_checkpoint
from hetero_pp.config.folder import RunFolder
from hetero_pp.config.run_config import RunConfig
from hetero_pp.config.spec import RunSpec
from hetero_pp.config.yaml_file import read_run
from hetero_pp.core.errors import ConfigError
from hetero_pp.data.batches import StoreBatches
from hetero_pp.data.tokens import prepare_tokens
from hetero_pp.messages.messages_pb2 import Report, RoundRecord
from hetero_pp.model.transformer import Transformer, initialise
from hetero_pp.program.launch.in_process import run_in_process
from hetero_pp.simulator.prediction import predict
from hetero_pp.store.folder import FolderStore
from replica_groups.exchange.host import make_exchange
from replica_groups.exchange.log import ContributionLog

H, LENGTH, TOKENS = 3, 32, 3000
BATCH = {"large": 6, "small": 2}
MISSED = {"small": frozenset([2, 3])}
"""Rounds that do not include a replica: the others have 768 tokens, and these two 576."""
OUTER = {
    "tokens": TOKENS,
    "method": "diloco",
    "learning_rate": 0.9,
    "momentum": 0.0,
    "nesterov": False,
    "returned": 0.0,
}


def _config(corpus: Path, **changes: Any) -> RunConfig:
    values = {
        "name": "counted",
        "seed": 5,
        "model": {"width": 32, "heads": 2, "feed_forward": 48, "layers": 2},
        "data": {"corpus": str(corpus), "sequence_length": LENGTH, "validation_share": 0.1, "validation_sequences": 4},
        "inner": {"steps": H, "learning_rate": 0.5, "warmup_steps": 0, "optimizer": "sgd", "weight_decay": 0.0},
        "outer": {**OUTER, "final_learning_rate_share": 0.2},
        "replicas": [{"name": name, "kind": "datacenter", "batch_size": size} for name, size in BATCH.items()],
    }
    return RunConfig.model_validate(values | changes)


def _records(run: Path) -> list[RoundRecord]:
    log = ContributionLog(FolderStore(run / "log"))
    return [log.read_record(round_) for round_ in range(1, log.last_record() + 1)]


def _cosine(share: float, last: float) -> float:
    return last + (1 - last) * 0.5 * (1 + math.cos(math.pi * min(1.0, share)))


def test_it_is_a_plain_loop_whose_rates_follow_the_tokens_while_a_replica_comes_and_goes(
    corpus: Path, tmp_path: Path
) -> None:
    torch.set_num_threads(1)
    config = _config(corpus, exchange={"grace": {"least": "3 s", "most": "3 s"}})  # the wait for who misses a round
    spec, reports = RunSpec(config, 256), list[Report]()
    run_in_process(spec, RunFolder(tmp_path / "run"), reports.append, missed=MISSED)

    store, whole = prepare_tokens(config.data, tmp_path), Transformer(spec.shape)
    initialise(whole, 5)
    rates, tokens_after, tokens = dict[tuple[str, int, int], float](), list[int](), 0
    while tokens < TOKENS:
        round_ = len(tokens_after) + 1
        mean_tokens = tokens / (round_ - 1) if tokens else H * LENGTH * sum(BATCH.values())
        differences = {name: torch.zeros_like(one) for name, one in whole.named_parameters()}
        counted = [name for name in BATCH if round_ not in MISSED.get(name, ())]
        for index, (replica, size) in enumerate(BATCH.items()):
            batches = StoreBatches(
                store=store, sequence_length=LENGTH, seed=5, replica=index, replicas=2, batch_size=size
            )
            local = Transformer(spec.shape)
            local.load_state_dict(whole.state_dict())
            for step in range(H):
                share = (tokens + mean_tokens * step / H) / TOKENS
                rates[replica, round_, step] = rate = 0.5 * _cosine(share, 0.1)
                rows = batches.train((round_ - 1) * H + step)
                F.cross_entropy(local(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten()).backward()
                torch.nn.utils.clip_grad_norm_(local.parameters(), 1.0)
                with torch.no_grad():
                    for parameter in local.parameters():
                        assert parameter.grad is not None
                        parameter.sub_(parameter.grad, alpha=rate)
                        parameter.grad = None
            for (name, parameter), before in zip(local.named_parameters(), whole.parameters(), strict=True):
                if replica in counted:
                    differences[name] += (before.detach() - parameter.detach()) / len(counted)
        tokens += H * LENGTH * sum(BATCH[name] for name in counted)
        tokens_after.append(tokens)
        outer = 0.9 * _cosine((round_ - 1) / round_ * tokens / TOKENS, 0.2)
        with torch.no_grad():
            for name, parameter in whole.named_parameters():
                parameter.sub_(differences[name], alpha=outer)

    assert tokens_after == [768, 1344, 1920, 2688, 3456]
    assert [record.tokens for record in _records(tmp_path / "run")] == tokens_after
    told = [report.inner_step for report in reports if report.HasField("inner_step")]
    found = {(one.replica, one.round, one.step): one.learning_rate for one in told}
    assert found == pytest.approx(rates, rel=1e-6)
    saved = open_checkpoint(tmp_path / "run" / "log" / "checkpoint-000005.safetensors").checkpoint().parameters
    for name, parameter in whole.named_parameters():
        torch.testing.assert_close(saved[name], parameter.detach(), atol=2e-6, rtol=1e-5)


def test_equal_rounds_have_the_rates_of_a_run_of_as_many_rounds(corpus: Path, tmp_path: Path) -> None:
    """Also during warm-up, and with rounds that are trained before the record of the round before is known."""
    rates = []
    for name, end in (("rounds", {"rounds": 4}), ("tokens", {"tokens": 4 * 768})):
        outer = {key: value for key, value in OUTER.items() if key != "tokens"} | end | {"overlap": 1}
        config, reports = _config(corpus, outer=outer), list[Report]()
        config = config.model_copy(update={"inner": config.inner.model_copy(update={"warmup_steps": 5})})
        run_in_process(RunSpec(config, 256), RunFolder(tmp_path / name), reports.append)
        told = [report.inner_step for report in reports if report.HasField("inner_step")]
        rates.append({(one.replica, one.round, one.step): one.learning_rate for one in told if one.round <= 4})
        assert len(_records(tmp_path / name)) == 4
    assert rates[0] == pytest.approx(rates[1], rel=1e-6)


@pytest.mark.starts_processes
def test_over_grpc_its_bits_are_those_in_process_also_after_it_was_extended(corpus: Path, tmp_path: Path) -> None:
    """dc has 3 * 4 * 32 tokens a round, home 2 * 4 * 32: 640 together."""
    settings = ["outer.rounds=null", "replicas.1.steps=2", "outer.final_learning_rate_share=0.5"]
    given = [f"--set={one}" for one in (*settings, f"data.corpus={corpus}", "audit.recompute={share: 1}")]
    where = ["--runs", str(tmp_path / "grpc")]
    done = run_program("launch", str(MIXED), *where, *given, "--set=outer.tokens=1.2k")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "about 2 outer rounds of 3 inner steps" in done.stdout
    over_grpc = summary_in(tmp_path / "grpc" / "mixed")
    alone = train(corpus, tmp_path / "alone", *settings, "outer.tokens=1200")
    assert {key: over_grpc[key] for key in RESULTS} == {key: alone[key] for key in RESULTS}
    assert over_grpc["rounds"] == 2
    assert (over_grpc["audit"]["checks"], over_grpc["audit"]["failed_checks"]) == (4, [])

    done = run_program("launch", str(MIXED), *where, *given, "--set=outer.tokens=1200", "--resume")
    assert "the run is over (round 2 of 2); extend it with `--resume --set outer.tokens=N`, N > 1200" in done.stdout
    done = run_program("launch", str(MIXED), *where, *given, "--set=outer.tokens=640", "--resume")
    assert "outer.tokens=640: found 640, expected more than the 640 of the first 1 rounds" in done.stderr
    done = run_program("launch", str(MIXED), *where, *given, "--set=outer.tokens=1281", "--resume")
    assert done.returncode == 0, done.stdout + done.stderr
    assert [one.tokens for one in _records(tmp_path / "grpc" / "mixed")] == [640, 1280, 1920]
    summary = summary_in(tmp_path / "grpc" / "mixed")
    assert (summary["rounds"], len(set(summary["parameters_sha256"].values()))) == (3, 1)


@pytest.mark.starts_processes
def test_rounds_of_time_end_with_the_tokens_of_their_steps(corpus: Path, tmp_path: Path) -> None:
    """A run in process with the same steps has the same records: their rates follow the same tokens."""
    changes = ["inner={seconds: 0.1}", "outer.rounds=null", "outer.tokens=4k", f"data.corpus={corpus}"]
    done = run_program("launch", str(MIXED), "--runs", str(tmp_path), *(f"--set={one}" for one in changes))
    assert done.returncode == 0, done.stdout + done.stderr
    found = _records(tmp_path / "mixed")
    tokens = [one.tokens for one in found]
    assert tokens[-1] >= 4_000 and all(one < 4_000 for one in tokens[:-1])
    steps = {(entry.replica, one.round): entry.steps for one in found for entry in one.contributions}
    spec, again = read_run(RunFolder(tmp_path / "mixed")), RunFolder(tmp_path / "again")
    run_in_process(spec, again, lambda report: None, steps_of=lambda replica, round_: steps[replica, round_])
    assert _records(again.path) == found


def test_a_replica_that_reports_too_many_steps_does_not_end_the_run(corpus: Path, tmp_path: Path) -> None:
    """Members report their own steps in rounds of a given time: at most 16 times the median counts."""
    exchange = make_exchange(RunSpec(_config(corpus, inner={"seconds": 1000}), 256), RunFolder(tmp_path))
    record = RoundRecord(round=1)
    for name, steps in (("large", 2), ("small", 10**6)):
        record.contributions.add(replica=name, steps=steps)
    assert exchange.runner.tokens_until(record) == 2 * 6 * LENGTH + 16 * 2 * 2 * LENGTH


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            {"outer": {"rounds": 3, "tokens": "10k"}},
            "outer.tokens: found 10,000 and 3 `rounds`, expected one of them: leave out the other",
        ),
        ({"outer": {}}, "outer.rounds: found nothing, expected a number of `rounds`, or of `tokens`"),
        ({"outer": {"tokens": 767}}, "outer.tokens: found 767, expected at least the 768 of one round"),
        (
            {"outer": {"tokens": "1M", "method": "adamw_ddp"}, "inner": {"steps": 1}},
            "outer.tokens: found 1,000,000 with method adamw_ddp, expected `rounds`, because a round is one step",
        ),
    ],
)
def test_an_end_that_cannot_be_is_a_located_error(changes: dict[str, Any], told: str, corpus: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        _config(corpus, **changes).check()
    assert str(caught.value) == told


@pytest.mark.parametrize("text", ["10 Mio", "1.5", "-3", "ten"])
def test_a_number_of_tokens_is_whole(text: str, corpus: Path) -> None:
    with pytest.raises(ValueError, match=f"found `{text}`, expected a whole number such as `500M`"):
        _config(corpus, outer={"tokens": text})


def test_a_prediction_has_the_expected_rounds(corpus: Path) -> None:
    prediction = predict(RunSpec(_config(corpus, outer={"tokens": "7.68M"}), 256))
    assert (prediction.tokens, prediction.rounds) == (7_680_000, 10_000)
    timed = _config(corpus, outer={"tokens": "1B"}, inner={"seconds": 10})
    prediction = predict(RunSpec(timed, 256))
    assert prediction.tokens == 1e9
    assert prediction.rounds == pytest.approx(1e9 / sum(one.tokens for one in prediction.replicas))
