"""One key of the YAML at many values: `links.home.bandwidth=10Mbit/s..10Gbit/s`, or `1/8,1/32`; or its rows."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from hetero_pp.errors import ConfigError
from hetero_pp.units import BITS_PER_SECOND, BYTES, SECONDS, parse_quantity

POINTS = 13
"""Of a range, evenly on a logarithmic scale."""

_NAMES = {"bit/s": "bandwidth", "s": "seconds", "B": "bytes"}
_UNITS = ((BITS_PER_SECOND, "bit/s", "100 Mbit/s"), (SECONDS, "s", "20 ms"), (BYTES, "B", "512 MiB"))


@dataclass(frozen=True)
class Sweep:
    """A key and the values that it takes, as the YAML would say them."""

    key: str
    values: Sequence[str]
    rows: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Of values that are names: the keys that each stands for."""

    @classmethod
    def of_rows(cls, rows: Mapping[str, Mapping[str, Any]]) -> Sweep:
        """The rows of the YAML, by name."""
        return cls("row", list(rows), rows)

    def overrides(self, value: str) -> list[str]:
        """A value as `--set` takes it."""
        if self.rows:
            return [f"{key}={json.dumps(changed)}" for key, changed in self.rows[value].items()]
        return [f"{self.key}={value}"]

    @classmethod
    def parse(cls, text: str) -> Sweep:
        """From KEY=FROM..TO or KEY=A,B,C. Raises ConfigError."""
        key, separator, values = text.partition("=")
        if not separator or not key.strip() or not values.strip():
            raise ConfigError((), f"--sweep {text}: expected KEY=FROM..TO or KEY=A,B,C")
        low, dots, high = values.partition("..")
        found = _between(text, low, high) if dots else [value.strip() for value in values.split(",")]
        return cls(key.strip(), list(found))

    def number(self, value: str) -> tuple[float, str] | None:
        """A value in base units, and their name; None if it is no quantity."""
        if self.rows:
            return None
        for units, base, example in _UNITS:
            with suppress(ValueError):
                return parse_quantity(_spaced(value), units, example), base
        return None

    def point(self, value: str) -> dict[str, Any]:
        """The value as JSON: as it was given, and as a number under what it is."""
        found = self.number(value)
        return {"value": value} | ({} if found is None else {_NAMES[found[1]]: found[0]})


def _between(text: str, low: str, high: str) -> Sequence[str]:
    for units, base, example in _UNITS:
        try:
            first, last = (parse_quantity(_spaced(end), units, example) for end in (low, high))
        except ValueError:
            continue
        if not 0 < first < last:
            raise ConfigError((), f"--sweep {text}: expected a range that grows from above 0")
        ratio = (last / first) ** (1 / (POINTS - 1))
        return [f"{first * ratio**index!r} {base}" for index in range(POINTS)]
    raise ConfigError((), f"--sweep {text}: expected ends with one kind of unit, such as `10Mbit/s..10Gbit/s`")


def _spaced(text: str) -> str:
    return re.sub(r"^\s*([0-9._]+)\s*", r"\1 ", text)
