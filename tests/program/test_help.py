"""Every help text begins with a verb, and names things by nouns."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from typer.main import get_command

from hetero_pp.program.cli import app

VERBS = re.compile(
    "Check|Choose|Compare|Dial|Draw|Export|Give|Inject|Join|Keep|Leave|List|Listen|Measure|Pre-train|Predict|Print|Reach|"
    "Read|Rebuild|Rehearse|Repeat|Replace|Replay|Reserve|Resume|Revoke|Serve|Set|Show|Start|Stop|Train|Use|Validate|Write"
)
RIDDLES = re.compile(r"\b(who|whom|whose|whoever|such as it|that of|those of|what is of)\b")


def _texts() -> Iterator[tuple[str, str]]:
    """Yield (name, help text) of the program, of every command and of every option."""
    program = get_command(app)
    yield "hetero-pp", program.help or ""
    for name, command in program.commands.items():  # type: ignore[attr-defined]
        parts = {f"{name} {part}": one for part, one in getattr(command, "commands", {}).items()}
        for named, one in {name: command, **parts}.items():
            yield named, one.help or ""
            for parameter in one.params:
                if parameter.param_type_name == "option":
                    yield f"{named} {parameter.opts[0]}", parameter.help or ""


def test_there_are_at_most_18_commands() -> None:
    assert len(get_command(app).commands) <= 18  # type: ignore[attr-defined]


@pytest.mark.parametrize(("what", "text"), list(_texts()))
def test_a_help_text_begins_with_a_verb(what: str, text: str) -> None:
    after_condition = re.sub(r"^With --[\w-]+: ", "", text)
    first = after_condition.split()[0].rstrip(",:;")
    assert VERBS.fullmatch(first[:1].upper() + first[1:]), f"{what}: {text}"
    assert not RIDDLES.search(text), f"{what}: {text}"
