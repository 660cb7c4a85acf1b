"""Data that is removed from a log during the run, and data that stays."""

from __future__ import annotations

import hashlib
import shutil
import threading
from pathlib import Path

import pytest
from deposits import keyed
from typer.testing import CliRunner

from hetero_pp.core.errors import StoreError
from hetero_pp.messages.messages_pb2 import BlobEntry, ContributionEntry, RoundRecord
from hetero_pp.program.cli import app
from hetero_pp.program.launch.command import run_topology
from hetero_pp.pseudo_gradient.contribution import BlobAddress
from hetero_pp.store.folder import FolderStore
from hetero_pp.store.store import Store
from replica_groups.exchange.auditor import Retention
from replica_groups.exchange.audits import audited
from replica_groups.exchange.log import ContributionLog, checkpoint_key

DIGITS = hashlib.sha256(b"home 2").hexdigest()[:16]
SMALL = Path(__file__).with_name("small.yaml")


def _round(log: ContributionLog, round_: int) -> None:
    """Write a round that includes the second generation of `home`. Its first generation and `dc` are excluded."""
    for replica, generation in (("home", 1), ("home", 2), ("dc", 1)):
        for block in ("norm", "lm_head"):
            log.write_blobs(
                keyed({BlobAddress("run", round_, replica, block): f"{replica} {generation}".encode()}, generation)
            )
    digest = hashlib.sha256(b"home 2").digest()
    blobs = [BlobEntry(block=block, sha256=digest) for block in ("norm", "lm_head")]
    entry = ContributionEntry(replica="home", generation=2, blobs=blobs)
    log.create_record(RoundRecord(round=round_, contributions=[entry], late=["dc"]))


def test_what_no_record_names_goes_a_round_later(store: Store) -> None:
    log = ContributionLog(store)
    store.put("round-000001/home/2/norm.0123456789abcdef.blob.uploaded", b"by a member that then died")
    retention = Retention(log, 2)
    for round_ in (1, 2):
        _round(log, round_)
        retention.audited(round_)
    kept = ["home/2/lm_head", "home/2/norm", "record.json"]
    assert [key.removeprefix("round-000001/").split(f".{DIGITS}.")[0] for key in store.below("round-000001")] == kept
    assert len(store.below("round-000002")) == 7
    read = log.blobs_of(log.read_record(1))
    assert read("home", "norm") == read("home", "lm_head") == b"home 2"


def test_nothing_of_a_round_goes_of_which_nobody_knows_what_counted(store: Store) -> None:
    """The record of the round is missing or damaged, so what it includes is unknown."""
    log = ContributionLog(store)
    log.write_blobs(keyed({BlobAddress("run", 1, "dc", "norm"): b"a blob"}, 1))
    Retention(log, 2).audited(2)
    assert len(store.below()) == 1
    store.put("round-000001/record.json", b"{")
    Retention(log, 2).audited(2)
    assert len(store.below()) == 2


def test_the_first_and_the_newest_checkpoints_stay(store: Store) -> None:
    log = ContributionLog(store)
    for round_ in (0, 2, 4, 6, 8):
        store.put(checkpoint_key(round_), b"a run checkpoint")
        if round_ != 8:
            Retention(log, 2).kept_checkpoint(round_)
    assert log.checkpoints() == {0, 4, 6, 8}
    Retention(log, 3).kept_checkpoint(8)
    assert log.checkpoints() == {0, 4, 6, 8}
    Retention(log, 2).kept_checkpoint(8)
    assert log.checkpoints() == {0, 6, 8}


def _rounds_with_blobs(log: ContributionLog) -> set[int]:
    return {int(key[6:12]) for key in log.store.below() if key.endswith((".blob", ".blobs"))}


def test_history_goes_with_the_checkpoints_that_it_leads_to(store: Store) -> None:
    log = ContributionLog(store)
    recent = Retention(log, 2, "recent")
    store.put(checkpoint_key(0), b"a run checkpoint")
    for round_ in range(1, 9):
        _round(log, round_)
        if round_ % 2 == 0:
            store.put(checkpoint_key(round_), b"a run checkpoint")
            recent.kept_checkpoint(round_)
        if round_ == 3:  # the log has only one run checkpoint beside the first
            assert log.checkpoints() == {0, 2} and _rounds_with_blobs(log) == {1, 2, 3}
    assert (log.checkpoints(), _rounds_with_blobs(log)) == ({6, 8}, {7, 8})
    assert log.records() == set(range(1, 9))


def _train(corpus: Path, runs: Path, *settings: str, resume: bool = False) -> ContributionLog:
    given = [f"data.corpus={corpus}", *settings]
    run_topology(SMALL, given, runs, in_process=True, resume=resume)
    return ContributionLog(FolderStore(runs / "small" / "log"))


def test_an_auditor_waits_for_a_store_that_is_gone(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """For a while it cannot read, then it can neither write nor remove."""
    left = {"get": 3, "create": 2, "delete": 1}

    def goes_away(name: str) -> None:
        real = getattr(FolderStore, name)

        def call(store: FolderStore, *arguments: object) -> object:
            if threading.current_thread().name == "auditor" and left[name] > 0:
                left[name] -= 1
                raise StoreError("the store: cannot be reached")
            return real(store, *arguments)

        monkeypatch.setattr(FolderStore, name, call)

    monkeypatch.setattr("replica_groups.exchange.runner.FIRST_PAUSE", 0.01)
    for name in left:
        goes_away(name)
    log = _train(corpus, tmp_path)
    assert left == {"get": 0, "create": 0, "delete": 0}
    assert log.checkpoints() == {0, 3, 4}
    assert audited(log.store) == {1, 2, 3, 4}
    assert "exchange: the store: cannot be reached; retrying" in capfd.readouterr().err


def test_a_run_with_recent_history_is_replayed_from_there(corpus: Path, tmp_path: Path) -> None:
    log = _train(corpus, tmp_path, "store.history=recent")
    assert (log.checkpoints(), _rounds_with_blobs(log), log.records()) == ({3, 4}, {4}, {1, 2, 3, 4})
    found = CliRunner().invoke(app, ["log", "replay", str(tmp_path / "small")])
    assert found.exit_code == 0, found.output
    assert [line.split(":")[0] for line in found.stdout.splitlines() if line.startswith("round")] == [
        "round 3",
        "round 4",
    ]


def test_a_member_that_was_away_for_longer_than_history_begins_anew(
    corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its saved state is older than the contributions in the log.

    Contributions that later rounds included cannot be removed from it.
    """
    _train(corpus, tmp_path, "outer.rounds=2", "store.history=recent")
    state = tmp_path / "small" / "state" / "dc"
    shutil.copytree(state, tmp_path / "old")
    log = _train(corpus, tmp_path, "outer.rounds=5", "store.history=recent", resume=True)
    assert _rounds_with_blobs(log) == {5}
    shutil.rmtree(state)
    shutil.copytree(tmp_path / "old", state)
    capfd.readouterr()
    _train(corpus, tmp_path, "outer.rounds=6", "store.history=recent", resume=True)
    assert "dc: states of later rounds were moved to" in capfd.readouterr().err
    assert log.last_record() == 6
