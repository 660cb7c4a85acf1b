"""`hetero-pp init`: YAMLs for mixes of machines pass `check`, one is trained, and wrong answers are one line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from hetero_pp.config.run_config import RunConfig
from hetero_pp.config.spec import RunSpec
from hetero_pp.config.yaml_file import ConfigFile
from hetero_pp.model.transformer import ModelSettings, Transformer
from hetero_pp.program import init as first_yaml
from hetero_pp.program.cli import app
from hetero_pp.program.init import model_of, parameters_of
from hetero_pp.simulator.memory import OF_THE_ROUND, disk_use
from hetero_pp.simulator.prediction import predict


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each test run in an empty folder with a text."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").symlink_to(corpus)


def init(*given: str, typed: str | None = None) -> Result:
    return CliRunner().invoke(app, ["init", *given], input=typed)


def of_text(*given: str) -> RunConfig:
    """Write first.yaml for the text of the test; return its configuration."""
    done = init("--text", "text", *given)
    assert done.exit_code == 0, done.output
    return ConfigFile(Path("first.yaml")).config


@pytest.mark.parametrize(
    ("machines", "replicas"),
    [
        ("here", ["dc"]),
        ("1", ["home"]),
        ("2", ["home"]),
        ("4 + datacenter", ["dc", "home"]),
        ("8 homes+datacenter", ["dc", "home-1", "home-2"]),
        ("5", ["home"]),
    ],
)
def test_check_passes_for_each_mix_of_machines(machines: str, replicas: list[str]) -> None:
    model = "1M" if machines == "5" else "micro"  # a preset has too few layers for five stages
    config = of_text("--machines", machines, "--line", "10/50", "--model", model)
    assert [replica.name for replica in config.replicas] == replicas
    assert (config.exchange.listen, set(config.lines)) == (
        "127.0.0.1:0",
        {"home"} if "home" in str(replicas) else set(),
    )
    done = CliRunner().invoke(app, ["check", "first.yaml"])
    assert done.exit_code == 0, done.stderr
    for line in Path("first.yaml").read_text().splitlines():
        assert len(line) <= 120
        assert line.startswith("#") or not re.search(r"\S#|# *$", line), line


def test_a_first_yaml_trains_and_its_disk_is_predicted() -> None:
    config = of_text("--machines", "2+datacenter", "--line", "1000/1000", "--time", "400 tokens")
    done = CliRunner().invoke(app, ["launch", "first.yaml", "--in-process", "--set", "inner.steps=1"])
    assert done.exit_code == 0, done.output
    spec = RunSpec(config, 256)
    found = {
        name: [path.stat() for path in Path("runs/first", name).rglob("*") if path.is_file()]
        for name in ("state", "log")
    }
    written = {name: sum(one.st_size for one in files) for name, files in found.items()}
    everything = ["exchange", *spec.members]
    use = {purpose: one for purpose, one in disk_use(spec, everything).items() if purpose != OF_THE_ROUND}
    predicted = {purpose: one.n_bytes for purpose, one in use.items()}
    files = {purpose: one.files for purpose, one in use.items()}
    in_log = ("run checkpoints", "contributions", "records")
    assert sum(predicted[one] for one in in_log) == pytest.approx(written["log"], rel=0.15)
    assert predicted["saved states"] / 2 == pytest.approx(written["state"], rel=0.15)  # one of two was written
    assert sum(files[one] for one in in_log) + len(spec.members) == len(found["log"])
    assert files["saved states"] == len(found["state"])
    kept = [path.stat() for path in Path("runs/first").rglob("*") if path.is_file()]
    assert sum(files.values()) == pytest.approx(len(kept), rel=0.1)
    told = " ".join(CliRunner().invoke(app, ["check", "first.yaml", "--set", "inner.steps=1"]).output.split())
    assert f"Disk: the run leaves about {sum(files.values()):,} files and " in told
    taken = sum(512 * one.st_blocks for one in found["log"])
    assert sum(use[one].space for one in in_log) == pytest.approx(taken, rel=0.15)


def test_the_planner_chooses_a_boundary_where_it_reaches_the_target() -> None:
    fast = of_text("--machines", "4", "--line", "1000/1000", "--model", "60M")
    assert "# This is chosen by the planner: 9" in Path("first.yaml").read_text()
    assert fast.replicas[0].boundary.rank == "full"  # type: ignore[union-attr]
    slow = of_text("--machines", "4", "--line", "10/10", "--force")
    assert "# This is a default: the planner reaches" in Path("first.yaml").read_text()
    assert (slow.replicas[0].boundary.rank, slow.replicas[0].boundary.bits) == (0.5, 4)  # type: ignore[union-attr]


def test_the_length_of_the_run_is_as_asked() -> None:
    config = of_text("--time", "30 min")
    seconds = config.rounds * predict(RunSpec(config, 256)).round_seconds
    assert seconds == pytest.approx(1800, rel=0.02)
    short = of_text("--time", "6 s", "--force")
    assert short.rounds >= 8
    assert (short.inner.steps or 0) < 50
    tokens = of_text("--time", "2M tokens", "--force")
    assert tokens.rounds * (tokens.inner.steps or 0) * 8 * 128 == pytest.approx(2e6, rel=0.03)


@pytest.mark.parametrize("size", [3e5, 5e6, 1.78e8, 7e9])
def test_models_of_a_number_of_parameters(size: float) -> None:
    shape = ModelSettings.model_validate(model_of(size, 256, layers=3)).resolve(256)
    assert parameters_of(shape) == pytest.approx(size, rel=0.25)
    with torch.device("meta"):
        assert sum(one.numel() for one in Transformer(shape).parameters()) == parameters_of(shape)


def test_what_is_printed_can_be_typed() -> None:
    # What is printed next can be typed.
    done = init("--text", "text", "--machines", "4+datacenter", "--name", "mine")
    assert "next: hetero-pp launch mine.yaml" in done.stdout
    [serve] = re.findall(r"hetero-pp serve mine.yaml --set (\S+) --set (\S+)", done.stdout)
    config = ConfigFile(Path("mine.yaml"), serve).config
    assert config.exchange.listen == "0.0.0.0:47600"
    assert RunSpec(config, 256).lines == {}  # real lines are not slowed down
    assert "hetero-pp invite mine --slot dc" in done.stdout

    # Without a terminal defaults are used and told.
    done = init("other.yaml", "--text", "text", "--time", "5 s")
    assert [line for line in done.stdout.splitlines() if "not given" in line] == [
        "--machines: not given, so it is `here`",
        "--model: not given, so it is `micro`",
    ]
    assert ConfigFile(Path("other.yaml")).config.name == "other"


def test_on_a_terminal_it_asks_until_the_answer_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_yaml, "is_interactive", lambda _: True)
    done = init("--time", "5 s", typed="many\n2\n20/100\ntext\n\nmine\n")
    assert done.exit_code == 0, done.output
    assert "found `many`, expected `here`, a number of homes" in done.stdout
    config = ConfigFile(Path("mine.yaml")).config
    assert (config.data.corpus, config.replicas[0].name, config.model.preset) == ("text", "home", "micro")
    ended = init(typed="")
    assert (ended.exit_code, "--machines: found the end of the input" in ended.stderr) == (2, True)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("--machines", "0"), "--machines: found `0`, expected `here`, a number of homes"),
        (("--machines", "2", "--line", "fast"), "--line: found `fast`, expected Mbit/s up and down"),
        (("--text", "nowhere"), "--text: found `nowhere`, expected a file or folder that exists"),
        (("--model", "huge"), "--model: found `huge`, expected micro, 178m"),
        (("--model", "0"), "--model: found `0`, expected micro, 178m"),
        (("--time", "soon"), "--time: found `soon`, expected a time or a number of tokens"),
        (("--time", "9" * 400 + " tokens"), "--time: found `999"),
        (("--machines", "2", "--line", "9" * 400 + "/1"), "--line: found `999"),
        (("--time", "0 s"), "--time: found `0 s`, expected a time or a number of tokens"),
        (("--name", "a b"), "--name: found `a b`, expected letters"),
        (("--hardware", "abacus"), "--hardware: found `abacus`, expected one of h200"),
        (("text/",), "text: found a file of this name, expected none; --force replaces it"),
    ],
)
def test_a_wrong_answer_is_one_line(given: tuple[str, ...], said: str) -> None:
    done = init(*given)
    assert (done.exit_code, done.stderr.count("\n")) == (2, 1)
    assert said in done.stderr
    assert not Path("first.yaml").exists()
