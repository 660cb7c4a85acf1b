"""YAML file with the line of each key; its errors have one line: file, line, key, found, expected."""

from __future__ import annotations

import difflib
import io
import re
from collections.abc import Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from ruamel.yaml import YAML

from hetero_pp.config.changes import read_changes
from hetero_pp.config.folder import RunFolder
from hetero_pp.config.overrides import Entry, Given, Key, Override, in_order, put_changes, require_named, sibling_keys
from hetero_pp.config.run_config import RunConfig
from hetero_pp.config.spec import RunSpec
from hetero_pp.core.bounded import read_bounded
from hetero_pp.core.errors import ConfigError, dotted
from hetero_pp.core.files import write_whole
from hetero_pp.core.yaml_reader import YAML_BYTES_MAX, line_in, parse_yaml, yaml_complaint
from hetero_pp.data.tokenizers import load_tokenizer
from hetero_pp.hugging_face.config_json import read_architecture
from hetero_pp.model.transformer import PRESETS, ModelShape


class YamlLines:
    """Content of a YAML file (`root`), which knows the line of each key.

    Raises ConfigError if it cannot be read, is not YAML, or has no keys and values at its top.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.data = read_bounded(path, YAML_BYTES_MAX)  # once, because it may be a stream
            root = parse_yaml(self.data)
        except (OSError, ValueError) as error:
            raise ConfigError((), yaml_complaint(path, error)) from None
        if not isinstance(root, dict):
            raise ConfigError((), f"{path}:1: found no keys and values at the top, expected at least `name: NAME`")
        self.root: dict[Any, Any] = root

    def located(self, error: ConfigError, model: type[BaseModel] = RunConfig) -> ConfigError:
        """Return the error with file and line in front; `model` describes the file."""
        key, line = self.find(error.key, model)
        where = f"{self.path}:{line}: " + (f"{dotted(key)}: " if key else "")
        return ConfigError((), where + self.as_entries(error.message))

    def as_entries(self, message: str) -> str:
        """Return the message with hints for groups of `count` replaced by hints for their common entry.

        The file has no entry `home-1`: `--set replicas.home-1.batch_size=4` becomes `--set replicas.home.batch_size=4`.
        """
        replicas = self.root.get("replicas")
        for entry in replicas if isinstance(replicas, list) else ():
            if isinstance(entry, Mapping) and entry.get("count") is not None:
                name = str(entry.get("name", ""))
                message = re.sub(rf"--set replicas\.{re.escape(name)}-\d+\.", f"--set replicas.{name}.", message)
        return message

    def find(self, key: Sequence[str | int], model: type[BaseModel] = RunConfig) -> tuple[Key, int]:
        """Return the key as far as the file has it (and one step further), and its line."""
        node: Any = self.root
        found: list[str | int] = []
        line = 1
        for position, part in enumerate(key):
            in_list = isinstance(node, list) and isinstance(part, int) and part < len(node)
            if in_list or (isinstance(node, dict) and part in node):
                line = line_in(node, part, line)
                node = node[part]
            else:
                known = sibling_keys(key[: position + 1], model)
                if part not in known and (known or not isinstance(node, dict)):  # others are kinds of a union
                    continue
            found.append(part)
        return tuple(found), line


def complaint(error: ValidationError, model: type[BaseModel] = RunConfig) -> ConfigError:
    """Return the error to show: among several about alternatives of one value, the most specific."""
    details = error.errors(include_url=False)
    first = details[0]["loc"]
    section = first[:-1][:2]
    related = [detail for detail in details if detail["loc"][: len(section)] == section]
    detail = max(related, key=lambda one: (one["type"] == "extra_forbidden", len(one["loc"])))
    return ConfigError(detail["loc"], _explain(detail, model))


_KIND = " (one whole model; homes that hold one together)"
_ONLY_IN_ROWS = ("missed", "deaths", "averages_moments", "taking_part", "pretraining", "clusters", "memory_drops")
"""Keys that a run's YAML cannot have, but a row of a table, in its cells; beside `research` and `ablations`."""


_BOUNDS = {
    "greater_than": "more than",
    "greater_than_equal": "at least",
    "less_than": "less than",
    "less_than_equal": "at most",
}
_KINDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "string": "text",
    "list": "a list",
    "tuple": "a list",
    "dict": "keys and values",
    "model": "keys and values",
}
"""Expected value by the first word of a pydantic error type."""


def _explain(detail: Any, model: type[BaseModel]) -> str:
    kind, message, key = detail["type"], detail["msg"], detail["loc"]
    if kind == "extra_forbidden":
        if key[-1] in (*_ONLY_IN_ROWS, "research", "ablations"):
            cell = "cells such as `research.missed`" if key[-1] == "research" else f"the cell `research.{key[-1]}`"
            where = f"{'`ablations`' if key[-1] == 'ablations' else cell} of a table's row"
            return f"found a key that only `hetero-pp reproduce` reads, expected it in {where} (docs/experiments.md)"
        known = sibling_keys(key, model)
        close = difflib.get_close_matches(str(key[-1]), known, n=1)
        hint = f"; did you mean `{close[0]}`?" if close else ""
        return f"found an unknown key, expected one of {', '.join(known)}{hint}"
    if kind == "missing":
        return "found nothing, expected a value"
    if kind == "value_error":
        return message.removeprefix("Value error, ")
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        context = detail["ctx"]
        name = context["discriminator"].strip("'")
        if kind == "union_tag_not_found":
            return f"found no `{name}`, expected `{name}: datacenter` or `{name}: participants`"
        return (
            f"found `{name}: {context['tag']}`, expected one of {context['expected_tags'].replace(chr(39), '`')}{_KIND}"
        )
    match detail["input"]:
        case Mapping() as mapping:
            shown = f"the keys {', '.join(map(str, mapping))}" if mapping else "an empty mapping"
        case bool() as flag:
            shown = f"`{str(flag).lower()}`"
        case None:
            shown = "nothing"
        case list():
            shown = "a list"
        case str() | int() | float() as value:
            shown = f"`{value}`"
        case other:
            shown = f"a {type(other).__name__}"
    first, _, rest = kind.partition("_")
    told = message.removeprefix("Input should be ")
    expected = told[:1].lower() + told[1:]
    if kind in _BOUNDS:
        [limit] = detail["ctx"].values()
        expected = f"{_BOUNDS[kind]} {limit:g}"
    elif kind == "literal_error":
        expected = f"one of {str(detail['ctx']['expected']).replace(' or ', ', ').replace(chr(39), '`')}"
    elif first in _KINDS and rest in ("type", "parsing", "from_float", "attributes_type"):
        expected = _KINDS[first]
    return f"found {shown}, expected {expected}"


# Read and write a run's YAML. Every error names file, line and key in one line.


_OF_A_RUN = ("log", "state", "metrics.jsonl")  # files beside the config.yaml of a run


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
        self._applied: list[Override] = []
        added = [entry for one in in_order(given) for entry in self._apply(one)]
        for one in in_order(list(Override.of_mapping(changes or {}, path))):
            self._apply(one)
        try:
            self.config = with_weights_described(RunConfig.model_validate(self._lines.root))
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
        config, yaml, text = config.model_copy(update=own), YAML(), io.StringIO()
        yaml.width, yaml.preserve_quotes = 100_000, True
        yaml.indent(mapping=2, sequence=4, offset=2)
        root = yaml.load(self._lines.data)  # with its comments; YamlLines has checked its size and depth
        for override in self._applied:
            override.apply(root)
        put_changes(root, self.config, config)
        yaml.dump(root, text)
        written = RunConfig.model_validate(parse_yaml(text.getvalue()))
        assert written.model_dump() == config.model_dump(), "a change got lost"
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
        # Overrides at the key, below it, or above it.
        near = [(place, one) for place, one in self._set if key and place[: len(key)] == key[: len(place)]]
        exact = [(place, one) for place, one in near if len(place) <= len(key)]
        if not near:
            return self._lines.located(error)
        if not exact:
            try:
                ConfigFile(self.path, kept=self._kept)
            except ConfigError as own:
                if str(own) == str(self._lines.located(error)):  # the file has the same fault without them
                    return own
        place, last = exact[-1] if exact else near[-1]
        said = [last.shown] if exact else dict.fromkeys(one.shown for _, one in near)
        where = "" if place == key and "=" in last.shown else f"{dotted(key)}: "
        return ConfigError((), f"{' '.join(said)}: {where}{self._lines.as_entries(error.message)}")

    def _apply(self, one: Override) -> list[Entry]:
        """Change the file's content; return the entries that are new."""
        places, added = one.apply(self._lines.root)
        self._applied.append(one)
        self._set += [(place, one) for place in places]
        return added


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


# Load the spec of a run from its YAML: the first step of every process and command of a run.


def read_run(folder: RunFolder) -> RunSpec:
    """Return the run in a folder. Raises ConfigError with file and line."""
    file = ConfigFile(folder.config, kept=True)
    try:
        return RunSpec(file.config, needed_vocabulary(file.config), read_changes(folder.changes))
    except ConfigError as error:
        raise file.located(error) from None


def read_trained(folder: RunFolder) -> RunSpec:
    """Return the run in a folder, which has trained something. Raises ConfigError for a rehearsal, too."""
    spec = read_run(folder)
    require_trained(spec.config, folder.path)
    return spec


def require_trained(config: RunConfig, where: object) -> None:
    """Raise ConfigError for a rehearsal."""
    if config.rehearsal is not None:
        raise ConfigError((), f"{where}: found a rehearsal, which trained nothing, expected a run")


def config_of(folder: RunFolder) -> RunConfig:
    """Return the configuration in the folder of a run, or of a rehearsal. Raises ConfigError with file and line."""
    return ConfigFile(folder.config, kept=True).config


def spec_of(file: ConfigFile) -> RunSpec:
    """Return the run of a YAML. Reads only the vocabulary of its tokenizer, not its corpus. Raises ConfigError."""
    config = file.config.with_absolute_paths()
    try:
        config.require_grouped()
        known = None if config.model.vocabulary is not None else load_tokenizer(config.data).vocabulary
        return RunSpec(config, known)
    except ConfigError as error:
        raise file.located(error) from None


def needed_vocabulary(config: RunConfig) -> int | None:
    """Return the vocabulary of the tokenizer; None for a rehearsal that does not need it. Raises ConfigError."""
    if config.rehearsal is not None and config.model.vocabulary is not None:
        return None
    return load_tokenizer(config.data).vocabulary
