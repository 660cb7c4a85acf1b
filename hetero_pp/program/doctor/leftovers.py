"""Check of what earlier launches of the run have left: locks, processes, and an unfinished run."""

from __future__ import annotations

from pathlib import Path

import psutil

from hetero_pp.core.units import format_names
from hetero_pp.program.doctor.finding import Finding, NotChecked, fail, ok, warn
from hetero_pp.program.doctor.subject import Subject
from hetero_pp.program.launch.claim import held_parts
from hetero_pp.program.launch.unfinished import find_unfinished

_SHOWN = 4


def check_leftovers(subject: Subject) -> Finding:
    """Look for another launch of the run, for processes without a launcher, and for an unfinished run."""
    if not subject.name:
        raise NotChecked("needs a YAML, a ticket or a run")
    runs, folder = subject.runs.absolute(), subject.folder.path
    held = held_parts(runs, subject.name)
    if held:
        told = f"{folder}: a launch on this host runs {format_names(held, _SHOWN)}"
        if subject.kind == "yaml":
            return fail(f"{told}; wait until it has ended, or give this run another `name`")
        return ok(told)
    left = processes_in(folder)
    if left:
        shown = ", ".join(f"{number} ({name})" for number, name in left.items())
        return warn(f"{folder}: processes without a launcher use its files: {shown}; end them: kill {_ids(left)}")
    found = find_unfinished(subject.part.spec.config, subject.runs) if subject.kind == "yaml" else None
    if found is not None:
        return warn(f"{found}; `launch --resume` continues it, and `launch --new` moves it aside")
    return ok(f"no other launch and no process uses {folder}")


def processes_in(folder: Path) -> dict[int, str]:
    """Return the processes of this user that have files below a folder open: id -> name."""
    found = {}
    for process in psutil.process_iter(["name"]):
        try:
            paths = [Path(one.path) for one in process.open_files()]
            only_reads = "view" in process.cmdline()
        except (psutil.Error, OSError):
            continue  # of another user, or it has ended
        if any(path.is_relative_to(folder) for path in paths) and not only_reads:
            found[process.pid] = process.info["name"] or "?"
    return found


def _ids(found: dict[int, str]) -> str:
    return " ".join(map(str, found))
