"""Ends a command with one line instead of a traceback."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import NoReturn

import typer

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
            from hetero_pp.core.errors import ConfigError

            raise ConfigError((), f"--log-format: found `{log_format}`, expected `text` or `json`")
        yield


@contextmanager
def _readable() -> Iterator[None]:
    from hetero_pp.core.errors import ConfigError, HeteroPPError

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
    except OSError as error:
        _leave_for(error)
    except KeyboardInterrupt:
        _leave("interrupted; all processes of this command have ended", INTERRUPTED)


def _leave_for(error: OSError) -> NoReturn:
    """Print one line for a file that cannot be written or read. Raises any other error as it is."""
    from hetero_pp.core.files import OF_FILES, complaint

    if error.errno not in OF_FILES:
        raise error
    if error.filename is None and error.errno == errno.ENOSPC:
        with suppress(OSError):  # the rest of the buffer cannot be written at exit either
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    if error.errno in (errno.EMFILE, errno.ENFILE):
        named = f"{error.filename}: " if error.filename is not None else ""
        _leave(f"{named}{error.strerror}: raise the limit, such as with `ulimit -n 1024`, and start again", BAD_INPUT)
    _leave(complaint(error) if error.filename is not None else f"standard output: {error.strerror}", BAD_INPUT)


def _leave(message: str, code: int) -> NoReturn:
    from hetero_pp.program.report.output import complain

    complain(f"hetero-pp: {message}")
    raise typer.Exit(code)
