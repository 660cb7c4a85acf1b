"""For every n, the n-th disk operation fails, once or until there is space again: the exchange waits and reports why.

It acknowledges nothing that is not stored, and gives no partial file its final name. The results have the same bits.
"""

from __future__ import annotations

import errno
import hashlib
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from deposits import deposit
from failing_disk import each_operation, failing_disk
from members import TIMEOUT, assign_all, in_thread, patient
from three_members import SETTINGS, _blob

from hetero_pp.config.checkpoint import RunCheckpoint, initial_checkpoint
from hetero_pp.config.spec import Roster
from hetero_pp.core.files import PART
from hetero_pp.model.transformer import ModelShape, block_of
from hetero_pp.outer.methods import OuterSettings
from hetero_pp.pseudo_gradient.contribution import BlobAddress
from hetero_pp.store.folder import FolderStore
from replica_groups.exchange.auditor import Auditor
from replica_groups.exchange.audits import audited
from replica_groups.exchange.exchange import Exchange
from replica_groups.exchange.log import ContributionLog

TRANSIENT = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EACCES, errno.ENFILE, errno.EMFILE)
SHAPE = ModelShape(width=16, layers=1, heads=2, feed_forward=24, vocabulary=64)
PARAMETERS = ("tok_embeddings.weight", "norm.weight")
BLOCKS = frozenset(map(block_of, PARAMETERS))
ROSTER = Roster({"dc": "dc"}, {"dc": BLOCKS})
TOKENS = "ab" * 32
ROUNDS = 1


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retry failed operations at once."""
    monkeypatch.setattr("replica_groups.exchange.runner.FIRST_PAUSE", 0.001)
    monkeypatch.setattr("replica_groups.exchange.runner.LONGEST_PAUSE", 0.001)
    monkeypatch.setattr("replica_groups.rounds.coordinator.RETRY_SECONDS", 0.001)


@pytest.fixture(scope="module")
def checkpoint() -> RunCheckpoint:
    """Return two blocks of a model. Each other block would add the same disk operations."""
    whole = initial_checkpoint(SHAPE, rank=4, seed=1)
    return replace(whole, parameters={name: whole.parameters[name] for name in PARAMETERS})


class _Log:
    """A log in its own folder, and a run of one round that writes it."""

    def __init__(self, folder: Path, checkpoint: RunCheckpoint) -> None:
        self.folder, self.checkpoint = folder, checkpoint
        self.log = ContributionLog(FolderStore(folder / "log"))
        self.exchange = Exchange("run", ROSTER, None, SETTINGS, self.log, rules=patient(ROSTER), text=folder / "text")

    def run(self) -> None:
        """Run to the end, with the auditor."""
        for member in ROSTER.members:
            self.exchange.agree(member, "{}", TOKENS)
            self.exchange.join(member, "")
        auditor = Auditor(self.exchange, self.checkpoint, OuterSettings(rounds=ROUNDS), 1)
        auditor.start()
        self.exchange.begin(self.checkpoint)
        for round_ in range(1, ROUNDS + 1):
            assign_all(self.exchange, round_ - 1)
            for block in sorted(BLOCKS):
                address = BlobAddress("run", round_, "dc", block)
                deposit(self.exchange, "dc", address, _blob(self.checkpoint, address))
            for entry in self.exchange.record(round_).contributions:
                for blob in entry.blobs:
                    self.exchange.fetch("dc", round_, entry.replica, blob.block)
        auditor.join()

    def assert_whole(self) -> str:
        """Check that all files of the run exist and no others. Return the digest of the final theta."""
        assert self.exchange.runner.failure is None
        assert not [path for path in self.folder.rglob("*") if path.name.endswith(PART)]
        assert self.log.records() == audited(self.log.store) == set(range(1, ROUNDS + 1))
        assert self.log.checkpoints() == set(range(ROUNDS + 1))
        assert self.exchange.runner.store_errors.oldest() is None
        last = self.log.read_checkpoint(ROUNDS)
        return hashlib.sha256(b"".join(one.numpy().tobytes() for _, one in sorted(last.tensors().items()))).hexdigest()


@pytest.mark.parametrize("lasts", [False, True], ids=["once", "for a while"])
def test_whatever_of_the_log_cannot_be_written_or_read_a_run_waits_and_comes_to_the_same_bits(
    tmp_path: Path, checkpoint: RunCheckpoint, lasts: bool
) -> None:
    undisturbed = _Log(tmp_path / "undisturbed", checkpoint)
    undisturbed.run()
    expected = undisturbed.assert_whole()
    with failing_disk(tmp_path / "runs") as disk:
        for n in each_operation(disk):
            own = _Log(tmp_path / "runs" / str(n), checkpoint)
            disk.fail(n, lasts, TRANSIENT[n % len(TRANSIENT)])
            done = in_thread(own.run)
            if lasts:
                _wait_for(partial(_has_stopped, own, done))
                if (store_error := own.exchange.expected().store_error) is not None:
                    why, seconds = store_error
                    assert str(own.folder) in why
                    assert seconds >= 0
                    assert own.exchange.status().store_error
                disk.mend()
            done.result(TIMEOUT)
            disk.mend()
            assert own.assert_whole() == expected, n
            own.exchange.end_watching()


def _has_stopped(own: _Log, done: Future[None]) -> bool:
    return done.done() or own.exchange.expected().store_error is not None


def _wait_for(condition: Callable[[], object]) -> None:
    """Wait until the condition holds. Fail after TIMEOUT."""
    waited = threading.Event()
    for _ in range(int(TIMEOUT / 0.001)):
        if condition():
            return
        waited.wait(0.001)
    pytest.fail("it never held")
