"""`plan`: the written plan reaches the target and runs, its choices have reasons, and errors are one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from asking import ask, sets, told

from hetero_pp.config.spec import RunSpec
from hetero_pp.config.yaml_file import ConfigFile
from hetero_pp.simulator.planner.grouping import link_between

YAML = """\
name: t
model: {preset: micro, layers: 6}
data: {corpus: CORPUS, sequence_length: 16, validation_share: 0.2, validation_sequences: 4}
inner: {steps: 2, warmup_steps: 1}
outer: {rounds: 2}
links:
  fast: {bandwidth: 100 Mbit/s, latency: 0.1 ms}
  slow: {bandwidth: 2 Mbit/s, latency: 0.2 ms, forward: {bandwidth: 1 Mbit/s}}
"""
REPLICAS = """\
replicas:
  - {name: dc, kind: datacenter, batch_size: 4, micro_batches: 4, uplink: fast}
  - name: home
    kind: participants
    stages: [{layers: 2}, {layers: 2, hardware: weak}, {layers: 2}]
    batch_size: 4
    link: [fast, slow]
    uplink: fast
simulate:
  hardware: {weak: {flops: 4 GFLOP/s, mfu: 0.5, memory: 1 GB, memory_bandwidth: 4 GB/s}}
"""
LOOSE = """\
plan:
  stages: 2
  batch_size: 4
  participants:
    - {name: a, site: x, uplink: fast}
    - {name: b, uplink: slow}
    - {name: c, site: x, uplink: fast}
    - {name: d, uplink: fast}
    - {name: e, uplink: slow, hardware: weak}
  pairs:
    - {between: [b, d], bandwidth: 50 Mbit/s, forward: {bandwidth: 20 Mbit/s}}
    - {between: [x, x], bandwidth: 1 Gbit/s}
simulate:
  hardware: {weak: {flops: 1 GFLOP/s, mfu: 0.5, memory: 1 GB, memory_bandwidth: 4 GB/s}}
"""


LINED = """\
lines:
  dsl: {up: 1 Mbit/s, down: 10 Mbit/s, latency: 0.1 ms}
  fibre: {bandwidth: 200 Mbit/s}
"""
OF_A_GROUP = """\
replicas:
  - {name: dc, kind: datacenter, batch_size: 4, micro_batches: 4, line: fibre}
  - {name: home, kind: participants, stages: {count: 3, line: dsl}, batch_size: 4}
"""
WITH_LINES = """\
plan:
  stages: 2
  batch_size: 4
  participants:
    - {name: a, site: x, line: fibre}
    - {name: b, site: x, line: fibre}
    - {name: c, line: fibre}
    - {name: d, line: dsl}
"""


def _yaml(folder: Path, corpus: Path, rest: str) -> Path:
    path = folder / "t.yaml"
    path.write_text((YAML + rest).replace("CORPUS", str(corpus)))
    return path


def _plan(path: Path, target: float, *more: str) -> dict[str, Any]:
    """Return the `--json` output of a plan that is written beside the YAML."""
    found = path.with_suffix(".json")
    options = ("--target-utilization", target, "--json", found, "--write", path.with_suffix(".plan.yaml"))
    code, _, errors = ask("plan", path, *options, *more)
    content: dict[str, Any] = json.loads(found.read_text())
    assert (code == 0) == content["reached"], errors
    return content


def test_a_plan_is_accepted_and_reaches_its_target(tmp_path: Path, corpus: Path) -> None:
    path = _yaml(tmp_path, corpus, REPLICAS)
    content = _plan(path, 0.8)
    written = path.with_suffix(".plan.yaml")
    assert content["utilization"]["before"] < 0.8 <= content["utilization"]["relative"]
    code, _, errors = ask("check", written, "--runs", tmp_path)
    assert code == 0, errors
    code, _, errors = ask("simulate", written, "--json", tmp_path / "s.json")
    assert code == 0, errors
    assert json.loads((tmp_path / "s.json").read_text())["utilization"]["relative"] >= 0.8
    first, weak, last = (stage["layers"] for stage in content["config"]["replicas"][1]["stages"])
    assert first + weak + last == 6
    assert weak == 1
    assert content["config"]["replicas"][1]["stages"][1]["hardware"] == "weak"
    assert content["config"]["replicas"][0]["batch_size"] == 4
    # The reason names the deciding hop, the choice, and the utilization with the next less lossy boundary.
    [why] = [choice["why"] for choice in content["choices"] if choice["chosen"].startswith("rank")]
    assert why.startswith("home.1-2 (1 Mbit/s) decides; rank ")
    assert "would reduce utilization to" in why
    assert "Het-PP Table 2" in why
    assert content["loss"]["paper"] > 0
    assert f"# {path}: " in written.read_text().splitlines()[0]


def test_the_next_less_lossy_boundary_would_miss_the_target(tmp_path: Path, corpus: Path) -> None:
    """`simulate` confirms it for the plan with only that boundary changed."""
    path = _yaml(tmp_path, corpus, REPLICAS)
    content = _plan(path, 0.8)
    [why] = [choice["why"] for choice in content["choices"] if choice["chosen"].startswith("rank")]
    spurned = why.split("; rank ")[1].split(" would reduce")[0]
    rank, _, kind = spurned.partition(" x ")
    said = float(why.split("would reduce utilization to ")[1].split("%")[0]) / 100
    how = f"bits: {kind.removesuffix(' bits')}" if kind.endswith("bits") else f"dtype: {kind}"
    written, prediction = path.with_suffix(".plan.yaml"), tmp_path / "s.json"
    code, _, errors = ask(
        "simulate", written, "--set", f"replicas.1.boundary={{rank: {rank}, {how}}}", "--json", prediction
    )
    assert code == 0, errors
    found = json.loads(prediction.read_text())["utilization"]["relative"]
    assert found < 0.8
    assert found == pytest.approx(said, abs=0.02)


def test_rounds_of_time_stay_so(tmp_path: Path, corpus: Path) -> None:
    """The utilization is that of the whole run for the headline, the choice of boundaries, and the YAML before."""
    path = _yaml(tmp_path, corpus, REPLICAS)
    seconds = ("--set", "inner={seconds: 2 s}")
    content = _plan(path, 0.95, *seconds)
    assert content["reached"]
    assert content["utilization"]["before"] < 0.95 <= content["utilization"]["relative"]
    inner = content["config"]["inner"]
    assert (inner["steps"], inner["seconds"]) == (None, "2.0 s")
    [choice] = [one for one in content["choices"] if one["what"] == "outer round"]
    assert choice["chosen"].startswith("rounds of 2 s, density ")
    [why] = [choice["why"] for choice in content["choices"] if choice["chosen"].startswith("rank")]
    said = float(why.split("would reduce utilization to ")[1].split("%")[0]) / 100
    rows = content["boundaries"]
    assert [one["boundary"] for one in rows if one["chosen_by"]] == [
        one["boundary"] for one in rows if one["utilization"] >= 0.95
    ][:1]
    assert said < 0.95
    again = _simulated(path.with_suffix(".plan.yaml"), tmp_path)
    assert again["utilization"]["relative"] >= 0.95
    assert again["tokens_per_second"] == pytest.approx(content["tokens_per_second"])


def _simulated(path: Path, tmp_path: Path, *options: str) -> dict[str, Any]:
    code, _, errors = ask("simulate", path, "--json", tmp_path / "s.json", *options)
    assert code == 0, errors
    found: dict[str, Any] = json.loads((tmp_path / "s.json").read_text())
    return found


def test_a_run_that_reaches_its_target_stays_as_it_is(tmp_path: Path, corpus: Path) -> None:
    """The table has what each other boundary would give, as `simulate` predicts it."""
    path = _yaml(
        tmp_path, corpus, REPLICAS.replace("link: [fast, slow]", "link: [fast, slow]\n    boundary: {rank: 1/16}")
    )
    content = _plan(path, 0.2, "--set", "inner={seconds: 2 s}")
    assert content["utilization"]["before"] == content["utilization"]["relative"] >= 0.2
    assert [one["chosen"] for one in content["choices"]] == ["unchanged"]
    assert ConfigFile(path.with_suffix(".plan.yaml")).config == ConfigFile(path, ["inner={seconds: 2 s}"]).config
    rows = content["boundaries"]
    assert [one["boundary"] for one in rows if one["chosen_by"] == ["home"]] == ["rank 1/16 x bf16"]
    assert rows[0]["boundary"] == "rank full x bf16"
    losses = [row["loss"]["paper"] for row in rows]
    assert losses == sorted(losses) and losses[0] == 0
    whole = _simulated(path, tmp_path, *sets("inner={seconds: 2 s}", "replicas.1.boundary.rank=full"))
    assert rows[0]["tokens_per_second"] == pytest.approx(whole["tokens_per_second"])


def test_a_plan_is_the_yaml_with_changed_keys(tmp_path: Path, corpus: Path) -> None:
    """Comments, order and units stay. Whatever the plan does not change has the words of the input."""
    path = _yaml(tmp_path, corpus, REPLICAS)
    path.write_text(path.read_text().replace("  slow:", "  # a phone line\n  slow:").replace("link: [", "link:  ["))
    content = _plan(path, 0.8)
    lines, own = path.with_suffix(".plan.yaml").read_text().splitlines(), path.read_text().splitlines()
    kept = [line for line in own if not any(key in line for key in ("stages", "inner", "outer", "link: "))]
    assert "  # a phone line" in kept and [line for line in lines if line in kept] == kept
    assert len(lines) < len(own) + 20 and not any("null" in line for line in lines)
    planned = ConfigFile(path.with_suffix(".plan.yaml")).config
    assert planned.model_dump(mode="json")["replicas"] == content["config"]["replicas"]
    # Groups of one entry that get different settings become entries of their own.
    before = ConfigFile(path, ["replicas.1.count=2", "replicas.1.link=null"])
    first, second = before.config.replicas[1:]
    other = before.config.model_copy(
        update={"replicas": [*before.config.replicas[:2], second.model_copy(update={"micro_batches": 4})]}
    )
    (tmp_path / "two.yaml").write_text(before.with_config(other, ["two"]))
    assert ConfigFile(tmp_path / "two.yaml").config == other
    assert first == other.replicas[1]


def test_what_cannot_be_is_one_line_and_no_file(tmp_path: Path, corpus: Path) -> None:
    # A target out of reach is one line and no file.
    path = _yaml(tmp_path, corpus, REPLICAS)
    written = tmp_path / "no.yaml"
    slow = ("--set", "links.slow={latency: 3 s}")
    code, out, errors = ask("plan", path, "--target-utilization", "99 %", "--write", written, *slow)
    assert code == 2
    assert "rank" in out  # the best plan found is explained nevertheless
    assert "a utilization of 99.0% cannot be reached: the best plan reaches" in errors
    assert "limited by home.1-2 (unlimited, 3 s)" in errors
    assert len(errors.strip().splitlines()) == 1
    assert not written.exists()

    # The yaml itself is never overwritten.
    path = _yaml(tmp_path, corpus, REPLICAS)
    before = path.read_text()
    code, _, errors = ask("plan", path, "--write", path)
    assert (code, path.read_text()) == (2, before)
    assert "expected another file" in errors


def test_loose_participants_are_grouped_and_trained(tmp_path: Path, corpus: Path) -> None:
    """Offices and neighbours form groups.

    A participant that would delay all others is left out. The plan can be launched.
    """
    path = _yaml(tmp_path, corpus, LOOSE)
    content = _plan(path, 0.1)
    assert {frozenset(group) for group in content["groups"].values()} == {frozenset("ac"), frozenset("bd")}
    assert content["left_out"] == ["e"]
    written = path.with_suffix(".plan.yaml")
    quick = ("--set", "links.slow={bandwidth: 100 Mbit/s}")  # links are throttled to the YAML's values
    code, _, errors = ask("launch", written, "--in-process", "--runs", tmp_path / "runs", *quick)
    assert code == 0, errors
    summary = json.loads((tmp_path / "runs" / "t" / "summary.json").read_text())
    assert len(summary["replicas"]) == 2


@pytest.mark.parametrize("command", ["launch", "check", "simulate", "calibrate"])
def test_other_commands_ask_for_a_plan_first(tmp_path: Path, corpus: Path, command: str) -> None:
    path = _yaml(tmp_path, corpus, LOOSE)
    code, _, errors = ask(command, path)
    assert code == 2
    assert f"{path}:12: plan.participants: found 5 participants without a group" in errors
    assert "hetero-pp plan" in errors


def test_what_joins_two_participants(tmp_path: Path, corpus: Path) -> None:
    """The most specific entry holds, seen from either side. Otherwise the two uplinks are combined."""
    config = ConfigFile(_yaml(tmp_path, corpus, LOOSE)).config
    a, b, c, d, _ = config.plan.participants
    assert link_between(config, a, c).shape("backward").bandwidth == 1e9
    assert link_between(config, b, d).shape("forward").bandwidth == 20e6
    assert link_between(config, d, b).shape("forward").bandwidth == 50e6
    assert link_between(config, d, b).shape("backward").bandwidth == 20e6
    both = link_between(config, a, b)  # up `fast`, down `slow`; and back up `slow`, down `fast`
    assert (both.shape("forward").bandwidth, both.shape("backward").bandwidth) == (2e6, 1e6)
    assert both.shape("forward").latency == pytest.approx(0.3e-3)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--target-utilization", "1.5"], "--target-utilization: found `1.5`, expected more than 0 and less than 1"),
        (["--target-utilization", "much"], "--target-utilization: found `much`, expected a number or a ratio"),
        (["--set", "plan.stages=6"], "plan.stages=6: found 6, expected at most the 6 layers of the model and the 5"),
        (["--set", "plan.participants.1.name=a"], "plan.participants.1.name=a: found `a` twice"),
        (["--set", "plan.participants.1.uplink=dsl"], "expected one of the kinds under `links` (fast, slow)"),
        (["--set", "plan.participants.1.hardware=abacus"], "plan.participants.1.hardware=abacus: found `abacus`"),
        (["--set", "plan.pairs.0.between=[b, nobody]"], "between=[b, nobody]: found `nobody`, expected a part"),
        (["--set", "plan.participants=[]", "--set", "plan.pairs=[]"], "replicas: found nothing, expected at least"),
        (["--set", "simulate.machine=tiny", "--set",
          "simulate.hardware.tiny={flops: 1 GFLOP/s, memory: 1 MB, memory_bandwidth: 1 GB/s}"],
         "found 5 participants, but no 2 of them have enough memory for the model's 6 layers"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(tmp_path: Path, corpus: Path, arguments: list[str], words: str) -> None:
    path = _yaml(tmp_path, corpus, LOOSE.replace("hardware: weak", "hardware: null"))
    code, _, errors = ask("plan", path, "--write", tmp_path / "no.yaml", *arguments)
    assert code == 2
    assert words in errors
    assert len(errors.strip().splitlines()) == 1


def test_machines_keep_their_lines(tmp_path: Path, corpus: Path) -> None:
    # Machines keep their lines. The plan keeps the line for every stage, and a middle stage's line decides.
    path, plan = _yaml(tmp_path, corpus, LINED + OF_A_GROUP), tmp_path / "plan.yaml"
    said = told("plan", path, "--target-utilization", "0.2", "--write", plan)
    [_, home] = ConfigFile(plan).config.replicas
    assert [home.setting(stage, "line")[0] for stage in range(3)] == ["dsl"] * 3
    assert "the line of home.1 (1 Mbit/s up) decides" in said

    # Participants at a site share its line.
    path, plan = _yaml(tmp_path, corpus, LINED + WITH_LINES), tmp_path / "plan.yaml"
    told("plan", path, "--target-utilization", "0.01", "--write", plan)
    config = ConfigFile(plan).config
    [site] = config.sites.values()
    assert (site.line, len(site.members)) == ("fibre", 2)
    lines = {member: line.kind for line in RunSpec(config, 256).lines.values() for member in line.members}
    assert sorted(lines.values()) == ["dsl", "fibre", "fibre", "fibre"]
    assert len({member.partition(".")[0] for member in site.members}) == 1  # no line lies between them
    assert all(replica.link is None for replica in config.replicas)  # type: ignore[union-attr]
    code, _, errors = ask("plan", path, "--set", "plan.participants.1.line=dsl")
    assert (code, "found `dsl`, expected `fibre`, as a has at x: a site has one line" in errors) == (2, True)
