"""One key of the YAML at many values: `links.home.bandwidth=10Mbit/s..10Gbit/s`, or `1/8,1/32`."""

from __future__ import annotations

import re
from collections.abc import Sequence

from hetero_pp.errors import ConfigError
from hetero_pp.units import BITS_PER_SECOND, BYTES, SECONDS, parse_quantity

POINTS = 25
"""Of a range, evenly on a logarithmic scale."""

_UNITS = ((BITS_PER_SECOND, "bit/s", "100 Mbit/s"), (SECONDS, "s", "20 ms"), (BYTES, "B", "512 MiB"))


def parse_sweep(text: str) -> tuple[str, Sequence[str]]:
    """The key and the values, as the YAML would say them. Raises ConfigError."""
    key, separator, values = text.partition("=")
    if not separator or not key.strip() or not values.strip():
        raise ConfigError((), f"--sweep {text}: expected KEY=FROM..TO or KEY=A,B,C")
    low, dots, high = values.partition("..")
    if not dots:
        return key.strip(), [value.strip() for value in values.split(",")]
    return key.strip(), list(_between(text, low, high))


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
