"""Thousands of rounds with faults drawn from seeds, and bugs planted in the rules that the invariants must find."""

from __future__ import annotations

import pytest
from simulation.dice import HANGS, HARSH, IDLES, STANDBY, Faults
from simulation.lease import Leases
from simulation.mutations import MUTATIONS, planted
from simulation.world import History, play

ROUNDS = 50
"""Rounds of a history."""
HISTORIES = range(20, 40)
"""Seeds of histories. Among them, more have few faults than among those before."""
COUNTED = 0.9
"""Least share of present replicas that rounds must include, in histories with few faults."""


SOONEST = {
    "forgets to give back": 4,
    "accepts an old generation's blob": 9,
    "overwrites a record": 8,
    "heals nobody": 16,
    "does not write a record again": 8,
    "does not say again what to train": 16,
    "does not learn of later incarnations": 8,
    "does not notice who hangs": 2,
    "waits for ever for who does not leave": 8,
    "never waits again for who missed rounds": 3,
    "waits for a whole replica to leave": 10,
    "resumes where the last stage is": 7,
    "weighs a restarted slot like the others": 7,
    "does not wait for a group that reforms": 4,
}
"""Seeds of histories that find a bug sooner than the first ones. They are played first, which saves seconds."""


def _is_found(name: str) -> bool:
    """Return whether a planted bug is found within a thousand rounds."""
    kinds = (None, HARSH, HANGS, IDLES)
    seeds = sorted(range(1000 // ROUNDS), key=lambda seed: seed != SOONEST.get(name))
    with planted(name):
        return any(play(seed, ROUNDS, faults=kinds[seed % 4]).violation is not None for seed in seeds)


@pytest.fixture(scope="module")
def histories() -> list[History]:
    return [play(seed, ROUNDS) for seed in HISTORIES]


def test_whatever_goes_wrong_every_invariant_holds(histories: list[History]) -> None:
    assert [history.violation for history in histories if history.violation is not None] == []
    assert all(history.rounds == ROUNDS for history in histories)


def test_who_is_there_is_counted(histories: list[History]) -> None:
    light = [history for history in histories if history.are_light]
    live, counted = (sum(getattr(one, name) for one in light) for name in ("live", "counted"))
    assert live > 500
    assert counted >= COUNTED * live


def test_where_nothing_goes_wrong_only_stragglers_are_late() -> None:
    for seed in range(2):
        history = play(seed, ROUNDS, faults=Faults())
        assert history.violation is None
        assert history.counted >= 0.95 * history.live > 0


def test_a_seed_has_one_history() -> None:
    for seed in (3, 8):
        told: list[list[str]] = [[], []]
        assert play(seed, 20, told[0].append) == play(seed, 20, told[1].append)
        assert told[0] == told[1]
        assert len(told[0]) > 1000
    assert play(3, 20) != play(8, 20)


def test_of_two_hosts_one_decides_and_nothing_is_lost() -> None:
    histories = [play(seed, ROUNDS, faults=STANDBY) for seed in range(8)]
    assert [history.violation for history in histories if history.violation is not None] == []
    assert all(history.rounds == ROUNDS for history in histories)


def test_a_host_that_writes_after_its_time_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Leases, "holds", lambda leases, host: True)
    found = (play(seed, ROUNDS, faults=STANDBY).violation for seed in range(8))
    assert any("another one has taken over from it" in one for one in found if one is not None)


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_planted_bug_is_found_within_a_thousand_rounds(name: str) -> None:
    assert _is_found(name)
