"""Reading and writing a run's YAML; every complaint about it names file, line and key in one line."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq

from hetero_pp.errors import ConfigError
from hetero_pp.files import whole
from hetero_pp.run.changes import METHOD, change, require_named
from hetero_pp.run.config import RunConfig
from hetero_pp.run.described_weights import with_weights_described
from hetero_pp.run.yaml_lines import Key, YamlLines, complaint


class ConfigFile:
    """A YAML file that holds a RunConfig, and where each key stands in it."""

    def __init__(self, path: Path, overrides: Sequence[str] = (), changes: Mapping[str, Any] | None = None) -> None:
        """`overrides` are texts such as `outer.rounds=20`, `changes` the same as mappings: {"outer": {"rounds": 20}}.

        Raises ConfigError with file, line and key.
        """
        self.path = path
        self.given = [tuple(text.partition("=")[0].strip().split(".")) for text in overrides]
        """Keys that were set beside the file."""
        self._lines = YamlLines(path)
        first = sorted(overrides, key=lambda text: text.partition("=")[0].strip().split(".") != METHOD)
        added = [entry for text in first if (entry := change(self._lines.root, text, path)) is not None]
        self._merge(self._lines.root, changes or {}, ())
        try:
            self.config = with_weights_described(RunConfig.model_validate(self._lines.plain()))
            self.config.check()
            require_named(self.config, added)
        except ValidationError as error:
            raise self.located(complaint(error)) from None
        except ConfigError as error:
            raise self.located(error) from None

    def located(self, error: ConfigError) -> ConfigError:
        """The same complaint, with file and line in front."""
        return self._lines.located(error)

    def _merge(self, node: Any, change: Any, key: Key) -> Any:
        """What stands at a key, changed: of a mapping the entries that are named, of a list those whose numbers are."""
        if isinstance(change, os.PathLike):
            return os.fspath(change)
        if not isinstance(change, Mapping):
            return change
        if not isinstance(node, CommentedMap | CommentedSeq):
            node = CommentedMap()
        for part, value in change.items():
            if isinstance(node, CommentedSeq) and part not in range(len(node)):
                expected = f"expected a list, or changes of entries 0 to {len(node) - 1}"
                raise self.located(ConfigError(key, f"found {part!r}, {expected}"))
            has = isinstance(node, CommentedSeq) or part in node
            node[part] = self._merge(node[part] if has else None, value, (*key, part))
        return node


def save_config(config: RunConfig, path: Path, comments: Sequence[str] = ()) -> None:
    """Write the resolved configuration, below lines of comments; loading it gives an equal one."""
    yaml = YAML()
    yaml.default_flow_style = False
    with whole(path) as part, part.open("w") as file:
        file.writelines(f"# {line}\n" for line in comments)
        yaml.dump(config.model_dump(mode="json"), file)
