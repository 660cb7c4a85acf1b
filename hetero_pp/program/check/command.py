"""`hetero-pp check`: describes a YAML, makes all checks, prints one line for each, and returns the exit code."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from hetero_pp.core.files import write_json
from hetero_pp.program.check.findings import Finding, FindingState, check_packages, check_python, fail, make_checks
from hetero_pp.program.report.output import standard_output, tell

SECONDS = 5.0  # seconds for all checks together, once the program is loaded
STANDARD_OUTPUT = Path("-")

_STYLES = {FindingState.OK: "green", FindingState.WARN: "yellow", FindingState.FAIL: "bold red"}
_NAME_WIDTH = 12


def check(named: str | None, overrides: Sequence[str], runs: Path, data: str | None, json_path: Path | None) -> bool:
    """Describe a YAML, and check it, a ticket or a run, and this machine. Return whether no check failed.

    Raises ConfigError with file and line for a YAML that cannot run.
    """
    found = find(named, runs, data, SECONDS, overrides, describes=json_path != STANDARD_OUTPUT)
    has_passed = all(one.state is not FindingState.FAIL for one in found.values())
    checks = [{"check": name, "state": one.state.value, "line": one.line} for name, one in found.items()]
    told = {"ok": has_passed, "checks": checks}
    if json_path == STANDARD_OUTPUT:
        print(json.dumps(told, indent=1))
    else:
        console = standard_output()
        for name, finding in found.items():
            if finding.state is FindingState.SKIP:  # of a YAML or of this machine alone, most: `--json` has the reasons
                continue
            line = f"{finding.state:<4}  {name:<{_NAME_WIDTH}} {finding.line}"
            tell(console, line, _STYLES[finding.state], hanging=" " * (_NAME_WIDTH + 7), folds=True)
        counts = Counter(one.state for one in found.values())
        shown = ", ".join(f"{counts[state]} {state}" for state in FindingState if counts[state])
        tell(console, f"{shown}: {'no check failed' if has_passed else 'mend each FAIL before you start'}")
        write_json(json_path, told)
    return has_passed


def find(
    named: str | None,
    runs: Path,
    data: str | None,
    seconds: float,
    overrides: Sequence[str] = (),
    describes: bool = False,
) -> dict[str, Finding]:
    """Return the finding of each check by its name. `describes`: print what a YAML describes before they are made.

    The packages are checked first. If PyTorch cannot be imported, no other check can be made.
    """
    first = make_checks({"python": check_python, "packages": check_packages}, seconds)
    try:
        from hetero_pp.program.check.checks import checks_of
        from hetero_pp.program.check.describe import print_run
        from hetero_pp.program.check.subject import subject_of
    except (ImportError, OSError) as error:
        why = f"a package cannot be imported ({error}), so nothing else was checked; install it again"
        return first | {"program": fail(why)}
    subject = subject_of(named, overrides, runs, data)
    if describes and subject.prepared is not None:
        print_run(subject.told, subject.prepared)
    return first | make_checks(checks_of(subject), seconds)
