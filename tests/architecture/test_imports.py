"""The layout's rules, checked on the imports."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel

import hetero_pp
from hetero_pp.config.run_config import RunConfig
from hetero_pp.research.settings import ResearchConfig, ScoreSettings

ROOT = Path(__file__).parents[2]
PACKAGES = ("hetero_pp", "stages", "replica_groups")
FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
SERVERS = {"replica_groups.exchange.server", "replica_groups.exchange.admission"}
"""Modules outside of hetero_pp.rpc that answer gRPC calls."""
RESEARCH = "hetero_pp.research"
COMMAND_LINE = "hetero_pp.program.commands.results"
FACES = {"hetero_pp.__main__", "hetero_pp.__init__", "hetero_pp.Run"}
"""Modules of the package that belong to the program: its start, and its interface for notebooks."""
HEAVY_EXTRAS = {
    "torchtitan",
    "deepspeed",
    "torchx",
    "obstore",
    "numba",
    "transformers",
    "datasets",
    "opentelemetry",
    "wandb",
    "trackio",
}


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def _imports(path: Path) -> frozenset[str]:
    found = set()
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(found)


def _layer(module: str) -> int:
    """Return the layer of a module.

    0 is the method, links, rpc and simulator; 1 is stages; 2 is replica_groups; 3 is the program; 4 is research; -1 is
    another package.
    """
    if module.startswith(RESEARCH):
        return 4
    if module.startswith("hetero_pp.program") or module in FACES:
        return 3
    return {"hetero_pp": 0, "stages": 1, "replica_groups": 2}.get(module.split(".")[0], -1)


def _module(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


@pytest.mark.parametrize("path", FILES, ids=_module)
def test_imports_go_one_way(path: Path) -> None:
    upwards = {name for name in _imports(path) if _layer(name) > _layer(_module(path))}
    if _module(path) == COMMAND_LINE:
        upwards = {name for name in upwards if not name.startswith(RESEARCH)}
    assert not upwards


def test_the_product_imports_research_only_in_the_function_of_reproduce() -> None:
    """`reproduce` imports it when it runs, so no other command loads it."""
    users = {_module(path) for path in FILES for name in _imports(path) if name.startswith(RESEARCH)}
    assert {user for user in users if not user.startswith(RESEARCH)} == {COMMAND_LINE}
    tree = _tree(ROOT / "hetero_pp" / "program" / "commands" / "results.py")
    [reproduce] = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "reproduce"]
    assert _research_imports(tree) == _research_imports(reproduce)


def _research_imports(tree: ast.AST) -> list[str]:
    imports = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    return [name for name in imports if name.startswith(RESEARCH)]


def test_no_setting_of_a_run_is_one_that_only_tables_need() -> None:
    """Keys of `research` and of its ablations are no keys of any section that `launch` reads."""
    runs = {key for model in _sections(RunConfig) for key in model.model_fields}
    other_defaults = {ScoreSettings}
    own = _sections(ResearchConfig) - _sections(RunConfig) - other_defaults
    tables = {key for model in own for key in model.model_fields}
    assert {"missed", "taking_part", "clusters", "peer", "grassmann_every"} <= tables
    shared = RunConfig.model_fields.keys() | {"method"}  # other settings with the same name
    assert (tables & runs) - shared == set()


def _sections(model: type[BaseModel]) -> set[type[BaseModel]]:
    """Return a section and all sections in it."""
    found, waiting = set(), [model]
    while waiting:
        one = waiting.pop()
        found.add(one)
        parts: list[Any] = [field.annotation for field in one.model_fields.values()]
        while parts:
            part = parts.pop()
            parts += get_args(part)
            if isinstance(part, type) and issubclass(part, BaseModel) and part not in found:
                waiting.append(part)
    return found


def _arrows_between(folder: tuple[str, ...]) -> dict[str, set[str]]:
    """Return the imports between the files and folders of a folder. The root stands for all three packages."""
    modules = {_module(path).removesuffix(".__init__") for path in FILES}
    arrows: dict[str, set[str]] = {}
    for path in FILES:
        here = tuple(_module(path).removesuffix(".__init__").split("."))
        if here[: len(folder)] != folder or len(here) == len(folder):
            continue
        for name in _imports(path):
            module = name if name in modules else name.rpartition(".")[0]
            there = tuple(module.split("."))
            if there[: len(folder)] == folder and len(there) > len(folder) and there[len(folder)] != here[len(folder)]:
                arrows.setdefault(here[len(folder)], set()).add(there[len(folder)])
    return arrows


@pytest.mark.parametrize("folder", sorted({path.parent for path in FILES} | {ROOT}), ids=str)
def test_no_circles(folder: Path) -> None:
    """There are no cycles between files or between folders, generated code included."""
    arrows = _arrows_between(folder.relative_to(ROOT).parts)
    if folder == ROOT / "hetero_pp":  # the command line imports it for `reproduce` alone
        arrows["program"] -= {"research"}
    if folder == ROOT:  # the program may import the rest of its package: test_imports_go_one_way
        arrows = {name: there - {"hetero_pp"} for name, there in arrows.items()}
        arrows["hetero_pp"] = set()
    assert list(TopologicalSorter(arrows).static_order()) is not None


def test_no_call_has_more_arguments_by_position_than_one_can_read() -> None:
    """Beyond eight, a reader cannot tell which argument is which."""
    calls = [
        (path, node)
        for path in FILES
        if "_pb2" not in path.name
        for node in ast.walk(_tree(path))
        if isinstance(node, ast.Call)
    ]
    assert [f"{path}:{call.lineno}" for path, call in calls if len(call.args) > 8] == []


def test_text_is_read_and_written_in_one_encoding() -> None:
    """A file must not depend on the locale: under cron that is ASCII."""
    calls = [(path, node) for path in FILES for node in ast.walk(_tree(path)) if isinstance(node, ast.Call)]
    assert [f"{path}:{call.lineno}" for path, call in calls if _is_of_the_locale(call)] == []


def _is_of_the_locale(call: ast.Call) -> bool:
    """Return whether a call opens a file or a process as text with the encoding of the locale."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    given = {keyword.arg for keyword in call.keywords}
    if "encoding" in given:
        return False
    modes = [one.value for one in call.args[:2] if isinstance(one, ast.Constant) and isinstance(one.value, str)]
    is_of_text = any(re.fullmatch(r"[rwax]\+?t?", mode) for mode in modes)
    is_opened = name in ("open", "fdopen") and (is_of_text or "errors" in given or not (call.args or given))
    return name in ("read_text", "write_text") or is_opened or ("text" in given and name in ("run", "Popen"))


def test_only_rpc_and_the_servers_import_grpc() -> None:
    users = {_module(path) for path in FILES if any(name.split(".")[0] == "grpc" for name in _imports(path))}
    assert users >= SERVERS
    assert all(user.startswith("hetero_pp.rpc.") for user in users - SERVERS)


def test_each_engine_is_imported_in_one_file() -> None:
    for extra in HEAVY_EXTRAS:
        users = [path for path in FILES if any(name.split(".")[0] == extra for name in _imports(path))]
        assert len(users) <= 1, (extra, users)


def test_no_pickle() -> None:
    for path in FILES:
        assert not {name.split(".")[0] for name in _imports(path)} & {"pickle", "dill", "cloudpickle", "marshal"}, path


@pytest.mark.parametrize("folder", [*PACKAGES, "benchmarks", "tests"])
def test_every_docstring_of_a_module_begins_with_a_sentence(folder: str) -> None:
    """The first paragraph is the only description of a file: no page lists the files."""
    for path in (ROOT / folder).rglob("*.py"):
        if "_pb2" not in path.name and path.name != "conftest.py" and path.read_text():
            first = " ".join((ast.get_docstring(_tree(path)) or "").partition("\n\n")[0].split())
            assert re.search(r"[.?][)`]*$", first), f"{path}: found {first!r}, expected a sentence"
            assert len(first.split()) > 2, f"{path}: found {first!r}, expected a sentence"


def test_the_map_of_the_way_of_the_data_is_true() -> None:
    """Every module that hetero_pp's docstring names exists."""
    assert hetero_pp.__doc__
    named = set(re.findall(r"\b(?:hetero_pp|stages|replica_groups)(?:\.[a-z_]+)+", hetero_pp.__doc__))
    assert len(named) > 15
    modules = {_module(path).removesuffix(".__init__") for path in FILES}
    assert named <= modules


def test_the_map_names_every_folder_of_code() -> None:
    """`tests/documents` checks the other direction: paths of the map exist."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    named = set(re.findall(r"`([\w/]+/)`", page.partition("## Folders")[2].partition("\n## ")[0]))
    assert named >= {f"{path.parent.relative_to(ROOT).as_posix()}/" for path in FILES}


@pytest.mark.starts_processes
def test_a_start_without_extras_or_heavy_imports() -> None:
    """The package imports nothing at first, help needs neither torch nor grpc, and no extra is needed."""
    code = (
        "import sys; import hetero_pp; print([name for name in sys.modules if name.startswith('hetero_pp.')]); "
        "import hetero_pp.program.cli; "
        "print([name for name in ('torch', 'grpc', 'matplotlib', 'pyarrow') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.split() == ["[]", "[]"]


@pytest.mark.starts_processes
def test_generated_code_is_up_to_date(tmp_path: Path) -> None:
    """Compares with the output of `make proto`."""
    outputs = [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi")]
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I.", *outputs, "hetero_pp/messages/messages.proto"]
    subprocess.run(command, check=True, cwd=ROOT)
    generated = {path.name: path.read_text() for path in (tmp_path / "hetero_pp" / "messages").iterdir()}
    kept = {path.name: path.read_text() for path in (ROOT / "hetero_pp" / "messages").glob("*_pb2*.py*")}
    assert len(generated) == 2
    assert kept == generated
