"""Bad input gives exit code 2, no traceback, and one line: file, line, key, what was found and what is expected."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from asking import ask, sets
from typer.main import get_command
from typer.testing import CliRunner

import hetero_pp
from hetero_pp.config.yaml_file import ConfigFile
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
    "wrong unit": ("100 Mbit/s", "100 Mbps/s", 6, "links.home.bandwidth", ["`100 Mbps/s`", "such as `100 Mbit/s`"]),
    "rank above d": ("1/8", "65", 15, "replicas[1].boundary.rank", ["65", "at most the model's width 64"]),
    "anchors above d": (
        "1/8",
        "1/8, anchors: {rank: 65}",
        15,
        "replicas[1].boundary.anchors.rank",
        ["65", "at most the model's width 64"],
    ),
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
    "chunk without rows": (
        "rounds: 3",
        "rounds: 3\n  compression: {tile: [0, 1]}",
        5,
        "outer.compression.tile[0]",
        ["found `0`", "at least 1"],
    ),
    "moment without a decay": (
        "outer:",
        "inner: {betas: [0.9, 1]}\nouter:",
        3,
        "inner.betas[1]",
        ["found `1`", "less than 1"],
    ),
    "unknown kind": (
        "kind: datacenter",
        "kind: dc",
        8,
        "replicas[0]",
        ["`kind: dc`", "one of `datacenter`, `participants`"],
    ),
    "missing key": (
        "  rounds: 3\n",
        "  learning_rate: 1.0\n",
        3,
        "outer.rounds",
        ["found nothing", "expected a value"],
    ),
    "uneven batch": ("micro_batches: 2", "micro_batches: 3", 13, "replicas[1].micro_batches", ["3", "divisor of"]),
    "too small a corpus": ("sequence_length: 16", "sequence_length: 9999", 2, "data.corpus", ["tokens", "at least"]),
    "unreadable tokenizer": (
        "corpus: CORPUS",
        "tokenizer: no.json, corpus: CORPUS",
        2,
        "data.tokenizer",
        ["no.json", "expected"],
    ),
    "not YAML": ("outer:", "outer: [", 5, "", ["not YAML"]),
    "key twice": ("name: t", "name: t\nname: u", 2, "", ["found the key `name` twice"]),
}


def _invoke(text: str, tmp_path: Path, corpus: Path, *arguments: str) -> tuple[int, str, Path]:
    path = tmp_path / "run.yaml"
    path.write_text(text.replace("CORPUS", str(corpus)))
    code, _, errors = ask("check", path, "--runs", tmp_path / "runs", *arguments)
    return code, errors, path


EXCHANGE = {
    "grace upside down": ("grace: {least: 2 min, most: 1 min}", "exchange.grace.least", ["2:00", "1:00", "grace.most"]),
    "lease upside down": ("lease: {least: 10 min}", "exchange.lease.least", ["10:00", "5:00", "`exchange.lease.most`"]),
    "hang upside down": ("hang: {most: 1 min}", "exchange.hang.least", ["5:00", "1:00", "`exchange.hang.most`"]),
    "grace above the limit": ("limit: 5 min", "exchange.grace.most", ["10:00", "5:00", "`exchange.limit`"]),
    "magnitudes upside down": ("magnitudes: {leave_out: 2}", "exchange.magnitudes.scale", ["5", "2", "leave_out`"]),
}


@pytest.mark.parametrize("case", EXCHANGE)
def test_bounds_that_contradict_each_other_are_named(case: str, tmp_path: Path, corpus: Path) -> None:
    setting, key, words = EXCHANGE[case]
    code, errors, path = _invoke(f"{GOOD}exchange:\n  {setting}\n", tmp_path, corpus)
    line = len(GOOD.splitlines()) + (1 if "above" in case else 2)  # of the nearest existing key
    assert (code, len(errors.splitlines())) == (2, 1), errors
    assert errors.startswith(f"hetero-pp: {path}:{line}: {key}"), errors
    for word in words:
        assert word in errors


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


def test_gradients_averaged_after_many_steps_are_refused(tmp_path: Path, corpus: Path) -> None:
    code, errors, _ = _invoke(
        GOOD, tmp_path, corpus, *sets('outer={"rounds": 2, "method": "adamw_ddp"}', "inner.steps=2")
    )
    assert (code, "--set inner.steps=2: found 2, expected 1: with method adamw_ddp" in errors) == (2, True), errors


LENGTHS = {
    "both": ("{steps: 5, seconds: 5 min}", "inner.seconds: found 300 s and 5 `steps`, expected one of them"),
    "neither": ("{steps: null}", "inner.steps: found nothing, expected `steps` or `seconds`"),
    "no time": ("{seconds: 0}", "inner.seconds: found `0`, expected more than 0"),
    "no unit that is known": ("{seconds: 5 weeks}", "inner.seconds: found `5 weeks` with the unknown unit `weeks`"),
    "not a number": ("{seconds: true}", "inner.seconds: found `true`, expected a number and a unit such as `5 min`"),
    "warm-up in steps": (
        "{seconds: 9, warmup_steps: 3}",
        "inner.warmup_steps: found 3, expected `warmup_rounds` with `seconds`",
    ),
    "warm-up in rounds": ("{warmup_rounds: 2}", "inner.warmup_rounds: found 2, expected `warmup_steps` with `steps`"),
    "no warm-up": ("{warmup_steps: null}", "inner.warmup_steps: found nothing, expected a number with `steps`"),
}


@pytest.mark.parametrize("case", LENGTHS)
def test_a_round_has_one_length(case: str, tmp_path: Path, corpus: Path) -> None:
    inner, message = LENGTHS[case]
    code, errors, path = _invoke(GOOD.replace("outer:", f"inner: {inner}\nouter:"), tmp_path, corpus)
    assert (code, len(errors.splitlines())) == (2, 1)
    assert errors.startswith(f"hetero-pp: {path}:3: {message}"), errors


def test_a_round_may_be_time_instead_of_steps(tmp_path: Path, corpus: Path) -> None:
    for seconds in ("300", "5 min", "300 s"):
        yaml = GOOD.replace("outer:", f"inner: {{seconds: {seconds}}}\nouter:")
        assert _invoke(yaml, tmp_path, corpus)[:2] == (0, "")
        found = ConfigFile(tmp_path / "run.yaml").config.inner
        assert (found.steps, found.seconds, found.warmup_steps, found.warmup_rounds) == (None, 300.0, None, 1.0)
    yaml = GOOD.replace("outer:", "inner: {steps: 5}\nouter:")
    assert _invoke(yaml, tmp_path, corpus, *sets("inner.seconds=1 min"))[0] == 2
    assert _invoke(yaml, tmp_path, corpus, *sets("inner.seconds=1 min", "inner.steps=null"))[:2] == (0, "")


def test_what_a_round_of_time_cannot_be(tmp_path: Path, corpus: Path) -> None:
    yaml = GOOD.replace("outer:", "inner: {seconds: 9}\nouter:")
    for change, message in (
        ("outer.method=adamw_ddp", "inner.seconds: found as many inner steps as fit into 9 s, expected 1"),
        ("data.repeat=false", "data.repeat=false: found false, expected true with `inner.seconds`"),
    ):
        code, errors, _ = _invoke(yaml, tmp_path, corpus, "--set", change)
        assert (code, len(errors.splitlines()), message in errors) == (2, 1, True), errors


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["launch", str(tmp_path / "no.yaml")])
    assert result.exit_code == 2
    assert result.stderr == f"hetero-pp: {tmp_path / 'no.yaml'}: cannot be read (No such file or directory)\n"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("outer.rounds", "expected KEY=VALUE"),
        ("outer.missed=0.3", "only `hetero-pp reproduce` reads, expected it in the cell `research.missed` of"),
        ("data.clusters=2", "only `hetero-pp reproduce` reads, expected it in the cell `research.clusters` of"),
        ("replicas.1.boundary.ablations={modified_adamw: true}", "expected it in `ablations` of a table's row"),
        ("research={missed: 0.3}", "expected it in cells such as `research.missed` of a table's row (docs/"),
    ],
)
def test_a_wrong_change_on_the_command_line(change: str, words: str, tmp_path: Path, corpus: Path) -> None:
    code, errors, _ = _invoke(GOOD, tmp_path, corpus, "--set", change)
    assert code == 2
    assert len(errors.splitlines()) == 1
    assert words in errors


def _options() -> Iterator[tuple[str, str, str, list[str]]]:
    """Yield each option of each command that takes a path or a format, and what it takes."""
    program: Any = get_command(app)
    commands: dict[tuple[str, ...], Any] = {
        (name,): command for name, command in program.commands.items() if name not in ("log", "audit")
    }
    for group in ("log", "audit"):
        commands |= {(group, name): command for name, command in program.commands[group].commands.items()}
    for name, command in commands.items():
        hints = get_type_hints(inspect.unwrap(command.callback))
        needed = ["quickstart" for one in command.params if one.param_type_name == "argument" and one.required]
        for option in command.params:
            text, flag = getattr(option, "help", "") or "", max(option.opts, key=len)
            if option.param_type_name == "option" and hints[option.name] in (Path, Path | None):
                writes = re.match("Write|Draw|With --list: write|Keep", text)
                yield " ".join(name), flag, ("folder" if "folder" in text else "file") if writes else "read", needed
            elif name != ("reproduce",) and flag in ("--board", "--log-format", "--metrics", "--device", "--sweep"):
                yield " ".join(name), flag, "format", needed


@pytest.mark.parametrize(("command", "option", "kind", "arguments"), list(_options()))
def test_a_path_or_a_format_that_cannot_be_is_one_line(
    command: str, option: str, kind: str, arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every option of every command, before any work is done: never a traceback, and the exit code is 2."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    wrong = {"file": ["folder", "file/x.json"], "folder": ["file/x", "file"], "read": ["none", "folder/none/x"]}
    values = [*wrong.get(kind, ["x.foo"]), *(["x.foo"] if option == "--chart" else [])]
    more = ["--only", "dc"] if option == "--token-file" and command == "launch" else []
    more += ["--exchange", "127.0.0.1:1"] if option == "--token-file" and command != "serve" else []
    more += ["--list"] if command == "reproduce" and option == "--json" else []
    for value in values:
        result = CliRunner().invoke(app, [*command.split(), *arguments, option, value, *more])
        assert (result.exit_code, type(result.exception)) == (2, SystemExit), (value, result.output, result.exception)
        assert len(result.stderr.strip().splitlines()) <= 6 and "Traceback" not in result.output


def test_numbers_are_no_truth_values_and_stages_are_split_evenly(tmp_path: Path, corpus: Path) -> None:
    """`true` is 1 to Python. Stages that name their hardware need no layers."""
    numbers = ("outer.rounds", "replicas.0.batch_size", "inner.learning_rate", "outer.overlap", "exchange.quorum")
    for key in (*numbers, "links.home.latency", "replicas.1.boundary.rank"):
        code, error, _ = _invoke(GOOD, tmp_path, corpus, "--set", f"{key}=true")
        assert code == 2 and re.search(f"--set {key}=true: .*found `true`, expected", error), error
    code, error, _ = _invoke(GOOD, tmp_path, corpus, "--set", "inner.betas=[true, 0.9]")
    assert code == 2 and "inner.betas[0]: found `true`, expected a number" in error
    path = tmp_path / "even.yaml"
    path.write_text(GOOD.replace("CORPUS", str(corpus)))
    stages = "[{hardware: rtx-3090}, {hardware: rtx-4090}]"
    [group] = [one for one in ConfigFile(path, [f"replicas.1.stages={stages}"]).config.replicas if one.name == "home"]
    assert [len(own) for own in group.layer_ranges(5)] == [3, 2]  # type: ignore[union-attr]
    code, error, _ = _invoke(GOOD, tmp_path, corpus, "--set", "replicas.1.stages=[{layers: 1}, {hardware: h100}]")
    assert code == 2 and "layers: found nothing, expected a number: other stages of this group have one" in error


def test_the_version_is_printed_and_run_is_listed() -> None:
    assert CliRunner().invoke(app, ["--version"]).stdout == f"hetero-pp {hetero_pp.__version__}\n"
    assert "Run" in dir(hetero_pp)
