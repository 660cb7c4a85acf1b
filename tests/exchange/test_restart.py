"""The round from which an interrupted run resumes: saved states decide, damage is named, nothing is deleted."""

from __future__ import annotations

import re
import shutil
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from log_files import checkpoint_path, folder_of
from members import begin, patient
from torch import Tensor, nn

import hetero_pp.config.checkpoint
from hetero_pp.config.checkpoint import RunCheckpoint, initial_checkpoint, open_checkpoint, save_checkpoint
from hetero_pp.config.spec import Roster
from hetero_pp.core.errors import DamagedFile, HeteroPPError
from hetero_pp.model.transformer import ModelShape, block_of
from hetero_pp.outer.methods import OuterSettings
from hetero_pp.outer.step import OuterOptimizer
from hetero_pp.pseudo_gradient.compression import CompressionSettings
from hetero_pp.rpc.exchange_service import AvailableStates
from hetero_pp.store.folder import FolderStore
from replica_groups.engines.engine import LocalParameters
from replica_groups.exchange.auditor import Auditor, Retention
from replica_groups.exchange.exchange import Exchange
from replica_groups.exchange.host import Restart, find_restart
from replica_groups.exchange.log import ContributionLog
from replica_groups.member.outer_round import OuterRound
from replica_groups.member.saved_states import DIGESTS, SavedStates, newest_usable_state
from replica_groups.member.session import MemberSession

SHAPE = ModelShape(width=16, layers=2, heads=2, feed_forward=24, vocabulary=64)
ROUNDS = 5
SETTINGS = OuterSettings(
    rounds=ROUNDS, momentum=0.9, learning_rate=0.7, compression=CompressionSettings(density=1 / 8, tile=(8, 8))
)
Rounds = dict[int, dict[str, Tensor]]


def _roster(checkpoint: RunCheckpoint, *members: str) -> Roster:
    blocks = frozenset(map(block_of, checkpoint.parameters))
    return Roster(
        dict.fromkeys(members, "dc") if len(members) == 1 else {m: m for m in members}, dict.fromkeys(members, blocks)
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Rounds]:
    """Return the log of five rounds, with run checkpoints after 0, 2, 4 and 5, and theta after each round."""
    folder = tmp_path_factory.mktemp("log")
    checkpoint = initial_checkpoint(SHAPE, rank=4, seed=1)
    roster, store = _roster(checkpoint, "dc"), FolderStore(folder)
    exchange = Exchange("run", roster, None, SETTINGS, ContributionLog(store), rules=patient(roster))
    begin(exchange, checkpoint)
    auditor = Auditor(exchange, checkpoint, SETTINGS, checkpoint_every=2, retention=Retention(exchange.log, keep=3))
    auditor.start()
    parameters = {name: nn.Parameter(tensor.clone()) for name, tensor in checkpoint.parameters.items()}
    outer = OuterRound(
        MemberSession(exchange, "dc", "dc", "run"), LocalParameters(parameters), checkpoint.parameters, SETTINGS
    )
    generator, after = torch.Generator().manual_seed(3), {}
    for round_ in range(1, ROUNDS + 1):
        with torch.no_grad():
            for parameter in parameters.values():
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
        outer.synchronise(round_, exchange.assign("dc", round_ - 1).generation)
        after[round_] = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    auditor.join()
    return folder, after


@pytest.fixture
def log(trained: tuple[Path, Rounds], tmp_path: Path) -> ContributionLog:
    """Return a copy of the log that a test may damage."""
    shutil.copytree(trained[0], tmp_path / "log")
    return ContributionLog(FolderStore(tmp_path / "log"))


def _held(**rounds: set[int]) -> dict[str, AvailableStates]:
    return {member: AvailableStates(frozenset(found)) for member, found in rounds.items()}


def _find(log: ContributionLog, held: Mapping[str, AvailableStates]) -> Restart:
    return find_restart(log, "run", held, lambda basis: OuterOptimizer(SETTINGS), every=1)


def _flip(path: Path, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


# ---- which round ----


@pytest.mark.parametrize(
    ("held", "expected"),
    [
        (_held(a={3, 4}, b={2, 3}, dc={2, 3}), 3),  # no run checkpoint after 3: it is replayed
        (_held(a={3, 4}, b={4}, dc={3, 4}), 4),
        (_held(a={1, 2}, dc={2, 3}), 2),
        (_held(a={4, 6}, dc={4, 6}), 4),  # the log ends before 6
    ],
)
def test_the_newest_round_that_all_hold_is_taken(
    trained: tuple[Path, Rounds], log: ContributionLog, held: dict[str, AvailableStates], expected: int
) -> None:
    found = _find(log, held)
    assert found.checkpoint.round == expected
    assert found.damaged == ()
    for name, tensor in trained[1][expected].items():
        assert tensor.equal(found.checkpoint.parameters[name]), name


def test_members_that_stopped_one_round_apart_start_again_where_all_of_them_were(log: ContributionLog) -> None:
    """Optimizer moments after one round cannot be computed from those after another."""

    def found(**rounds: set[int]) -> int:
        return find_restart(
            log, "run", _held(**rounds), lambda basis: OuterOptimizer(SETTINGS), every=20
        ).checkpoint.round

    assert found(a={5}, b={4}) == 0
    assert found(a={2, 5}, b={2, 4}) == 2
    assert found(a={1}, b=set()) == 0  # killed between the first states of both
    assert found(a=set(), b=set()) == 5
    assert found(a={5}, b=set()) == found(a={5}, b={3}) == 5  # states that are missing or old


@pytest.mark.parametrize("held", [_held(a={5}, b={2}, dc=set()), _held(a={1, 5}, b={1}, dc={1, 5})])
def test_if_some_fell_behind_the_newest_round_of_the_log_is_taken(
    trained: tuple[Path, Rounds], log: ContributionLog, held: dict[str, AvailableStates]
) -> None:
    """The other members lose nothing, and the note names which members resume from what."""
    found = _find(log, held)
    assert found.checkpoint.round == 5
    behind = {member for member, states in held.items() if 5 not in states.rounds}
    assert {member for member in held if re.search(rf"\b{member} (has no saved|restores)", found.note)} == behind
    for name, tensor in trained[1][5].items():
        assert tensor.equal(found.checkpoint.parameters[name]), name


def test_if_the_log_gives_none_one_line_says_who_holds_what(log: ContributionLog) -> None:
    for round_ in log.checkpoints():
        checkpoint_path(log, round_).unlink()
    with pytest.raises(HeteroPPError) as failure:
        _find(log, _held(a={3, 4}, b={2}, dc=set()))
    told = str(failure.value)
    assert told == (
        "found no round that all members have saved and that the log (up to round 5) can restore: "
        "a holds 3, 4; b holds 2; dc holds none (states are saved every `checkpoints.every` rounds)"
    )


def test_members_tell_and_the_exchange_chooses(log: ContributionLog, tmp_path: Path) -> None:
    """Members use the exchange for this. It answers none of them before all have joined."""
    first = open_checkpoint(checkpoint_path(log, 0)).checkpoint()
    roster = _roster(first, "a", "b")
    exchange = Exchange("run", roster, None, SETTINGS, log, rules=patient(roster))
    states = {name: SavedStates(tmp_path / name, "run", 1) for name in ("a", "b")}
    for name, rounds in {"a": (3, 4), "b": (2, 3)}.items():
        for round_ in rounds:
            states[name].save(round_, lambda folder: (folder / "part").write_bytes(b"state"))
    told: dict[str, int | None] = {}
    members = [
        threading.Thread(
            target=lambda name=name: told.update({name: _joined(exchange, name, states[name])}), daemon=True
        )
        for name in states
    ]
    members[0].start()
    with pytest.raises(Exception, match="the run has not started"):
        exchange.checkpoint(["norm.weight"])
    members[1].start()
    restart = _find(log, exchange.wait_until_joined())
    assert not told
    exchange.begin(restart.checkpoint)
    for member in members:
        member.join()
    assert told == {"a": 3, "b": 3}
    assert (states["a"].rounds(), states["b"].rounds()) == ([3], [2, 3])
    assert (tmp_path / "a" / "aside-1" / "round-000004" / "part").read_bytes() == b"state"


# ---- damage ----


def test_a_damaged_checkpoint_is_named_and_passed_over(trained: tuple[Path, Rounds], log: ContributionLog) -> None:
    _flip(checkpoint_path(log, 4), 8 * (checkpoint_path(log, 4).stat().st_size - 100))
    found = _find(log, _held(dc={3, 4}))
    assert found.checkpoint.round == 4  # replayed from the run checkpoint after 2
    assert len(found.damaged) == 1
    assert "checkpoint-000004.safetensors is damaged" in found.damaged[0]
    for name, tensor in trained[1][4].items():
        assert tensor.equal(found.checkpoint.parameters[name]), name


def test_what_needs_a_damaged_record_or_contribution_is_not_taken(log: ContributionLog) -> None:
    record = folder_of(log) / "round-000004" / "record.json"
    record.write_text(record.read_text().replace('"weight": 1.0', '"weight": 3.0'))
    checkpoint_path(log, 4).unlink()
    found = _find(log, _held(dc={3, 4}))
    assert found.checkpoint.round == 3
    assert "round-000004/record.json is damaged" in found.damaged[0]
    blob = next((folder_of(log) / "round-000003").rglob("*.blobs"))
    _flip(blob, 8 * (blob.stat().st_size - 1))
    found = _find(log, _held(dc={2, 3}))
    assert found.checkpoint.round == 2
    assert "does not match its digest" in found.damaged[0]


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.999])
def test_a_flipped_bit_in_a_checkpoint_is_noticed(trained: tuple[Path, Rounds], tmp_path: Path, share: float) -> None:
    path = tmp_path / "checkpoint.safetensors"
    path.write_bytes((trained[0] / "checkpoint-000005.safetensors").read_bytes())
    open_checkpoint(path)
    _flip(path, int(8 * share * path.stat().st_size) + 3)
    with pytest.raises(DamagedFile, match=r"checkpoint\.safetensors is damaged"):
        open_checkpoint(path)


@pytest.mark.parametrize("name", ["norm.weight", "subspace.basis", "outer.momentum.norm.weight"])
def test_every_tensor_of_a_checkpoint_is_in_its_digest(
    trained: tuple[Path, Rounds], tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run checkpoint is written again with one changed tensor, under its previous digest."""
    checkpoint = open_checkpoint(trained[0] / "checkpoint-000005.safetensors").checkpoint()
    save_checkpoint(checkpoint, tmp_path / "same")
    assert open_checkpoint(tmp_path / "same").checkpoint().round == 5
    real = hetero_pp.config.checkpoint.save_tensors
    monkeypatch.setattr(
        hetero_pp.config.checkpoint,
        "save_tensors",
        lambda tensors, path, metadata: real({**tensors, name: tensors[name] + 1}, path, metadata),
    )
    save_checkpoint(checkpoint, tmp_path / "other")
    with pytest.raises(DamagedFile, match="its tensors do not match its digest"):
        open_checkpoint(tmp_path / "other").checkpoint()


def test_a_contribution_that_is_lost_is_named(log: ContributionLog) -> None:
    next((folder_of(log) / "round-000003").rglob("*.blobs")).unlink()
    found = _find(log, _held(dc={3}))
    assert found.checkpoint.round == 5  # from a later run checkpoint
    assert [one for one in found.damaged if re.search(r"round-000003/dc/1/[\w.]+\.blob is missing", one)]
    for round_ in (4, 5):
        checkpoint_path(log, round_).unlink()
    assert _find(log, _held(dc={3})).checkpoint.round == 2


def test_copies_beside_the_log_are_left_alone(log: ContributionLog) -> None:
    (folder_of(log) / "round-000004-mine").mkdir()
    (folder_of(log) / "checkpoint-000004.safetensors.bak").write_text("mine")
    log.forget_after(2)
    assert (log.records(), log.checkpoints()) == ({1, 2}, {0, 2})
    assert (folder_of(log) / "round-000004-mine").exists()
    assert (folder_of(log) / "checkpoint-000004.safetensors.bak").exists()


# ---- states ----


def _saved(folder: Path, run: str = "run", rounds: tuple[int, ...] = (3, 4)) -> SavedStates:
    states = SavedStates(folder, run, 1)

    def write(part: Path) -> None:
        (part / "engine").mkdir()
        (part / "engine" / "moments").write_bytes(bytes(range(256)))
        (part / "error").write_bytes(b"feedback")

    for round_ in rounds:
        states.save(round_, write)
    return states


NOTED = {
    "no digests": None,
    "torn digests": '{"run": "run", "files": {"err',
    "list": "[]",
    "null": "null",
    "no files": '{"run": "run", "files": null}',
    "numbers": '{"run": "run", "files": [1]}',
    "deep": "[" * 10_000,
    "no text": "\udcff",
}
"""Content of a file of digests."""


@pytest.mark.parametrize("damage", ["flip", "missing", "more", *NOTED])
def test_a_damaged_state_is_named_and_not_held(tmp_path: Path, damage: str) -> None:
    states = _saved(tmp_path)
    moments = states.path(4) / "engine" / "moments"
    (tmp_path / "round-5").mkdir()
    if damage == "flip":
        _flip(moments, 700)
    elif damage == "missing":
        moments.unlink()
    elif damage == "more":
        (states.path(4) / "engine" / "other").write_text("?")
    elif (noted := NOTED[damage]) is None:
        (states.path(4) / DIGESTS).unlink()
    else:
        (states.path(4) / DIGESTS).write_bytes(noted.encode(errors="surrogateescape"))
    held = states.check()
    assert held.rounds == {3}
    assert len(held.damaged) == 1
    assert "round-000004 is damaged: " in held.damaged[0]


def _joined(exchange: Exchange, member: str, states: SavedStates) -> int | None:
    """Join, and return the round whose saved state the member resumes from."""
    available = states.check()
    exchange.join(member, "", available)
    return newest_usable_state(
        MemberSession(exchange, member, exchange.roster.members[member], "run"), states, available
    )


def _joined_at(checkpoint: RunCheckpoint, states: SavedStates, folder: Path) -> int | None:
    roster, store = _roster(checkpoint, "dc"), FolderStore(folder)
    exchange = Exchange("run", roster, checkpoint, SETTINGS, ContributionLog(store), rules=patient(roster))
    return _joined(exchange, "dc", states)


def test_an_exchange_that_begins_anew_costs_no_member_its_states(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    checkpoint = initial_checkpoint(SHAPE, rank=4, seed=1)
    states = _saved(tmp_path / "state")
    assert _joined_at(checkpoint, states, tmp_path / "log") is None
    assert states.rounds() == []
    assert f"were moved to {tmp_path / 'state' / 'aside-1'}" in capfd.readouterr().err
    for round_ in (3, 4):
        kept = tmp_path / "state" / "aside-1" / f"round-00000{round_}"
        assert (kept / "engine" / "moments").read_bytes() == bytes(range(256))
    states.save(3, lambda folder: (folder / "new").write_text("another"))
    _joined_at(checkpoint, states, tmp_path / "log")
    assert (tmp_path / "state" / "aside-2" / "round-000003" / "new").exists()
    assert (tmp_path / "state" / "aside-1" / "round-000003" / "engine").exists()


def test_states_of_a_later_round_or_another_run_do_not_push_new_ones_out(tmp_path: Path) -> None:
    checkpoint = initial_checkpoint(SHAPE, rank=4, seed=1)
    later = RunCheckpoint(3, checkpoint.parameters, checkpoint.basis)
    states = _saved(tmp_path / "state", rounds=(3,))
    _saved(tmp_path / "other", "another run", rounds=(2,)).path(2).rename(states.path(2))
    _saved(tmp_path / "later", rounds=(40,)).path(40).rename(states.path(40))
    assert states.check().rounds == {3, 40}
    assert _joined_at(later, states, tmp_path / "log") == 3
    assert states.rounds() == [3]
    assert {path.name for path in (tmp_path / "state" / "aside-1").iterdir()} == {"round-000002", "round-000040"}
    states.save(4, lambda folder: (folder / "new").write_text("state"))
    assert states.rounds() == [3, 4]
