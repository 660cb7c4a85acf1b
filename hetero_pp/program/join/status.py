"""`hetero-pp status`: prints the state of a run, as its exchange or its folder on this host says."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

from hetero_pp.config.folder import RunFolder, own_parts, run_folder
from hetero_pp.config.lines import LAUNCHER
from hetero_pp.config.yaml_file import config_of, read_run
from hetero_pp.core.errors import ConfigError, HeteroPPError, LinkTimeout, Refused
from hetero_pp.core.files import write_json
from hetero_pp.core.ticket_text import is_ticket
from hetero_pp.core.units import format_seconds
from hetero_pp.messages.messages_pb2 import StatusReply
from hetero_pp.program.join.invite import good_for
from hetero_pp.program.join.membership import Wait, has_joined, memberships_in, waits_in
from hetero_pp.program.join.on_disk import RunOnDisk, is_running, read_run_on_disk
from hetero_pp.program.join.status_tables import as_json, print_status, print_tickets
from hetero_pp.program.launch.addresses import dialled_here
from hetero_pp.program.launch.hosts import read_token
from hetero_pp.program.launch.over import RunEnd, read_over
from hetero_pp.program.report.lines import status_lines
from hetero_pp.program.report.output import announce
from hetero_pp.program.report.recorder import who_takes_part
from hetero_pp.program.report.state import RunState
from hetero_pp.rpc.admission_client import status as ask
from hetero_pp.rpc.identities import Authority, Identity, Ticket
from replica_groups.exchange.memberships import Memberships
from replica_groups.exchange.stall_detector import listed

SECONDS = 10.0
"""Seconds within which a running exchange answers."""
_SECONDS_OF_AN_ENDED_RUN = 3.0
"""Seconds to wait for an exchange whose run is said to be over; the run may have been extended since."""


def status(runs: Path, run: str, address: str | None, json_path: Path | None) -> None:
    """Print the state of a run, named by its name, its folder, HOST:PORT of its exchange, or a ticket to it.

    Raises ConfigError for a run that this host does not know, or if its exchange does not answer.
    """
    if is_ticket(run):
        found = _of_ticket(run, runs.absolute())
    elif ":" in run:
        found = _of_address(runs.absolute(), run)
    else:
        found = _of_folder(run_folder(runs, run), address)
    write_json(json_path, found)


def _of_folder(folder: RunFolder, address: str | None) -> dict[str, object]:
    """Print the state of a run, as its exchange says or else as this host knows it. Returns the same for JSON."""
    name = folder.path.name
    if waits := waits_in(folder):
        return _print_waits(name, waits)
    if folder.config.is_file() and address is None and not _may_ask(folder):
        return _print_on_disk(folder, read_run_on_disk(folder))
    over = read_over(folder)
    try:
        known = known_run(folder)
        reply = ask(address or known.address, known.identity, SECONDS if over is None else _SECONDS_OF_AN_ENDED_RUN)
    except HeteroPPError as error:
        if over is not None:
            return _print_over(name, over)
        if not isinstance(error, LinkTimeout):
            raise
        since = f"{address or known.address} did not answer within {format_seconds(SECONDS)}"
        served = "`serve` runs on this host, but is starting or does not respond"
        what = served if known.serves else "the run is over, or was stopped there"
        raise ConfigError((), f"{name}: the exchange at {since}: {what}") from None
    return _print_reply(known, reply)


def _may_ask(folder: RunFolder) -> bool:
    """Return whether an exchange on this host answers `status`: it needs a token file and TLS."""
    return folder.token.is_file() and is_running(folder) and not config_of(folder).exchange.insecure


def _print_reply(known: RunOfHost, reply: StatusReply) -> dict[str, object]:
    print_status(known.name, reply)
    if known.serves:
        config = config_of(known.folder)
        with closing(Memberships(known.folder.memberships)) as memberships:
            tickets = memberships.tickets()
        print_tickets(tickets, {one.slot: good_for(config, one.slot) for one in tickets}, time.time())
    return as_json(reply)


@dataclass(frozen=True)
class RunOfHost:
    """A run that this host serves or has joined."""

    folder: RunFolder
    address: str
    """HOST:PORT of the run's exchange."""
    identity: Identity
    """Identity with which this host authenticates to the exchange."""
    serves: bool

    @property
    def name(self) -> str:
        return self.folder.path.name


def _of_address(runs: Path, address: str) -> dict[str, object]:
    """Print the state of the run that is at an address now; several may have been there. Raises ConfigError."""
    here, complaint = runs_at(runs, address), ""
    for one in here:
        try:
            return _print_reply(one, ask(one.address, one.identity, SECONDS))
        except HeteroPPError as error:
            complaint = f"{error}: the run is over, or is not served now"
    for one in here:
        if one.serves and not is_running(one.folder):
            return _print_on_disk(one.folder, read_run_on_disk(one.folder))
        if (over := read_over(one.folder)) is not None:
            return _print_over(one.name, over)
    raise ConfigError((), complaint)


def runs_at(runs: Path, address: str) -> list[RunOfHost]:
    """Return the runs of this host that were at an address, newest first. Raises ConfigError if there are none."""
    found = []
    for path in sorted(runs.glob("*/"), key=lambda path: -path.stat().st_mtime):
        with suppress(HeteroPPError):
            found.append(known_run(RunFolder(path)))
    here = [one for one in found if one.address == address]
    if not here:
        addresses = sorted({one.address for one in found})
        known = f": known addresses: {listed(addresses)}" if addresses else ""
        raise ConfigError((), f"{runs}: found no run at {address} that this host serves or joined{known}")
    return here


def known_run(folder: RunFolder) -> RunOfHost:
    """Return the run of a folder. Raises ConfigError if this host is no part of it, Refused for a damaged folder."""
    if folder.token.is_file() and folder.config.is_file():
        listen = dialled_here(config_of(folder).exchange.listen)
        return RunOfHost(folder, listen, Authority(read_token(folder.token)).identity(LAUNCHER), serves=True)
    found = memberships_in(folder)
    if not found:
        own = f": it runs {', '.join(parts)} with the run's token" if (parts := own_parts(folder)) else ""
        what = f"found no run that this host serves or joined with a ticket{own}"
        raise ConfigError((), f"{folder.path}: {what}; run `status` on the host of the exchange")
    newest = found[0]
    if newest.has_left:
        told = f"{newest.slot} has left the run; the same `join` command returns to it"
        raise ConfigError((), f"{folder.path.name}: {told}")
    return RunOfHost(folder, newest.address, newest.identity.latest, serves=False)


# ---- when the exchange does not answer ----


def _print_waits(run: str, waits: Sequence[Wait]) -> dict[str, object]:
    """Print what the exchange last answered to processes of this host that wait for a group."""
    for wait in waits:
        more = max(wait.needed - wait.here, 0)
        until = f"{more} more needed" if more else "a group is being formed"
        since = f"for {format_seconds(max(time.time() - wait.since, 0.0))}"
        asked = f"the exchange answered {format_seconds(max(time.time() - wait.asked, 0.0))} ago"
        here = f"{wait.here} of {wait.needed} hosts are waiting"
        announce(f"{run}: this host waits for a group to form, {since}: {here}, {until}")
        announce(f"{run}: the run has finished round {wait.last_round} of {wait.rounds}; {asked}")
    return {"state": "waiting for a group", "waits": [asdict(wait) for wait in waits]}


def _print_over(run: str, over: RunEnd) -> dict[str, object]:
    """Print what this host heard at the end of a run that another host served."""
    when = f"{datetime.fromtimestamp(over.heard):%Y-%m-%d %H:%M:%S}"
    announce(f"{run}: {over.told}, as reported {when}; its exchange no longer answers")
    return {"state": "over", "told": over.told, "changed": over.heard}


_ENDS: Mapping[str, str] = {
    "running": "running on this host,",
    "over": "over",
    "interrupted": "interrupted",
    "failed": "failed",
    "killed": "ended without a summary",
}


def _print_on_disk(folder: RunFolder, found: RunOnDisk) -> dict[str, object]:
    name = folder.path.name
    why = "it was killed, or its host stopped" if found.state == "killed" else found.why
    when = f"{datetime.fromtimestamp(found.changed):%Y-%m-%d %H:%M:%S}"
    end = f"{_ENDS[found.state]} after round {found.last_round} of {found.rounds}, at {when}"
    rehearsal = "a rehearsal, which trains nothing: " if found.rehearsal else ""
    announce(f"{name}: {rehearsal}{end}{f': {why}' if why else ''}")
    trouble = _trouble(folder) if found.state == "running" else []
    for line in trouble:
        announce(f"{name}: {line}")
    if found.resume:
        announce(f"{name}: resume with: {found.resume}")
    return asdict(found) | {"trouble": trouble}


def _trouble(folder: RunFolder) -> list[str]:
    """Return lines on members that are away, and on a pause, as the record says."""
    state = RunState(read_run(folder))
    for report in who_takes_part(folder):
        state.apply(report)
    return [line for line, is_trouble in status_lines(state, time.time()) if is_trouble]


def _of_ticket(text: str, runs: Path) -> dict[str, object]:
    """Print what a ticket says: its run, its slots and its expiry. The exchange is not asked."""
    try:
        ticket = Ticket.from_text(text)
    except Refused as error:
        raise ConfigError((), str(error)) from None
    until, is_used = ticket.identity.shown.until, _is_used(ticket, RunFolder(runs / ticket.run))
    rehearsal = "a rehearsal, for " if ticket.rehearsal else ""
    slots = ticket.good_for
    state = "expired" if ticket.is_over else "used" if is_used else "open"
    words = {
        "expired": "it expired",
        "used": "it was used; the host that used it may return with it until",
        "open": "it admits one host until",
    }
    when = f"{words[state]} {datetime.fromtimestamp(until):%Y-%m-%d %H:%M}"
    told_for = f"ticket {ticket.id} is for {rehearsal}{slots}"
    announce(f"{ticket.run}: {told_for}; {when}; the exchange is at {ticket.address}")
    return {
        "run": ticket.run,
        "id": ticket.id,
        "good_for": ticket.good_for,
        "exchange": ticket.address,
        "rehearsal": ticket.rehearsal,
        "until": until,
        "state": state,
    }


def _is_used(ticket: Ticket, folder: RunFolder) -> bool:
    """Return whether a ticket was used, as far as this host knows.

    Only a host that serves the run, or has joined with the ticket, knows.
    """
    if Path(ticket.run).name != ticket.run:
        return False
    if folder.memberships.is_file():
        with closing(Memberships(folder.memberships)) as memberships:
            return any(one.id == ticket.id and one.is_used for one in memberships.tickets())
    return has_joined(folder.identity(ticket.id))
