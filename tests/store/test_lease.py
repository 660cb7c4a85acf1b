"""The lease to act for a run: one process at a time, and only while it lives."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
from started import Started

from hetero_pp.core.errors import ConfigError
from hetero_pp.store.lease import acting_for
from hetero_pp.store.opening import open_store
from hetero_pp.store.store import Store

TIMEOUT = 60.0
TAKEN = r"another launch uses the log of this run.*; wait until it has ended, or stop it$"


def _ignore(_: str) -> None:
    """Ignore a message."""


@pytest.fixture
def objects() -> Iterator[Store]:
    """Yield a store of objects that are not files."""
    yield open_store("memory://")


def _expect_refusal(store: Store) -> None:
    with pytest.raises(ConfigError, match=TAKEN), acting_for(store, _ignore, _ignore, 3.0):
        pass


def test_a_second_is_refused_until_the_first_has_ended(store: Store) -> None:
    for _ in range(2):
        with acting_for(store, _ignore, _ignore, 3.0):
            _expect_refusal(store)
    assert len([key for key in store.below("coordinator") if not key.endswith(".heartbeat")]) <= 1


def test_who_ends_by_an_error_holds_nothing(store: Store) -> None:
    with pytest.raises(RuntimeError), acting_for(store, _ignore, _ignore, 1000.0):
        raise RuntimeError
    with acting_for(store, _ignore, _ignore, 1000.0):
        pass


def test_of_many_one_acts(store: Store) -> None:
    """Every other process was refused while the first one acted."""
    start, over = threading.Barrier(6), threading.Event()
    refused = threading.Semaphore(0)

    def act(_: int) -> bool:
        start.wait()
        try:
            with acting_for(store, _ignore, _ignore, 6.0):
                return over.wait(TIMEOUT)
        except ConfigError:
            refused.release()
            return False

    with ThreadPoolExecutor(6) as pool:
        acted = [pool.submit(act, number) for number in range(6)]
        for _ in range(5):
            assert refused.acquire(timeout=TIMEOUT)
        over.set()
    assert sum(one.result() for one in acted) == 1


def test_who_was_killed_is_followed(lasting: str) -> None:
    holder = Started(Path(__file__).with_name("holder.py"), [lasting])
    store = open_store(lasting)
    try:
        while "acts" not in store.names():
            assert holder.poll() is None, holder.communicate()
        with pytest.raises(ConfigError, match=TAKEN), acting_for(store, _ignore, _ignore):
            pass
    finally:
        holder.kill()
        holder.wait(TIMEOUT)
    with acting_for(store, _ignore, _ignore):
        pass


def test_who_wants_to_follow_says_what_it_waits_for(objects: Store) -> None:
    """The first process has stopped silently: its heartbeats in the store stay as they are."""
    objects.put("coordinator/000001", b'{"who": "ben, process 5", "seconds": 0.2}')
    objects.put("coordinator/000001.heartbeat", b"17")
    told: list[str] = []
    with acting_for(objects, told.append, _ignore):
        assert objects.names("coordinator") == ["000002", "000002.heartbeat"]
    assert told == ["memory:: waiting up to 0.2 s to see whether ben, process 5 still uses the log of this run"]


@pytest.mark.parametrize("said", [b"", b"[]", b'{"who": "x", "seconds": -1}', b'{"who": "x", "seconds": "y"}'])
def test_what_another_says_of_itself_may_be_anything(objects: Store, said: bytes) -> None:
    objects.put("coordinator/000001", said)
    with acting_for(objects, _ignore, _ignore, 0.1):
        assert "000002" in objects.names("coordinator")


def test_who_was_taken_for_dead_is_told(objects: Store) -> None:
    """Its machine slept, for example."""
    told, heard = threading.Event(), []

    def on_lost(line: str) -> None:
        heard.append(line)
        told.set()

    with ExitStack() as held:
        held.enter_context(acting_for(objects, _ignore, on_lost, 0.2))
        objects.put("coordinator/000002", b'{"who": "anna, process 7", "seconds": 30}')
        assert told.wait(TIMEOUT)
    assert heard == ["memory:: another launch (anna, process 7) has taken over this run"]
