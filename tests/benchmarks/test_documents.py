"""The benchmarks that documents say to run are there, and know the options that are shown."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
COMMANDS = [found for page in PAGES for found in re.findall(r"python (benchmarks/\w+\.py)([^`\n#]*)", page.read_text())]
"""A file, and what follows it."""


@pytest.mark.parametrize("path", sorted({path for path, _ in COMMANDS}))
def test_a_benchmark_knows_the_options_that_are_shown(path: str) -> None:
    done = subprocess.run([sys.executable, path, "--help"], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    shown = {option for other, rest in COMMANDS if other == path for option in re.findall(r"--[\w-]+", rest)}
    assert shown <= set(re.findall(r"--[\w-]+", done.stdout))


def test_documents_show_benchmarks() -> None:
    assert ("benchmarks/link.py", " --smoke") in COMMANDS
