"""Lay out the wheel: everything goes below `hetero_pp`, the only name that the wheel adds to site-packages.

`stages` and `replica_groups` are words that other packages may use. The wheel holds them as `hetero_pp.stages` and
`hetero_pp.replica_groups`, and this file changes the imports of the copied code. An editable install has the
repository's own layout. `hetero_pp/core/shipped.py` finds the data files of both layouts.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

MOVED = ("stages", "replica_groups")
"""Packages of the repository's top level that the wheel holds below `hetero_pp`."""
SHIPPED = ("configs/**/*.yaml", "configs/**/*.json", "configs/**/*.md", "benchmarks/results/*/rows.jsonl")
"""Data files that commands read."""
TABLES = "benchmarks/results/*/*/*.json"
"""Tables whose rows are in a `rows.jsonl`; `reproduce --list` reads their verdicts."""

_NAMES = "|".join(MOVED)
_FROM = re.compile(rf"^(\s*from )({_NAMES})(?=[. ])", re.MULTILINE)
_STRING = re.compile(rf'(import_module\(")({_NAMES})(?=\.)')
_BARE = re.compile(rf"^\s*import ({_NAMES})\b", re.MULTILINE)


class Layout(BuildHookInterface):
    """Hook that hatchling calls before and after it builds a wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Copy the files into the wheel's layout, and add them to the wheel. `version` is `standard` or `editable`."""
        if version == "editable":
            return
        self._folder = Path(tempfile.mkdtemp())
        lay_out(Path(self.root), self._folder)
        build_data["force_include"][str(self._folder)] = "/"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove the copies."""
        if version != "editable":
            shutil.rmtree(self._folder)


def lay_out(root: Path, to: Path) -> None:
    """Copy the package and its data files from a repository. Raises ValueError for an import that cannot be moved."""
    package = to / "hetero_pp"
    hidden = shutil.ignore_patterns("__pycache__")
    shutil.copytree(root / "hetero_pp", package, ignore=hidden)
    for name in MOVED:
        shutil.copytree(root / name, package / name, ignore=hidden)
    for path in package.rglob("*.py"):
        path.write_text(moved(path.read_text(encoding="utf-8"), path), encoding="utf-8")
    tables = (path for path in root.glob(TABLES) if (path.parents[1] / "rows.jsonl").exists())
    for path in [*(path for pattern in SHIPPED for path in root.glob(pattern)), *tables]:
        copy = package / "shipped" / path.relative_to(root)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)


def moved(source: str, path: Path) -> str:
    """Return a module's source with the imports of the wheel's layout. Line numbers stay the same.

    Raises ValueError for `import stages`, which would bind another name.
    """
    if bare := _BARE.search(source):
        raise ValueError(f"{path}: found `{bare[0].strip()}`, expected `from {bare[1]} import NAME`")
    return _STRING.sub(r"\1hetero_pp.\2", _FROM.sub(r"\1hetero_pp.\2", source))
