"""Examples in the documents work: commands run, links and paths exist, and YAML is valid.

A command that is added to a page has to be quick. Otherwise it is listed here with the test that runs it, or with the
reason why none does.
"""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from collections.abc import Iterator
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
PAGES.remove(ROOT / "docs" / "results.md")  # generated

EXPORTED = "tests/program/test_export.py::test_a_round_without_a_checkpoint_is_replayed"
REPLAYED = "tests/program/test_replay.py::test_up_to_a_round"
STARTED_FROM = "tests/program/test_export.py::test_an_uncompressed_run_goes_on_where_the_first_one_ended"
CALIBRATED = "tests/program/test_simulate.py::test_a_calibration_is_measured_and_used"
TABLE = "tests/experiments/test_experiments.py::test_a_table_is_made_and_resumed"
PATCHED = "tests/documents/test_python.py::test_the_blocks_of_a_page_run_once_its_patches_are_applied"
BROUGHT = "tests/experiments/test_brought.py::test_a_streamed_corpus_and_a_tokenizer_make_a_table"
OWN_TABLE = "tests/experiments/test_worked_example.py::test_the_example_makes_its_table"
JOINED = "tests/program/test_join.py::test_three_hosts_join_by_tickets_and_come_to_the_bits_of_one_process"
OPERATED = "tests/program/test_operate.py::test_serve_and_join_take_the_options_of_an_operator"
INSTALLED = "tests/package/test_wheel.py::test_a_shipped_run_trains_over_the_network"
FAULTS_FOR_QUICKSTART = "benchmarks/fault_injection/quickstart.yaml"
SHOWN = "tests/program/test_view_server.py::test_commands_open_a_page_or_write_it_to_a_file"
REHEARSED = "tests/program/test_rehearse.py::test_a_rehearsal_is_shown_beside_its_prediction"
FRIENDS = "tests/program/test_rehearse.py::test_hosts_rehearse_their_lines"
SIMULATED = "tests/program/test_columns.py::test_simulate"
PLANNED = "tests/program/test_columns.py::test_plan"
VALIDATED = "tests/audit/test_validator.py::test_a_validator_elsewhere_judges_over_grpc"
COSTS = "tests/program/test_columns.py::test_what_an_experiment_would_cost"
RUN_BY = {
    "hetero-pp simulate configs/quickstart.yaml": SIMULATED,
    "hetero-pp simulate configs/paper/sparseloco_figure2.yaml": SIMULATED,
    "hetero-pp simulate configs/paper/het_pp_97_percent.yaml": SIMULATED,
    "hetero-pp simulate configs/simulate/ten_thousand.yaml": (
        "tests/program/test_simulate.py::test_ten_thousand_members_are_predicted"
    ),
    "hetero-pp plan configs/plan/unequal.yaml --target-utilization 0.97 --write plan.yaml": PLANNED,
    "hetero-pp simulate plan.yaml": PLANNED,
    "hetero-pp reproduce --list": "tests/program/test_columns.py::test_the_list_of_experiments",
    "hetero-pp reproduce het-pp/table1 --dry-run": COSTS,
    "hetero-pp launch configs/quickstart.yaml --view": (
        "tests/program/test_view_server.py::test_a_launched_run_is_shown_until_its_end"
    ),
    "hetero-pp view quickstart": SHOWN,
    "hetero-pp view quickstart quickstart.1": SHOWN,
    "hetero-pp view quickstart --export quickstart.html": SHOWN,
    "hetero-pp simulate configs/quickstart.yaml --view": SHOWN,
    "make demo": "tests/documents/test_commands.py::test_make_demo_is_a_launch_that_is_shown",
    "make test": ".ci/run",
    "make lint": ".ci/run",
    "make types": ".ci/run",
    "make docs": ".ci/run",
    "pip wheel --no-deps --wheel-dir dist .": INSTALLED,
    "hetero-pp launch quickstart": INSTALLED,
    "hetero-pp launch configs/mixed_engines.yaml": "tests/engines/test_mixed.py::test_engines_and_stages_are_one_run",
    "hetero-pp launch configs/quickstart.yaml --resume": (
        "tests/faults/test_resume.py::test_a_killed_run_goes_on_to_the_same_bits"
    ),
    "hetero-pp launch configs/quickstart.yaml --resume --set outer.rounds=32 --set inner.learning_rate=5e-3": (
        "tests/program/test_changes.py::test_over_the_network_a_changed_run_has_the_same_bits"
    ),
    f"python benchmarks/launch_with_faults.py configs/quickstart.yaml --faults {FAULTS_FOR_QUICKSTART}": (
        "tests/faults/test_survives.py::test_a_datacenter_a_stage_and_the_exchange_that_are_killed_are_replaced"
    ),
    "hetero-pp launch mixed.yaml --from mixed-hf": STARTED_FROM,
    "hetero-pp launch CONFIG --from quickstart-hf": STARTED_FROM,
    "hetero-pp export runs/mixed --to mixed-hf": EXPORTED,
    "hetero-pp export runs/quickstart --to quickstart-hf": EXPORTED,
    "hetero-pp export runs/quickstart --to quickstart-hf-12 --round 12 --dtype bf16": EXPORTED,
    "hetero-pp log replay runs/quickstart": REPLAYED,
    "hetero-pp log replay runs/quickstart --round 12 --to theta-12.safetensors --json found.json": REPLAYED,
    "hetero-pp audit validate quickstart --device cpu --name first": VALIDATED,
    "hetero-pp invite quickstart --validator second > second.pass": VALIDATED,
    "hetero-pp audit validate s3://bucket/quickstart --pass second.pass": VALIDATED,
    "hetero-pp audit scores quickstart --json scores.json": (
        "tests/audit/test_hostile_runs.py::test_the_command_shows_who_is_excluded_and_why"
    ),
    "hetero-pp view quickstart quickstart.1 --compare compare.png": (
        "tests/program/test_compare.py::test_what_differs_and_what_was_reached"
    ),
    "hetero-pp calibrate configs/quickstart.yaml --write calibration.yaml": CALIBRATED,
    "hetero-pp simulate configs/quickstart.yaml --calibration calibration.yaml": CALIBRATED,
    "hetero-pp reproduce het-pp/table1 --seeds 3 --workers 2": TABLE,
    "hetero-pp reproduce het-pp/table1 --rows PP-Compress --seeds 1 --results again": (
        "tests/experiments/test_experiments.py::test_only_rows_of_a_name_are_trained"
    ),
    "hetero-pp reproduce --no-train --docs docs/results.md": TABLE,
    "hetero-pp reproduce rank --experiments tables --scale tiny": OWN_TABLE,
    "hetero-pp reproduce het-pp/table2 --corpus hf:/data/c4 --tokenizer /data/llama-2": BROUGHT,
    "hetero-pp serve hosts.yaml": JOINED,
    "hetero-pp serve hosts.yaml --metrics 9464 --log-format json": OPERATED,
    "hetero-pp rehearse configs/quickstart.yaml --rounds 2 --steps 2": REHEARSED,
    "hetero-pp rehearse mixed.yaml": REHEARSED,
    "hetero-pp serve friends.yaml --rehearse": FRIENDS,
    "hetero-pp invite friends-rehearsal --address HOST:47600": FRIENDS,
    "hetero-pp join hpp1.CMfx43ja... --rehearse": FRIENDS,
    "hetero-pp plan friends.yaml --measured runs/friends-rehearsal/rehearsal.json": FRIENDS,
    "hetero-pp invite hosts --address HOST:47600": JOINED,
    "hetero-pp invite hosts --slot dc --address HOST:47600": JOINED,
    "hetero-pp join hpp1.CMfx43ja...": JOINED,
    "hetero-pp check hpp1.CMfx43ja...": "tests/program/test_check_machine.py::test_a_ticket_passes_and_stays_usable",
    "hetero-pp log verify runs/quickstart/evidence/000007-home": (
        "tests/audit/test_verify.py::test_evidence_proves_the_lie"
    ),
    "git apply docs/patches/root.patch": PATCHED,
    "git apply docs/patches/float8.patch": PATCHED,
    "git apply docs/patches/even.patch": PATCHED,
    "python benchmarks/link.py --smoke": "tests/benchmarks/test_smoke.py::test_it_runs_at_its_smallest",
}
"""The test that runs such a command, with a configuration of its own or a shorter run."""

SCHEDULER = "needs Slurm or Kubernetes: tests/program/test_torchx.py looks at the jobs"
HOURS = "takes a GPU and days: tests/experiments/test_tables.py has a tiny table"
ELSEWHERE = "is another program's"
TESTS = "runs tests"
DOWNLOADS = "downloads another torch: tests/documents/test_setup.py looks at what make would do"
NOT_RUN = {
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
    if words[0] != "hetero-pp" or command in RUN_BY:
        return False
    if words[1] == "reproduce":
        return "--list" in words or "--dry-run" in words
    return words[1] in QUICK or "--print-commands" in words


def _is_launch(command: str) -> bool:
    """Return whether a command trains on one machine. It is run here for one step."""
    return command.startswith("hetero-pp launch") and not (_is_quick(command) or command in {*RUN_BY, *NOT_RUN})


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


def test_every_command_is_run_somewhere_or_it_is_said_why_not() -> None:
    forgotten = [
        f"{_name(page)}: {command}"
        for page, command in COMMANDS
        if not (_is_quick(command) or _is_launch(command) or command in {*RUN_BY, *NOT_RUN})
    ]
    assert not forgotten
    assert len(COMMANDS) > 40


def test_no_command_is_named_here_that_no_page_shows() -> None:
    assert not {*RUN_BY, *NOT_RUN} - {command for _, command in COMMANDS}
    assert not {*RUN_BY} & {*NOT_RUN}


@pytest.mark.parametrize(("command", "test"), RUN_BY.items(), ids=list(RUN_BY))
def test_the_test_that_runs_a_command_is_there_and_speaks_of_it(command: str, test: str) -> None:
    """The test names the subcommand or the configuration, and all options of the command."""
    path, _, function = test.partition("::")
    text = (ROOT / path).read_text()
    assert not function or re.search(rf"^def {function}\(", text, re.MULTILINE)
    program, first, *others = command.split()
    configurations = [Path(word).name for word in others if word.startswith("configs/")]
    if program == "make":
        assert re.search(rf"\bmake\b.*\b{first}\b", text)
    else:
        assert any(word in text for word in (f'"{first}"', f"{first}(", f'"{Path(first).stem}"', *configurations))
    for option in set(re.findall(r"--[\w-]+", command)):
        assert f'"{option}"' in text, option


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
