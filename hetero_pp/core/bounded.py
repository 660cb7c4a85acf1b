"""Reads untrusted files and texts, with bounds on size, nesting, aliases and digits.

Every function raises TooLarge, a ValueError, or another ValueError with a reason that fits behind the file's name.
"""

from __future__ import annotations

import json
import re
import stat
from collections.abc import Iterable, Mapping
from io import StringIO
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.composer import Composer
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.events import AliasEvent, ScalarEvent

from hetero_pp.core.control_characters import is_control
from hetero_pp.core.plain_yaml import NotOrdinary, read_ordinary

DEPTH_MAX = 64
"""Levels of nested lists and mappings. No file of a run has more than 12."""

DIGITS_MAX = 400
"""Characters of one number: more than the largest float has."""

INTEGER_DIGITS_MAX = 18
"""Digits of a whole number in a YAML; all such numbers fit into 64 bits."""

JSON_BYTES_MAX = 64 * 2**20
YAML_BYTES_MAX = 4 * 2**20

YAML_VALUES_MAX = 200_000
"""Keys, values, lists and mappings of a YAML with its aliases expanded."""


_STREAMS = ("/dev/", "/proc/")

_NUMBER = re.compile(r"(0[xob])?[0-9a-fA-F.]+")


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
    try:
        value = json.loads(text, parse_int=_int)
    except RecursionError:
        raise TooLarge(f"found lists and objects more than {DEPTH_MAX} levels deep") from None
    require_shallow(value)
    return value


def require_shallow(value: object, depth_max: int = DEPTH_MAX) -> None:
    """Raise TooLarge for lists and mappings that are nested more than `depth_max` levels deep."""
    level = [value]
    for _ in range(depth_max + 1):
        level = [below for one in level for below in _below(one) if isinstance(below, dict | list)]
        if not level:
            return
    raise TooLarge(f"found lists and objects more than {depth_max} levels deep")


def _below(value: object) -> list[Any]:
    return list(value.values()) if isinstance(value, Mapping) else list(value) if isinstance(value, list) else []


def _int(digits: str) -> int:
    if len(digits) > DIGITS_MAX:
        raise TooLarge(f"found a number of {len(digits):,} digits, expected at most {DIGITS_MAX}")
    return int(digits)


def parse_yaml(data: str | bytes, with_lines: bool = False) -> Any:
    """Return the content of a YAML; `with_lines` as ruamel.yaml's round-trip types, which know the line of each key.

    Raises YAMLError (MarkedYAMLError with a line), or ValueError, which includes TooLarge.
    """
    text = data.decode("utf-8-sig") if isinstance(data, bytes) else data
    if len(text) > YAML_BYTES_MAX:
        raise TooLarge(f"found more than {YAML_BYTES_MAX:,} bytes, expected at most that")
    yaml = YAML(typ="rt") if with_lines else YAML(typ="safe", pure=True)
    yaml.Composer = BoundedComposer
    try:
        return yaml.load(StringIO(text))
    except YAMLError:
        raise
    except RecursionError:
        raise TooLarge(f"found lists and mappings more than {DEPTH_MAX} levels deep") from None
    except ValueError as error:
        if "integer string conversion" in str(error):
            raise TooLarge(f"found a number of too many digits, expected at most {DIGITS_MAX}") from None
        raise
    except (AttributeError, KeyError, TypeError) as error:  # ruamel.yaml raises these for unexpected tags and keys
        raise ValueError(f"{type(error).__name__}: {error}") from None


def read_yaml(path: Path, with_lines: bool = False) -> Any:
    """Return the content of a YAML file. Raises OSError, or the errors of `parse_yaml`."""
    return parse_yaml(read_bounded(path, YAML_BYTES_MAX), with_lines)


def parse_ordinary_yaml(data: bytes) -> Any:
    """Return the content of a YAML, or None if only `parse_yaml` can read it or say what is wrong with it."""
    try:
        return read_ordinary(data.decode("utf-8-sig"), DEPTH_MAX, YAML_VALUES_MAX)
    except (NotOrdinary, ValueError):
        return None


def before_gap(rounds: Iterable[int]) -> list[int]:
    """Return the rounds in their order, up to the first gap of more than ROUNDS_GAP_MAX."""
    found: list[int] = []
    for round_ in sorted(rounds):
        if found and round_ - found[-1] > ROUNDS_GAP_MAX:
            break
        found.append(round_)
    return found


def yaml_complaint(path: Path, error: Exception) -> str:
    """Return one line about a YAML that could not be read: its name, the line if it is known, and the reason."""
    if isinstance(error, OSError):
        return f"{path}: cannot be read ({error.strerror})"
    if isinstance(error, MarkedYAMLError):
        mark = error.problem_mark
        return f"{path}:{mark.line + 1 if mark else 1}: not YAML: {error.problem}"
    return f"{path}: not YAML: {str(error).splitlines()[0]}"


class BoundedComposer(Composer):
    """Composes YAML with bounds on its nesting, its numbers, and its size with aliases expanded."""

    def __init__(self, loader: Any = None) -> None:
        super().__init__(loader=loader)
        self._depth = 0
        self._values = 0
        """Nodes so far; those that aliases repeat count each time."""
        self._values_of: dict[str, int] = {}
        """Nodes below each complete anchor, counted in the same way."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.parser.peek_event()
        if isinstance(event, AliasEvent):
            known = event.anchor in self.anchors
            if known and event.anchor not in self._values_of:
                self._refuse(event, f"found the alias *{event.anchor} inside its own anchor")
            self._values += self._values_of.get(event.anchor, 1)
            self._require_few(event)
            return super().compose_node(parent, index)
        self._values += 1
        self._require_few(event)
        self._require_short_number(event)
        self._require_text(event)
        before = self._values - 1
        self._depth += 1
        if self._depth > DEPTH_MAX:
            self._refuse(event, f"found lists and mappings more than {DEPTH_MAX} levels deep")
        node = super().compose_node(parent, index)
        self._depth -= 1
        if event.anchor is not None:
            self._values_of[event.anchor] = self._values - before
        return node

    def _require_short_number(self, event: Any) -> None:
        if not isinstance(event, ScalarEvent) or not event.implicit[0]:
            return
        text = event.value.lstrip("+-").replace("_", "")
        most = INTEGER_DIGITS_MAX if text.isdigit() else DIGITS_MAX
        if len(text) > most and _NUMBER.fullmatch(text):
            self._refuse(event, f"found a number of {len(text):,} digits, expected at most {most}")

    def _require_text(self, event: Any) -> None:
        """Refuse texts that would control the terminal in which a message or a table shows them."""
        if isinstance(event, ScalarEvent) and not event.value.isprintable():
            kept = "\n\t\a" if event.style == ">" else "\n\t"  # ruamel.yaml marks line breaks of a folded text by \a
            found = next((one for one in event.value if one not in kept and is_control(one)), None)
            if found is not None:
                self._refuse(event, f"found the control character U+{ord(found):04X} in a text, expected none")

    def _require_few(self, event: Any) -> None:
        if self._values > YAML_VALUES_MAX:
            self._refuse(event, f"found more than {YAML_VALUES_MAX:,} values, including repetitions by aliases")

    def _refuse(self, event: Any, problem: str) -> None:
        raise MarkedYAMLError(problem=problem, problem_mark=event.start_mark)
