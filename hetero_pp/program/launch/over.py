"""The record that a run is over, kept by a host without the run's exchange."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from dataclasses import asdict, dataclass

from hetero_pp.core.bounded import read_json_object
from hetero_pp.core.errors import RunOver
from hetero_pp.core.files import write_whole
from hetero_pp.run.folder import RunFolder


@dataclass(frozen=True)
class Over:
    """The end of a run, as the exchange told this host."""

    told: str
    """Message of the exchange, such as `the run is over (round 100 of 100)`."""
    heard: float
    """Time of the message, in seconds since 1970."""


def keep_over(folder: RunFolder, over: RunOver) -> None:
    """Record that the run of a folder is over. A failed write is ignored."""
    with suppress(OSError):
        write_whole(folder.over, json.dumps(asdict(Over(str(over).partition(";")[0], time.time()))).encode())


def forget_over(folder: RunFolder) -> None:
    """Remove the record: the exchange has given this host a slot, so the run of this name is not over."""
    with suppress(OSError):
        folder.over.unlink()


def read_over(folder: RunFolder) -> Over | None:
    """Return the record; None if the run is not known to be over."""
    try:
        return Over(**read_json_object(folder.over))
    except (OSError, ValueError, TypeError):
        return None
