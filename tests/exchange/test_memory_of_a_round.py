"""Memory of a round: beside what lasts, a member holds a few parameters, the auditor one block, and nobody a model."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import pytest
import torch
from allocations import peak_bytes
from members import assign_all, begin, patient
from torch import Tensor, nn

from hetero_pp.config.checkpoint import OpenCheckpoint, RunCheckpoint, open_checkpoint, save_checkpoint
from hetero_pp.config.spec import Roster
from hetero_pp.core.tensor_files import Scratch
from hetero_pp.messages import messages_pb2 as pb
from hetero_pp.model.inner import InnerOptimizer, InnerSettings
from hetero_pp.model.transformer import EMBEDDING
from hetero_pp.outer.methods import OuterSettings
from hetero_pp.pipeline.subspace import perpendicular, random_basis
from hetero_pp.pseudo_gradient.contribution import split_blobs
from hetero_pp.rpc.exchange_service import Caller
from hetero_pp.store.folder import FolderStore
from replica_groups.engines.engine import LocalParameters, Moments
from replica_groups.exchange.auditor import Auditor
from replica_groups.exchange.exchange import Exchange
from replica_groups.exchange.log import ContributionLog, checkpoint_key
from replica_groups.member.outer_round import OuterRound
from replica_groups.member.session import MemberSession

SETTINGS = OuterSettings.model_validate({"rounds": 2, "momentum": 0.9, "compression": {"density": 1 / 32}})
SHAPE = (256, 512)
PARAMETER = 4 * SHAPE[0] * SHAPE[1]
"""Bytes of one parameter; the model has 16 of them, each in a block of its own."""
NAMES = [f"layers.{index}.weight" for index in range(16)]


def _drawn(seed: int) -> Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def checkpoint() -> RunCheckpoint:
    return RunCheckpoint(0, {name: _drawn(index) for index, name in enumerate(NAMES)}, None)


class _Alone(MemberSession):
    """The session of a run with one replica, which includes every contribution."""

    def __init__(self) -> None:
        super().__init__(None, "dc", "dc", "run")
        self.blobs: dict[str, bytes] = {}

    def deposit_blob(self, header: pb.BlobHeader, data: bytes, caller: Caller) -> None:
        self.blobs.update({one.block: part for one, part in split_blobs(header, data)})

    def record(self, round_: int, member: str | Caller | None = None) -> pb.RoundRecord:
        record = pb.RoundRecord(round=round_)
        blobs = [pb.BlobEntry(block=block, sha256=hashlib.sha256(one).digest()) for block, one in self.blobs.items()]
        record.contributions.add(replica="dc", weight=1.0, blobs=blobs)
        return record

    def fetch(self, member: str | Caller, round_: int, replica: str, block: str) -> bytes:
        return self.blobs[block]

    def confirm(self, member: str | Caller, round_: int, sha256: Mapping[str, bytes]) -> None:
        pass


def test_an_outer_round_holds_a_few_parameters_beside_its_state(checkpoint: RunCheckpoint, tmp_path: Path) -> None:
    """Selection has temporary values of one parameter, and the outer step has its mean. All else is streamed.

    The first round creates the outer momentum.
    """
    parameters = {name: nn.Parameter(tensor.clone()) for name, tensor in checkpoint.parameters.items()}
    own, session = LocalParameters(parameters), _Alone()
    outer = OuterRound(session, own, checkpoint.parameters, SETTINGS, folder=tmp_path)
    for round_, of_momentum in ((1, len(NAMES) * PARAMETER), (2, 0)):
        for index, parameter in enumerate(parameters.values()):
            parameter.data.add_(_drawn(100 * round_ + index))
        assert PARAMETER < peak_bytes(partial(outer.contribute, round_)) < 4 * PARAMETER
        applied = peak_bytes(partial(outer.apply, session.record(round_), session.blobs))
        assert PARAMETER <= applied - of_momentum < 1.5 * PARAMETER


def test_moments_are_remembered_and_restored_one_by_one(tmp_path: Path) -> None:
    parameters = [nn.Parameter(_drawn(index)) for index in range(16)]
    adamw = torch.optim.AdamW(parameters)
    moments = Moments([adamw], folder=tmp_path)

    def step() -> None:
        for index, parameter in enumerate(parameters):
            parameter.grad = _drawn(50 + index)
        adamw.step()

    step()
    before = [tensor.clone() for parameter in parameters for tensor in adamw.state[parameter].values()]
    assert peak_bytes(moments.remember) == 0
    step()
    assert peak_bytes(moments.restore) <= PARAMETER
    after = [tensor for parameter in parameters for tensor in adamw.state[parameter].values()]
    assert all(ours.equal(theirs) for ours, theirs in zip(after, before, strict=True))


def test_the_table_outside_the_subspace_is_made_and_used_without_another_one() -> None:
    embedding, basis = nn.Parameter(torch.randn(40_000, 16)), random_basis(16, 2, seed=1)
    table = embedding.numel() * 4
    assert peak_bytes(lambda: perpendicular(embedding.detach(), basis)) < 1.3 * table
    optimizer = InnerOptimizer({EMBEDDING: embedding}, InnerSettings(weight_decay=0.1), 10)
    optimizer.perpendicular = perpendicular(embedding.detach(), basis)
    for step, most in ((0, 2.3), (1, 0.3)):  # the first step creates both moments
        embedding.grad = torch.randn_like(embedding)
        assert peak_bytes(partial(optimizer.step, step, torch.ones(()))) < most * table


class _Watched:
    """Tensors read from Scratch that are still alive, by key."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._read: list[tuple[object, weakref.ref[Tensor]]] = []
        self.most: list[int] = []
        """Number of them after each read."""
        real = Scratch.read

        def read(scratch: Scratch, key: object) -> Tensor:
            tensor = real(scratch, key)
            self._read = [(one, ref) for one, ref in self._read if ref() is not None]
            assert key not in [one for one, _ in self._read], "a second copy"
            self._read.append((key, weakref.ref(tensor)))
            self.most.append(len(self._read))
            return tensor

        monkeypatch.setattr(Scratch, "read", read)


@pytest.fixture
def audited(checkpoint: RunCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Exchange, _Watched]:
    """An exchange after two rounds of one member, with a run checkpoint after the last, and what its auditor read."""
    roster = Roster({"dc": "dc"}, {"dc": frozenset(f"layers.{index}" for index in range(16))})
    log = ContributionLog(FolderStore(tmp_path / "log"))
    exchange = Exchange("run", roster, None, SETTINGS, log, rules=patient(roster))
    parameters = {name: nn.Parameter(tensor.clone()) for name, tensor in checkpoint.parameters.items()}
    own = LocalParameters(parameters)
    session = MemberSession(exchange, "dc", "dc", "run")
    outer = OuterRound(session, own, checkpoint.parameters, SETTINGS, keeps_undo=False)
    auditor = Auditor(exchange, checkpoint, SETTINGS, checkpoint_every=2, folder=tmp_path)
    auditor.start()
    begin(exchange, checkpoint)
    exchange.decided.kept_checkpoint(0)
    assert isinstance(exchange.decided.open_checkpoint(pb.CheckpointRequest(), Caller("dc")), OpenCheckpoint)
    watched = _Watched(monkeypatch)
    for round_ in (1, 2):
        work = assign_all(exchange, round_ - 1)["dc"]
        for index, parameter in enumerate(parameters.values()):
            parameter.data.add_(_drawn(100 * round_ + index))
        outer.synchronise(round_, work.generation, steps=5)
    auditor.join(60)
    return exchange, watched


def test_the_auditor_holds_one_block_at_a_time(audited: tuple[Exchange, _Watched]) -> None:
    """It replays two rounds of 16 blocks. It reads all parameters once more, for the run checkpoint."""
    exchange, watched = audited
    assert watched.most[:32] == [1] * 32
    assert watched.most[32:] == list(range(1, 17))
    assert exchange.log.checkpoints() == {0, 2}


def test_a_checkpoint_is_sent_in_pieces_from_its_file(audited: tuple[Exchange, _Watched]) -> None:
    """Also after the file was removed, because a slow reader outlives it."""
    exchange, _ = audited
    request, caller = pb.CheckpointRequest(names=NAMES[:2]), Caller("dc")
    expected = exchange.read_checkpoint(request, caller)
    found = exchange.decided.open_checkpoint(request, caller)
    assert isinstance(found, OpenCheckpoint)
    exchange.log.store.delete([checkpoint_key(2)])
    for name, tensor in expected.items():
        assert found.shapes[name] == SHAPE
        assert b"".join(found.pieces(name)) == tensor.numpy().tobytes()
        assert max(map(len, found.pieces(name))) <= 1 << 20


def test_a_checkpoint_is_verified_one_tensor_at_a_time(checkpoint: RunCheckpoint, tmp_path: Path) -> None:
    save_checkpoint(checkpoint, tmp_path / "checkpoint")
    assert peak_bytes(lambda: open_checkpoint(tmp_path / "checkpoint")) <= 2 * PARAMETER
