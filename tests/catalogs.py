"""Shipped tables and scales, and what `reproduce` computes of them, once for all tests of a process."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from types import ModuleType
from typing import Any

import pytest

from hetero_pp.config.run_config import RunConfig
from hetero_pp.config.spec import RunSpec
from hetero_pp.data.settings import DataSettings
from hetero_pp.research.experiments import command
from hetero_pp.research.experiments.definition import Catalog

_estimates: dict[str, Any] = {}


def compute_once(
    monkeypatch: pytest.MonkeyPatch, *functions: tuple[ModuleType, str], known: dict[str, Any] | None = None
) -> None:
    """Call these functions of a configuration or of data once for equal arguments: in this test, or for a `known`."""
    known = {} if known is None else known

    def remember(module: ModuleType, name: str) -> None:
        compute = getattr(module, name)

        def remembered(of: RunSpec | RunConfig | DataSettings, *rest: Any) -> Any:
            config = of.config if isinstance(of, RunSpec) else of
            key = name + config.model_dump_json()
            if key not in known:
                known[key] = compute(of, *rest)
            return known[key]

        monkeypatch.setattr(module, name, remembered)

    for module, name in functions:
        remember(module, name)


def estimate_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `reproduce` estimate each contribution once in all tests of this process."""
    compute_once(monkeypatch, (command, "contribution_bytes"), known=_estimates)


SHIPPED = Catalog(Path(__file__).parents[1] / "configs" / "experiments")


def student_interval(differences: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of the mean of differences, from scipy's distribution."""
    from scipy.stats import t as students_t  # takes half a second

    half = float(students_t.ppf(0.975, len(differences) - 1)) * stdev(differences) / math.sqrt(len(differences))
    return fmean(differences) - half, fmean(differences) + half
