"""Lease on a run: among all processes that see its store, at most one acts as its coordinator at a time.

Two coordinators do not damage a run, because the log gives each record and each incarnation to the first writer. In a
folder that one host uses, the lease is a file lock, which the system releases however the holder ends. Otherwise it
consists of two objects:

  coordinator/000002            created by the second holder; its creation fails for any other second holder
  coordinator/000002.heartbeat  rewritten while the holder lives

A process that wants to be the third holder waits for a heartbeat. If none arrives within the time that the second
holder announced, the second holder is considered dead.

The lease is fenced. A holder uses the store only for nearly the announced time after a heartbeat, and only if it saw no
later holder after that heartbeat. It measures the time from before it writes the heartbeat. The next holder measures
all of the time from after it has read the heartbeat. So it takes over later, whatever the clocks show.
"""

from __future__ import annotations

import math
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, cast

from filelock import FileLock, Timeout
from pydantic import BaseModel, Field, ValidationError

from hetero_pp.core.errors import ConfigError, StoreError, TakenOver
from hetero_pp.store.folder import make_folder
from hetero_pp.store.store import Store

FOLDER, LOCK, OVER = "coordinator", "coordinator.lock", b"over"

LEASE_SECONDS = 30.0
"""Time without a heartbeat after which the holder is considered dead; three heartbeats are sent in this time."""

_LOOKS = 10  # times that a process that wants to follow reads the heartbeat before the holder is considered dead
_HELD_SHARE = 0.95  # share of the announced time for which a holder uses the store, as clocks have different rates
_FENCE_LOOK_SECONDS = 0.25  # interval in seconds at which a holder checks whether its own time is over

Say = Callable[[str], object]


def _now() -> float:
    """Return seconds that also pass while the machine sleeps, where the system counts them."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


@contextmanager
def acting_for(
    store: Store,
    say: Say,
    on_lost: Say,
    seconds: float = LEASE_SECONDS,
    hosts: int = 1,
    waits: Callable[[], bool] | None = None,
) -> Iterator[Lease | None]:
    """Hold the lease on the run of this store while the block runs. Yields None if it is a file lock.

    `on_lost` is called if another process takes it over. With several `hosts` it is no file lock, which a process that
    is frozen keeps. `waits`: wait for the lease, as a standby, and as long as it returns True after that.

    Raises ConfigError, one line, if another process holds the lease, or the store has no conditional writes.
    """
    path = store.path(LOCK)
    if path is None or hosts > 1:
        lease = Lease(store, seconds)
        if waits is None:
            require_conditional_writes(store)
            lease.take(say)
        else:
            lease.wait(say, waits)
        with lease.kept(on_lost):
            yield lease
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
        yield None
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
    told = f"another launch uses the log of this run{by}; wait until it has ended, or stop it"
    return ConfigError((), f"{store.url()}: {told}")


class _LeaseHolder(BaseModel):
    """Content of the object that a holder creates."""

    who: str
    seconds: float = Field(gt=0)  # time without a heartbeat after which the holder is considered dead
    nonce: str = ""  # random text that makes the object unique


class Lease:
    """Lease of this process, held or to be taken. Several processes of one host may hold one together."""

    def __init__(self, store: Store, seconds: float, number: int = 0) -> None:
        """`number`: that of the lease, if another process of this host has taken it."""
        self._store = store
        self.seconds, self.number = seconds, number
        self.was_released = False  # whether the holder before ended by itself
        self._held_until = -math.inf
        self._count = 0
        self._over = threading.Event()

    @property
    def is_held(self) -> bool:
        """Whether no other process can hold the lease now. False also while the store does not take heartbeats."""
        return _now() < self._held_until

    def take(self, say: Say) -> None:
        """Become the next holder. Raises ConfigError if the last holder is alive or another process is quicker."""
        last = self._last()
        first = self._heard(last) if last else None
        if last and self._lives(last, first, say):
            raise _taken(self._store, self._told(last).who)
        self._follow(last, first)

    def wait(self, say: Say, is_due: Callable[[], bool]) -> None:
        """Become the next holder once none holds the lease, and `is_due`. Waits for a store. Raises ConfigError."""
        told, is_checked = "", False
        while True:
            said = "no host serves this run"
            try:
                if not is_checked:
                    require_conditional_writes(self._store)
                    is_checked = True
                last = self._last()
                first = self._heard(last) if last else None
                if last and first != OVER:
                    said = f"{self._told(last).who} serves this run; this host takes over if it stops"
                if said != told:
                    say(f"{self._store.url()}: {said}")
                told = said
                if not (last and self._lives(last, first, lambda _: None)) and is_due():
                    with suppress(ConfigError):  # another process was quicker
                        self._follow(last, first)
                        return
            except StoreError as error:
                if str(error) != told:
                    say(f"{error}; trying again")
                told = str(error)
            self._over.wait(self.seconds / _LOOKS)

    def _follow(self, last: int, heard: bytes | None) -> None:
        """Become the holder after the last one, of which `heard` was the last heartbeat. Raises ConfigError."""
        self.number = last + 1
        who = f"{socket.gethostname()}, process {os.getpid()}"
        mine = _LeaseHolder(who=who, seconds=self.seconds, nonce=secrets.token_hex(16)).model_dump_json().encode()
        key = _key(self.number)
        is_mine = self._store.create(key, mine) or self._store.get(key) == mine
        # Later holders may have come and gone since `last` was read, and have deleted this number.
        if not is_mine or self._last() > self.number:
            raise _taken(self._store, self._told(self._last()).who)
        self.renew()
        newest = self._heard(last) if last else None
        self.was_released = newest == OVER
        if newest not in (heard, OVER):
            # It lived until a moment ago. If it saw no later holder then, it may use the store until its time is over.
            for _ in range(_LOOKS):
                self._over.wait(self._told(last).seconds / _LOOKS)
                self.renew()
        if last:
            self._store.delete([_key(last), _heartbeat_key(last)])

    @contextmanager
    def kept(self, on_lost: Say) -> Iterator[None]:
        """Send heartbeats while the block runs, and release the lease at its end."""
        thread = threading.Thread(target=self._run, args=(on_lost,), name="lease", daemon=True)
        thread.start()
        is_released = True
        try:
            yield
        except (TakenOver, StoreError):
            is_released = False  # members of the run may not have heard that it is over
            raise
        finally:
            self._over.set()
            thread.join()
            with suppress(StoreError):
                if is_released:
                    self._store.put(_heartbeat_key(self.number), OVER)

    def fence(self, on_lost: Say) -> None:
        """Send heartbeats until this process ends. `on_lost` is also called once the lease was not renewed in time.

        Returns with the lease held, or after `on_lost`. Raises StoreError.
        """
        if complaint := self.renew():
            on_lost(complaint)
            return

        def watch() -> None:
            while self.is_held:
                time.sleep(_FENCE_LOOK_SECONDS)
            on_lost(f"{self._store.url()}: no heartbeat arrived within {self.seconds:g} s")

        for name, run, arguments in (("lease", self._run, (on_lost,)), ("fence", watch, ())):
            threading.Thread(target=run, args=arguments, name=name, daemon=True).start()

    def fenced(self, store: Store) -> Store:
        """Return a store that raises StoreError on every use while the lease is not held."""
        return cast(Store, _Fenced(self, store))

    def renew(self) -> str:
        """Send a heartbeat, and hold the lease for some more seconds. Return a line if another process has it."""
        begun = _now()
        self._count += 1
        self._store.put(_heartbeat_key(self.number), f"{os.getpid()} {self._count}".encode())
        if (last := self._last()) > self.number:
            self._held_until = -math.inf
            return f"{self._store.url()}: another launch ({self._told(last).who}) has taken over this run"
        self._held_until = begun + _HELD_SHARE * self.seconds
        return ""

    def _run(self, on_lost: Say) -> None:
        while not self._over.wait(self.seconds / 3):
            with suppress(StoreError):  # the next heartbeat tries again
                if complaint := self.renew():
                    on_lost(complaint)
                    return

    def _last(self) -> int:
        numbers = (re.fullmatch(r"(\d{6,})", name) for name in self._store.names(FOLDER))
        return max((int(match[1]) for match in numbers if match), default=0)

    def _told(self, number: int) -> _LeaseHolder:
        try:
            return _LeaseHolder.model_validate_json(self._store.get(_key(number)))
        except (FileNotFoundError, ValidationError):
            return _LeaseHolder(who="unknown", seconds=self.seconds)

    def _heard(self, number: int) -> bytes | None:
        try:
            return self._store.get(_heartbeat_key(number))
        except FileNotFoundError:
            return None

    def _lives(self, number: int, first: bytes | None, say: Say) -> bool:
        """Return whether another heartbeat than `first` arrives within the announced time, by this machine's clock."""
        if first == OVER:
            return False
        told = self._told(number)
        waits = f"waiting up to {told.seconds:g} s to see whether {told.who} still uses the log of this run"
        say(f"{self._store.url()}: {waits}")
        for _ in range(_LOOKS):
            self._over.wait(told.seconds / _LOOKS)
            heard = self._heard(number)
            if heard != first:
                return heard != OVER
        return False


class _Fenced:
    """A store that only the holder of a lease may use. Implements Store by that of the same methods."""

    def __init__(self, lease: Lease, store: Store) -> None:
        self._lease, self._store = lease, store

    def __getattr__(self, name: str) -> Any:
        if name != "url" and not self._lease.is_held:
            seconds = self._lease.seconds
            raise StoreError(f"{self._store.url()}: cannot be used (the lease was not renewed for {seconds:g} s)")
        return getattr(self._store, name)


def _key(number: int) -> str:
    return f"{FOLDER}/{number:06d}"


def _heartbeat_key(number: int) -> str:
    return f"{_key(number)}.heartbeat"
