"""Reads untrusted files and texts, with bounds on size, nesting, aliases and digits.

Every function raises TooLarge, a ValueError, or another ValueError with a reason that fits behind the file's name.
"""

from __future__ import annotations

import json
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

DEPTH_MAX = 64  # Levels of nested lists and mappings. No file of a run has more than 12.
DIGITS_MAX = 400  # characters of one number: more than the largest float has

JSON_BYTES_MAX = 64 * 2**20


_STREAMS = ("/dev/", "/proc/")


ROUNDS_GAP_MAX = 1000
"""Rounds that may be missing between two rounds. A larger gap means that the later rounds belong to no run."""


class TooLarge(ValueError):
    """A file or a text exceeds a bound; the message says which."""


def read_bounded(path: Path, bytes_max: int) -> bytes:
    """Return the bytes of a regular file, or of a stream that a user named (`/dev/stdin`, `<(command)`).

    A symbolic link to a regular file is followed. A pipe elsewhere is not opened, because it may have no writer.

    Raises OSError, or TooLarge for more than `bytes_max` bytes.
    """
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode) and not str(path).startswith(_STREAMS):
        raise TooLarge("found a pipe or a device, expected a file")
    with path.open("rb") as file:
        data = file.read(bytes_max + 1)
    if len(data) > bytes_max:
        raise TooLarge(f"found more than {bytes_max:,} bytes, expected at most that")
    return data


def read_bounded_json(path: Path, bytes_max: int = JSON_BYTES_MAX) -> Any:
    """Return the value of a JSON file. Raises OSError or ValueError."""
    return parse_json(read_bounded(path, bytes_max))


def read_json_object(path: Path, bytes_max: int = JSON_BYTES_MAX) -> dict[str, Any]:
    """Return the object of a JSON file. Raises OSError, or ValueError, also for JSON of another type."""
    value = read_bounded_json(path, bytes_max)
    if not isinstance(value, dict):
        raise ValueError(f"found a JSON {type(value).__name__}, expected an object")
    return value


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text. Raises ValueError, also for more than DEPTH_MAX levels and for long numbers."""
    if isinstance(text, bytes):
        text = text.decode("utf-8-sig")

    def parse_int(digits: str) -> int:
        if len(digits) > DIGITS_MAX:
            raise TooLarge(f"found a number of {len(digits):,} digits, expected at most {DIGITS_MAX}")
        return int(digits)

    try:
        value = json.loads(text, parse_int=parse_int)
    except RecursionError:
        raise TooLarge(f"found lists and objects more than {DEPTH_MAX} levels deep") from None
    require_shallow(value)
    return value


def require_shallow(value: object, depth_max: int = DEPTH_MAX) -> None:
    """Raise TooLarge for lists and mappings that are nested more than `depth_max` levels deep."""
    level = [value]
    for _ in range(depth_max + 1):
        parts = [one.values() if isinstance(one, Mapping) else one for one in level if isinstance(one, Mapping | list)]
        level = [below for part in parts for below in part if isinstance(below, dict | list)]
        if not level:
            return
    raise TooLarge(f"found lists and objects more than {depth_max} levels deep")


def before_gap(rounds: Iterable[int]) -> list[int]:
    """Return the rounds in their order, up to the first gap of more than ROUNDS_GAP_MAX."""
    found: list[int] = []
    for round_ in sorted(rounds):
        if found and round_ - found[-1] > ROUNDS_GAP_MAX:
            break
        found.append(round_)
    return found
