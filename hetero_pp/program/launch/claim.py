"""Locks on run folders: two launches cannot run the same part of a run, or move its folder away from each other."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from hetero_pp.config.folder import RunFolder
from hetero_pp.config.run_config import RunConfig
from hetero_pp.core.errors import ConfigError
from hetero_pp.program.report.output import announce
from hetero_pp.store.lease import acting_for

LOCKS = ".locks"
"""Folder of the locks, beside the runs, because a run's folder may be moved and its locks may not."""


@contextmanager
def claim(runs: Path, name: str, parts: Sequence[str]) -> Iterator[None]:
    """Lock these parts of runs/<name> while the block runs.

    The operating system releases them however the process ends.

    Raises ConfigError if another launch holds one of them, even in this process.
    """
    with ExitStack() as held:
        for part in parts:
            _take(held, runs, name, part, is_new=True)
        yield


@contextmanager
def claim_all(runs: Path, name: str) -> Iterator[None]:
    """Lock every part that any launch ever locked, while the folder is moved away.

    Raises ConfigError if another launch holds one of them. Locks that this process holds do not conflict.
    """
    with ExitStack() as held:
        for path in sorted((runs / LOCKS / name).glob("*")):
            _take(held, runs, name, path.name, is_new=False)
        yield


@contextmanager
def claim_store(config: RunConfig, folder: RunFolder) -> Iterator[None]:
    """Hold the lease on a run's log in a store of its own while the block runs; without `store.url` do nothing.

    Raises ConfigError if another process holds it.
    """
    if config.store.url is None:
        yield
        return
    with acting_for(config.store.open(config.name, folder.log), announce, announce):
        yield


def held_parts(runs: Path, name: str) -> list[str]:
    """Return the parts of runs/<name> that a launch on this host runs now."""
    return [path.name for path in sorted((runs / LOCKS / name).glob("*")) if is_held(runs, name, path.name)]


def is_held(runs: Path, name: str, part: str) -> bool:
    """Return whether a launch on this host runs this part of runs/<name>.

    The lock that tries it is shared, so that two processes or threads that ask at the same time do not see each other.
    """
    path = runs / LOCKS / name / part
    if not path.exists():
        return False
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False


def _take(held: ExitStack, runs: Path, name: str, part: str, is_new: bool) -> None:
    folder = runs / LOCKS / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / part, timeout=0, is_singleton=True)
        if is_new and lock.is_locked:
            raise Timeout(lock.lock_file)
        held.enter_context(lock)
    except Timeout:
        mend = "wait until it has ended, or give this run another `name`"
        raise ConfigError((), f"{runs / name}: another launch is using this folder ({part}); {mend}") from None
    except OSError as error:
        raise ConfigError((), f"{folder / part}: cannot be locked ({error.strerror})") from None
