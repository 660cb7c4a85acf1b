"""Checks of what a start needs: valid settings, open files, free ports, and no other launch of the run."""

from __future__ import annotations

from pathlib import Path

import psutil

from hetero_pp.core.errors import ConfigError
from hetero_pp.core.units import format_count, format_names
from hetero_pp.program.doctor.finding import Finding, NotChecked, fail, ok, warn
from hetero_pp.program.doctor.subject import Subject
from hetero_pp.program.launch.addresses import fixed_addresses, meeting_places
from hetero_pp.program.launch.claim import held_parts
from hetero_pp.program.launch.open_files import require_open_files
from hetero_pp.program.launch.unfinished import find_unfinished

_SHOWN = 4


def check_settings(subject: Subject) -> Finding:
    """Check the settings as `check` and `launch` do. Raises their errors."""
    if subject.problem:
        return fail(subject.problem)
    if subject.part_ is None:
        raise NotChecked("no YAML, ticket or run was given")
    if subject.kind == "ticket" and subject.answer.reply.refusal:
        return fail(subject.answer.reply.refusal)
    part = subject.part_.result()
    if subject.kind == "ticket":
        return ok(f"{subject.told}: open now: {format_names([slot for (slot,) in part.choices], _SHOWN)}")
    return ok(f"{subject.told}, starts {format_names(part.names, _SHOWN)} here")


def check_open_files(subject: Subject) -> Finding:
    """Check that the launcher may open enough files. Raises ConfigError as `launch` does."""
    processes = 1 if subject.part_ is None else len(subject.part.names)
    require_open_files(processes)
    return ok(f"enough for {format_count(processes, 'process', 'processes')}")


def check_ports(subject: Subject) -> Finding:
    """Try to listen at each fixed address, as `check` and `launch` do."""
    part = subject.part
    running = held_parts(subject.runs.absolute(), subject.name) if subject.kind == "run" else []
    own = [one for one in fixed_addresses(part.spec.config) if one.member in part.names and one.is_of_this_host]
    for one in own:
        if one.member in running:
            continue
        try:
            one.try_to_listen()
        except ConfigError as error:
            return fail(str(part.located(error)))
    places = [one for one in meeting_places(part.spec.config) if one.member in part.names and one.is_of_this_host]
    for one in places:
        try:
            one.try_to_listen()
        except ConfigError as error:
            return warn(f"{part.located(error)}; if this is another node of {one.member}, all is well")
    own += places
    if not own:
        return ok("no fixed port on this host; free ones are chosen")
    shown = [f"{one.address} ({'used by this run' if one.member in running else 'free'})" for one in own]
    return ok(", ".join(shown))


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
