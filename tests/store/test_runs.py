"""Runs whose log is in a separate store: they have the same bits, can be resumed, and overwrite nothing."""

from __future__ import annotations

import json
import random
import select
import shutil
import socket
import socketserver
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from typer.testing import CliRunner

from hetero_pp.config.folder import RunFolder
from hetero_pp.config.yaml_file import ConfigFile
from hetero_pp.core.errors import ConfigError
from hetero_pp.program.cli import app
from hetero_pp.program.export import export
from hetero_pp.program.launch.command import run_topology
from hetero_pp.store.lease import acting_for
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


class _Failing(socketserver.ThreadingTCPServer):
    """Forwards connections to an S3 service and breaks each of them: at once, with an error, or within an answer."""

    daemon_threads = True

    def __init__(self, behind: str) -> None:
        self.behind = urlsplit(behind)
        self.dice, self.broken = random.Random(1), Counter[str]()
        super().__init__(("127.0.0.1", 0), _Connection)


class _Connection(socketserver.BaseRequestHandler):
    server: _Failing

    def handle(self) -> None:
        how = self.server.dice.choice(["refused", "overloaded", "cut", "cut", "cut"])
        self.server.broken[how] += 1
        if how == "refused":
            return
        if how == "overloaded":
            self.request.recv(65_536)
            self.request.sendall(b"HTTP/1.1 503 Slow Down\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            return
        left = self.server.dice.randrange(100, 10_000)
        with socket.create_connection((self.server.behind.hostname, self.server.behind.port)) as service:
            while left > 0:
                for one in select.select([self.request, service], [], [])[0]:
                    data = one.recv(min(left, 65_536) if one is service else 65_536)
                    left -= len(data) if one is service else 0
                    if not data:
                        return
                    (self.request if one is service else service).sendall(data)


@pytest.mark.starts_processes
@pytest.mark.parametrize("lasting", ["s3"] if sys.platform == "linux" else [], indirect=True)
def test_a_store_whose_connections_break_changes_no_bit(
    lasting: str, corpus: Path, tmp_path: Path, expected: dict[str, str]
) -> None:
    """This includes lost answers: an object that was created is not taken for that of another process."""
    behind = parse_qs(urlsplit(lasting).query)["endpoint"][0]
    with _Failing(behind) as failing:
        thread = threading.Thread(target=failing.serve_forever)
        thread.start()
        try:
            url = lasting.replace(behind, f"http://127.0.0.1:{failing.server_address[1]}")
            assert _train(corpus, tmp_path, f"store.url={url}")["parameters_sha256"] == expected
        finally:
            failing.shutdown()
            thread.join()
    assert min(failing.broken.values()) > 2
    replayed = CliRunner().invoke(app, ["log", "replay", lasting.replace("/runs?", "/runs/small?")])
    assert replayed.exit_code == 0, replayed.output
