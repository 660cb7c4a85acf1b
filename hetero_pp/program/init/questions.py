"""Asks the questions of `init` that no option has answered."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console
from rich.prompt import Prompt

from hetero_pp.core.errors import ConfigError
from hetero_pp.program.init.answers import PARSERS, Machines
from hetero_pp.program.report.output import standard_output, tell

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
