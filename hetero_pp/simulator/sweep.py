"""One key of the YAML at many values: `links.home.bandwidth=10Mbit/s..10Gbit/s`, or `1/8,1/32`; or its rows."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hetero_pp.run.changes import Override
from hetero_pp.sweeps import parse_sweep, quantity_of

_NAMES = {"bit/s": "bandwidth", "s": "seconds", "B": "bytes"}


@dataclass(frozen=True)
class Sweep:
    """A key and the values that it takes, as the YAML would say them."""

    key: str
    values: Sequence[str]
    rows: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Of values that are names: the keys that each stands for."""
    option: str = "--sweep"
    """What gave the key."""

    @classmethod
    def of_rows(cls, rows: Mapping[str, Mapping[str, Any]]) -> Sweep:
        """The rows of the YAML, by name."""
        return cls("row", list(rows), rows)

    def overrides(self, value: str) -> list[Override]:
        """Return the changes of the YAML that a value stands for."""
        if not self.rows:
            return [Override.parse(f"{self.key}={value}", self.option)]
        option = f"simulate.rows.{value}:"
        return [Override.parse(f"{key}={json.dumps(changed)}", option) for key, changed in self.rows[value].items()]

    @classmethod
    def parse(cls, text: str, option: str = "--sweep") -> Sweep:
        """From KEY=FROM..TO or KEY=A,B,C. Raises ConfigError."""
        return cls(*parse_sweep(option, text, "KEY=FROM..TO or KEY=A,B,C", ranges=True), option=option)

    @property
    def title(self) -> str:
        """What is varied, in a sentence."""
        return "The choice of a row" if self.rows else f"`{self.key}`"

    def number(self, value: str) -> tuple[float, str] | None:
        """A value in base units, and their name; None if it is no quantity."""
        return None if self.rows else quantity_of(value)

    def point(self, value: str) -> dict[str, Any]:
        """The value as JSON: as it was given, and as a number under what it is."""
        found = self.number(value)
        return {"value": value} | ({} if found is None else {_NAMES[found[1]]: found[0]})
