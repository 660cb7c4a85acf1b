"""The five questions of `init`: asked on a terminal or answered by options, and how each answer is parsed."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.prompt import Prompt

from hetero_pp.core.errors import ConfigError
from hetero_pp.core.units import SECONDS, parse_quantity
from hetero_pp.data.settings import INSTALLED, STREAMED
from hetero_pp.model.transformer import PRESETS
from hetero_pp.program.report.output import standard_output, tell
from hetero_pp.run.config import valid_run_name

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
    has_datacenter: bool = True
    """Whether one machine holds the whole model."""

    @classmethod
    def parse(cls, text: str) -> Machines:
        """Parse `here`, `4` or `4 + datacenter`. Raises ValueError."""
        found = _MACHINES.fullmatch(text.strip())
        if found is None:
            raise ValueError(f"found `{text}`, expected `here`, a number of homes such as `4`, or `4 + datacenter`")
        homes = int(found[1] or 0)
        return cls(homes, homes == 0 or found[2] is not None)


@dataclass(frozen=True)
class Line:
    """Access line of a home, in Mbit/s."""

    up: float
    down: float

    @classmethod
    def parse(cls, text: str) -> Line:
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
    line: Line
    text: str
    model: str | float
    time: Length
    name: str

    @classmethod
    def parse(cls, given: dict[str, str]) -> Answers:
        """Parse the texts by question. Raises ConfigError with the option that is at fault."""

        def parsed(question: str) -> object:
            try:
                return PARSERS[question](given[question])
            except ValueError as error:
                raise ConfigError((), f"--{question}: {error}") from None

        return cls(**{question: parsed(question) for question in PARSERS})  # type: ignore[arg-type]


PARSERS = {
    "machines": Machines.parse,
    "line": Line.parse,
    "text": parse_text,
    "model": parse_model,
    "time": Length.parse,
    "name": valid_run_name,
}
"""Parser of each question's answer; the option has the same name."""


DEFAULTS: Mapping[str, str] = {
    "machines": "here",
    "line": "20/100",
    "text": "standard-library",
    "model": "micro",
    "time": "10 min",
    "name": "first",
}
_QUESTIONS: Mapping[str, str] = {
    "machines": "Which machines? `here`, a number of homes such as `4`, or `4 + datacenter`",
    "line": "Mbit/s of a home's line, up/down",
    "text": "Which text? A file, a folder, `hf:` and a dataset, or `standard-library`",
    "model": "Which model? micro, 178m, 512m, 1b, or a number of parameters such as `5M`",
    "time": "How long? A time or a number of tokens, such as `10 min` or `50M tokens`",
    "name": "Which name? It is that of the YAML, and of the folder in runs/",
}


def is_interactive(console: Console) -> bool:
    """Return whether the user can be asked."""
    return console.is_terminal and sys.stdin.isatty()


def complete(given: Mapping[str, str | None]) -> dict[str, str]:
    """Return an answer to every question: as given, else asked on a terminal, else the default, which is printed."""
    console = standard_output()
    answers = {question: text for question, text in given.items() if text is not None}
    missing = [question for question in PARSERS if question not in answers]
    ask = is_interactive(console)
    for question in missing:
        if question == "line" and not _has_homes(answers["machines"]):
            answers[question] = DEFAULTS[question]
        elif ask:
            answers[question] = _asked(console, question)
        else:
            answers[question] = DEFAULTS[question]
            tell(console, f"--{question}: not given, so it is `{DEFAULTS[question]}`")
    return answers


def _has_homes(machines: str) -> bool:
    try:
        return Machines.parse(machines).homes > 0
    except ValueError:
        return False


def _asked(console: Console, question: str) -> str:
    """Ask until the answer can be parsed. Raises ConfigError at the end of the input."""
    parse: Callable[[str], Any] = PARSERS[question]
    while True:
        try:
            text = Prompt.ask(_QUESTIONS[question], console=console, default=DEFAULTS[question])
            parse(text)
        except ValueError as error:
            tell(console, str(error))
        except EOFError:
            raise ConfigError((), f"--{question}: found the end of the input, expected an answer") from None
        else:
            return text
