"""Copies of states in a store: what another machine finds, and what is never accepted as a state."""

from __future__ import annotations

import json
import shutil
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from hetero_pp.core.errors import ConfigError, StoreError
from hetero_pp.program.launch.command import run_topology
from hetero_pp.rpc.exchange_service import AvailableStates
from hetero_pp.store.folder import FolderStore
from hetero_pp.store.store import Store
from replica_groups.member.saved_states import SavedStates, StateCopies

SMALL = Path(__file__).with_name("small.yaml")
TIMEOUT = 60.0


def _states(folder: Path, store: Store) -> SavedStates:
    return SavedStates(folder, "run", 1, copies=StateCopies(store, "home.1"))


def _save(states: SavedStates, round_: int) -> None:
    def write(part: Path) -> None:
        (part / "engine").mkdir()
        (part / "engine" / "moments").write_text(f"of round {round_}")
        (part / "error").write_text("feedback")

    states.save(round_, write)
    assert states.copies is not None
    states.copies.drain()


def _rounds_in(store: Store) -> list[str]:
    return sorted({key.split("/")[2][:12] for key in store.below("states/home.1")})


def test_another_machine_finds_the_newest(store: Store, tmp_path: Path) -> None:
    here, there = _states(tmp_path / "here", store), _states(tmp_path / "there", store)
    there.find()
    assert there.rounds() == []
    for round_ in (1, 2, 3):
        _save(here, round_)
    assert _rounds_in(store) == ["round-000002", "round-000003"]
    there.find()
    assert there.check() == AvailableStates(frozenset({3}))
    assert (there.path(3) / "engine" / "moments").read_text() == "of round 3"
    here.find()
    assert here.rounds() == [2, 3]


def test_a_run_that_went_back_has_no_copies_of_what_was_later(store: Store, tmp_path: Path) -> None:
    states = _states(tmp_path / "here", store)
    for round_ in (7, 8, 9):
        _save(states, round_)
    shutil.rmtree(tmp_path / "here")
    _save(states, 5)
    assert _rounds_in(store) == ["round-000005"]


def test_a_copy_takes_the_place_of_a_state_that_is_damaged(store: Store, tmp_path: Path) -> None:
    """The copy is of the same round. The damaged state is moved aside and named."""
    states = _states(tmp_path / "here", store)
    for round_ in (1, 2):
        _save(states, round_)
    (states.path(2) / "error").write_text("Feedback")
    assert states.find() == AvailableStates(
        frozenset({1, 2}), (f"{states.path(2)} is damaged: 'error' does not match its digest",)
    )
    assert (states.path(2) / "error").read_text() == "feedback"
    assert (states.folder / "aside-1" / "round-000002" / "error").read_text() == "Feedback"
    assert states.find() == AvailableStates(frozenset({1, 2}))


def test_of_copies_that_are_damaged_the_one_before_is_taken(store: Store, tmp_path: Path) -> None:
    for round_ in (1, 2):
        _save(_states(tmp_path / "here", store), round_)
    (key,) = [key for key in store.below("states") if key.endswith("/error") and "/round-000002-" in key]
    store.put(key, b"Feedback")
    there = _states(tmp_path / "there", store)
    assert there.find() == AvailableStates(
        frozenset({1}), (f"{there.path(2)} is damaged: 'error' does not match its digest",)
    )


def test_what_was_not_sent_whole_is_no_state(store: Store, tmp_path: Path) -> None:
    states = _states(tmp_path / "here", store)
    _save(states, 1)
    store.put("states/home.1/round-000002-0123abcd/error", b"feedback")
    store.put("states/home.1/strange/digests.json", b"{}")
    there = _states(tmp_path / "there", store)
    there.find()
    assert there.rounds() == [1]
    _save(states, 3)
    assert _rounds_in(store) == ["round-000001", "round-000003", "strange"]


class _Slow(FolderStore):
    """A store that sends files when a test permits it, and fails if told to."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.reached, self.lets, self.fails = threading.Semaphore(0), threading.Semaphore(0), False

    def put_file(self, key: str, path: Path) -> None:
        self.reached.release()
        assert self.lets.acquire(timeout=TIMEOUT)
        if self.fails:
            raise StoreError(f"{key}: cannot be written (no reason)")
        super().put_file(key, path)


def test_a_member_trains_on_while_its_state_is_sent(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Meanwhile it saves three more states, and the one being sent is removed from disk.

    Then only the newest is sent.
    """
    store = _Slow(tmp_path / "store")
    copies = StateCopies(store, "home.1")
    states = SavedStates(tmp_path / "here", "run", 1, copies=copies)
    for round_ in (1, 2, 3, 4):
        states.save(round_, lambda folder: (folder / "error").write_text("feedback"))
        if round_ == 1:
            assert store.reached.acquire(timeout=TIMEOUT)
    store.lets.release(10)
    copies.drain()
    assert "home.1: its state after round 1 could not be copied to the store" in capfd.readouterr().err
    there = _states(tmp_path / "there", store)
    there.find()
    assert there.check() == AvailableStates(frozenset({4}))


def test_a_store_that_fails_ends_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    store = _Slow(tmp_path / "store")
    store.lets.release(10)
    states = _states(tmp_path / "here", store)
    store.fails = True
    _save(states, 1)
    assert "home.1: its state after round 1 could not be copied to the store: states/home.1" in capfd.readouterr().err
    store.fails = False
    _save(states, 2)
    assert _rounds_in(store) == ["round-000002"]


# ---- a whole run ----


def _train(corpus: Path, runs: Path, *settings: str, resume: bool = False) -> dict[str, Any]:
    given = [f"data.corpus={corpus}", *settings]
    run_topology(SMALL, given, runs, in_process=True, resume=resume)
    return json.loads((runs / "small" / "summary.json").read_text())


MACHINES = (
    ("runs", ("outer.rounds=2",)),
    ("others", ("outer.rounds=3",)),
    ("more", ("outer.rounds=4", "inner.learning_rate=1e-3")),
)
"""Machines on which a run is trained, one after another, with its settings there."""


@pytest.mark.starts_processes
@pytest.mark.parametrize("lasting", ["s3" if sys.platform == "linux" else "folder"], indirect=True)
def test_a_run_goes_on_on_other_machines_from_its_store_alone(lasting: str, corpus: Path, tmp_path: Path) -> None:
    """After each part, its bits are those of a run that is trained on one machine without a store."""
    sets = (f"store.url={lasting}", "states.to=store")
    for number, (machine, settings) in enumerate(MACHINES):
        at_home = _train(corpus, tmp_path / "home", *settings, resume=number > 0)
        found = _train(corpus, tmp_path / machine, *sets, *settings, resume=number > 0)
        assert found["parameters_sha256"] == at_home["parameters_sha256"]
        assert found["rounds"] == 2 + number


def test_states_go_to_a_store_that_there_is(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"states\.to=store: found `store` without a `store\.url`"):
        _train(corpus, tmp_path, "states.to=store")


def test_states_are_saved_as_often_as_they_are_asked_for(corpus: Path, tmp_path: Path) -> None:
    _train(corpus, tmp_path, "states.every=3")
    for member in ("dc", "home.0"):
        saved = {path.name for path in (tmp_path / "small" / "state" / member).iterdir()}
        assert saved == {"round-000003", "round-000004"}
