"""No file of the working folder is executed, whatever its name, by the program or by a process that it starts."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from started import TIMEOUT

ROOT = Path(__file__).parents[2]
PROGRAM = str(Path(sys.executable).with_name("hetero-pp"))
STARTS_PYTHON = re.compile(r'executable, "-[cm]"|\["-m", "(hetero_pp|torch)')
TRAP = """
import sys
with open({ran!r}, "a") as file:
    file.write(f"{{__name__}} in {{sys.orig_argv}}\\n")
raise ImportError("a trap")
"""
YAML = """
name: trapped
model: {preset: micro, width: 16, heads: 2, feed_forward: 16, layers: 2}
data: {corpus: CORPUS, sequence_length: 16, validation_share: 0.2, validation_sequences: 4}
inner: {steps: 1, learning_rate: 1e-2}
outer: {rounds: 1}
exchange: {listen: "127.0.0.1:PORT"}
replicas: [{name: dc, kind: datacenter, batch_size: 2, ENGINE}]
"""


class Folder:
    """A folder with a file for each module of Python's library and of each installed package. It notes what runs."""

    def __init__(self, path: Path) -> None:
        self.path, self.ran = path, path.with_name("ran")
        path.mkdir()
        names = {*sys.stdlib_module_names, *packages_distributions(), "hetero_pp", "stages", "replica_groups"}
        for name in filter(str.isidentifier, names):
            (path / f"{name}.py").write_text(TRAP.format(ran=str(self.ran)))
        self.processes: list[subprocess.Popen[str]] = []

    def start(self, *command: str) -> subprocess.Popen[str]:
        """Start a command here, as in a shell that sets no module path."""
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
        process = subprocess.Popen(
            command, cwd=self.path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self.processes.append(process)
        return process

    def run(self, *command: str) -> str:
        """Run a command here to its end. Return its output."""
        said, _ = (process := self.start(*command)).communicate(timeout=TIMEOUT)
        assert process.returncode == 0, said + self.noted()
        return said

    def noted(self) -> str:
        """Return which files have run, in which processes."""
        return self.ran.read_text() if self.ran.exists() else ""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Folder]:
    made = Folder(tmp_path / "downloads")
    yield made
    for process in made.processes:
        process.kill()
    assert made.noted() == ""


def _yaml(path: Path, corpus: Path, port: int = 0, engine: str = "engine: torch") -> str:
    text = YAML.replace("CORPUS", str(corpus)).replace("PORT", str(port)).replace("ENGINE", engine)
    path.write_text(text)
    return str(path)


@pytest.mark.starts_processes
def test_launch_and_its_ranks(folder: Folder, corpus: Path, tmp_path: Path) -> None:
    yaml = _yaml(tmp_path / "run.yaml", corpus, engine="engine: torchtitan, ranks: 2, device: cpu")
    folder.run(PROGRAM, "launch", yaml, "--runs", str(tmp_path / "runs"))


def test_python_is_started_with_a_safe_path() -> None:
    """`-c` and `-m` put the working folder first on the path, unless `-P` precedes them."""
    for package in ("hetero_pp", "stages", "replica_groups", "benchmarks"):
        for path in (ROOT / package).rglob("*.py"):
            assert not STARTS_PYTHON.search(path.read_text()), path
