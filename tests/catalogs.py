"""Shipped tables and scales, read once for all tests, because reading them takes as long as importing PyTorch."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from ruamel.yaml.comments import CommentedMap

from hetero_pp.data.settings import DataSettings
from hetero_pp.research.experiments import catalog, listing, supply
from hetero_pp.run.config import RunConfig
from hetero_pp.run.spec import RunSpec
from hetero_pp.run.yaml_lines import YamlLines

_parsed: dict[bytes, CommentedMap] = {}


class ReadOnce(YamlLines):
    """Parses each content once, for readers that do not change it."""

    def _parse(self) -> CommentedMap:
        content = self.path.read_bytes()
        if content not in _parsed:
            _parsed[content] = super()._parse()
        return _parsed[content]


def read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let catalogs of this test parse no content that this process has parsed before."""
    monkeypatch.setattr(catalog, "YamlLines", ReadOnce)


def compute_once(monkeypatch: pytest.MonkeyPatch, *functions: tuple[ModuleType, str]) -> None:
    """Call these functions of a configuration or of data once for equal arguments in this test."""
    known: dict[str, Any] = {}

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
    """Let `reproduce` parse shipped tables once, and estimate each corpus and each contribution once in this test."""
    read_once(monkeypatch)
    compute_once(monkeypatch, (listing, "contribution_bytes"), (supply, "estimate_tokens"))


with pytest.MonkeyPatch.context() as patch:
    read_once(patch)
    SHIPPED = catalog.Catalog(Path(__file__).parents[1] / "configs" / "experiments")
