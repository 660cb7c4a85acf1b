"""Memory that this process may use: the machine's, or less in a control group, such as a container or a Slurm job."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from hetero_pp.core.units import format_bytes

PROC = Path("/proc")
_FILES = {
    "cgroup2": ("memory.max", "memory.current", ""),
    "cgroup": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
}
"""File system of control groups -> files of the limit and of the use in bytes, and prefix of keys in memory.stat."""


@dataclass(frozen=True)
class HostMemory:
    """Memory in bytes."""

    total: int
    available: int
    group: str = ""  # path of the control group whose limit `total` is; empty if it is the machine's memory

    def __str__(self) -> str:
        """Return the total in words, with the control group that sets it."""
        limit = f" (the limit of its control group {self.group})" if self.group else ""
        return f"{format_bytes(self.total)} of memory{limit}"


def host_memory() -> HostMemory:
    """Return the least of what the machine, this process's control group and the groups above it allow."""
    machine = psutil.virtual_memory()
    found = HostMemory(int(machine.total), int(machine.available))
    for folder, name, kind in _groups():
        limit_file, use_file, prefix = _FILES[kind]
        limit, used = _number(folder / limit_file), _number(folder / use_file)
        if limit is None or limit >= machine.total:  # version 1 has a huge number for "no limit"
            continue
        stat = _keys(folder / "memory.stat")
        cached = sum(stat.get(f"{prefix}{key}", 0) for key in ("active_file", "inactive_file"))  # freed when needed
        free = max(0, limit - (used or 0) + cached)
        total, group = (limit, name) if limit < found.total else (found.total, found.group)
        found = HostMemory(total, min(found.available, free, limit), group)
    return found


class MemoryKills:
    """Tells which deaths are due to the kernel, which kills processes of a control group that uses up its memory."""

    def __init__(self) -> None:
        self._known = _kills()
        self._told: dict[int, str] = {}

    def explain(self, process: int, exit_code: int) -> str:
        """Return why a process was killed for memory, as the end of a sentence; empty if it died otherwise."""
        if process not in self._told:
            kills, self._told[process] = _kills(), ""
            if exit_code == -signal.SIGKILL and kills > self._known:
                self._known += 1  # another process may have been killed at the same moment
                self._told[process] = f" because memory was used up: this machine has {host_memory()}"
            else:
                self._known = kills  # such as of a rank, whose member has explained it
        return self._told[process]


def _kills() -> int:
    """Return how many processes the kernel has killed for memory: of this control group, else of the machine."""
    own = next(_groups(), None)
    files = [] if own is None else [own[0] / "memory.events", own[0] / "memory.oom_control"]
    return next((keys["oom_kill"] for keys in map(_keys, (*files, PROC / "vmstat")) if "oom_kill" in keys), 0)


def _groups() -> Iterator[tuple[Path, str, str]]:
    """Yield folder, path and file system of this process's control group of memory, then of those above it.

    A container may see its own group at the top of the file system, under the path that the group has outside.
    """
    paths = dict[str, str]()
    for line in _lines(PROC / "self" / "cgroup"):
        number, controllers, path = line.split(":", 2)
        if number == "0" or "memory" in controllers.split(","):
            paths["cgroup2" if number == "0" else "cgroup"] = path
    for line in _lines(PROC / "self" / "mountinfo"):
        before, _, after = line.partition(" - ")
        root, mounted = before.split(" ")[3:5]
        kind, _, options = after.split(" ", 2)
        if kind not in paths or (kind == "cgroup" and "memory" not in options.split(",")):
            continue
        own = paths[kind]
        inside = own.removeprefix(root.rstrip("/")).strip("/") if own.startswith(root) else ""
        folder, top = Path(mounted) / inside, Path(mounted)
        if not folder.is_dir():
            folder = top
        for one in (folder, *folder.parents):
            if (one / _FILES[kind][0]).is_file():
                yield one, "/" + "/".join(one.relative_to(top).parts), kind
            if one == top:
                break


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except OSError:  # another system than Linux
        return []


def _keys(path: Path) -> dict[str, int]:
    """Return the numbers of a file of lines `KEY NUMBER`."""
    return {key: int(value) for key, _, value in (line.partition(" ") for line in _lines(path)) if value.isdigit()}


def _number(path: Path) -> int | None:
    """Return the number that a file holds; None for `max`, or without the file."""
    text = next(iter(_lines(path)), "").strip()
    return int(text) if text.isdigit() else None
