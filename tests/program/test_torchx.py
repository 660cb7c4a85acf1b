"""A part of a run as a TorchX job: run by the local scheduler, and generated for Slurm and Kubernetes."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML
from started import start_program

COMPONENT = f"{Path(__file__).parents[2] / 'hetero_pp' / 'program' / 'launch' / 'torchx_components.py'}:part"
ARGUMENTS = ["--config", "run.yaml", "--only", "dc", "--exchange", "host:47600", "--nodes", "2", "--gpus", "4"]
COMMAND = "hetero-pp launch run.yaml --only dc --exchange host:47600 --token-file token --runs runs"

CONFIG = """
name: job
model: {preset: micro, width: 32, heads: 2, feed_forward: 64, layers: 2}
data: {corpus: CORPUS, sequence_length: 32, validation_share: 0.2, validation_sequences: 8}
inner: {steps: 2, learning_rate: 1e-2, warmup_steps: 2}
outer: {rounds: 2, compression: {density: 1/32}}
exchange: {listen: "127.0.0.1:PORT"}
replicas: [{name: dc, kind: datacenter, batch_size: 4}]
"""


@pytest.fixture
def runner() -> Iterator[Any]:
    """Return TorchX's runner. Its import takes a moment, so that only workers that run these tests import it."""
    from torchx.runner import get_runner

    with get_runner() as found:
        yield found


@pytest.mark.starts_processes
def test_a_slurm_job_has_the_command_on_every_node(runner: Any) -> None:
    job = str(runner.dryrun_component(COMPONENT, ARGUMENTS, scheduler="slurm", cfg={"partition": "gpu"}))
    assert job.count(COMMAND) == 2
    assert job.count("--gpus-per-task=4") == 2
    assert "--partition=gpu" in job


def test_a_kubernetes_job_has_the_command_on_every_node(runner: Any) -> None:
    job = str(runner.dryrun_component(COMPONENT, ARGUMENTS, scheduler="kubernetes", cfg={"queue": "default"}))
    tasks = YAML(typ="safe").load(job)["spec"]["tasks"]
    assert len(tasks) == 2
    for task in tasks:
        (container,) = task["template"]["spec"]["containers"]
        assert " ".join(container["command"]) == COMMAND
        assert container["resources"]["limits"]["nvidia.com/gpu"] == "4"


@pytest.mark.starts_processes
def test_the_local_scheduler_trains(runner: Any, tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torchx.specs import AppState

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    (tmp_path / "run.yaml").write_text(CONFIG.replace("CORPUS", str(corpus)).replace("PORT", str(port)))
    (tmp_path / "token").write_text("a-secret-of-this-test-of-a-scheduler\n")
    (tmp_path / "hetero-pp").write_text(f'#!/bin/sh\nexec {sys.executable} -m hetero_pp "$@"\n')
    (tmp_path / "hetero-pp").chmod(0o755)
    start = ["launch", str(tmp_path / "run.yaml"), "--only", "exchange", "--token-file", str(tmp_path / "token")]
    exchange = start_program(*start, "--runs", str(tmp_path / "runs"))
    monkeypatch.chdir(tmp_path)  # the local scheduler looks for `hetero-pp` here
    arguments = ["--config", "run.yaml", "--only", "dc", "--exchange", f"127.0.0.1:{port}", "--gpus", "0"]
    try:
        job = runner.run_component(COMPONENT, [*arguments, "--runs", "job"], scheduler="local_cwd")
        status = runner.wait(job, wait_interval=0.5)
        assert status is not None and status.state == AppState.SUCCEEDED
        assert exchange.wait(60) == 0
    finally:
        exchange.kill()
    summary = json.loads((tmp_path / "runs" / "job" / "summary.json").read_text())
    assert summary["rounds"] == 2
