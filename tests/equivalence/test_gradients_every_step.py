"""AdamW with gradients averaged after every step has the same bits over gRPC and in process, in all replicas."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from started import run_program

from hetero_pp.config.checkpoint import open_checkpoint
from hetero_pp.config.spec import RunSpec
from hetero_pp.config.yaml_file import ConfigFile
from hetero_pp.model.transformer import EMBEDDING
from hetero_pp.simulator.traffic import checkpoint_bytes, exchange_link_loads

pytestmark = pytest.mark.starts_processes

YAML = Path(__file__).with_name("mixed.yaml")
CHANGES = ("outer.method=adamw_ddp", "inner.steps=1", "outer.rounds=4", "replicas.1.boundary.rank=1/8")


def _run(corpus: Path, runs: Path, *options: str) -> Path:
    sets = [part for change in (f"data.corpus={corpus}", *CHANGES) for part in ("--set", change)]
    done = run_program("launch", str(YAML), "--runs", str(runs), *options, *sets)
    assert done.returncode == 0, done.stdout + done.stderr
    return runs / "mixed"


@pytest.fixture(scope="module")
def both(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("runs")
    return [_run(corpus, folder / "grpc"), _run(corpus, folder / "in_process", "--in-process")]


def test_the_same_weights_everywhere(both: list[Path]) -> None:
    summaries = [json.loads((run / "summary.json").read_text()) for run in both]
    assert len({sha for summary in summaries for sha in summary["parameters_sha256"].values()}) == 1
    assert summaries[0]["validation_loss"] == summaries[1]["validation_loss"]
    assert summaries[0]["validation_loss"][-1] < summaries[0]["initial_validation_loss"]


def test_moments_are_in_the_checkpoints(both: list[Path]) -> None:
    """The auditor keeps AdamW's moments of every parameter."""
    checkpoints = [open_checkpoint(run / "log" / "checkpoint-000004.safetensors").checkpoint() for run in both]
    expected = {f"{name}.{moment}" for name in checkpoints[0].parameters for moment in ("exp_avg", "exp_avg_sq")}
    assert set(checkpoints[0].momentum) == expected
    for name, tensor in checkpoints[0].momentum.items():
        assert tensor.equal(checkpoints[1].momentum[name]), name
        assert tensor.any(), name


def test_links_carried_what_check_predicts(both: list[Path]) -> None:
    """Every member receives the whole averaged gradient, because its norm clips it.

    A step has few tokens, so most rows of the embedding's gradient are zero. They take almost no bytes.
    """
    spec = RunSpec(ConfigFile(both[0] / "config.yaml").config, 256)
    links = json.loads((both[0] / "summary.json").read_text())["links"]
    measured = {link["name"]: link["payload_bytes"] for link in links}
    for member in spec.members.values():
        loads = exchange_link_loads(spec, member)
        link = measured[f"{member.name}-exchange"]
        downloaded = 4 * loads["backward"].outer_round + checkpoint_bytes(spec, member)
        embedding = 4 * 4 * math.prod(spec.parameter_shapes[EMBEDDING])
        own = embedding if EMBEDDING in member.owned else 0
        sent, zeros = 4 * loads["forward"].outer_round, 2 * embedding  # of both replicas
        assert 0.95 * (sent - own) < link["forward"] < 1.1 * sent
        assert 0.95 * (downloaded - zeros) < link["backward"] < 1.1 * downloaded
        assert (link["forward"] > 0.95 * sent) == (own == 0)
