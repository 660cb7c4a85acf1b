"""Every benchmark describes itself, and knows the options that documents tell readers to use."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
COMMANDS = [found for page in PAGES for found in re.findall(r"python (benchmarks/\w+\.py)([^`\n#]*)", page.read_text())]
"""Pairs of a file and its arguments."""
SELF_DESCRIBING = {
    path.relative_to(ROOT).as_posix()
    for path in (ROOT / "benchmarks").glob("*.py")
    if re.search(r"= parse\(parser, |^    parser.*\"--smoke\"", path.read_text(), re.MULTILINE)
}
"""Files with the option `--smoke`, which every benchmark has."""


@pytest.mark.parametrize("path", sorted(SELF_DESCRIBING | {path for path, _ in COMMANDS}))
def test_a_benchmark_describes_itself_and_knows_the_options_that_are_shown(
    path: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The help is printed in this process. test_smoke.py starts the benchmarks in their own processes."""
    monkeypatch.setattr("sys.argv", [path, "--help"])
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / path), run_name="__main__")
    assert ended.value.code == 0
    told = capsys.readouterr().out
    assert path not in SELF_DESCRIBING or re.search(rf"usage: {Path(path).name} .*--smoke", told, re.DOTALL), told
    shown = {option for other, rest in COMMANDS if other == path for option in re.findall(r"--[\w-]+", rest)}
    assert shown <= set(re.findall(r"--[\w-]+", told))


def test_benchmarks_are_found() -> None:
    assert ("benchmarks/link.py", " --smoke") in COMMANDS
    assert {"benchmarks/link.py", "benchmarks/scale.py", "benchmarks/view.py"} <= SELF_DESCRIBING
