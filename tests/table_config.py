"""Configurations of rows, from the cells that a test varies."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hetero_pp.config.run_config import RunConfig
from hetero_pp.research.settings import ResearchConfig, ResearchSettings

_OF_OUTER = ResearchSettings.model_fields.keys() - {"ablations"}


def table_config(values: Mapping[str, Any]) -> RunConfig:
    """Return the configuration of a row, or of a run if nothing in it is of `research`.

    Cells of `research` may be in `outer`, and `ablations` in boundaries, all alike.
    """
    outer = dict(values["outer"])
    research = {key: outer.pop(key) for key in _OF_OUTER & outer.keys()}
    replicas = []
    for replica in values["replicas"]:
        boundary = dict(replica.get("boundary", {}))
        if (ablations := boundary.pop("ablations", None)) is not None:
            assert research.setdefault("ablations", ablations) == ablations
        replicas.append({**replica, "boundary": boundary} if "boundary" in replica else replica)
    values = {**values, "outer": outer, "replicas": replicas}
    if not research:
        return RunConfig.model_validate(values)
    return ResearchConfig.model_validate({**values, "research": research})


def tiny(corpus: Path, width: int, layers: int, seed: int = 0) -> dict[str, Any]:
    """Return the name, seed, model and data of a run that trains in a second."""
    return {
        "name": "t",
        "seed": seed,
        "model": {"width": width, "heads": 2, "feed_forward": width * 3 // 2, "layers": layers},
        "data": {
            "corpus": str(corpus),
            "sequence_length": width,
            "validation_share": 0.2,
            "validation_sequences": width // 4,
        },
    }
