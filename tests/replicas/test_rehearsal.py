"""Members of a rehearsal over real gRPC, beside a real run of the same topology, and what a rehearsal of 7B holds."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from grpc_threads import Ran, run_over_grpc
from live_bytes import LiveBytes

from hetero_pp.config.folder import RunFolder
from hetero_pp.config.run_config import RunConfig
from hetero_pp.config.spec import RunSpec
from hetero_pp.config.yaml_file import ConfigFile
from hetero_pp.core.errors import MalformedContribution
from hetero_pp.messages.messages_pb2 import NewestCheckpointReply, Report
from hetero_pp.model.transformer import shapes_by_block
from hetero_pp.pseudo_gradient.contribution import BlobAddress, ReceivedBlob
from hetero_pp.simulator.costs import cost_of
from hetero_pp.simulator.prediction import predict
from hetero_pp.simulator.traffic import blob_sizes, exchange_link_loads
from replica_groups.engines.timed import TimedPace
from replica_groups.exchange.log import open_log
from replica_groups.member.rehearsed import RehearsedRound
from replica_groups.member.session import MemberSession
from replica_groups.member.trainers import build_from_checkpoint

ROUNDS, STEPS = 2, 3
YAML = f"""\
name: small
model: {{preset: micro, width: 32, heads: 2, feed_forward: 64}}
data: {{corpus: CORPUS, sequence_length: 32, validation_share: 0.2, validation_sequences: 5}}
inner: {{steps: {STEPS}}}
outer: {{rounds: {ROUNDS}, compression: {{density: 1/32}}}}
links:
  home: {{bandwidth: 20 Mbit/s, latency: 1 ms}}
replicas:
  - {{name: dc, kind: datacenter, batch_size: 4, micro_batches: 2, uplink: home, hardware: slow}}
  - {{name: few, kind: participants, stages: 3, batch_size: 6, micro_batches: 3, link: home, uplink: home,
     boundary: {{rank: 1/2, bits: 4}}, hardware: slow}}
  - {{name: half, kind: participants, stages: 2, batch_size: 4, micro_batches: 2, link: home, uplink: home,
     boundary: {{rank: 1/8}}, hardware: slow}}
simulate:
  hardware:
    slow: {{flops: 2 GFLOP/s, mfu: 0.5, memory: 1 GB, memory_bandwidth: 100 MB/s, source: a test}}
"""
SEVEN_BILLION = """\
name: large
model: {width: 4096, layers: 32, heads: 32, feed_forward: 11008, vocabulary: 32000}
data: {sequence_length: 2048, validation_sequences: 4}
outer: {rounds: 2, compression: {density: 1/128}}
replicas:
  - {name: home, kind: participants, stages: 16, batch_size: 16, micro_batches: 16, boundary: {rank: 1/8}}
"""


def _config(text: str, folder: Path) -> RunConfig:
    path = folder / "run.yaml"
    path.write_text(text)
    return ConfigFile(path).config


@pytest.fixture(scope="module")
def runs(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[RunSpec, Ran, Ran, Path]:
    """Return the rehearsal's spec, what a real run and the rehearsal reported, and the rehearsal's folder."""
    folder = tmp_path_factory.mktemp("rehearsed")
    config = _config(YAML.replace("CORPUS", str(corpus)), folder)
    real, spec = RunSpec(config, 256), RunSpec(config.as_rehearsal(ROUNDS, STEPS), 256)
    cpu = dict.fromkeys(spec.members, torch.device("cpu"))
    trained, rehearsed = (run_over_grpc(one, folder / name, cpu) for one, name in ((real, "real"), (spec, "rehearsal")))
    return spec, trained, rehearsed, folder / "rehearsal"


def _carried(ran: Ran) -> dict[tuple[str, str, int], tuple[int, int, int]]:
    """Return (link, direction, round) -> messages, bytes of tensors and bytes on the wire, as last reported."""
    used = [report.link_use for report in ran.reports if report.HasField("link_use")]
    return {(one.link, one.direction, one.round): (one.messages, one.payload_bytes, one.wire_bytes) for one in used}


def _rounds(ran: Ran) -> list[Report]:
    return [report for report in ran.reports if report.HasField("member_round")]


def test_links_between_stages_carry_the_same_bytes_as_in_a_run(runs: tuple[RunSpec, Ran, Ran, Path]) -> None:
    _, real, rehearsed, _ = runs
    between = {key: carried for key, carried in _carried(real).items() if not key[0].endswith("-exchange")}
    assert len(between) == 3 * 2 * (1 + ROUNDS)
    assert between == {key: carried for key, carried in _carried(rehearsed).items() if key in between}


def test_contributions_have_the_predicted_sizes_and_all_are_included(runs: tuple[RunSpec, Ran, Ran, Path]) -> None:
    spec, _, rehearsed, folder = runs
    carried = _carried(rehearsed)
    for name, member in spec.members.items():
        loads = exchange_link_loads(spec, member)
        for round_ in range(1, ROUNDS + 1):
            for direction, load in loads.items():
                assert carried[f"{name}-exchange", direction, round_][1] == load.outer_round, (name, direction)
    log = open_log(spec.config, RunFolder(folder))
    for round_ in range(1, ROUNDS + 1):
        record = log.read_record(round_)
        sizes = {one.replica: {blob.block: blob.size for blob in one.blobs} for one in record.contributions}
        assert sizes == blob_sizes(spec)
    assert {"dc", "few", "half"} == {
        one.round_verified.replica for one in rehearsed.reports if one.HasField("round_verified")
    }


def test_compute_is_that_of_the_simulator(runs: tuple[RunSpec, Ran, Ran, Path]) -> None:
    """No step can be faster than the schedule with these costs; how much slower depends on the machine of the test."""
    spec, _, rehearsed, _ = runs
    predicted = {replica.name: replica for replica in predict(spec).replicas}
    ends: dict[str, list[float]] = {}
    for report in rehearsed.reports:
        if report.HasField("inner_step") and report.inner_step.HasField("gradient_norm"):
            ends.setdefault(report.inner_step.replica, []).append(report.time)
    for name, times in ends.items():
        assert len(times) == ROUNDS * STEPS
        first = times[-STEPS:]
        assert (first[-1] - first[0]) / (STEPS - 1) > 0.97 * predicted[name].step_seconds
    for report in _rounds(rehearsed):
        if report.member_round.round == ROUNDS:
            member = spec.members[report.member]
            cost = cost_of(spec, member)
            trained = STEPS * (member.replica.micro_batches * (cost.forward + cost.backward) + cost.update)
            if member.stage is None:
                assert report.member_round.compute_seconds > 0.999 * trained
            else:
                assert report.member_round.compute_seconds == pytest.approx(trained)
            assert report.member_round.outer_seconds > cost.contribute + cost.apply


def test_no_member_and_no_exchange_holds_a_parameter(runs: tuple[RunSpec, Ran, Ran, Path]) -> None:
    spec, _, _, folder = runs
    log = open_log(spec.config, RunFolder(folder))
    for round_ in (0, ROUNDS):
        with log.open_checkpoint(round_) as checkpoint:
            assert not checkpoint.shapes


def test_all_members_of_a_rehearsal_of_7b_hold_little(tmp_path: Path) -> None:
    spec = RunSpec(_config(SEVEN_BILLION, tmp_path).as_rehearsal(2, 2), None)
    exchange: Any = MagicMock(call=lambda *_: NewestCheckpointReply())
    with LiveBytes() as live:
        members = [
            build_from_checkpoint(
                spec, member, MemberSession(exchange, member.name, member.replica.name, spec.run), None, tmp_path, None
            )
            for member in spec.members.values()
        ]
    message = 2048 * (4096 // 8) * 2
    assert 16 * message < live.most < 16 * 5 * message  # two messages of each stage, and what encodes them
    _, outer, _ = members[3]
    assert isinstance(outer, RehearsedRound)
    blobs = outer.blobs(round_=1, generation=2)
    shapes, sizes = shapes_by_block(spec.parameter_shapes), blob_sizes(spec)["home"]
    assert set(blobs) == {"layers.6", "layers.7"}
    for block in blobs:
        data, address = blobs[block], BlobAddress(spec.run, 1, "home", block)
        ReceivedBlob(data, address, shapes[block], spec.config.outer.compression)
        assert len(data) == sizes[block] and data == blobs[block] != outer.blobs(1, 3)[block]
        with pytest.raises(MalformedContribution):
            ReceivedBlob(data[:-1], address, shapes[block], spec.config.outer.compression)


def test_other_work_shortens_the_next_wait_and_waiting_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    now, waited, slept = [100.0], [5.0], list[float]()

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += seconds

    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "sleep", sleep)
    pace = TimedPace()
    pace.waited = lambda: waited[0]
    pace.begin()
    now[0] += 0.25  # the conversion of a message
    pace.compute(1.0)
    now[0] += 2.0  # waits for a neighbour
    waited[0] += 2.0
    pace.compute(1.0)
    now[0] += 1.5  # more than the device needs
    pace.compute(1.0)
    pace.compute(1.0)
    assert slept == [0.75, 1.0, 0.5]
    assert (pace.computed, pace.late) == (4.0, 0.5)
