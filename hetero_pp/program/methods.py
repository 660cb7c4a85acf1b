"""`hetero-pp methods`: print the table of methods."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from hetero_pp.outer.methods import METHODS
from hetero_pp.program.report.output import say, standard_output

NOTE = "Values in braces are keys of `outer` that a method sets. Keys that are set beside `outer.method` override them."


def print_methods() -> None:
    """Print each method: its name in a YAML, its paper and section, and the keys of `outer` that it sets."""
    console = standard_output()
    for name, method in METHODS.items():
        say(console, f"{name}: {method.paper}", bold=f"{name}:")
        say(console, f"    {as_yaml(method.cells)}", indent="    ")
    say(console, NOTE, style="dim")


def as_yaml(value: Any) -> str:
    """Format a value as YAML in one line; fractions with numerator 1 as `1/128`."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {as_yaml(one)}" for key, one in value.items()) + "}"
    if isinstance(value, float) and 0 < value < 1 and Fraction(value).numerator == 1:
        return str(Fraction(value))
    return f"{value:g}" if isinstance(value, float) else str(value).lower()
