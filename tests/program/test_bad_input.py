"""Bad input gives exit code 2, no traceback, and one line: file, line, key, what was found and what is expected."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from asking import ask, sets
from rewritten import agree
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
    "unknown key": ("latency", "latenzy"),
    "wrong unit": ("100 Mbit/s", "100 Mbps/s"),
    "rank above d": ("1/8", "65"),
    "anchors above d": ("1/8", "1/8, anchors: {rank: 65}"),
    "too many stages": ("stages: 4", "stages: 5"),
    "wrong split": ("stages: 4", "stages: [{layers: 2}, {layers: 1}]"),
    "same name": ("name: home", "name: dc"),
    "unknown link": ("link: home", "link: hom"),
    "chunk without rows": ("rounds: 3", "rounds: 3\n  compression: {tile: [0, 1]}"),
    "moment without a decay": ("outer:", "inner: {betas: [0.9, 1]}\nouter:"),
    "presumes more than it sent": ("rounds: 3", "rounds: 3\n  presumed: 2"),
    "unknown kind": ("kind: datacenter", "kind: dc"),
    "missing key": ("  rounds: 3\n", "  learning_rate: 1.0\n"),
    "uneven batch": ("micro_batches: 2", "micro_batches: 3"),
    "too small a corpus": ("sequence_length: 16", "sequence_length: 9999"),
    "unreadable tokenizer": ("corpus: CORPUS", "tokenizer: /no.json, corpus: CORPUS"),
    "not YAML": ("outer:", "outer: ["),
    "key twice": ("name: t", "name: t\nname: u"),
}
"""Case -> a text of the YAML, and the wrong one that replaces it."""
EXCHANGE = (
    "grace: {least: 2 min, most: 1 min}",
    "lease: {least: 10 min}",
    "hang: {most: 1 min}",
    "limit: 5 min",
    "magnitudes: {leave_out: 2}",
)
"""Bounds that contradict each other. A line names the nearest key that there is."""
INNER = (
    "{steps: 5, seconds: 5 min}",
    "{steps: null}",
    "{seconds: 0}",
    "{seconds: 5 weeks}",
    "{seconds: true}",
    "{seconds: 9, warmup_steps: 3}",
    "{warmup_rounds: 2}",
    "{warmup_steps: null}",
)
SETS = (
    ("outer.rounds",),
    ("outer.missed=0.3",),
    ("data.clusters=2",),
    ("replicas.1.boundary.ablations={modified_adamw: true}",),
    ("research={missed: 0.3}",),
    ('outer={"rounds": 2, "method": "adamw_ddp"}', "inner.steps=2"),
    ("inner={seconds: 9}", "outer.method=adamw_ddp"),
    ("inner={seconds: 9}", "data.repeat=false"),
    *((f"{key}=true",) for key in ("outer.rounds", "replicas.0.batch_size", "inner.learning_rate", "outer.overlap")),
    *((f"{key}=true",) for key in ("exchange.quorum", "links.home.latency", "replicas.1.boundary.rank")),
    ("inner.betas=[true, 0.9]",),
    ("replicas.1.stages=[{layers: 1}, {hardware: h100}]",),
)
"""Options `--set`. To Python, `true` is 1."""
ERRORS = Path(__file__).with_name("bad_input.json")


def _invoke(text: str, tmp_path: Path, corpus: Path, *arguments: str) -> tuple[int, str, Path]:
    path = tmp_path / "run.yaml"
    path.write_text(text.replace("CORPUS", str(corpus)))
    code, _, errors = ask("check", path, "--runs", tmp_path / "runs", *arguments)
    return code, errors, path


def test_bad_input_is_named_in_one_line(tmp_path: Path, corpus: Path) -> None:
    yamls = {name: GOOD.replace(old, new, 1) for name, (old, new) in CASES.items()}
    yamls |= {f"exchange: {setting}": f"{GOOD}exchange:\n  {setting}\n" for setting in EXCHANGE}
    yamls |= {f"inner: {inner}": GOOD.replace("outer:", f"inner: {inner}\nouter:") for inner in INNER}
    given: list[tuple[str, str, tuple[str, ...]]] = [(name, yaml, ()) for name, yaml in yamls.items()]
    found = {}
    for name, yaml, changes in [*given, *((" ".join(changes), GOOD, changes) for changes in SETS)]:
        assert changes or yaml != GOOD
        code, errors, path = _invoke(yaml, tmp_path, corpus, *sets(*changes))
        assert (code, len(errors.splitlines())) == (2, 1), (name, errors)
        found[name] = errors.strip().replace(str(path), "FILE").replace(str(corpus), "CORPUS")
    agree(ERRORS, found)


def test_a_round_may_be_time_instead_of_steps(tmp_path: Path, corpus: Path) -> None:
    for seconds in ("300", "5 min", "300 s"):
        yaml = GOOD.replace("outer:", f"inner: {{seconds: {seconds}}}\nouter:")
        assert _invoke(yaml, tmp_path, corpus)[:2] == (0, "")
        found = ConfigFile(tmp_path / "run.yaml").config.inner
        assert (found.steps, found.seconds, found.warmup_steps, found.warmup_rounds) == (None, 300.0, None, 1.0)
    yaml = GOOD.replace("outer:", "inner: {steps: 5}\nouter:")
    assert _invoke(yaml, tmp_path, corpus, *sets("inner.seconds=1 min"))[0] == 2
    assert _invoke(yaml, tmp_path, corpus, *sets("inner.seconds=1 min", "inner.steps=null"))[:2] == (0, "")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["launch", str(tmp_path / "no.yaml")])
    assert result.exit_code == 2
    assert result.stderr == f"hetero-pp: {tmp_path / 'no.yaml'}: cannot be read (No such file or directory)\n"


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


def test_stages_that_name_their_hardware_need_no_layers(tmp_path: Path, corpus: Path) -> None:
    path = tmp_path / "even.yaml"
    path.write_text(GOOD.replace("CORPUS", str(corpus)))
    stages = "[{hardware: rtx-3090}, {hardware: rtx-4090}]"
    [group] = [one for one in ConfigFile(path, [f"replicas.1.stages={stages}"]).config.replicas if one.name == "home"]
    assert [len(own) for own in group.layer_ranges(5)] == [3, 2]  # type: ignore[union-attr]


def test_the_version_is_printed_and_run_is_listed() -> None:
    assert CliRunner().invoke(app, ["--version"]).stdout == f"hetero-pp {hetero_pp.__version__}\n"
    assert "Run" in dir(hetero_pp)
