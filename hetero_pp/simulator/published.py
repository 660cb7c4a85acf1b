"""Comparison of predictions with published numbers, which the YAML lists by their names in the JSON."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from hetero_pp.core.errors import ConfigError, dotted
from hetero_pp.core.units import parse_any
from hetero_pp.run.config import RunConfig

_NAMES = ("name", "member")
"""Keys whose value may stand for the index of a list entry."""


@dataclass(frozen=True)
class PublishedComparison:
    """Published number and its prediction, in base units."""

    what: str
    where: str
    bound: str
    published: float
    predicted: float

    @property
    def ratio(self) -> float:
        """Predicted over published."""
        return self.predicted / self.published

    @property
    def holds(self) -> bool | None:
        """Whether the prediction keeps a published bound; None if the paper gives the number itself."""
        if self.bound == "equal":
            return None
        return self.predicted >= self.published if self.bound == "at least" else self.predicted <= self.published

    def as_json(self) -> dict[str, Any]:
        """Return both numbers with their ratio and whether the bound holds."""
        return asdict(self) | {"ratio": self.ratio, "holds": self.holds}


def compared(config: RunConfig, prediction: Mapping[str, Any]) -> Iterator[PublishedComparison]:
    """Yield the comparisons that apply to this configuration.

    Raises ConfigError for numbers that are not predicted.
    """
    for index, number in enumerate(config.simulate.published):
        key = ("simulate", "published", index)
        if not all(_has(config, key, name, value) for name, value in number.when.items()):
            continue
        found = _at(prediction, number.what, (*key, "what"), "a number of `--json` such as `outer_seconds`")
        if isinstance(found, bool) or not isinstance(found, int | float):
            raise ConfigError(
                (*key, "what"),
                f"found `{number.what}`, expected the path of a number in the output of `simulate --json`",
            )
        yield PublishedComparison(number.what, number.where, number.bound, number.value, float(found))


def _has(config: RunConfig, key: Sequence[str | int], name: str, value: Any) -> bool:
    """Return whether the configuration has this value there. `1/8` equals 0.125, `1 Gbit/s` equals 1000 Mbit/s."""
    tree = config.model_dump(mode="json")
    found = _at(tree, name, (*key, "when", name), "a key of this file such as `links.home.bandwidth`")
    try:
        return math.isclose(parse_any(found), parse_any(value), rel_tol=1e-6)
    except ValueError:
        return bool(found == value)


def _at(tree: Any, name: str, key: Sequence[str | int], expected: str) -> Any:
    """Return the value at a path such as `replicas.0.count`, or `replicas.home.count`."""
    node = tree
    for part in name.split("."):
        if isinstance(node, list):
            named = {str(place): one for place, one in enumerate(node)}
            named |= {one[by]: one for one in node if isinstance(one, dict) for by in _NAMES if by in one}
            node = named
        if not isinstance(node, dict) or part not in node:
            known = f" ({', '.join(node)})" if isinstance(node, dict) and len(node) < 20 else ""
            raise ConfigError(key, f"found `{dotted(name.split('.'))}`, expected {expected}{known}")
        node = node[part]
    return node
