"""Examples in the documents work: commands run, links and paths exist, and YAML is valid.

A command that is added to a page has to be quick. Otherwise it is listed here with the test that runs it, or with the
reason why none does.
"""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from catalogs import SHIPPED
from ruamel.yaml import YAML
from typer.main import get_command
from typer.testing import CliRunner

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from fault_injection.file import read_faults

from hetero_pp.config.run_config import RunConfig
from hetero_pp.config.spec import RunSpec
from hetero_pp.config.yaml_file import ConfigFile
from hetero_pp.program.cli import app
from hetero_pp.research.experiments.definition import Experiment, Scale
from hetero_pp.research.experiments.rows import Setting

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES = [path for path in PAGES if path.name not in ("results.md", "results_tables.md")]  # generated

ELSEWHERE_TOO = {
    "hetero-pp simulate configs/quickstart.yaml",
    "hetero-pp simulate configs/quickstart.yaml --view",
    "hetero-pp simulate configs/paper/sparseloco_figure2.yaml",
    "hetero-pp simulate configs/paper/het_pp_97_percent.yaml",
    "hetero-pp simulate configs/simulate/ten_thousand.yaml",
    "hetero-pp simulate configs/quickstart.yaml --calibration calibration.yaml",
    "hetero-pp plan configs/plan/unequal.yaml --target-utilization 0.97 --write plan.yaml",
    "hetero-pp plan friends.yaml --measured runs/friends-rehearsal/rehearsal.json",
    "hetero-pp simulate plan.yaml",
    "hetero-pp check hpp1.CMfx43ja...",
    "hetero-pp reproduce --list",
    "hetero-pp reproduce het-pp/table1 --dry-run",
    "hetero-pp launch quickstart",
    "hetero-pp launch configs/quickstart.yaml --view",
    "hetero-pp launch configs/quickstart.yaml --resume",
    "hetero-pp launch configs/quickstart.yaml --resume --set outer.rounds=32 --set inner.learning_rate=5e-3",
    "hetero-pp launch configs/mixed_engines.yaml",
    "hetero-pp launch mixed.yaml --from mixed-hf",
    "hetero-pp launch CONFIG --from quickstart-hf",
}
"""Commands that take seconds or start runs, which are not run here, because other tests do so with other settings."""

SCHEDULER = "needs Slurm or Kubernetes: tests/program/test_torchx.py looks at the jobs"
HOURS = "takes a GPU and days: tests/experiments/test_tables.py has a tiny table"
ELSEWHERE = "is another program's"
TESTS = "runs tests"
DOWNLOADS = "downloads another torch: tests/documents/test_setup.py looks at what make would do"
NOT_RUN = {
    "make demo": "is a launch that is shown: test_make_demo_is_a_launch_that_is_shown",
    "make demo TORCH_ARGS=--index-url=https://download.pytorch.org/whl/cpu": DOWNLOADS,
    "git clone ADDRESS hetero-pp && cd hetero-pp && python3 -m venv .venv": DOWNLOADS,
    ".venv/bin/pip install torch --index-url=https://download.pytorch.org/whl/cpu": DOWNLOADS,
    ".venv/bin/pip install --editable .": DOWNLOADS,
    "torchx run -s slurm -cfg partition=gpu hetero_pp/program/launch/torchx_components.py:part "
    "--config three-hosts.yaml --only dc --exchange dc.example:47600 --gpus 8": SCHEDULER,
    "hetero-pp reproduce het-pp/table2 --scale paper "
    "--corpus hf:mlfoundations/dclm-baseline-1.0 --tokenizer /data/llama-2": HOURS,
    "pip install dist/hetero_pp-0.1.0-py3-none-any.whl": DOWNLOADS,
    "hetero-pp --install-completion": "changes files of the shell: tests/program/test_completion.py",
    "podman build -t hetero-pp --build-arg TORCH_ARGS=--index-url=https://download.pytorch.org/whl/cpu .": DOWNLOADS,
    "pip install lm-eval[hf]": ELSEWHERE,
    "lm_eval run --model hf --model_args pretrained=quickstart-hf,dtype=float32 --tasks arc_easy,hellaswag,piqa "
    "--device cuda:0 --batch_size 16 --output_path results": ELSEWHERE,
    ".venv/bin/python -m pytest tests/method tests/stages": TESTS,
    ".venv/bin/python -m pytest tests/documents": TESTS,
    "make quick": TESTS,
    "make page-test": TESTS,
    "make benchmarks-smoke": TESTS,
}
"""Reason why no test runs a command as it is shown."""

QUICK = {"init", "check", "simulate", "plan"}
WRITES = {"--write", "--json", "--chart", "--timeline"}
SHORT = (
    *("outer.rounds=1", "inner.steps=1", "data.sequence_length=16", "data.validation_sequences=2"),
    *("data.validation_share=1/10", "data.tokenizer=bytes"),
)


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: Path
    line: int
    language: str
    text: str


def _blocks(page: Path) -> Iterator[Block]:
    text = page.read_text()
    for match in re.finditer(r"^( *)```(\w*)\n(.*?)^\1```$", text, re.MULTILINE | re.DOTALL):
        yield Block(page, text.count("\n", 0, match.start()) + 1, match[2], match[3])


def _prose(page: Path) -> str:
    """Return a page without its fenced blocks."""
    return re.sub(r"^( *)```.*?^\1```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def _codes(page: Path) -> list[str]:
    """Return the texts in backticks, including texts that span lines."""
    paragraphs = (" ".join(paragraph.split()) for paragraph in re.split(r"\n\s*\n", _prose(page)))
    return [code for paragraph in paragraphs for code in re.findall(r"`([^`]+)`", paragraph)]


def _name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def _commands(page: Path) -> Iterator[str]:
    """Yield the commands of a page, without comments and with continued lines joined."""
    for block in _blocks(page):
        if block.language == "bash":
            for line in block.text.replace("\\\n", " ").splitlines():
                if words := shlex.split(line, comments=True):
                    yield " ".join(words)


def _is_quick(command: str) -> bool:
    """Return whether a command takes at most seconds and is run here as it is."""
    words = command.split()
    if words[0] != "hetero-pp" or command in ELSEWHERE_TOO:
        return False
    if words[1] == "reproduce":
        return "--list" in words or "--dry-run" in words
    return words[1] in QUICK or "--print-commands" in words


def _is_launch(command: str) -> bool:
    """Return whether a command trains on one machine. It is run here for one step."""
    return command.startswith("hetero-pp launch") and not (_is_quick(command) or command in {*ELSEWHERE_TOO, *NOT_RUN})


COMMANDS = [(page, command) for page in PAGES for command in _commands(page)]
YAMLS = [block for page in PAGES for block in _blocks(page) if block.language == "yaml"]


def _saved(page: Path) -> dict[str, str]:
    """Return the named YAMLs of a page by the paths of their first line, where a reader saves them."""
    found = [(YAML(typ="safe").load(block.text), block.text) for block in YAMLS if block.page == page]
    return {_path(content, text): text for content, text in found if "name" in content}


def _path(content: dict[str, Any], text: str) -> str:
    said = re.match(r"# (\S+\.yaml)\n", text)
    folder = "configs/experiments/" if "baseline" in content else ""
    return said[1] if said else f"{folder}{content['name']}.yaml"


@pytest.fixture
def folder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of a reader of a page: the repository's files, and the page's YAMLs under their names."""
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    (tmp_path / "benchmarks").symlink_to(ROOT / "benchmarks")
    for name, text in _saved(request.getfixturevalue("page")).items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _run(command: str, *more: str) -> str:
    result = CliRunner().invoke(app, [*command.split()[1:], *more])
    assert result.exit_code == 0, f"{command}\n{result.output}\n{result.exception}"
    return result.output


# ---- commands ----


def _is_tested(command: str, tests: Sequence[str]) -> bool:
    """Return whether a test names the subcommand or the configuration, and all options of a command."""
    program, first, *others = command.split()
    names = [
        f'"{first}"',
        f"{first}(",
        f'"{Path(first).stem}"',
        *(Path(one).name for one in others if "configs/" in one),
    ]
    options = {f'"{option}"' for option in re.findall(r"--[\w-]+", command)}
    if program == "make":
        return bool(re.search(rf"\bmake\b.*\b{first}\b", (ROOT / ".ci" / "run").read_text()))
    return any(any(name in text for name in names) and all(one in text for one in options) for text in tests)


def test_every_command_is_run_somewhere_or_it_is_said_why_not() -> None:
    tests = [path.read_text() for path in (ROOT / "tests").rglob("test_*.py") if path != Path(__file__)]
    shown = {command for _, command in COMMANDS}
    forgotten = [
        one for one in shown - NOT_RUN.keys() if not (_is_quick(one) or _is_launch(one) or _is_tested(one, tests))
    ]
    assert not forgotten
    assert len(COMMANDS) > 40
    assert not {*ELSEWHERE_TOO, *NOT_RUN} - shown, "no page shows these"


@pytest.mark.parametrize("page", PAGES, ids=_name)
@pytest.mark.usefixtures("estimated_once")
def test_quick_commands_do_what_is_said(page: Path, folder: Path) -> None:
    """Commands run in the order of the page."""
    for command in filter(_is_quick, _commands(page)):
        assert _run(command)
        words = command.split()
        for option, value in pairwise(words):
            assert option not in WRITES or (folder / value).stat().st_size > 0, command


LAUNCHED = {command.removesuffix(" --in-process"): page for page, command in COMMANDS if _is_launch(command)}
"""Launches without the option that makes no difference here, and the last page that shows each."""


@pytest.mark.parametrize(("command", "page"), LAUNCHED.items(), ids=list(LAUNCHED))
def test_launches_train(command: str, page: Path, folder: Path, corpus: Path) -> None:
    """Each trains one step in one process. tests/equivalence launches over gRPC."""
    sets = [part for setting in (*SHORT, f"data.corpus={corpus}") for part in ("--set", setting)]
    assert "All replicas hold the same weights" in _run(command, "--in-process", *sets)


def test_make_demo_is_a_launch_that_is_shown() -> None:
    recipe = re.search(r"^demo:.*\n\t\$\(BIN\)/(.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert recipe is not None
    assert recipe[1] in {command for _, command in COMMANDS if _is_launch(command)}


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_targets_of_make_are_there(page: Path) -> None:
    shown = [command for command in _commands(page) if command.startswith("make ")]
    shown += [code for code in _codes(page) if code.startswith("make ")]
    targets = {word for command in shown for word in command.split()[1:] if "=" not in word}
    assert targets <= set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_options_of_the_program_are_known(page: Path) -> None:
    """This covers fenced commands and the text."""
    program: Any = get_command(app)
    for command in [*_commands(page), *_codes(page)]:
        if found := re.match(r"(?:hetero-pp|.* -m hetero_pp)(?: (\w+))?(?= |$)(.*)", command):
            chosen = program.commands[found[1]] if found[1] else program
            parts = [] if chosen is program else getattr(chosen, "commands", {}).values()
            parameters = [one for each in (chosen, *parts) for one in each.params]
            known = {option for one in parameters for option in (*one.opts, *one.secondary_opts)}
            assert set(re.findall(r"(?<!\S)--[\w-]+", found[2])) <= {"--help", *known}, command


# ---- YAML ----


def _is_whole(content: dict[str, Any]) -> bool:
    return {"name", "outer"} <= set(content) and bool({"replicas", "plan"} & set(content))


@pytest.mark.parametrize("block", YAMLS, ids=lambda block: f"{_name(block.page)}:{block.line}")
def test_every_yaml_is_valid(block: Block, tmp_path: Path) -> None:
    """It is a whole configuration, a table with its rows at a scale, or a part of a configuration."""
    content = YAML(typ="safe").load(block.text)
    path = tmp_path / "shown.yaml"
    path.write_text(block.text)
    if "baseline" in content:
        experiment = Experiment.model_validate(content)
        setting = Setting(SHIPPED.scale("micro"), experiment)
        assert all(setting.config(row) for row in experiment.rows)
    elif "base" in content:
        assert Scale.model_validate(content)
    elif "faults" in content:
        assert read_faults(path, RunSpec(ConfigFile(ROOT / "configs" / "quickstart.yaml").config, 256)).faults
    elif _is_whole(content):
        assert ConfigFile(path).config.name == content["name"]
    else:
        links = {"home": {}, "dsl": {}, "fibre": {}, "cable": {}, "tunnel": {}} | content.pop("links", {})
        lines = {"dsl": {}, "fibre": {}} | content.pop("lines", {})
        base = {"name": "shown", "outer": {"rounds": 1}, "replicas": [{"name": "dc", "kind": "datacenter"}]}
        RunConfig.model_validate(base | {"links": links, "lines": lines} | content).check()


def test_there_is_yaml_of_every_kind() -> None:
    contents = [YAML(typ="safe").load(block.text) for block in YAMLS]
    wholes = [content["name"] for content in contents if _is_whole(content)]
    assert {"mixed", "costs", "hosts", "three-hosts"} <= set(wholes)
    assert any("baseline" in content for content in contents)


# ---- links and paths ----


def _anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub names them."""
    headings = re.findall(r"^#+ (.*)$", _prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_relative_links_lead_somewhere(page: Path) -> None:
    prose = _prose(page)
    links = re.findall(r"\]\(([^)\s]+)\)", prose) + re.findall(r'(?:src|href)="([^"]+)"', prose)
    for link in links:
        if not re.match(r"\w+:", link):
            path, _, anchor = link.partition("#")
            target = (page.parent / path) if path else page
            assert target.is_file(), link
            assert not anchor or anchor in _anchors(target), link


FOLDERS = ("hetero_pp", "stages", "replica_groups", "configs", "docs", "benchmarks", "tests", ".ci")


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_paths_of_the_repository_are_there(page: Path) -> None:
    """This covers files and folders in the text. `<name>` and `*` stand for anything."""
    files = [path.relative_to(ROOT).as_posix() for folder in FOLDERS for path in (ROOT / folder).rglob("*")]
    words, saved = {word for code in _codes(page) for word in code.split()}, _saved(page)
    for word in sorted(words):
        path = word.partition("::")[0].rstrip(",:;")
        if not re.fullmatch(r"[\w.*<>-]+(/[\w.*<>-]+)*/?", path):
            continue
        if path.split("/")[0] in FOLDERS and "/" in path:
            pattern = re.sub(r"<\w+>", ".+", re.escape(path.rstrip("/")).replace(r"\*", "[^/]*"))
            assert path in saved or any(re.match(rf"{pattern}(/|$)", one) for one in files), word
        elif path in ("Makefile", "pyproject.toml") or path.endswith(".md"):
            assert (ROOT / path).is_file() or (page.parent / path).is_file(), word


def test_names_of_the_code_are_there() -> None:
    """Names in backticks are those of a class, a constant or a private function."""
    sources = [path for folder in FOLDERS for kind in ("py", "proto") for path in (ROOT / folder).rglob(f"*.{kind}")]
    known = {word for path in sources if path.parent != Path(__file__).parent for word in _words(path)}
    known |= {word for page in PAGES for block in _blocks(page) for word in re.findall(r"\w+", block.text)}
    known |= {"Makefile", "Containerfile"}
    shown = {code for page in PAGES for code in _codes(page) if re.fullmatch(r"_?[A-Z]\w*(\.\w+)?|_[a-z]\w*", code)}
    assert "OuterSettings.method" in shown
    assert not {name for name in shown if not {*name.split(".")} <= known}


def _words(path: Path) -> set[str]:
    return set(re.findall(r"\w+", path.read_text()))


# ---- the README ----


def test_the_readme_can_be_read_in_one_go() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150
