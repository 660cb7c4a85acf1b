"""Commands before a run: a first YAML, and checks of this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hetero_pp.program.commands.errors import FAILED, readable_errors
from hetero_pp.program.commands.options import RunsFolder, new_file


def init(
    path: Annotated[
        Path | None, typer.Argument(metavar="[CONFIG]", help="YAML to write; by default the name with `.yaml`.")
    ] = None,
    machines: Annotated[
        str | None, typer.Option(help="Train on these: `here`, a number of homes such as `4`, or `4 + datacenter`.")
    ] = None,
    line: Annotated[
        str | None, typer.Option(metavar="UP/DOWN", help="Set the Mbit/s of a home's line, such as `20/100`.")
    ] = None,
    text: Annotated[
        str | None, typer.Option(help="Train on this file, folder, `hf:` and a dataset, or `standard-library`.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Train micro, 178m, 512m, 1b, or a number of parameters such as `5M`.")
    ] = None,
    time: Annotated[
        str | None, typer.Option(help="Train for this time or number of tokens: `10 min`, `50M tokens`.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Choose the name of the run, and of its folder in runs/.")] = None,
    hardware: Annotated[
        str | None,
        typer.Option(
            help="Predict times for this hardware, such as `rtx-4090`; by default a CPU core, or this machine."
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")] = False,
) -> None:
    """Write a first YAML from five answers. On a terminal, ask for those that no option gives; else use defaults."""
    with readable_errors():
        from hetero_pp.program.init.command import init as write_first

        given = {"machines": machines, "line": line, "text": text, "model": model, "time": time, "name": name}
        write_first(path, given, hardware, force)


def doctor(
    named: Annotated[
        str | None,
        typer.Argument(
            metavar="[CONFIG|TICKET|RUN]", help="YAML, ticket, or run of this host; by default the machine."
        ),
    ] = None,
    data: Annotated[
        str | None, typer.Option(metavar="PATH", help="Compare the text at this path with the run's, for a ticket.")
    ] = None,
    json_path: Annotated[
        Path | None,
        typer.Option(
            "--json",
            callback=new_file,
            help="Write the results to this file; `-` prints them instead.",
        ),
    ] = None,
    runs: RunsFolder = Path("runs"),
) -> None:
    """Check this machine before a run or a join, in a few seconds: one line a check, with how to mend it.

    Nothing is started, changed or enrolled; a ticket stays usable. The exit code is 1 if a check failed.
    """
    with readable_errors():
        from hetero_pp.program.doctor.command import doctor as make_checks

        if not make_checks(named, runs, data, json_path):
            raise typer.Exit(FAILED)
