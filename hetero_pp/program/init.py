"""`hetero-pp init`: asks five questions, and writes a commented YAML from the answers.

The planner chooses boundaries, and the simulator the rounds. Without the planner the boundary is the README's: half of
the dimensions, 4 bits each.
"""

from __future__ import annotations

import json
import math
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.prompt import Prompt

from hetero_pp.config.predictions import ASSUMED, CATALOG
from hetero_pp.config.run_config import RunConfig, valid_run_name
from hetero_pp.config.spec import RunSpec
from hetero_pp.config.yaml_file import ConfigFile
from hetero_pp.core.device import accelerators, name_of
from hetero_pp.core.errors import ConfigError
from hetero_pp.core.files import write_whole
from hetero_pp.core.units import (
    SECONDS,
    format_count,
    format_duration,
    format_percent,
    format_ratio,
    format_seconds,
    parse_quantity,
)
from hetero_pp.core.yaml_reader import parse_yaml
from hetero_pp.data.corpora import corpus_bytes
from hetero_pp.data.settings import INSTALLED, STREAMED, DataSettings
from hetero_pp.data.tokenizers import load_tokenizer
from hetero_pp.model.transformer import PRESETS, ModelSettings, ModelShape
from hetero_pp.program.launch.host_memory import host_memory
from hetero_pp.program.launch.this_machine import usable_cores
from hetero_pp.program.report.output import announce, standard_output, tell
from hetero_pp.simulator.costs import HOW_TO_NAME
from hetero_pp.simulator.planner.search import search
from hetero_pp.simulator.prediction import Prediction, predict

_DURATIONS = {**SECONDS, "d": 86400.0, "day": 86400.0, "days": 86400.0, "hours": 3600.0}
_FACTORS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9}
_NUMBER = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([kmb]?)", re.IGNORECASE)
_TOKENS = re.compile(r"(.+?)\s*tokens?", re.IGNORECASE)
_MACHINES = re.compile(r"here|([1-9][0-9]{0,2})\s*(?:homes?)?\s*(\+\s*datacenter)?", re.IGNORECASE)

MOST_PARAMETERS = 1e11


class Answers(NamedTuple):
    """The answers, by question."""

    machines: tuple[int, bool]  # number of homes, and whether one machine holds the whole model
    line: tuple[float, float]  # Mbit/s of a home, up and down
    text: str
    model: str | float  # name of a preset, or number of parameters
    time: tuple[float, bool]  # length of the run, and whether it is in tokens instead of seconds
    name: str


def _parse_machines(text: str) -> tuple[int, bool]:
    if (found := _MACHINES.fullmatch(text)) is None:
        raise ValueError
    homes = int(found[1] or 0)
    return homes, homes == 0 or found[2] is not None


def _parse_line(text: str) -> tuple[float, float]:
    up, down = text.removesuffix("Mbit/s").split("/")
    return _positive(float(up)), _positive(float(down))


def _parse_text(text: str) -> str:
    if not (text in INSTALLED or text.startswith(STREAMED) or Path(text).expanduser().exists()):
        raise ValueError
    return text


def _parse_model(text: str) -> str | float:
    return text.lower() if text.lower() in PRESETS else _positive(_number(text), MOST_PARAMETERS)


def _parse_length(text: str) -> tuple[float, bool]:
    tokens = _TOKENS.fullmatch(text)
    return _positive(_number(tokens[1]) if tokens else parse_quantity(text, _DURATIONS, "10 min")), tokens is not None


def _number(text: str) -> float:
    if (found := _NUMBER.fullmatch(text)) is None:
        raise ValueError
    return float(found[1]) * _FACTORS[found[2].lower()]


def _positive(number: float, most: float = sys.float_info.max) -> float:
    if not 0 < number <= most:
        raise ValueError
    return number


class Question(NamedTuple):
    """A question of `init`."""

    text: str
    default: str
    parse: Callable[[str], object]  # raises ValueError for a wrong answer
    expected: str = ""  # what an answer is, in words; empty if the error of `parse` says so

    def answered(self, text: str) -> object:
        """Return an answer. Raises ValueError that says what was found and what is expected."""
        try:
            return self.parse(text.strip())
        except ValueError as error:
            told = f"found `{text}`, expected {self.expected}" if self.expected else str(error)
            raise ValueError(told) from None


QUESTIONS: Mapping[str, Question] = {
    "machines": Question(
        "Which machines? `here`, a number of homes such as `4`, or `4 + datacenter`",
        "here",
        _parse_machines,
        "`here`, a number of homes such as `4`, or `4 + datacenter`",
    ),
    "line": Question("Mbit/s of a home's line, up/down", "20/100", _parse_line, "Mbit/s up and down, such as `20/100`"),
    "text": Question(
        "Which text? A file, a folder, `hf:` and a dataset, or `standard-library`",
        "standard-library",
        _parse_text,
        f"a file or folder that exists, `hf:` and a dataset, or one of {', '.join(f'`{one}`' for one in INSTALLED)}",
    ),
    "model": Question(
        "Which model? micro, 178m, 512m, 1b, or a number of parameters such as `5M`",
        "micro",
        _parse_model,
        f"{', '.join(PRESETS)}, or a number of parameters such as `5M`",
    ),
    "time": Question(
        "How long? A time or a number of tokens, such as `10 min` or `50M tokens`",
        "10 min",
        _parse_length,
        "a time or a number of tokens, such as `10 min` or `50M tokens`",
    ),
    "name": Question("Which name? It is that of the YAML, and of the folder in runs/", "first", valid_run_name),
}
"""Questions by name; the option of an answer has the same name."""


def is_interactive(console: Console) -> bool:
    """Return whether the user can be asked."""
    return console.is_terminal and sys.stdin.isatty()


def answers_of(given: Mapping[str, str | None]) -> Answers:
    """Return an answer to every question: as given, else asked on a terminal, else the default, which is printed.

    Raises ConfigError with the option of an answer that is wrong.
    """
    console, found = standard_output(), dict[str, Any]()
    ask = is_interactive(console)
    for name, question in QUESTIONS.items():
        text = given[name]
        if text is None and name == "line" and found["machines"][0] == 0:  # no line is needed
            text = question.default
        elif text is None and not ask:
            text = question.default
            tell(console, f"--{name}: not given, so it is `{text}`")
        while name not in found:
            try:
                typed = Prompt.ask(question.text, console=console, default=question.default) if text is None else text
                found[name] = question.answered(typed)
            except ValueError as error:
                if text is not None:
                    raise ConfigError((), f"--{name}: {error}") from None
                tell(console, str(error))
            except EOFError:
                raise ConfigError((), f"--{name}: found the end of the input, expected an answer") from None
    return Answers(**found)


# ---- from the answers to a configuration ----


TARGET_UTILIZATIONS = (0.9, 0.7)
"""Utilizations relative to free links. The planner tries to reach the first, then the next; else it chooses nothing."""

BATCH_SIZE, MOST_STEPS, FEWEST_STEPS = 8, 50, 2
_FEWEST_ROUNDS = 10  # rounds that a run should have; shorter runs have shorter rounds
MOST_STAGES = 4  # homes of a group, if their number can be divided so: the default of `plan.stages`
_SMALL_MODEL, _SMALL_TEXT = 20e6, 2e6  # parameters, and bytes of text, below which the defaults of small runs apply


@dataclass(frozen=True)
class Draft:
    """A configuration, and what the comments of its YAML say."""

    sections: dict[str, Any]
    parameters: int
    boundary: str  # origin of the boundary in words; empty without a boundary
    machine: str  # hardware that the prediction assumes, in words
    prediction: Prediction

    @property
    def rounds(self) -> int:
        return int(self.sections["outer"]["rounds"])


def draft(answers: Answers, hardware: str | None) -> Draft:
    """Return the configuration for these answers. Raises ConfigError if it cannot run."""
    data: dict[str, Any] = {"corpus": answers.text}
    settings = DataSettings.model_validate(data)
    if settings.streamed is None and corpus_bytes(settings) < _SMALL_TEXT:
        data |= {"validation_share": 0.1, "validation_sequences": 16}
    vocabulary = load_tokenizer(settings).vocabulary
    (homes, _), (up, down) = answers.machines, answers.line
    # A group of that many homes needs as many layers.
    model = model_of(answers.model, vocabulary, stages_of(homes, homes) if homes else 1)
    shape = ModelSettings.model_validate(model).resolve(vocabulary)
    is_small = (parameters := parameters_of(shape)) < _SMALL_MODEL
    sections: dict[str, Any] = {
        "name": answers.name,
        "threads": 1 if homes else usable_cores(),
        "model": model,
        "data": {**data, "sequence_length": 128 if is_small else 1024},
        "inner": {"steps": MOST_STEPS, "learning_rate": 6e-3 if is_small else 1e-3, "warmup_steps": 10},
        "outer": {"rounds": 1},
        "lines": {},
        "replicas": _replicas(*answers.machines, shape.layers),
        "simulate": _simulated(homes, hardware),
    }
    if homes:
        sections["lines"] = {"home": {"up": f"{up:g} Mbit/s", "down": f"{down:g} Mbit/s", "latency": "15 ms"}}
    boundary = _planned(sections, vocabulary)
    # Choose steps and rounds so that the run has the length that was asked for.
    inner = sections["inner"]
    prediction = predict(RunSpec(_config(sections), vocabulary))
    rounds = _rounds(sections, answers, prediction)
    if rounds < _FEWEST_ROUNDS:
        inner["steps"] = max(FEWEST_STEPS, int(inner["steps"] * rounds / _FEWEST_ROUNDS))
        prediction = predict(RunSpec(_config(sections), vocabulary))
        rounds = _rounds(sections, answers, prediction)
    sections["outer"]["rounds"] = max(1, round(rounds))
    inner["warmup_steps"] = max(1, min(inner["steps"] * sections["outer"]["rounds"] // 10, 500))
    machine = sections["simulate"]["machine"]
    told = "the cores of this machine" if machine == "here" else f"`{machine}` for each member"
    return Draft(sections, parameters, boundary, told, prediction)


def _replicas(homes: int, has_datacenter: bool, layers: int) -> list[dict[str, Any]]:
    """Return the replicas: the whole model in a datacenter or here, and groups of homes."""
    whole = {"name": "dc", "kind": "datacenter", "batch_size": BATCH_SIZE}
    found: list[dict[str, Any]] = [whole] if has_datacenter else []
    if homes:
        stages = stages_of(homes, layers)
        group: dict[str, Any] = {
            "name": "home",
            "kind": "participants",
            "stages": {"count": stages, "line": "home"},
            "batch_size": BATCH_SIZE,
            "micro_batches": 4 if stages > 1 else 1,
        }
        if stages > 1:
            group["boundary"] = {"rank": 0.5, "bits": 4}
        found.append(group | ({"count": homes // stages} if stages < homes else {}))
    return found


def stages_of(homes: int, layers: int) -> int:
    """Return the homes of each group: the largest divisor up to MOST_STAGES, else the largest that the layers allow.

    A home then holds the whole model by itself if no other number divides the homes.
    """
    divisors = [count for count in range(1, homes + 1) if homes % count == 0]
    small = [count for count in divisors if 1 < count <= min(MOST_STAGES, layers)]
    return max(small or [count for count in divisors if count <= layers])


def _simulated(homes: int, hardware: str | None) -> dict[str, Any]:
    """Return the `simulate` section: the hardware that was named, else this machine's for a run here."""
    if hardware is not None:
        if hardware not in CATALOG:
            raise ConfigError((), f"--hardware: found `{hardware}`, expected one of {', '.join(CATALOG)}")
        return {"machine": hardware}
    if homes:
        return {"machine": ASSUMED}
    if gpu := next(iter(accelerators()), None):
        own = name_of(gpu).lower().replace(" ", "-")
        return {"machine": next((name for name in CATALOG if name.removeprefix("rtx-") in own), "rtx-3090")}
    cores, core = usable_cores(), CATALOG[ASSUMED]
    here = {
        "flops": f"{cores * core.flops / 1e9:g} GFLOP/s",
        "mfu": core.mfu,
        "memory": f"{host_memory().total / 1e9:.3g} GB",
        "memory_bandwidth": f"{cores * core.memory_bandwidth / 8e9:g} GB/s",
    }
    return {"machine": "here", "hardware": {"here": here}}


def _config(sections: dict[str, Any]) -> RunConfig:
    config = RunConfig.model_validate(sections)
    config.check()
    return config


def _planned(sections: dict[str, Any], vocabulary: int) -> str:
    """Let the planner choose the boundary and the micro-batches; return the origin of the boundary in words."""
    group = next((one for one in sections["replicas"] if "boundary" in one), None)
    if group is None:
        return ""
    config = _config(sections)
    for target in TARGET_UTILIZATIONS:
        found = search(config, vocabulary, target)
        if found.reached:
            break
    else:
        return f"a default: the planner reaches {format_percent(found.utilization)} of the speed with free links"
    chosen = next(one for one in found.config.replicas if one.name.startswith("home"))
    group["micro_batches"] = chosen.micro_batches
    group["boundary"] = chosen.model_dump(mode="json", exclude_defaults=True).get("boundary") or {"rank": "full"}
    return f"chosen by the planner: {format_percent(found.utilization)} of the speed with free links"


def _rounds(sections: dict[str, Any], answers: Answers, prediction: Prediction) -> float:
    length, is_in_tokens = answers.time
    if not is_in_tokens:
        return length / prediction.round_seconds
    batches = sum(one["batch_size"] * one.get("count", 1) for one in sections["replicas"])
    tokens = batches * sections["data"]["sequence_length"] * sections["inner"]["steps"]
    return math.ceil(length / tokens)


_HEAD_WIDTH, _LEAST_WIDTH, _MOST_WIDTH = 64, 64, 16384
_LAYER_WIDTH = 128  # width for each layer, from the papers' models: 1024 / 9, 1536 / 12, 2048 / 16
_FEWEST_LAYERS = 4
_FEED_FORWARD = 8 / 3


def model_of(size: str | float, vocabulary: int, layers: int) -> dict[str, str | int]:
    """Return the `model` section: a preset, or the shape whose number of parameters is nearest to `size`.

    `layers`: least number of layers.
    """
    if isinstance(size, str):
        return {"preset": size}
    found, least = dict[str, str | int](), math.inf
    for width in range(_LEAST_WIDTH, _MOST_WIDTH + 1, _HEAD_WIDTH):
        model: dict[str, str | int] = {
            "width": width,
            "layers": max(_FEWEST_LAYERS, layers, round(width / _LAYER_WIDTH)),
            "heads": max(2, width // _HEAD_WIDTH),
            "feed_forward": _HEAD_WIDTH * round(_FEED_FORWARD * width / _HEAD_WIDTH),
        }
        shape = ModelSettings.model_validate(model).resolve(vocabulary)
        distance = abs(math.log(parameters_of(shape) / size))
        if distance < least:
            found, least = model, distance
    return found


def parameters_of(shape: ModelShape) -> int:
    """Return the number of parameters of a model."""
    layer = shape.attention_numbers + 3 * shape.width * shape.feed_forward + 2 * shape.width
    return shape.layers * layer + shape.width + 2 * shape.vocabulary * shape.width


# ---- the command ----


_PORT = 47600


def init(path: Path | None, given: Mapping[str, str | None], hardware: str | None, force: bool) -> None:
    """Write a first YAML, by default NAME.yaml. Raises ConfigError for a file that exists, and for wrong answers."""
    if path is not None:
        _require_free(path, force)
        given = {**given, "name": given["name"] or path.stem}
    answers = answers_of(given)
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
    rows = ((text, f"  # {comment}" if comment else "") for text, comment in _lines(found, str(path)))
    write_whole(path, "".join(f"{text:<{_COLUMN - 2}}{comment}".rstrip() + "\n" for text, comment in rows).encode())
    ConfigFile(path)
    _tell_next(path, answers, found)


def _require_free(path: Path, force: bool) -> None:
    if path.exists() and not force:
        raise ConfigError((), f"{path}: found a file of this name, expected none; --force replaces it")


def _tell_next(path: Path, answers: Answers, found: Draft) -> None:
    (homes, has_datacenter), rounds, seconds = answers.machines, found.rounds, found.prediction.round_seconds
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
        if has_datacenter:
            announce(f"with real homes: hetero-pp invite {answers.name} --slot dc --address HOST:{_PORT}")


# ---- the YAML, with a short comment at each key that a user may want to change ----


_COLUMN = 40


def _lines(draft: Draft, path: str) -> Iterator[tuple[str, str]]:
    """Yield each line of the YAML that is written to `path`, and a short comment at each key of a user."""
    found, rounds = draft.sections, draft.rounds
    data, inner = found["data"], found["inner"]
    total = format_duration(rounds * draft.prediction.round_seconds)
    yield "# `hetero-pp init` wrote this file. docs/configuration.md explains the keys, docs/reference lists all.", ""
    yield f"#   hetero-pp launch {shlex.quote(path) if path.isprintable() else 'YAML'}", ""
    yield f"name: {_quoted(found['name'])}", "The run writes its files to the folder of this name in runs/."
    if found["threads"] > 1:
        yield f"threads: {found['threads']}", "Each process computes with this many cores."
    yield "", ""
    yield f"model: {_flow(found['model'])}", f"This model has {draft.parameters:,} parameters."
    yield "data:", ""
    yield f"  corpus: {_quoted(data['corpus'])}", "This text is trained on; a path is your own text."
    yield "  tokenizer: bytes", "A token is a byte; a path to a tokenizer.json is another tokenizer."
    yield f"  sequence_length: {data['sequence_length']}", "A sequence has this many tokens."
    if "validation_share" in data:
        yield f"  validation_share: {data['validation_share']:g}", "This share is held out: the text is small."
        sequences = data["validation_sequences"]
        yield f"  validation_sequences: {sequences}", "The validation loss is computed on these."
    yield "inner:", ""
    yield f"  steps: {inner['steps']}", "A round has this many steps; then replicas exchange changes."
    yield f"  learning_rate: {inner['learning_rate']:g}", "This is the peak of the cosine."
    yield f"  warmup_steps: {inner['warmup_steps']}", "The learning rate rises for this many steps."
    yield "outer:", ""
    seconds = format_seconds(draft.prediction.round_seconds)
    yield f"  rounds: {rounds}", f"A round is predicted to take {seconds}, and the run {total}."
    for name, line in found["lines"].items():
        yield "lines:", ""
        yield f"  {name}: {_flow(line)}", "`launch` slows the traffic of a home down to its line."
    yield "replicas:", ""
    for replica in found["replicas"]:
        yield from _replica(replica, draft)
    yield "simulate:", ""
    for name, hardware in found["simulate"].get("hardware", {}).items():
        yield f"  hardware: {{{name}: {_flow(hardware)}}}", ""
    yield f"  machine: {found['simulate']['machine']}", "Predictions assume this; `calibrate` measures."


def _replica(replica: Mapping[str, Any], draft: Draft) -> Iterator[tuple[str, str]]:
    if replica["kind"] == "datacenter":
        yield f"  - name: {replica['name']}", "This replica holds the whole model on one machine."
        yield "    kind: datacenter", ""
        yield f"    batch_size: {replica['batch_size']}", "A step has this many sequences."
        return
    yield f"  - name: {replica['name']}", "The homes of a group hold one replica together."
    yield "    kind: participants", ""
    if "count" in replica:
        yield f"    count: {replica['count']}", "There are this many groups."
    yield f"    stages: {_flow(replica['stages'])}", "Each home of a group computes some layers."
    yield f"    batch_size: {replica['batch_size']}", "A step has this many sequences."
    if "boundary" in replica:
        parts = "Homes work on parts of the batch at the same time."
        yield f"    micro_batches: {replica['micro_batches']}", parts
        boundary = dict(replica["boundary"])
        if isinstance(boundary.get("rank"), float):
            boundary["rank"] = format_ratio(boundary["rank"])
        yield f"    boundary: {_flow(boundary)}", f"This is {draft.boundary}."


def _flow(section: Mapping[str, Any]) -> str:
    return f"{{{', '.join(f'{key}: {value}' for key, value in section.items())}}}"


def _quoted(text: str) -> str:
    """Return a text as YAML: in quotes if it is more than a plain name or path."""
    is_plain = text.replace("/", "").replace("-", "").replace(".", "").replace("_", "").isalnum()
    if is_plain and parse_yaml(text) == text:  # not a number, a date or `true`
        return text
    return "'" + text.replace("'", "''") + "'" if text.isprintable() else json.dumps(text)
