"""Common parts of the benchmarks' command lines: `--json FILE`, `--smoke`, SIGTERM, and missing extras."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hetero_pp.core.files import write_whole
from hetero_pp.research.experiments.outcomes import commit, machine


def parser_of(document: str) -> argparse.ArgumentParser:
    """Return a parser for the benchmark with this module docstring."""
    return argparse.ArgumentParser(description=document.splitlines()[0])


def parse(parser: argparse.ArgumentParser, smallest: Mapping[str, Any]) -> argparse.Namespace:
    """Parse the arguments. With --smoke, which writes no file, `smallest` replaces the defaults."""
    ends = parser.add_mutually_exclusive_group()
    ends.add_argument("--json", type=Path, help="write the results to this file")
    ends.add_argument(
        "--smoke", "--quick", action="store_true", help="run everything at its smallest size, within seconds"
    )
    if parser.parse_known_args()[0].smoke:
        parser.set_defaults(**smallest)
    return parser.parse_args()


def exit_on_sigterm() -> None:
    """Clean up after SIGTERM as after Ctrl-C."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def origin() -> dict[str, Any]:
    """Return where results come from: this machine, and this commit."""
    return {"machine": machine(), "commit": commit()}


def earlier(path: Path | None) -> dict[str, Any]:
    """Return the results that a file has; none if there is no path or no file."""
    found: dict[str, Any] = {} if path is None or not path.exists() else json.loads(path.read_text())
    return found


def save(content: Mapping[str, Any], path: Path | None) -> None:
    """Write the content as JSON if there is a path. Without a path, only check that it can be encoded."""
    text = json.dumps(content, indent=1) + "\n"
    if path is not None:
        write_whole(path, text.encode())


@contextmanager
def extra(name: str) -> Iterator[None]:
    """Guard imports that an extra provides. If one is missing, exit with a line that names the extra."""
    try:
        yield
    except ModuleNotFoundError as error:
        script = f"benchmarks/{Path(sys.argv[0]).name}"
        raise SystemExit(f"{script} needs {error.name}: pip install 'hetero-pp[{name}]'") from None
