"""Arguments and options that several commands share."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from hetero_pp.core.errors import ConfigError
from hetero_pp.core.shipped import shipped
from hetero_pp.program.commands.errors import readable_errors


def _find(path: Path) -> Path:
    """Return the path, or the shipped YAML that it names: `quickstart`, `paper/1b` or `configs/quickstart.yaml`.

    A file of the user comes first. Raises ConfigError for a name that is neither.
    """
    is_name = path.suffix == ""
    inside = path if is_name else path.relative_to("configs") if path.is_relative_to("configs") else None
    if inside is None or os.path.exists(path):  # noqa: PTH110 (it answers for names that are too long, too)
        return path
    configs = shipped("configs")
    names = [one.relative_to(configs).with_suffix("").as_posix() for one in sorted(configs.rglob("*.yaml"))]
    if inside.with_suffix("").as_posix() in names:
        return configs / inside.with_suffix(".yaml")
    with readable_errors():
        known = ", ".join(name for name in names if not name.startswith("experiments/"))
        raise ConfigError((), f"{path}: found no such file, expected a YAML or one of the shipped {known}")


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

StartNew = Annotated[
    bool, typer.Option("--new", help="Start a new run though runs/<name> is unfinished; it is moved aside.")
]


def parsed_address(option: str, text: str | None) -> str | None:
    """Return HOST:PORT as an option gave it; None without the option. Raises ConfigError for any other text."""
    from hetero_pp.config.topology import parse_address

    return None if text is None else parsed(option, parse_address, text)


def parsed(option: str, parse: Callable[[str], str], text: str) -> str:
    """Return the value of an option. Raises ConfigError with the option's name if it is not valid."""
    try:
        return parse(text)
    except ValueError as error:
        raise ConfigError((), f"{option}: {error}") from None
