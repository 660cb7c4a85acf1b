"""Outer rounds that resume from a run checkpoint and saved states give the bits of an uninterrupted run."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from log_files import checkpoint_path
from members import begin, patient
from torch import Tensor, nn

from hetero_pp.config.checkpoint import RunCheckpoint, initial_checkpoint, open_checkpoint
from hetero_pp.config.spec import Roster
from hetero_pp.core.errors import HeteroPPError, Stopped
from hetero_pp.messages.messages_pb2 import RoundRecord
from hetero_pp.model.inner import InnerSettings
from hetero_pp.model.transformer import ModelShape, shapes_by_block, shapes_of
from hetero_pp.outer.gradient import Compressed, GradientOptimizer
from hetero_pp.outer.methods import OuterSettings
from hetero_pp.outer.step import OuterOptimizer, RoundOptimizer
from hetero_pp.pipeline.subspace import random_basis
from hetero_pp.rpc.exchange_service import Caller
from hetero_pp.store.folder import FolderStore
from replica_groups.engines.engine import LocalParameters
from replica_groups.exchange.auditor import Auditor, Retention
from replica_groups.exchange.exchange import Exchange
from replica_groups.exchange.log import ContributionLog
from replica_groups.member.outer_round import OuterRound
from replica_groups.member.session import MemberSession

TIMEOUT = 20.0
ROUNDS = 4
SHAPE = ModelShape(width=16, layers=1, heads=2, feed_forward=24, vocabulary=40)
NAMES = ("alpha", "beta")
INNER = InnerSettings(learning_rate=0.1, warmup_steps=0, clip_norm=1.0)
SPARSE = {"density": 1 / 8, "tile": (8, 8), "error_feedback_decay": 0.9}
METHODS = {
    "diloco": OuterSettings.model_validate({"rounds": ROUNDS, "method": "diloco"}),
    "sparse with momentum": OuterSettings.model_validate(
        {"rounds": ROUNDS, "learning_rate": 0.7, "momentum": 0.8, "compression": SPARSE}
    ),
    "sparseloco_signs": OuterSettings.model_validate({"rounds": ROUNDS, "compression": SPARSE}),
    "adamw_ddp": OuterSettings.model_validate({"rounds": ROUNDS, "method": "adamw_ddp"}),
}


@pytest.fixture(autouse=True)
def one_torch_thread() -> Iterator[None]:
    """Use one Torch thread, because each member already has a thread of its own."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _optimizer(settings: OuterSettings, checkpoint: RunCheckpoint) -> RoundOptimizer:
    if settings.source == "difference":
        return OuterOptimizer(settings)
    alpha = Compressed(random_basis(SHAPE.width, 4, seed=1), "coefficients")
    return GradientOptimizer(settings, INNER, ROUNDS, shapes_of(checkpoint.parameters), {"alpha": alpha})


class Run:
    """Two replicas of one member each, with the exchange and its auditor, started from a run checkpoint."""

    def __init__(self, settings: OuterSettings, checkpoint: RunCheckpoint, folder: Path) -> None:
        self.settings, self.start, self.folder = settings, checkpoint, folder
        blocks = frozenset(shapes_by_block(shapes_of(checkpoint.parameters)))
        roster = Roster(dict(zip(NAMES, NAMES, strict=True)), dict.fromkeys(NAMES, blocks))
        log = ContributionLog(FolderStore(folder / "log"))
        self.exchange = Exchange("run", roster, None, settings, log, rules=patient(roster))
        begin(self.exchange, checkpoint)
        optimizer, retention = _optimizer(settings, checkpoint), Retention(log, keep=ROUNDS)
        self.auditor = Auditor(self.exchange, checkpoint, OuterSettings(rounds=ROUNDS), 1, optimizer, retention)
        self.errors: list[HeteroPPError] = []
        self.parameters: dict[str, dict[str, nn.Parameter]] = {}
        self.outer: dict[str, OuterRound] = {}
        for name in NAMES:
            own = {p: nn.Parameter(tensor.clone()) for p, tensor in checkpoint.parameters.items()}
            self.parameters[name] = own
            self.outer[name] = OuterRound(
                MemberSession(self.exchange, name, name, "run"),
                LocalParameters(own),
                dict(checkpoint.parameters),
                settings,
                _optimizer(settings, checkpoint),
            )

    def load(self, folder: Path) -> None:
        """Load the states that members saved after the round of the run checkpoint, and what that has of them."""
        start = self.start
        for name, outer in self.outer.items():
            outer.reset(start.parameters, start.momentum, start.round)
            outer.load(folder / f"{name}-{start.round}")

    def train(self) -> None:
        """Train all remaining rounds and save each member's state after each.

        Raise if a member or the auditor fails.
        """
        self.auditor.start()
        threads = [threading.Thread(target=self._member, args=(name,), daemon=True) for name in NAMES]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TIMEOUT)
            assert not thread.is_alive()
        self.auditor.join()
        assert self.errors == []
        assert self.exchange.record(ROUNDS).round == ROUNDS  # raises if the auditor's result differs from the members'

    def _member(self, name: str) -> None:
        try:
            for round_ in range(self.start.round + 1, ROUNDS + 1):
                self._learn(name, round_)
                work = self.exchange.assign(name, round_ - 1)
                self.outer[name].synchronise(round_, work.generation)
                saved = self.folder / f"{name}-{round_}"
                saved.mkdir()
                self.outer[name].save(saved)
        except HeteroPPError as error:
            self.exchange.fail(str(error))
            self.errors.append(error)

    @torch.no_grad()
    def _learn(self, name: str, round_: int) -> None:
        """Stand in for the inner loop: change the parameters, or set gradients, as `source` requires."""
        for index, parameter in enumerate(self.parameters[name].values()):
            generator = torch.Generator().manual_seed(1000 * round_ + 10 * index + len(name))
            change = torch.randn(parameter.shape, generator=generator) * 0.1
            if self.settings.source == "gradient":
                parameter.grad = change
            else:
                parameter.add_(change)

    def checkpoint(self, round_: int) -> RunCheckpoint:
        """Load the run checkpoint that the auditor wrote after a round."""
        return open_checkpoint(checkpoint_path(self.exchange.log, round_)).checkpoint()


def _assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].equal(tensor), name


@pytest.mark.parametrize("after", [1, 3])
@pytest.mark.parametrize("method", METHODS)
def test_it_goes_on_to_the_same_bits(method: str, after: int, tmp_path: Path) -> None:
    """Compares weights, outer optimizer, error feedback, the auditor's run checkpoints and all contributions."""
    settings, folders = METHODS[method], [tmp_path / "unbroken", tmp_path / "resumed"]
    unbroken = Run(settings, initial_checkpoint(SHAPE, None, seed=2), folders[0])
    unbroken.train()
    middle = unbroken.checkpoint(after)
    assert (len(middle.momentum) > 0) == (method != "sparseloco_signs")
    resumed = Run(settings, middle, folders[1])
    resumed.load(folders[0])
    resumed.train()
    for round_ in range(after + 1, ROUNDS + 1):
        assert resumed.exchange.record(round_) == unbroken.exchange.record(round_)
        _assert_equal(resumed.checkpoint(round_).tensors(), unbroken.checkpoint(round_).tensors())
    for name in NAMES:
        ours, theirs = resumed.outer[name], unbroken.outer[name]
        _assert_equal(ours.theta, theirs.theta)
        _assert_equal(ours.error, theirs.error)
        _assert_equal(dict(ours.optimizer.state), dict(theirs.optimizer.state))


class _Disappearing(MemberSession):
    """An exchange that answers one fetch. Then the member is asked to stop while it waits for the next one."""

    def __init__(self, exchange: Exchange, name: str) -> None:
        super().__init__(exchange, name, name, "run")
        self._has_answered = False

    def deposit_blob(self, *_: object) -> None:
        """Do nothing: the round is closed."""

    def record(self, round_: int, member: str | Caller | None = None) -> RoundRecord:
        return super().record(round_)

    def fetch(self, member: str | Caller, round_: int, replica: str, block: str) -> bytes:
        if self._has_answered:
            raise Stopped
        self._has_answered = True
        return super().fetch(member, round_, replica, block)

    def confirm(self, *_: object) -> None:
        raise AssertionError


@pytest.mark.parametrize("generation", [None, 99], ids=["included", "excluded"])
@pytest.mark.parametrize("method", METHODS)
def test_a_member_stopped_while_it_fetches_a_round_saves_the_state_before_it(
    method: str, generation: int | None, tmp_path: Path
) -> None:
    """The exchange is gone after the first block of the round was applied. The run then resumes to the same bits."""
    settings, unbroken = METHODS[method], Run(METHODS[method], initial_checkpoint(SHAPE, None, seed=2), tmp_path)
    unbroken.train()
    middle, name = unbroken.checkpoint(1), NAMES[0]
    stopped = Run(settings, middle, tmp_path / "stopped")
    stopped.load(tmp_path)
    outer = stopped.outer[name]
    outer.session = _Disappearing(unbroken.exchange, name)
    stopped._learn(name, 2)
    with pytest.raises(Stopped):
        outer.synchronise(2, generation)
    outer.undo()
    outer.feedback.take_back()
    resumed = Run(settings, middle, tmp_path / "resumed")
    resumed.load(tmp_path)
    (tmp_path / "saved").mkdir()
    outer.save(tmp_path / "saved")
    resumed.outer[name].load(tmp_path / "saved")
    resumed.train()
    _assert_equal(resumed.checkpoint(ROUNDS).tensors(), unbroken.checkpoint(ROUNDS).tensors())
    _assert_equal(resumed.outer[name].error, unbroken.outer[name].error)
