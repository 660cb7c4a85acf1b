"""configs/mixed_engines.yaml: torchtitan and DeepSpeed on two ranks each, beside a group of four stages."""

from __future__ import annotations

import ipaddress
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from started import run_program

pytestmark = pytest.mark.starts_processes

CONFIG = Path(__file__).parents[2] / "configs" / "mixed_engines.yaml"
SHORT = [
    "outer.rounds=2",
    "inner.steps=3",
    "data.validation_sequences=8",
    "data.validation_share=0.2",
    "data.repeat=true",
]
PLAIN = [f"replicas.{index}.{key}" for index in (0, 1) for key in ("engine=torch", "ranks=1")]


class Listening:
    """Listening sockets of a launch's processes, as (address, process, stem of its log)."""

    def __init__(self) -> None:
        self.seen: set[tuple[str, int, str]] = set()

    def look(self, launcher: int) -> None:
        """Record the sockets of all current processes."""
        for process in [psutil.Process(launcher), *psutil.Process(launcher).children(recursive=True)]:
            try:
                log = Path(f"/proc/{process.pid}/fd/2").resolve().stem
                sockets = process.net_connections("inet")
            except (OSError, psutil.Error):
                continue  # it has ended
            self.seen |= {(one.laddr.ip, process.pid, log) for one in sockets if one.status == psutil.CONN_LISTEN}

    def processes(self, log: str) -> int:
        """Return how many processes of a member have listened."""
        return len({process for _, process, own in self.seen if own == log})

    def beyond_loopback(self) -> set[str]:
        """Return the addresses that other machines could reach."""
        return {ip for ip, _, _ in self.seen if not _is_loopback(ip)}


def _is_loopback(ip: str) -> bool:
    address = ipaddress.ip_address(ip)
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def _public_interface() -> dict[str, str]:
    """Return an environment in which ranks would listen on a public interface, unless a launch overrides it."""
    for interface, addresses in psutil.net_if_addrs().items():
        if any(one.family == socket.AF_INET and not _is_loopback(one.address) for one in addresses):
            return {"GLOO_SOCKET_IFNAME": interface}
    return {}


def _command(runs: Path, corpus: Path, *more: str) -> list[str]:
    settings = [*SHORT, f"data.corpus={corpus}", "replicas.0.device=cpu", "replicas.1.device=cpu", *more]
    return ["launch", str(CONFIG), "--runs", str(runs), *(part for setting in settings for part in ("--set", setting))]


def _watched(command: list[str], listening: Listening) -> None:
    """Run a command to its end and watch its sockets."""
    start, environment = [sys.executable, "-m", "hetero_pp", *command], os.environ | _public_interface()
    with subprocess.Popen(
        start, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as process:
        said = _wait(process, listening)
    assert process.returncode == 0, said


def _wait(process: subprocess.Popen[str], listening: Listening) -> str:
    while True:
        try:
            return process.communicate(timeout=1.0)[0]
        except subprocess.TimeoutExpired:
            listening.look(process.pid)


def _summary(runs: Path) -> dict[str, Any]:
    return json.loads((runs / "mixed-engines" / "summary.json").read_text())


def test_engines_and_stages_are_one_run(corpus: Path, tmp_path: Path) -> None:
    """All replicas are equal to the bit after every round, with the losses of plain PyTorch, and no port is public."""
    listening = Listening()
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
