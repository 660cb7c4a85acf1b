"""Sweep of one key of the YAML, such as `inner.steps=5,20` or `links.home.latency=1ms..1s`, or of its rows."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from hetero_pp.config.overrides import Override
from hetero_pp.core.errors import ConfigError
from hetero_pp.core.units import BITS_PER_SECOND, BYTES, SECONDS, parse_quantity

POINTS = 13  # points of a range, evenly spaced on a logarithmic scale

_UNITS = ((BITS_PER_SECOND, "bit/s", "100 Mbit/s"), (SECONDS, "s", "20 ms"), (BYTES, "B", "512 MiB"))
_NAMES = {"bit/s": "bandwidth", "s": "seconds", "B": "bytes"}


@dataclass(frozen=True)
class Sweep:
    """Key and the values that it takes, as in the YAML."""

    key: str
    values: Sequence[str]
    rows: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Keys and values that each row stands for, by the name of the row."""
    option: str = "--sweep"  # command-line option that set the key

    @classmethod
    def of_rows(cls, rows: Mapping[str, Mapping[str, Any]]) -> Sweep:
        """Return a sweep over the rows of the YAML, by name."""
        return cls("row", list(rows), rows)

    def overrides(self, value: str) -> list[Override]:
        """Return the changes of the YAML that a value stands for."""
        if not self.rows:
            return [Override.parse(f"{self.key}={value}", self.option)]
        option = f"simulate.rows.{value}:"
        return [Override.parse(f"{key}={json.dumps(changed)}", option) for key, changed in self.rows[value].items()]

    @classmethod
    def parse(cls, text: str, option: str = "--sweep") -> Sweep:
        """Parse KEY=FROM..TO or KEY=A,B,C. Raises ConfigError."""
        return cls(*parse_sweep(option, text, "KEY=FROM..TO or KEY=A,B,C", ranges=True), option=option)

    @property
    def title(self) -> str:
        """Description of the swept key, for use in a sentence."""
        return "The choice of a row" if self.rows else f"`{self.key}`"

    def number(self, value: str) -> tuple[float, str] | None:
        """Return a value in base units, and the unit; None if it is no quantity."""
        return None if self.rows else quantity_of(value)

    def point(self, value: str) -> dict[str, Any]:
        """Return the value as JSON: as it was given, and as a number under the name of its quantity."""
        found = self.number(value)
        return {"value": value} | ({} if found is None else {_NAMES[found[1]]: found[0]})


def parse_sweep(option: str, text: str, expected: str, ranges: bool = False) -> tuple[str, list[str]]:
    """Return the key, and its values as in the YAML: those of KEY=A,B,C, with `ranges` also of KEY=FROM..TO.

    Raises ConfigError that names the `option` of the text, and the `expected` form.
    """
    key, _, values = (part.strip() for part in text.partition("="))
    low, dots, high = values.partition("..")
    if ranges and dots and key:
        return key, _between(f"{option} {text}", low, high)
    found = [value.strip() for value in values.split(",")]
    if not key or not all(found):
        raise ConfigError((), f"{option} {text}: expected {expected}")
    return key, found


def changes_nothing(outcomes: Iterable[object]) -> bool:
    """Return whether several values of a key all had the same outcome."""
    first, *others = outcomes
    return bool(others) and all(one == first for one in others)


def quantity_of(value: str) -> tuple[float, str] | None:
    """Return a bandwidth, a time or a size in base units, and the unit; None if it is none of them."""
    spaced = re.sub(r"^\s*([0-9._]+)\s*", r"\1 ", value)
    for units, base, example in _UNITS:
        with suppress(ValueError):
            return parse_quantity(spaced, units, example), base
    return None


def _between(shown: str, low: str, high: str) -> list[str]:
    first, last = quantity_of(low), quantity_of(high)
    if first is None or last is None or first[1] != last[1]:
        raise ConfigError((), f"{shown}: expected both ends in units of one kind, such as `10Mbit/s..10Gbit/s`")
    if not 0 < first[0] < last[0]:
        raise ConfigError((), f"{shown}: expected a range from a value above 0 to a larger one")
    ratio = (last[0] / first[0]) ** (1 / (POINTS - 1))
    return [f"{first[0] * ratio**index!r} {first[1]}" for index in range(POINTS)]
