"""`hetero-pp view`: shows runs on a page, or writes the page to a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from hetero_pp.config.links import is_loopback
from hetero_pp.core.errors import ConfigError, HeteroPPError
from hetero_pp.core.ticket_text import is_ticket
from hetero_pp.core.units import format_count
from hetero_pp.program.join.membership import memberships_in
from hetero_pp.program.join.status import RunOfHost, known_run, runs_at
from hetero_pp.program.report.output import announce
from hetero_pp.program.view.admitted import MemberAuthenticator, authenticator_of
from hetero_pp.program.view.exported import export_page
from hetero_pp.program.view.record import RecordedRun
from hetero_pp.program.view.run_view import Source
from hetero_pp.program.view.serving import LOOPBACK, Served
from hetero_pp.program.view.watched import Watched
from hetero_pp.run.folder import RunFolder, run_folder
from hetero_pp.run.read import read_run

_SECONDS_TO_READ = 600.0
"""Longest time for reading a record that is exported."""


def view(runs: Path, named: Sequence[str], listen: str, export: Path | None) -> None:
    """Serve the page of these runs until an interrupt, or write it to a file.

    Raises ConfigError for a name that is no run, and for an address that cannot be opened.
    """
    folders = [_folder(runs.absolute(), name) for name in named]
    known = [] if is_loopback(listen) else [_known(folder) for folder in folders]
    authenticators = [authenticator_of(one) for one in known if one is not None]
    show(sources_of(folders), listen, export, authenticators)


def show(
    sources: Mapping[str, Source],
    listen: str = LOOPBACK,
    export: Path | None = None,
    authenticators: Sequence[MemberAuthenticator] = (),
) -> None:
    """Serve the page of some sources until an interrupt, or write it to a file."""
    served = None if export is not None else Served(sources, listen, authenticators)
    with ExitStack() as stack:
        for source in sources.values():
            source.start()
            stack.callback(source.close)
        if served is None and export is not None:
            for name, source in sources.items():
                if not source.wait(_SECONDS_TO_READ) and source.view is not None:
                    minutes = f"{_SECONDS_TO_READ / 60:.0f} minutes"
                    source.view.complain(f"the record was read for {minutes}, not to its end: the rest is missing")
                if source.view is not None:
                    _tell_problems(name, source.view.problems)
            export_page(sources, export)
            announce(f"{', '.join(sources)}: the page is in {export}")
        elif served is not None:
            announce(f"{', '.join(sources)}: {served.url} (Ctrl-C ends the page)")
            served.run()


def _tell_problems(name: str, problems: Sequence[str]) -> None:
    """Print what is missing or damaged in one line. The page lists all of it."""
    if problems:
        more = f"; the page lists {format_count(len(problems) - 1, 'more problem')}" if len(problems) > 1 else ""
        announce(f"{name}: {problems[0]}{more}")


def sources_of(folders: Sequence[RunFolder]) -> dict[str, Source]:
    """Return the runs by the names that the page uses. Raises ConfigError."""
    found: dict[str, Source] = {}
    for folder in folders:
        name, number = folder.path.resolve().name, 2
        label = name
        while label in found:
            label, number = f"{name} ({number})", number + 1
        found[label] = _source(folder)
    return found


def _source(folder: RunFolder) -> Source:
    """Return the run of a folder: its record if this host has it, else what its exchange tells. Raises ConfigError."""
    if folder.config.is_file():
        return RecordedRun(folder)
    for membership in memberships_in(folder):
        own = RunFolder(folder.path, f"config-{membership.slot}.yaml")
        if own.config.is_file():
            return Watched(read_run(own), membership, folder)
    raise ConfigError((), f"{folder.path}: found no record of a run and no membership, expected one of them")


def _folder(runs: Path, name: str) -> RunFolder:
    """Return the folder of a run: by its name, its path, or the address of its exchange. Raises ConfigError."""
    if ":" not in name or is_ticket(name) or Path(name).is_dir():
        return run_folder(runs, name)
    return runs_at(runs, name)[0].folder


def _known(folder: RunFolder) -> RunOfHost | None:
    """Return how this host authenticates to a run; None if it does not serve it and has not joined it."""
    with suppress(HeteroPPError):
        return known_run(folder)
    return None
