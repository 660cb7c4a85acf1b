"""Commands of the program that run in the process of a test."""

from __future__ import annotations

from typer.testing import CliRunner

from hetero_pp.program.cli import app


def ask(*arguments: object, columns: int | None = None) -> tuple[int, str, str]:
    """Run a command. Return its exit code, and what it printed to stdout and to stderr."""
    environment = {} if columns is None else {"COLUMNS": str(columns)}
    done = CliRunner().invoke(app, [str(one) for one in arguments], env=environment)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.stdout, done.stderr


def told(*arguments: object) -> str:
    """Run a command that has to succeed. Return what it printed, on one line."""
    code, out, errors = ask(*arguments)
    assert code == 0, errors
    return " ".join(out.split())


def sets(*settings: str) -> list[str]:
    """Return the options that change settings."""
    return [part for setting in settings for part in ("--set", setting)]
