"""`hetero-pp methods`: the table of methods, each a row of parts."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from hetero_pp.outer.methods import METHODS
from hetero_pp.program.report.output import say, standard_output

NOTE = "What stands in braces is what a method sets of `outer`; whatever is said beside `outer.method` stands instead."


def print_methods() -> None:
    """One after the other: what a YAML calls it, paper and section, and the cells that it sets, as a YAML has them."""
    console = standard_output()
    for name, method in METHODS.items():
        say(console, f"{name}: {method.source}", bold=f"{name}:")
        say(console, f"    {as_yaml(method.cells)}", indent="    ")
    say(console, NOTE, style="dim")


def as_yaml(value: Any) -> str:
    """In one line; a share of a whole as `1/128`."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {as_yaml(one)}" for key, one in value.items()) + "}"
    if isinstance(value, float) and 0 < value < 1 and Fraction(value).numerator == 1:
        return str(Fraction(value))
    return f"{value:g}" if isinstance(value, float) else str(value).lower()
