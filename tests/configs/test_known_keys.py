"""Entries of the YAML that have no effect unless a setting refers to them are refused if none does."""

from __future__ import annotations

import pytest

from hetero_pp.config.overrides import entry_of


@pytest.mark.parametrize(
    ("key", "entry"),
    [
        (("links", "dsl", "bandwidth"), ("links", "dsl")),
        (("links", "dsl", "forward", "latency"), ("links", "dsl")),
        (("links", "dsl"), ("links", "dsl")),
        (("links", 5), ("links", "5")),
        (("simulate", "hardware", "mine", "flops"), ("simulate", "hardware", "mine")),
        (("links",), None),
        (("simulate", "fleets", "home", "count"), None),
        (("simulate", "measured", "dc"), None),
        (("simulate", "sites", "office", "uplink"), None),
        (("lines", "dsl", "up"), ("lines", "dsl")),
        (("sites", "office", "line"), None),
        (("simulate", "rows", "a", "inner"), None),
        (("replicas", 0, "deepspeed", "bf16", "enabled"), None),
        (("outer", "compression", "density"), None),
        (("no", "such", "section"), None),
        (("inner", "steps", "x"), None),
    ],
)
def test_entries(key: tuple[str | int, ...], entry: tuple[str, ...] | None) -> None:
    assert entry_of(key) == entry
