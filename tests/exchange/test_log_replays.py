"""The log of a run replays to what its members hold, and the auditor fails a run of which it does not."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import torch
from log_files import checkpoint_path, folder_of, stored_blob, stored_bytes
from safetensors import safe_open
from three_members import (
    EMBEDDING,
    GENERATIONS,
    LAST,
    ROSTER,
    ROUNDS,
    SETTINGS,
    SHAPE,
    _address,
    _blob,
    _deposit_all,
    _hashes,
    _in_threads,
    _reports,
    training,
)
from torch import Tensor, nn

from hetero_pp.config.checkpoint import RunCheckpoint, initial_checkpoint, open_checkpoint
from hetero_pp.core.errors import DamagedFile, MalformedContribution, Refused, RunFailed
from hetero_pp.model.transformer import block_of
from hetero_pp.outer.apply_round import apply_round
from hetero_pp.outer.methods import OuterSettings
from hetero_pp.outer.step import OuterOptimizer, parameter_sha256, parameters_sha256
from replica_groups.engines.engine import LocalParameters
from replica_groups.exchange.auditor import Auditor
from replica_groups.exchange.exchange import Exchange
from replica_groups.member.outer_round import OuterRound
from replica_groups.member.session import MemberSession


@pytest.fixture(scope="module")
def checkpoint() -> RunCheckpoint:
    return initial_checkpoint(SHAPE, rank=4, seed=1)


@pytest.fixture
def exchange(checkpoint: RunCheckpoint, tmp_path: Path) -> Iterator[Exchange]:
    with training(checkpoint, tmp_path / "log") as exchange:
        yield exchange


class _Member:
    """A member that owns some blocks, changes them at random and synchronises."""

    def __init__(self, exchange: Exchange, checkpoint: RunCheckpoint, name: str, seed: int) -> None:
        owned = {n: t for n, t in checkpoint.parameters.items() if block_of(n) in ROSTER.blocks[name]}
        followed = {} if EMBEDDING in owned else {EMBEDDING: checkpoint.parameters[EMBEDDING]}
        self.parameters = {n: nn.Parameter(t.clone()) for n, t in owned.items()}
        held = LocalParameters(self.parameters)
        self._exchange = exchange
        self.outer = OuterRound(
            MemberSession(exchange, name, ROSTER.members[name], "run"), held, owned | followed, SETTINGS
        )
        self._generator = torch.Generator().manual_seed(seed)

    @torch.no_grad()
    def train(self) -> None:
        for round_ in range(1, ROUNDS + 1):
            for parameter in self.parameters.values():
                parameter.add_(torch.randn(parameter.shape, generator=self._generator) * 0.1)
            work = self._exchange.assign(self.outer.session.member, round_ - 1)
            self.outer.synchronise(round_, work.generation, steps=5)


@pytest.fixture
def trained(exchange: Exchange, checkpoint: RunCheckpoint) -> Iterator[tuple[Exchange, dict[str, Tensor]]]:
    """Run three members and the auditor to the end. Return the exchange and the members' final parameters."""
    auditor = Auditor(exchange, checkpoint, SETTINGS, checkpoint_every=2)
    auditor.start()
    members = [_Member(exchange, checkpoint, name, seed) for seed, name in enumerate(ROSTER.members)]
    assert _in_threads(*(member.train for member in members), auditor.join) == []
    held: dict[str, Tensor] = {}
    for member in members:
        assert EMBEDDING in member.outer.theta
        for name, tensor in member.outer.theta.items():
            assert held.setdefault(name, tensor).equal(tensor), name
        for name, parameter in member.parameters.items():
            assert parameter.detach().equal(held[name]), name
    assert held.keys() == checkpoint.parameters.keys()
    yield exchange, held


def _replayed(
    exchange: Exchange, start: Mapping[str, Tensor], rounds: range, names: Callable[[str], bool] = lambda name: True
) -> dict[str, Tensor]:
    theta = {name: tensor.clone() for name, tensor in start.items() if names(name)}
    optimizer = OuterOptimizer(SETTINGS)
    for round_ in rounds:
        record = exchange.log.read_record(round_)
        apply_round(theta, "run", record, exchange.log.blobs_of(record), optimizer)
    return theta


def test_the_log_replays_to_what_the_members_hold(
    trained: tuple[Exchange, dict[str, Tensor]], checkpoint: RunCheckpoint
) -> None:
    """It does so from the first run checkpoint, from a later one, and for the blocks of one stage alone."""
    exchange, held = trained
    first, second = (open_checkpoint(checkpoint_path(exchange.log, round_)).checkpoint() for round_ in (0, 2))
    found = _replayed(exchange, first.parameters, range(1, 4))
    assert not any(tensor.equal(checkpoint.parameters[name]) for name, tensor in found.items())
    stage = _replayed(exchange, checkpoint.parameters, range(1, 4), lambda name: block_of(name) in LAST)
    assert {block_of(name) for name in stage} == LAST
    for replayed in (found, _replayed(exchange, second.parameters, range(3, 4)), stage):
        for name, tensor in replayed.items():
            assert tensor.equal(held[name]), name
    verified = [report.round_verified for report in _reports(exchange) if report.HasField("round_verified")]
    assert {(v.replica, v.round) for v in verified} == {(r, t) for r in ("dc", "home") for t in (1, 2, 3)}
    whole = parameters_sha256({name: parameter_sha256(tensor) for name, tensor in held.items()})
    assert {v.parameters_sha256 for v in verified if v.round == 3} == {whole}
    assert exchange.runner.refusals.counts.total() == 0


def test_the_auditors_checkpoints_read_back(
    trained: tuple[Exchange, dict[str, Tensor]], checkpoint: RunCheckpoint
) -> None:
    exchange, held = trained
    names = sorted(path.name for path in folder_of(exchange.log).glob("checkpoint*"))
    assert names == [f"checkpoint-00000{round_}.safetensors" for round_ in (0, 2, 3)]
    first, second, last = (open_checkpoint(checkpoint_path(exchange.log, round_)).checkpoint() for round_ in (0, 2, 3))
    assert (first.round, second.round, last.round) == (0, 2, 3)
    for loaded, expected in ((first, checkpoint.parameters), (last, held)):
        assert loaded.parameters.keys() == expected.keys()
        assert all(loaded.parameters[name].equal(tensor) for name, tensor in expected.items())
        assert loaded.basis is not None and checkpoint.basis is not None and loaded.basis.equal(checkpoint.basis)
    with safe_open(checkpoint_path(exchange.log, 3), "pt") as file:
        whole = parameters_sha256({name: parameter_sha256(tensor) for name, tensor in held.items()})
        assert file.metadata()["parameters_sha256"] == whole.hex()


def test_a_blob_that_was_changed_in_the_log_is_found(
    trained: tuple[Exchange, dict[str, Tensor]], checkpoint: RunCheckpoint
) -> None:
    exchange, _ = trained
    address = _address("home", "norm", round_=2)
    exchange.log.store.put(stored_blob(exchange.log, 2, "home", 2, "norm"), _blob(checkpoint, address, seed=77))
    with pytest.raises(
        DamagedFile, match=r"/round-000002/home/2/norm\.\w+\.blob is damaged: it does not match its digest"
    ):
        _replayed(exchange, checkpoint.parameters, range(1, 4))
    with pytest.raises(Refused, match=r"/round-000002/home/2/norm\.\w+\.blob is damaged: it does not match its digest"):
        exchange.fetch("dc", 2, "home", "norm")
    theta, record = dict(checkpoint.parameters), exchange.record(2)

    def as_it_is(replica: str, block: str) -> bytes:
        return stored_bytes(exchange.log, 2, replica, GENERATIONS[replica], block)

    with pytest.raises(MalformedContribution, match="home, norm"):
        apply_round(theta, "run", record, as_it_is, OuterOptimizer(SETTINGS))


def _expect_failure(exchange: Exchange, cause: str) -> None:
    """Require that the run has failed, and that waiting callers get a cause that matches this pattern."""
    (error,) = _in_threads(exchange.wait_until_finished)
    assert isinstance(error, RunFailed)
    assert re.fullmatch(cause, str(error)), str(error)


def test_the_auditor_fails_a_run_whose_members_agree_on_something_else(
    exchange: Exchange, checkpoint: RunCheckpoint
) -> None:
    """All members confirm the initial weights after a round that changed them."""
    auditor = Auditor(exchange, checkpoint, OuterSettings(rounds=1), checkpoint_every=1)
    _deposit_all(exchange, checkpoint)
    for member in ROSTER.members:
        exchange.confirm(member, 1, _hashes(checkpoint, ROSTER.blocks[member]))
    auditor.start()
    auditor.join()
    _expect_failure(exchange, r"after round 1, dc, home hold a \S+ that differs from the run log")
    assert not checkpoint_path(exchange.log, 1).exists()


def test_a_blob_lost_before_the_auditor_reads_it_fails_the_run(exchange: Exchange, checkpoint: RunCheckpoint) -> None:
    """A full disk or a lost file must not silently stop the auditor, which checks the run and writes checkpoints."""
    _deposit_all(exchange, checkpoint)
    (folder_of(exchange.log) / stored_blob(exchange.log, 1, "dc", 1, "norm")).unlink()
    auditor = Auditor(exchange, checkpoint, OuterSettings(rounds=1), checkpoint_every=1)
    auditor.start()
    auditor.join()
    _expect_failure(exchange, r"the auditor cannot replay the log: .*/round-000001/dc/1/norm\.\w+\.blob'")
