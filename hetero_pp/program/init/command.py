"""`hetero-pp init`: asks, writes a commented YAML, and prints what to do next."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hetero_pp.config.yaml_file import ConfigFile
from hetero_pp.core.errors import ConfigError
from hetero_pp.core.files import write_whole
from hetero_pp.core.units import format_count, format_duration, format_ratio, format_seconds
from hetero_pp.core.yaml_reader import parse_yaml
from hetero_pp.data.settings import STREAMED
from hetero_pp.program.init.draft import Draft, draft
from hetero_pp.program.init.questions import Answers, complete
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
    announce(f"next: hetero-pp check {shown}")
    announce(f"next: hetero-pp launch {shown}{'    # all machines as processes of this one' if homes else ''}")
    if homes:
        own_lines = "--set replicas.home.stages.line=null"
        announce(f"with real homes: hetero-pp serve {shown} --set exchange.listen=0.0.0.0:{_PORT} {own_lines}")
        announce(f"with real homes: hetero-pp invite {answers.name} --address HOST:{_PORT}    # a ticket for each home")
        if answers.machines.has_datacenter:
            announce(f"with real homes: hetero-pp invite {answers.name} --slot dc --address HOST:{_PORT}")


# ---- the YAML, with a short comment at each key that a user may want to change ----


_COLUMN = 40


def yaml_of(draft: Draft, path: str) -> str:
    """Return the text of the YAML that is written to `path`."""
    return "".join(f"{line}\n" for line in _lines(draft, path))


def _lines(draft: Draft, path: str) -> Iterator[str]:
    found, rounds = draft.sections, draft.rounds
    data, inner = found["data"], found["inner"]
    total = format_duration(rounds * draft.prediction.round_seconds)
    yield "# `hetero-pp init` wrote this file. docs/configuration.md explains the keys, docs/reference lists all."
    yield f"#   hetero-pp launch {shlex.quote(path) if path.isprintable() else 'YAML'}"
    yield _key(f"name: {_quoted(found['name'])}", "The run writes its files to the folder of this name in runs/.")
    if found["threads"] > 1:
        yield _key(f"threads: {found['threads']}", "Each process computes with this many cores.")
    yield ""
    yield _key(f"model: {_flow(found['model'])}", f"This model has {draft.parameters:,} parameters.")
    yield "data:"
    yield _key(f"  corpus: {_quoted(data['corpus'])}", "This text is trained on; a path is your own text.")
    yield _key("  tokenizer: bytes", "A token is a byte; a path to a tokenizer.json is another tokenizer.")
    yield _key(f"  sequence_length: {data['sequence_length']}", "A sequence has this many tokens.")
    if "validation_share" in data:
        yield _key(f"  validation_share: {data['validation_share']:g}", "This share is held out: the text is small.")
        sequences = data["validation_sequences"]
        yield _key(f"  validation_sequences: {sequences}", "The validation loss is computed on these.")
    yield "inner:"
    yield _key(f"  steps: {inner['steps']}", "A round has this many steps; then replicas exchange changes.")
    yield _key(f"  learning_rate: {inner['learning_rate']:g}", "This is the peak of the cosine.")
    yield _key(f"  warmup_steps: {inner['warmup_steps']}", "The learning rate rises for this many steps.")
    yield "outer:"
    seconds = format_seconds(draft.prediction.round_seconds)
    yield _key(f"  rounds: {rounds}", f"A round is predicted to take {seconds}, and the run {total}.")
    for name, line in found["lines"].items():
        yield "lines:"
        yield _key(f"  {name}: {_flow(line)}", "`launch` slows the traffic of a home down to its line.")
    yield "replicas:"
    for replica in found["replicas"]:
        yield from _replica(replica, draft)
    yield "simulate:"
    for name, hardware in found["simulate"].get("hardware", {}).items():
        yield _key(f"  hardware: {{{name}: {_flow(hardware)}}}", "")
    yield _key(f"  machine: {found['simulate']['machine']}", "Predictions assume this; `calibrate` measures.")


def _replica(replica: Mapping[str, Any], draft: Draft) -> Iterator[str]:
    if replica["kind"] == "datacenter":
        yield _key(f"  - name: {replica['name']}", "This replica holds the whole model on one machine.")
        yield "    kind: datacenter"
        yield _key(f"    batch_size: {replica['batch_size']}", "A step has this many sequences.")
        return
    yield _key(f"  - name: {replica['name']}", "The homes of a group hold one replica together.")
    yield "    kind: participants"
    if "count" in replica:
        yield _key(f"    count: {replica['count']}", "There are this many groups.")
    yield _key(f"    stages: {_flow(replica['stages'])}", "Each home of a group computes some layers.")
    yield _key(f"    batch_size: {replica['batch_size']}", "A step has this many sequences.")
    if "boundary" in replica:
        parts = "Homes work on parts of the batch at the same time."
        yield _key(f"    micro_batches: {replica['micro_batches']}", parts)
        boundary = dict(replica["boundary"])
        if isinstance(boundary.get("rank"), float):
            boundary["rank"] = format_ratio(boundary["rank"])
        yield _key(f"    boundary: {_flow(boundary)}", f"This is {draft.boundary}.")


def _key(text: str, comment: str) -> str:
    return f"{text:<{_COLUMN - 2}}  # {comment}" if comment else text


def _flow(section: Mapping[str, Any]) -> str:
    return f"{{{', '.join(f'{key}: {value}' for key, value in section.items())}}}"


def _quoted(text: str) -> str:
    """Return a text as YAML: in quotes if it is more than a plain name or path."""
    is_plain = text.replace("/", "").replace("-", "").replace(".", "").replace("_", "").isalnum()
    if is_plain and parse_yaml(text) == text:  # not a number, a date or `true`
        return text
    return "'" + text.replace("'", "''") + "'" if text.isprintable() else json.dumps(text)
