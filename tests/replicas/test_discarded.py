"""Replicas that drop what of the embedding left the subspace contribute what training changed, and nothing else."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from members import begin, patient
from torch import Tensor

from hetero_pp.data.tokens import prepare_tokens
from hetero_pp.inner import InnerSettings
from hetero_pp.model import EMBEDDING, ModelSettings, block_of, build_part
from hetero_pp.outer.methods import OuterSettings
from hetero_pp.research.vectorized.all_replicas import AllReplicas
from hetero_pp.run.config import RunConfig
from hetero_pp.run.spec import Roster, RunSpec
from hetero_pp.snapshot import Snapshot, initial_snapshot
from hetero_pp.store.folder import FolderStore
from hetero_pp.topology import BoundarySettings, StageSpec
from replica_groups.exchange.exchange import Exchange
from replica_groups.exchange.log import ContributionLog
from replica_groups.outer_round import OuterRound
from replica_groups.participants import StageMember
from stages.boundary import boundary_of
from stages.stage import Stage
from stages.worker import StageWorker, WorkerSettings

SHAPE = ModelSettings(width=16, heads=2, feed_forward=24, layers=2).resolve(40)
EXACT = {"density": 1.0, "value_bits": 32, "quantiser": "levels", "error_feedback_decay": 0.0}
"""Everything is sent as it is: a round's step is the mean of the contributions."""
BOUNDARY = BoundarySettings.model_validate({"rank": 4, "ablations": {"adaptation": "discarded"}})
RATE = 0.5


class Member:
    """The first of two stages, alone in a run of its parameters."""

    def __init__(self, folder: Path) -> None:
        spec = StageSpec(0, 2, range(1))
        whole = initial_snapshot(SHAPE, 4, seed=3)
        assert whole.basis is not None
        self.basis = whole.basis
        stage = Stage(
            spec, build_part(SHAPE, spec), boundary_of(BOUNDARY, SHAPE.width, whole.basis), InnerSettings(), 9
        )
        self.parameters = stage.parameters
        start = {name: whole.parameters[name] for name in stage.parameters}
        worker = StageWorker(stage, WorkerSettings(1, 1, 8, 0, None, "home", 0), None, None)
        self.member = StageMember("home", worker, None, [], 0)
        settings = OuterSettings.model_validate({"rounds": 3, "learning_rate": RATE, "compression": EXACT})
        roster = Roster({"home.0": "home"}, {"home.0": frozenset(map(block_of, start))})
        log = ContributionLog(FolderStore(folder))
        self.exchange = exchange = Exchange("run", roster, None, settings, log, rules=patient(roster))
        begin(exchange, Snapshot(0, start, whole.basis))
        with torch.no_grad():
            for name, parameter in stage.parameters.items():
                parameter.copy_(start[name])
        self.outer = OuterRound("run", "home.0", "home", self.member.parameters, start, exchange, settings)
        self.member.start_round(self.outer)

    @torch.no_grad()
    def round(self, number: int, changes: dict[str, Tensor]) -> None:
        """Train, by adding these changes, and synchronise."""
        for name, change in changes.items():
            self.parameters[name].add_(change)
        work = self.exchange.assign("home.0", number - 1)
        self.outer.synchronise(number, work.epoch)
        self.member.start_round(self.outer)


def _change(seed: int, shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.1


@pytest.fixture
def member(tmp_path: Path) -> Member:
    """After a round in which its embedding left the subspace, and with what it starts the next with."""
    member = Member(tmp_path)
    first = {name: tensor.clone() for name, tensor in member.outer.theta.items()}
    member.round(1, {name: _change(1, tuple(tensor.shape)) for name, tensor in member.parameters.items()})
    moved = (member.outer.theta[EMBEDDING] - first[EMBEDDING]).double()
    basis = member.basis.double()
    kept = first[EMBEDDING].double() + moved @ basis @ basis.T
    torch.testing.assert_close(member.parameters[EMBEDDING].detach().double(), kept, rtol=0, atol=1e-6)
    assert (member.parameters[EMBEDDING] - member.outer.theta[EMBEDDING]).norm() > 0.1
    return member


def test_a_stage_that_learnt_nothing_changes_nothing(member: Member) -> None:
    """What it dropped is not among what it contributes."""
    before = {name: tensor.clone() for name, tensor in member.outer.theta.items()}
    member.round(2, {})
    assert all(tensor.equal(before[name]) for name, tensor in member.outer.theta.items())


def test_a_stage_contributes_what_training_changed(member: Member) -> None:
    started = member.parameters[EMBEDDING].detach().clone()
    before = {name: tensor.clone() for name, tensor in member.outer.theta.items()}
    changes = {name: _change(2, tuple(tensor.shape)) for name, tensor in member.parameters.items()}
    member.round(2, changes)
    for name, tensor in member.outer.theta.items():
        start = started if name == EMBEDDING else before[name]
        contributed = start - (start + changes[name])
        assert tensor.equal(before[name] - contributed * RATE), name


HOME = {"name": "home", "kind": "participants", "stages": 2, "batch_size": 4, "boundary": BOUNDARY.model_dump()}
DC = {"name": "dc", "kind": "datacenter", "batch_size": 4}


def _spec(corpus: Path, learning_rate: float, *replicas: dict[str, Any]) -> RunSpec:
    torch.set_num_threads(1)
    config = RunConfig.model_validate(
        {
            "name": "t",
            "model": {"width": 16, "heads": 2, "feed_forward": 24, "layers": 2},
            "data": {"corpus": str(corpus), "sequence_length": 16, "validation_share": 0.2, "validation_sequences": 4},
            "inner": {"steps": 2, "warmup_steps": 0, "learning_rate": learning_rate},
            "outer": {"rounds": 3, "learning_rate": RATE, "compression": EXACT},
            "replicas": replicas,
        }
    )
    return RunSpec(config, 256)


def test_whole_replicas_that_learn_nothing_change_nothing(corpus: Path, tmp_path: Path) -> None:
    """The fast path: a round as it should be, then one whose learning rate is too small to change any weight."""
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
    """Alone, against a copy of it that takes the same steps."""
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
