"""Read and write a run's YAML. Every error names file, line and key in one line."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from copy import copy, deepcopy
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from ruamel.yaml import YAML

from hetero_pp.core.errors import ConfigError, dotted
from hetero_pp.core.files import write_whole
from hetero_pp.hugging_face.config_json import read_architecture
from hetero_pp.model.transformer import PRESETS, ModelShape
from hetero_pp.run.changes import Entry, Given, Override, in_order, put_changes, require_named
from hetero_pp.run.config import RunConfig
from hetero_pp.run.known_keys import Key
from hetero_pp.run.yaml_lines import YamlLines, complaint, plain

_OF_A_RUN = ("log", "state", "metrics.jsonl")
"""Files beside the config.yaml of a run."""


_NOT_A_RUN = (
    "found the mark of a rehearsal, expected the YAML of a run; `hetero-pp rehearse YAML` rehearses one, and nothing "
    "resumes or repeats a rehearsal"
)


class ConfigFile:
    """YAML file with a RunConfig, and the line of each key."""

    def __init__(
        self, path: Path, overrides: Sequence[Given] = (), changes: Mapping[str, Any] | None = None, kept: bool = False
    ) -> None:
        """Load a file and apply changes.

        `overrides` are values of `--set` such as `outer.rounds=20`, or of other options. `changes` are the same as
        mappings: {"outer": {"rounds": 20}}. `kept`: this program wrote the file into the folder of a run, so it may
        be the file of a rehearsal.

        Raises ConfigError with file, line and key, or with the override that is at fault.
        """
        self.path, self._kept = path, kept
        try:
            self._lines = YamlLines(path)
        except ConfigError as error:
            raise self._of_this_file(error) from None
        given = [Override.parse(one) if isinstance(one, str) else one for one in overrides]
        self._set: list[tuple[Key, Override]] = []
        added = [entry for one in in_order(given) for entry in self._apply(one)]
        for one in in_order(list(Override.of_mapping(changes or {}, path))):
            self._apply(one)
        try:
            self.config = with_weights_described(RunConfig.model_validate(self._lines.plain()))
            self.config.check()
            require_named(self.config, added)
        except ValidationError as error:
            raise self._of_this_file(self.located(complaint(error))) from None
        except ConfigError as error:
            raise self._of_this_file(self.located(error)) from None
        if self.config.rehearsal is not None and not kept:
            raise self.located(ConfigError(("rehearsal",), _NOT_A_RUN))

    def as_rehearsal(self, rounds: int, steps: int) -> ConfigFile:
        """Return the file of this run's rehearsal (RunConfig.as_rehearsal). Its errors name the lines of this file."""
        found = copy(self)
        try:
            found.config = self.config.as_rehearsal(rounds, steps)
        except ConfigError as error:
            raise self.located(error) from None
        return found

    def with_config(self, config: RunConfig, comments: Sequence[str]) -> str:
        """Return this file's YAML with what `config` changes, in units as people write them, below comment lines.

        Its own comments and order stay. Paths are those of the file.
        """
        own = {name: getattr(self.config, name) for name in ("data", "model", "store")}
        config, root = config.model_copy(update=own), deepcopy(self._lines.root)
        put_changes(root, self.config, config)
        assert RunConfig.model_validate(plain(root)).model_dump() == config.model_dump(), "a change got lost"
        yaml, text = YAML(), io.StringIO()
        yaml.width, yaml.preserve_quotes = 100_000, True
        yaml.indent(mapping=2, sequence=4, offset=2)
        yaml.dump(root, text)
        return "".join(f"# {line}\n" for line in comments) + text.getvalue()

    def _of_this_file(self, error: ConfigError) -> ConfigError:
        """Extend an error about a run's own config file with what to do about it."""
        folder = self.path.parent
        is_kept = self.path.stem.startswith("config") and any((folder / name).exists() for name in _OF_A_RUN)
        if not is_kept or not str(error).startswith(str(self.path)):
            return error
        why = "hetero-pp wrote this file at the start of the run, and it has been truncated or edited since"
        return ConfigError((), f"{error}; {why}: restore it from a copy. If another version wrote it, use that version")

    @property
    def given(self) -> list[Key]:
        """Keys that were overridden."""
        return [place for place, _ in self._set]

    def located(self, error: ConfigError) -> ConfigError:
        """Return the error with file and line in front, or with the override that it is about."""
        key, _ = self._lines.find(error.key)
        near = [(place, one) for place, one in self._set if key and _overlap(place, key)]
        exact = [(place, one) for place, one in near if len(place) <= len(key)]
        if not near or (not exact and self._is_wrong_itself(error)):
            return self._lines.located(error)
        place, last = exact[-1] if exact else near[-1]
        said = [last.shown] if exact else dict.fromkeys(one.shown for _, one in near)
        where = "" if place == key and "=" in last.shown else f"{dotted(key)}: "
        return ConfigError((), f"{' '.join(said)}: {where}{self._lines.as_entries(error.message)}")

    def _apply(self, one: Override) -> list[Entry]:
        """Change the file's content; return the entries that are new."""
        places, added = one.apply(self._lines.root)
        self._set += [(place, one) for place in places]
        return added

    def _is_wrong_itself(self, error: ConfigError) -> bool:
        """Return whether the file has the same fault without the overrides."""
        try:
            ConfigFile(self.path, kept=self._kept)
        except ConfigError as own:
            return str(own) == str(self._lines.located(error))
        return False


def _overlap(one: Key, other: Key) -> bool:
    """Return whether one key is at or below the other."""
    length = min(len(one), len(other))
    return one[:length] == other[:length]


def save_config(config: RunConfig, path: Path) -> None:
    """Write the resolved configuration; loading it gives an equal one."""
    write_whole(path, config_text(config).encode())


def config_text(config: RunConfig) -> str:
    """Return the resolved configuration as YAML."""
    yaml, text = YAML(), io.StringIO()
    yaml.default_flow_style = False
    yaml.dump(config.model_dump(mode="json"), text)
    return text.getvalue()


def with_weights_described(config: RunConfig) -> RunConfig:
    """Return the configuration with the model's shape and tokenizer from the folder of `model.weights`, if set.

    A configuration that gives all of them, such as the one in a run's folder, is not changed. Nothing is read then,
    because members may run where the checkpoint is not. Raises ConfigError if the folder has no LLaMA.
    """
    if config.model.weights is None:
        return config
    folder, model = Path(config.model.weights).expanduser(), config.model
    given = {name for name in model.model_fields_set if getattr(model, name) is not None}
    given |= set(PRESETS[model.preset]) if "preset" in given else set()
    changes: dict[str, Any] = {}
    needed = {name for name, field in ModelShape.model_fields.items() if field.default is not None}
    if needed - given:
        changes["model"] = model.filled_from(read_architecture(folder).shape)
    if "tokenizer" not in config.data.model_fields_set and (folder / "tokenizer.json").is_file():
        changes["data"] = config.data.model_copy(update={"tokenizer": str(folder)})
    return config.model_copy(update=changes)
