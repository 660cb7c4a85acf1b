"""Setup: `make` first says what it downloads, and another build of torch can be chosen."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]


def _make(folder: Path, *arguments: str) -> list[str]:
    """Return the commands that make would run if nothing was set up."""
    command = ["make", "--dry-run", "demo", f"VENV={folder}", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()


@pytest.mark.starts_processes
@pytest.mark.parametrize("build", ["", "--index-url=https://packages.example/cpu --pre"])
def test_what_is_downloaded_is_said_first_and_can_be_chosen(tmp_path: Path, build: str) -> None:
    lines = _make(tmp_path / "venv", f"TORCH_ARGS={build}")
    said = next(index for index, line in enumerate(lines) if line.startswith("echo") and "Downloads: torch" in line)
    pips = [index for index, line in enumerate(lines) if "pip install" in line]
    torch, rest = (line for line in lines if re.search(r"pip install .*(torch|--editable)", line))
    assert said < min(pips)
    assert torch.split("pip install ")[1].split() == ["torch==2.13.0", *build.split()]
    assert build in lines[said]
    assert "torch" not in rest
    assert "--index-url" not in rest


def test_the_pinned_torch_is_one_that_the_package_takes() -> None:
    pinned = re.search(r"^TORCH := torch==(\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    [wanted] = [one for text in project["dependencies"] if (one := Requirement(text)).name == "torch"]
    assert pinned is not None
    assert wanted.specifier.contains(pinned[1])
    assert wanted.specifier.contains(f"{pinned[1]}+cpu")


def test_the_readme_names_the_build_that_make_names() -> None:
    build = re.search(r"^CPU_BUILD := (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert build is not None
    assert f"make demo TORCH_ARGS={build[1]}" in (ROOT / "README.md").read_text()
