"""What rows came to, kept in one file of a scale: a line each, sorted, so that differences and merges can be read.

Several processes add to it at once, of one command or of several.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock

from hetero_pp.errors import ConfigError
from hetero_pp.files import flush, naming, write_whole

ROWS = "rows.jsonl"
"""In a scale's folder of results."""

Outcome = dict[str, Any]
"""`row` and `seed` for the eye; `key`, and what it is a hash of (jobs.identity_of); a FastResult;
`machine`, `device` and `commit`, on and at which it was trained (of older rows some are not known)."""

Outcomes = Mapping[str, Mapping[int, Outcome]]
"""row -> seed -> outcome"""

_NEEDED = (
    *("row", "seed", "key", "validation_loss", "diverged", "uncompressed", "compressed", "tokens"),
    "boundary_bytes_per_token",
)


def read_outcomes(path: Path) -> dict[str, Outcome]:
    """By key; none if there is no such file. Raises ConfigError naming the line that is not what was written."""
    found: dict[str, Outcome] = {}
    lines: dict[str, int] = {}
    for number, line in _lines(path):
        outcome = _outcome(line, f"{path}:{number}")
        key = outcome["key"]
        if key in found:
            message = f"found the row {key} again, expected it once: line {lines[key]} has it too, one has to go"
            raise ConfigError((), f"{path}:{number}: {message}")
        found[key], lines[key] = outcome, number
    return found


def add_outcome(path: Path, outcome: Outcome) -> None:
    """Add a line, whole and durable. What others add meanwhile stays, and so does an outcome of the same key.

    Raises ConfigError if the file is damaged. The line is then at its end nonetheless: it may have taken hours.
    """
    with alone(path):
        try:
            known = read_outcomes(path)
        except ConfigError:
            _append(path, b"\n" + _line(outcome))
            raise
        known.setdefault(outcome["key"], outcome)
        _write(path, known.values())


def _append(path: Path, data: bytes) -> None:
    """All of it, durable, or, if the disk does not take it, nothing."""
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
    """Wait until no other process changes the file, or what is made of it, and keep them waiting."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_name(f".{path.name}.lock")):
        yield


def _write(path: Path, outcomes: Iterable[Outcome]) -> None:
    ordered = sorted(outcomes, key=lambda one: (one["row"], one["seed"], one["key"]))
    write_whole(path, b"".join(map(_line, ordered)))


def _line(outcome: Outcome) -> bytes:
    return json.dumps(outcome).encode() + b"\n"


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Those that are not empty, and their numbers."""
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
        raise ConfigError((), f"{where}: found `{shown}...`, expected the outcome of a row as JSON, whole") from None
    missing = [name for name in _NEEDED if name not in outcome] if isinstance(outcome, dict) else _NEEDED
    if missing:
        raise ConfigError((), f"{where}: found no `{missing[0]}`, expected the outcome of a row")
    return outcome
