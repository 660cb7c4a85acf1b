"""Parser of one key with several values: `inner.steps=5,20`, or a range, `links.home.latency=1ms..1s`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import suppress

from hetero_pp.core.errors import ConfigError
from hetero_pp.core.units import BITS_PER_SECOND, BYTES, SECONDS, parse_quantity

POINTS = 13
"""Points of a range, evenly spaced on a logarithmic scale."""

_UNITS = ((BITS_PER_SECOND, "bit/s", "100 Mbit/s"), (SECONDS, "s", "20 ms"), (BYTES, "B", "512 MiB"))


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
