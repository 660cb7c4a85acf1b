"""Rounds of fragments: bytes of each round as predicted and measured, and the times of a period."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from grpc_threads import run_over_grpc

from hetero_pp.config.folder import RunFolder
from hetero_pp.config.run_config import RunConfig
from hetero_pp.config.spec import RunSpec
from hetero_pp.config.yaml_file import ConfigFile
from hetero_pp.messages.messages_pb2 import Report
from hetero_pp.program.launch import in_process
from hetero_pp.simulator.exchange_load import exchange_load
from hetero_pp.simulator.planner.schedules import choose_outer, with_outer
from hetero_pp.simulator.prediction import predict, waiting
from hetero_pp.simulator.traffic import checkpoint_bytes, exchange_calls, exchange_link_loads, expected_volume

YAML = """\
name: small
model: {preset: micro, width: 32, heads: 2, feed_forward: 64, layers: 4}
data: {corpus: CORPUS, sequence_length: 32, validation_share: 0.2, validation_sequences: 2}
inner: {steps: 2}
outer: {rounds: 6, fragments: 4, compression: {density: 1}}
links:
  home: {bandwidth: 20 Mbit/s, latency: 1 ms}
replicas:
  - {name: dc, kind: datacenter, batch_size: 2, uplink: home, hardware: slow}
  - {name: few, kind: participants, stages: [{layers: 1}, {layers: 2}, {layers: 1}], batch_size: 2, micro_batches: 2,
     link: home, uplink: home, boundary: {rank: 1/2}, hardware: slow}
simulate:
  hardware:
    slow: {flops: 20 GFLOP/s, mfu: 0.5, memory: 1 GB, memory_bandwidth: 1000 MB/s, source: a test}
"""
ROUNDS = 6


def _config(corpus: Path, folder: Path, **outer: Any) -> RunConfig:
    path = folder / "run.yaml"
    path.write_text(YAML.replace("CORPUS", str(corpus)))
    config = ConfigFile(path).config
    return config.model_copy(update={"outer": config.outer.model_copy(update=outer)})


def _carried(reports: list[Report]) -> dict[tuple[str, str, int], int]:
    """Return (link, direction, round) -> bytes of tensors, as last reported."""
    used = [report.link_use for report in reports if report.HasField("link_use")]
    return {(one.link, one.direction, one.round): one.payload_bytes for one in used}


@pytest.mark.parametrize("way", ["in process", "rehearsal", "rehearsal with overlap"])
def test_each_round_carries_the_predicted_bytes_of_its_fragment(way: str, corpus: Path, tmp_path: Path) -> None:
    config = _config(corpus, tmp_path, overlap=int("overlap" in way))
    spec, tolerance = RunSpec(config, 256), 0.25  # the size of a real blob depends on its values
    if way != "in process":
        tolerance, spec = 0.0, RunSpec(config.as_rehearsal(3, 1), 256)
        assert spec.config.rounds == 5 + config.outer.overlap  # the first, one of each fragment, and the last
        reports = run_over_grpc(spec, tmp_path / "rehearsal", dict.fromkeys(spec.members, torch.device("cpu"))).reports
    else:
        reports = []
        (tmp_path / "run").mkdir()
        in_process.run_in_process(spec, RunFolder(tmp_path / "run"), reports.append)
    carried = _carried(reports)
    sent = {}
    for name, member in spec.members.items():
        for round_ in range(1, spec.config.rounds + 1):
            for direction, load in exchange_link_loads(spec, member, round_).items():
                measured = carried.get((f"{name}-exchange", direction, round_), 0)
                assert measured == pytest.approx(load.outer_round, rel=tolerance), (name, round_)
                sent[name, direction, round_] = load.outer_round
    assert len({sent["dc", "forward", round_] for round_ in (1, 2, 3, 4)}) == 3  # two rounds are of a layer alone
    assert [sent["few.1", "forward", round_] > 0 for round_ in (1, 2, 3, 4, 5)] == [False, True, True, False, False]
    assert sent["few.1", "backward", 1] == sent["few.1", "backward", 5] > 0  # the embedding that it follows
    assert all(checkpoint_bytes(spec, member) for member in spec.members.values())


@pytest.mark.parametrize("overlap", [0, 1])
def test_a_period_is_predicted_with_its_mean_and_each_round(overlap: int, corpus: Path, tmp_path: Path) -> None:
    spec = RunSpec(_config(corpus, tmp_path, overlap=overlap), 256)
    whole = RunSpec(_config(corpus, tmp_path, overlap=overlap, fragments=1), 256)
    found, of_whole = predict(spec), predict(whole)
    seconds = [one.round_seconds for one in found.fragments]
    assert len(seconds) == 4 and len(of_whole.fragments) == 1
    assert found.round_seconds == pytest.approx(sum(seconds) / 4)
    assert of_whole.fragments[0].round_seconds == of_whole.round_seconds
    if not overlap:  # the rounds of a period carry the bytes of one round of the whole model, and do its work
        assert found.outer_seconds < of_whole.outer_seconds
        assert max(seconds) > min(seconds)
        assert sum(one.outer_seconds for one in found.fragments) < 2 * of_whole.outer_seconds
    for name, of_all in (("few", of_whole.replicas[1]), ("dc", of_whole.replicas[0])):
        [own] = [one for one in found.replicas if one.name == name]
        assert 4 * own.sent_bytes == pytest.approx(of_all.sent_bytes)
        assert 4 * own.received_bytes == pytest.approx(of_all.received_bytes)
    each, once = exchange_load(spec), exchange_load(whole)
    assert 4 * each.contributions.received == pytest.approx(once.contributions.received)
    assert 4 * each.cpu_seconds["decoding"] == pytest.approx(once.cpu_seconds["decoding"])
    volumes = [expected_volume(spec, 2, round_).gather for round_ in range(1, 5)]
    assert sum(volumes) == pytest.approx(expected_volume(whole, 2).gather)
    calls = [exchange_calls(spec, spec.members["few.1"], round_) for round_ in range(1, 5)]
    assert [count > 0 for count in calls] == [True, True, True, False]  # it follows the embedding in the first round


@pytest.mark.parametrize("fragments", [1, 4])
def test_longer_rounds_are_not_fewer_than_fragments(fragments: int, corpus: Path, tmp_path: Path) -> None:
    """A plan chooses among more inner steps, and replicas that wait are told of rounds of a given time."""
    config = _config(corpus, tmp_path, rounds=8, fragments=fragments)
    config = config.model_copy(update={"inner": config.inner.model_copy(update={"steps": 10})})
    chosen, _ = choose_outer(config, 256, allowed=0.0)
    with_outer(config, chosen.length, chosen.density).check()
    assert chosen.length == (15 if fragments == 4 else 50)
    short = RunSpec(_config(corpus, tmp_path, rounds=fragments, fragments=fragments), 256)
    waits = waiting(short, predict(short))
    assert waits is not None and (waits.timed is None) == (fragments == 4)  # one round would train as much
