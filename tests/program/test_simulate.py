"""`simulate` and `--sweep`: closed forms, the contents of written files, and one line for every mistake."""

from __future__ import annotations

import json
import re
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from asking import ask, told
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace, TrackEvent
from stage_members import StageMembers, group_spec, links_of

from hetero_pp.config.run_config import RunConfig
from hetero_pp.config.spec import RunSpec
from hetero_pp.config.yaml_file import ConfigFile, spec_of
from hetero_pp.link.in_process import in_process_pair
from hetero_pp.link.protocol import LinkEnds
from hetero_pp.model.part_settings import BoundarySettings
from hetero_pp.model.transformer import EMBEDDING, ModelShape, Transformer
from hetero_pp.program.calibrate import load_calibration
from hetero_pp.simulator.charts import Sweep
from hetero_pp.simulator.costs import UPDATE_BYTES, StagePart, boundary_numbers, forward_flops
from hetero_pp.simulator.memory import Phase, memory_of_member
from hetero_pp.simulator.prediction import Prediction, predict
from hetero_pp.simulator.rounds import fleets_of

CONFIGS = Path(__file__).parents[2] / "configs"
YAML = """\
name: t
model: {preset: micro, vocabulary: 512}
data: {sequence_length: 32, validation_sequences: 8}
inner: {steps: 5}
outer: {rounds: 4}
links:
  home: {bandwidth: 1 Mbit/s, latency: 10 ms}
replicas:
  - {name: dc, kind: datacenter, batch_size: 8, micro_batches: 2}
  - {name: home, kind: participants, stages: 4, batch_size: 8, micro_batches: 8, link: home, uplink: home,
     boundary: {rank: 1/8}}
simulate:
  measured:
"""
UNKNOWN = "found a name that no setting uses"
MACHINE = "{flops: 1 TFLOP/s, memory: 1 GB, memory_bandwidth: 1 GB/s}"
COST = "{forward: 1 s, backward: 2 s, update: 0.5 s, contribute: 3 s, apply: 4 s, evaluate: 1 s}"


@pytest.fixture
def yaml(tmp_path: Path) -> Path:
    path = tmp_path / "t.yaml"
    members = ("dc", "home.0", "home.1", "home.2", "home.3")
    path.write_text(YAML + "".join(f"    {member}: {COST}\n" for member in members))
    return path


def _predict(path: Path, *overrides: str) -> Prediction:
    return predict(spec_of(ConfigFile(path, overrides)))


def test_without_links_a_round_is_arithmetic(yaml: Path) -> None:
    """A round is inner loop, contribution, application and evaluation. The group's stages run 1F1B with its bubble."""
    free = ("links.home.bandwidth=1000 Tbit/s", "links.home.latency=0 s")
    found = _predict(yaml, *free)
    dc, home = found.replicas
    assert dc.step_seconds == pytest.approx(2 * 3 + 0.5)
    # 8 micro-batches of 3 s on the first stage, and the bubble of 3 more stages. Then a chain of 4 updates: each stage
    # makes its update when the next step's first activation arrives.
    step = 3 * (8 + 3) + 4 * 0.5
    assert home.step_seconds == pytest.approx(step)
    assert home.inner_seconds == pytest.approx(5 * step)
    assert home.bubble == pytest.approx(1 - (8 * 3 + 0.5) / step)
    assert home.exposed_communication == pytest.approx(0, abs=1e-6)
    assert found.utilization["relative"] == pytest.approx(1, abs=1e-6)
    evaluation = 8 + 3
    assert found.round_seconds == pytest.approx(5 * step + 3 + 4 + evaluation, rel=0.02)
    assert found.tokens_per_second == pytest.approx(5 * 2 * 8 * 32 / found.round_seconds)
    assert found.days == pytest.approx(4 * 5 * 2 * 8 * 32 / found.tokens_per_second / 86400)
    assert found.accelerator_hours == pytest.approx(5 * found.days * 24)


@pytest.mark.parametrize("key", ["links.home.bandwidth={} Mbit/s", "links.home.latency={} ms"])
def test_slower_links_never_help(yaml: Path, key: str) -> None:
    values = [0.1, 1, 10, 100] if "bandwidth" in key else [1000, 100, 10, 1]
    rounds = [_predict(yaml, key.format(value)).round_seconds for value in values]
    assert rounds == sorted(rounds, reverse=True)
    assert rounds[0] > rounds[-1]


def test_a_replica_that_others_wait_for_is_named(yaml: Path, tmp_path: Path) -> None:
    """The numbers are those of `simulate` for each replica in a YAML of its own, and for the YAML with that `inner`."""
    whole, dc, text = yaml, tmp_path / "dc.yaml", yaml.read_text()
    middle, end = text.index("  - {name: home"), text.index("simulate:")
    dc.write_text(text[:middle] + text[end:].split("    home.0")[0])
    code, out, errors = ask("simulate", str(whole), "--json", str(tmp_path / "found.json"))
    assert code == 0, errors
    found = json.loads((tmp_path / "found.json").read_text())
    waits = found["waiting"]
    assert waits["slowest"] == "home"
    inner = {one["name"]: one["inner_seconds"] for one in found["replicas"]}
    assert waits["shares"]["dc"] == pytest.approx((inner["home"] - inner["dc"]) / found["round_seconds"])
    assert waits["alone"]["dc"] == pytest.approx(_predict(dc).tokens_per_second)
    timed = waits["timed"]
    written = re.search(r"write `inner: ({.*?})`", " ".join(out.split()))
    assert written is not None
    inner_section = f"inner={written[1][:-1]}, learning_rate: 1e-2}}"
    again = _predict(whole, inner_section)
    assert again.tokens_per_second == pytest.approx(timed["tokens_per_second"])
    assert again.tokens_per_second > 1.1 * found["tokens_per_second"]
    assert {one.name: one.steps for one in again.replicas} == timed["steps"]
    said = " ".join(ask("check", whole, "--runs", tmp_path)[1].split())
    for line in ("waits for home: ", written[0]):
        assert line in " ".join(out.split())
        assert line in said
    for silent in ([str(whole), "--set", inner_section], [str(dc)]):
        code, out, errors = ask("simulate", *silent)
        assert (code, "waits for" in out) == (0, False), errors


def test_a_fleet_stands_for_equal_replicas_and_loses_members(yaml: Path) -> None:
    fleet = "simulate.fleets={home: {count: 400, churn: 1 %}}"
    found, one = _predict(yaml, fleet), _predict(yaml)
    home = found.replicas[1]
    assert (home.count, found.members) == (400, 1601)
    assert home.lost == 16  # 4 members of each leave with 1 %: 15.8 expected
    stay = 1 + 400 * 0.99**4
    assert found.tokens_per_second == pytest.approx(5 * 8 * 32 * stay / found.round_seconds)
    assert home.step_seconds == pytest.approx(one.replicas[1].step_seconds)
    assert found.round_seconds > one.round_seconds  # all receive the contributions of 401


@pytest.mark.parametrize(
    ("said", "accelerators"),
    [((), 16), (("replicas.0.accelerators=4",), 4), (("replicas.0.ranks=1", "replicas.0.nodes=1"), 1)],
)
def test_every_rank_is_an_accelerator(tmp_path: Path, said: tuple[str, ...], accelerators: int) -> None:
    """The count includes all nodes, unless the YAML sets it. Expected seconds are computed by hand from the catalog."""
    path = tmp_path / "t.yaml"
    path.write_text(
        "name: t\nmodel: {preset: 1b, vocabulary: 32000}\ndata: {sequence_length: 2048}\nouter: {rounds: 2}\n"
        "replicas:\n  - {name: dc, kind: datacenter, engine: torchtitan, ranks: 8, nodes: 2, batch_size: 32,\n"
        "     micro_batches: 2, rendezvous: '127.0.0.1:47500', hardware: h200}\n"
    )
    found = _predict(path, *said)
    [stage], spec = found.replicas[0].stages, spec_of(ConfigFile(path, said))
    flops = 3 * 2 * forward_flops(spec.shape, StagePart(16, True, 0), 16, 2048)
    update = UPDATE_BYTES * 1_204_881_408 / 4.8e12
    assert found.step_seconds == pytest.approx((flops / (0.4 * 989e12) + update) / accelerators)
    assert stage.memory_capacity_bytes == accelerators * 141e9
    assert found.accelerator_hours == pytest.approx(accelerators * found.days * 24)


def test_flops_follow_the_parameters() -> None:
    # Flops are six a parameter and token. The forward pass is a third of that. Attention comes on top, and the
    # embedding costs nothing.
    shape = spec_of(ConfigFile(CONFIGS / "simulate" / "ten_thousand.yaml")).shape
    whole = StagePart(shape.layers, True, 0)
    matrices = 512_398_848 - 32000 * 1536 - 25 * 1536
    attention = 12 * 2 * 2048 * 1536
    assert forward_flops(shape, whole, 1, 2048) == 2048 * (2 * matrices + attention)
    halves = [forward_flops(shape, StagePart(6, last, 0), 1, 2048) for last in (False, True)]
    assert sum(halves) == forward_flops(shape, whole, 1, 2048)

    # Flops follow the parameters of shared and wide heads. Scores of attention are of all heads of queries, as
    # wide as they are together.
    shape = ModelShape(width=64, layers=2, heads=4, kv_heads=2, head_width=24, feed_forward=96, vocabulary=100)
    with torch.device("meta"):
        matrices = sum(p.numel() for p in Transformer(shape, embeds=False).parameters() if p.ndim == 2)
    expected = 32 * (2 * matrices + 2 * 2 * 32 * 4 * 24)
    assert forward_flops(shape, StagePart(2, True, 0), 1, 32) == expected

    # Anchors cost a product a token. Anchors cost rank times width per token. Anchors as wide as the model cost
    # nothing.
    shape = spec_of(ConfigFile(CONFIGS / "simulate" / "ten_thousand.yaml")).shape
    flops = {}
    for rank in (None, 16, "full"):
        anchors = {} if rank is None else {"anchors": {"rank": rank}}
        own = boundary_numbers(shape, BoundarySettings.model_validate({"rank": 8, **anchors}), is_first=False)
        flops[rank] = forward_flops(shape, StagePart(3, False, 0, own), 2, 2048)
    assert flops[16] - flops[None] == 2 * 16 * 1536 * 2 * 2048
    assert flops["full"] == flops[None]


TITAN = """\
name: t
model: {preset: 1b, vocabulary: 32000}
data: {sequence_length: 2048}
outer: {rounds: 2}
replicas:
  - {name: east, kind: datacenter, engine: torchtitan, ranks: 8, batch_size: 1024, hardware: h100}
  - {name: home, kind: participants, count: 1, stages: 2, batch_size: 8, micro_batches: 8, hardware: rtx-4090}
"""
CHECKPOINTING = "replicas.0.torchtitan.activation_checkpointing"


def test_activation_checkpointing_keeps_less_and_computes_more(tmp_path: Path) -> None:
    """Activation checkpointing means what it means in torchtitan.

    With `full`, only a layer's input is kept. `selective` also keeps attention and every second matrix product.
    """
    path = tmp_path / "t.yaml"
    path.write_text(TITAN)
    kept, backward = {}, {}
    for chosen in ("none", "selective", "full"):
        spec = spec_of(ConfigFile(path, ["replicas.0.micro_batches=64", f"{CHECKPOINTING}={chosen}"]))
        east = spec.members["east"]
        kept[chosen] = memory_of_member(spec, east, accelerated=True).held("device")["activations"] / (2 * 16 * 2048)
        fleet = next(fleets_of(spec))
        backward[chosen] = fleet.group.backward[0] / fleet.group.forward[0]
    width, feed_forward, layers = 2048, 8192, 16
    head = 2 * 4 * 32000  # fp32 values, in units of bf16: more than a layer's recomputed ones
    assert kept["none"] == layers * (10 * width + 4 * feed_forward) + head
    assert kept["selective"] == layers * (5 * width + feed_forward) + head
    assert kept["full"] == layers * width + head
    assert backward["none"] == 2
    assert 2 < backward["selective"] < backward["full"] < 3  # the head is not recomputed


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ((), ["east needs 4.66 TB of memory, expected at most 640 GB: 4.02 TB too much (activations 4.65 TB, ",
              "--set replicas.east.micro_batches=8 saves 4.06 TB"]),
        (("replicas.0.micro_batches=128", "replicas.1.hardware=small", "simulate.hardware.small.memory=14 GB"),
         ["home-1.0 needs",
          "--set replicas.home.extra_in_flight=0 saves 1.74 GB"]),
        (("replicas.0.micro_batches=1024", "replicas.0.hardware=small", "replicas.0.ranks=1"),
         ["east needs 23.8 GB of memory, expected at most 20 GB", "weights and gradients 9.64 GB, moments 9.64 GB",
          "--set replicas.east.torchtitan.activation_checkpointing=full saves 3.36 GB, which is not enough"]),
    ],
)  # fmt: skip
def test_too_little_memory_says_of_what_and_which_key_helps(
    tmp_path: Path, changes: tuple[str, ...], told: list[str]
) -> None:
    path = tmp_path / "t.yaml"
    path.write_text(TITAN + "simulate:\n  hardware:\n    small: {flops: 10 TFLOP/s, memory: 20 GB, "
                    "memory_bandwidth: 1 TB/s}\n")  # fmt: skip
    code, _, errors = ask("simulate", str(path), *(word for one in changes for word in ("--set", one)))
    assert code == 2
    for words in told:
        assert words in errors
    if " saves " in told[-1] and "not enough" not in told[-1]:
        change = told[-1].split()[1]
        done = ask("simulate", str(path), *(word for one in (*changes, change) for word in ("--set", one)))
        assert done[0] == 0, done[2]


@pytest.mark.parametrize(("cell", "each"), [({"overlap": 1}, 8), ({"keep_local": True}, 4), ({"fragments": 2}, 4)])
def test_what_a_round_keeps_beside_is_so_many_bytes_a_parameter(cell: dict[str, Any], each: int) -> None:
    replica = {"name": "a", "kind": "datacenter"}
    held = []
    for outer in ({}, cell):
        config = RunConfig.model_validate({"name": "a", "outer": {"rounds": 2, **outer}, "replicas": [replica]})
        spec = RunSpec(config, 256)
        memory = memory_of_member(spec, spec.members["a"], accelerated=False)
        held.append(sum(term.n_bytes for term in memory.terms if Phase.STEP in term.phases))
    assert held[1] - held[0] == each * sum(prod(shape) for shape in spec.parameter_shapes.values())


@pytest.mark.parametrize(
    "boundary", [{}, {"embedding": "coefficients"}, {"anchors": {"rank": 4}}, {"anchors": {"rank": "full"}}]
)
def test_what_boundaries_hold_is_what_stages_hold(boundary: dict[str, Any], corpus: Path, tmp_path: Path) -> None:
    """The members have taken their first steps.

    T_perp is in every stage. The followed embedding and the anchors are in all stages but the first, with gradients and
    optimizer moments.
    """
    spec = group_spec(str(corpus), boundary)
    pairs = [in_process_pair(link, seed=1) for link in links_of(spec)]
    ends = zip([None, *(below for _, below in pairs)], [*(above for above, _ in pairs), None], strict=True)
    group = StageMembers(spec, [LinkEnds(*own) for own in ends], tmp_path)
    group.train(1)
    for member, outer, own in zip(group.members, group.outers, spec.members.values(), strict=True):
        stage, held = member.worker.stage, memory_of_member(spec, own, accelerated=False).in_phase(Phase.STEP)
        assert stage.boundary.perpendicular is not None
        assert held["T_perp"] == stage.boundary.perpendicular.nbytes
        assert held.get("followed embedding", 0) == (outer.theta[EMBEDDING].nbytes if own.follows_embedding else 0)
        learned = [] if stage.anchors is None else list(stage.anchors.parameters.values())
        moments = [] if stage.anchors is None else list(stage.anchors.optimizer.optimizers[0].state.values())
        kept = sum(2 * tensor.nbytes for tensor in learned)  # with its gradient during a step
        kept += sum(value.nbytes for one in moments for value in one.values() if value.ndim)
        assert held.get("anchors", 0) == kept
        own_state = [
            value for one in stage.optimizer.optimizers for each in one.state.values() for value in each.values()
        ]
        trained = getattr(stage.optimizer, "coefficients", None)
        boundary_numbers = 0 if trained is None else 2 * trained.nbytes  # C and its gradient
        assert held["optimizer"] == boundary_numbers + sum(value.nbytes for value in own_state if value.ndim)
        assert (kept > 0) == ("anchors" in boundary and own.follows_embedding)


def test_json_timeline_and_chart(yaml: Path, tmp_path: Path) -> None:
    paths = {name: tmp_path / f"out.{name}" for name in ("json", "pftrace", "png")}
    options = ["--json", paths["json"], "--timeline", paths["pftrace"], "--chart", paths["png"]]
    code, out, errors = ask("simulate", str(yaml), *map(str, options))
    assert code == 0, errors
    assert "tokens per second" in out
    content: dict[str, Any] = json.loads(paths["json"].read_text())
    assert content["round_seconds"] > content["step_seconds"] > 0
    assert set(content["utilization"]) == {"absolute", "relative"}
    assert [stage["member"] for stage in content["stages"]] == ["dc", "home.0", "home.1", "home.2", "home.3"]
    assert len(content["links"]) == 3 + 5
    assert paths["png"].stat().st_size > 10_000
    trace = Trace.FromString(paths["pftrace"].read_bytes())
    names = {p.track_descriptor.uuid: p.track_descriptor.name for p in trace.packet if p.HasField("track_descriptor")}
    assert {"dc", "home", "stage 3", "hop 2 activation", "hop 0 gradient"} <= set(names.values())
    events = [packet for packet in trace.packet if packet.HasField("track_event")]
    begins = [packet for packet in events if packet.track_event.type == TrackEvent.TYPE_SLICE_BEGIN]
    assert len(events) == 2 * len(begins)
    last = max(packet.timestamp for packet in events) / 1e9
    assert last == pytest.approx(2 * content["round_seconds"], rel=0.05)


def test_sweeps(yaml: Path, tmp_path: Path) -> None:
    # Sweeps.
    path, chart = tmp_path / "sweep.json", tmp_path / "sweep.png"
    sweep = "links.home.bandwidth=100kbit/s..100Mbit/s"
    code, out, errors = ask("simulate", str(yaml), "--sweep", sweep, "--json", str(path), "--chart", str(chart))
    assert code == 0, errors
    assert "100 kbit/s" in out
    [points] = json.loads(path.read_text())["curves"].values()
    assert len(points) == 13
    assert (points[0]["bandwidth"], points[-1]["bandwidth"]) == (pytest.approx(1e5), pytest.approx(1e8))
    uses = [point["utilization"] for point in points]
    assert uses == sorted(uses)
    assert chart.stat().st_size > 10_000

    # A sweep of the yaml with curves.
    text = yaml.read_text().replace("simulate:\n", "simulate:\n  sweep: links.home.bandwidth=10kbit/s,1Mbit/s\n")
    yaml.write_text(text)
    path, chart = tmp_path / "sweep.json", tmp_path / "sweep.png"
    options = ["--curves", "replicas.1.boundary.rank=full,1/8", "--json", str(path), "--chart", str(chart)]
    code, _, errors = ask("simulate", str(yaml), *options)
    assert code == 0, errors
    curves = json.loads(path.read_text())["curves"]
    assert list(curves) == ["full", "1/8"]
    assert [point["bandwidth"] for point in curves["full"]] == [1e4, 1e6]
    assert curves["full"][0]["utilization"] < curves["1/8"][0]["utilization"]
    assert Sweep.parse("a.b=1/8,1/32").values == ["1/8", "1/32"]


MISTAKES = [
    ("--sweep", "links.home.bandwidth=1..10", "expected both ends in units of one kind"),
    ("--sweep", "links.home.bandwidth=1ms..10Mbit/s", "expected both ends in units of one kind"),
    ("--sweep", "links.home.bandwidth=10Mbit/s..1Mbit/s", "expected a range from a value above 0 to a larger one"),
    ("--sweep", "links.home.bandwidth=10,20", "expected a number and a unit such as"),
    ("--sweep", "links.home.bandwidth", "expected KEY=FROM..TO"),
    ("--curves", "inner.steps=1,2", "expected --sweep, too"),
    ("--set", "links.home.bandwidth=0 Mbit/s", "hetero-pp: --set links.home.bandwidth=0 Mbit/s: found"),
    ("--set", "replicas.1.hardware=abacus", "replicas.1.hardware=abacus: found `abacus`, expected one of h200"),
    ("--set", "simulate.fleets={homes: {count: 2}}", "is not a replica of this run, expected one of dc, home"),
    # These change nothing, because nothing uses the entry or no key has the name.
    ("--sweep", "links.away.bandwidth=1Mbit/s..1Gbit/s", f"links.away: {UNKNOWN}, expected one of home"),
    ("--sweep", "links.hone.latency=1ms,2ms", f"{UNKNOWN}, expected one of home; did you mean `home`?"),
    ("--set", "links.adsl={bandwidth: 1 Mbit/s}", f"={{bandwidth: 1 Mbit/s}}: {UNKNOWN}, expected one of home"),
    ("--set", "simulate.rows={a: {}, b: {links.adsl.latency: 1 ms}}", f"links.adsl: {UNKNOWN}"),
    (
        "--set",
        f"simulate.hardware.mine={MACHINE}",
        f"{MACHINE}: {UNKNOWN}, expected a name that another setting uses, as",
    ),
    ("--sweep", "inner.stpes=1,2", "--sweep inner.stpes=1: found an unknown key, expected one of betas, clip_norm"),
    ("--sweep", "replicas.hone.batch_size=8,16", "expected one of 0 (dc), 1 (home), or a key of replicas"),
    ("--sweep", "replicas.2.batch_size=8,16", "found no entry `2` in `replicas`, expected one of 0 (dc), 1 (home)"),
    ("--set", "inner.steps.x=1", "`inner.steps` is a single value, and has no key `x`"),
]


@pytest.mark.parametrize(("option", "value", "words"), MISTAKES)
def test_mistakes_are_one_line(yaml: Path, option: str, value: str, words: str) -> None:
    code, _, errors = ask("simulate", yaml, option, value)
    assert (code, errors.count("\n")) == (2, 1)
    assert words in errors


def test_a_change_may_add_what_something_names(yaml: Path) -> None:
    stages = "replicas.1.stages=[{layers: 2}, {layers: 2, uplink: adsl}]"
    for changes in (
        ["links.adsl.bandwidth=1 Mbit/s", "replicas.1.link=adsl"],
        [stages, "links.adsl.latency=1 ms", "simulate.measured={}"],
        [f"simulate.hardware.mine={MACHINE}", "replicas.0.hardware=mine"],
        ["lines.dsl.up=1 Mbit/s", "sites.office.members=[dc, home.1]", "sites.office.line=dsl"],
    ):
        assert ConfigFile(yaml, changes).config != ConfigFile(yaml).config, changes


SAME = "changes no predicted number: its 2 values give the same."


def test_a_sweep_that_changes_nothing_says_so(yaml: Path) -> None:
    """A sweep that changes one curve only is not reported. Published numbers beside it are no predictions."""
    idle, busy = ("outer.learning_rate=0.5,1", "inner.steps=1,2")
    assert f"`outer.learning_rate` {SAME}" in told("simulate", yaml, "--sweep", idle)
    published = "simulate.published=[{what: days, value: 3, where: there, when: {outer.learning_rate: 1.0}}]"
    assert f"`outer.learning_rate` {SAME}" in told("simulate", yaml, "--sweep", idle, "--set", published)
    assert "give the same" not in told("simulate", yaml, "--sweep", busy)
    assert "give the same" not in told("simulate", yaml, "--sweep", "inner.steps=3")
    both = told("simulate", yaml, "--sweep", busy, "--curves", idle)
    assert f"`outer.learning_rate` {SAME}" in both
    assert "`inner.steps` changes" not in both
    only_with_links = ("--sweep", "links.home.latency=0ms,100ms", "--curves", "replicas.1.link=null,home")
    assert "give the same" not in told("simulate", yaml, *only_with_links, "--set", "replicas.1.uplink=null")


def test_ten_thousand_members_are_predicted() -> None:
    found = _predict(CONFIGS / "simulate" / "ten_thousand.yaml")
    assert found.members == 10_000
    assert 0 < found.utilization["relative"] < 1


def test_a_calibration_is_measured_and_used(tmp_path: Path) -> None:
    path, out = tmp_path / "t.yaml", tmp_path / "calibration.yaml"
    path.write_text(YAML.replace("  measured:\n", "  seed: 1\n"))
    code, said, errors = ask("calibrate", path, "--write", out)
    assert (code, errors) == (0, "")
    assert "GFLOP/s reached" in said
    assert max(len(line) for line in said.splitlines() if str(out) not in line) <= 80  # paths are not wrapped
    measured = load_calibration(out)["measured"]
    assert isinstance(measured, dict)
    assert list(measured) == ["dc", "home.0", "home.1", "home.2", "home.3"]
    content = tmp_path / "prediction.json"
    code, _, errors = ask("simulate", str(path), "--calibration", str(out), "--json", str(content))
    assert code == 0, errors
    cost = {kind: float(value.split()[0]) for kind, value in measured["dc"].items()}
    step = 2 * (cost["forward"] + cost["backward"]) + cost["update"]
    assert json.loads(content.read_text())["replicas"][0]["step_seconds"] == pytest.approx(step)
    used = ("--set", "simulate.machine=this-machine")
    assert ask("simulate", str(path), "--calibration", str(out), *used)[0] == 0
    out.write_text("a: 1\n")
    assert (
        "expected the output of `hetero-pp calibrate --write`"
        in ask("simulate", str(path), "--calibration", str(out))[2]
    )
