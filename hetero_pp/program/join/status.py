"""`hetero-pp status`: who is in a run, as its exchange says; asked by who serves it, or was let in."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from hetero_pp.errors import ConfigError, HeteroPPError
from hetero_pp.links import LAUNCHER, RELAYED
from hetero_pp.messages.messages_pb2 import PlaceStatus, StatusReply
from hetero_pp.program.join.membership import memberships_in
from hetero_pp.program.launch.hosts import read_token
from hetero_pp.program.report.output import standard_output
from hetero_pp.rpc.admission_client import status as ask
from hetero_pp.rpc.certificates import Authority, Identity
from hetero_pp.rpc.plain_text import plain
from hetero_pp.run.folder import RunFolder
from hetero_pp.run.yaml_file import ConfigFile
from hetero_pp.units import format_bytes, format_count

EMPTY_SHOWN = 2
"""Replicas that nobody has joined: of a run with room for many groups most are so."""


def status(runs: Path, run: str, address: str | None, json_path: Path | None) -> None:
    """Print who is at which place of a run, which its name tells, or HOST:PORT of its exchange.

    Raises ConfigError for a run that this host is not of, or that nobody serves.
    """
    runs = runs.absolute()
    known = _known_at(runs, run) if ":" in run else [_known(RunFolder(runs / run))]
    name, reply = _first_answer(known, address)
    print_status(name, reply)
    if json_path is not None:
        json_path.write_text(json.dumps(as_json(reply), indent=2) + "\n", encoding="utf-8")


@dataclass(frozen=True)
class _Known:
    """A run that this host serves, or has joined."""

    name: str
    address: str
    """HOST:PORT of its exchange."""
    identity: Identity
    """By which this host shows who it is."""


def _first_answer(known: Sequence[_Known], address: str | None) -> tuple[str, StatusReply]:
    """Of several runs, one after the other at one address, that which is there now. Raises ConfigError."""
    complaint = ""
    for one in known:
        try:
            return one.name, ask(address or one.address, one.identity)
        except HeteroPPError as error:
            complaint = str(error)
    raise ConfigError((), complaint)


def _known_at(runs: Path, address: str) -> list[_Known]:
    """Those whose exchange is at an address, as this host knows it, the newest first. Raises ConfigError."""
    found = []
    for path in sorted(runs.glob("*/"), key=lambda path: -path.stat().st_mtime):
        with suppress(HeteroPPError):
            found.append(_known(RunFolder(path)))
    at_address = [one for one in found if one.address == address]
    if not at_address:
        raise ConfigError((), f"{runs}: found no run at {address} that this host serves, or has joined")
    return at_address


def _known(folder: RunFolder) -> _Known:
    """The run of a folder. Raises ConfigError if this host is not of it, Refused for what is damaged."""
    if folder.token.is_file() and folder.config.is_file():
        listen = ConfigFile(folder.config).config.exchange.listen.replace("0.0.0.0", "127.0.0.1")
        return _Known(folder.path.name, listen, Authority(read_token(folder.token)).identity(LAUNCHER))
    found = memberships_in(folder)
    if not found:
        raise ConfigError((), f"{folder.path}: found no run that this host serves, or has joined")
    return _Known(folder.path.name, found[0].address, found[0].identity.latest)


def print_status(run: str, reply: StatusReply) -> None:
    """As a table."""
    table = Table(title=f"{run}: after round {reply.last_round} of {reply.rounds}", title_justify="left")
    for name in ("place", "replica", "held", "term", "by", "link"):
        table.add_column(name)
    left_out = _empty(reply)[EMPTY_SHOWN:]
    for place in reply.places:
        if place.replica in left_out:
            continue
        by = f"ticket, holder {place.holder}" if place.holder else "the run's token" if place.held else ""
        held = "yes" if place.held else "no"
        table.add_row(place.name, place.replica, held, str(place.term or ""), by, _link(place))
    standard_output().print(table)
    if left_out:
        standard_output().print(f"and {format_count(len(left_out), 'replica')} more that nobody has joined")
    if reply.in_lobby:
        standard_output().print(f"waiting for a group to form: {reply.in_lobby}")
    standard_output().print(f"refused so far: {reply.refusals}")


def _empty(reply: StatusReply) -> list[str]:
    """Replicas that nobody has joined yet, in their order."""
    joined = {place.replica for place in reply.places if place.held or place.term}
    return [name for name in dict.fromkeys(place.replica for place in reply.places) if name not in joined]


def _link(place: PlaceStatus) -> str:
    """Where it may be dialled, or dials the stage before, and what of its links went through the exchange."""
    if not place.address:
        return ""
    relayed = f"{format_bytes(place.relayed_bytes)} relayed" if place.relayed_bytes else ""
    address = "" if place.address == RELAYED else plain(place.address)
    dials = f"dials {plain(place.dials)}" if place.dials else ""
    return ", ".join(filter(None, [address, dials, relayed])) or "relayed"


def as_json(reply: StatusReply) -> dict[str, object]:
    """For programs."""
    places = {place.name: _place(place) for place in reply.places}
    return {
        "last_round": reply.last_round,
        "rounds": reply.rounds,
        "refusals": reply.refusals,
        "waiting": reply.in_lobby,
        "places": places,
    }


def _place(place: PlaceStatus) -> dict[str, object]:
    return {
        "replica": place.replica,
        "held": place.held,
        "term": place.term,
        "holder": place.holder or None,
        "address": place.address,
        "dials": place.dials,
        "relayed_bytes": place.relayed_bytes,
    }
