"""A log whose disk is slow or full: what waits for it, and what is counted and told meanwhile."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import pytest
from deposits import deposit
from members import assign_all, begin, in_thread, patient
from three_members import (
    FIRST,
    ROSTER,
    SETTINGS,
    SHAPE,
    TIMEOUT,
    _address,
    _blob,
    _Counted,
    _counted,
    _deposit_all,
    _deposit_all_others,
    _deposits,
    _hashes,
    _reports,
)

from hetero_pp.config.checkpoint import RunCheckpoint, initial_checkpoint
from hetero_pp.core.errors import Refused
from hetero_pp.messages.messages_pb2 import Report, RoundRecord
from hetero_pp.pseudo_gradient.contribution import BlobAddress
from hetero_pp.store.folder import FolderStore
from replica_groups.exchange.exchange import Exchange
from replica_groups.exchange.log import ContributionLog


@pytest.fixture(scope="module")
def checkpoint() -> RunCheckpoint:
    return initial_checkpoint(SHAPE, rank=4, seed=1)


def _address_of(key: str) -> BlobAddress:
    round_, replica, _, name = key.split("/")
    return BlobAddress("run", int(round_.removeprefix("round-")), replica, name.rsplit(".", 2)[0])


class _SlowLog(ContributionLog):
    """A log whose write of `held` releases `reached` and blocks until `lets` is released. Other writes do not block."""

    def __init__(self, folder: Path) -> None:
        super().__init__(FolderStore(folder))
        self.held: BlobAddress | int | None = None
        """Address of a blob, or the round of a record, whose write blocks."""
        self.reached, self.lets = threading.Semaphore(0), threading.Event()
        self.is_full = False
        """Whether the next held write fails because the disk is full."""
        self.written: list[BlobAddress] = []

    def write_blobs(self, blobs: Mapping[str, bytes]) -> None:
        addresses = [_address_of(key) for key in blobs]
        for address in addresses:
            self._wait(address)
        super().write_blobs(blobs)
        self.written.extend(addresses)

    def create_record(self, record: RoundRecord) -> RoundRecord:
        self._wait(record.round)
        return super().create_record(record)

    def _wait(self, what: BlobAddress | int) -> None:
        if what != self.held:
            return
        self.reached.release()
        assert self.lets.wait(TIMEOUT)
        if self.is_full:
            self.is_full = False
            raise OSError("no space left on the disk")


@pytest.fixture
def log(tmp_path: Path) -> _SlowLog:
    return _SlowLog(tmp_path / "log")


@pytest.fixture
def slow(checkpoint: RunCheckpoint, log: _SlowLog) -> Exchange:
    exchange = Exchange("run", ROSTER, None, SETTINGS, log, rules=patient(ROSTER))
    begin(exchange, checkpoint)
    assign_all(exchange)
    _counted(exchange)
    return exchange


def _begin(exchange: Exchange, log: _SlowLog, address: BlobAddress, *blobs: bytes) -> list[Future[None]]:
    """Begin one deposit of `dc` for each blob, all under one address.

    Each deposit begins when the previous one is blocked: the first in the write, the second at the lock.
    """
    condition = exchange.runner.notifier
    assert isinstance(condition, _Counted)
    log.held = log.held or address
    deposits = []
    for where, blob in zip((log.reached, condition.waiting), blobs, strict=False):
        deposits.append(in_thread(partial(deposit, exchange, "dc", address, blob)))
        assert where.acquire(timeout=TIMEOUT)
    return deposits


def test_nobody_waits_for_the_disk_that_takes_the_blob_of_another(
    slow: Exchange, log: _SlowLog, checkpoint: RunCheckpoint
) -> None:
    _deposit_all(slow, checkpoint)
    address = _address("dc", "norm", round_=2)
    assign_all(slow, 1)
    (held,) = _begin(slow, log, address, _blob(checkpoint, address))
    for member, other in _deposits(round_=2):
        if other != address:
            deposit(slow, member, other, _blob(checkpoint, other))
    assert slow.record(1).round == 1
    assert slow.fetch("home.0", 1, "dc", "norm") == _blob(checkpoint, _address("dc", "norm"))
    slow.confirm("home.0", 1, _hashes(checkpoint, FIRST))
    slow.report([Report(member="home.0")])
    assert not held.done()
    with pytest.raises(FileNotFoundError):
        log.read_record(2)
    with pytest.raises(Refused, match="closed round"):
        slow.fetch("home.0", 2, "dc", "lm_head")
    log.lets.set()
    held.result(TIMEOUT)
    assert slow.record(2) == log.read_record(2)


@pytest.mark.parametrize("seed", [0, 1], ids=["same", "different"])
def test_one_blob_twice_at_once_is_written_once(
    slow: Exchange, log: _SlowLog, checkpoint: RunCheckpoint, seed: int
) -> None:
    address = _address("dc", "norm")
    blobs = [_blob(checkpoint, address), _blob(checkpoint, address, seed)]
    first, second = _begin(slow, log, address, *blobs)
    log.lets.set()
    first.result(TIMEOUT)
    if seed:
        with pytest.raises(Refused, match="dc: a second, different `norm` for round 1"):
            second.result(TIMEOUT)
    else:
        second.result(TIMEOUT)
    assert slow.runner.refusals.counts.total() == seed
    assert log.written == [address]
    _deposit_all_others(slow, checkpoint, address)
    assert slow.fetch("home.0", 1, "dc", "norm") == blobs[0]


def test_a_blob_that_the_disk_does_not_take_is_not_counted(
    slow: Exchange, log: _SlowLog, checkpoint: RunCheckpoint
) -> None:
    """A later deposit of the same address is accepted instead."""
    address = _address("dc", "norm")
    _deposit_all_others(slow, checkpoint, address)
    blobs = [_blob(checkpoint, address), _blob(checkpoint, address, seed=1)]
    log.is_full = True
    first, second = _begin(slow, log, address, *blobs)
    log.lets.set()
    with pytest.raises(OSError, match="no space"):
        first.result(TIMEOUT)
    second.result(TIMEOUT)
    assert log.written.count(address) == 1
    named = next(blob for blob in slow.record(1).contributions[0].blobs if blob.block == "norm")
    assert named.sha256 == hashlib.sha256(blobs[1]).digest()
    assert slow.fetch("home.0", 1, "dc", "norm") == blobs[1]


def test_a_record_is_on_the_disk_before_it_is_told_and_nobody_else_waits(
    slow: Exchange, log: _SlowLog, checkpoint: RunCheckpoint
) -> None:
    address, later = _address("dc", "norm"), _address("dc", "norm", round_=2)
    _deposit_all_others(slow, checkpoint, address)
    log.held = 1
    (held,) = _begin(slow, log, address, _blob(checkpoint, address))
    again = in_thread(partial(deposit, slow, "dc", address, _blob(checkpoint, address)))
    slow.report([Report(member="home.0")])
    with pytest.raises(Refused, match="closed round"):
        slow.fetch("home.0", 1, "dc", "norm")
    with pytest.raises(Refused, match="found round 2, expected 1"):
        deposit(slow, "dc", later, _blob(checkpoint, later))
    assert not any(report.HasField("round_closed") for report in _reports(slow))
    assert not held.done()
    log.lets.set()
    assert slow.record(1) == log.read_record(1)
    held.result(TIMEOUT)
    again.result(TIMEOUT)
    assert [report.round_closed.round for report in _reports(slow) if report.HasField("round_closed")] == [1]
