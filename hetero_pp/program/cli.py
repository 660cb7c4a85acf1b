"""The command line. Everything heavy is imported inside the commands, so that help is quick."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, NoReturn

import typer

app = typer.Typer(
    help="Pre-train one language model on datacenters and groups of home machines in one run.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

BAD_INPUT = 2
FAILED = 1
INTERRUPTED = 130

ConfigPath = Annotated[Path, typer.Argument(metavar="CONFIG", help="The YAML of the run.")]
RunsFolder = Annotated[Path, typer.Option("--runs", help="Where runs/<name>/ and encoded corpora are kept.")]
Overrides = Annotated[
    list[str], typer.Option("--set", metavar="KEY=VALUE", help="Change one value, such as `outer.rounds=20`.")
]


@app.command()
def launch(
    config: ConfigPath,
    in_process: Annotated[
        bool, typer.Option("--in-process", help="One process, in-process links, no network: the reference.")
    ] = False,
    runs: RunsFolder = Path("runs"),
    overrides: Overrides = [],  # noqa: B006 (typer copies it)
) -> None:
    """Train a topology: one process per stage, per datacenter replica and for the exchange, on this machine.

    Everything the run leaves is in runs/<name>/; an earlier run of that name moves to runs/<name>.1, .2, ...
    """
    with readable_errors():
        from hetero_pp.program.run import run_topology

        run_topology(config, overrides, runs, in_process)


@app.command()
def check(config: ConfigPath, runs: RunsFolder = Path("runs"), overrides: Overrides = []) -> None:  # noqa: B006
    """Validate a YAML; print its topology, parameters per stage, and bytes per link, step and round."""
    with readable_errors():
        from hetero_pp.program.check import print_check

        print_check(config, overrides, runs)


@app.command()
def schema() -> None:
    """Print the JSON schema of the YAML, for editors."""
    from hetero_pp.program.config import RunConfig

    typer.echo(json.dumps(RunConfig.model_json_schema(), indent=2))


@contextmanager
def readable_errors() -> Iterator[None]:
    """One line instead of a traceback for what the user can mend or has caused."""
    from hetero_pp.errors import ConfigError, HeteroPPError

    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        yield
    except ConfigError as error:
        _leave(str(error), BAD_INPUT)
    except HeteroPPError as error:
        _leave(str(error), FAILED)
    except KeyboardInterrupt:
        _leave("interrupted; every process of the run has ended", INTERRUPTED)


def _leave(message: str, code: int) -> NoReturn:
    print(f"hetero-pp: {message}", file=sys.stderr)
    raise typer.Exit(code)
