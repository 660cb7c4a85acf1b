"""What the benchmarks' command lines have in common: `--json FILE`, `--smoke`, and one line where an extra lacks."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def parse(parser: argparse.ArgumentParser, smallest: Mapping[str, Any]) -> argparse.Namespace:
    """The arguments; with --smoke, which writes no file, `smallest` takes the place of the defaults."""
    ends = parser.add_mutually_exclusive_group()
    ends.add_argument("--json", type=Path, help="write the results to this file")
    ends.add_argument("--smoke", "--quick", action="store_true", help="run everything at its smallest, within seconds")
    if parser.parse_known_args()[0].smoke:
        parser.set_defaults(**smallest)
    return parser.parse_args()


def save(content: Mapping[str, Any], path: Path | None) -> None:
    """As JSON, if there is a path; without one, only that it could be."""
    text = json.dumps(content, indent=1) + "\n"
    if path is not None:
        path.write_text(text)


@contextmanager
def extra(name: str) -> Iterator[None]:
    """For imports of what an extra brings: where it lacks, the program ends with one line that names the extra."""
    try:
        yield
    except ModuleNotFoundError as error:
        script = f"benchmarks/{Path(sys.argv[0]).name}"
        raise SystemExit(f"{script} needs {error.name}: pip install 'hetero-pp[{name}]'") from None
