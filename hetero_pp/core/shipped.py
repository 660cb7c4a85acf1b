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


def is_config(text: str) -> bool:
    """Return whether a text is the path of a file, or the name of a shipped YAML, such as `quickstart`."""
    name = text.removeprefix("configs/").removesuffix(".yaml")
    return os.path.isfile(text) or os.path.isfile(shipped("configs") / f"{name}.yaml")  # noqa: PTH113 (of any length)


def _installed() -> Path:
    """Return the folder in which a wheel has the data files. The repository has none of this name."""
    return Path(str(files("hetero_pp"))) / "shipped"
