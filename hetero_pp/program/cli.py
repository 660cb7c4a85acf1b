"""The command line: all commands in the groups and the order of the help text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated

import typer

from hetero_pp.program.commands import results, runs

app = typer.Typer(
    help="Pre-train one language model on datacenters and groups of home machines in one run.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
)


@app.callback(invoke_without_command=True)
def _main(
    version: Annotated[bool, typer.Option("--version", is_eager=True, help="Print the version, and exit.")] = False,
) -> None:
    if version:
        import hetero_pp

        typer.echo(f"hetero-pp {hetero_pp.__version__}")
        raise typer.Exit


_GROUPS: Mapping[str, Sequence[Callable[..., None]]] = {
    "Start": (runs.init, runs.check, runs.launch, results.view),
    "Predict": (runs.simulate, runs.plan, runs.calibrate, runs.rehearse),
    "Together": (runs.serve, runs.invite, runs.revoke, runs.join, runs.leave, runs.status),
    "Results": (results.reproduce, results.export),
}

for group, commands in _GROUPS.items():
    for command in commands:
        app.command(rich_help_panel=group)(command)
for commands_of in (results.log, results.audit):
    app.add_typer(commands_of, rich_help_panel="Verify")
