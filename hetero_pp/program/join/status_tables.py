"""Prints the exchange's status: state of the run, holders of its slots, hosts that wait for a group."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from rich.console import Console
from rich.table import Table

from hetero_pp.config.lines import RELAYED
from hetero_pp.config.member_inputs import in_words
from hetero_pp.core.units import format_bytes, format_count, format_seconds, format_share
from hetero_pp.messages.messages_pb2 import SlotStatus, StatusReply
from hetero_pp.program.report.output import standard_output, tell
from hetero_pp.rpc.limits import plain
from replica_groups.exchange.memberships import IssuedTicket
from replica_groups.exchange.stall_detector import listed

EMPTY_SHOWN = 2
"""Number of empty replicas that are shown; most replicas of a run with room for many groups are empty."""


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
    incomplete = _incomplete(reply)
    table = Table("Slot", "State", "Since", "Admitted by", "Connection")
    left_out = _empty(reply)[EMPTY_SHOWN:]
    for slot in reply.slots:
        if slot.replica not in left_out:
            state = _state(reply, slot, slot.replica in incomplete)
            table.add_row(slot.name, state, _since(slot, reply), _let_in_by(slot), _connection(slot))
    console.print(table)
    if left_out:
        tell(console, f"{format_count(len(left_out), 'more replica')} without any member")
    if devices := {slot.name: plain(slot.device) for slot in reply.slots if slot.device}:
        tell(console, f"devices: {in_words(devices)}")
    for slot in reply.slots:
        if slot.cause and not slot.held:
            tell(console, f"{slot.name} is vacant for {_since(slot, reply)}: {plain(slot.cause)}")
    for replica, missing in incomplete.items():
        tell(console, f"{replica} is incomplete: waiting for hosts to join as {', '.join(missing)}")
    if reply.credits:
        console.print(_credits(reply))
    _print_guests(console, reply)
    tell(console, f"refused calls so far: {reply.refusals}")


def _credits(reply: StatusReply) -> Table:
    """Return a table of what each replica added to the run. A replica that never had a member is left out."""
    table = Table("Replica", "Rounds included", "Tokens", "Share")
    whole = sum(one.tokens for one in reply.credits)
    for one in sorted(reply.credits, key=lambda one: -one.tokens):
        rounds = f"{one.included:,} of {one.included + one.missed:,}"
        table.add_row(
            plain(one.replica), rounds, f"{one.tokens:,}", format_share(one.tokens / whole if whole else None)
        )
    return table


def _incomplete(reply: StatusReply) -> dict[str, list[str]]:
    """Return the replicas with some but not all slots held, and their free slots."""
    found: dict[str, list[str]] = {}
    for name in {slot.replica: None for slot in reply.slots}:
        own = [slot for slot in reply.slots if slot.replica == name]
        if any(slot.held for slot in own) and not all(slot.held for slot in own):
            found[name] = [slot.name for slot in own if not slot.held]
    return found


def _empty(reply: StatusReply) -> list[str]:
    """Return the replicas that no member has joined yet, in the run's order."""
    joined = {slot.replica for slot in reply.slots if slot.held or slot.incarnation}
    return [name for name in dict.fromkeys(slot.replica for slot in reply.slots) if name not in joined]


def _state(reply: StatusReply, slot: SlotStatus, is_incomplete: bool) -> str:
    """Return the state of a slot, in the words of the page of a run."""
    if not slot.held:
        return "reserved" if slot.holder else "vacant" if slot.incarnation else "free"
    if reply.is_over:
        return "finishing"
    if is_incomplete:
        return "suspended"
    what = "rehearsing" if reply.rehearsal else "training"
    return f"{what} round {slot.round}" if slot.round else "waiting"


def _since(slot: SlotStatus, reply: StatusReply) -> str:
    """Return the time since a slot was taken, lost or suspended. A group trains since its last slot was taken."""
    group = [one for one in reply.slots if one.replica == slot.replica]
    shown = group if all(one.held for one in group) else [slot]
    if not all(one.HasField("seconds") for one in shown):
        return ""
    return format_seconds(round(min(one.seconds for one in shown)))


def _let_in_by(slot: SlotStatus) -> str:
    if slot.holder:
        return "a ticket" if slot.holder == 1 else f"a ticket (holder {slot.holder})"
    return "the run's token" if slot.held else ""


def _connection(slot: SlotStatus) -> str:
    """Describe how a slot is reached: its address, the address that it dials, and its relayed bytes."""
    if not slot.address:
        return ""
    relayed = f"{format_bytes(slot.relayed_bytes)} relayed" if slot.relayed_bytes else ""
    address = "" if slot.address == RELAYED else plain(slot.address)
    dials = f"dials {plain(slot.dials)}" if slot.dials else ""
    return ", ".join(filter(None, [address, dials, relayed])) or "relayed"


def _print_guests(console: Console, reply: StatusReply) -> None:
    """Print the hosts that wait for a group, and how many more it needs."""
    if not reply.in_waiting_room:
        return
    more = max(reply.needed_in_lobby - reply.in_waiting_room, 0)
    until = f"{format_count(more, 'more host')} needed" if more else "a group is being formed"
    guests = listed([f"ticket {plain(one.ticket)} for {format_seconds(one.seconds)}" for one in reply.guests])
    tell(console, f"{format_count(reply.in_waiting_room, 'host')} waiting for a group to form, {until} ({guests})")


def print_tickets(tickets: Sequence[IssuedTicket], good_for: dict[str | None, str], now: float) -> None:
    """Print the tickets that are still valid, and the number of others."""
    console = standard_output()
    open_ = [one for one in tickets if not one.is_used and one.until > now]
    if open_:
        table = Table("Open ticket", "Admits to", "Until")
        for one in open_:
            table.add_row(one.id, good_for[one.slot], f"{datetime.fromtimestamp(one.until):%Y-%m-%d %H:%M}")
        console.print(table)
    used = sum(one.is_used for one in tickets)
    expired = len(tickets) - used - len(open_)
    tell(console, f"tickets: {len(open_)} open, {used} used, {expired} expired")


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
        "slots": {slot.name: _slot(slot) for slot in reply.slots},
    }


def _slot(slot: SlotStatus) -> dict[str, object]:
    return {
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
