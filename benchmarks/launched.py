"""Runs that benchmarks launch: how they start, what they have written, and text for them to read."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

from hetero_pp.config.folder import RunFolder
from hetero_pp.config.yaml_file import ConfigFile
from hetero_pp.program.launch.command import run_topology

HETERO_PP = [sys.executable, "-P", "-m", "hetero_pp"]
"""The program, as the start of a command."""


def run_quietly(yaml: Path, overrides: Sequence[str], runs: Path, in_process: bool = False) -> RunFolder:
    """Train a new run as `hetero-pp launch` does, but print nothing. Return its folder."""
    with redirect_stdout(StringIO()):
        run_topology(yaml, overrides, runs, in_process, new=True)
    return RunFolder(runs / ConfigFile(yaml, overrides).config.name)


def start_program(*arguments: str, to: Path, inside: Sequence[str] = ()) -> subprocess.Popen[bytes]:
    """Start `hetero-pp ARGUMENTS` with its output in a file. `inside`: prefix that enters a namespace."""
    with to.open("wb") as said:
        command = [*inside, *HETERO_PP, *arguments]
        return subprocess.Popen(command, stdout=said, stderr=said, stdin=subprocess.DEVNULL)


def events_of(folder: RunFolder) -> list[dict[str, Any]]:
    """Return the events of a run so far, without a line that is only half written."""
    lines = folder.metrics.read_text().split("\n")[:-1] if folder.metrics.exists() else []
    return [json.loads(line) for line in lines]


def summary_of(folder: RunFolder) -> dict[str, Any]:
    """Return the summary of a run, which must have ended."""
    found: dict[str, Any] = json.loads(folder.summary.read_text())
    return found


def words() -> str:
    """Return enough text for a small run."""
    return " ".join(f"word{number % 97} stage{number % 13}" for number in range(40_000))


def letters(count: int) -> str:
    """Return random letters and spaces."""
    return "".join(random.Random(1).choices("abcdefghijklmnopqrstuvwxyz      ", k=count))
