"""Rounds that exclude some contributions: the trainer of tables against explicit formulas."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from table_config import table_config, tiny
from torch import Tensor

from hetero_pp.config.folder import RunFolder
from hetero_pp.config.run_config import RunConfig
from hetero_pp.config.spec import RunSpec
from hetero_pp.core.errors import ConfigError
from hetero_pp.data.tokens import TokenStore, prepare_tokens
from hetero_pp.messages.messages_pb2 import Report
from hetero_pp.outer.methods import OuterSettings
from hetero_pp.program.launch.in_process import run_in_process
from hetero_pp.research.trainer.participation import missed_in
from hetero_pp.research.trainer.train import AllReplicas, train_fast

NAMES = ["a", "b", "c"]
DENSITY, DECAY = 1 / 4, 0.9
SPARSE: dict[str, Any] = {
    "compression": {"density": DENSITY, "value_bits": 32, "error_feedback_decay": DECAY, "tile": [256, 64]}
}
"""Settings with which every tensor is one chunk."""
DILOCO: dict[str, Any] = {"method": "diloco"}
MISSED, ROUNDS, SEED = 0.5, 5, 2
"""With this seed, no replica misses three rounds in a row, after which rounds would not wait for it."""


def _config(corpus: Path, outer: dict[str, Any], exchange: dict[str, Any] | None = None) -> RunConfig:
    return table_config(
        {
            **tiny(corpus, 16, 1, seed=SEED),
            "inner": {"steps": 2, "warmup_steps": 0, "learning_rate": 0.01},
            "outer": {"rounds": ROUNDS, **outer},
            "exchange": exchange or {},
            "replicas": [{"name": name, "kind": "datacenter", "batch_size": 2} for name in NAMES],
        }
    )


def _group(corpus: Path, folder: Path, outer: dict[str, Any]) -> AllReplicas:
    torch.set_num_threads(1)
    spec = RunSpec(_config(corpus, outer), 256)
    store: TokenStore = prepare_tokens(spec.config.data, folder)
    return AllReplicas(spec, store)


def _deltas(
    group: AllReplicas, round_: int, starts: Sequence[dict[str, Tensor]] | None = None
) -> list[dict[str, Tensor]]:
    """Return the changes of copies of the replicas in a round, relative to theta.

    Each copy starts from theta, or from its own start if `starts` is given.
    """
    found = []
    for index, (replica, batches) in enumerate(zip(group.replicas, group.batches, strict=True)):
        twin = copy.deepcopy(replica)
        with torch.no_grad():
            for name, start in starts[index].items() if starts is not None else ():
                twin.parameters[name].copy_(start)
        for step in ((round_ - 1) * 2, (round_ - 1) * 2 + 1):
            twin.inner_step(batches.train(step), step)
        found.append({name: group.theta[name] - twin.parameters[name].detach() for name in group.theta})
    return found


def _who_is_missed(round_: int) -> list[bool]:
    missed = missed_in(round_, NAMES, MISSED, SEED)
    return [name in missed for name in NAMES]


def test_the_rounds_below_miss_none_some_and_nearly_all() -> None:
    assert {sum(_who_is_missed(round_)) for round_ in range(1, ROUNDS + 1)} == {0, 1, 2}


@pytest.mark.parametrize("returned", [1.0, 0.5, 0.0])
def test_sparse_rounds_are_those_written_out(returned: float, corpus: Path, tmp_path: Path) -> None:
    """e <- beta e + Delta, D = TopK(e), e <- e - D; theta <- theta - mean of included D.

    For excluded replicas, e <- e + r D.
    """
    group = _group(corpus, tmp_path, {**SPARSE, "missed": MISSED, "returned": returned})
    theta = {name: tensor.clone() for name, tensor in group.theta.items()}
    errors = [{name: torch.zeros_like(tensor) for name, tensor in theta.items()} for _ in NAMES]
    for round_ in range(1, ROUNDS + 1):
        deltas, missed = _deltas(group, round_), _who_is_missed(round_)
        assert group.round(round_)
        for name in theta:
            total = torch.zeros_like(theta[name])
            for error, delta, is_missed in zip(errors, deltas, missed, strict=True):
                carried = (DECAY * error[name] + delta[name]).flatten()
                kept = max(1, int(DENSITY * carried.numel() + 0.5))
                sent = torch.zeros_like(carried)
                where = carried.abs().argsort(descending=True, stable=True)[:kept]
                sent[where] = carried[where]
                error[name] = (carried - sent + (returned * sent if is_missed else 0)).view_as(total)
                total += 0 if is_missed else sent.view_as(total)
            theta[name] -= total / missed.count(False)
            torch.testing.assert_close(group.theta[name], theta[name], rtol=0, atol=1e-6)
            for found, error in zip(group.errors, errors, strict=True):
                torch.testing.assert_close(found[name], error[name], rtol=0, atol=1e-6)
        for replica in group.replicas:
            assert all(replica.parameters[name].equal(group.theta[name]) for name in theta)


@pytest.mark.parametrize("returned", [1.0, 0.0])
def test_without_error_feedback_what_is_missed_is_gone(returned: float, corpus: Path, tmp_path: Path) -> None:
    """DiLoCo, whatever `returned` is: b <- 0.9 b + mean, theta <- theta - 0.7 (mean + 0.9 b)."""
    group = _group(corpus, tmp_path, {**DILOCO, "missed": MISSED, "returned": returned})
    theta = {name: tensor.clone() for name, tensor in group.theta.items()}
    momentum = {name: torch.zeros_like(tensor) for name, tensor in theta.items()}
    for round_ in range(1, ROUNDS + 1):
        deltas, missed = _deltas(group, round_), _who_is_missed(round_)
        assert group.round(round_)
        counted = [delta for delta, is_missed in zip(deltas, missed, strict=True) if not is_missed]
        for name in theta:
            mean = torch.stack([delta[name] for delta in counted]).mean(0)
            momentum[name] = 0.9 * momentum[name] + mean
            theta[name] -= 0.7 * (mean + 0.9 * momentum[name])
            torch.testing.assert_close(group.theta[name], theta[name], rtol=0, atol=1e-6)


@pytest.mark.parametrize("outer", [SPARSE, DILOCO])
def test_who_is_missed_trains_on_from_its_own_parameters(outer: dict[str, Any], corpus: Path, tmp_path: Path) -> None:
    """Delta of an included replica is theta minus its own parameters. Excluded rounds leave its e unchanged.

    DiLoCo, algorithm 1 and figure 8: a dropped replica starts its next round from its own parameters.
    """
    group = _group(corpus, tmp_path, {**outer, "missed": MISSED, "keep_local": True})
    compression = group.outer.settings.compression
    theta = {name: tensor.clone() for name, tensor in group.theta.items()}
    starts = [dict(theta) for _ in NAMES]
    errors = [{name: torch.zeros_like(tensor) for name, tensor in theta.items()} for _ in NAMES]
    momentum = {name: torch.zeros_like(tensor) for name, tensor in theta.items()}
    apart = 0
    for round_ in range(1, ROUNDS + 1):
        deltas, missed = _deltas(group, round_, starts), _who_is_missed(round_)
        before = [dict(one) for one in errors]
        assert group.round(round_)
        after = {}
        for name in theta:
            total = torch.zeros_like(theta[name])
            for index, is_missed in enumerate(missed):
                if is_missed:
                    continue
                carried = (compression.error_feedback_decay * before[index][name] + deltas[index][name]).flatten()
                kept = max(1, int(compression.density * carried.numel() + 0.5))
                sent = torch.zeros_like(carried)
                where = carried.abs().argsort(descending=True, stable=True)[:kept]
                sent[where] = carried[where]
                errors[index][name] = (carried - sent).view_as(total)
                total += sent.view_as(total)
            mean = total / missed.count(False)
            momentum[name] = group.outer.settings.momentum * momentum[name] + mean
            direction = mean + group.outer.settings.momentum * momentum[name]
            after[name] = theta[name] - group.outer.settings.learning_rate * direction
            torch.testing.assert_close(group.theta[name], after[name], rtol=0, atol=5e-6)
            for found, error in zip(group.errors, errors, strict=True):
                torch.testing.assert_close(found[name], error[name], rtol=0, atol=5e-6)
        for replica in group.replicas:  # the evaluation uses what all hold
            assert all(replica.parameters[name].equal(group.theta[name]) for name in theta)
        own = [{name: theta[name] - delta[name] for name in theta} for delta in deltas]
        starts = [own[index] if is_missed else after for index, is_missed in enumerate(missed)]
        theta = after
        apart += sum(missed)
    assert apart > 2


def test_without_a_group_it_has_the_bits_of_the_run_in_process(corpus: Path, tmp_path: Path) -> None:
    """Excluded replicas are late in the run in process.

    All settings run at once, as each round waits for its grace window.
    """
    exchange = {"quorum": 0.3, "grace": {"factor": 1, "least": "3 s", "most": "3 s"}}
    late = {
        name: frozenset(r for r in range(1, ROUNDS + 1) if name in missed_in(r, NAMES, MISSED, SEED)) for name in NAMES
    }

    def losses_of(outer: dict[str, Any], folder: Path) -> tuple[list[float], list[float]]:
        """Return the validation losses of the trainer of tables and of the run in process."""
        config = _config(corpus, {**outer, "missed": MISSED}, exchange)
        fast = train_fast(RunSpec(config, 256), prepare_tokens(config.data, folder))
        spec = RunSpec(RunConfig.model_validate(config.model_dump(exclude={"research"})), 256)
        reports: list[Report] = []
        run_in_process(spec, RunFolder(folder / "run"), reports.append, missed=late)
        told = [r.evaluation for r in reports if r.HasField("evaluation") and r.evaluation.round > 0]
        losses = [sum(one.loss for one in told if one.round == round_) / 3 for round_ in range(1, ROUNDS + 1)]
        return fast.validation_loss, losses

    settings = {
        "sparse": {**SPARSE, "keep_local": True},
        "diloco": {**DILOCO, "keep_local": True},
        "fragments": {**SPARSE, "fragments": 2, "overlap": 1, "mixing": 0.5, "returned": 0.5},
    }
    with ThreadPoolExecutor(3) as pool:
        for fast, losses in pool.map(losses_of, settings.values(), map(tmp_path.joinpath, settings)):
            assert fast == losses


def test_a_mean_over_senders_is_over_those_that_count(corpus: Path, tmp_path: Path) -> None:
    """If contributions are dense, all included replicas are senders."""
    ends = []
    for divides_by in ("senders", "replicas"):
        dense = {"density": 1.0, "value_bits": 32}
        group = _group(corpus, tmp_path, {"missed": MISSED, "divides_by": divides_by, "compression": dense})
        assert all(group.round(round_) for round_ in range(1, ROUNDS + 1))
        ends.append(group.theta)
    assert all(tensor.equal(ends[1][name]) for name, tensor in ends[0].items())


@pytest.mark.parametrize("share", [0.1, 0.3, 0.5])
def test_each_is_missed_as_often_as_said_whatever_the_others_are(share: float) -> None:
    names, rounds = [f"r{index}" for index in range(40)], range(1, 501)
    found = [missed_in(round_, names, share, seed=7) for round_ in rounds]
    counts = [len(missed) for missed in found]
    mean = sum(counts) / len(counts)
    variance = sum((count - mean) ** 2 for count in counts) / len(counts)
    assert mean == pytest.approx(40 * share, rel=0.05)
    assert variance == pytest.approx(40 * share * (1 - share), rel=0.25)  # as for independent draws
    for name in names:
        assert sum(name in missed for missed in found) == pytest.approx(500 * share, abs=60)


def test_never_are_all_missed_and_more_at_a_larger_share() -> None:
    for round_ in range(1, 101):
        found = [missed_in(round_, NAMES, share, seed=1) for share in (0.0, 0.1, 0.3, 0.5, 1 - 1e-9)]
        assert [len(found[0]), len(found[-1])] == [0, len(NAMES) - 1]
        assert all(fewer <= more for fewer, more in pairwise(found))
    assert not missed_in(1, ["alone"], 1 - 1e-9, seed=1)


def test_draws_are_of_the_seed_and_the_round() -> None:
    names = [f"r{index}" for index in range(60)]
    assert missed_in(1, names, 0.5, seed=1) == missed_in(1, names[::-1], 0.5, seed=1)
    assert len({missed_in(round_, names, 0.5, seed) for round_ in (1, 2) for seed in (1, 2)}) == 4


@pytest.mark.parametrize("outer", [{"method": "adamw_ddp"}, {"overlap": 1}])
def test_nothing_local_is_kept_of_gradients_or_of_rounds_that_overlap(outer: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"found `keep_local` with (averaged gradients|`overlap: 1`), expected false"):
        OuterSettings.model_validate({"rounds": 1, "keep_local": True, **outer})


def test_nothing_local_is_kept_in_a_subspace(corpus: Path) -> None:
    config = _config(corpus, {"keep_local": True}).model_dump(mode="json")
    config["replicas"][1] = {"name": "b", "kind": "participants", "stages": 1, "boundary": {"rank": "1/4"}}
    RunConfig.model_validate(config).check()
    config["model"]["layers"] = config["replicas"][1]["stages"] = 2
    with pytest.raises(ConfigError, match=r"found 0\.25 with `outer\.keep_local`, expected `full`") as error:
        RunConfig.model_validate(config).check()
    assert error.value.key == ("replicas", 1, "boundary", "rank")


def test_what_cannot_be_missed_is_refused(corpus: Path) -> None:
    with pytest.raises(ConfigError, match="found this key with averaged gradients, expected only one") as error:
        _config(corpus, {"method": "adamw_ddp", "missed": 0.3}).check()
    assert error.value.key == ("research", "missed")
