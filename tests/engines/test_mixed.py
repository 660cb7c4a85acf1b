"""configs/mixed_engines.yaml: torchtitan and DeepSpeed on two ranks each, beside a group of four stages."""

from __future__ import annotations

import json
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from preloading import forked_processes, is_loopback
from started import run_program, start_program

pytestmark = pytest.mark.starts_processes

CONFIG = Path(__file__).parents[2] / "configs" / "mixed_engines.yaml"
SHORT = [
    "model.width=32",
    "model.heads=2",
    "model.feed_forward=64",
    "outer.rounds=2",
    "inner.steps=2",
    "data.sequence_length=32",
    "data.validation_sequences=4",
    "data.validation_share=0.2",
    "data.repeat=true",
]
PLAIN = [f"replicas.{index}.{key}" for index in (0, 1) for key in ("engine=torch", "ranks=1")]


class Listening:
    """Listening sockets of a launch's processes, as (address, process, stem of its log)."""

    def __init__(self, logs: Path) -> None:
        self.seen: set[tuple[str, int, str]] = set()
        self._logs = logs

    def look(self, launcher: int) -> None:
        """Record the sockets of all current processes. The fork server of the tests has forked all of them."""
        for process in forked_processes():
            try:
                log = Path(f"/proc/{process.pid}/fd/2").resolve()
                if process.pid != launcher and log.parent != self._logs:
                    continue  # a process of the tests
                sockets = process.net_connections("inet")
            except (OSError, psutil.Error):
                continue  # it has ended
            self.seen |= {(one.laddr.ip, process.pid, log.stem) for one in sockets if one.status == psutil.CONN_LISTEN}

    def processes(self, log: str) -> int:
        """Return how many processes of a member have listened."""
        return len({process for _, process, own in self.seen if own == log})

    def beyond_loopback(self) -> set[str]:
        """Return the addresses that other machines could reach."""
        return {ip for ip, _, _ in self.seen if not is_loopback(ip)}


def _command(runs: Path, corpus: Path, *more: str) -> list[str]:
    settings = [*SHORT, f"data.corpus={corpus}", "replicas.0.device=cpu", "replicas.1.device=cpu", *more]
    return ["launch", str(CONFIG), "--runs", str(runs), *(part for setting in settings for part in ("--set", setting))]


def _watched(command: list[str], listening: Listening) -> None:
    """Run a command to its end and watch its sockets."""
    program = start_program(*command)
    try:
        while program.poll() is None:
            with suppress(subprocess.TimeoutExpired):
                program.wait(0.5)
            listening.look(program.pid)
        assert program.returncode == 0, program.communicate()
    finally:
        program.kill()


def _summary(runs: Path) -> dict[str, Any]:
    return json.loads((runs / "mixed-engines" / "summary.json").read_text())


def test_engines_and_stages_are_one_run(corpus: Path, tmp_path: Path) -> None:
    """All replicas are equal to the bit after every round, with the losses of plain PyTorch, and no port is public."""
    listening = Listening((tmp_path / "mixed" / "mixed-engines" / "logs").resolve())
    _watched(_command(tmp_path / "mixed", corpus), listening)
    mixed = _summary(tmp_path / "mixed")
    assert [listening.processes(log) for log in ("exchange", "titan", "zero")] == [1, 3, 3]  # the node and two ranks
    assert not listening.beyond_loopback()
    done = run_program(*_command(tmp_path / "plain", corpus, *PLAIN), "--in-process")
    assert done.returncode == 0, done.stderr
    plain = _summary(tmp_path / "plain")
    assert len(set(mixed["parameters_sha256"].values())) == 1
    assert mixed["parameters_sha256"].keys() == {"titan", "zero", "home"}
    assert mixed["initial_validation_loss"] == pytest.approx(plain["initial_validation_loss"], rel=1e-5)
    assert mixed["validation_loss"] == pytest.approx(plain["validation_loss"], rel=2e-3)
    for ours, theirs in zip(mixed["replicas"], plain["replicas"], strict=True):
        assert ours["tokens"] == theirs["tokens"]
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=5e-3)
    assert [link["payload_bytes"] for link in mixed["links"]] == [link["payload_bytes"] for link in plain["links"]]
