"""Which launches use the folder of a run: two cannot carry the same part of it, nor move it away under another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from filelock import FileLock, Timeout

from hetero_pp.errors import ConfigError
from hetero_pp.program.report.output import standard_output, tell
from hetero_pp.run.config import RunConfig
from hetero_pp.run.folder import RunFolder
from hetero_pp.store.lease import acting_for

LOCKS = ".locks"
"""Beside the runs: a run's folder may be moved, its locks may not."""


@contextmanager
def claim(runs: Path, name: str, parts: Sequence[str]) -> Iterator[None]:
    """Hold these parts of runs/<name> while the block runs. The system lets go of them however the process ends.

    Raises ConfigError if another launch holds one of them, in this process, too.
    """
    with ExitStack() as held:
        for part in parts:
            _take(held, runs, name, part, is_new=True)
        yield


@contextmanager
def claim_all(runs: Path, name: str) -> Iterator[None]:
    """Hold every part that any launch ever held, for as long as it takes to move the folder away.

    Raises ConfigError if another launch holds one of them. Those that this process holds are no hindrance.
    """
    with ExitStack() as held:
        for path in sorted((runs / LOCKS / name).glob("*")):
            _take(held, runs, name, path.name, is_new=False)
        yield


@contextmanager
def claim_store(config: RunConfig, folder: RunFolder) -> Iterator[None]:
    """Act alone for a run whose log lies in a store of its own, while the block runs; else its folder is claimed.

    Raises ConfigError if somebody else does.
    """
    if config.store.url is None:
        yield
        return
    say = partial(tell, standard_output())
    with acting_for(config.store.open(config.name, folder.log), say, say):
        yield


def _take(held: ExitStack, runs: Path, name: str, part: str, is_new: bool) -> None:
    folder = runs / LOCKS / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / part, timeout=0, is_singleton=True)
        if is_new and lock.is_locked:
            raise Timeout(lock.lock_file)
        held.enter_context(lock)
    except Timeout:
        raise ConfigError(
            (),
            f"{runs / name}: another launch is using this folder ({part}); wait until it has ended, or give "
            "this run another `name`",
        ) from None
    except OSError as error:
        raise ConfigError((), f"{folder / part}: cannot be locked ({error.strerror})") from None
