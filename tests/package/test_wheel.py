"""The wheel works without the repository: commands find their data, and only `hetero_pp` is added to site-packages."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MOVED = re.compile(r"""^\s*(from|import) (stages|replica_groups)\b|["'](stages|replica_groups)\.""", re.MULTILINE)
DEPENDENCIES = sysconfig.get_path("purelib")
OWN = """\
name: mine
model: {preset: micro}
outer: {rounds: 1}
replicas:
  - {name: dc, kind: datacenter}
  - {name: home, kind: participants, stages: 2}
"""
TINY = (
    *("outer.rounds=1", "inner.steps=1", "data.sequence_length=16", "data.validation_sequences=2"),
    *("data.validation_share=1/10", "data.tokenizer=bytes", "data.corpus=text"),
)
SETS = [word for value in TINY for word in ("--set", value)]
TRIED = [
    ["check", "mine.yaml"],
    ["check", "configs/quickstart.yaml"],
    ["simulate", "quickstart", "--json", "prediction.json"],
    ["reproduce", "het-pp/table1", "--list", "--json", "listed.json"],
]
"""Commands that a user tries in a folder of their own."""

RUN_ALL = """\
import json, sys
from typer.testing import CliRunner
import hetero_pp, hetero_pp.stages.stage, hetero_pp.replica_groups.exchange.exchange
from hetero_pp.program.cli import app
from hetero_pp.research.experiments.outcomes import commit
runner = CliRunner()
done = [runner.invoke(app, command) for command in json.loads(sys.argv[1])]
names = ["stages", "replica_groups"]
print(json.dumps({
    "path": sys.path,
    "file": hetero_pp.__file__,
    "outputs": [[one.exit_code, one.output] for one in done],
    "top": [name for name in names if name in sys.modules],
    "commit": commit(),
}))
"""

pytestmark = pytest.mark.starts_processes


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the wheel of the repository."""
    folder = tmp_path_factory.mktemp("wheel")
    _pip("wheel", "--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", str(folder), str(ROOT))
    [built] = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an environment with the wheel. Its dependencies are those of the tests."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    python = folder / "bin" / "python"
    _pip("--python", str(python), "install", "--quiet", "--no-deps", "--no-index", "--no-compile", str(wheel))
    [packages] = folder.glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text("\n".join(path for path in sys.path if path.endswith("-packages")))
    return folder


@pytest.fixture
def home(tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of a user, with a YAML and a text."""
    (tmp_path / "mine.yaml").write_text(OWN)
    (tmp_path / "text").symlink_to(corpus)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", *arguments], check=True, cwd="/")


def test_one_name_is_added_to_site_packages(wheel: Path) -> None:
    """Other packages may have modules `stages` or `replica_groups`: the wheel neither has nor imports them."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        sources = {name: archive.read(name).decode() for name in names if name.endswith(".py")}
    assert {name.split("/")[0] for name in names} == {"hetero_pp", "hetero_pp-0.1.0.dist-info"}
    assert {"hetero_pp/py.typed", "hetero_pp/messages/messages.proto"} <= {*names}
    assert [name for name, source in sources.items() if MOVED.search(source)] == []
    assert (
        'import_module("hetero_pp.replica_groups.engines.titan")'
        in sources["hetero_pp/replica_groups/engines/build.py"]
    )


def test_commands_work_in_another_folder(environment: Path, home: Path) -> None:
    command = [str(environment / "bin" / "python"), "-c", RUN_ALL, json.dumps(TRIED)]
    # Packages that `check` imports may print lines of their own.
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1])
    assert str(ROOT) not in found["path"]
    assert Path(found["file"]).is_relative_to(environment)
    assert [one for one in found["outputs"] if one[0] != 0] == []
    assert found["top"] == []
    assert found["commit"] == "version 0.1.0"
    [listed] = json.loads((home / "listed.json").read_text())
    assert listed["state"] == "9 of 9 rows at scale micro"
    assert listed["claims"][0]["verdict"] == "holds"
    assert not (home / "benchmarks").exists()


def test_a_shipped_run_trains_over_the_network(environment: Path, home: Path) -> None:
    command = [str(environment / "bin" / "hetero-pp"), "launch", "quickstart", *SETS]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "All replicas hold the same weights" in done.stdout
    assert (home / "runs" / "quickstart" / "summary.json").is_file()
    subprocess.run([command[0], "view", "quickstart", "--export", "page.html"], check=True)
    assert 'id="data"' in (home / "page.html").read_text()
