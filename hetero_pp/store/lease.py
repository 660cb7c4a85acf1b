"""Lease on a run: among all processes that see its store, at most one acts as its coordinator at a time.

The lease only protects users from mistakes. Two coordinators do not damage a run, because the log gives each record and
each incarnation to the first writer. In a folder the lease is a file lock, which the system releases however the holder
ends. In an object store it consists of two objects:

  coordinator/000002          created by the second holder; its creation fails for any other second holder
  coordinator/000002.beat     heartbeat, rewritten while the holder lives

A process that wants to be the third holder waits for a heartbeat. If none arrives within the time that the second
holder announced, the second holder is considered dead.
"""

from __future__ import annotations

import os
import re
import secrets
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from filelock import FileLock, Timeout
from pydantic import BaseModel, Field, ValidationError

from hetero_pp.core.errors import ConfigError, StoreError
from hetero_pp.store.folder import make_folder
from hetero_pp.store.store import Store

FOLDER, LOCK, OVER = "coordinator", "coordinator.lock", b"over"

LEASE_SECONDS = 30.0
"""Time without a heartbeat after which the holder is considered dead; three heartbeats are sent in this time."""

Say = Callable[[str], object]


@contextmanager
def acting_for(store: Store, say: Say, on_lost: Say, seconds: float = LEASE_SECONDS) -> Iterator[None]:
    """Hold the lease on the run of this store while the block runs.

    `on_lost` is called if another process takes it over.

    Raises ConfigError, one line, if another process holds the lease, or the store has no conditional writes.
    """
    path = store.path(LOCK)
    if path is None:
        require_conditional_writes(store)
        lease = _Lease(store, seconds)
        lease.take(say)
        with lease.kept(on_lost):
            yield
        return
    lock = FileLock(path, timeout=0)
    try:
        make_folder(path.parent)
        lock.acquire()
    except Timeout:
        raise _taken(store) from None
    except OSError as error:
        raise StoreError(f"{path}: cannot be locked ({error.strerror})") from None
    try:
        yield
    finally:
        lock.release()


def require_conditional_writes(store: Store) -> None:
    """Raise ConfigError unless the store creates an object once. Some services that speak S3 overwrite it."""
    key = f"conditional-writes-{secrets.token_hex(8)}"
    try:
        made = [store.create(key, b"first"), store.create(key, b"second")]
        is_kept = store.get(key) == b"first"
    finally:
        store.delete([key])
    if made != [True, False] or not is_kept:
        expected = "expected conditional writes (`If-None-Match: *`): of two coordinators both would be the first"
        raise ConfigError(("store", "url"), f"{store.url()}: found a service that creates an object twice, {expected}")


def _taken(store: Store, who: str = "") -> ConfigError:
    by = f" ({who})" if who else ""
    return ConfigError(
        (), f"{store.url()}: another launch uses the log of this run{by}; wait until it has ended, or stop it"
    )


class _LeaseHolder(BaseModel):
    """Content of the object that a holder creates."""

    who: str
    seconds: float = Field(gt=0)  # time without a heartbeat after which the holder is considered dead
    nonce: str = ""  # random text that makes the object unique


class _Lease:
    """Lease of this process, held or to be taken."""

    def __init__(self, store: Store, seconds: float) -> None:
        self._store = store
        self._seconds = seconds
        self._number = 0
        self._over = threading.Event()

    def take(self, say: Say) -> None:
        """Become the next holder. Raises ConfigError if the last holder is alive or another process is quicker."""
        last = self._last()
        if last and self._lives(last, say):
            raise _taken(self._store, self._told(last).who)
        self._number = last + 1
        who = f"{socket.gethostname()}, process {os.getpid()}"
        mine = _LeaseHolder(who=who, seconds=self._seconds, nonce=secrets.token_hex(16)).model_dump_json().encode()
        key = _key(self._number)
        is_mine = self._store.create(key, mine) or self._store.get(key) == mine
        # Later holders may have come and gone since `last` was read, and have deleted this number.
        if not is_mine or self._last() > self._number:
            raise _taken(self._store, self._told(self._last()).who)
        self._heartbeat(0)
        if last:
            self._store.delete([_key(last), _heartbeat_key(last)])

    @contextmanager
    def kept(self, on_lost: Say) -> Iterator[None]:
        """Send heartbeats while the block runs."""
        thread = threading.Thread(target=self._run, args=(on_lost,), name="lease", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join()
            with suppress(StoreError):
                self._store.put(_heartbeat_key(self._number), OVER)

    def _run(self, on_lost: Say) -> None:
        count = 0
        while not self._over.wait(self._seconds / 3):
            count += 1
            with suppress(StoreError):  # the next heartbeat tries again
                self._heartbeat(count)
                last = self._last()
                if last > self._number:
                    on_lost(f"{self._store.url()}: another launch ({self._told(last).who}) has taken over this run")
                    return

    def _heartbeat(self, count: int) -> None:
        self._store.put(_heartbeat_key(self._number), str(count).encode())

    def _last(self) -> int:
        numbers = (re.fullmatch(r"(\d{6,})", name) for name in self._store.names(FOLDER))
        return max((int(match[1]) for match in numbers if match), default=0)

    def _told(self, number: int) -> _LeaseHolder:
        try:
            return _LeaseHolder.model_validate_json(self._store.get(_key(number)))
        except (FileNotFoundError, ValidationError):
            return _LeaseHolder(who="unknown", seconds=self._seconds)

    def _heard(self, number: int) -> bytes | None:
        try:
            return self._store.get(_heartbeat_key(number))
        except FileNotFoundError:
            return None

    def _lives(self, number: int, say: Say) -> bool:
        """Return whether a heartbeat arrives within the announced time, measured by this machine's clock alone."""
        first, told = self._heard(number), self._told(number)
        if first == OVER:
            return False
        say(
            f"{self._store.url()}: waiting up to {told.seconds:g} s to see whether {told.who} still uses the "
            "log of this run"
        )
        for _ in range(10):
            self._over.wait(told.seconds / 10)
            heard = self._heard(number)
            if heard != first:
                return heard != OVER
        return False


def _key(number: int) -> str:
    return f"{FOLDER}/{number:06d}"


def _heartbeat_key(number: int) -> str:
    return f"{_key(number)}.heartbeat"
