"""Runs whose log is in a separate store: they have the same bits, can be resumed, and overwrite nothing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hetero_pp.config.folder import RunFolder
from hetero_pp.config.yaml_file import ConfigFile
from hetero_pp.core.errors import ConfigError
from hetero_pp.program.check.command import find
from hetero_pp.program.check.findings import FindingState
from hetero_pp.program.cli import app
from hetero_pp.program.export import export
from hetero_pp.program.launch.command import run_topology
from hetero_pp.store.lease import acting_for
from hetero_pp.store.opening import folder_of, open_store
from hetero_pp.store.settings import StoreSettings
from replica_groups.exchange.log import checkpoint_key, open_log, record_key

SMALL = Path(__file__).with_name("small.yaml")
ROUNDS = 2


def _train(corpus: Path, runs: Path, *settings: str, resume: bool = False) -> dict[str, Any]:
    given = [f"data.corpus={corpus}", f"outer.rounds={ROUNDS}", *settings]
    run_topology(SMALL, given, runs, in_process=True, resume=resume)
    return json.loads((runs / "small" / "summary.json").read_text())


@pytest.fixture(scope="module")
def expected(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the hashes of the same run with its log in its own folder."""
    found: dict[str, str] = _train(corpus, tmp_path_factory.mktemp("expected"))["parameters_sha256"]
    return found


def test_a_second_launch_is_refused(lasting: str, corpus: Path, tmp_path: Path) -> None:
    """This also holds for another machine, which does not see this one's folder of runs."""

    def ignore(_: str) -> None:
        """Ignore a message."""

    with (
        acting_for(StoreSettings(url=lasting).open("small", tmp_path), ignore, ignore, 3.0),
        pytest.raises(ConfigError, match="another launch uses the log of this run"),
    ):
        _train(corpus, tmp_path / "runs", f"store.url={lasting}")
    assert not (tmp_path / "runs" / "small").exists()


def test_check_tries_the_store(lasting: str, corpus: Path, tmp_path: Path) -> None:
    """A folder creates files once on every system, so there is nothing to try."""
    found = find(str(SMALL), tmp_path, None, 100.0, [f"data.corpus={corpus}", f"store.url={lasting}"])["store"]
    is_folder = folder_of(lasting) is not None
    assert found.state == (FindingState.SKIP if is_folder else FindingState.OK), found
    assert is_folder or found.line.endswith("/small can be written, and creates an object once")
    assert open_store(lasting).below() == []


def test_a_run_whose_log_lies_elsewhere(lasting: str, corpus: Path, tmp_path: Path, expected: dict[str, str]) -> None:
    runs, url = tmp_path / "runs", f"store.url={lasting}"
    assert _train(corpus, runs, url)["parameters_sha256"] == expected
    folder = RunFolder(runs / "small")
    log = open_log(ConfigFile(folder.config).config, folder)
    assert log.store.url().endswith("/small")
    assert not folder.log.exists()
    assert (log.records(), log.checkpoints()) == ({1, 2}, {0, 1, 2})

    with pytest.raises(ConfigError, match=r"store\.url: found a run in .*/small, expected none;"):
        _train(corpus, runs, url)
    assert folder.config.is_file()  # its folder is not moved away either

    log.store.delete([checkpoint_key(2), record_key(2)])
    stopped = "^.*/small: run small stopped after round 1 of 2; resume it with --resume, or use another"
    for where in (runs, tmp_path / "another machine"):
        with pytest.raises(ConfigError, match=stopped):
            _train(corpus, where, url)
    assert not (tmp_path / "another machine" / "small").exists()
    assert _train(corpus, runs, url, resume=True)["parameters_sha256"] == expected
    shutil.rmtree(folder.path / "state")
    url = lasting.replace("/runs?", "/runs/small?") if "?" in lasting else f"{lasting}/small"
    told = CliRunner().invoke(app, ["log", "replay", url])
    assert told.exit_code == 0, told.output
    assert f"sha256 {expected['dc']}" in told.stdout
    export(runs, str(folder.path), tmp_path / "model", "fp32", 1)
    assert (tmp_path / "model" / "config.json").is_file()
