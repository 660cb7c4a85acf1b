"""Outcomes of trained rows: the file that keeps them, and the machine and commit of their training.

A scale's file has one line for each outcome, sorted, so that diffs and merges are readable. Several processes of one or
several commands may add to it at once.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from filelock import FileLock

from hetero_pp.core.errors import ConfigError
from hetero_pp.core.files import flush, naming, write_whole
from hetero_pp.core.shipped import is_installed, shipped

ROWS = "rows.jsonl"  # file in a scale's folder of results

Outcome = dict[str, Any]
"""Outcome of a row: `row` and `seed` for readers; `key` and the identity that it hashes (`training.identity_of`).

Also the fields of a FastResult, and `machine`, `device` and `commit` of the training (unknown for some older rows).
"""
Outcomes = Mapping[str, Mapping[int, Outcome]]  # outcomes by row and seed

_NEEDED = (
    *("row", "seed", "key", "validation_loss", "diverged", "uncompressed", "compressed", "tokens"),
    "boundary_bytes_per_token",
)


def read_outcomes(path: Path) -> dict[str, Outcome]:
    """Return outcomes by key; an empty dict if there is no such file.

    Raises ConfigError with the line that is damaged or duplicated.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ConfigError((), f"{path}: cannot be read ({error.strerror})") from None
    found: dict[str, Outcome] = {}
    lines: dict[str, int] = {}
    for number, line in enumerate(content.split(b"\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            outcome = json.loads(line)
        except (ValueError, RecursionError):
            shown = line[:40].decode(errors="replace")
            told = f"found `{shown}...`, expected the complete outcome of a row as JSON"
            raise ConfigError((), f"{where}: {told}") from None
        missing = [name for name in _NEEDED if name not in outcome] if isinstance(outcome, dict) else _NEEDED
        if missing:
            raise ConfigError((), f"{where}: found no `{missing[0]}`, expected the outcome of a row")
        key = outcome["key"]
        if key in found:
            told = f"found the row {key} twice, expected it once: line {lines[key]} has it, too; remove one of them"
            raise ConfigError((), f"{where}: {told}")
        found[key], lines[key] = outcome, number
    return found


def add_outcome(path: Path, outcome: Outcome) -> None:
    """Add an outcome as one durable line; keep lines that other processes add, and an existing line with the same key.

    Raises ConfigError if the file is damaged. The outcome is appended even then, because it may have taken hours.
    """
    with alone(path):
        try:
            known = read_outcomes(path)
        except ConfigError:
            # The outcome is appended to the unreadable file; if the disk cannot store it, the file's size is restored.
            size = path.stat().st_size
            try:
                with naming(path), path.open("ab") as file:
                    file.write(b"\n" + _line(outcome))
                flush(path)
            except OSError:
                os.truncate(path, size)
                raise
            raise
        known.setdefault(outcome["key"], outcome)
        ordered = sorted(known.values(), key=lambda one: (one["row"], one["seed"], one["key"]))
        write_whole(path, b"".join(map(_line, ordered)))


def _line(outcome: Outcome) -> bytes:
    return json.dumps(outcome).encode() + b"\n"


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Hold the lock on the file and on the tables made from it, so that no other process changes them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_name(f".{path.name}.lock")):
        yield


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
            source: Mapping[str, Any] = seeds[seed]
            if source.get("machine") is None:
                source = next((entry for entry in earlier if seed in entry["rows"].get(row, [])), source)
            by = {name: source.get(name) for name in ("machine", "commit")}
            entry = next((one for one in found if by.items() <= one.items()), None)
            if entry is None:
                entry = {**by, "rows": {}}
                found.append(entry)
            entry["rows"].setdefault(row, []).append(seed)
    return found


def describe(entry: Trained) -> str:
    """Return `AMD EPYC, 2 cores, Python 3.11.7, torch 2.13.0+cpu, at 3c88633`."""
    machine, commit = entry["machine"], entry["commit"]
    if machine is None:
        return "a machine and a commit that were not recorded"
    gpu = [machine["gpu"]] if machine["gpu"] else []
    versions = f"Python {machine['python']}", f"torch {machine['torch']}"
    return ", ".join([machine["processor"], f"{machine['cores']} cores", *gpu, *versions, f"at {commit}"])


def machine() -> dict[str, Any]:
    """Return the processor, cores, GPU and versions of this machine."""
    import torch

    info, processor = Path("/proc/cpuinfo"), platform.processor() or platform.machine()
    if info.exists():
        names = [line for line in info.read_text(encoding="utf-8").splitlines() if line.startswith("model name")]
        processor = names[0].split(":", 1)[1].strip() if names else processor
    return {
        "processor": processor,
        "cores": os.cpu_count(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def commit(checkout: Path = CHECKOUT) -> str:
    """Return the commit, with a note if files of the packages differ from it; `unknown` outside a repository.

    An installed package has a version in place of a commit. It may lie in another program's repository.
    """
    if checkout == CHECKOUT and is_installed():
        return f"version {version('hetero-pp')}"

    def git(*arguments: str) -> str:
        """Return git's output; an empty string if git fails or is not installed."""
        command = ["git", *arguments]
        try:
            return subprocess.run(
                command, cwd=checkout, capture_output=True, text=True, encoding="utf-8"
            ).stdout.strip()
        except FileNotFoundError:
            return ""

    head = git("rev-parse", "--short", "HEAD")
    changed = head and git("--no-optional-locks", "status", "--porcelain", "--", *PACKAGES)
    return f"{head or 'unknown'}{' with changes' if changed else ''}"
