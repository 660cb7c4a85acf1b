"""The record that a run is over, kept by a host without the run's exchange."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from dataclasses import asdict, dataclass

from hetero_pp.config.changes import read_changes
from hetero_pp.config.folder import RunFolder
from hetero_pp.config.yaml_file import config_of
from hetero_pp.core.bounded import read_json_object
from hetero_pp.core.errors import RunOver
from hetero_pp.core.files import write_whole
from replica_groups.exchange.log import open_log


@dataclass(frozen=True)
class RunEnd:
    """The end of a run, as the exchange told this host."""

    told: str
    """Message of the exchange, such as `the run is over (round 100 of 100)`."""
    heard: float
    """Time of the message, in seconds since 1970."""


def over_on_disk(folder: RunFolder, rounds: int | None = None) -> str:
    """Return that the run of a folder with its exchange is over, and how to extend it; empty if it is not over.

    `rounds`: its number of rounds, if it differs from what the folder says because it is being extended.
    """
    config = config_of(folder)
    log = open_log(config, folder)
    rounds = rounds or read_changes(folder.changes).had("outer.rounds", config.outer.rounds)[-1]
    if log.last_record() < rounds or rounds not in log.checkpoints():
        return ""
    return f"the run is over (round {rounds} of {rounds}); extend it with `--resume --set outer.rounds=N`, N > {rounds}"


def keep_over(folder: RunFolder, over: RunOver) -> None:
    """Record that the run of a folder is over. A failed write is ignored."""
    with suppress(OSError):
        write_whole(folder.over, json.dumps(asdict(RunEnd(str(over).partition(";")[0], time.time()))).encode())


def forget_over(folder: RunFolder) -> None:
    """Remove the record: the exchange has given this host a slot, so the run of this name is not over."""
    with suppress(OSError):
        folder.over.unlink()


def read_over(folder: RunFolder) -> RunEnd | None:
    """Return the record; None if the run is not known to be over."""
    try:
        return RunEnd(**read_json_object(folder.over))
    except (OSError, ValueError, TypeError):
        return None
