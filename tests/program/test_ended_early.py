"""Resuming a run whose files are damaged, changed or shared: what continues, what is refused, and what is reported."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from asking import sets
from mixed_run import MIXED, QUICK, is_same, summary_in, train
from rich.console import Console
from started import run_program

from hetero_pp.config.folder import RunFolder
from hetero_pp.config.spec import RunSpec
from hetero_pp.config.yaml_file import ConfigFile
from hetero_pp.core.errors import ConfigError, HeteroPPError, RunFailed
from hetero_pp.data.tokenizers import load_tokenizer
from hetero_pp.messages.messages_pb2 import Report
from hetero_pp.program.launch import earlier
from hetero_pp.program.launch.earlier import (
    CONTINUE,
    NEW,
    QUIT,
    claim,
    decide_to_resume,
    find_unfinished,
    how_to_go_on,
)
from hetero_pp.program.launch.inputs import Prepared
from hetero_pp.program.report.recorder import reports_until
from hetero_pp.program.report.state import RunState
from replica_groups.exchange.exchange import Exchange
from replica_groups.exchange.memberships import Memberships

ROUNDS = 3


@pytest.fixture(scope="module")
def finished(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    runs = tmp_path_factory.mktemp("finished")
    _train(corpus, runs)
    return runs


@pytest.fixture
def cut(finished: Path, tmp_path: Path) -> Path:
    """Return the folder of a run that ended as it closed its last round.

    Members have checkpoints of the last two rounds.
    """
    shutil.copytree(finished, tmp_path / "runs")
    return _cut(tmp_path / "runs" / "mixed")


def _cut(folder: Path) -> Path:
    shutil.rmtree(folder / "log" / f"round-{ROUNDS:06d}")
    (folder / "log" / f"checkpoint-{ROUNDS:06d}.safetensors").unlink()
    (folder / "summary.json").unlink()
    return folder


def _train(corpus: Path, runs: Path, *settings: str, **how: Any) -> dict[str, Any]:
    return train(corpus, runs, f"outer.rounds={ROUNDS}", "checkpoints.every=1", *QUICK, *settings, **how)


# ---- damage ----


def test_a_run_that_was_cut_goes_on_to_the_same_bits(
    finished: Path, cut: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """States are loaded to the CPU first, because devices may change: a GPU may have saved them."""
    load, asked = torch.load, []

    def loaded(path: Path, **options: Any) -> Any:
        asked.append(options["map_location"])
        return load(path, **options)

    monkeypatch.setattr(torch, "load", loaded)
    assert is_same(_train(corpus, cut.parent, resume=True), summary_in(finished / "mixed"))
    assert asked == ["cpu"] * 4
    said = capsys.readouterr().out
    assert f"mixed: resuming after round {ROUNDS - 1}" in said
    assert re.search(
        rf"^mixed: rounds 1 to {ROUNDS - 1} were closed earlier; last validation loss \d\.\d{{4}}$", said, re.M
    )
    assert re.findall(r"^round (\d+)/", said, re.MULTILINE) == [str(ROUNDS)]


# ---- not replaced ----


def test_an_unfinished_run_is_not_replaced_without_a_word(cut: Path, corpus: Path) -> None:
    """With --new, a new run moves the unfinished one aside. A finished run is replaced without --new."""
    stopped = rf"{cut}: run mixed stopped after round {ROUNDS - 1} of {ROUNDS}; "
    found = stopped + r"resume it with --resume, or start a new run with --new \(to resume: hpp launch --resume\)"
    with pytest.raises(ConfigError, match=f"^{found}$"):
        _train(corpus, cut.parent, typed=["hpp", "launch"])
    with pytest.raises(ConfigError, match=r"^--new: found --resume, too"):
        _train(corpus, cut.parent, resume=True, new=True)
    assert [path.name for path in cut.parent.glob("[!.]*")] == ["mixed"]
    assert _train(corpus, cut.parent, "outer.rounds=1", new=True)["rounds"] == 1
    assert not (cut.parent / "mixed.1" / "summary.json").exists()
    _train(corpus, cut.parent, "outer.rounds=1")
    assert (cut.parent / "mixed.2" / "summary.json").exists()


@pytest.mark.parametrize("answer", [CONTINUE, NEW, QUIT, None])
def test_on_a_terminal_the_user_is_asked(answer: str | None, cut: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the answer None, the terminal has been closed."""

    def ask(*_: object, **__: object) -> str:
        if answer is None:
            raise EOFError
        return answer

    monkeypatch.setattr(earlier, "standard_output", lambda: Console(file=io.StringIO(), force_terminal=True))
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr(earlier.Prompt, "ask", ask)
    config = ConfigFile(RunFolder(cut).config).config
    if answer in (QUIT, None):
        with pytest.raises(ConfigError, match="resume it with --resume"):
            decide_to_resume(config, cut.parent, resume=False, new=False)
    else:
        assert decide_to_resume(config, cut.parent, resume=False, new=False) == (answer == CONTINUE)


def test_which_runs_are_unfinished(cut: Path, corpus: Path) -> None:
    """Rounds that were added later count. A run without a closed round is nothing to lose, unless it has tickets."""
    config, folder = ConfigFile(RunFolder(cut).config).config, RunFolder(cut)
    (folder.path / "changes.yaml").write_text(f"outer.rounds: {{1: {ROUNDS}, {ROUNDS - 1}: 9}}\n")
    found = find_unfinished(config, cut.parent)
    assert found is not None
    assert str(found) == f"{cut}: run mixed stopped after round {ROUNDS - 1} of 9"
    (folder.path / "changes.yaml").write_text(f"outer.rounds: {{1: {ROUNDS}, {ROUNDS - 1}: {ROUNDS - 1}}}\n")
    assert find_unfinished(config, cut.parent) is None
    (folder.path / "changes.yaml").unlink()
    shutil.rmtree(folder.log)
    assert find_unfinished(config, cut.parent) is None
    with closing(Memberships(folder.memberships)) as memberships:
        memberships.invite("dc", 0.0)
        assert find_unfinished(config, cut.parent) is None  # the ticket has expired
        memberships.invite("home.0", 3600.0)
    found = find_unfinished(config, cut.parent)
    assert str(found) == f"{cut}: run mixed stopped before round 1 of {ROUNDS} closed, and 1 ticket is still valid"


def _scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return (step, value) pairs by tag, as TensorBoard shows them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return {tag: [(one.step, one.value) for one in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


@contextmanager
def _without_checkpoints(folder: Path) -> Iterator[None]:
    """Move the run checkpoints away inside the block, so that no round can be resumed."""
    aside = folder.parent / "aside"
    aside.mkdir()
    for path in (folder / "log").glob("checkpoint-*"):
        shutil.move(path, aside / path.name)
    yield
    for path in aside.iterdir():
        shutil.move(path, folder / "log" / path.name)
    aside.rmdir()


def test_a_run_may_be_resumed_any_number_of_times(finished: Path, cut: Path, corpus: Path) -> None:
    """TensorBoard has one value per step, and none of a failed attempt.

    The summary's times leave out all pauses. The metrics keep their own times.
    """
    year = 365 * 24 * 3600.0
    lines = [json.loads(line) for line in (cut / "metrics.jsonl").read_text().splitlines()]
    earlier = [json.dumps(line | {"time": line["time"] - year}) for line in lines]
    (cut / "metrics.jsonl").write_text("\n".join(earlier) + "\n")
    _train(corpus, cut.parent, resume=True)
    _cut(cut)
    with _without_checkpoints(cut), pytest.raises(HeteroPPError):
        _train(corpus, cut.parent, resume=True)
    assert len(list((cut / "tensorboard").iterdir())) == 1
    summary = _train(corpus, cut.parent, resume=True)
    assert summary["training_seconds"] <= summary["wall_seconds"] < year / 2
    times = [json.loads(line)["time"] for line in (cut / "metrics.jsonl").read_text().splitlines()]
    assert max(times) - min(times) > year / 2
    found, unbroken = _scalars(cut), _scalars(finished / "mixed")
    assert found.keys() == unbroken.keys()
    for tag, values in unbroken.items():
        steps = [step for step, _ in values]
        assert [step for step, _ in found[tag]] == steps == sorted(set(steps)), tag
        if not tag.startswith(("busy_share", "tokens_per_second")):
            assert found[tag] == values, tag


def test_a_flipped_bit_in_a_state_is_named_and_the_round_before_taken(
    finished: Path, cut: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(finished / "mixed" / "log" / f"round-{ROUNDS:06d}", cut / "log" / f"round-{ROUNDS:06d}")
    state = cut / "state" / "home.1" / f"round-{ROUNDS:06d}" / "stage.pt"
    content = bytearray(state.read_bytes())
    content[len(content) // 2] ^= 1
    state.write_bytes(content)
    assert is_same(_train(corpus, cut.parent, resume=True), summary_in(finished / "mixed"))
    told = capsys.readouterr().out
    assert "mixed: skipping a damaged file: home.1: " in told
    assert f"round-{ROUNDS:06d} is damaged: 'stage.pt' does not match its digest" in told
    assert f"mixed: resuming after round {ROUNDS - 1}" in told


def test_a_member_that_has_lost_its_states_goes_on_with_the_others(
    cut: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(cut / "state" / "dc")
    found = _train(corpus, cut.parent, resume=True)
    assert "dc has no saved state and starts with an empty error feedback" in capsys.readouterr().out
    assert found["rounds"] == ROUNDS
    assert len(set(found["parameters_sha256"].values())) == 1


def test_a_run_that_is_over_is_not_undone(finished: Path, corpus: Path, tmp_path: Path) -> None:
    shutil.copytree(finished, tmp_path / "runs")
    folder = tmp_path / "runs" / "mixed"
    assert is_same(_train(corpus, tmp_path / "runs", resume=True), summary_in(finished / "mixed"))  # nothing was left
    shutil.rmtree(folder / "state" / "dc" / f"round-{ROUNDS:06d}")
    (folder / "summary.json").unlink()  # otherwise nothing starts
    before = {
        path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and "tensorboard" not in str(path)
    }
    with pytest.raises(HeteroPPError, match="the run is over: its log has the run checkpoint after round 3 of 3"):
        _train(corpus, tmp_path / "runs", resume=True)
    assert {path: path.read_bytes() for path in before} == before


def test_a_round_whose_close_was_not_noted_comes_after_the_one_before(finished: Path, tmp_path: Path) -> None:
    """The launcher may end after the record is written and before the metrics are."""
    folder = Path(shutil.copytree(finished / "mixed", tmp_path / "mixed"))
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    kept = [line for line in lines if (told := json.loads(line))["event"] != "round_closed" or told["round"] != 3]
    assert len(kept) == len(lines) - 1
    (folder / "metrics.jsonl").write_text("\n".join(kept) + "\n")
    reports = reports_until(ConfigFile(folder / "config.yaml").config, RunFolder(folder), 3, pytest.fail)
    assert [report.round_closed.round for report in reports if report.HasField("round_closed")] == [1, 2, 3]


@pytest.mark.parametrize("metrics", ["damaged", "lost"])
def test_the_log_alone_decides(finished: Path, cut: Path, corpus: Path, metrics: str) -> None:
    """Damaged metrics have strange lines and a torn end. An earlier process was killed while it rewrote them."""
    whole = (cut / "metrics.jsonl").read_text()
    if metrics == "damaged":
        strange = ["[]", "7", "{}", '{"event": "evaluation"}', "[" * 5000, '{"event": "evaluation", "round": "x"}']
        strange += ['{"event": "round_closed", "round": [], "time": 1}', "9" * 5000]
        (cut / "metrics.jsonl").write_text("\n".join(strange) + "\n" + whole + whole[:200])
        (cut / "metrics.jsonl.part").write_text(whole[: len(whole) // 3])
    else:
        (cut / "metrics.jsonl").unlink()
    found, unbroken = _train(corpus, cut.parent, resume=True), summary_in(finished / "mixed")
    if metrics == "lost":  # losses of earlier rounds were only there
        assert found["validation_loss"] == [None, *unbroken["validation_loss"][1:]]
        assert found["parameters_sha256"] == unbroken["parameters_sha256"]
        assert found["contributions"] == unbroken["contributions"]
    else:
        assert is_same(found, unbroken)
    assert not (cut / "metrics.jsonl.part").exists()


def _spec(runs: Path) -> RunSpec:
    config = ConfigFile(runs / "mixed" / "config.yaml").config
    return RunSpec(config, load_tokenizer(config.data).vocabulary)


# ---- what may change ----


@pytest.mark.parametrize(
    ("setting", "key"),
    [
        ("inner.steps=4", "--resume: inner.steps: found 4, expected 2, as in "),
        ("inner.betas=[0.9, 0.99]", "inner.betas[1]: found 0.99, expected 0.95"),
        ("replicas.1.boundary.rank=1/2", "replicas[1].boundary.rank: found 0.5, expected 0.25"),
        ("replicas.1.stages=2", "replicas[1].stages: found 2, expected 3 entries"),
    ],
)
def test_what_may_not_change_is_refused_in_one_line(cut: Path, corpus: Path, setting: str, key: str) -> None:
    before = {path: path.read_bytes() for path in cut.rglob("*") if path.is_file()}
    with pytest.raises(ConfigError) as refusal:
        _train(corpus, cut.parent, setting, resume=True)
    told = str(refusal.value)
    assert key in told
    assert "\n" not in told
    assert {path: path.read_bytes() for path in cut.rglob("*") if path.is_file()} == before


def test_what_may_change_is_applied(finished: Path, cut: Path, corpus: Path, tmp_path: Path) -> None:
    moved = tmp_path / "moved"
    shutil.copytree(corpus, moved)
    changed = [f"data.corpus={moved}", "exchange.listen=127.0.0.1:0", "replicas.0.device=cpu"]
    assert is_same(_train(corpus, cut.parent, *changed, resume=True), summary_in(finished / "mixed"))
    config = ConfigFile(cut / "config.yaml").config
    assert config.data.corpus == str(moved)
    assert config.replicas[0].model_dump()["device"] == "cpu"


# ---- no success without output ----


def test_reports_that_cannot_be_followed_are_no_success(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    apply = RunState.apply

    def fails(state: RunState, report: Report) -> None:
        if state.rounds == 1:
            raise KeyError("a bug")
        apply(state, report)

    monkeypatch.setattr(RunState, "apply", fails)
    with pytest.raises(
        RunFailed, match=r"stopped receiving the run's reports before the run was over \(KeyError: 'a bug'\)"
    ):
        _train(corpus, tmp_path)
    assert "a bug" in summary_in(tmp_path / "mixed")["failed"]


def test_a_run_that_ends_before_its_last_round_is_no_success(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = Exchange.watch

    def ends_early(exchange: Exchange) -> Iterator[Report]:
        for report in watch(exchange):
            if report.HasField("round_closed") and report.round_closed.round == 2:
                return
            yield report

    monkeypatch.setattr(Exchange, "watch", ends_early)
    with pytest.raises(RunFailed, match="the run ended after round 1 of 3 without a reason"):
        _train(corpus, tmp_path)


# ---- interrupted ----


@pytest.mark.parametrize(
    ("names", "typed", "expected"),
    [
        (None, "hetero-pp launch a.yaml", "resume with: hetero-pp launch a.yaml --resume"),
        (None, "hetero-pp launch a.yaml --new", "resume with: hetero-pp launch a.yaml --resume"),
        (None, "hetero-pp launch a.yaml --resume", "resume with: hetero-pp launch a.yaml --resume"),
        (["exchange"], "x --only exchange", "their commands): x --only exchange --resume --token-file {token}"),
        (["exchange"], "x --token-file t", "their commands): x --token-file t --resume"),
        (["dc"], "x --only dc", "after the exchange has been resumed, rejoin it with: x --only dc"),
    ],
)
def test_who_interrupts_is_told_how_to_go_on(cut: Path, names: list[str] | None, typed: str, expected: str) -> None:
    spec, folder = _spec(cut.parent), RunFolder(cut)
    prepared = Prepared(spec, ["exchange", *spec.members] if names is None else names, None)
    told = how_to_go_on(prepared, folder, typed.split())
    assert told.endswith(expected.format(token=folder.token))
    if names is None:
        shutil.rmtree(cut / "state" / "home.1")
        told = how_to_go_on(prepared, folder, typed.split())
        saved = "no state has been saved yet (states are saved every 1 round)"
        again = "hetero-pp launch a.yaml --resume"
        assert told == f"{saved}; resume from the log, with new optimizer moments, with: {again}"
        shutil.rmtree(folder.log)
        again = typed.removesuffix(" --new")
        assert how_to_go_on(prepared, folder, typed.split()) == f"{saved}; start the run again with: {again}"


def test_the_command_that_resumes_is_printed_once_and_before_the_pictures_are_drawn(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    printed, watch = list[str](), Exchange.watch

    def interrupted(exchange: Exchange) -> Iterator[Report]:
        for report in watch(exchange):
            if report.HasField("round_closed") and report.round_closed.round == 2:
                os.kill(os.getpid(), signal.SIGINT)
            yield report

    monkeypatch.setattr(Exchange, "watch", interrupted)
    draw = "hetero_pp.program.report.recorder.draw_losses"
    monkeypatch.setattr(draw, lambda *_: printed.append(capsys.readouterr().out))
    with pytest.raises(KeyboardInterrupt):
        _train(corpus, tmp_path, typed=["hetero-pp", "launch", "a.yaml"])
    assert printed[0].endswith("hetero-pp launch a.yaml --resume\n")
    assert len(printed) == 1
    assert capsys.readouterr().out == ""
    assert summary_in(tmp_path / "mixed")["failed"] == "interrupted"


# ---- two launches ----


@pytest.mark.starts_processes
def test_two_launches_cannot_share_a_folder(tmp_path: Path, corpus: Path) -> None:
    folder = tmp_path / "mixed"
    folder.mkdir()
    (folder / "mine").write_text("a run under way")
    given = sets(f"data.corpus={corpus}", "outer.rounds=1")
    ways = [["--in-process"], ["--resume"], ["--only", "exchange", "--set", "exchange.listen=127.0.0.1:1"]]
    with claim(tmp_path, "mixed", ["home.1"]):
        for way in ways:
            done = run_program("launch", str(MIXED), "--runs", str(tmp_path), *given, *way)
            assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr
            assert f"{folder}: another launch is using this folder (home.1)" in done.stderr
    assert (folder / "mine").read_text() == "a run under way"
    assert not (tmp_path / "mixed.1").exists()
    _train(corpus, tmp_path, "outer.rounds=1")
    assert (tmp_path / "mixed.1" / "mine").exists()
