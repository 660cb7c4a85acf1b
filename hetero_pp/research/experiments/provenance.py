"""Machine and commit on which the rows of a table were trained; outcomes carry them wherever the table is written."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from hetero_pp.core.shipped import is_installed, shipped
from hetero_pp.research.experiments.outcomes import Outcomes

CHECKOUT = shipped(".")
PACKAGES = ("hetero_pp", "stages", "replica_groups")
"""Packages that determine a row's outcome. Tests, documents and results do not affect it."""

Trained = Mapping[str, Any]
"""`machine` and `commit` (None if not recorded), and `rows`: the seeds of each row that were trained there."""


def trained_by(outcomes: Outcomes, earlier: Sequence[Trained]) -> Sequence[Trained]:
    """Return one entry for each machine and commit on which the rows were trained.

    Outcomes from before machines were recorded take their entry from the `earlier` table.
    """
    found: list[dict[str, Any]] = []
    for row, seeds in outcomes.items():
        for seed in sorted(seeds):
            by = {name: seeds[seed].get(name) for name in ("machine", "commit")}
            if by["machine"] is None:
                by = next(_said_of(row, seed, earlier), by)
            entry = next((one for one in found if by.items() <= one.items()), None)
            if entry is None:
                entry = {**by, "rows": {}}
                found.append(entry)
            entry["rows"].setdefault(row, []).append(seed)
    return found


def _said_of(row: str, seed: int, earlier: Sequence[Trained]) -> Iterator[dict[str, Any]]:
    for entry in earlier:
        if seed in entry["rows"].get(row, []):
            yield {name: entry[name] for name in ("machine", "commit")}


def describe(entry: Trained) -> str:
    """Return `AMD EPYC, 2 cores, Python 3.11.7, torch 2.13.0+cpu, at 3c88633`."""
    machine, commit = entry["machine"], entry["commit"]
    if machine is None:
        return "a machine and a commit that were not recorded"
    gpu = [machine["gpu"]] if machine["gpu"] else []
    versions = f"Python {machine['python']}", f"torch {machine['torch']}"
    return ", ".join([machine["processor"], f"{machine['cores']} cores", *gpu, *versions, f"at {commit}"])


def machine() -> dict[str, Any]:
    import torch

    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def commit(checkout: Path = CHECKOUT) -> str:
    """Return the commit, with a note if files of the packages differ from it; `unknown` outside a repository.

    An installed package has a version in place of a commit. It may lie in another program's repository.
    """
    if checkout == CHECKOUT and is_installed():
        return f"version {version('hetero-pp')}"
    head = _git(checkout, "rev-parse", "--short", "HEAD")
    changed = head and _git(checkout, "--no-optional-locks", "status", "--porcelain", "--", *PACKAGES)
    return f"{head or 'unknown'}{' with changes' if changed else ''}"


def _git(checkout: Path, *arguments: str) -> str:
    """Return git's output; an empty string if git fails or is not installed."""
    command = ["git", *arguments]
    try:
        return subprocess.run(command, cwd=checkout, capture_output=True, text=True, encoding="utf-8").stdout.strip()
    except FileNotFoundError:
        return ""
