"""Find the files that come with the program, such as `configs/quickstart.yaml`."""

from __future__ import annotations

import os
from importlib.resources import files
from pathlib import Path


def is_installed() -> bool:
    """Return whether the program runs from a wheel, and not from the repository."""
    return _installed().is_dir()


def shipped(path: str) -> Path:
    """Return a file or folder that the program ships, by its path in the repository."""
    return (_installed() if is_installed() else _installed().parents[1]) / path


def shipped_yaml(path: Path) -> Path | None:
    """Return the shipped YAML that a path names: `quickstart`, `paper/1b` or `configs/quickstart.yaml`; else None.

    A file of the user comes first.
    """
    inside = path if path.suffix == "" else path.relative_to("configs") if path.is_relative_to("configs") else None
    if inside is None or os.path.exists(path) or inside.with_suffix("").as_posix() not in shipped_names():  # noqa: PTH110 (it answers for names that are too long, too)
        return None
    return shipped("configs") / inside.with_suffix(".yaml")


def shipped_names() -> list[str]:
    """Return the names of all shipped YAMLs."""
    configs = shipped("configs")
    return [one.relative_to(configs).with_suffix("").as_posix() for one in sorted(configs.rglob("*.yaml"))]


def shipped_runs() -> str:
    """Return the names of the shipped YAMLs of runs, for messages."""
    return ", ".join(name for name in shipped_names() if not name.startswith("experiments/"))


def is_config(text: str) -> bool:
    """Return whether a text is the path of a file, or the name of a shipped YAML, such as `quickstart`."""
    name = text.removeprefix("configs/").removesuffix(".yaml")
    return os.path.isfile(text) or os.path.isfile(shipped("configs") / f"{name}.yaml")  # noqa: PTH113 (of any length)


def _installed() -> Path:
    """Return the folder in which a wheel has the data files. The repository has none of this name."""
    return Path(str(files("hetero_pp"))) / "shipped"
