"""Files are written completely or not at all, and are flushed to disk before they get their final name."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import safetensors.torch
import torch
from deposits import keyed
from log_files import checkpoint_path, folder_of

from hetero_pp.config.checkpoint import RunCheckpoint, initial_checkpoint, save_checkpoint
from hetero_pp.core.errors import HeteroPPError
from hetero_pp.core.files import PART, whole, write_whole
from hetero_pp.messages.messages_pb2 import BlobEntry, ContributionEntry, Report, RoundRecord
from hetero_pp.model.transformer import ModelShape
from hetero_pp.pseudo_gradient.contribution import BlobAddress
from hetero_pp.pseudo_gradient.rows import rows_of
from hetero_pp.research.trainer.train import Checkpoint
from hetero_pp.store.folder import FolderStore
from replica_groups.engines.ranks import Ranks
from replica_groups.exchange.log import ContributionLog
from replica_groups.member import reporter as reporter_module
from replica_groups.member.error_feedback import Undecided
from replica_groups.member.rank_rows import read_part, write_part
from replica_groups.member.reporter import Reporter
from replica_groups.member.saved_states import SavedStates

SHAPE = ModelShape(width=16, layers=2, heads=2, feed_forward=24, vocabulary=64)


class Torn(Exception):
    """Simulates a machine that crashes in the middle of a write."""


def _write_half(path: Path, data: bytes) -> int:
    with path.open("wb") as file:
        file.write(data[: len(data) // 2])
    raise Torn


def _save_half(tensors: dict[str, torch.Tensor], path: Path, metadata: dict[str, str]) -> None:
    _write_half(path, safetensors.torch.save(tensors, metadata))


def _checkpoint(version: int) -> RunCheckpoint:
    return RunCheckpoint(1, initial_checkpoint(SHAPE, None, seed=version).parameters, None)


def _blob(log: ContributionLog, version: int) -> None:
    log.write_blobs(keyed({BlobAddress("run", 1, "dc", "norm"): f"version {version}".encode()}, 1))


def _record(log: ContributionLog, version: int) -> None:
    log.create_record(RoundRecord(round=1, late=[f"version {version}"]))


def _saved_checkpoint(log: ContributionLog, version: int) -> None:
    log.write_checkpoint(_checkpoint(version))


def _saved_alone(log: ContributionLog, version: int) -> None:
    save_checkpoint(_checkpoint(version), checkpoint_path(log, 1))


@pytest.mark.parametrize("write", [_blob, _record, _saved_checkpoint, _saved_alone])
def test_a_torn_write_leaves_what_was_there(
    write: Callable[[ContributionLog, int], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = ContributionLog(FolderStore(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", _write_half)
        patch.setattr(safetensors.torch, "save_file", _save_half)
        with pytest.raises(Torn):
            write(log, 1)
    assert not [path for path in _files(tmp_path) if path.suffix in (".blob", ".json", ".safetensors")]
    assert not log.checkpoints()
    write(log, 1)
    before = {path: path.read_bytes() for path in _files(tmp_path)}
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", _write_half)
        patch.setattr(safetensors.torch, "save_file", _save_half)
        with pytest.raises(Torn):
            write(log, 2)
    assert {path: path.read_bytes() for path in before} == before


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


@pytest.mark.parametrize(
    ("generation", "data", "is_damaged", "is_taken"),
    [(3, b"own", False, True), (4, b"own", False, False), (3, b"other", False, False), (3, b"own", True, False)],
    ids=["included", "another generation", "another contribution", "damaged"],
)
def test_a_pending_state_counts_once_a_record_includes_its_contribution(
    generation: int, data: bytes, is_damaged: bool, is_taken: bool, tmp_path: Path
) -> None:
    states = SavedStates(tmp_path, "run", 1)
    for round_ in (1, 2):
        states.save(round_, lambda folder: (folder / "moments").write_text("before"))
    states.save(3, lambda folder: (folder / "moments").write_text("after"), Undecided(3, 3, {"head": b"own"}))
    assert (states.pending, states.check().rounds) == (3, {1, 2})
    if is_damaged:
        (tmp_path / "pending-000003" / "moments").write_text("afteR")
    sent = BlobEntry(block="head", sha256=hashlib.sha256(data).digest())
    entry = ContributionEntry(replica="dc", generation=generation, blobs=[sent])
    assert states.settle(3, entry, reads=True) == is_taken
    assert (states.pending, states.check().rounds) == (0, {2, 3} if is_taken else {1, 2})


def test_who_goes_on_removes_what_a_kill_left(tmp_path: Path) -> None:
    """A partial run checkpoint may be as large as the model, and each kill may leave another one."""
    log, checkpoint = ContributionLog(FolderStore(tmp_path / "log")), tmp_path / "rows" / "row.pt"
    _blob(log, 1)
    before = _files(folder_of(log))
    killed = [
        path.with_name(f"{path.name}.0123abcd{PART}") for path in (before[0], checkpoint_path(log, 1), checkpoint)
    ]
    for path in killed:
        path.parent.mkdir(exist_ok=True)
        path.touch()
    log.forget_after(1)
    assert Checkpoint(checkpoint, "run", 0.0).load() is None
    assert _files(tmp_path) == before


class _Disk:
    """Records, in order, which files are flushed to disk and which are renamed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.done: list[tuple[str, str]] = []
        fsync = os.fsync

        def flushed(descriptor: int) -> None:
            self.done.append(("flushed", Path(f"/proc/self/fd/{descriptor}").resolve().name))
            fsync(descriptor)

        monkeypatch.setattr(os, "fsync", flushed)
        for name in ("replace", "rename"):
            self._note(monkeypatch, name)

    def _note(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        real = getattr(Path, name)

        def named(path: Path, target: Path) -> Path:
            self.done.append(("named", target.name))
            return real(path, target)

        monkeypatch.setattr(Path, name, named)


def test_a_file_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "log").mkdir()
    disk = _Disk(monkeypatch)
    write_whole(tmp_path / "log" / "record.json", b"{}")
    (was, part), *others = disk.done
    assert was == "flushed" and part.startswith("record.json.") and part.endswith(".part")
    assert others == [("named", "record.json"), ("flushed", "log")]


def test_two_who_write_one_file_at_once(tmp_path: Path) -> None:
    """Two nodes of a replica may write the same configuration to a shared folder.

    The result is one of the two, complete.
    """
    path = tmp_path / "config.yaml"
    with whole(path) as first:
        first.write_text("first")
        with whole(path) as second:
            second.write_text("second")
        assert path.read_text() == "second"
    assert path.read_text() == "first"
    assert _files(tmp_path) == [path]


def test_a_state_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = _Disk(monkeypatch)
    SavedStates(tmp_path / "dc", "run", 1).save(1, lambda folder: (folder / "moments").write_text("1"))
    named = disk.done.index(("named", "round-000001"))
    assert {("flushed", "moments"), ("flushed", "digests.json"), ("flushed", "part")} <= set(disk.done[:named])
    assert disk.done[named + 1 :] == [("flushed", "dc")]


class _Slow:
    """An exchange that blocks in `report` until a test sets `lets`."""

    def __init__(self) -> None:
        self.lets, self.heard = threading.Event(), 0

    def report(self, reports: Sequence[Report]) -> None:
        self.lets.wait()
        self.heard += len(reports)


def test_a_flush_waits_until_all_was_heard() -> None:
    """A member's reports must reach the exchange before the member saves its state."""
    exchange = _Slow()
    reporter = Reporter(exchange, "dc", interval=1000.0)  # type: ignore[arg-type]
    for _ in range(3):
        reporter.tell()
    flushed = threading.Thread(target=reporter.flush, daemon=True)
    flushed.start()
    assert exchange.heard == 0
    assert flushed.is_alive()
    exchange.lets.set()
    flushed.join()
    assert exchange.heard == 3
    reporter.close()
    reporter.flush()  # the exchange gets no more reports: this returns at once


def test_a_flush_of_a_member_that_is_asked_to_stop_does_not_wait_for_an_exchange_that_is_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The member then saves its state, and ends."""
    monkeypatch.setattr(reporter_module, "SECONDS_TO_REPORT", 0.01)
    exchange, looks, is_asked = _Slow(), threading.Semaphore(0), threading.Event()
    reporter = Reporter(exchange, "dc", interval=0.0)  # type: ignore[arg-type]
    reporter.tell()

    def look() -> bool:
        looks.release()
        return is_asked.is_set()

    flushed = threading.Thread(target=reporter.flush, args=[look], daemon=True)
    flushed.start()
    assert all(looks.acquire(timeout=60) for _ in range(3))
    assert flushed.is_alive()
    is_asked.set()
    flushed.join(60)
    assert not flushed.is_alive()
    assert exchange.heard == 0
    exchange.lets.set()
    reporter.close()


ROWS_TILE = (8, 8)
ROWS = {"a": (37, 5), "b": (9,), "c": (16, 3)}


@pytest.mark.parametrize("before", [1, 2, 3, 7])
@pytest.mark.parametrize("after", [1, 2, 4])
def test_any_number_of_ranks_reads_what_any_other_wrote(before: int, after: int, tmp_path: Path) -> None:
    wholes = {f"{kind}:{name}": torch.randn(shape) for kind in ("error", "m") for name, shape in ROWS.items()}

    def cut(rank: int, world: int) -> dict[str, torch.Tensor]:
        rows = {name: rows_of(shape, ROWS_TILE, rank, world) for name, shape in ROWS.items()}
        return {name: t[rows[name[-1]].start : rows[name[-1]].stop] for name, t in wholes.items()}

    for rank in range(before):
        write_part(tmp_path, Ranks(rank, before), cut(rank, before))
    for rank in range(after):
        found, expected = read_part(tmp_path, Ranks(rank, after), ROWS, ROWS_TILE), cut(rank, after)
        assert found.keys() == expected.keys()
        assert all(found[name].equal(tensor) for name, tensor in expected.items())


def test_a_missing_rank_is_said(tmp_path: Path) -> None:
    write_part(tmp_path, Ranks(1, 2), {"error:a": torch.zeros(3, 5)})
    with pytest.raises(HeteroPPError, match="expected one file per rank"):
        read_part(tmp_path, Ranks(0, 1), ROWS, ROWS_TILE)
