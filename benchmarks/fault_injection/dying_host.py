"""A host of an exchange that dies, with all its processes, at a point of a round that its store sees."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

from hetero_pp.core.files import write_whole
from hetero_pp.program.launch.supervisor import Supervisor
from hetero_pp.store.faults import Faults
from hetero_pp.store.store import Store

PHASES = ("none", "part", "all", "record", "checkpoint")
"""Points of a round: before its first deposit is stored, and after that; before its record is stored, and after that.

At the last one, its run checkpoint is being written.
"""


class DyingSupervisor(Supervisor):
    """A supervisor whose exchange ends this host in a phase of a round."""

    phase, round, by = "", 0, signal.SIGKILL
    """Round 0: the first round for which the file `may-die` is in the run's folder."""

    def faults_of(self, member: str) -> Callable[[], Faults]:
        # A fork server that was started before the credentials were set does not have them.
        keys = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
        return partial(DiesAt, self.phase, self.round, self.by, os.getpid(), self._folder.path, keys)


class DiesAt(Faults):
    """Ends, or stops, this process and its launcher in a phase of a round, once in a run."""

    def __init__(
        self, phase: str, round_: int, by: signal.Signals, launcher: int, folder: Path, keys: Mapping[str, str]
    ) -> None:
        """`keys`: environment variables with the credentials of a store."""
        os.environ.update(keys)
        self._phase, self._round, self._by, self._launcher, self._folder = phase, round_, by, launcher, folder

    def disk(self, store: Store) -> Store:
        return cast(Store, _DyingStore(store, self._phase, self._die, self._is_due))

    def _is_due(self, round_: int) -> bool:
        if round_ < 1 or (self._folder / "died").exists():
            return False
        return round_ == self._round if self._round else (self._folder / "may-die").exists()

    def _die(self, round_: int) -> None:
        """Write the round to the file `died`, and die."""
        write_whole(self._folder / "died", str(round_).encode())
        os.kill(self._launcher, self._by)
        os.kill(os.getpid(), self._by)


class _DyingStore:
    """Implements Store by another one, until its process dies."""

    def __init__(self, store: Store, phase: str, die: Callable[[int], object], is_due: Callable[[int], bool]) -> None:
        self._store, self._phase, self._die, self._is_due = store, phase, die, is_due

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def put(self, key: str, data: bytes) -> None:
        self._deposit(key, lambda: self._store.put(key, data))

    def copy(self, key: str, to: str) -> None:
        self._deposit(to, lambda: self._store.copy(key, to))

    def _deposit(self, key: str, store: Callable[[], None]) -> None:
        round_ = _number(r"round-(\d+)/", key)
        if self._phase == "none" and self._is_due(round_):
            self._die(round_)
        store()
        if self._phase == "part" and self._is_due(round_):
            self._die(round_)

    def create(self, key: str, data: bytes) -> bool:
        round_ = _number(r"round-(\d+)/record", key)
        if self._phase == "all" and self._is_due(round_):
            self._die(round_)
        made = self._store.create(key, data)
        if self._phase == "record" and self._is_due(round_):
            self._die(round_)
        return made

    def path(self, key: str) -> Path | None:
        found, round_ = self._store.path(key), _number(r"checkpoint-(\d+)", key)
        if found is not None and self._phase == "checkpoint" and self._is_due(round_):
            threading.Thread(target=self._die_within, args=(found, round_)).start()
        return found

    def put_file(self, key: str, path: Path) -> None:
        round_ = _number(r"checkpoint-(\d+)", key)
        if self._phase == "checkpoint" and self._is_due(round_):
            threading.Timer(0.001, self._die, (round_,)).start()  # a part of the file may be on its way
        self._store.put_file(key, path)

    def _die_within(self, path: Path, round_: int) -> None:
        """Die once a part of the file has been written."""
        while not any(path.parent.glob(f"*{path.name}*")):
            pass
        self._die(round_)


def _number(pattern: str, key: str) -> int:
    """Return the number in a key, at least 1; -1 for other keys."""
    found = re.match(pattern, key)
    return int(found[1]) if found and int(found[1]) else -1
