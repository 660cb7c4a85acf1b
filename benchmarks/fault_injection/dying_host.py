"""A host of an exchange that dies, with all its processes, at a point of a round that its store sees."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

from hetero_pp.program.launch.supervisor import Supervisor
from hetero_pp.store.faults import Faults
from hetero_pp.store.store import Store
from replica_groups.exchange.log import checkpoint_key, record_key, round_key

PHASES = ("none", "part", "all", "record", "checkpoint")
"""Points of a round: before its first deposit is stored, and after that; before its record is stored, and after that.

At the last one, its run checkpoint is being written.
"""


class DyingSupervisor(Supervisor):
    """A supervisor whose exchange ends this host in a phase of a round."""

    phase, round, by = "", 0, signal.SIGKILL

    def faults_of(self, member: str) -> Callable[[], Faults]:
        return partial(DiesAt, self.phase, self.round, self.by, os.getpid(), self._folder.path / "died")


class DiesAt(Faults):
    """Ends, or stops, this process and its launcher in a phase of a round, once in a run."""

    def __init__(self, phase: str, round_: int, by: signal.Signals, launcher: int, mark: Path) -> None:
        """`mark`: file that is made before."""
        self._phase, self._round, self._by, self._launcher, self._mark = phase, round_, by, launcher, mark

    def disk(self, store: Store) -> Store:
        return store if self._mark.exists() else cast(Store, _DyingStore(store, self._phase, self._round, self._die))

    def _die(self) -> None:
        if not self._mark.exists():
            self._mark.touch()
            os.kill(self._launcher, self._by)
            os.kill(os.getpid(), self._by)


class _DyingStore:
    """Implements Store by another one, until its process dies."""

    def __init__(self, store: Store, phase: str, round_: int, die: Callable[[], None]) -> None:
        self._store, self._phase, self._die = store, phase, die
        self._round, self._record = round_key(round_) + "/", record_key(round_)
        self._checkpoint = checkpoint_key(round_)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def put(self, key: str, data: bytes) -> None:
        self._deposit(key, lambda: self._store.put(key, data))

    def copy(self, key: str, to: str) -> None:
        self._deposit(to, lambda: self._store.copy(key, to))

    def _deposit(self, key: str, store: Callable[[], None]) -> None:
        is_of_round = key.startswith(self._round)
        if is_of_round and self._phase == "none":
            self._die()
        store()
        if is_of_round and self._phase == "part":
            self._die()

    def create(self, key: str, data: bytes) -> bool:
        is_record = key == self._record
        if is_record and self._phase == "all":
            self._die()
        made = self._store.create(key, data)
        if is_record and self._phase == "record":
            self._die()
        return made

    def path(self, key: str) -> Path | None:
        found = self._store.path(key)
        if found is not None and key == self._checkpoint and self._phase == "checkpoint":
            threading.Thread(target=self._die_within, args=(found,)).start()
        return found

    def put_file(self, key: str, path: Path) -> None:
        if key == self._checkpoint and self._phase == "checkpoint":
            threading.Timer(0.001, self._die).start()  # a part of the file may be on its way
        self._store.put_file(key, path)

    def _die_within(self, path: Path) -> None:
        """Die once a part of the file has been written."""
        while not path.exists() and not any(path.parent.glob(f"*{path.name}*")):
            pass
        self._die()
