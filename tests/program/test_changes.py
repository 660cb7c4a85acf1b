"""Resuming a run with more rounds or another learning rate: the result, and what the folder and the hosts keep."""

from __future__ import annotations

import json
import math
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from asking import sets
from mixed_run import MIXED, summary_in, train
from started import run_program

from hetero_pp.config.changes import NO_CHANGES, Agreement, Changes, read_changes, values_of, with_values
from hetero_pp.config.checkpoint import open_checkpoint
from hetero_pp.config.folder import RunFolder
from hetero_pp.config.member_inputs import round_optimizer
from hetero_pp.config.run_config import RunConfig
from hetero_pp.config.spec import RunSpec
from hetero_pp.config.yaml_file import read_run
from hetero_pp.core.errors import ConfigError, MalformedMessage
from hetero_pp.core.settings import NotPartOf, meaning
from hetero_pp.model.learning_rates import BySteps
from hetero_pp.program.launch.command import run_topology
from hetero_pp.store.folder import FolderStore
from replica_groups.exchange.log import ContributionLog, checkpoint_key
from replica_groups.exchange.replay import checkpoint_after

H, WARMUP, FLOOR = 3, 2, 0.1
EXTENDED = ["outer.rounds=6", "inner.learning_rate=4e-3", "outer.learning_rate=0.5"]


@pytest.fixture(scope="module")
def finished(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train three rounds. Saved states exist after round 2, as `checkpoints.every` says, and after the last."""
    runs = tmp_path_factory.mktemp("finished")
    train(corpus, runs)
    return runs


@pytest.fixture(scope="module")
def extended(corpus: Path, finished: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Extend the run to six rounds at another learning rate."""
    runs = tmp_path_factory.mktemp("extended") / "runs"
    shutil.copytree(finished, runs)
    _go_on(corpus, runs, *EXTENDED)
    return runs


@pytest.fixture
def runs(extended: Path, tmp_path: Path) -> Path:
    """Return a copy of the extended run."""
    shutil.copytree(extended, tmp_path / "runs")
    return tmp_path / "runs"


def _go_on(corpus: Path, runs: Path, *settings: str, config: Path = MIXED) -> dict[str, Any]:
    return train(corpus, runs, *settings, config=config, resume=True)


def _learning_rates(runs: Path, replica: str) -> dict[int, float]:
    """Return the reported learning rates of a replica by step of the run."""
    lines = [json.loads(line) for line in (runs / "mixed" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["event"] == "inner_step" and line["replica"] == replica]
    return {(one["round"] - 1) * H + one["step"]: one["learning_rate"] for one in steps if "learning_rate" in one}


def _rate(step: int, peak: float, total: int) -> float:
    """Return the learning rate of a step: a warm-up, then half a cosine over all steps."""
    if step < WARMUP:
        return peak * (step + 1) / WARMUP
    return peak * (FLOOR + (1 - FLOOR) * (1 + math.cos(math.pi * (step - WARMUP) / (total - WARMUP))) / 2)


# ---- results of a changed run ----


def test_a_change_holds_from_then_on_and_rounds_before_it_stay_as_they_were(finished: Path, extended: Path) -> None:
    """The schedule of learning rates is that of the new total."""
    before, after = (summary_in(runs / "mixed") for runs in (finished, extended))
    assert (after["rounds"], after["validation_loss"][:3]) == (6, before["validation_loss"])
    for round_ in (1, 2, 3):
        record = Path("mixed", "log", f"round-{round_:06d}", "record.json")
        assert (finished / record).read_bytes() == (extended / record).read_bytes()
    expected = {step: _rate(step, 1e-2, 3 * H) for step in range(3 * H)}
    expected |= {step: _rate(step, 4e-3, 6 * H) for step in range(3 * H, 6 * H)}
    for replica in ("dc", "home"):
        assert _learning_rates(extended, replica) == pytest.approx(expected), replica


def test_the_outer_learning_rate_of_a_round_is_that_of_its_time(runs: Path) -> None:
    """Replay from the first run checkpoint across the change gives the bits of the last run checkpoint."""
    folder = RunFolder(runs / "mixed")
    spec, log = read_run(folder), ContributionLog(FolderStore(folder.log))
    assert [spec.at(round_).outer.learning_rate for round_ in (0, 1, 3, 4, 6, 9)] == [1.0, 1.0, 1.0, 0.5, 0.5, 0.5]
    assert len({id(spec.at(round_)) for round_ in range(1000)}) == 2, "a long run keeps no configuration for each round"
    last = open_checkpoint(folder.log / checkpoint_key(6)).checkpoint()
    for round_ in log.checkpoints() - {0}:
        (folder.log / checkpoint_key(round_)).unlink()
    replayed = checkpoint_after(log, spec.run, 6, partial(round_optimizer, spec), [])
    for name, tensor in last.parameters.items():
        assert tensor.equal(replayed.parameters[name]), name


# ---- what the folder keeps ----


def test_what_was_changed_is_kept_and_need_not_be_said_again(
    extended: Path, runs: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, rates = RunFolder(runs / "mixed"), {"inner": {1: 0.01, 4: 0.004}, "outer": {1: 1.0, 4: 0.5}}
    history = {"outer.rounds": {1: 3, 4: 6}} | {f"{of}.learning_rate": changed for of, changed in rates.items()}
    assert read_changes(folder.changes).history == history
    _forget(runs, 6, 7)
    found = _go_on(corpus, runs)
    unbroken = summary_in(extended / "mixed")
    for key in ("parameters_sha256", "validation_loss", "rounds", "contributions", "changes"):
        assert found[key] == unbroken[key], key
    assert {key: {int(r): v for r, v in values.items()} for key, values in found["changes"].items()} == history
    assert read_changes(folder.changes).history == history
    assert "from round" not in capsys.readouterr().out  # there was no new change
    assert read_run(folder).config.rounds == 3  # the value at its start, which identifies the run


def _forget(runs: Path, first: int, last: int) -> None:
    """Delete everything of these rounds."""
    for round_ in range(first, last):
        for path in (runs / "mixed").rglob(f"*{round_:06d}*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def test_a_change_holds_from_its_round_wherever_the_run_goes_on(
    finished: Path, extended: Path, runs: Path, corpus: Path
) -> None:
    """This holds also if the run resumes after a round before the change."""
    _forget(runs, 3, 7)
    shutil.rmtree(runs / "mixed" / "state")
    shutil.copytree(finished / "mixed" / "state", runs / "mixed" / "state", ignore=lambda *_: ["round-000003"])
    unbroken = summary_in(extended / "mixed")
    assert _go_on(corpus, runs)["parameters_sha256"] == unbroken["parameters_sha256"]
    assert _learning_rates(runs, "home") == _learning_rates(extended, "home")


def test_what_is_given_counts_and_what_the_yaml_says_changes_nothing(
    runs: Path, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run may have started with other `--set` values.

    If the YAML was edited, the user is told which `--set` to use.
    """
    edited = tmp_path / "edited.yaml"
    edited.write_text(MIXED.read_text().replace("{rounds: 3,", "{rounds: 7,"))
    found = _go_on(corpus, runs, config=edited)
    assert (found["rounds"], found["changes"]["outer.rounds"]) == (6, {"1": 3, "4": 6})
    told = "mixed: outer.rounds stays 6: a resumed run ignores 7 in the YAML; to change it, use --set outer.rounds=7"
    assert told in capsys.readouterr().out
    changes = _go_on(corpus, runs, "outer.rounds=8", "inner.learning_rate=1e-2")["changes"]
    assert changes["outer.rounds"] == {"1": 3, "4": 6, "7": 8}
    assert changes["inner.learning_rate"] == {"1": 0.01, "4": 0.004, "7": 0.01}  # back to the first value
    told = capsys.readouterr().out
    assert "ignores" not in told
    assert "mixed: rounds 1 to 6 were closed earlier; last validation loss " in told
    assert "round 7/8: " in told


def test_fewer_rounds_than_are_done_are_refused(runs: Path, corpus: Path) -> None:
    before = RunFolder(runs / "mixed").changes.read_bytes()
    told = r"--set outer\.rounds=5: found 5, expected at least 6, the number of finished rounds"
    with pytest.raises(ConfigError, match=told):
        _go_on(corpus, runs, "outer.rounds=5")
    assert RunFolder(runs / "mixed").changes.read_bytes() == before
    assert _go_on(corpus, runs)["rounds"] == 6


def test_a_finished_run_starts_nothing_and_says_how_to_extend_it(
    runs: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """If its summary is missing, members tell what they hold, and it is written again."""

    def start(*_: object) -> None:
        pytest.fail("a member starts")

    run_topology(MIXED, [f"data.corpus={corpus}"], runs, in_process=False, resume=True, start=start)
    told = "mixed: the run is over (round 6 of 6); extend it with `--resume --set outer.rounds=N`, N > 6\n"
    assert capsys.readouterr().out.endswith(told)
    summary = RunFolder(runs / "mixed").summary
    before = summary.read_bytes()
    summary.unlink()
    _go_on(corpus, runs)
    assert told in capsys.readouterr().out
    assert json.loads(summary.read_bytes())["parameters_sha256"] == json.loads(before)["parameters_sha256"]
    _go_on(corpus, runs, "outer.rounds=7")  # which is what it says
    assert "the run is over (round 6 of 6)" not in capsys.readouterr().out


@pytest.mark.starts_processes
def test_over_the_network_a_changed_run_has_the_same_bits(
    finished: Path, extended: Path, corpus: Path, tmp_path: Path
) -> None:
    shutil.copytree(finished, tmp_path / "runs")
    changed = sets(f"data.corpus={corpus}", *EXTENDED)
    done = run_program("launch", str(MIXED), "--runs", str(tmp_path / "runs"), "--resume", *changed)
    assert done.returncode == 0, done.stderr
    found, expected = (summary_in(runs / "mixed") for runs in (tmp_path / "runs", extended))
    for key in ("parameters_sha256", "validation_loss", "contributions", "changes"):
        assert found[key] == expected[key], key
    assert "mixed: inner.learning_rate: 0.004 from round 4 on (before: 0.01)" in done.stdout


# ---- what hosts agree on ----

CONFIG = RunConfig.model_validate(
    {"name": "run", "outer": {"rounds": 10}, "replicas": [{"name": "dc", "kind": "datacenter"}]}
)


def test_a_host_may_say_any_value_that_the_run_has_had_and_no_other() -> None:
    def complaint(values: dict[str, Any], **others: Any) -> str:
        changes = Changes({"outer.rounds": {1: 10, 6: 20}})
        other = with_values(CONFIG, values).model_copy(update=others)
        return Agreement(CONFIG, changes, {"inner.learning_rate": 0.5}).complaint(meaning(other, NotPartOf.RUN))

    for values in ({}, {"outer.rounds": 20}, {"inner.learning_rate": 0.5}, {"outer.rounds": 20, "threads": 3}):
        assert complaint(values) == ""
    told = complaint({"outer.rounds": 30, "inner.learning_rate": 0.7, "outer.learning_rate": 0.9}, seed=4)
    assert told.split("; ") == [
        "inner.learning_rate: found 0.7, expected 0.5",
        "outer.learning_rate: found 0.9, expected 1.0",
        "outer.rounds: found 30, expected 20",
        "seed: found 4, expected 0",
    ]


def test_a_changed_run_keeps_its_name() -> None:
    spec = RunSpec(CONFIG, 256)
    changed = spec.with_changes(NO_CHANGES.changed(CONFIG, 6, {"outer.rounds": 20, "inner.learning_rate": 0.5}))
    elsewhere = RunSpec(with_values(CONFIG, {"outer.rounds": 20}), 256)
    assert changed.run == spec.run != elsewhere.run
    assert elsewhere.with_changes(changed.changes).run == spec.run  # a host that the exchange told of the change
    assert (spec.total_steps, changed.total_steps) == (100, 200)
    rates = [changed.rates_in(round_, 0, None) for round_ in (1, 5, 6, 20)]
    assert [one.total_steps for one in rates if isinstance(one, BySteps)] == [100, 100, 200, 200]


def test_what_is_changed_again_before_it_held_is_forgotten() -> None:
    once = NO_CHANGES.changed(CONFIG, 6, {"outer.rounds": 20, "inner.learning_rate": 0.5})
    again = once.changed(CONFIG, 4, {"inner.learning_rate": 0.3})
    assert again.history == {"outer.rounds": {1: 10, 6: 20}, "inner.learning_rate": {1: 0.01, 4: 0.3}}
    assert [again.at(CONFIG, round_).inner.learning_rate for round_ in (3, 4, 6)] == [0.01, 0.3, 0.3]
    assert Changes.from_json(again.to_json()) == again
    assert Changes.from_json(NO_CHANGES.to_json()) == NO_CHANGES


def test_only_what_shapes_rounds_to_come_may_change() -> None:
    both = {f"{of}.{key}" for of in ("inner", "outer") for key in ("learning_rate", "final_learning_rate_share")}
    warmup = {"inner.warmup_steps", "inner.warmup_rounds", "outer.warmup_rounds"}
    assert values_of(CONFIG).keys() == {"outer.rounds", "outer.tokens", "checkpoints.every", *both, *warmup}


def test_changes_that_are_none_are_named(tmp_path: Path) -> None:
    """They come from a file or from an exchange."""
    path = tmp_path / "changes.yaml"
    for text in ("[1]", "a.b: 5", "a.b: {4: 5}", "a.b: {}", "a: [", "\udcff"):
        path.write_bytes(text.encode(errors="surrogateescape"))
        with pytest.raises(ConfigError, match=r"changes\.yaml: cannot be read"):
            read_changes(path)
    for text in ("[1]", "{", '{"outer.rounds": {"4": 5}}'):
        with pytest.raises(MalformedMessage, match="changes of the run"):
            Changes.from_json(text)
