"""A made-up tree of control groups, as Linux shows it to a process in a Slurm job, a systemd unit or a container."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest

from hetero_pp.program.launch import host_memory

FILES = {
    "cgroup2": ("memory.max", "memory.current", "memory.events", "max", ""),
    "cgroup": ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.oom_control", "9223372036854771712", "total_"),
}


def use_groups(
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    kind: str,
    groups: Mapping[str, int | None],
    own: str,
    root: str = "/",
) -> Path:
    """Put this process into the group `own` of a tree. Return the file that counts processes killed for memory.

    `groups`: path below the mount point -> limit in bytes. A quarter of each limit is in use, half of it a cache.
    `root`: the group that is mounted, as seen from outside of a container.
    """
    limit_file, use_file, kills, unlimited, prefix = FILES[kind]
    for path, limit in groups.items():
        group = folder / "groups" / path.strip("/")
        group.mkdir(parents=True, exist_ok=True)
        used = (limit or 0) // 4
        (group / limit_file).write_text(f"{unlimited if limit is None else limit}\n")
        (group / use_file).write_text(f"{used}\n")
        (group / "memory.stat").write_text(f"{prefix}active_file {used // 4}\n{prefix}inactive_file {used // 4}\n")
        (group / kills).write_text("low 0\noom_kill 0\n")
    (folder / "self").mkdir()
    line = f"0::{own}" if kind == "cgroup2" else f"4:memory:{own}\n1:cpu:/elsewhere\n0::/"
    (folder / "self" / "cgroup").write_text(f"{line}\n")
    mounts = [(f"{kind} {kind} rw,memory", root, folder / "groups"), ("tmpfs tmpfs rw", "/", "/sys/fs/cgroup")]
    lines = [f"3{n} 23 0:2 {above} {at} rw,relatime shared:9 - {what}\n" for n, (what, above, at) in enumerate(mounts)]
    (folder / "self" / "mountinfo").write_text("".join(lines))
    monkeypatch.setattr(host_memory, "PROC", folder)
    return folder / "groups" / own.removeprefix(root).strip("/") / kills


def use_machine(monkeypatch: pytest.MonkeyPatch, total: float, available: float) -> None:
    """Let this machine have this many bytes of memory, and no control group."""
    found = SimpleNamespace(total=total, available=available)
    monkeypatch.setattr(host_memory.psutil, "virtual_memory", lambda: found)
    monkeypatch.setattr(host_memory, "PROC", Path("/nowhere"))
