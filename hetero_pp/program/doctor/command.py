"""`hetero-pp doctor`: makes all checks, prints one line for each, and returns the exit code."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console

from hetero_pp.core.files import write_json
from hetero_pp.program.doctor.finding import Finding, FindingState, fail, make_checks
from hetero_pp.program.doctor.packages import check_packages, check_python
from hetero_pp.program.report.output import standard_output, tell

SECONDS = 5.0
"""Seconds for all checks together, once the program is loaded."""
STANDARD_OUTPUT = Path("-")

_STYLES = {
    FindingState.OK: "green",
    FindingState.WARN: "yellow",
    FindingState.FAIL: "bold red",
    FindingState.SKIP: "dim",
}
_NAME_WIDTH = 12


def doctor(named: str | None, runs: Path, data: str | None, json_path: Path | None) -> bool:
    """Make all checks of a YAML, a ticket or a run; print or write what they found. Return whether none failed."""
    found = find(named, runs, data, SECONDS)
    checks = [{"check": name, "state": one.state.value, "line": one.line} for name, one in found.items()]
    told = {"ok": _has_passed(found), "checks": checks}
    if json_path == STANDARD_OUTPUT:
        print(json.dumps(told, indent=1))
    else:
        _print(standard_output(), found)
        write_json(json_path, told)
    return _has_passed(found)


def find(named: str | None, runs: Path, data: str | None, seconds: float) -> dict[str, Finding]:
    """Return the finding of each check by its name.

    The packages are checked first. If PyTorch cannot be imported, no other check can be made.
    """
    first = make_checks({"python": check_python, "packages": check_packages}, seconds)
    try:
        from hetero_pp.program.doctor.checks import checks_of
        from hetero_pp.program.doctor.subject import subject_of
    except (ImportError, OSError) as error:
        why = f"a package cannot be imported ({error}), so nothing else was checked; install it again"
        return first | {"program": fail(why)}
    return first | make_checks(checks_of(subject_of(named, runs, data)), seconds)


def _print(console: Console, found: Mapping[str, Finding]) -> None:
    for name, finding in found.items():
        line = f"{finding.state:<4}  {name:<{_NAME_WIDTH}} {finding.line}"
        tell(console, line, _STYLES[finding.state], hanging=" " * (_NAME_WIDTH + 7))
    counts = Counter(one.state for one in found.values())
    told = ", ".join(f"{counts[state]} {state}" for state in FindingState if counts[state])
    tell(console, f"{told}: {'no check failed' if _has_passed(found) else 'mend each FAIL before you start'}")


def _has_passed(found: Mapping[str, Finding]) -> bool:
    return all(one.state is not FindingState.FAIL for one in found.values())
