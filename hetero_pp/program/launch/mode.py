"""How a command starts a YAML: as a run or in another mode, and what follows it meanwhile."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.console import Console

from hetero_pp.config.folder import RunFolder
from hetero_pp.config.spec import RunSpec
from hetero_pp.config.yaml_file import ConfigFile
from hetero_pp.messages.messages_pb2 import Report
from hetero_pp.program.operate.operations import Operations
from hetero_pp.program.report.state import RunState
from hetero_pp.program.report.summary import print_result, summary_of


class Mode:
    """A run: it trains what the YAML says, and can be resumed. Subclasses start something else."""

    resumes = True
    """Whether it leaves something to resume from."""

    def of(self, file: ConfigFile) -> ConfigFile:
        """Return what starts. Raises ConfigError if it cannot."""
        return file

    def begin(self, spec: RunSpec) -> None:
        """Take in what begins, before its members start. Raises ConfigError if it cannot."""

    def watched(self, spec: RunSpec, members: Sequence[str]) -> Sequence[str]:
        """Return the members that a host needs reports of, beside its own `members`: its group's last stage."""
        last = (spec.members[member].replica.members[-1] for member in members)
        return [member for member in dict.fromkeys(last) if member not in members]

    def on_report(self, report: Report) -> None:
        """Take in a report."""

    def conclude(self, console: Console, state: RunState, folder: RunFolder) -> None:
        """Print what the end leaves. Raises RunFailed if that is nothing."""
        print_result(console, summary_of(state), folder.path)


AS_A_RUN = Mode()


@dataclass(frozen=True, kw_only=True)
class Invocation:
    """A command that starts a run, as the user typed it."""

    typed: Sequence[str] = ()
    """The command, to print how to resume."""
    since: float = field(default_factory=time.time)
    """Time at which the user typed it, in seconds since 1970."""
    operations: Operations = field(default_factory=Operations)
    """Follows the run for an operator."""
    mode: Mode = AS_A_RUN
    """Whether the YAML starts as a run or, for example, as a rehearsal."""
