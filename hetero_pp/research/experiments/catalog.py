"""Experiments and scales of a folder; a file that cannot be used is reported, and the others stay usable."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from hetero_pp.core.errors import ConfigError
from hetero_pp.core.shipped import shipped
from hetero_pp.research.experiments.definition import Experiment, Scale, is_a_name
from hetero_pp.run.yaml_lines import YamlLines, complaint

SHIPPED_SCALES = shipped("configs/experiments/scales")

Kind = TypeVar("Kind", Scale, Experiment)


class Catalog:
    """Experiments and scales that the YAML files of a folder and of its direct subfolders define.

    A file with the key `base`, or in a folder `scales`, is a scale; any other file is an experiment. Shipped scales are
    added if the folder has none of that name, with the recipes of single papers in `scales/NAME/`. `broken` maps the
    names of unusable experiments to their errors.

    Raises ConfigError if there is no such folder.
    """

    def __init__(self, folder: Path, scales: Path = SHIPPED_SCALES) -> None:
        if not folder.is_dir():
            raise ConfigError((), f"{folder}: found no folder, expected a folder with experiments")
        self.folder = folder
        self.scales: dict[str, Scale] = {}
        self.experiments: dict[str, Experiment] = {}
        self.broken: dict[str, ConfigError] = {}
        self._broken_scales: dict[str, ConfigError] = {}
        for path in sorted([*folder.glob("*.yaml"), *folder.glob("*/*.yaml"), *folder.glob("scales/*/*.yaml")]):
            self._add(path, path.relative_to(folder).with_suffix("").as_posix())
        own = {*self.scales, *self._broken_scales}
        for path in sorted(scales.glob("**/*.yaml")):
            called = path.relative_to(scales).with_suffix("").as_posix()
            if not own & {called, called.partition("/")[0]}:
                self._add(path, called)
        unknown = {name: error for name, one in self.experiments.items() if (error := self._unknown_reason(one))}
        self.experiments = {name: one for name, one in self.experiments.items() if name not in unknown}
        self.broken |= unknown

    def _unknown_reason(self, experiment: Experiment) -> ConfigError | None:
        """Return the error of a claim whose `shown_by` names a table or a row that does not exist."""
        known = {row.name for row in experiment.rows}
        for index, claim in enumerate(experiment.claims):
            for shown in claim.shown_by:
                table, _, row = shown.partition(" | ")
                other = self.experiments.get(table)
                rows = [] if other is None else [one.name for one in other.rows]
                if shown not in known and (other is None or (row and row not in rows)):
                    found = f"found `{shown}`, expected a row of this table, the name of a table, or `TABLE | ROW`"
                    return experiment.located(ConfigError(("claims", index, "shown_by"), found))
        return None

    def scale(self, name: str) -> Scale:
        """Return a scale by name. Raises ConfigError: the error of its file, or a list of the known names."""
        return _find(name, self.scales, self._broken_scales, "scale")

    def scale_of(self, experiment: Experiment, name: str) -> Scale:
        """Return an experiment's scale by name: its paper's recipe if there is one. Raises ConfigError.

        An experiment cannot have another paper's recipe.
        """
        recipe = f"{name}/{experiment.folder}"
        scale = self.scale(recipe if recipe in {*self.scales, *self._broken_scales} else name)
        if scale.experiments not in (None, experiment.folder):
            found = f"found the experiment `{experiment.name}`, expected one in the folder `{scale.experiments}`"
            raise scale.located(ConfigError(("experiments",), f"{found}: this is the recipe of another paper"))
        return scale

    def experiment(self, name: str) -> Experiment:
        """Return an experiment by name. Raises ConfigError: the error of its file, or a list of the known names."""
        return _find(name, self.experiments, self.broken, "experiment")

    def _add(self, path: Path, called: str) -> None:
        """Add the scale or experiment of a file; a broken file without a usable name is recorded under `called`."""
        content: Any = {}
        try:
            lines = YamlLines(path)
            content = lines.plain()
            if _is_scale(path, content):
                _define(Scale, content, lines, self.scales)
            else:
                _define(Experiment, content, lines, self.experiments)
        except ConfigError as error:
            said = str(content.get("name", called))
            if _is_scale(path, content):
                self._broken_scales[f"{said}/{content['experiments']}" if "experiments" in content else said] = error
            else:
                self.broken[said if is_a_name(said) and said not in self.experiments else called] = error


def _is_scale(path: Path, content: Mapping[str, Any]) -> bool:
    return path.parent.name == "scales" or "base" in content


def _define(kind: type[Kind], content: Any, lines: YamlLines, known: dict[str, Kind]) -> None:
    """Add the definition in a file. Raises ConfigError with file, line and key."""
    try:
        defined = kind.model_validate(content)
    except ValidationError as error:
        raise lines.located(complaint(error, kind), kind) from None
    key = defined.key if isinstance(defined, Scale) else defined.name
    if key in known:
        message = f"found `{key}`, which is the name of another file, expected a unique name"
        raise lines.located(ConfigError(("name",), message), kind)
    defined.read_from(lines.path)
    known[key] = defined


def _find(name: str, known: Mapping[str, Kind], broken: Mapping[str, ConfigError], what: str) -> Kind:
    if name in known:
        return known[name]
    if name in broken:
        raise broken[name]
    raise ConfigError((), f"found no {what} `{name}`, expected one of {', '.join(sorted({*known, *broken}))}")
