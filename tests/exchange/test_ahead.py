"""Rounds that members train ahead of theta.

The exchange uses them only if all members of a replica have trained them.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from members import TIMEOUT, in_thread
from small_run import Run, closed

from hetero_pp.core.errors import Suspended
from hetero_pp.rpc.exchange_service import Caller

MIXED = {"dc": 1, "home": 2}
HOMES = ("home.0", "home.1")


@pytest.fixture
def run(tmp_path: Path) -> Run:
    run = Run(tmp_path, MIXED, overlap=True)
    run.assign(0)
    return run


def _ask(run: Run, holds: int, trained: dict[str, int]) -> dict[str, tuple[int, int]]:
    """Return what each member is assigned that holds theta after round `holds` and has trained another round.

    In `trained`, 0 stands for no round. Each result is the round to train, and the trained round that all members of
    the replica have.
    """
    asked = {one: in_thread(partial(run.exchange.assign, one, holds, trained=has)) for one, has in trained.items()}
    found = {one: waits.result(TIMEOUT) for one, waits in asked.items()}
    return {one: (work.round, work.trained) for one, work in found.items()}


def test_a_round_is_trained_already_if_all_of_a_replica_have_trained_it(run: Run) -> None:
    run.deposit(1, "dc", *HOMES)
    assert _ask(run, 1, {"dc": 2, "home.0": 2, "home.1": 0}) == {"dc": (2, 2), "home.0": (2, 0), "home.1": (2, 0)}
    run.deposit(2, "dc", *HOMES)
    assert _ask(run, 2, dict.fromkeys(HOMES, 3)) == dict.fromkeys(HOMES, (3, 3))


def test_who_has_not_heard_it_is_told_again(run: Run) -> None:
    run.deposit(1, "dc", *HOMES)
    for _ in range(2):
        assert _ask(run, 1, dict.fromkeys(HOMES, 2)) == dict.fromkeys(HOMES, (2, 2))
    assert _ask(run, 1, {"home.1": 2}) == {"home.1": (2, 2)}
    assert _ask(run, 1, {"home.1": 0}) == {"home.1": (2, 0)}


def test_who_has_trained_a_round_that_others_closed_is_told_that(run: Run) -> None:
    run.deposit(1, "dc", *HOMES)
    run.assign(1, "dc")
    run.deposit(2, "dc")
    while closed(run) < 2:
        run.passes(1.0)
    assert run.counted(2) == {"dc": 1}
    assert _ask(run, 1, dict.fromkeys(HOMES, 2)) == dict.fromkeys(HOMES, (3, 2))


def test_who_trains_ahead_is_called_back_when_a_neighbour_is_gone(run: Run) -> None:
    """A complete contribution stays included."""
    run.deposit(1, *HOMES)
    run.exchange.died("home.1", "killed by a test")
    assert run.exchange.heartbeat(Caller("home.0", 1), 1, 2).suspended == 2
    with pytest.raises(Suspended, match="a stage of its replica is missing"):
        run.exchange.record(1, Caller("home.0", 1))
    run.exchange.join("home.1", "")
    waits = {one: in_thread(partial(run.exchange.assign, one, 0, trained=2)) for one in HOMES}
    run.deposit(1, "dc")
    assert run.counted(1) == {"dc": 1, "home": 2}
    found = [waits[one].result(TIMEOUT) for one in HOMES]
    assert [(work.round, work.generation, work.trained) for work in found] == [(2, 3, 2)] * 2


def test_own_parameters_of_a_round_that_not_all_of_a_group_have_are_of_no_use(run: Run) -> None:
    """A replaced or absent member lacks them. All members then start from theta after round 2."""
    run.deposit(1, "dc", *HOMES)
    run.assign(1)
    run.deposit(2, "dc", *HOMES)
    assert _ask(run, 2, {"home.0": 2, "home.1": 1}) == dict.fromkeys(HOMES, (3, 0))
    run.deposit(3, "dc", *HOMES)
    assert _ask(run, 3, dict.fromkeys(HOMES, 2)) == dict.fromkeys(HOMES, (4, 2))


def test_nobody_is_called_back_from_the_last_round(run: Run) -> None:
    """There is no later round to train, so a member that has contributed to the last one waits for its record."""
    for round_ in range(1, 9):
        run.deposit(round_, "dc", *HOMES)
        run.assign(round_)
    run.deposit(9, *HOMES)
    run.exchange.died("home.1", "killed by a test")
    assert not run.exchange.heartbeat(Caller("home.0", 1), 9, 2).HasField("suspended")
    run.deposit(9, "dc")
    assert run.exchange.record(9, Caller("home.0", 1)).round == 9
