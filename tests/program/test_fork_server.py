"""The fork server imports while the launcher does, and its processes have the launcher's limits."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from asking import sets

from hetero_pp.program.launch.job import ProcessJob

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
AT_THE_SERVERS_START = """
import multiprocessing.forkserver, os, sys
def imported():
    print("gRPC says", os.environ.get("GRPC_VERBOSITY"), file=sys.stderr)
    sys.exit(f"the server starts, after imports of {[name for name in ('typer', 'torch') if name in sys.modules]}")
multiprocessing.forkserver.ensure_running = imported
from hetero_pp.__main__ import main
sys.argv = ["hetero-pp", *sys.argv[1:]]
main()
"""
IN_RUNS = """
import sys
from hetero_pp.__main__ import main
for optimizer in ("adamw", "muon"):
    sys.argv = [*sys.argv, "--set", f"inner.optimizer={optimizer}"]
    try:
        main()
    except SystemExit as error:
        assert not error.code, error.code
print([name for name in ("torch._dynamo", "sympy") if name in sys.modules], file=sys.stderr)
"""
IN_A_LAUNCHER = """
import sys
from hetero_pp.program.launch import command
own = ("stages.worker", "replica_groups.member.take_part", "replica_groups.exchange.exchange")
print([name for name in own if name in sys.modules], file=sys.stderr)
"""
IN_A_FORKED_PROCESS = """
import resource, sys
from pathlib import Path
from hetero_pp.program.launch.fork_server import begin_forked
begin_forked(Path(sys.argv[1]), False, (200, 300))
print(resource.getrlimit(resource.RLIMIT_NOFILE))
"""


def _run(code: str, *arguments: str) -> str:
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True).stderr


@pytest.mark.starts_processes
@pytest.mark.parametrize("config", [str(QUICKSTART), "quickstart"])
def test_the_fork_server_starts_before_the_launcher_imports(config: str) -> None:
    said = _run(AT_THE_SERVERS_START, "launch", config).splitlines()
    assert said == ["gRPC says NONE", "the server starts, after imports of []"]


@pytest.mark.starts_processes
@pytest.mark.parametrize("arguments", [["launch", "missing"], ["check", str(QUICKSTART), "--help"]])
def test_no_fork_server_starts_for_a_command_without_members(arguments: list[str]) -> None:
    assert "the server starts" not in _run(AT_THE_SERVERS_START, *arguments)


@pytest.mark.starts_processes
def test_training_does_not_import_what_only_compiles(corpus: Path, tmp_path: Path) -> None:
    """Each process of a run would spend a second on these imports before its first step."""
    small = ["inner.steps=1", "inner.momentum=null", "outer.rounds=1", "model.layers=2", "model.width=32"]
    small += [
        "model.feed_forward=48",
        "data.validation_sequences=4",
        "replicas.1.stages.count=2",
        f"data.corpus={corpus}",
    ]
    small += ["data.sequence_length=32", "data.validation_share=0.2"]
    options = sets(*small)
    said = _run(IN_RUNS, "launch", str(QUICKSTART), "--in-process", "--new", "--runs", str(tmp_path), *options)
    assert said.splitlines()[-1] == "[]"


@pytest.mark.starts_processes
def test_a_launcher_does_not_import_what_only_members_need() -> None:
    assert _run(IN_A_LAUNCHER) == "[]\n"


@pytest.mark.starts_processes
def test_a_forked_process_takes_the_limits_of_open_files(tmp_path: Path) -> None:
    """The server may have started before the launcher raised its own."""
    _run(IN_A_FORKED_PROCESS, str(tmp_path / "output"))
    assert (tmp_path / "output").read_text() == "(200, 300)\n"


class _Started:
    """A process that is only noted."""

    def __init__(self, jobs: list[ProcessJob]) -> None:
        self._jobs, self.Pipe = jobs, multiprocessing.Pipe

    def Process(self, target: object, args: tuple[Any, ...], name: str) -> _Started:
        self._jobs.append(args[1])
        return self

    def start(self) -> None:
        pass

    def join(self, timeout: float | None = None) -> None:
        pass

    def is_alive(self) -> bool:
        return False
