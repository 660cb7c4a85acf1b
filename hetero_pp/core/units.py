"""Quantities with units as users write them: `100 Mbit/s`, `20 ms`, `512 MiB`, `1/8`.

Inside the program every quantity is a plain number in base units: bits per second, seconds, bytes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from fractions import Fraction
from itertools import islice
from typing import Any

BITS_PER_SECOND = {
    f"{prefix}{unit}": factor * bits
    for prefix, factor in {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}.items()
    for unit, bits in {"bit/s": 1, "bps": 1, "B/s": 8}.items()
}
SECONDS = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
BYTES = {"B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12} | {
    "KiB": 2.0**10,
    "MiB": 2.0**20,
    "GiB": 2.0**30,
    "TiB": 2.0**40,
}
COUNTS = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
FLOPS = {"FLOP/s": 1.0, "GFLOP/s": 1e9, "TFLOP/s": 1e12, "PFLOP/s": 1e15}
_NUMBER_AND_UNIT = re.compile(r"\s*([0-9][0-9_]*\.?[0-9]*(?:[eE][+-]?[0-9]{1,3})?)\s*([^\s0-9].*?)?\s*")

_FRACTION = re.compile(r"-?[0-9]{1,30}(/[0-9]{1,30}|(\.[0-9]{0,30})?([eE][+-]?[0-9]{1,3})?)\s*%?")

ROUND_TIMES = [
    *(digit * 10.0**exponent for exponent in range(-6, 1) for digit in (1, 2, 5) if digit * 10.0**exponent <= 5),
    *(10.0, 20.0, 30.0),
    *(60.0 * minutes for minutes in (1, 2, 5, 10, 20, 30)),
    *(3600.0 * hours for hours in (1, 2, 5, 10, 24)),
    *(86400.0 * digit * 10**exponent for exponent in range(6) for digit in (2, 5, 10)),
]
"""Seconds, in steps of the units that people use for time."""


def parse_quantity(value: Any, units: dict[str, float], example: str) -> float:
    """Parse `value` ("100 Mbit/s") to base units. Raises ValueError that names the expected form."""
    expected = f"expected a number and a unit such as `{example}`"
    match = _NUMBER_AND_UNIT.fullmatch(value) if isinstance(value, str) else None
    if match is None and isinstance(value, str) and value.strip()[:1] == "-":
        raise ValueError(f"found `{value}`, expected a number and a unit such as `{example}`, at least 0")
    if match is None or not match[2]:
        raise ValueError(f"found `{value}`, {expected}")
    number, unit = match[1], match[2]
    if unit not in units:
        raise ValueError(f"found `{value}` with the unknown unit `{unit}`, {expected} (units: {', '.join(units)})")
    found = float(number.replace("_", "")) * units[unit]
    if not math.isfinite(found):
        raise ValueError(f"found `{value}`, {expected} that a number can hold")
    return found


def parse_count(value: Any) -> int:
    """Parse `500M`, `10B` or a number to a whole number. Raises ValueError for anything else."""
    text = str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value
    match = _NUMBER_AND_UNIT.fullmatch(text) if isinstance(text, str) else None
    found = float(match[1].replace("_", "")) * COUNTS.get(match[2] or "", math.nan) if match else math.nan
    if not (math.isfinite(found) and found == round(found)):
        raise ValueError(f"found `{value}`, expected a whole number such as `500M` or `10B` (k, M, B, T)")
    return round(found)


def parse_fraction(value: Any) -> float:
    """Parse `1/8`, `0.125` or `12.5 %` to a float."""
    expected = "expected a number or a ratio such as `1/8`"
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(f"found `{value}`, {expected}")
    try:
        text = str(value).strip()
        if not _FRACTION.fullmatch(text):
            raise ValueError
        return float(Fraction(text[:-1].strip()) / 100) if text.endswith("%") else float(Fraction(text))
    except (ValueError, ZeroDivisionError, OverflowError):
        raise ValueError(f"found `{value}`, {expected}") from None


def parse_any(value: Any) -> float:
    """Parse a number, a ratio (`94.5 %`) or any quantity (`70 s`, `5.5 MB`) to base units."""
    for units in (BITS_PER_SECOND, SECONDS, BYTES, FLOPS):
        with suppress(ValueError):
            return parse_quantity(value, units, "")
    try:
        return parse_fraction(value)
    except ValueError:
        expected = "expected a number, a ratio such as `94.5 %`, or a quantity such as `70 s` or `5.5 MB`"
        raise ValueError(f"found `{value}`, {expected}") from None


def format_bits_per_second(value: float | None) -> str:
    """Format bits per second: 1e8 -> "100 Mbit/s"; None -> "unlimited"."""
    if value is None:
        return "unlimited"
    return _in_units(value, "bit/s", 4) or f"{format_number(value, 4)} bit/s"


def format_bytes(value: float) -> str:
    """Format bytes: 1536 -> "1.54 kB"."""
    return _in_units(value, "B", 3) or f"{value:.0f} B"


def _in_units(value: float, unit: str, digits: int) -> str:
    """Format a value with the largest prefix from k to T that leaves at least 1, rounded; empty below that."""
    for factor, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= (1 - 0.5 * 10.0**-digits) * factor:
            return f"{format_number(value / factor, digits).replace(',', '')} {prefix}{unit}"
    return ""


def format_flops(value: float) -> str:
    """Format a number of floating-point operations: 5.1e16 -> "51 PFLOP"."""
    for factor, unit in ((1e18, "EFLOP"), (1e15, "PFLOP"), (1e12, "TFLOP"), (1e9, "GFLOP")):
        if value >= factor:
            return f"{format_number(value / factor, 2)} {unit}"
    return f"{format_number(value / 1e6, 2)} MFLOP"


def format_percent(value: float) -> str:
    """Format a share: 0.125 -> "12.5%"; values near zero are "0.0%", also below zero."""
    return f"{round(value, 3) + 0.0:.1%}"


def format_share(share: float | None) -> str:
    """Format a share: 0.4567 -> "46 %", 0.0123 -> "1.2 %", 1e-5 -> "<0.1 %", None -> "–"."""
    if share is None:
        return "–"
    if 0 < share < 0.001:
        return "<0.1 %"
    return f"{100 * share:.0f} %" if share >= 0.0995 or share == 0 else f"{100 * share:.1f} %"


def format_ratio(value: float) -> str:
    """Format a ratio: 0.03125 -> "1/32"; 1e-5 -> "1/100000"."""
    is_small = 0 < abs(value) < 1 / 4096
    return str(Fraction(value).limit_denominator(round(abs(1 / value)) if is_small else 4096))


def format_count(count: int, one: str, several: str = "") -> str:
    """Format a count: (1, "replica") -> "1 replica"; (2000, "replica") -> "2,000 replicas"."""
    return f"{count:,} {one if count == 1 else several or f'{one}s'}"


def format_names(names: Collection[str], shown: int, separator: str = ", ") -> str:
    """List the first `shown` names and count the others: "anna, ben, carla and 2 more"."""
    more = len(names) - shown
    return separator.join(islice(names, shown)) + (f" and {more:,} more" if more > 0 else "")


def bytes_per_second(bits: float | None) -> float | None:
    """Return bits per second in bytes per second; None (unlimited) stays None."""
    return None if bits is None else bits / 8


def format_times(count: int) -> str:
    """Format a number of times: 1 -> "once"; 2,000 -> "2,000 times"."""
    return "once" if count == 1 else format_count(count, "time")


def format_seconds(value: float) -> str:
    """Format seconds: 0.02 -> "20 ms"; 2e-6 -> "2 µs"; 95 -> "1:35"."""
    if value < 1:
        is_tiny = 0 < value < 1e-5
        return f"{format_number(value * 1e6)} µs" if is_tiny else f"{format_number(value * 1e3, 4)} ms"
    if value < 60:
        return f"{value:.3g} s"
    minutes, seconds = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


def format_duration(value: float) -> str:
    """Format seconds in the unit that fits: 0.02 -> "20 ms", 90 -> "1.5 min", 6500 -> "1.81 h", 1e6 -> "11.6 days"."""
    for seconds, least, unit in (
        (86400 * 365.0, 2, "years"),
        (86400.0, 2, "days"),
        (3600.0, 1, "h"),
        (60.0, 1, "min"),
        (1.0, 1, "s"),
    ):
        if value >= 0.9995 * least * seconds:
            return f"{format_number(value / seconds)} {unit}"
    if value == 0:
        return "0 s"
    return f"{format_number(1e3 * value)} ms"


def format_number(value: float, digits: int = 3) -> str:
    """Format a number with `digits` digits and no exponent: 5123 -> "5,120", 14.25 -> "14.2", 0.00123 -> "0.00123"."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    places = digits - 1 - math.floor(math.log10(abs(value)))
    shown = f"{round(value, places):,.{max(0, places)}f}"
    return shown.rstrip("0").rstrip(".") if "." in shown else shown


FORMATS: Mapping[str, Callable[[float], str]] = {
    "bit/s": format_bits_per_second,
    "s": format_duration,
    "B": format_bytes,
}
"""Formatters of quantities, by base unit."""
