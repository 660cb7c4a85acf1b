"""Reading and writing the YAML; every complaint about it names file, line and key in one line."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from hetero_pp.errors import ConfigError, dotted
from hetero_pp.files import whole
from hetero_pp.run.changes import change, require_named
from hetero_pp.run.config import RunConfig
from hetero_pp.run.described_weights import with_weights_described
from hetero_pp.run.known_keys import keys_beside

Key = tuple[str | int, ...]


class ConfigFile:
    """A YAML file that holds a RunConfig, and where each key stands in it."""

    def __init__(self, path: Path, overrides: Sequence[str] = (), changes: Mapping[str, Any] | None = None) -> None:
        """`overrides` are texts such as `outer.rounds=20`, `changes` the same as mappings: {"outer": {"rounds": 20}}.

        Raises ConfigError with file, line and key.
        """
        self.path = path
        self.given = [tuple(text.partition("=")[0].strip().split(".")) for text in overrides]
        """Keys that were set beside the file."""
        self._root = self._parse()
        added = [entry for text in overrides if (entry := change(self._root, text, path)) is not None]
        self._merge(self._root, changes or {}, ())
        try:
            self.config = with_weights_described(RunConfig.model_validate(_plain(self._root)))
            self.config.check()
            require_named(self.config, added)
        except ValidationError as error:
            key, message = _worst(error)
            raise self.located(ConfigError(key, message)) from None
        except ConfigError as error:
            raise self.located(error) from None

    def located(self, error: ConfigError) -> ConfigError:
        """The same complaint, with file and line in front."""
        key, line = self._find(error.key)
        return ConfigError((), f"{self.path}:{line}: {dotted(key)}: {error.message}")

    def _parse(self) -> CommentedMap:
        try:
            root = YAML(typ="rt").load(self.path)
        except OSError as error:
            raise ConfigError((), f"{self.path}: cannot be read ({error.strerror})") from None
        except MarkedYAMLError as error:
            line = error.problem_mark.line + 1 if error.problem_mark else 1
            raise ConfigError((), f"{self.path}:{line}: not YAML: {error.problem}") from None
        except (YAMLError, UnicodeDecodeError) as error:
            raise ConfigError((), f"{self.path}: not YAML: {str(error).splitlines()[0]}") from None
        if not isinstance(root, CommentedMap):
            raise ConfigError((), f"{self.path}:1: expected keys and values at the top")
        return root

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

    def _find(self, key: Sequence[str | int]) -> tuple[Key, int]:
        """The key as far as the file has it (and one step further), and the line it stands on."""
        node: Any = self._root
        found: list[str | int] = []
        line = 1
        for position, part in enumerate(key):
            in_list = isinstance(node, CommentedSeq) and isinstance(part, int) and part < len(node)
            if in_list or (isinstance(node, CommentedMap) and part in node):
                line = _line(node.lc, part, line)
            else:
                if part in keys_beside(key[: position + 1]):  # else it says which of several kinds a section is
                    found.append(part)
                continue
            found.append(part)
            node = node[part]
        return tuple(found), line


def _line(position: Any, part: str | int, otherwise: int) -> int:
    """Where an entry of a mapping or a list stands; entries set from the command line stand nowhere."""
    data = position.data or {}
    return data[part][0] + 1 if part in data else otherwise


def save_config(config: RunConfig, path: Path, comments: Sequence[str] = ()) -> None:
    """Write the resolved configuration, below lines of comments; loading it gives an equal one."""
    yaml = YAML()
    yaml.default_flow_style = False
    with whole(path) as part, part.open("w") as file:
        file.writelines(f"# {line}\n" for line in comments)
        yaml.dump(config.model_dump(mode="json"), file)


def _plain(node: Any) -> Any:
    if isinstance(node, CommentedMap):
        return {key: _plain(value) for key, value in node.items()}
    if isinstance(node, CommentedSeq):
        return [_plain(value) for value in node]
    return node


def _worst(error: ValidationError) -> tuple[Key, str]:
    """The complaint to show: of several about the alternatives of one value, the most specific."""
    details = error.errors(include_url=False)
    first = details[0]["loc"]
    section = first[:-1][:2]
    related = [detail for detail in details if detail["loc"][: len(section)] == section]
    detail = max(related, key=lambda one: (one["type"] == "extra_forbidden", len(one["loc"])))
    return tuple(detail["loc"]), _explain(detail)


def _explain(detail: Any) -> str:
    kind, message, key = detail["type"], detail["msg"], detail["loc"]
    if kind == "extra_forbidden":
        known = keys_beside(key)
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
            return f"found no `{name}`, expected one of 'datacenter', 'participants'"
        return f"found `{name}: {context['tag']}`, expected one of {context['expected_tags']}"
    found = detail["input"]
    shown = f"`{found}`" if isinstance(found, str | int | float) else f"a {type(found).__name__}"
    expected = message.removeprefix("Input should be ")
    return f"found {shown}, expected {expected[:1].lower()}{expected[1:]}"
