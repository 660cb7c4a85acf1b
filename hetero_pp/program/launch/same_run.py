"""Decides whether a configuration can resume the run in a folder, and which keys may change."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from hetero_pp.config.changes import (
    REPLICAS,
    Agreement,
    Changes,
    changed_entries,
    differences,
    read_changes,
    replicas_of,
    shown,
    values_of,
    wanted_replicas,
    with_values,
)
from hetero_pp.config.folder import RunFolder
from hetero_pp.config.overrides import Key
from hetero_pp.config.run_config import RunConfig
from hetero_pp.config.yaml_file import config_of, require_trained
from hetero_pp.core.errors import ConfigError, dotted
from hetero_pp.core.settings import NotPartOf, meaning


def require_same_run(config: RunConfig, given: Sequence[Key], folder: RunFolder) -> Agreement:
    """Return the agreement between a configuration and the run in a folder.

    It has the run's first configuration with this host's replicas, the changes so far, and the changes that are wanted
    now. `given`: keys given beside the YAML. Raises ConfigError if the folder has no run, or one that this
    configuration cannot resume.
    """
    path = folder.config
    if not path.is_file():
        raise ConfigError((), f"--resume: found no run in {folder.path}; leave out --resume to start one")
    changes = read_changes(folder.changes).settled()
    before = changes.at(config_of(folder), 1)
    require_trained(before, f"--resume: {folder.path}")
    began, had = values_of(before), changes.had(REPLICAS, replicas_of(before))
    now, was = (_without_replicas(one) for one in (config, before))
    refused = [
        shown(("model", *key) if key == ("weights",) else key, found, expected)
        for key, found, expected in [*differences(now, was), *changed_entries(config, had)]
        if dotted(key) not in began
    ]
    if refused:
        told = "these keys cannot change when a run is resumed"
        raise ConfigError((), f"--resume: {'; '.join(refused)}, as in {path}: {told}")
    wanted = _wanted(config, given, before, changes)
    if (replicas := wanted_replicas(config, had[-1])) != had[-1]:
        wanted |= {REPLICAS: replicas}
        changes = Changes({REPLICAS: {1: replicas_of(before)}, **changes.history})
    return Agreement(with_values(config, began | {REPLICAS: replicas}), changes, wanted)


def _without_replicas(config: RunConfig) -> dict[str, Any]:
    """Return the keys that must not change, without replicas, which may join and leave."""
    found = meaning(config, NotPartOf.RUN) | {"weights": config.model.weights}
    return {key: value for key, value in found.items() if key != REPLICAS}


def _wanted(config: RunConfig, given: Sequence[Key], first: RunConfig, changes: Changes) -> dict[str, Any]:
    """Return the given keys with other values than the run's current ones.

    The YAML alone changes nothing, because the run may have been started or resumed with other given values.
    """
    began, found = values_of(first), dict[str, Any]()
    for key, value in values_of(config).items():
        is_given = any(tuple(key.split("."))[: len(one)] == tuple(one) for one in given)
        if is_given and value != changes.had(key, began[key])[-1]:
            found[key] = value
    return found


def unheeded(config: RunConfig, agreement: Agreement) -> Iterator[str]:
    """Yield a line for each key that the YAML sets to a value that the run never had. It says how to change the key."""
    began = values_of(agreement.first)
    for key, value in values_of(config).items():
        had = [*agreement.changes.had(key, began[key]), *([agreement.wanted[key]] if key in agreement.wanted else [])]
        if value not in had:
            told = json.dumps(value)
            change = f"to change it, use --set {key}={told}"
            yield f"{key} stays {json.dumps(had[-1])}: a resumed run ignores {told} in the YAML; {change}"
