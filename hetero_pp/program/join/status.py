"""`hetero-pp status`: prints the state of a run, as its exchange says or, if it is over, its folder on this host."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from datetime import datetime
from pathlib import Path

from rich.table import Table

from hetero_pp.config.folder import RunFolder, run_folder
from hetero_pp.config.lines import RELAYED
from hetero_pp.config.member_inputs import in_words
from hetero_pp.config.yaml_file import config_of, read_run
from hetero_pp.core.errors import ConfigError, HeteroPPError, LinkTimeout
from hetero_pp.core.files import write_json
from hetero_pp.core.units import format_bytes, format_count, format_seconds, format_share
from hetero_pp.messages.messages_pb2 import SlotStatus, StatusReply
from hetero_pp.program.join.invite import good_for
from hetero_pp.program.join.membership import (
    RunOnDisk,
    is_running,
    known_run,
    read_run_on_disk,
)
from hetero_pp.program.launch.earlier import read_over
from hetero_pp.program.report.lines import status_lines
from hetero_pp.program.report.output import announce, standard_output, tell
from hetero_pp.program.report.recorder import recorded
from hetero_pp.program.report.state import RunState
from hetero_pp.rpc.admission_client import ask
from hetero_pp.rpc.limits import plain
from replica_groups.exchange.memberships import Memberships
from replica_groups.exchange.stall_detector import listed

EMPTY_SHOWN = 2  # number of empty replicas that are shown; most replicas of a run with room for many groups are empty
SECONDS = 10.0  # seconds within which a running exchange answers
_SECONDS_OF_AN_ENDED_RUN = 3.0
"""Seconds to wait for an exchange whose run is said to be over; the run may have been extended since."""


def status(runs: Path, run: str, address: str | None, json_path: Path | None) -> None:
    """Print the state of a run, named by its name or its folder.

    Raises ConfigError for a run that this host does not know, or if its exchange does not answer.
    """
    folder = run_folder(runs, run)
    write_json(json_path, _print_state(folder, address))


def _print_state(folder: RunFolder, address: str | None) -> dict[str, object]:
    """Print the state of a run, as its exchange says or else as this host knows it. Returns the same for JSON."""
    name = folder.path.name
    if folder.config.is_file() and address is None:
        # An exchange on this host answers only with a token file and TLS.
        answers = folder.token.is_file() and is_running(folder) and not config_of(folder).exchange.insecure
        if not answers:
            return _print_on_disk(folder, read_run_on_disk(folder))
    over = read_over(folder)
    try:
        known = known_run(folder)
        seconds = SECONDS if over is None else _SECONDS_OF_AN_ENDED_RUN
        reply: StatusReply = ask(address or known.address, known.identity, "Status", seconds=seconds)
    except HeteroPPError as error:
        if over is not None:
            # What this host heard at the end of a run that another host served.
            when = f"{datetime.fromtimestamp(over.heard):%Y-%m-%d %H:%M:%S}"
            announce(f"{name}: {over.told}, as reported {when}; its exchange no longer answers")
            return {"state": "over", "told": over.told, "changed": over.heard}
        if not isinstance(error, LinkTimeout):
            raise
        since = f"{address or known.address} did not answer within {format_seconds(SECONDS)}"
        served = "`serve` runs on this host, but is starting or does not respond"
        what = served if known.serves else "the run is over, or was stopped there"
        raise ConfigError((), f"{name}: the exchange at {since}: {what}") from None
    print_status(name, reply)
    if known.serves:
        config = config_of(folder)
        with closing(Memberships(folder.memberships)) as memberships:
            tickets = memberships.tickets()
        console, now = standard_output(), time.time()
        open_ = [one for one in tickets if not one.is_used and one.until > now]
        if open_:
            table = Table("Open ticket", "Admits to", "Until")
            for one in open_:
                table.add_row(one.id, good_for(config, one.slot), f"{datetime.fromtimestamp(one.until):%Y-%m-%d %H:%M}")
            console.print(table)
        used = sum(one.is_used for one in tickets)
        expired = len(tickets) - used - len(open_)
        tell(console, f"tickets: {len(open_)} open, {used} used, {expired} expired")
    return as_json(reply)


# ---- when the exchange does not answer ----


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
    trouble = []
    if found.state == "running":  # members that are away, and a pause, as the record says
        state = RunState(read_run(folder))
        for report in recorded(folder, "joined", "membership_event", "finished"):
            state.apply(report)
        trouble = [line for line, is_trouble in status_lines(state, time.time()) if is_trouble]
    for line in trouble:
        announce(f"{name}: {line}")
    if found.resume:
        announce(f"{name}: resume with: {found.resume}")
    return asdict(found) | {"trouble": trouble}


# ---- what the exchange says ----


def state_of(reply: StatusReply) -> str:
    """Return the state in one word: `joining`, `training`, `rehearsing`, `paused` or `over`."""
    if reply.is_over:
        return "over"
    if not reply.has_begun:
        return "joining"
    if reply.paused or reply.store_error:
        return "paused"
    return "rehearsing" if reply.rehearsal else "training"


def headline(reply: StatusReply) -> str:
    """Return the state of the run in one sentence."""
    missing = listed([plain(one) for one in reply.missing])
    round_ = f"round {reply.last_round + 1} of {reply.rounds}"
    match state_of(reply):
        case "over":
            finishing = f"; {missing} still finishing" if missing else ""
            return f"over, after round {reply.last_round} of {reply.rounds}{finishing}"
        case "joining":
            stage = f"resuming after round {reply.last_round}" if reply.last_round else "not started"
            return f"{stage}; waiting for members to join: {missing or 'none'}"
        case "paused" if reply.store_error:
            seconds = format_seconds(max(1, round(reply.store_error_seconds)))
            return f"paused in {round_}, for {seconds} so far: {plain(reply.store_error)}; retrying"
        case "paused":
            return f"paused in {round_}: {reply.paused}"
    incomplete = {slot.replica for slot in reply.slots if not slot.held}
    there = {slot.name for slot in reply.slots if slot.replica not in incomplete}
    awaited = listed([plain(one) for one in reply.missing if one in there]) or missing
    return f"{state_of(reply)} {round_}" + (f"; waiting for contributions of {awaited}" if awaited else "")


def print_status(run: str, reply: StatusReply) -> None:
    """Print the state of the run, then a table of its slots."""
    console = standard_output()
    rehearsal = "a rehearsal, which trains nothing: " if reply.rehearsal else ""
    tell(console, f"{run}: {rehearsal}{headline(reply)}")
    groups: dict[str, list[SlotStatus]] = {}
    for slot in reply.slots:
        groups.setdefault(slot.replica, []).append(slot)
    free = {name: [slot.name for slot in own if not slot.held] for name, own in groups.items()}
    incomplete = {name: names for name, names in free.items() if 0 < len(names) < len(groups[name])}
    empty = [name for name, own in groups.items() if not any(slot.held or slot.incarnation for slot in own)]
    left_out = empty[EMPTY_SHOWN:]
    table = Table("Slot", "State", "Since", "Admitted by", "Connection")
    for slot in reply.slots:
        if slot.replica not in left_out:
            holder = f" (holder {slot.holder})" if slot.holder > 1 else ""
            admitted_by = f"a ticket{holder}" if slot.holder else "the run's token" if slot.held else ""
            since = _since(slot, groups[slot.replica])
            # The words of the page of a run.
            if not slot.held:
                what = "reserved" if slot.holder else "vacant" if slot.incarnation else "free"
            elif reply.is_over or slot.replica in incomplete:
                what = "finishing" if reply.is_over else "suspended"
            else:
                trains = "rehearsing" if reply.rehearsal else "training"
                what = f"{trains} round {slot.round}" if slot.round else "waiting"
            connection = ""  # how a slot is reached: its address, the address that it dials, and its relayed bytes
            if slot.address:
                relayed = f"{format_bytes(slot.relayed_bytes)} relayed" if slot.relayed_bytes else ""
                at = "" if slot.address == RELAYED else plain(slot.address)
                dials = f"dials {plain(slot.dials)}" if slot.dials else ""
                connection = ", ".join(filter(None, [at, dials, relayed])) or "relayed"
            table.add_row(slot.name, what, since, admitted_by, connection)
    console.print(table)
    if left_out:
        tell(console, f"{format_count(len(left_out), 'more replica')} without any member")
    if devices := {slot.name: plain(slot.device) for slot in reply.slots if slot.device}:
        tell(console, f"devices: {in_words(devices)}")
    for slot in reply.slots:
        if slot.cause and not slot.held:
            tell(console, f"{slot.name} is vacant for {_since(slot, groups[slot.replica])}: {plain(slot.cause)}")
    for replica, missing in incomplete.items():
        tell(console, f"{replica} is incomplete: waiting for hosts to join as {', '.join(missing)}")
    if reply.credits:  # what each replica that ever had a member added to the run
        credits = Table("Replica", "Rounds included", "Tokens", "Share")
        whole = sum(one.tokens for one in reply.credits)
        for one in sorted(reply.credits, key=lambda one: -one.tokens):
            share = format_share(one.tokens / whole if whole else None)
            rounds = f"{one.included:,} of {one.included + one.missed:,}"
            credits.add_row(plain(one.replica), rounds, f"{one.tokens:,}", share)
        console.print(credits)
    if reply.in_waiting_room:
        may_form = any(1 < len(own) == len(free[name]) for name, own in groups.items())
        group = f"; a new group needs {reply.needed_in_lobby}" if reply.needed_in_lobby and may_form else ""
        guests = listed([f"ticket {plain(one.ticket)} for {format_seconds(one.seconds)}" for one in reply.guests])
        tell(console, f"{format_count(reply.in_waiting_room, 'host')} waiting for a slot{group} ({guests})")
    tell(console, f"refused calls so far: {reply.refusals}")


def _since(slot: SlotStatus, group: Sequence[SlotStatus]) -> str:
    """Return the time since a slot was taken, lost or suspended. A group trains since its last slot was taken."""
    shown = group if all(one.held for one in group) else [slot]
    if not all(one.HasField("seconds") for one in shown):
        return ""
    return format_seconds(round(min(one.seconds for one in shown)))


def as_json(reply: StatusReply) -> dict[str, object]:
    return {
        "state": state_of(reply),
        "last_round": reply.last_round,
        "rounds": reply.rounds,
        "paused": reply.store_error or reply.paused or None,
        "missing": list(reply.missing),
        "refusals": reply.refusals,
        "waiting": reply.in_waiting_room,
        "needed_to_form": reply.needed_in_lobby,
        "guests": [{"ticket": one.ticket, "seconds": one.seconds} for one in reply.guests],
        "training_seconds": reply.training_seconds,
        "replicas": {
            one.replica: {"rounds_included": one.included, "rounds_missed": one.missed, "tokens": one.tokens}
            for one in reply.credits
        },
        "slots": {
            slot.name: {
                "replica": slot.replica,
                "held": slot.held,
                "round": slot.round or None,
                "incarnation": slot.incarnation,
                "holder": slot.holder or None,
                "address": slot.address,
                "dials": slot.dials,
                "relayed_bytes": slot.relayed_bytes,
                "device": slot.device or None,
                "seconds": slot.seconds if slot.HasField("seconds") else None,
                "cause": slot.cause or None,
            }
            for slot in reply.slots
        },
    }
