"""Benchmarks that documents tell readers to run exist, and know the options that are shown."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
COMMANDS = [found for page in PAGES for found in re.findall(r"python (benchmarks/\w+\.py)([^`\n#]*)", page.read_text())]
"""Pairs of a file and its arguments."""


@pytest.mark.parametrize("path", sorted({path for path, _ in COMMANDS}))
def test_a_benchmark_knows_the_options_that_are_shown(
    path: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The help is printed in this process. test_smoke.py starts the benchmarks in their own processes."""
    monkeypatch.setattr("sys.argv", [path, "--help"])
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / path), run_name="__main__")
    assert ended.value.code == 0
    shown = {option for other, rest in COMMANDS if other == path for option in re.findall(r"--[\w-]+", rest)}
    assert shown <= set(re.findall(r"--[\w-]+", capsys.readouterr().out))


def test_documents_show_benchmarks() -> None:
    assert ("benchmarks/link.py", " --smoke") in COMMANDS
