"""The limit of open files that a process needs for its child processes."""

from __future__ import annotations

import resource

from hetero_pp.core.errors import ConfigError

_OPEN_FILES, _OPEN_FILES_OF_A_PROCESS = 40, 8
"""Least number of files that the launcher, and each member, opens."""


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
