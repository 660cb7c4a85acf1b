"""Arguments and options that several commands share, and how a command ends: with one line instead of a traceback."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from hetero_pp.core.errors import ConfigError, HeteroPPError
from hetero_pp.core.shipped import shipped_runs, shipped_yaml
from hetero_pp.program.interrupts import INTERRUPTED, interruptible

BAD_INPUT = 2
FAILED = 1


@contextmanager
def readable_errors(log_format: str = "text") -> Iterator[None]:
    """Print one line instead of a traceback for errors that the user caused or can fix, and exit.

    `log_format`: how all lines of the block are printed, `text` or `json`. Exit codes: 1 for a failed run, 2 for bad
    input, 130 for an interrupt.
    """
    with ExitStack() as stack:
        if log_format == "json":
            from hetero_pp.program.report.output import printed_as_json

            stack.enter_context(printed_as_json())
        stack.enter_context(_readable())
        if log_format not in ("text", "json"):
            raise ConfigError((), f"--log-format: found `{log_format}`, expected `text` or `json`")
        yield


@contextmanager
def _readable() -> Iterator[None]:
    try:
        with interruptible():
            yield
    except ConfigError as error:
        _leave(str(error), BAD_INPUT)
    except HeteroPPError as error:
        _leave(str(error), FAILED)
    except UnicodeEncodeError as error:
        line = error.object[: error.end].rpartition("\n")[2] + error.object[error.end :].partition("\n")[0]
        _leave(f"{line.strip()!a}: cannot be encoded as {error.encoding}: set PYTHONUTF8=1", BAD_INPUT)
    except OSError as error:  # a file that cannot be written or read
        from hetero_pp.core.files import OF_FILES, complaint

        if error.errno not in OF_FILES:
            raise
        if error.filename is None and error.errno == errno.ENOSPC:
            with suppress(OSError):  # the rest of the buffer cannot be written at exit either
                os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        if error.errno in (errno.EMFILE, errno.ENFILE):
            named = f"{error.filename}: " if error.filename is not None else ""
            _leave(
                f"{named}{error.strerror}: raise the limit, such as with `ulimit -n 1024`, and start again", BAD_INPUT
            )
        _leave(complaint(error) if error.filename is not None else f"standard output: {error.strerror}", BAD_INPUT)
    except KeyboardInterrupt:
        _leave("interrupted; all processes of this command have ended", INTERRUPTED)


def _leave(message: str, code: int) -> NoReturn:
    from hetero_pp.program.report.output import complain

    complain(f"hetero-pp: {message}")
    raise typer.Exit(code)


# ---- values of arguments and options ----


def _find(path: Path) -> Path:
    """Return the path, or the shipped YAML that it names. Ends with one line for a name that is neither."""
    found = shipped_yaml(path) or path
    if (path.suffix == "" or path.is_relative_to("configs")) and not os.path.exists(found):  # noqa: PTH110 (for names of any length)
        with readable_errors():
            expected = f"expected a YAML or one of the shipped {shipped_runs()}"
            raise ConfigError((), f"{path}: found no such file, {expected}")
    return found


def new_file(path: Path | None) -> Path | None:
    """Return the path of a file to write. Ends with one line, before any work, for a folder or a path below a file."""
    if path is not None and str(path) != "-":
        with readable_errors():
            if path.is_dir():
                raise ConfigError((), f"{path}: found a folder, expected a file")
            _require_folder(path.absolute().parent)
    return path


def folder(path: Path) -> Path:
    """Return the path of a folder. Ends with one line for a file, or a path below one."""
    with readable_errors():
        _require_folder(path)
    return path


def _require_folder(path: Path) -> None:
    """Raise ConfigError if something else than a folder is there, or above it."""
    for one in (path, *path.parents):
        if one.exists() and not one.is_dir():
            raise ConfigError((), f"{one}: found a file, expected a folder")


def parsed_address(option: str, text: str | None, several: bool = False) -> str | None:
    """Return HOST:PORT as an option gave it; None without the option. Raises ConfigError for any other text.

    `several`: there may be more, with commas between them.
    """
    from hetero_pp.config.topology import parse_address

    if text is None:
        return None
    return ",".join(parsed(option, parse_address, one) for one in (text.split(",") if several else [text]))


def parsed(option: str, parse: Callable[[str], str], text: str) -> str:
    """Return the value of an option. Raises ConfigError with the option's name if it is not valid."""
    try:
        return parse(text)
    except ValueError as error:
        raise ConfigError((), f"{option}: {error}") from None


# ---- arguments and options ----

RunName = Annotated[str, typer.Argument(metavar="RUN", help="Run name, or run folder.")]
RunOrLog = Annotated[str, typer.Argument(metavar="RUN", help="Run name, run folder, or URL of a run log.")]
ConfigPath = Annotated[
    Path,
    typer.Argument(
        metavar="CONFIG",
        help="The YAML of the run, or the name of a shipped one, such as `quickstart`.",
        callback=_find,
    ),
]
RunsFolder = Annotated[
    Path, typer.Option("--runs", callback=folder, help="Keep runs and encoded corpora in this folder.")
]
JsonPath = Annotated[
    Path | None,
    typer.Option("--json", metavar="FILE", callback=new_file, help="Write the results to this file, as JSON."),
]
Overrides = Annotated[
    list[str],
    typer.Option("--set", metavar="KEY=VALUE", help="Replace one value of the YAML, such as `outer.rounds=20`."),
]
Calibration = Annotated[
    Path | None,
    typer.Option(help="Use the costs that `hetero-pp calibrate --write` measured instead of the catalog's."),
]
Device = Annotated[
    str, typer.Option(help="Choose the device that computes: `auto`, `cpu`, `mps`, `xpu`, `cuda`, `cuda:1`, ...")
]

Metrics = Annotated[
    str | None,
    typer.Option(
        "--metrics",
        metavar="[ADDRESS:]PORT",
        help="Serve /metrics for Prometheus and /healthz here; without an address, to this host only.",
    ),
]
Otlp = Annotated[
    str | None, typer.Option("--otlp", metavar="URL", help="Export traces of rounds to this OTLP collector, over gRPC.")
]
Boards = Annotated[
    list[str],
    typer.Option("--board", metavar="NAME", help="Write the curves of TensorBoard to `wandb` or `trackio`, too."),
]
LogFormat = Annotated[
    str, typer.Option("--log-format", metavar="FORMAT", help="Print each line as `text` or as a `json` object.")
]

Resume = Annotated[bool, typer.Option("--resume", help="Resume runs/<name> from the newest round that all saved.")]
TokenFile = Annotated[Path | None, typer.Option("--token-file", help="Read the run's token from this file.")]
Address = Annotated[
    str | None, typer.Option(metavar="HOST:PORT,...", help="Use this address of the exchange, or one for each host.")
]
Round = Annotated[int | None, typer.Option("--round", min=0, help="Choose the round; by default, the newest.")]
ShowPage = Annotated[bool, typer.Option("--view", help="Show it on a page of this machine, too.")]

StartNew = Annotated[
    bool, typer.Option("--new", help="Start a new run though runs/<name> is unfinished; it is moved aside.")
]
