"""The lease to act for a run: one process at a time, and only while it lives."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
from started import Started

from hetero_pp.core.errors import ConfigError, StoreError, TakenOver
from hetero_pp.store import lease as module
from hetero_pp.store.lease import Lease, acting_for
from hetero_pp.store.opening import open_store
from hetero_pp.store.store import Store

TIMEOUT = 60.0
SECONDS = 5.0
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


# ---- a run that several hosts may serve: the lease is fenced ----


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the time that leases measure, which only the test changes."""
    found = [100.0]
    monkeypatch.setattr(module, "_now", lambda: found[0])
    return found


def _first(store: Store) -> Lease:
    """Return a lease that this process holds."""
    lease = Lease(store, SECONDS)
    lease.take(_ignore)
    return lease


def test_a_holder_uses_the_store_only_until_its_time_is_over(store: Store, clock: list[float]) -> None:
    lease = _first(store)
    fenced = lease.fenced(store)
    clock[0] += 0.94 * SECONDS
    fenced.put("here", b"")
    clock[0] += 0.02 * SECONDS
    with pytest.raises(StoreError, match=r"cannot be used \(the lease was not renewed for 5 s\)"):
        fenced.put("not here", b"")
    with pytest.raises(StoreError, match="cannot be used"):
        fenced.path("not here")  # a file is written by its path
    assert lease.renew() == ""
    fenced.put("here again", b"")
    assert [key for key in store.below() if "here" in key] == ["here", "here again"]


def test_the_time_counts_from_before_the_heartbeat_is_written(
    objects: Store, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    lease, put = _first(objects), objects.put

    def put_slowly(key: str, data: bytes) -> None:
        put(key, data)
        clock[0] += SECONDS  # the answer takes that long

    monkeypatch.setattr(objects, "put", put_slowly)
    lease.renew()
    assert not lease.is_held


def test_a_holder_that_was_followed_does_not_use_the_store_any_more(store: Store, clock: list[float]) -> None:
    lease = _first(store)
    store.put("coordinator/000002", b'{"who": "anna, process 7", "seconds": 5}')
    assert lease.renew().endswith("another launch (anna, process 7) has taken over this run")
    assert not lease.is_held


def test_a_process_that_takes_over_waits_for_a_holder_that_lived_until_a_moment_ago(
    objects: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last heartbeat arrives after the last look, and before the next holder is known: it saw nobody."""
    first, second, create = _first(objects), Lease(objects, 0.5), objects.create
    waited: list[float] = []

    def create_after_a_heartbeat(key: str, data: bytes) -> bool:
        assert first.renew() == ""
        return create(key, data)

    monkeypatch.setattr(objects, "create", create_after_a_heartbeat)
    monkeypatch.setattr(second._over, "wait", waited.append)
    second.wait(_ignore, lambda: True)
    assert second.number == first.number + 1
    looks = waited[: len(waited) // 2], waited[len(waited) // 2 :]
    assert sum(looks[0]) == sum(looks[1]) == pytest.approx(SECONDS)  # as the first one has announced, twice
    assert first.renew() != ""


def test_a_standby_waits_until_it_is_due(objects: Store) -> None:
    """No lease is held, but there is no run yet."""
    due = threading.Event()
    lease, told = Lease(objects, 0.2), list[str]()
    waiting = threading.Thread(target=lease.wait, args=(told.append, due.is_set))
    waiting.start()
    while not told:
        assert waiting.is_alive()
    assert objects.names("coordinator") == []
    due.set()
    waiting.join(TIMEOUT)
    assert lease.is_held
    assert told == ["memory:: no host serves this run"]


def test_a_standby_follows_a_holder_that_ends_at_once_and_of_several_one_does(store: Store) -> None:
    first, acting = _first(store), threading.Semaphore(0)
    leases = [Lease(store, SECONDS) for _ in range(3)]
    over = threading.Event()

    def act(lease: Lease) -> None:
        lease.wait(_ignore, lambda: not over.is_set())
        acting.release()

    threads = [threading.Thread(target=act, args=(one,), daemon=True) for one in leases]
    for one in threads:
        one.start()
    with first.kept(_ignore):
        assert not acting.acquire(timeout=0.5)
    assert acting.acquire(timeout=TIMEOUT)
    over.set()
    assert [(one.is_held, one.was_released) for one in leases].count((True, True)) == 1
    assert [one.is_held for one in leases].count(True) == 1


def test_a_fenced_process_is_told_once_the_store_takes_no_heartbeat(
    objects: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease, told, heard = Lease(objects, 0.3, 1), threading.Event(), list[str]()

    def fail(key: str, data: bytes) -> None:
        raise StoreError("unreachable")

    def on_lost(line: str) -> None:
        heard.append(line)
        told.set()

    lease.fence(on_lost)
    assert lease.is_held
    monkeypatch.setattr(objects, "put", fail)
    assert told.wait(TIMEOUT)
    assert heard == ["memory:: no heartbeat arrived within 0.3 s"]
    assert not lease.is_held


def test_a_process_that_starts_after_another_host_has_taken_over_is_told(store: Store) -> None:
    store.put("coordinator/000002", b'{"who": "anna, process 7", "seconds": 5}')
    lease, heard = Lease(store, SECONDS, 1), list[str]()
    lease.fence(heard.append)
    assert heard == [f"{store.url()}: another launch (anna, process 7) has taken over this run"]
    assert not lease.is_held


@pytest.mark.parametrize("error", [TakenOver, StoreError])
def test_a_holder_that_lost_its_store_does_not_release_the_lease(error: type[Exception], objects: Store) -> None:
    """Else the next holder would take the run for over as soon as its last run checkpoint is there."""
    first, second = Lease(objects, 0.2), Lease(objects, 0.2)
    first.take(_ignore)
    with pytest.raises(error), first.kept(_ignore):
        raise error("no heartbeat arrived")
    second.wait(_ignore, lambda: True)
    assert (second.is_held, second.was_released) == (True, False)
