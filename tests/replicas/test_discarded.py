"""Replicas that drop the embedding's part outside the subspace contribute what training changed and nothing else."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from table_config import table_config, tiny

from hetero_pp.config.spec import RunSpec
from hetero_pp.data.tokens import prepare_tokens
from hetero_pp.model.transformer import EMBEDDING
from hetero_pp.research.trainer.train import AllReplicas

EXACT = {"density": 1.0, "value_bits": 32, "quantiser": "levels", "error_feedback_decay": 0.0}
"""Everything is sent exactly, so the step of a round is the mean of the contributions."""
RATE = 0.5


BOUNDARY = {"rank": 4, "ablations": {"adaptation": "discarded"}}
HOME = {"name": "home", "kind": "participants", "stages": 2, "batch_size": 4, "boundary": BOUNDARY}
DC = {"name": "dc", "kind": "datacenter", "batch_size": 4}


def _spec(corpus: Path, learning_rate: float, *replicas: dict[str, Any]) -> RunSpec:
    torch.set_num_threads(1)
    config = table_config(
        {
            **tiny(corpus, 16, 2),
            "inner": {"steps": 2, "warmup_steps": 0, "learning_rate": learning_rate},
            "outer": {"rounds": 3, "learning_rate": RATE, "compression": EXACT},
            "replicas": replicas,
        }
    )
    return RunSpec(config, 256)


def test_whole_replicas_that_learn_nothing_change_nothing(corpus: Path, tmp_path: Path) -> None:
    """The trainer of tables trains a normal round, then one with a learning rate too small to change any weight."""
    learning, idle = _spec(corpus, 0.01, DC, HOME), _spec(corpus, 1e-30, DC, HOME)
    store = prepare_tokens(learning.config.data, tmp_path)
    group, later = AllReplicas(learning, store), AllReplicas(idle, store)
    assert group.round(1)
    later.load(group.state())
    before = {name: tensor.clone() for name, tensor in later.theta.items()}
    own = later.replicas[1].parameters[EMBEDDING].detach().clone()
    assert (own - before[EMBEDDING]).norm() > 1e-3  # something was dropped
    assert later.round(2)
    assert all(tensor.equal(before[name]) for name, tensor in later.theta.items())
    assert later.replicas[1].parameters[EMBEDDING].detach().equal(own)


def test_a_whole_replica_contributes_what_training_changed(corpus: Path, tmp_path: Path) -> None:
    """One replica alone is compared with a copy of it that takes the same steps."""
    spec = _spec(corpus, 0.01, HOME)
    group = AllReplicas(spec, prepare_tokens(spec.config.data, tmp_path))
    assert group.round(1)
    before = {name: tensor.clone() for name, tensor in group.theta.items()}
    twin = copy.deepcopy(group.replicas[0])
    starts = {name: parameter.detach().clone() for name, parameter in twin.parameters.items()}
    for step in (2, 3):
        twin.inner_step(group.batches[0].train(step), step)
    assert group.round(2)
    for name, tensor in group.theta.items():
        contributed = starts[name] - twin.parameters[name].detach()
        assert tensor.equal(before[name] - contributed * RATE), name
