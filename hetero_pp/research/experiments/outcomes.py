"""Outcomes of trained rows, in one file for each scale: sorted, one line each, so that diffs and merges are readable.

Several processes of one or several commands may add to it at once.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock

from hetero_pp.core.errors import ConfigError
from hetero_pp.core.files import flush, naming, write_whole

ROWS = "rows.jsonl"
"""File in a scale's folder of results."""

Outcome = dict[str, Any]
"""Outcome of a row: `row` and `seed` for readers; `key` and the identity that it hashes (jobs.identity_of).

Also the fields of a FastResult, and `machine`, `device` and `commit` of the training (unknown for some older rows).
"""

Outcomes = Mapping[str, Mapping[int, Outcome]]
"""Outcomes by row and seed."""

_NEEDED = (
    *("row", "seed", "key", "validation_loss", "diverged", "uncompressed", "compressed", "tokens"),
    "boundary_bytes_per_token",
)


def read_outcomes(path: Path) -> dict[str, Outcome]:
    """Return outcomes by key; an empty dict if there is no such file.

    Raises ConfigError with the line that is damaged or duplicated.
    """
    found: dict[str, Outcome] = {}
    lines: dict[str, int] = {}
    for number, line in _lines(path):
        outcome = _outcome(line, f"{path}:{number}")
        key = outcome["key"]
        if key in found:
            message = f"found the row {key} twice, expected it once: line {lines[key]} has it, too; remove one of them"
            raise ConfigError((), f"{path}:{number}: {message}")
        found[key], lines[key] = outcome, number
    return found


def add_outcome(path: Path, outcome: Outcome) -> None:
    """Add an outcome as one durable line; keep lines that other processes add, and an existing line with the same key.

    Raises ConfigError if the file is damaged. The outcome is appended even then, because it may have taken hours.
    """
    with alone(path):
        try:
            known = read_outcomes(path)
        except ConfigError:
            _append(path, b"\n" + _line(outcome))
            raise
        known.setdefault(outcome["key"], outcome)
        ordered = sorted(known.values(), key=lambda one: (one["row"], one["seed"], one["key"]))
        write_whole(path, b"".join(map(_line, ordered)))


def _append(path: Path, data: bytes) -> None:
    """Append the data and flush it; if the disk cannot store it, restore the file's size."""
    size = path.stat().st_size
    try:
        with naming(path), path.open("ab") as file:
            file.write(data)
        flush(path)
    except OSError:
        os.truncate(path, size)
        raise


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Hold the lock on the file and on the tables made from it, so that no other process changes them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_name(f".{path.name}.lock")):
        yield


def _line(outcome: Outcome) -> bytes:
    return json.dumps(outcome).encode() + b"\n"


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the number and content of each line that is not empty."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return
    except OSError as error:
        raise ConfigError((), f"{path}: cannot be read ({error.strerror})") from None
    yield from ((number, line) for number, line in enumerate(content.split(b"\n"), start=1) if line.strip())


def _outcome(line: bytes, where: str) -> Outcome:
    try:
        outcome = json.loads(line)
    except (ValueError, RecursionError):
        shown = line[:40].decode(errors="replace")
        raise ConfigError((), f"{where}: found `{shown}...`, expected the complete outcome of a row as JSON") from None
    missing = [name for name in _NEEDED if name not in outcome] if isinstance(outcome, dict) else _NEEDED
    if missing:
        raise ConfigError((), f"{where}: found no `{missing[0]}`, expected the outcome of a row")
    return outcome
