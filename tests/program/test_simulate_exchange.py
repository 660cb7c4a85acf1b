"""Exchange of contributions: bytes and times against closed forms, the real encoder and a brute-force link."""

from __future__ import annotations

import io
import json
import re
import runpy
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from hetero_pp.config.lines import EXCHANGE
from hetero_pp.config.spec import RunSpec
from hetero_pp.config.yaml_file import ConfigFile, spec_of
from hetero_pp.core.errors import ConfigError
from hetero_pp.link.protocol import raw_frames, wire_bytes
from hetero_pp.model.transformer import shapes_by_block
from hetero_pp.program.cli import app
from hetero_pp.program.simulate import print_exchange
from hetero_pp.pseudo_gradient.contribution import BlobAddress, encode_blob
from hetero_pp.pseudo_gradient.error_feedback import select
from hetero_pp.simulator.exchange_load import ExchangeLoad, exchange_load
from hetero_pp.simulator.prediction import Prediction, predict
from hetero_pp.simulator.rounds import all_sent, fair_ends
from hetero_pp.simulator.traffic import (
    blob_sizes,
    checkpoint_bytes,
    exchange_link_loads,
    expected_volume,
    message_bytes,
    replica_count,
    sum_bytes,
)

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs"
REPLICAS, CONTRIBUTE, APPLY = 5, 3.0, 4.0
UP, DOWN = 1e6, 5e6
COST = "{forward: 1 s, backward: 2 s, update: 0.5 s, contribute: 3 s, apply: 4 s, evaluate: 1 s}"
AT_ONCE = COST.replace("0.5 s", "0 s")
"""Costs without updates. Stages update one after another, so without updates all stages finish at once."""

MODEL = """\
name: t
model: {preset: micro, vocabulary: 512}
data: {sequence_length: 32, validation_sequences: 8}
inner: {steps: 5}
links:
  home: {forward: {bandwidth: 1 Mbit/s}, backward: {bandwidth: 5 Mbit/s}}
"""
WHOLE = f"""\
outer: {{rounds: 4}}
replicas:
  - {{name: dc, kind: datacenter, batch_size: 8, uplink: home}}
simulate:
  fleets: {{dc: {{count: {REPLICAS}}}}}
  measured: {{dc: {COST}}}
"""
AT_ONE_SITE = f"""\
outer: {{rounds: 4}}
replicas:
  - {{name: dc, kind: datacenter, batch_size: 8, uplink: home}}
  - {{name: group, kind: participants, stages: 2, batch_size: 8, uplink: home}}
simulate:
  measured: {{dc: {AT_ONCE}, group.0: {AT_ONCE}, group.1: {AT_ONCE}}}
"""


def _spec(folder: Path, text: str, *overrides: str) -> RunSpec:
    path = folder / "t.yaml"
    path.write_text(MODEL + text)
    return spec_of(ConfigFile(path, overrides))


def _whole(folder: Path, *overrides: str) -> tuple[RunSpec, Prediction]:
    spec = _spec(folder, WHOLE, *overrides)
    return spec, predict(spec)


def _contribution(spec: RunSpec, density: float | None = None, value_bits: int | None = None) -> dict[str, int]:
    """Return the bytes by block that the real encoder writes for random pseudo-gradients."""
    compression = spec.config.outer.compression
    changed = {"density": density or compression.density, "value_bits": value_bits or compression.value_bits}
    compression = compression.model_copy(update=changed)
    sizes = {}
    for block, shapes in shapes_by_block(spec.parameter_shapes).items():
        chosen = [
            (name, tuple(shape), select(torch.zeros(shape), torch.randn(shape), compression))
            for name, shape in shapes.items()
        ]
        sizes[block] = len(encode_blob(BlobAddress(spec.run, 1, EXCHANGE, block), chosen, compression))
    return sizes


DENSE = ("outer.method=diloco", "simulate.exchange=ring_all_reduce")


@pytest.mark.parametrize(
    ("overrides", "sent", "received"),
    [
        (("simulate.exchange=gather",), 1, REPLICAS - 1),
        (("simulate.exchange=ring_all_gather",), REPLICAS - 1, REPLICAS - 1),
        (DENSE, 2 * (REPLICAS - 1) / REPLICAS, 2 * (REPLICAS - 1) / REPLICAS),
        (("outer.method=diloco", "simulate.exchange=parameter_server"), 1, 1),
        (("outer.method=adamw_ddp", "inner.steps=1", "simulate.exchange=ring_all_reduce"), 1.6, 1.6),
    ],
)
def test_bytes_of_a_replica_are_multiples_of_a_contribution(
    tmp_path: Path, overrides: tuple[str, ...], sent: float, received: float
) -> None:
    spec, found = _whole(tmp_path, *overrides)
    contribution = sum(_contribution(spec).values())
    [replica] = found.replicas
    assert replica.sent_bytes == pytest.approx(sent * contribution, rel=0.1)  # an estimate, and framing
    assert replica.received_bytes == pytest.approx(received * contribution, rel=0.1)
    assert found.rounds == pytest.approx(4)
    assert found.sent_bytes == pytest.approx(4 * replica.sent_bytes)


def _aggregate(spec: RunSpec) -> dict[str, int]:
    return sum_bytes(spec, replica_count(spec))


def test_sums_on_their_way_are_what_the_encoder_would_write(tmp_path: Path) -> None:
    # An aggregate is what the encoder would write. The replicas kept different positions, so the aggregate has
    # the values of all, in fp32.
    spec = _spec(tmp_path, WHOLE, "simulate.exchange=parameter_server")
    assert _aggregate(spec) == pytest.approx(_contribution(spec, REPLICAS / 32, 32), rel=0.1)
    received = predict(spec).replicas[0].received_bytes
    assert received == sum(wire_bytes(raw_frames(size)) for size in _aggregate(spec).values())
    many = _spec(tmp_path, WHOLE, "simulate.exchange=parameter_server", "simulate.fleets.dc.count=40")
    assert _aggregate(many) == pytest.approx(_contribution(many, 1.0, 32), rel=0.1)

    # In a sparse ring sums grow on their way. Each sends fifths of the sums of 1, 2, 3 and 4 contributions, then
    # four fifths of the sum of all five.
    spec, found = _whole(tmp_path, "simulate.exchange=sparse_ring")
    sums = [sum(_contribution(spec, count / 32, 32).values()) for count in range(1, REPLICAS + 1)]
    [replica] = found.replicas
    assert replica.sent_bytes == pytest.approx((sum(sums[:-1]) + 4 * sums[-1]) / REPLICAS, rel=0.1)
    assert replica.received_bytes == replica.sent_bytes
    assert expected_volume(spec, REPLICAS).sparse_ring == pytest.approx(replica.sent_bytes, rel=0.01)  # without framing


def test_a_round_through_the_exchange_is_up_then_down(tmp_path: Path) -> None:
    _, found = _whole(tmp_path)
    [replica] = found.replicas
    seconds = replica.sent_bytes * 8 / UP + replica.received_bytes * 8 / DOWN
    assert found.outer_seconds == pytest.approx(CONTRIBUTE + seconds + APPLY)


@pytest.mark.parametrize(("overrides", "steps"), [(("simulate.exchange=ring_all_gather",), 4), (DENSE, 8)])
def test_a_ring_takes_its_slower_direction_and_a_latency_a_step(
    tmp_path: Path, overrides: tuple[str, ...], steps: int
) -> None:
    latencies = ("links.home.forward.latency=2 s", "links.home.backward.latency=3 s")
    _, found = _whole(tmp_path, *overrides, *latencies)
    seconds = found.replicas[0].sent_bytes * 8 / UP + steps * (2 + 3)
    assert found.outer_seconds == pytest.approx(CONTRIBUTE + seconds + APPLY)


def _one_after_the_other(starts: list[float], sizes: list[float], bandwidth: float) -> float:
    free = 0.0
    for start, size in sorted(zip(starts, sizes, strict=True)):
        free = max(free, start) + size * 8 / bandwidth
    return free


JOBS = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 50)), min_size=1, max_size=6)


@given(JOBS)
def test_a_shared_link_is_done_as_a_queue_is(jobs: list[tuple[int, int]]) -> None:
    starts, sizes = ([float(one[index]) for one in jobs] for index in (0, 1))
    assert all_sent(list(zip(starts, sizes, strict=True)), 16.0) == pytest.approx(
        _one_after_the_other(starts, sizes, 16.0)
    )


@given(st.lists(st.integers(1, 40), min_size=1, max_size=5))
@settings(max_examples=50)
def test_fair_ends_are_those_of_small_turns(sizes: list[int]) -> None:
    """The reference sends one byte in turn for each transfer with bytes left. Results differ by at most one turn."""
    left, now, ends = list(sizes), 0, [0.0] * len(sizes)
    while any(left):
        for index in range(len(left)):
            if left[index]:
                left[index] -= 1
                now += 1
                ends[index] = float(now)
    assert fair_ends([(float(size), 1) for size in sizes], 8.0) == pytest.approx(ends, abs=len(sizes))


def _at_one_site(folder: Path, members: str) -> Prediction:
    line = f"lines={{home: {{up: {UP} bit/s, down: {DOWN} bit/s}}}}"
    return predict(_spec(folder, AT_ONE_SITE, line, f"sites={{office: {{members: {members}, line: home}}}}"))


def test_members_of_one_site_share_its_line(tmp_path: Path) -> None:
    """Sent one by one or together, the last byte arrives when the link has carried all bytes."""
    free = predict(_spec(tmp_path, AT_ONE_SITE))
    dc, group = free.replicas
    assert dc.inner_seconds < group.inner_seconds  # so the datacenter's is sent before the group begins
    early = group.inner_seconds - dc.inner_seconds
    assert early > dc.sent_bytes * 8 / UP
    found = _at_one_site(tmp_path, "[dc, group]")
    sizes = np.array([dc.received_bytes, *(stage.received_bytes for stage in group.stages)])
    seconds = group.sent_bytes * 8 / UP + sizes.sum() * 8 / DOWN
    assert found.outer_seconds == pytest.approx(CONTRIBUTE + seconds + APPLY)


@pytest.mark.parametrize(
    ("text", "overrides", "words"),
    [
        (
            AT_ONE_SITE,
            ["simulate.exchange=ring_all_gather"],
            "with participant groups, expected datacenter replicas only",
        ),
        (WHOLE, ["simulate.exchange=ring_all_reduce"], "at density 0.0312, expected 1"),
        (
            WHOLE,
            ["simulate.exchange=ring_all_gather", "lines.hub.up=1 Gbit/s", "exchange.line=hub"],
            "expected no sites",
        ),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, text: str, overrides: list[str], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        predict(_spec(tmp_path, text, *overrides))
    assert words in str(error.value)


def test_seventy_billion_parameters_over_the_internet() -> None:
    """Gaps are geometric, and 32 of 4096 values have 1.25 bits each.

    The upload runs at 110 Mbit/s, and the download of 19 contributions at 500 Mbit/s.
    """
    spec = spec_of(ConfigFile(CONFIGS / "paper" / "sparseloco_70b.yaml"))
    found = predict(spec)
    parameters = sum(int(np.prod(shape)) for shape in spec.parameter_shapes.values())
    gap = 7 - 127 * np.log2(127 / 128)
    contribution = parameters / 128 * (gap + 1.25) / 8
    assert found.replicas[0].sent_bytes == pytest.approx(contribution, rel=0.002)
    seconds = contribution * 8 / 110e6 + 19 * contribution * 8 / 500e6
    assert found.outer_seconds == pytest.approx(seconds, rel=0.005)


RELAYED = """\
exchange: {listen: "0.0.0.0:0"}
replicas:
  - {name: home, kind: participants, count: 3, stages: 3, batch_size: 8, micro_batches: 4}
  - {name: near, kind: participants, stages: [{layers: 2}, {layers: 2, listen: "10.0.0.2:47601"}], batch_size: 8}
outer: {rounds: 4}
"""


def test_the_exchange_carries_what_all_its_links_carry(tmp_path: Path) -> None:
    """Both directions agree to the byte. A group's stages fetch their own layers from all other replicas."""
    spec = _spec(tmp_path, AT_ONE_SITE)
    found, load = predict(spec), exchange_load(spec)
    links = [link for replica in found.replicas for link in replica.links if link.name.endswith("-exchange")]
    assert load.contributions.received == sum(link.forward_bytes for link in links)
    assert load.contributions.sent == sum(link.backward_bytes for link in links)
    payload = [exchange_link_loads(spec, member) for member in spec.members.values()]
    assert load.contributions.sent == pytest.approx(sum(one["backward"].outer_round for one in payload), rel=0.01)
    assert load.contributions.received == pytest.approx(sum(map(_size, blob_sizes(spec).values())), rel=0.01)
    assert load.first_checkpoint_bytes == sum(checkpoint_bytes(spec, member) for member in spec.members.values())
    assert load.largest_checkpoint_bytes == checkpoint_bytes(spec, spec.members["dc"])
    assert found.exchange == load
    assert found.as_json()["exchange"]["contributions"] == {
        "received": load.contributions.received,
        "sent": load.contributions.sent,
    }


def _size(blobs: dict[str, int]) -> int:
    return sum(blobs.values())


def test_stage_links_without_an_address_pass_the_exchange(tmp_path: Path) -> None:
    spec = _spec(tmp_path, RELAYED)
    load, sizes = exchange_load(spec), message_bytes(spec, spec.config.replicas[0])
    a_link = 5 * 4 * (sizes["activation"] + sizes["gradient"]) + 4 * sizes["evaluation"]
    assert load.relayed_links == 3 * 2  # the link of `near` is not relayed
    assert load.relayed is not None
    assert load.relayed.received == load.relayed.sent == 6 * a_link
    assert exchange_load(_spec(tmp_path, RELAYED, "exchange.listen=127.0.0.1:47600")).relayed_links == 0
    assert exchange_load(_spec(tmp_path, RELAYED, "exchange.insecure=true")).relayed_links == 0  # only TLS is relayed
    timed = _spec(tmp_path, RELAYED, "inner={seconds: 60 s}")
    assert exchange_load(timed).relayed is None
    assert exchange_load(timed, {"home-1": 5.0}).relayed == load.relayed


def test_what_does_not_cross_the_exchange_costs_it_nothing(tmp_path: Path) -> None:
    # A store carries contributions instead of the exchange. The exchange reads each contribution twice and sends
    # none.
    direct = exchange_load(_spec(tmp_path, WHOLE))
    stored = exchange_load(_spec(tmp_path, WHOLE, "store.url=s3://bucket/runs"))
    assert (stored.way, stored.contributions.sent) == ("store", 0)
    assert stored.contributions.received == 2 * direct.contributions.received
    assert exchange_load(_spec(tmp_path, WHOLE, f"store.url={tmp_path}")).contributions == direct.contributions

    # In a ring nothing crosses the exchange and it is given no line.
    spec = _spec(tmp_path, WHOLE, "simulate.exchange=ring_all_gather")
    load = exchange_load(spec)
    assert (load.contributions.received, load.contributions.sent) == (0, 0)
    assert "decoding" not in load.memory_bytes
    assert load.cpu_seconds["transfer"] == 0
    assert "set exchange.line" not in _said_of_exchange(spec)

    # Members at the site of the exchange cost it cpu and no line.
    two = WHOLE.partition("simulate:")[0] + "  - {name: other, kind: datacenter, batch_size: 8, uplink: home}\n"
    away = exchange_load(_spec(tmp_path, two))
    own = two.replace("dc, kind: datacenter, batch_size: 8, uplink: home", "dc, kind: datacenter, batch_size: 8")
    site = "sites={hub: {line: fibre, members: [dc, exchange]}}"
    beside = exchange_load(_spec(tmp_path, own, "lines.fibre.bandwidth=1 Gbit/s", site))
    assert beside.contributions.received < away.contributions.received
    assert beside.cpu_seconds["transfer"] == away.cpu_seconds["transfer"] > 0


def _said_of_exchange(spec: RunSpec) -> str:
    out = io.StringIO()
    print_exchange(Console(file=out, width=200), exchange_load(spec))
    return " ".join(out.getvalue().split())


RESULTS = ROOT / "benchmarks" / "results"
MEMORY, CPU = (
    json.loads((RESULTS / f"exchange-load_{name}.json").read_text())
    for name in ("amd-epyc_2026-11-25", "intel-xeon_2026-11-27")
)
"""Runs with their memory, and newer runs with their CPU seconds.

In the newer file an idle Python has more memory than the smallest exchanges, so its memory is not used.
"""


def _load_of(measured: dict[str, Any], folder: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch) -> ExchangeLoad:
    """Return the predicted load of a run of the benchmark."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    run = runpy.run_path(str(ROOT / "benchmarks" / "exchange_load.py"))["Run"](**measured["settings"])
    path = folder / "t.yaml"
    path.write_text(run.yaml(corpus))
    return exchange_load(spec_of(ConfigFile(path)))


@pytest.mark.parametrize("measured", MEMORY["runs"], ids=lambda one: one["run"])
def test_memory_of_the_exchange_is_that_of_launched_runs(
    measured: dict[str, Any], tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The largest tensors of all replicas are decoded at once in the prediction, but in a run only by chance.

    With many values that is most of the memory.
    """
    load = _load_of(measured, tmp_path, corpus, monkeypatch)
    share = sum(load.memory_bytes.values()) / (measured["measured"]["memory_bytes"] - MEMORY["idle_bytes"])
    assert 0.75 <= share <= (1.25 if measured["settings"]["density"] < 1 / 8 else 2.0)


def test_cpu_of_the_exchange_is_that_of_launched_runs(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine took twice as long as predicted: within 25 %, or 75 % with eight processes on its two cores."""
    slower = {
        one["run"]: one["measured"]["cpu_seconds"]
        / sum(_load_of(one, tmp_path, corpus, monkeypatch).cpu_seconds.values())
        for one in CPU["runs"]
    }
    usual = statistics.median(slower.values())
    assert usual == pytest.approx(2.0, rel=0.05)
    for run, ratio in slower.items():
        assert ratio / usual == pytest.approx(1.0, abs=0.75 if run.endswith("-8") else 0.25), run


@pytest.mark.parametrize("command", ["simulate", "check", "plan"])
def test_a_missing_line_of_the_exchange_is_said(command: str, tmp_path: Path, corpus: Path) -> None:
    path = tmp_path / "t.yaml"
    path.write_text(MODEL.replace("{sequence", f"{{corpus: {corpus}, validation_share: 0.2, sequence") + RELAYED)

    def said(*options: str) -> str:
        planned = ["--target-utilization", "0.001", "--write", str(tmp_path / "plan.yaml")] if command == "plan" else []
        sets = [word for one in options for word in ("--set", one)]
        result = CliRunner().invoke(app, [command, str(path), *planned, *sets])
        assert result.exit_code == 0, result.stderr
        return " ".join(result.stdout.split())

    without = said()
    expected = (
        r"exchange: no line is set, so its bandwidth is assumed to be unlimited; it sends [\d.]+ [kM]B per round: at "
    )
    assert re.search(expected + r"1 Gbit/s that takes [\d.]+ m?s; set exchange.line", without)
    assert "6 relayed stage links" in without
    assert "to each member that joins" in without
    assert "of memory (process 50 MB, members " in without
    lined = said("lines={fibre: {bandwidth: 100 Mbit/s}}", "exchange.line=fibre")
    assert "no line is set" not in lined
    assert "fibre: 100 Mbit/s down, 100 Mbit/s up" in lined
