"""Whether a configuration goes on with the run in a folder: what may change while it does, and what may not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from hetero_pp.errors import ConfigError, dotted
from hetero_pp.run.config import RunConfig
from hetero_pp.run.folder import RunFolder
from hetero_pp.run.yaml_file import ConfigFile
from hetero_pp.settings import NotPartOf, meaning


def require_same_run(config: RunConfig, folder: RunFolder) -> None:
    """Raise ConfigError if there is no run in the folder, or one that this configuration cannot go on with."""
    path = folder.config
    if not path.is_file():
        raise ConfigError((), f"--resume: found no run in {folder.path}")
    before = ConfigFile(path).config
    agreed = [meaning(one, NotPartOf.RUN) for one in (before, config)]
    weights = [{"model": {"weights": one.model.weights}} for one in (before, config)]
    for old, new in (agreed, weights):
        for key, was, now in _differences(old, new):
            shown = f"found {json.dumps(now)}, expected {json.dumps(was)} as in {path}"
            raise ConfigError((), f"--resume: {dotted(key)}: {shown}: it may not change while a run goes on")


def _differences(
    old: Any, new: Any, key: tuple[str | int, ...] = ()
) -> Iterator[tuple[tuple[str | int, ...], Any, Any]]:
    """(key, what it was, what it is) of every value that differs."""
    if isinstance(old, dict) and isinstance(new, dict):
        for name in sorted({*old, *new}):
            yield from _differences(old.get(name), new.get(name), (*key, name))
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for index, (was, now) in enumerate(zip(old, new, strict=True)):
            yield from _differences(was, now, (*key, index))
    elif old != new:
        yield key, old, new
