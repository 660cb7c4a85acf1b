"""A killed run resumes where all its members were, and has the results of an uninterrupted one."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from asking import sets
from background import Background, still_running
from mixed_run import MIXED
from started import run_program, start_program

pytestmark = pytest.mark.starts_processes

ROUNDS = 4
ENDS = ["--set", "restarts.count=0", "--set", "exchange.quorum=1"]
"""Settings with which the death of any process ends the run."""

FRAGMENTS = ("outer.fragments=3", "outer.mixing=0.5", "replicas.1.boundary.embedding=free")

ON_RANKS = """
name: ranks
model: {preset: micro, width: 32, heads: 2, feed_forward: 64, layers: 2}
data: {corpus: CORPUS, sequence_length: 32, validation_share: 0.2, validation_sequences: 10}
inner: {steps: 2, learning_rate: 1e-2, warmup_steps: 2}
outer: {rounds: 4, compression: {density: 1/32}}
checkpoints: {every: 1}
replicas:
  - {name: titan, kind: datacenter, engine: torchtitan, ranks: 2, batch_size: 4, device: cpu}
  - {name: plain, kind: datacenter, batch_size: 4, device: cpu}
"""


def _command(config: Path, corpus: Path, runs: Path, *more: str) -> list[str]:
    settings = [f"data.corpus={corpus}", f"outer.rounds={ROUNDS}", "inner.steps=2", "checkpoints.every=1"]
    if config == MIXED:
        settings.append("replicas.1.boundary.anchors={rank: 4}")  # only a stage's saved state has them
    return ["launch", str(config), "--runs", str(runs), *sets(*settings), *more]


def _summary(command: Sequence[str], runs: Path, name: str) -> dict[str, Any]:
    done = run_program(*command)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((runs / name / "summary.json").read_text())


@pytest.fixture
def launch() -> Iterator[Callable[[Sequence[str], Path], Background]]:
    runs: list[Background] = []

    def start(command: Sequence[str], folder: Path) -> Background:
        runs.append(Background(start_program(*command), folder))
        return runs[-1]

    yield start
    for run in runs:
        run.process.kill()


def _wait_for_state(run: Background, round_: int) -> list[psutil.Process]:
    """Wait until every member has saved its state after a round. Return the processes."""

    def is_saved() -> bool:
        members = [path for path in (run.folder / "state").glob("*") if path.is_dir()]
        return len(members) > 1 and all((path / f"round-{round_:06d}").is_dir() for path in members)

    run.wait_until(is_saved)
    return run.writers()


@pytest.mark.parametrize("streams", [(), FRAGMENTS], ids=["whole", "in fragments"])
def test_a_killed_run_goes_on_to_the_same_bits(
    streams: Sequence[str], corpus: Path, tmp_path: Path, launch: Any
) -> None:
    """The saved state includes the round that was trained ahead. The last test here resumes a run without overlap.

    Messages between stages are slow. So members close no two rounds between the death of their launcher and their own:
    the report of the loss after the first of the two would be lost. Nor do they close one without a member that dies
    first, because all replicas are required.
    """
    more = ["--set", "outer.overlap=1", "--set", "links={far: {latency: 100 ms}}", "--set", "replicas.1.link=far"]
    more += ["--set", "exchange.quorum=1", "--set", "outer.momentum=0.5", *sets(*streams)]
    unbroken = _summary(_command(MIXED, corpus, tmp_path / "a", "--in-process", *more), tmp_path / "a", "mixed")
    command = _command(MIXED, corpus, tmp_path / "b", *more)
    run = launch(command, tmp_path / "b" / "mixed")
    everyone = _wait_for_state(run, 2)
    run.process.send_signal(signal.SIGKILL)
    assert not still_running(everyone, 10)
    resumed = _summary([*command, "--resume"], tmp_path / "b", "mixed")
    assert resumed["parameters_sha256"] == unbroken["parameters_sha256"]
    assert resumed["validation_loss"] == unbroken["validation_loss"]
    assert resumed["rounds"] == ROUNDS
    assert [one["tokens"] for one in resumed["replicas"]] == [one["tokens"] for one in unbroken["replicas"]]
    assert resumed["contributions"] == unbroken["contributions"]


def test_ranks_that_were_killed_go_on(corpus: Path, tmp_path: Path, launch: Any) -> None:
    config = tmp_path / "ranks.yaml"
    config.write_text(ON_RANKS)
    plain = ["--in-process", "--set", "replicas.0.engine=torch", "--set", "replicas.0.ranks=1"]
    unbroken = _summary(_command(config, corpus, tmp_path / "a", *plain), tmp_path / "a", "ranks")
    command = _command(config, corpus, tmp_path / "b", *ENDS)
    run = launch(command, tmp_path / "b" / "ranks")
    everyone = _wait_for_state(run, 2)
    _, *ranks = sorted(run.writers("titan.log"), key=lambda one: (one.create_time(), one.pid))
    assert len(ranks) == 2
    ranks[1].kill()
    errors = run.process.communicate(timeout=30)[1]
    assert run.process.returncode == 1
    assert not still_running(everyone, 10)
    assert "titan: rank 1 of titan: killed by SIGKILL" in errors
    assert _parts(tmp_path / "b", 2) == _outer_parts(2)
    on_one_rank = _command(config, corpus, tmp_path / "b", "--resume", "--set", "replicas.0.ranks=1")
    resumed = _summary(on_one_rank, tmp_path / "b", "ranks")
    assert resumed["validation_loss"] == pytest.approx(unbroken["validation_loss"], rel=1e-4)
    assert len(set(resumed["parameters_sha256"].values())) == 1
    assert _parts(tmp_path / "b", ROUNDS) == _outer_parts(1)  # as many as ranks are configured


def _parts(runs: Path, round_: int) -> list[str]:
    saved = runs / "ranks" / "state" / "titan" / f"round-{round_:06d}"
    return sorted(path.name for path in saved.glob("outer-*"))


def _outer_parts(ranks: int) -> list[str]:
    """Return the files with the outer state that a member with so many ranks saves."""
    return [f"outer-{rank}-of-{ranks}.safetensors" for rank in range(ranks)]


def test_nothing_to_go_on_with(corpus: Path, tmp_path: Path) -> None:
    command = _command(MIXED, corpus, tmp_path, "--resume", "--in-process")
    done = run_program(*command)
    assert done.returncode == 2
    assert f"--resume: found no run in {tmp_path / 'mixed'}" in done.stderr


ON_RANKS_AND_STAGES = f"""{
    ON_RANKS.replace("{every: 1}", "{every: 1000}").replace("rounds: 4", "rounds: 6").replace("torchtitan", "deepspeed")
}
  - {{name: home, kind: participants, stages: 2, batch_size: 4, micro_batches: 2, boundary: {{rank: 1/4}}}}
"""


def test_a_run_that_was_stopped_loses_no_finished_round(corpus: Path, tmp_path: Path, launch: Any) -> None:
    """When its terminal closes, ranks, a process and stages save their states after one round, though none was due."""
    config = tmp_path / "ranks.yaml"
    config.write_text(ON_RANKS_AND_STAGES)
    command = ["launch", str(config), "--set", f"data.corpus={corpus}", "--runs"]
    plain = ["--in-process", "--set", "replicas.0.engine=torch", "--set", "replicas.0.ranks=1"]
    unbroken = _summary([*command, str(tmp_path / "a"), *plain], tmp_path / "a", "ranks")
    command += [str(tmp_path / "b")]
    run = launch(command, tmp_path / "b" / "ranks")
    run.wait_until(lambda: run.rounds() >= 2)
    run.process.send_signal(signal.SIGHUP)
    said, errors = run.process.communicate(timeout=120)
    assert run.process.returncode == 130, errors
    assert said.splitlines()[-1].startswith("ranks: resume with: ")
    states = {path.name: [one.name for one in path.iterdir()] for path in (run.folder / "state").iterdir()}
    (saved,) = states["titan"]
    assert states == {name: [saved] for name in ("titan", "plain", "home.0", "home.1")}
    resumed = run_program(*command, "--resume")
    assert f"ranks: resuming after round {int(saved.removeprefix('round-'))}\n" in resumed.stdout, resumed.stderr
    summary = json.loads((run.folder / "summary.json").read_text())
    assert summary["parameters_sha256"] == unbroken["parameters_sha256"]
    assert summary["contributions"] == unbroken["contributions"]
    assert [one["tokens"] for one in summary["replicas"]] == [one["tokens"] for one in unbroken["replicas"]]
