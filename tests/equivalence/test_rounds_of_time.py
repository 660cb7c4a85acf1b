"""Rounds of fixed duration: a run over gRPC takes as many steps as fit.

With the same steps, a run in process has its bits.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from started import run_program

from hetero_pp.config.folder import RunFolder
from hetero_pp.config.yaml_file import read_run
from hetero_pp.messages.messages_pb2 import Report
from hetero_pp.model.transformer import shapes_by_block
from hetero_pp.program.launch.in_process import run_in_process
from hetero_pp.pseudo_gradient.contribution import BlobAddress, ReceivedBlob, scale_of
from hetero_pp.store.folder import FolderStore
from replica_groups.exchange.log import ContributionLog
from replica_groups.rounds.rules import MOST_TIMES_THE_STEPS

YAML = Path(__file__).with_name("mixed.yaml")
ROUNDS = 3
TOKENS_A_STEP = {"dc": 4 * 32, "home": 16 * 32}


def _metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def over_grpc(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a finished run.

    The group's larger batch makes it take fewer steps. Contributions are weighted by tokens.
    """
    folder = tmp_path_factory.mktemp("runs")
    changes = ["inner={seconds: 0.4}", f"data.corpus={corpus}", "replicas.1.batch_size=16"]
    changes += ["replicas.1.micro_batches=8", f"outer.rounds={ROUNDS}", "outer.weights=tokens", "checkpoints.every=1"]
    done = run_program("launch", str(YAML), "--runs", str(folder), *(f"--set={change}" for change in changes))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 outer rounds of as many inner steps as fit into 400 ms" in done.stdout
    return folder / "mixed"


def _log(run: Path) -> ContributionLog:
    return ContributionLog(FolderStore(run / "log"))


def _steps(run: Path) -> dict[tuple[str, int], int]:
    """Return the number of steps by replica and round, from the records."""
    return {
        (entry.replica, round_): entry.steps
        for round_ in range(1, ROUNDS + 1)
        for entry in _log(run).read_record(round_).contributions
    }


@pytest.mark.starts_processes
def test_a_run_with_the_steps_of_another_has_its_bits(over_grpc: Path, tmp_path: Path) -> None:
    taken = _steps(over_grpc)
    assert set(taken) == {(name, round_) for name in ("dc", "home") for round_ in range(1, ROUNDS + 1)}
    spec, reports = read_run(RunFolder(over_grpc)), list[Report]()
    folder = RunFolder(tmp_path)
    run_in_process(spec, folder, reports.append, steps_of=lambda replica, round_: taken[replica, round_])
    for round_ in range(1, ROUNDS + 1):
        records = [_log(where).read_record(round_) for where in (over_grpc, tmp_path)]
        assert records[0] == records[1], f"round {round_}"
    expected = {
        (line["replica"], line["round"]): line["parameters_sha256"]
        for line in _metrics(over_grpc)
        if line["event"] == "round_verified"
    }
    found = {
        (one.replica, one.round): one.parameters_sha256.hex()
        for report in reports
        if report.HasField("round_verified")
        for one in [report.round_verified]
    }
    assert found == expected
    assert len(found) == 2 * ROUNDS


@pytest.mark.starts_processes
def test_a_run_that_goes_on_knows_how_many_steps_it_took(over_grpc: Path, tmp_path: Path) -> None:
    """The next batch and its learning rate depend on it."""
    taken, run = _steps(over_grpc), tmp_path / "mixed"
    shutil.copytree(over_grpc, run)
    for state in run.glob(f"state/*/round-{ROUNDS:06d}"):
        shutil.rmtree(state)
    shutil.rmtree(run / "log" / f"round-{ROUNDS:06d}")
    (run / "log" / f"checkpoint-{ROUNDS:06d}.safetensors").unlink()
    folder = RunFolder(run)
    spec = read_run(folder)
    run_in_process(spec, folder, lambda _: None, {}, lambda replica, round_: taken[replica, round_])
    records = [_log(where).read_record(ROUNDS) for where in (over_grpc, run)]
    counted = [[(one.replica, one.steps, one.tokens, one.digest) for one in record.contributions] for record in records]
    assert counted[0] == counted[1]  # a resumed member has a new incarnation, so generations differ


@pytest.mark.starts_processes
def test_records_say_what_each_did_and_its_tokens_are_its_weight(over_grpc: Path) -> None:
    """On a busy machine one may take so many steps more than the other that they do not all count."""
    summary = json.loads((over_grpc / "summary.json").read_text())
    told = {replica["name"]: replica for replica in summary["replicas"]}
    for round_ in range(1, ROUNDS + 1):
        entries = _log(over_grpc).read_record(round_).contributions
        most = MOST_TIMES_THE_STEPS * min(entry.steps for entry in entries)
        for entry in entries:
            assert entry.steps == told[entry.replica]["steps"][round_ - 1]
            assert entry.tokens == entry.steps * TOKENS_A_STEP[entry.replica]
            assert entry.weight == min(entry.steps, most) * TOKENS_A_STEP[entry.replica]
    tokens = {name: sum(told[name]["steps"]) * TOKENS_A_STEP[name] for name in told}
    assert tokens == {name: told[name]["tokens"] for name in told}


@pytest.mark.starts_processes
def test_a_round_comes_to_the_mean_by_tokens(over_grpc: Path) -> None:
    """The expected value is theta - (w D + w' D') / (w + w'), with decoded contributions, in float64."""
    spec, log = read_run(RunFolder(over_grpc)), _log(over_grpc)
    before, after = (log.read_checkpoint(round_).parameters for round_ in (ROUNDS - 1, ROUNDS))
    record = log.read_record(ROUNDS)
    read, whole = log.blobs_of(record), sum(entry.weight for entry in record.contributions)
    for block, shapes in shapes_by_block(spec.parameter_shapes).items():
        moved = {name: torch.zeros(shape, dtype=torch.float64).flatten() for name, shape in shapes.items()}
        for entry in record.contributions:
            address = BlobAddress(spec.run, ROUNDS, entry.replica, block)
            blob = ReceivedBlob(read(entry.replica, block), address, shapes, spec.config.outer.compression)
            for name in shapes:
                sent = blob.tensor(name).scaled(scale_of(entry))
                moved[name][sent.indices.long()] += entry.weight / whole * sent.values.double()
        for name, change in moved.items():
            expected = before[name].double() - change.view_as(before[name])
            torch.testing.assert_close(after[name].double(), expected, rtol=0, atol=1e-6)


@pytest.mark.starts_processes
def test_the_last_step_of_a_round_is_told_as_such(over_grpc: Path) -> None:
    """The datacenter and every stage mark it once per round. The learning rate of the last round has fallen."""
    steps = [line for line in _metrics(over_grpc) if line["event"] == "inner_step"]
    last = [(line["member"], line["round"], line["step"] + 1) for line in steps if line.get("is_last")]
    taken, members = _steps(over_grpc), ("dc", "home.0", "home.1", "home.2")
    assert sorted(last) == sorted(
        (member, round_, taken[member.split(".")[0], round_]) for member in members for round_ in range(1, ROUNDS + 1)
    )
