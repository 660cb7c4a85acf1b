"""The worked example of docs/experiments.md: its files make its table."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from started import run_program

PAGE = (Path(__file__).parents[2] / "docs" / "experiments.md").read_text()


@pytest.mark.starts_processes
def test_the_example_makes_its_table(tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test uses another corpus, one seed and few rounds, so losses differ."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tables").mkdir()
    for path, text in re.findall(r"^```yaml\n# (tables/\S+)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL):
        shorter = text.replace("rounds: 60", "rounds: 5").replace("validation_sequences: 16", "validation_sequences: 4")
        shorter = shorter.replace("corpus: docstrings", f"corpus: {corpus}")
        (tmp_path / path).write_text(shorter)
    command = ["reproduce", "rank", "--experiments", "tables", "--scale", "tiny", "--seeds", "1", "--no-compile"]
    done = run_program(*command)
    assert done.returncode == 0, done.stderr
    [shown] = re.findall(r"^```text\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    names = re.findall(r"^ (\S.*?) {2,}\d\.", shown, re.MULTILINE)
    claims = re.findall(r"^ {2}[a-z ]+: (.*) \(", shown, re.MULTILINE)
    table = json.loads((tmp_path / "benchmarks" / "results" / "tiny" / "rank.json").read_text())
    assert [row["name"] for row in table["rows"] if row["state"] == "done"] == names
    assert [claim["text"] for claim in table["claims"]] == claims
    columns = shown.splitlines()[0].split()
    assert columns == next(line.split() for line in done.stdout.splitlines() if line.startswith(" row "))
    assert {path.name for path in (tmp_path / "benchmarks" / "results" / "tiny").iterdir()} >= {"rank.md", "rank.png"}
