"""Member and run of a process, as it is told at its start."""

from __future__ import annotations

from dataclasses import dataclass

from hetero_pp.config.changes import Values
from hetero_pp.config.folder import RunFolder
from hetero_pp.core.errors import HeteroPPError

FAILED = 1
CONSEQUENCE = 3
"""Exit code of a process that stopped only because another one failed."""
CRASHED = 4
"""Exit code of a process that failed, but may succeed if it is restarted."""
GONE = 5
"""Exit code of a member that cannot train here, while the run can go on without it."""

STOP = {"stop": "yes"}
"""Message by which the launcher asks a process to stop, and the process's answer.

A member saves its checkpoint and ends; the exchange closes no further round. The exchange's answer has a second key,
`round`: the last closed round. Requests to members have it, too. An exchange that is told this round answers once
members have applied it.
"""


class RankDied(HeteroPPError):
    """A rank was killed; a restart may help."""


@dataclass(frozen=True)
class ProcessJob:
    """Arguments of a process at its start. Secrets, and what is not known yet, follow over its connection."""

    member: str
    folder: RunFolder
    resume: Values | None = None
    """Keys that change from here on if the exchange resumes the run in the folder; None if the run is new."""
    again: bool = False
    """Whether the process replaces one that died, in a run that is under way."""
    device: str = "cpu"
    """Device on which the member computes; several ranks count their devices from 0."""
    open_files: tuple[int, int] | None = None
    """The launcher's limits of open files, soft and hard."""
