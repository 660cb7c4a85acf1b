"""Bad input: one line naming file, line, key, what was found and what is expected; exit code 2; no traceback."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hetero_pp.program.cli import app

GOOD = """\
name: t
data: {corpus: CORPUS, sequence_length: 16, validation_share: 0.2, validation_sequences: 4}
outer:
  rounds: 3
links:
  home: {bandwidth: 100 Mbit/s, latency: 20 ms}
replicas:
  - name: dc
    kind: datacenter
  - name: home
    kind: participants
    stages: 4
    micro_batches: 2
    link: home
    boundary: {rank: 1/8}
"""

CASES = {
    "unknown key": ("latency", "latenzy", 6, "links.home.latenzy", ["unknown key", "did you mean `latency`?"]),
    "unknown key of a replica": ("link: home", "lnk: home", 14, "replicas[1].lnk", ["unknown key", "`link`"]),
    "wrong unit": ("100 Mbit/s", "100 Mbps/s", 6, "links.home.bandwidth", ["`100 Mbps/s`", "such as `100 Mbit/s`"]),
    "no unit": ("20 ms", "20", 6, "links.home.latency", ["`20`", "such as `20 ms`"]),
    "no bandwidth": ("100 Mbit/s", "0 Mbit/s", 6, "links.home.bandwidth", ["`0 Mbit/s`", "greater than 0"]),
    "rank above d": ("1/8", "65", 15, "replicas[1].boundary.rank", ["65", "at most the model's width 64"]),
    "no rank": ("1/8", "much", 15, "replicas[1].boundary.rank", ["`much`", "`1/8`"]),
    "too many stages": ("stages: 4", "stages: 5", 12, "replicas[1].stages", ["5 stages", "4 layers"]),
    "wrong split": (
        "stages: 4",
        "stages: [{layers: 2}, {layers: 1}]",
        12,
        "replicas[1].stages",
        ["3 layers", "4 layers"],
    ),
    "same name": ("name: home", "name: dc", 10, "replicas[1].name", ["second replica named `dc`", "unique"]),
    "unknown link": ("link: home", "link: hom", 14, "replicas[1].link", ["`hom`", "(home)"]),
    "unknown kind": ("kind: datacenter", "kind: dc", 8, "replicas[0]", ["`kind: dc`", "'datacenter'"]),
    "not a number": ("rounds: 3", "rounds: many", 4, "outer.rounds", ["`many`", "valid integer"]),
    "missing key": (
        "  rounds: 3\n",
        "  learning_rate: 1.0\n",
        3,
        "outer.rounds",
        ["found nothing", "expected a value"],
    ),
    "uneven batch": ("micro_batches: 2", "micro_batches: 3", 13, "replicas[1].micro_batches", ["3", "divisor of"]),
    "missing corpus": ("corpus: CORPUS", "corpus: /nowhere/at/all", 2, "data.corpus", ["/nowhere/at/all", "expected"]),
    "too small a corpus": ("sequence_length: 16", "sequence_length: 9999", 2, "data.corpus", ["tokens", "at least"]),
    "unreadable tokenizer": (
        "corpus: CORPUS",
        "tokenizer: no.json, corpus: CORPUS",
        2,
        "data.tokenizer",
        ["no.json", "expected"],
    ),
    "not YAML": ("outer:", "outer: [", 5, "", ["not YAML"]),
    "key twice": ("name: t", "name: t\nname: u", 2, "", ["duplicate key"]),
}


def _invoke(text: str, tmp_path: Path, corpus: Path, *arguments: str) -> tuple[int, str, Path]:
    path = tmp_path / "run.yaml"
    path.write_text(text.replace("CORPUS", str(corpus)))
    result = CliRunner().invoke(app, ["check", str(path), "--runs", str(tmp_path / "runs"), *arguments])
    return result.exit_code, result.stderr, path


@pytest.mark.parametrize("case", CASES)
def test_bad_input_is_named(case: str, tmp_path: Path, corpus: Path) -> None:
    old, new, line, key, words = CASES[case]
    assert old in GOOD
    code, errors, path = _invoke(GOOD.replace(old, new, 1), tmp_path, corpus)
    assert code == 2
    assert len(errors.splitlines()) == 1, errors
    assert errors.startswith(f"hetero-pp: {path}:{line}: {key}"), errors
    for word in words:
        assert word in errors


def test_good_input_is_good(tmp_path: Path, corpus: Path) -> None:
    assert _invoke(GOOD, tmp_path, corpus)[:2] == (0, "")


@pytest.mark.parametrize("where", ["exchange", "stage"])
def test_a_busy_port(where: str, tmp_path: Path, corpus: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        if where == "exchange":
            text, key = GOOD + f"exchange: {{listen: '{address}'}}\n", "exchange.listen"
        else:
            stages = f"stages: [{{layers: 2}}, {{layers: 2, listen: '{address}'}}]"
            text, key = GOOD.replace("stages: 4", stages), "replicas[1].stages[1].listen"
        code, errors, path = _invoke(text, tmp_path, corpus)
    assert code == 2
    assert re.fullmatch(
        rf"hetero-pp: {path}:\d+: {re.escape(key)}: found `{address}`, expected a free port .*\n", errors
    ), errors


@pytest.mark.parametrize("steps", [2, 50])
def test_gradients_averaged_after_many_steps_are_refused(steps: int, tmp_path: Path, corpus: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(GOOD.replace("CORPUS", str(corpus)))
    changes = ["--set", 'outer={"rounds": 2, "method": "adamw_ddp"}', "--set", f"inner.steps={steps}"]
    result = CliRunner().invoke(app, ["launch", str(path), "--runs", str(tmp_path / "runs"), *changes])
    assert result.exit_code == 2
    assert f"inner.steps: found {steps}, expected 1: with method adamw_ddp" in result.stderr
    assert not (tmp_path / "runs" / "good").exists()


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["launch", str(tmp_path / "no.yaml")])
    assert result.exit_code == 2
    assert result.stderr == f"hetero-pp: {tmp_path / 'no.yaml'}: cannot be read (No such file or directory)\n"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("outer.rounds", "expected KEY=VALUE"),
        ("outer.round=3", "did you mean `rounds`?"),
        ("replicas.7.name=x", "no such key"),
        ("links.home.bandwidth=fast", "`fast`"),
    ],
)
def test_a_wrong_change_on_the_command_line(change: str, words: str, tmp_path: Path, corpus: Path) -> None:
    code, errors, _ = _invoke(GOOD, tmp_path, corpus, "--set", change)
    assert code == 2
    assert len(errors.splitlines()) == 1
    assert words in errors


def test_changes_on_the_command_line_count(tmp_path: Path, corpus: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(GOOD.replace("CORPUS", str(corpus)))
    options = ["--runs", str(tmp_path / "runs"), "--set", "outer.rounds=7", "--set", "replicas.1.boundary.rank=1/4"]
    result = CliRunner().invoke(app, ["check", str(path), *options])
    assert result.exit_code == 0
    assert "7 outer rounds" in result.stdout
    assert "16 of 64" in " ".join(result.stdout.split())
