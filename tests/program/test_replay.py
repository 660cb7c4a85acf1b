"""`hetero-pp log replay`: a run's parameters follow from the log alone, and everything wrong in it is named."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from asking import sets
from mixed_run import MIXED
from typer.testing import CliRunner

from hetero_pp.config.checkpoint import open_checkpoint, save_checkpoint
from hetero_pp.program import run_log
from hetero_pp.program.cli import app
from hetero_pp.store.folder import FolderStore
from replica_groups.exchange.audits import Audit, audit_key
from replica_groups.exchange.log import ContributionLog, checkpoint_key, record_digest, record_key

ROUNDS = 4


def _invoke(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "400"})
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture(scope="module")
def finished(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run of four rounds, with run checkpoints after 0, 2 and 4."""
    runs = tmp_path_factory.mktemp("runs")
    given = sets(f"data.corpus={corpus}", f"outer.rounds={ROUNDS}", "outer.momentum=0.5", "checkpoints.every=2")
    code, _, errors = _invoke("launch", MIXED, "--in-process", "--runs", runs, *given)
    assert (code, errors) == (0, "")
    return runs / "mixed"


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """Return a copy that a test may damage."""
    shutil.copytree(finished, tmp_path / "mixed")
    return tmp_path / "mixed"


def _found(run: Path) -> tuple[int, list[dict[str, Any]], str]:
    """Return the exit code, the result of each round, and stderr."""
    (run / "found.json").unlink(missing_ok=True)
    code, _, errors = _invoke("log", "replay", run, "--json", run / "found.json")
    return code, json.loads((run / "found.json").read_text())["rounds"], errors


def test_the_log_alone_gives_what_the_run_came_to(run: Path, tmp_path: Path) -> None:
    last = json.loads((run / "summary.json").read_text())["parameters_sha256"]["dc"]
    for name in ("metrics.jsonl", "summary.json"):
        (run / name).unlink()
    shutil.rmtree(run / "state")
    code, told, errors = _invoke("log", "replay", run, "--to", tmp_path / "last", "--json", tmp_path / "found.json")
    assert (code, errors) == (0, "")
    lines = told.splitlines()
    assert len(lines) == ROUNDS + 2
    assert lines[2].startswith("round 2: included dc, home; sha256 ") and lines[2].endswith(
        "; equal to the audit; equal to the run checkpoint"
    )
    assert lines[-1] == f"mixed after round 4: sha256 {last}, written to {tmp_path / 'last'}"
    found = json.loads((tmp_path / "found.json").read_text())["rounds"]
    assert [one["is_audited"] for one in found] == [False, True, True, True, True]
    assert [one["has_checkpoint"] for one in found] == [True, False, True, False, True]
    written, kept = (
        open_checkpoint(tmp_path / "last").checkpoint(),
        open_checkpoint(run / "log" / checkpoint_key(4)).checkpoint(),
    )
    assert written.round == 4
    assert written.tensors().keys() == kept.tensors().keys()
    assert all(written.tensors()[name].equal(tensor) for name, tensor in kept.tensors().items())
    assert any(name.startswith("outer.momentum.") for name in kept.tensors())


def test_up_to_a_round(run: Path, tmp_path: Path) -> None:
    code, told, _ = _invoke("log", "replay", run, "--round", 3, "--to", tmp_path / "third")
    assert (code, len(told.splitlines())) == (0, 5)
    shutil.rmtree(run / "log" / "round-000004")
    (run / "log" / checkpoint_key(4)).unlink()
    assert open_checkpoint(tmp_path / "third").checkpoint().round == 3
    code, again, _ = _invoke("log", "replay", run)
    assert again.splitlines()[3] == told.splitlines()[3]


@pytest.mark.parametrize("history", ["whole", "recent"])
def test_a_run_that_trains_meanwhile_is_replayed_up_to_its_last_closed_round(
    history: str, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run removes run checkpoints that this has listed, and with a short history rounds that it has not read."""
    log, newest = run / "log", (run / "log" / checkpoint_key(4)).read_bytes()
    (log / checkpoint_key(4)).unlink()
    (log / audit_key(4)).unlink()
    record = log / record_key(4)
    record.rename(record.with_name("record.json.0123abcd.part"))  # it is being written

    def announced(line: str) -> None:
        print(line)
        if line.startswith("round 1:"):
            (log / checkpoint_key(4)).write_bytes(newest)
            (log / checkpoint_key(2)).unlink()
            if history == "recent":
                (log / checkpoint_key(0)).unlink()
                shutil.rmtree(log / "round-000002" / "home")

    monkeypatch.setattr(run_log, "announce", announced)
    code, told, errors = _invoke("log", "replay", run)
    lines = told.splitlines()
    assert [line.partition(":")[0] for line in lines[:4]] == ["round 0", "round 1", "round 2", "round 3"]
    if history == "whole":
        assert (code, errors) == (0, "")
        assert lines[4].startswith("mixed after round 3 of 4, the last closed one: sha256 ")
    else:
        assert (code, len(lines)) == (1, 4)
        assert errors == f"hetero-pp: {log}: the run has removed rounds before they were read: replay it again\n"


def _flip(path: Path, share: float = 0.5) -> None:
    data = bytearray(path.read_bytes())
    data[int(share * len(data))] ^= 4
    path.write_bytes(data)


def _other_weight(path: Path) -> None:
    """Rewrite a record with another weight and a digest that fits."""
    log = ContributionLog(FolderStore(path.parents[1]))
    record = log.read_record(3)
    record.contributions[0].weight = 3.0
    path.unlink()
    assert log.create_record(record).sha256 == record_digest(record)


def _other_parameters(path: Path) -> None:
    audit = Audit.model_validate_json(path.read_bytes())
    path.write_text(audit.model_copy(update={"parameters_sha256": "00" * 32}).sealed().model_dump_json())


def _other_momentum(path: Path) -> None:
    checkpoint = open_checkpoint(path).checkpoint()
    name = next(iter(checkpoint.momentum))
    checkpoint.momentum[name].add_(1.0)
    save_checkpoint(checkpoint, path)


@pytest.mark.parametrize(
    ("key", "damage", "round_", "line"),
    [
        ("round-000003/dc/1/*.blobs", _flip, 3, ".blob) is damaged: it does not match its digest"),
        ("round-000003/dc/1/*.blobs", Path.unlink, 3, ".blob is missing"),
        (record_key(3), _flip, 3, "round-000003/record.json is damaged: "),
        (record_key(3), Path.unlink, 3, "round-000003/record.json is missing"),
        (record_key(3), _other_weight, 3, "audited/round-000003.json belongs to another record"),
        (checkpoint_key(2), _flip, 2, "checkpoint-000002.safetensors is damaged: "),
        (
            checkpoint_key(2),
            _other_momentum,
            2,
            "checkpoint-000002.safetensors differs from the parameters that the log gives",
        ),
        (checkpoint_key(0), _flip, 0, "checkpoint-000000.safetensors is damaged: "),
        (audit_key(3), _flip, 3, "audited/round-000003.json is damaged: "),
        (audit_key(3), _other_parameters, 3, f"audited/round-000003.json has {'00' * 32}, the log gives "),
    ],
)
def test_what_is_not_as_it_should_be_is_named(
    run: Path, key: str, damage: Callable[[Path], None], round_: int, line: str
) -> None:
    damage(*(run / "log").glob(key))
    code, found, errors = _found(run)
    assert code == 1
    assert line in found[round_]["damaged"][0]
    assert errors.startswith(f"hetero-pp: {run / 'log'}: ") and len(errors.splitlines()) == 1
    assert [one["round"] for one in found] == [0, 1, 2, 3, 4]


def test_what_cannot_be_replayed_is_said(run: Path, tmp_path: Path) -> None:
    (tmp_path / "there").write_text("mine")
    for arguments, words in [
        ((tmp_path,), f"{Path('runs').absolute()}: found no run {tmp_path} that this host started"),
        ((run, "--round", 5), f"--round 5: found a round that the log in {run / 'log'} does not have, expected 0 to 4"),
        ((run, "--to", tmp_path / "there"), f"--to {tmp_path / 'there'}: found a file, expected a new name"),
    ]:
        code, _, errors = _invoke("log", "replay", *arguments)
        assert (code, errors.startswith(f"hetero-pp: {words}"), len(errors.splitlines())) == (2, True, 1), errors
    for checkpoint in (run / "log").glob("checkpoint*"):
        checkpoint.unlink()
    code, _, errors = _invoke("log", "replay", run)
    assert (code, "found no run checkpoint" in errors) == (2, True)


# ---- a folder from an untrusted sender ----

NONSENSE = [
    {"time": math.nan, "member": "dc", "event": "inner_step", "replica": "dc", "round": 1, "loss": math.inf},
    {"time": 1, "member": "dc", "event": "round_closed", "round": 999_999_999},
    {"time": 1, "member": "dc", "event": "round_closed", "round": math.inf},
    {"time": "x", "member": 7, "event": "joined"},
    {"time": 1, "member": "\x1b[31mred", "event": "joined"},
    {"time": 1, "member": "dc", "event": "begun", "changes": "[" * 5000},
    7,
]
COMMANDS = ("log replay", "log volume", "view", "status", "export")


def _all(run: Path, other: Path) -> dict[str, tuple[int, str]]:
    """Return exit code and error of each command that reads a run's folder. None shows a traceback or an escape."""
    more = {"view": [other, "--compare", run / "chart.png"], "export": ["--to", run.parent / "exported"]}
    found = {}
    for command in COMMANDS:
        code, told, errors = _invoke(*command.split(), run, *more.get(command, []))
        assert "Traceback" not in errors and errors.count("\n") <= 1, (command, errors)
        assert "\x1b" not in told + errors
        found[command] = code, errors
    return found


def test_numbers_and_events_that_nobody_noted_end_no_command(run: Path, finished: Path) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.writelines(f"{json.dumps(one)}\n" for one in NONSENSE)
        file.write("[" * 200_000 + "\n" + "x" * 3_000_000 + "\n")
    (run / "summary.json").write_text('{"training_seconds": "x", "tokens_per_second": NaN, "failed": "\\u001b[31m"}')
    assert {code for code, _ in _all(run, finished).values()} == {0}
    (run / "summary.json").write_text("[" * 100_000)
    assert _invoke("view", run, finished, "--compare", run / "chart.png")[0] == 0


def test_a_round_that_no_other_leads_to_is_named_and_not_counted_up_to(run: Path, finished: Path, corpus: Path) -> None:
    stray = run / "log" / "round-999999999"
    stray.mkdir()
    (stray / "record.json").write_text("{}")
    told = f"hetero-pp: {stray} does not belong to this run: the rounds between 4 and 999999999 are missing; "
    found = _all(run, finished)
    assert found["log replay"] == found["log volume"] == (1, f"{told}move it out of the log\n")
    given = sets(f"data.corpus={corpus}", f"outer.rounds={ROUNDS + 1}", "outer.momentum=0.5", "checkpoints.every=2")
    _, _, errors = _invoke("launch", MIXED, "--in-process", "--resume", "--runs", run.parent, *given)
    assert errors == found["log replay"][1]


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        (
            "config.yaml",
            None,
            "truncated or edited since: restore it from a copy. If another version wrote it, use that version",
        ),
        ("changes.yaml", "a.b: {1: 5}", "changes of the run: a.b: found a key that cannot change during a run"),
        ("changes.yaml", "replicas: {1: 5}", "changes of the run: a value does not fit"),
        ("changes.yaml", "a: [", "cannot be read .*; hetero-pp writes this file itself: restore it from a copy"),
        ("changes.yaml", "a: " + "[" * 3000, "levels deep|nesting depth"),
    ],
)
def test_a_file_of_a_run_that_is_not_what_was_written_is_named(
    name: str, content: str | None, told: str, run: Path, finished: Path
) -> None:
    text = (run / name).read_text() if content is None else ""
    (run / name).write_text(text.partition("licas:")[0] if content is None else content)  # ends within a key
    for command, (code, errors) in _all(run, finished).items():
        assert code in (1, 2) and re.search(told, errors), command
        assert content is not None or f"{run / name}:" in errors


def test_devices_in_a_folder_are_not_read(run: Path, finished: Path) -> None:
    for name in ("summary.json", "config.yaml"):
        (run / name).unlink()
        (run / name).symlink_to("/dev/zero")
    assert {code for code, _ in _all(run, finished).values()} == {2}
