"""Summary in words of what a table's rows are trained with: sizes, tokens, rounds, density."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from fractions import Fraction

from hetero_pp.core.units import format_number
from hetero_pp.outer.methods import OuterSettings
from hetero_pp.pseudo_gradient.compression import CompressionSettings
from hetero_pp.research.settings import research_of
from hetero_pp.research.trainer.participation import sequences_in
from hetero_pp.run.config import RunConfig
from hetero_pp.run.spec import RunSpec

PAPERS = OuterSettings.model_validate({"rounds": 1, "method": "sparseloco_paper"}).compression
"""Compression settings of SparseLoCo's paper."""


def facts(configs: Sequence[RunConfig], vocabulary: int) -> str:
    """Return `0.34 M parameters, 819 k tokens, M = 4, H = 10, 40 outer rounds, density 1/32, not quantised`."""
    specs = [RunSpec(config, vocabulary) for config in configs]
    return ", ".join(part for part in _parts(specs) if part)


def _parts(specs: Sequence[RunSpec]) -> Iterator[str]:
    yield f"{_joined([_size(parameter_count(spec)) for spec in specs])} parameters"
    yield f"{_joined([rounded(token_count(spec)) for spec in specs])} tokens"
    yield f"M = {_joined([_replicas(spec.config) for spec in specs])}"
    with_rounds = [spec.config for spec in specs if spec.config.outer.source == "difference"]
    if len(with_rounds) < len(specs):
        yield "gradients averaged every step" + (" in some rows" if with_rounds else "")
    if with_rounds:
        outer = [config.outer for config in with_rounds]
        yield f"H = {_joined([str(config.inner.steps) for config in with_rounds])}"
        yield f"{_joined([str(one.rounds) for one in outer])} outer rounds"
        yield f"density {_joined([_ratio(one.compression.density) for one in outer])}"
        differ = any(one.method == "sparseloco" and _sent(one.compression) != _sent(PAPERS) for one in outer)
        theirs = f" (SparseLoCo's paper: {_ratio(PAPERS.density)}, {_quantiser(PAPERS)})" if differ else ""
        yield _joined([_quantiser(one.compression) for one in outer]) + theirs


def _replicas(config: RunConfig) -> str:
    counts = list(dict.fromkeys(count or len(config.replicas) for count in research_of(config).counts.values()))
    counts = counts or [len(config.replicas)]
    return str(counts[0]) if len(counts) == 1 else f"{min(counts)} to {max(counts)}"


def _sent(compression: CompressionSettings) -> tuple[float, str]:
    return compression.density, _quantiser(compression)


def _joined(values: Sequence[str]) -> str:
    """Join the distinct values: `a`, `a or b`, `a, b or c`."""
    *most, last = dict.fromkeys(values)
    return f"{', '.join(most)} or {last}" if most else last


def parameter_count(spec: RunSpec) -> int:
    """Return the number of parameters of one replica."""
    return sum(math.prod(shape) for shape in spec.parameter_shapes.values())


def token_count(spec: RunSpec) -> int:
    """Return the number of training tokens of all replicas together."""
    sequences = sequences_in(spec.config, spec.latest.outer.rounds)
    return sequences * spec.config.data.sequence_length * spec.inner_steps


def _size(count: int) -> str:
    return f"{format_number(count / 1e6, 2)} M" if count < 1e7 else f"{count / 1e6:.0f} M"


def rounded(tokens: int) -> str:
    """Return a number of tokens with three digits, such as `819 k`."""
    for unit, factor in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if tokens >= factor:
            return f"{tokens / factor:.3g} {unit}"
    return str(tokens)


def _ratio(value: float) -> str:
    return str(Fraction(value).limit_denominator(10_000))


def _quantiser(compression: CompressionSettings) -> str:
    if compression.value_bits == 32:
        return "not quantised"
    return "signs" if compression.quantiser == "signs" else f"{compression.value_bits}-bit codes"
