"""Sweep of one key of the YAML, such as `links.home.bandwidth=10Mbit/s..10Gbit/s` or `1/8,1/32`, or of its rows."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hetero_pp.config.sweeps import parse_sweep, quantity_of
from hetero_pp.run.changes import Override

_NAMES = {"bit/s": "bandwidth", "s": "seconds", "B": "bytes"}


@dataclass(frozen=True)
class Sweep:
    """Key and the values that it takes, as in the YAML."""

    key: str
    values: Sequence[str]
    rows: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Keys and values that each row stands for, by the name of the row."""
    option: str = "--sweep"
    """Command-line option that set the key."""

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
