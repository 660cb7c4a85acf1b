"""The shipped tables and scales, read once for all tests, because reading them takes as long as importing PyTorch."""

from __future__ import annotations

from pathlib import Path

from hetero_pp.research.experiments.catalog import Catalog

SHIPPED = Catalog(Path(__file__).parents[1] / "configs" / "experiments")
