"""`hetero-pp init`: asks, writes a commented YAML, and prints what to do next."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from hetero_pp.config.yaml_file import ConfigFile
from hetero_pp.core.errors import ConfigError
from hetero_pp.core.files import write_whole
from hetero_pp.core.units import format_count, format_duration, format_seconds
from hetero_pp.data.settings import STREAMED
from hetero_pp.program.init.draft import Draft, draft
from hetero_pp.program.init.questions import Answers, complete
from hetero_pp.program.init.yaml_text import yaml_of
from hetero_pp.program.report.output import announce, standard_output
from hetero_pp.simulator.costs import HOW_TO_NAME

_PORT = 47600


def init(path: Path | None, given: Mapping[str, str | None], hardware: str | None, force: bool) -> None:
    """Write a first YAML, by default NAME.yaml. Raises ConfigError for a file that exists, and for wrong answers."""
    if path is not None:
        _require_free(path, force)
        given = {**given, "name": given["name"] or path.stem}
    answers = Answers.parse(complete(given))
    path = path or Path(f"{answers.name}.yaml")
    _require_free(path, force)
    console = standard_output()
    try:
        with console.status("planning"):
            found = draft(answers, hardware)
    except ConfigError as error:
        told = str(error).replace(HOW_TO_NAME, "name it with `--hardware`, such as `--hardware h100`")
        if error.key[:1] == ("replicas",) and hardware is None and "--hardware" not in told:
            told += "; `--hardware`, such as `--hardware h100`, predicts for another machine"
        raise ConfigError((), f"{path} was not written: {told}") from None
    write_whole(path, yaml_of(found, str(path)).encode())
    ConfigFile(path)
    _tell_next(path, answers, found)


def _require_free(path: Path, force: bool) -> None:
    if path.exists() and not force:
        raise ConfigError((), f"{path}: found a file of this name, expected none; --force replaces it")


def _tell_next(path: Path, answers: Answers, found: Draft) -> None:
    homes, rounds, seconds = answers.machines.homes, found.rounds, found.prediction.round_seconds
    length = f"{format_count(rounds, 'round')} of {format_seconds(seconds)}, {format_duration(rounds * seconds)} in all"
    announce(f"{path}: {length}, as predicted with {found.machine}; `hetero-pp calibrate {path}` measures this machine")
    if answers.text.startswith(STREAMED) and find_spec("datasets") is None:
        announce("its text needs a package: pip install 'hetero-pp[datasets]'")
    shown = shlex.quote(str(path))
    announce(f"next: hetero-pp doctor {shown}")
    announce(f"next: hetero-pp launch {shown}{'    # all machines as processes of this one' if homes else ''}")
    if homes:
        own_lines = "--set replicas.home.stages.line=null"
        announce(f"with real homes: hetero-pp serve {shown} --set exchange.listen=0.0.0.0:{_PORT} {own_lines}")
        announce(f"with real homes: hetero-pp invite {answers.name} --address HOST:{_PORT}    # a ticket for each home")
        if answers.machines.has_datacenter:
            announce(f"with real homes: hetero-pp invite {answers.name} --slot dc --address HOST:{_PORT}")
