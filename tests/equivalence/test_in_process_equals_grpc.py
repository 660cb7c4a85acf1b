"""The same YAML in process and over gRPC, started as by a user, has the same losses, digests and hashes to the bit."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest
import torch
from started import run_program

from hetero_pp.config.checkpoint import open_checkpoint
from hetero_pp.config.lines import Direction, stage_link_name
from hetero_pp.config.spec import RunSpec
from hetero_pp.config.topology import ParticipantsReplica
from hetero_pp.config.yaml_file import ConfigFile
from hetero_pp.link.protocol import Message, sealed
from hetero_pp.messages.messages_pb2 import ACTIVATION, EVALUATION, FLUSH, GRADIENT, LinkHeader
from hetero_pp.simulator.prediction import predict
from hetero_pp.simulator.traffic import checkpoint_bytes, exchange_link_loads, message_bytes, stage_link_loads
from hetero_pp.store.folder import FolderStore
from replica_groups.exchange.log import ContributionLog

pytestmark = pytest.mark.starts_processes

YAML = Path(__file__).with_name("mixed.yaml")
BEHIND_LINES = [
    "lines={cable: {up: 100 Mbit/s, down: 400 Mbit/s, latency: 1 ms, jitter: 1 ms}, fibre: {bandwidth: 1 Gbit/s}}",
    "sites={house: {line: cable, members: [home.0, home.2]}}",
    "replicas.0.line=fibre",
    "replicas.1.line=cable",
    "exchange.line=fibre",
]
"""Two processes share the line of a house, and all members share that of the exchange."""
ANCHORS = "replicas.1.boundary.anchors={rank: 4, fade: [0.4, 1]}"
UNEVEN = ["model.layers=4", "replicas.1.stages=[{layers: 1}, {layers: 2}, {layers: 1}]", "replicas.1.micro_batches=4"]
"""The stages differ in size. A micro-batch is one sequence, so that validation has no smaller batch."""


def _run(corpus: Path, runs: Path, *options: str) -> Path:
    """Launch the topology as a user would. Return the run's folder."""
    changes = [f"--set={change}" for change in (*BEHIND_LINES, *UNEVEN, ANCHORS, f"data.corpus={corpus}")]
    done = run_program("launch", str(YAML), "--runs", str(runs), *options, *changes)
    assert done.returncode == 0, done.stdout + done.stderr
    return runs / "mixed"


@pytest.fixture(scope="module")
def both(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("runs")
    audited = "--set=audit.gauntlet={evaluated: 2, sequences: 4}"  # nobody is hostile, so it changes no bit
    return {
        "grpc": _run(corpus, folder / "grpc", audited),
        "in process": _run(corpus, folder / "in_process", "--in-process"),
    }


def _losses(run: Path) -> dict[tuple[str, str, int, int], float]:
    found = {}
    for line in (run / "metrics.jsonl").read_text().splitlines():
        event = json.loads(line)
        if "loss" in event:
            found[event["event"], event["replica"], event["round"], event.get("step", 0)] = event["loss"]
    return found


def test_losses_have_the_same_bits(both: dict[str, Path]) -> None:
    over_grpc, in_process = _losses(both["grpc"]), _losses(both["in process"])
    assert len(over_grpc) == 2 * (3 * 3 + 4)  # replicas x (inner steps + evaluations)
    assert over_grpc == in_process


def test_contribution_digests_are_equal(both: dict[str, Path]) -> None:
    for round_ in (1, 2, 3):
        records = [ContributionLog(FolderStore(run / "log")).read_record(round_) for run in both.values()]
        assert len(records[0].contributions) == 2
        assert records[0] == records[1]


def test_parameter_hashes_are_equal(both: dict[str, Path]) -> None:
    summaries = [json.loads((run / "summary.json").read_text()) for run in both.values()]
    hashes = {sha for summary in summaries for sha in summary["parameters_sha256"].values()}
    assert [set(summary["parameters_sha256"]) for summary in summaries] == [{"dc", "home"}] * 2
    assert len(hashes) == 1
    checkpoints = [open_checkpoint(run / "log" / "checkpoint-000003.safetensors").checkpoint() for run in both.values()]
    for name, tensor in checkpoints[0].tensors().items():
        assert tensor.equal(checkpoints[1].tensors()[name]), name


def test_the_audited_run_has_scores(both: dict[str, Path]) -> None:
    audit = json.loads((both["grpc"] / "summary.json").read_text())["audit"]
    assert {one["replica"]: one["evaluations"] for one in audit["scores"]} == {"dc": 3, "home": 3}
    assert (audit["unaudited"], audit["failed_checks"]) == (None, [])
    assert "audit" not in json.loads((both["in process"] / "summary.json").read_text())


def test_links_carried_the_same_bytes(both: dict[str, Path]) -> None:
    kept = ("name", "from", "to", "payload_bytes", "wire_bytes")
    over_grpc, in_process = (
        [{key: link[key] for key in kept} for link in json.loads((run / "summary.json").read_text())["links"]]
        for run in both.values()
    )
    assert over_grpc == in_process
    assert all(link["payload_bytes"]["forward"] > 0 for link in over_grpc)


def test_lines_carried_what_all_their_links_did(both: dict[str, Path]) -> None:
    """Both runs carried the same bytes."""
    summaries = [json.loads((run / "summary.json").read_text()) for run in both.values()]
    kept = ("name", "kind", "members", "payload_bytes", "wire_bytes", "wire_bytes_per_round")
    lines = [{key: line[key] for key in kept} for line in summaries[0]["lines"]]
    assert lines == [{key: line[key] for key in kept} for line in summaries[1]["lines"]]
    assert {line["name"]: line["members"] for line in lines} == {
        "house": ["home.0", "home.2"],
        "dc": ["dc"],
        "home.1": ["home.1"],
        "exchange": ["exchange"],
    }
    wire = {link["name"]: link["wire_bytes"] for link in summaries[0]["links"]}
    passed = {line["name"]: line["wire_bytes"] for line in lines}
    stages, exchanged = ("home.0-1", "home.1-2"), ("home.0-exchange", "home.2-exchange")
    assert passed["dc"] == {"up": wire["dc-exchange"]["forward"], "down": wire["dc-exchange"]["backward"]}
    assert passed["house"] == {
        "up": wire[stages[0]]["forward"] + wire[stages[1]]["backward"] + sum(wire[one]["forward"] for one in exchanged),
        "down": wire[stages[0]]["backward"]
        + wire[stages[1]]["forward"]
        + sum(wire[one]["backward"] for one in exchanged),
    }
    assert passed["exchange"]["down"] == sum(wire[one]["forward"] for one in wire if one.endswith("-exchange"))


def test_the_summary_has_what_others_rely_on(both: dict[str, Path]) -> None:
    summary = json.loads((both["grpc"] / "summary.json").read_text())
    assert summary["rounds"] == 3
    assert len(summary["validation_loss"]) == 3
    assert summary["validation_loss"][-1] < summary["initial_validation_loss"]
    assert {replica["name"]: replica["kind"] for replica in summary["replicas"]} == {
        "dc": "datacenter",
        "home": "participants",
    }
    assert all(replica["tokens"] == 3 * 3 * 4 * 32 for replica in summary["replicas"])
    assert summary["contributions"]["bytes"] > 0
    log = ContributionLog(FolderStore(both["grpc"] / "log"))
    assert summary["contributions"]["bytes"] == sum(
        len(log.blobs_of(record)(entry.replica, blob.block))
        for record in map(log.read_record, (1, 2, 3))
        for entry in record.contributions
        for blob in entry.blobs
    )
    files = [path for path in (both["grpc"] / "log").glob("round-*/*/*/*") if path.is_file()]
    assert len(files) == 3 * 4  # one for each member and round
    for name in ("config.yaml", "metrics.jsonl", "loss.png"):
        assert (both["grpc"] / name).stat().st_size > 0
    assert list((both["grpc"] / "tensorboard").iterdir())


def test_links_carried_what_check_predicts(both: dict[str, Path]) -> None:
    """Stage links agree exactly. Exchange links agree about, because the size of a blob depends on its values."""
    spec = RunSpec(ConfigFile(both["grpc"] / "config.yaml").config, 256)
    summary = json.loads((both["grpc"] / "summary.json").read_text())
    measured = {link["name"]: link["payload_bytes"] for link in summary["links"]}
    rounds, steps = spec.config.rounds, spec.inner_steps
    for replica in spec.config.replicas:
        if isinstance(replica, ParticipantsReplica):
            for direction, load in stage_link_loads(spec, replica).items():
                expected = rounds * steps * load.step + (rounds + 1) * load.evaluation
                assert [measured[f"home.{hop}-{hop + 1}"][direction] for hop in range(2)] == [expected] * 2
    for member in spec.members.values():
        loads = exchange_link_loads(spec, member)
        link = measured[f"{member.name}-exchange"]
        downloaded = rounds * loads["backward"].outer_round + checkpoint_bytes(spec, member)
        assert link["forward"] == pytest.approx(rounds * loads["forward"].outer_round, rel=0.1)
        assert link["backward"] == pytest.approx(downloaded, rel=0.1)


def _stage_messages(spec: RunSpec, replica: ParticipantsReplica) -> dict[Direction, Iterator[Message]]:
    """Return every message between two stages in a whole run. Its tensors have a size but no data."""
    data, rounds, steps = spec.config.data, spec.config.rounds, spec.inner_steps
    rows, length = replica.batch_size // replica.micro_batches, data.sequence_length
    assert rows == 1
    rank = replica.boundary.dimensions(spec.shape.width)
    assert rank is not None and replica.boundary.dtype == "bf16"
    coefficients = torch.empty(rows, length, rank, dtype=torch.bfloat16, device="meta")
    ids = torch.empty(rows * (length + 1), dtype=torch.uint8, device="meta")  # 256 ids: a byte each

    def forward() -> Iterator[Message]:
        for round_ in range(rounds + 1):
            for step in range(steps if round_ > 0 else 0):
                for index in range(replica.micro_batches):
                    header = LinkHeader(purpose=ACTIVATION, round=round_, step=step, micro_batch=index, rows=rows)
                    if step > 0 and index == 0:
                        header.gradient_norm = 1.0
                    yield Message(header, (ids, coefficients))
            if round_ > 0:
                yield Message(LinkHeader(purpose=FLUSH, round=round_, gradient_norm=1.0))
            for index in range(data.validation_sequences // rows):
                header = LinkHeader(purpose=EVALUATION, round=round_, micro_batch=index, rows=rows)
                yield Message(header, (ids, coefficients))

    def backward() -> Iterator[Message]:
        for round_, step in product(range(1, rounds + 1), range(steps)):
            for index in range(replica.micro_batches):
                header = LinkHeader(purpose=GRADIENT, round=round_, step=step, micro_batch=index)
                if index == replica.micro_batches - 1:
                    header.squared_norm = 1.0
                yield Message(header, (coefficients,))

    return {"forward": forward(), "backward": backward()}


def test_stage_links_carried_their_messages_and_nothing_else(both: dict[str, Path]) -> None:
    """Bytes on the wire agree exactly, with headers and framing."""
    spec = RunSpec(ConfigFile(both["grpc"] / "config.yaml").config, 256)
    summary = json.loads((both["grpc"] / "summary.json").read_text())
    measured = {link["name"]: link["wire_bytes"] for link in summary["links"]}
    [home] = [replica for replica in spec.config.replicas if isinstance(replica, ParticipantsReplica)]
    for direction, messages in _stage_messages(spec, home).items():
        frames = [4 + sealed(one).header.ByteSize() + one.payload_bytes for one in messages]
        assert max(frames) < 16000
        expected = sum(size + 5 + 9 for size in frames)  # one gRPC message in one HTTP/2 frame each
        assert [measured[stage_link_name("home", hop)][direction] for hop in range(2)] == [expected] * 2


def test_links_carried_what_simulate_predicts(both: dict[str, Path]) -> None:
    """These are bytes on the wire. The prediction leaves out evaluation and the run checkpoint before the rounds."""
    spec = RunSpec(ConfigFile(both["grpc"] / "config.yaml").config, 256)
    summary = json.loads((both["grpc"] / "summary.json").read_text())
    measured = {link["name"]: link["wire_bytes"] for link in summary["links"]}
    rounds, batches = spec.config.rounds, spec.config.data.validation_sequences
    [home] = [replica for replica in spec.config.replicas if isinstance(replica, ParticipantsReplica)]
    evaluation = batches * message_bytes(spec, home)["evaluation"]
    for link in (link for replica in predict(spec).replicas for link in replica.links):
        if link.name.endswith("exchange"):
            assert measured[link.name]["forward"] == pytest.approx(rounds * link.forward_bytes, rel=0.1)
        else:  # some headers are a few bytes longer or shorter than the predicted one
            assert measured[link.name]["backward"] == pytest.approx(rounds * link.backward_bytes, rel=0.01)
            assert measured[link.name]["forward"] == pytest.approx(rounds * link.forward_bytes + evaluation, rel=0.01)
