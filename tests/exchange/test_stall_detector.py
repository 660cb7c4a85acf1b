"""The stall monitor: which members the exchange waits for, when and how often it reports so, and when the run fails.

Most tests use a simulated clock.
"""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from deposits import deposit
from members import TIMEOUT, assign_all, begin, patient
from three_members import ROSTER, ROUNDS, SETTINGS, SHAPE, _address, _blob, _deposits

from hetero_pp.config.checkpoint import RunCheckpoint, initial_checkpoint
from hetero_pp.messages.messages_pb2 import CONTRIBUTING, FINISHING, JOINING, STORING, Report, Waiting
from hetero_pp.rpc.exchange_service import FIRST_TOLD
from hetero_pp.store.folder import FolderStore
from replica_groups.exchange.exchange import Exchange
from replica_groups.exchange.log import ContributionLog
from replica_groups.exchange.stall_detector import Expected, StallDetector, watched, whom


def _told(detector: StallDetector, expected: Expected, seconds: range) -> list[int]:
    """Return the seconds of this range in which the monitor reports missing members."""
    looks = {second: detector.look(expected, float(second)) for second in seconds}
    return [second for second, waiting in looks.items() if waiting is not None and waiting.missing]


def test_a_wait_is_told_at_growing_intervals() -> None:
    expected = Expected(CONTRIBUTING, 3, ["home.0"], 0)
    assert _told(StallDetector(1e9), expected, range(2000)) == [10, 20, 40, 80, 160, 320, 640, 1240, 1840]


def test_the_end_of_a_wait_that_was_told_is_told_too() -> None:
    detector = StallDetector(1e9)
    assert detector.look(Expected(CONTRIBUTING, 1, ["home.0"], 0), 0.0) is None
    assert detector.look(Expected(CONTRIBUTING, 1, ["home.0"], 0), FIRST_TOLD) is not None
    over = detector.look(Expected(CONTRIBUTING, 1, ["home.0"], 1), 12.0)
    assert over is not None
    assert not over.missing
    assert detector.look(Expected(CONTRIBUTING, 1, ["home.0"], 2), 13.0) is None


def test_a_disk_that_fails_is_told_at_once_and_then_at_growing_intervals_and_no_member_is_blamed() -> None:
    detector, lines = StallDetector(60.0), []
    for second in range(2000):
        expected = Expected(CONTRIBUTING, 3, ["home.0"], 0, store_error=("FILE: cannot be written", float(second)))
        if (waiting := detector.look(expected, float(second))) is not None:
            assert (waiting.awaited, waiting.store_error, list(waiting.missing)) == (
                STORING,
                "FILE: cannot be written",
                [],
            )
            assert whom(waiting) == "paused: FILE: cannot be written"
            lines.append(second)
        assert detector.lost(expected, float(second)) is None
    assert lines == [0, 10, 20, 40, 80, 160, 320, 640, 1240, 1840]
    over = detector.look(Expected(CONTRIBUTING, 3, ["home.0"], 0), 2000.0)
    assert over is not None
    assert (over.awaited, over.store_error, over.seconds) == (STORING, "", 1999.0)
    assert _told(detector, Expected(CONTRIBUTING, 3, ["home.0"], 0), range(2001, 2015)) == [2011]


def test_it_gives_up_on_those_who_are_silent_only() -> None:
    detector, heard = StallDetector(60.0), {"home.0": 55.0}
    detector.look(Expected(CONTRIBUTING, 2, ["home.0", "home.1"], 0), 0.0)
    expected = Expected(CONTRIBUTING, 2, ["home.0", "home.1"], 0, heard)
    detector.look(expected, 100.0)
    assert detector.lost(expected, 100.0) is None  # one of them is present, and may be slow
    cause = detector.lost(expected, 115.0)
    assert cause is not None
    assert (
        "round 2 from home.0 (last heartbeat 1:00 ago), home.1: received nothing for 1:00 (`exchange.timeout`)" in cause
    )
    assert detector.lost(Expected(CONTRIBUTING, 2, [], 0), 1e9) is None


@pytest.fixture(scope="module")
def checkpoint() -> RunCheckpoint:
    return initial_checkpoint(SHAPE, rank=4, seed=1)


@pytest.fixture
def exchange(tmp_path: Path) -> Exchange:
    log = ContributionLog(FolderStore(tmp_path / "log"))
    return Exchange("run", ROSTER, None, SETTINGS, log, rules=patient(ROSTER))


def test_whom_an_exchange_waits_for(exchange: Exchange, checkpoint: RunCheckpoint) -> None:
    """Members are awaited to join, to contribute and to finish. Each of these events counts as progress."""
    exchange.join("home.1", "")
    expected = exchange.expected()
    assert (expected.awaited, list(expected.missing)) == (JOINING, ["home.0", "dc"])
    for member in ("home.0", "dc"):
        exchange.join(member, "")
    assert not exchange.expected().missing  # the exchange itself is busy
    exchange.begin(checkpoint)
    expected = exchange.expected()
    assert (expected.awaited, expected.round, list(expected.missing)) == (CONTRIBUTING, 1, list(ROSTER.members))
    for round_ in range(1, ROUNDS + 1):
        assign_all(exchange, round_ - 1)
        for member, address in _deposits(round_):
            before = exchange.expected()
            assert member in before.missing
            assert before.round == round_
            deposit(exchange, member, address, _blob(checkpoint, address))
            assert exchange.expected().progress != before.progress
    expected = exchange.expected()
    assert (expected.awaited, list(expected.missing)) == (FINISHING, list(ROSTER.members))
    report = Report(member="dc")
    report.finished.SetInParent()
    exchange.report([report])
    assert list(exchange.expected().missing) == ["home.0", "home.1"]


def test_inner_steps_are_progress_until_somebody_waits(exchange: Exchange, checkpoint: RunCheckpoint) -> None:
    begin(exchange, checkpoint)
    assign_all(exchange)
    step = Report(member="home.0")
    step.inner_step.replica, step.inner_step.round = "home", 1
    before = exchange.expected()
    exchange.report([step])
    assert exchange.expected().progress != before.progress
    deposit(exchange, "dc", _address("dc", "norm"), _blob(checkpoint, _address("dc", "norm")))
    before = exchange.expected()
    exchange.report([step])
    after = exchange.expected()
    assert after.progress == before.progress
    assert after.heard["home.0"] > before.heard["home.0"]


def test_a_heartbeat_tells_that_a_member_computes(exchange: Exchange, checkpoint: RunCheckpoint) -> None:
    """A member that computes is slow; if all wait, the round has stalled. Steps are told as before."""
    begin(exchange, checkpoint)
    assign_all(exchange)
    detector = StallDetector(1e9)
    for computing in (["dc", "home.1"], []):
        for progress, member in enumerate(ROSTER.members):
            exchange.heartbeat(member, 1, 2, progress, member in computing)
        detector.look(exchange.expected(), 0.0)
        waiting = detector.look(exchange.expected(), 100.0)
        assert waiting is not None
        assert sorted(one.member for one in waiting.missing if one.computes) == computing


def test_a_run_that_has_begun_is_never_given_up() -> None:
    detector, expected = StallDetector(10.0), Expected(CONTRIBUTING, 2, ["a"], 0, is_bounded=False)
    assert detector.look(expected, 0.0) is None
    assert detector.lost(expected, 1e9) is None
    assert detector.look(expected, 1e9) is not None


def test_the_end_of_a_disk_failure_is_told_at_the_end_of_a_run_too() -> None:
    """The run may end before the next look."""
    store_error, told, paused = [("FILE: cannot be written", 5.0)], list[Waiting](), threading.Event()

    def tell(waiting: Waiting) -> None:
        told.append(waiting)
        paused.set()

    def expected() -> Expected:
        return Expected(CONTRIBUTING, 3, [], 0, store_error=store_error[0] if store_error else None)

    with watched(expected, tell, pytest.fail, 60.0):
        assert paused.wait(TIMEOUT)
        store_error.clear()
    assert [(one.awaited, one.store_error, one.seconds) for one in told] == [
        (STORING, "FILE: cannot be written", 5.0),
        (STORING, "", 5.0),
    ]
