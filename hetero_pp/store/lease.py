"""Who acts for a run, among all who see its store: one at a time, for as long as it lives.

It spares a user the surprise of two; what is written is right with two as well (the log gives a record and a term to
whoever was first). In a folder it is a lock, which the system lets go of however the holder ends. Elsewhere it is

    coordinator/000002          created by the second to act for the run, so that there is no other second
    coordinator/000002.beat     written again and again, for as long as it does

and whoever wants to be the third waits for one beat: if none comes for as long as the second has promised, it is gone.
"""

from __future__ import annotations

import os
import re
import secrets
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout
from pydantic import BaseModel, Field, ValidationError

from hetero_pp.errors import ConfigError, StoreError
from hetero_pp.store.folder import make_folder
from hetero_pp.store.store import Store

FOLDER, LOCK, OVER = "coordinator", "coordinator.lock", b"over"

LEASE_SECONDS = 30.0
"""Without a beat for so long, who held it is gone; there are three in that time."""

Say = Callable[[str], object]


@contextmanager
def acting_for(store: Store, say: Say, on_lost: Say, seconds: float = LEASE_SECONDS) -> Iterator[None]:
    """Act for the run in this store while the block runs. `on_lost` is told if somebody else has taken over.

    Raises ConfigError, one line, if somebody else acts for it.
    """
    path = store.path(LOCK)
    if path is not None:
        with _locked(path, store):
            yield
    else:
        lease = _Lease(store, seconds)
        lease.take(say)
        with lease.kept(on_lost):
            yield


@contextmanager
def _locked(path: Path, store: Store) -> Iterator[None]:
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


def _taken(store: Store, who: str = "") -> ConfigError:
    by = f" ({who})" if who else ""
    return ConfigError(
        (), f"{store.url()}: another launch uses the log of this run{by}; wait until it has ended, or end it"
    )


class _Holder(BaseModel):
    """What one who acts says of itself."""

    who: str
    seconds: float = Field(gt=0)
    """Without a beat for so long it is gone."""
    nonce: str = ""
    """So that nobody else says the same."""


class _Lease:
    """One who acts, or wants to."""

    def __init__(self, store: Store, seconds: float) -> None:
        self._store = store
        self._seconds = seconds
        self._number = 0
        self._over = threading.Event()

    def take(self, say: Say) -> None:
        """Be the next. Raises ConfigError if the last still acts, or another is quicker."""
        last = self._last()
        if last and self._lives(last, say):
            raise _taken(self._store, self._told(last).who)
        self._number = last + 1
        who = f"{socket.gethostname()}, process {os.getpid()}"
        mine = _Holder(who=who, seconds=self._seconds, nonce=secrets.token_hex(16)).model_dump_json().encode()
        key = _key(self._number)
        is_mine = self._store.create(key, mine) or self._store.get(key) == mine
        # Others may have come and gone since `last` was looked at, and have taken its number away.
        if not is_mine or self._last() > self._number:
            raise _taken(self._store, self._told(self._last()).who)
        self._beat(0)
        if last:
            self._store.delete([_key(last), _beat_key(last)])

    @contextmanager
    def kept(self, on_lost: Say) -> Iterator[None]:
        """Beat while the block runs."""
        thread = threading.Thread(target=self._run, args=(on_lost,), name="lease", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join()
            with suppress(StoreError):
                self._store.put(_beat_key(self._number), OVER)

    def _run(self, on_lost: Say) -> None:
        count = 0
        while not self._over.wait(self._seconds / 3):
            count += 1
            with suppress(StoreError):  # it is tried again at the next beat
                self._beat(count)
                last = self._last()
                if last > self._number:
                    on_lost(f"{self._store.url()}: another launch ({self._told(last).who}) has taken this run over")
                    return

    def _beat(self, count: int) -> None:
        self._store.put(_beat_key(self._number), str(count).encode())

    def _last(self) -> int:
        numbers = (re.fullmatch(r"(\d{6,})", name) for name in self._store.names(FOLDER))
        return max((int(match[1]) for match in numbers if match), default=0)

    def _told(self, number: int) -> _Holder:
        try:
            return _Holder.model_validate_json(self._store.get(_key(number)))
        except (FileNotFoundError, ValidationError):
            return _Holder(who="unknown", seconds=self._seconds)

    def _heard(self, number: int) -> bytes | None:
        try:
            return self._store.get(_beat_key(number))
        except FileNotFoundError:
            return None

    def _lives(self, number: int, say: Say) -> bool:
        """Whether it is heard within the time that it has promised, by this machine's clock alone."""
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


def _beat_key(number: int) -> str:
    return f"{_key(number)}.beat"
