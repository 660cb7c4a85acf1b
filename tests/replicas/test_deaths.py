"""Groups that lose a stage in a round: the trainer of tables against a staged run, and against an explicit formula."""

from __future__ import annotations

import copy
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from table_config import table_config, tiny

from hetero_pp.config.folder import RunFolder
from hetero_pp.config.spec import RunSpec
from hetero_pp.data.tokens import prepare_tokens
from hetero_pp.messages.messages_pb2 import Report
from hetero_pp.program.launch.in_process import run_in_process
from hetero_pp.research.trainer.participation import deaths_in
from hetero_pp.research.trainer.train import AllReplicas, train_fast

ROUNDS, STEPS = 4, 4


def _spec(corpus: Path, **research: Any) -> RunSpec:
    config = {
        **tiny(corpus, 32, 2, seed=2),
        "inner": {"steps": STEPS, "warmup_steps": 3, "learning_rate": 0.01, "clip_norm": None},
        "outer": {"rounds": ROUNDS, "compression": {"density": 1, "value_bits": 32}, **research},
        "states": {"every": 1},
        "checkpoints": {"every": 1},
        "replicas": [
            {"name": "dc", "kind": "datacenter", "batch_size": 4},
            {"name": "home", "kind": "participants", "stages": 2, "batch_size": 4, "micro_batches": 2,
             "boundary": {"rank": "1/4", "embedding": "free"}},
        ],
    }  # fmt: skip
    return RunSpec(table_config(config), 256)


def test_a_group_that_resumes_ends_where_the_staged_run_ends(corpus: Path, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    spec, staged = _spec(corpus, deaths=0.9), _spec(corpus)
    restarts: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
    for round_ in range(1, ROUNDS + 1):
        for death in deaths_in(round_, spec).values():
            slot = next(name for name, one in spec.members.items() if set(one.owned) == death.parameters)
            restarts[slot].append((round_, death.step))
    assert len(restarts) == 2
    fast = train_fast(spec, prepare_tokens(spec.config.data, tmp_path))
    reports: list[Report] = []
    run_in_process(staged, RunFolder(tmp_path / "run"), reports.append, restarts=restarts)
    undisturbed = train_fast(staged, prepare_tokens(spec.config.data, tmp_path))
    for round_ in range(1, ROUNDS + 1):
        told = [r.evaluation.loss for r in reports if r.HasField("evaluation") and r.evaluation.round == round_]
        assert len(told) == 2
        assert fast.validation_loss[round_ - 1] == pytest.approx(sum(told) / 2, abs=2e-3)
    assert abs(fast.validation_loss[-1] - undisturbed.validation_loss[-1]) > 1e-2


def test_a_round_that_is_undone_counts_the_others_and_leaves_no_trace(corpus: Path, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    spec = _spec(corpus, deaths=0.9, undoes_deaths=True)
    group = AllReplicas(spec, prepare_tokens(spec.config.data, tmp_path))
    round_ = next(one for one in range(1, ROUNDS + 1) if deaths_in(one, spec))
    for before in range(1, round_):
        assert group.round(before)
    dc, steps = copy.deepcopy(group.replicas[0]), range((round_ - 1) * STEPS, round_ * STEPS)
    for step in steps:
        dc.inner_step(group.batches[0].train(step), step)
    moments = {name: one.clone() for name, one in group.replicas[1].optimizer.moments().items()}
    assert group.round(round_)
    for name, theta in group.theta.items():
        torch.testing.assert_close(theta, dc.parameters[name].detach(), rtol=0, atol=1e-6)
    after = group.replicas[1].optimizer.moments()
    assert moments.keys() == after.keys()
    assert all(torch.equal(moments[name], one) for name, one in after.items())
