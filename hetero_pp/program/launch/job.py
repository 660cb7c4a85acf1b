"""Shared by the launcher and its processes: the job of a process, exit codes, and limits of open files."""

from __future__ import annotations

import resource
from dataclasses import dataclass

from hetero_pp.config.changes import Values
from hetero_pp.config.folder import RunFolder
from hetero_pp.core.errors import ConfigError, HeteroPPError

FAILED = 1
CONSEQUENCE = 3  # exit code of a process that stopped only because another one failed
CRASHED = 4  # exit code of a process that failed, but may succeed if it is restarted
TAKEN_OVER = 6  # exit code of the exchange once another host serves the run, or may
GONE = 5  # exit code of a member that cannot train here, while the run can go on without it

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
    again: bool = False  # whether the process replaces one that died, in a run that is under way
    device: str = "cpu"  # device on which the member computes; several ranks count their devices from 0
    lease: int = 0
    """Number of this host's lease on the run, if several hosts may serve it."""
    open_files: tuple[int, int] | None = None  # the launcher's limits of open files, soft and hard


_OPEN_FILES, _OPEN_FILES_OF_A_PROCESS = 40, 8  # least number of files that the launcher, and each member, opens


def require_open_files(processes: int) -> None:
    """Raise this process's limit of open files to what its child processes need.

    Raises ConfigError if the system does not allow it.
    """
    needed = _OPEN_FILES + _OPEN_FILES_OF_A_PROCESS * processes
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard == resource.RLIM_INFINITY or hard >= needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
        return
    told = f"found a limit of {soft} open files, expected at least {needed} for {processes} processes"
    raise ConfigError((), f"{told}; raise it with: ulimit -n {needed}")
