"""Launch a run as `hetero-pp launch` does, and inject the faults that a file lists (docs/failures.md).

python benchmarks/launch_with_faults.py CONFIG --faults FILE [OPTIONS]
"""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from fault_injection.file import read_faults
from fault_injection.schedule import missed, schedule_of
from fault_injection.settings import FaultFile
from fault_injection.supervisor import FaultySupervisor

from hetero_pp.config.spec import RunSpec
from hetero_pp.config.yaml_file import ConfigFile
from hetero_pp.program.commands.options import ConfigPath, Overrides, RunsFolder, StartNew, readable_errors
from hetero_pp.program.launch.command import Invocation, Start, run_topology
from hetero_pp.program.launch.in_process import run_in_process
from hetero_pp.program.launch.supervisor import launch

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def _print_schema(is_given: bool) -> None:
    if is_given:
        print(json.dumps(FaultFile.model_json_schema(), indent=2))
        raise typer.Exit


@app.command()
def launch_with_faults(
    config: ConfigPath,
    faults: Annotated[Path, typer.Option("--faults", metavar="FILE", help="Inject the faults in this file.")],
    in_process: Annotated[
        bool, typer.Option("--in-process", help="Train in one process; only `miss` is possible then.")
    ] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Resume runs/<name>.")] = False,
    new: StartNew = False,
    schema: Annotated[
        bool, typer.Option("--schema", callback=_print_schema, is_eager=True, help="Print the schema of FILE.")
    ] = False,
    runs: RunsFolder = Path("runs"),
    overrides: Overrides = [],  # noqa: B006 (typer copies it)
) -> None:
    """Train a run on this machine, and inject faults into it (docs/failures.md)."""
    with readable_errors():
        spec = RunSpec(ConfigFile(config, overrides).config, vocabulary=256)  # faults do not depend on the vocabulary
        found = read_faults(faults, spec, in_process)
        start: Start = partial(launch, make_supervisor=partial(FaultySupervisor, schedule_of(found, spec)))
        if in_process:
            start = partial(run_in_process, missed=missed(found))
        invocation = Invocation(typed=[sys.executable, *sys.argv])
        run_topology(config, overrides, runs, in_process, resume, new, start, invocation)


if __name__ == "__main__":
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # as hetero_pp.__main__
    app()
