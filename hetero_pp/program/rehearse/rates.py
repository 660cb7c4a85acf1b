"""Compares the measured rates of a host's access line with the YAML's line."""

from __future__ import annotations

from collections.abc import Mapping

from hetero_pp.config.lines import WAYS, Way
from hetero_pp.core.units import format_bits_per_second
from hetero_pp.rpc.admission_client import Rate
from hetero_pp.run.spec import RunSpec

SHORT = 0.9
"""Share of the YAML's line that a measured line has to reach: a measurement is short, and includes headers."""


def shown_rates(rates: Mapping[Way, Rate]) -> str:
    return ", ".join(f"{rates[way]} {way}" for way in WAYS)


def too_slow(spec: RunSpec, member: str, rates: Mapping[Way, Rate]) -> str:
    """Return the rates of the YAML that a member's line does not reach: `20 Mbit/s up`; empty if it reaches them."""
    line = next((one for one in spec.lines.values() if member in one.members), None)
    wanted = {} if line is None else {way: line.bandwidth(way) for way in WAYS}
    return " and ".join(
        f"{format_bits_per_second(rate)} {way}"
        for way, rate in wanted.items()
        if rate is not None and rates[way].is_less_than(SHORT * rate)
    )
