"""A group that loses a stage within a round resumes at the inner step: real processes, and threads of this one."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from started import run_script

from hetero_pp.config.folder import RunFolder
from hetero_pp.config.spec import RunSpec
from hetero_pp.config.yaml_file import ConfigFile, read_run
from hetero_pp.messages.messages_pb2 import RESUMED, ContributionEntry, Report, RoundRecord
from hetero_pp.model.transformer import block_of, shapes_by_block
from hetero_pp.program.launch.in_process import run_in_process
from hetero_pp.pseudo_gradient.contribution import BlobAddress, ReceivedBlob
from hetero_pp.store.folder import FolderStore
from replica_groups.exchange.log import ContributionLog
from stages.worker import StageWorker

YAML = Path(__file__).with_name("mixed.yaml")
LAUNCH_WITH_FAULTS = Path(__file__).parents[2] / "benchmarks/launch_with_faults.py"
ROUNDS, STEPS = 3, 5
FOUR_STAGES = (
    "model.layers=4",
    "replicas.1.stages=[{layers: 1}, {layers: 1}, {layers: 1}, {layers: 1}]",
    "replicas.1.batch_size=8",
    "replicas.1.micro_batches=8",
    f"inner.steps={STEPS}",
    f"outer.rounds={ROUNDS}",
    "states.every=1",
    "checkpoints.every=1",
    "exchange.quorum=1",
    "data.validation_sequences=2",
)
AUDITED = "audit={recompute: {share: 1}}"


def _records(run: Path) -> list[RoundRecord]:
    log = ContributionLog(FolderStore(run / "log"))
    return [log.read_record(round_) for round_ in range(1, ROUNDS + 1)]


def _home(record: RoundRecord) -> ContributionEntry:
    return next(one for one in record.contributions if one.replica == "home")


def _restarts(records: list[RoundRecord]) -> dict[str, list[tuple[int, int]]]:
    """Return slot -> (round, step) of its restarts."""
    found: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
    for record in records:
        for one in _home(record).restarts:
            found[one.slot].append((record.round, one.step))
    return dict(found)


def _contributed(records: list[RoundRecord]) -> list[list[tuple[str, int, float, bytes, list[int]]]]:
    return [
        [(one.replica, one.steps, one.weight, one.digest, [b.steps for b in one.blobs]) for one in record.contributions]
        for record in records
    ]


def _spec(corpus: Path, *changes: str) -> RunSpec:
    return RunSpec(ConfigFile(YAML, [f"data.corpus={corpus}", *FOUR_STAGES, *changes]).config, 256)


def _in_process(spec: RunSpec, folder: Path, restarts: dict[str, list[tuple[int, int]]]) -> list[Report]:
    reports: list[Report] = []
    run_in_process(spec, RunFolder(folder), reports.append, restarts=restarts)
    return reports


def _sha256(reports: list[Report]) -> dict[tuple[str, int], str]:
    found = [one.round_verified for one in reports if one.HasField("round_verified")]
    return {(one.replica, one.round): one.parameters_sha256.hex() for one in found}


def _launched(corpus: Path, runs: Path, fault: str, *changes: str) -> Path:
    """Launch the run with a fault in real processes; return its folder."""
    faults = runs / "faults.yaml"
    faults.write_text(f"faults: [{fault}]")
    settings = [f"--set={one}" for one in (f"data.corpus={corpus}", *FOUR_STAGES, *changes)]
    done = run_script(LAUNCH_WITH_FAULTS, str(YAML), "--runs", str(runs), "--faults", str(faults), *settings)
    assert done.returncode == 0, done.stderr
    return runs / "mixed"


def _assert_in_process_alike(run: Path, folder: Path) -> None:
    """Require the records and parameters of a run in this process whose slots restart at the same steps."""
    reports = _in_process(read_run(RunFolder(run)), folder, _restarts(_records(run)))
    assert _contributed(_records(folder)) == _contributed(_records(run))
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    verified = [one for one in lines if one["event"] == "round_verified"]
    assert _sha256(reports) == {(one["replica"], one["round"]): one["parameters_sha256"] for one in verified}
    assert len(verified) == 2 * ROUNDS


@pytest.fixture(scope="module")
def undisturbed(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Report], list[RoundRecord]]:
    """Return the reports and records of an audited run without a fault."""
    folder = tmp_path_factory.mktemp("undisturbed")
    return _in_process(_spec(corpus, AUDITED), folder, {}), _records(folder)


@pytest.mark.parametrize(
    ("stage", "micro_batch"), [(2, 5), (1, 0)], ids=["within a step", "before later stages have the norm"]
)
def test_a_link_that_breaks_costs_a_step_and_no_bits(
    stage: int,
    micro_batch: int,
    undisturbed: tuple[list[Report], list[RoundRecord]],
    corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both ends are there, so none restarts. The result, and what audits compare, is that of a run whose links hold."""
    left, original = [(2, 3)], StageWorker._forward

    def breaks(worker: StageWorker, under_way: Any, index: int) -> None:
        if worker.stage.spec.index == stage and left == [(under_way.round, under_way.step)] and index == micro_batch:
            left.clear()
            assert worker._upstream is not None
            worker._upstream.abort("the link broke")
        original(worker, under_way, index)

    monkeypatch.setattr(StageWorker, "_forward", breaks)
    found = _in_process(_spec(corpus, AUDITED), tmp_path, {})
    assert not left
    (expected, without), records = undisturbed, _records(tmp_path)
    assert _restarts(records) == {}
    assert _home(records[1]).generation > 4
    assert _sha256(found) == _sha256(expected)
    committed = [[(one.member, one.text, one.messages) for one in _home(record).commitments] for record in records]
    assert committed == [
        [(one.member, one.text, one.messages) for one in _home(record).commitments] for record in without
    ]
    assert all(messages for _, _, messages in committed[1])


@pytest.mark.starts_processes
def test_a_stage_that_is_killed_loses_its_steps_and_its_group_one(corpus: Path, tmp_path: Path) -> None:
    run = _launched(corpus, tmp_path, "{kill: home.2, at: {round: 2, step: 3, micro_batch: 5}}")
    records = _records(run)
    assert _restarts(records) == {"home.2": [(2, 3)]}
    assert {blob.block: blob.steps for blob in _home(records[1]).blobs if blob.steps} == {"layers.2": STEPS - 3}
    _assert_in_process_alike(run, tmp_path / "in process")


@pytest.mark.starts_processes
@pytest.mark.parametrize("at", [f"step: {STEPS}", "phase: contributing"], ids=["in the flush", "in the upload"])
def test_a_stage_that_is_killed_after_the_last_step_costs_its_own_steps_alone(
    at: str, corpus: Path, tmp_path: Path
) -> None:
    """In the flush a later stage lacks the norm of the last step; in the upload all others have compressed."""
    run = _launched(corpus, tmp_path, f"{{kill: home.2, at: {{round: 2, {at}}}}}")
    records = _records(run)
    assert _restarts(records) == {"home.2": [(2, STEPS)]}
    assert {blob.block: blob.steps for blob in _home(records[1]).blobs if blob.steps} == {"layers.2": 1}
    _assert_in_process_alike(run, tmp_path / "in process")


@pytest.mark.starts_processes
@pytest.mark.parametrize(
    ("faults", "slots"),
    [
        (
            "{kill: home.1, at: {round: 2, step: 3, micro_batch: 2}}, {kill: home.3, at: {round: 2, step: 3}}",
            {"home.1", "home.3"},
        ),
        (
            "{kill: home.2, at: {round: 2, step: 3, micro_batch: 2}}, "
            "{kill: home.2, at: {round: 2, step: 3, micro_batch: 3}}",
            {"home.2"},
        ),
    ],
    ids=["two stages", "again once it resumed"],
)
def test_deaths_in_one_step_lose_the_steps_of_those_that_died(
    faults: str, slots: set[str], corpus: Path, tmp_path: Path
) -> None:
    run = _launched(corpus, tmp_path, faults)
    assert {slot: set(at) for slot, at in _restarts(_records(run)).items()} == {slot: {(2, 3)} for slot in slots}
    _assert_in_process_alike(run, tmp_path / "in process")


@pytest.mark.starts_processes
def test_a_stage_that_is_frozen_for_long_loses_its_steps_and_its_group_one(corpus: Path, tmp_path: Path) -> None:
    lease = 'exchange.lease={"factor": 1, "least": "3 s", "most": "3 s"}'
    fault = "{freeze: home.1, lasts: 10 min, at: {round: 2, step: 2, micro_batch: 4}}"
    run = _launched(corpus, tmp_path, fault, lease)
    assert _restarts(_records(run)) == {"home.1": [(2, 2)]}
    _assert_in_process_alike(run, tmp_path / "in process")


def test_blocks_weigh_by_the_steps_of_their_last_holder(corpus: Path, tmp_path: Path) -> None:
    """The expected value is theta - (w D + w' D') / (w + w'), with decoded contributions, in float64."""
    changes = "outer.weights=tokens", "outer.learning_rate=1", "outer.returned=1"
    _in_process(spec := _spec(corpus, *changes), tmp_path, {"home.2": [(3, 1)]})
    log, tokens = ContributionLog(FolderStore(tmp_path / "log")), {"dc": 4 * 32, "home": 8 * 32}
    before, after = (log.read_checkpoint(round_).parameters for round_ in (2, 3))
    record = log.read_record(3)
    for block, shapes in shapes_by_block(spec.parameter_shapes).items():
        weights = tokens | ({"home": tokens["home"] * (STEPS - 1) / STEPS} if block == "layers.2" else {})
        moved = {name: torch.zeros(shape, dtype=torch.float64).flatten() for name, shape in shapes.items()}
        for replica, weight in weights.items():
            address = BlobAddress(spec.run, 3, replica, block)
            data = log.blobs_of(record)(replica, block)
            blob = ReceivedBlob(data, address, shapes, spec.config.outer.compression)
            for name in shapes:
                sent = blob.tensor(name)
                moved[name][sent.indices.long()] += weight / sum(weights.values()) * sent.values.double()
        for name, change in moved.items():
            expected = before[name].double() - change.view_as(before[name])
            torch.testing.assert_close(after[name].double(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("change", "slot"), [("inner={seconds: 1}", "home.0"), ("replicas.1.steps=4", "home.2")])
def test_rounds_of_time_and_own_steps_resume_alike(change: str, slot: str, corpus: Path, tmp_path: Path) -> None:
    spec, reports = _spec(corpus, change), list[Report]()
    steps_of = None if "steps" in change else lambda replica, round_: 4
    run_in_process(spec, RunFolder(tmp_path), reports.append, steps_of=steps_of, restarts={slot: [(2, 3)]})
    records = _records(tmp_path)
    assert [_home(record).steps for record in records] == [4] * ROUNDS
    assert _restarts(records) == {slot: [(2, 3)]}
    assert {blob.steps for blob in _home(records[1]).blobs} == {0, 1}
    found = _sha256(reports)
    assert all(found["home", round_] == found["dc", round_] for round_ in range(1, ROUNDS + 1))


def test_a_round_with_a_restart_is_not_computed_again_and_the_next_one_is(corpus: Path, tmp_path: Path) -> None:
    reports = _in_process(_spec(corpus, AUDITED), tmp_path, {"home.1": [(2, 2)]})
    judged = [one.judged for one in reports if one.HasField("judged")]
    found = {(one.replica, one.round): one.recomputed.is_equal for one in judged}
    assert found == dict.fromkeys((("dc", 1), ("home", 1), ("dc", 2), ("dc", 3), ("home", 3)), True)


@pytest.mark.parametrize(
    "slots",
    [{"home.0"}, {"home.1"}, {"home.3"}, {"home.0", "home.1"}],
    ids=lambda slots: " and ".join(sorted(slots)),
)
def test_stages_that_contribute_can_be_replaced(slots: set[str], corpus: Path, tmp_path: Path) -> None:
    """The others send the same contribution again: it differs from that of an undisturbed run in no bit."""
    restarts = {slot: [(2, STEPS), (3, STEPS)] for slot in slots}
    found = _sha256(_in_process(spec := _spec(corpus), tmp_path / "restarted", restarts))
    _in_process(spec, tmp_path / "undisturbed", {})
    records, without = _records(tmp_path / "restarted"), _records(tmp_path / "undisturbed")
    # A stage that was replaced has no steps to keep, so it begins again if another one dies.
    assert {slot: set(at) for slot, at in _restarts(records).items()} == {slot: set(restarts[slot]) for slot in slots}
    restarted = {block_of(name) for slot in slots for name in spec.members[slot].owned}
    for home, expected in zip(_home(records[1]).blobs, _home(without[1]).blobs, strict=True):
        is_same = home.block not in restarted
        assert (home.steps == 0, home.sha256 == expected.sha256) == (is_same, is_same), home.block
    assert all(found["home", round_] == found["dc", round_] for round_ in range(1, ROUNDS + 1))


@pytest.mark.parametrize("slot", ["home.0", "home.3"])
def test_every_stage_can_be_replaced_more_than_once(slot: str, corpus: Path, tmp_path: Path) -> None:
    restarts = {slot: [(2, 1), (2, 4), (3, 2)]}
    reports = _in_process(_spec(corpus), tmp_path, restarts)
    records = _records(tmp_path)
    assert _restarts(records) == restarts
    assert {blob.steps for blob in _home(records[1]).blobs} == {0, 1}
    assert {blob.steps for blob in _home(records[2]).blobs} == {0, 3}
    told = [one.membership_event for one in reports if one.membership_event.what == RESUMED]
    assert [(one.slot, one.round) for one in told] == [(slot, 2), (slot, 2), (slot, 3)]
    found = _sha256(reports)
    assert all(found["home", round_] == found["dc", round_] for round_ in range(1, ROUNDS + 1))
