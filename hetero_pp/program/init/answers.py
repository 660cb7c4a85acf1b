"""The five answers of `init`, as options or on a terminal: machines, text, model, time and name."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path

from hetero_pp.core.errors import ConfigError
from hetero_pp.core.units import SECONDS, parse_quantity
from hetero_pp.data.settings import INSTALLED, STREAMED
from hetero_pp.model.transformer import PRESETS
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
    """The answers to all questions."""

    machines: Machines
    line: Line
    text: str
    model: str | float
    length: Length
    name: str

    @classmethod
    def parse(cls, given: dict[str, str]) -> Answers:
        """Parse the texts by question. Raises ConfigError with the option that is at fault."""

        def parsed(question: str) -> object:
            try:
                return PARSERS[question](given[question])
            except ValueError as error:
                raise ConfigError((), f"--{question}: {error}") from None

        return cls(**{_FIELDS.get(question, question): parsed(question) for question in PARSERS})  # type: ignore[arg-type]


PARSERS = {
    "machines": Machines.parse,
    "line": Line.parse,
    "text": parse_text,
    "model": parse_model,
    "time": Length.parse,
    "name": valid_run_name,
}
"""Parser of each question's answer; the option has the same name."""
_FIELDS = {"time": "length"}
