"""Lines of a command as JSON objects."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stderr, redirect_stdout
from typing import Any

from made_up_run import START, waiting
from typer.testing import CliRunner

from hetero_pp.messages.messages_pb2 import (
    CONTRIBUTING,
    RESTARTED,
    WENT_ON,
    MembershipEvent,
    MembershipEventKind,
    Report,
)
from hetero_pp.program.cli import app
from hetero_pp.program.report.output import (
    about_report,
    complain,
    name_run,
    printed_as_json,
    standard_output,
    tell,
)


def membership_event(what: MembershipEventKind) -> Report:
    return Report(
        time=START, member="exchange", membership_event=MembershipEvent(what=what, slot="home.1", replica="home")
    )


def test_each_line_is_an_object_with_its_text_unchanged() -> None:
    out, err = io.StringIO(), io.StringIO()
    lines = [
        "a line that is much longer than the 80 columns of a pipe, which the log does not wrap " * 2,
        'a "quote" \\',
    ]
    with redirect_stdout(out), redirect_stderr(err), printed_as_json():
        tell(standard_output(), lines[0])
        name_run("mine")
        with about_report(membership_event(RESTARTED)):
            tell(standard_output(), lines[1])
        with about_report(membership_event(999)):  # type: ignore[arg-type] # of a later version
            pass
        with about_report(membership_event(WENT_ON)):
            print("several\n\nlines", end="\n")
        with about_report(waiting(START, CONTRIBUTING, "dc")):
            print("waiting")
        complain("it\x1b failed")
    found: list[dict[str, Any]] = [json.loads(line) for line in out.getvalue().splitlines()]
    assert [one["text"] for one in found] == [lines[0].rstrip(), lines[1], "several", "lines", "waiting"]
    assert [one["event"] for one in found] == ["message", "restarted", "went_on", "went_on", "waiting"]
    assert [one["level"] for one in found] == ["info", "warning", "info", "info", "warning"]
    assert [one["member"] for one in found] == ["", *["home.1"] * 3, "exchange"]
    assert [one["run"] for one in found] == ["", *["mine"] * 4]
    (failed,) = map(json.loads, err.getvalue().splitlines())
    assert (failed["level"], failed["text"], failed["run"]) == ("error", "it\\x1b failed", "mine")


def test_an_error_of_a_command_is_an_object_too() -> None:
    done = CliRunner().invoke(app, ["launch", "missing.yaml", "--log-format", "json"])
    (found,) = map(json.loads, done.stderr.splitlines())
    assert (done.exit_code, found["level"]) == (2, "error")
    assert found["text"].startswith("hetero-pp: missing.yaml")
