"""The questions of `init`: asked on a terminal or answered by options, and how each answer is parsed."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.prompt import Prompt

from hetero_pp.config.run_config import valid_run_name
from hetero_pp.core.errors import ConfigError
from hetero_pp.core.units import SECONDS, parse_quantity
from hetero_pp.data.settings import INSTALLED, STREAMED
from hetero_pp.model.transformer import PRESETS
from hetero_pp.program.report.output import standard_output, tell

_DURATIONS = {**SECONDS, "d": 86400.0, "day": 86400.0, "days": 86400.0, "hours": 3600.0}
_FACTORS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9}
_NUMBER = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([kmb]?)", re.IGNORECASE)
_TOKENS = re.compile(r"(.+?)\s*tokens?", re.IGNORECASE)
_MACHINES = re.compile(r"here|([1-9][0-9]{0,2})\s*(?:homes?)?\s*(\+\s*datacenter)?", re.IGNORECASE)
_LINE = re.compile(r"([0-9.]+)\s*/\s*([0-9.]+)(?:\s*Mbit/s)?")

MOST_PARAMETERS = 1e11


@dataclass(frozen=True)
class Machines:
    """Machines that train."""

    homes: int = 0
    has_datacenter: bool = True  # whether one machine holds the whole model

    @classmethod
    def parse(cls, text: str) -> Machines:
        """Parse `here`, `4` or `4 + datacenter`. Raises ValueError."""
        found = _MACHINES.fullmatch(text.strip())
        if found is None:
            raise ValueError(f"found `{text}`, expected `here`, a number of homes such as `4`, or `4 + datacenter`")
        homes = int(found[1] or 0)
        return cls(homes, homes == 0 or found[2] is not None)


@dataclass(frozen=True)
class LineAnswer:
    """Access line of a home, in Mbit/s."""

    up: float
    down: float

    @classmethod
    def parse(cls, text: str) -> LineAnswer:
        """Parse `20/100`. Raises ValueError."""
        found = _LINE.fullmatch(text.strip())
        try:
            up, down = (float(one) for one in found.groups()) if found else (0.0, 0.0)
        except ValueError:
            up = down = 0.0
        if not 0 < min(up, down) <= max(up, down) < math.inf:
            raise ValueError(f"found `{text}`, expected Mbit/s up and down, such as `20/100`")
        return cls(up, down)


@dataclass(frozen=True)
class Length:
    """Length of the run: seconds, or tokens."""

    seconds: float | None = None
    tokens: float | None = None

    @classmethod
    def parse(cls, text: str) -> Length:
        """Parse `10 min` or `50M tokens`. Raises ValueError."""
        tokens = _TOKENS.fullmatch(text.strip())
        try:
            found = cls(tokens=_number(tokens[1])) if tokens else cls(parse_quantity(text, _DURATIONS, "10 min"))
        except ValueError:
            found = cls(0.0)
        if not 0 < (found.seconds or found.tokens or 0.0) < math.inf:
            raise ValueError(f"found `{text}`, expected a time or a number of tokens, such as `10 min` or `50M tokens`")
        return found


def parse_model(text: str) -> str | float:
    """Return the name of a preset, or a number of parameters such as 5M. Raises ValueError."""
    name = text.strip().lower()
    if name in PRESETS:
        return name
    expected = f"expected {', '.join(PRESETS)}, or a number of parameters such as `5M`"
    try:
        count = _number(name)
    except ValueError:
        count = 0.0
    if not 0 < count <= MOST_PARAMETERS:
        raise ValueError(f"found `{text}`, {expected}")
    return count


def parse_text(text: str) -> str:
    """Return the name of a corpus, unchanged. Raises ValueError for a path that does not exist."""
    if text in INSTALLED or text.startswith(STREAMED) or Path(text).expanduser().exists():
        return text
    names = ", ".join(f"`{name}`" for name in INSTALLED)
    raise ValueError(f"found `{text}`, expected a file or folder that exists, `hf:` and a dataset, or one of {names}")


def _number(text: str) -> float:
    found = _NUMBER.fullmatch(text.strip())
    if found is None:
        raise ValueError
    return float(found[1]) * _FACTORS[found[2].lower()]


@dataclass(frozen=True)
class Answers:
    machines: Machines
    line: LineAnswer
    text: str
    model: str | float
    time: Length
    name: str

    @classmethod
    def parse(cls, given: dict[str, str]) -> Answers:
        """Parse the texts by question. Raises ConfigError with the option that is at fault."""

        def parsed(question: str) -> object:
            try:
                return QUESTIONS[question].parse(given[question])
            except ValueError as error:
                raise ConfigError((), f"--{question}: {error}") from None

        return cls(**{question: parsed(question) for question in QUESTIONS})  # type: ignore[arg-type]


@dataclass(frozen=True)
class Question:
    """A question of `init`."""

    text: str
    default: str
    parse: Callable[[str], object]  # raises ValueError for a wrong answer


QUESTIONS: Mapping[str, Question] = {
    "machines": Question(
        "Which machines? `here`, a number of homes such as `4`, or `4 + datacenter`", "here", Machines.parse
    ),
    "line": Question("Mbit/s of a home's line, up/down", "20/100", LineAnswer.parse),
    "text": Question(
        "Which text? A file, a folder, `hf:` and a dataset, or `standard-library`", "standard-library", parse_text
    ),
    "model": Question(
        "Which model? micro, 178m, 512m, 1b, or a number of parameters such as `5M`", "micro", parse_model
    ),
    "time": Question(
        "How long? A time or a number of tokens, such as `10 min` or `50M tokens`", "10 min", Length.parse
    ),
    "name": Question("Which name? It is that of the YAML, and of the folder in runs/", "first", valid_run_name),
}
"""Questions by name; the option of an answer has the same name."""


def is_interactive(console: Console) -> bool:
    """Return whether the user can be asked."""
    return console.is_terminal and sys.stdin.isatty()


def complete(given: Mapping[str, str | None]) -> dict[str, str]:
    """Return an answer to every question: as given, else asked on a terminal, else the default, which is printed."""
    console = standard_output()
    answers = {question: text for question, text in given.items() if text is not None}
    ask = is_interactive(console)
    for name, question in QUESTIONS.items():
        if name in answers:
            continue
        is_needed = name != "line" or _has_homes(answers["machines"])
        answers[name] = _asked(console, name, question) if ask and is_needed else question.default
        if is_needed and not ask:
            tell(console, f"--{name}: not given, so it is `{question.default}`")
    return answers


def _has_homes(machines: str) -> bool:
    try:
        return Machines.parse(machines).homes > 0
    except ValueError:
        return False


def _asked(console: Console, name: str, question: Question) -> str:
    """Ask until the answer can be parsed. Raises ConfigError at the end of the input."""
    while True:
        try:
            text = Prompt.ask(question.text, console=console, default=question.default)
            question.parse(text)
        except ValueError as error:
            tell(console, str(error))
        except EOFError:
            raise ConfigError((), f"--{name}: found the end of the input, expected an answer") from None
        else:
            return text
