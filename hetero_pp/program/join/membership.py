"""A host's membership in a run: key, certificate and slot. They are kept in a folder, and renewed while in use."""

from __future__ import annotations

import json
import math
import os
import shlex
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from hetero_pp.config.changes import LAST, read_changes
from hetero_pp.config.folder import RunFolder, own_parts, run_folder
from hetero_pp.config.lines import EXCHANGE, LAUNCHER
from hetero_pp.config.shared import keep_tokenizer, kept_tokenizer
from hetero_pp.config.yaml_file import config_of
from hetero_pp.core.bounded import read_bounded, read_json_object
from hetero_pp.core.errors import ConfigError, HeteroPPError, LinkTimeout, Refused, StoreError, TooMuch
from hetero_pp.core.files import write_whole
from hetero_pp.core.units import format_seconds
from hetero_pp.messages.messages_pb2 import EnrolReply, InWaitingRoom
from hetero_pp.program.launch.earlier import is_held
from hetero_pp.program.launch.hosts import dialled_here, no_answer, read_token
from hetero_pp.program.report.output import announce
from hetero_pp.program.report.recorder import INTERRUPTED, last_closed
from hetero_pp.rpc.admission_client import ask, be_probed, enrol
from hetero_pp.rpc.exchange_service import MOST_BETWEEN
from hetero_pp.rpc.identities import (
    Authority,
    Credentials,
    Identity,
    Ticket,
    as_text,
    key_from_text,
    new_key,
    signing_request,
)
from replica_groups.exchange.stall_detector import listed

_KEY, _CERTIFICATE, _ABOUT = "key.pem", "certificate.pem", "about.json"
_PEM_BYTES_MAX = 20_000
_SECONDS_BETWEEN_TRIES = 60.0
_SECONDS_IN_WAITING_ROOM = 2.0
_SECONDS_FOR_AN_ANSWER = 5.0
_SECONDS_FOR_AN_EXCHANGE = 3600.0
"""Seconds after which a host that waits for a group gives up, if the exchange has stopped answering."""


@dataclass(frozen=True)
class Membership:
    """Membership of this host in a run, by one ticket."""

    run: str
    address: str  # HOST:PORT of each host that may serve the exchange, with commas between them
    slot: str
    configuration: str  # configuration of the run as JSON, as its exchange sent it
    identity: Identity
    tokenizer: Path | None  # path of the run's tokenizer, if its exchange sent one
    store: str = ""  # the URL of the run's store, as the ticket says
    ticket: tuple[str, str] = ("", "")
    """Certificate and key of the ticket, with which a host that has left may ask for a slot."""
    has_left: bool = False

    @property
    def shown(self) -> Identity:
        """Identity that the exchange admits now: that of the slot, or of the ticket once the host has left."""
        certificate, key = self.ticket
        return Identity(certificate, key, self.identity.authority) if self.has_left else self.identity.latest

    @property
    def credentials(self) -> Credentials:
        """Credentials of the process that takes the slot."""
        return Credentials(self.slot, identity=self.identity)


def take_slot(ticket: Ticket, runs: Path, say: Callable[[str], None] = print) -> Membership:
    """Take a slot of a run with a ticket as soon as one is free, or return to the slot taken with it before.

    Raises Refused if the ticket is not accepted, RunOver or RunFailed if the run has ended, LinkTimeout if the exchange
    does not answer.
    """
    _require_name(ticket.run, "run")
    folder = RunFolder(runs / ticket.run).identity(ticket.id)
    if ticket.is_over and not has_joined(folder):
        raise Refused("the ticket has expired: ask for another (or is the clock of this host wrong?)")
    key = _own_key(folder / _KEY)
    reply = _enrolled(ticket, signing_request(key_from_text(key)), say)
    with suppress(OSError):  # the exchange has given this host a slot, so the run of this name is not over
        RunFolder(runs / ticket.run).over.unlink()
    identity = Identity(reply.certificate, key, ticket.identity.authority)
    if identity.shown.name != reply.slot:
        raise Refused(f"the exchange sent a certificate for {identity.shown.name!r}, expected one for {reply.slot!r}")
    _require_name(reply.slot, "slot")
    about = {
        "run": ticket.run,
        "address": ticket.address,
        "slot": reply.slot,
        "authority": identity.authority,
        "configuration": reply.configuration,
        "store": ticket.store,
        "ticket": (ticket.identity.certificate, ticket.identity.key),
    }
    keep_tokenizer(reply.tokenizer, folder)
    write_whole(folder / _CERTIFICATE, identity.certificate.encode(), is_secret=True)
    write_whole(folder / _ABOUT, json.dumps(about).encode(), is_secret=True)
    return read_membership(folder)


def note_left(membership: Membership) -> None:
    """Keep that the host has left, until it joins again by the same ticket."""
    path = Path(membership.identity.kept_in).parent / _ABOUT
    with suppress(OSError, ValueError):  # then the exchange says so
        write_whole(path, json.dumps({**read_json_object(path), "has_left": True}).encode(), is_secret=True)


def unanswered(error: LinkTimeout, run: str) -> str:
    """Return what an exchange that does not answer may mean for a host that has only a ticket."""
    found = f"{error}; the run {run} is over, is not served now, or has another address"
    return f"{found}; ask the operator of the run"


def _enrolled(ticket: Ticket, request: bytes, say: Callable[[str], None]) -> EnrolReply:
    """Enrol with the ticket, and wait for a group to form if no slot is free. Raises the errors of `take_slot`."""

    def on_wait(seconds: float, limit: float) -> None:
        say(f"{ticket.run}: {no_answer(ticket.address, seconds, limit, has_answered=False)}")

    reply, told = enrol(ticket.address, ticket.identity, request, on_wait=on_wait), ""
    while reply.HasField("in_waiting_room"):
        waiting_room, why = reply.in_waiting_room, ""
        if not waiting_room.probed:
            why = be_probed(ticket.address, ticket.identity)
        here = f"{max(waiting_room.here, 1)} of {waiting_room.needed} hosts are waiting"
        said = why or waiting_room.why or f"waiting for a group to form: {here}"
        if said != told:
            say(f"{ticket.run}: {said}")
        told = said
        time.sleep(_SECONDS_IN_WAITING_ROOM)
        reply = _asked_again(ticket, request, waiting_room, say)
    return reply


def _asked_again(ticket: Ticket, request: bytes, waiting_room: InWaitingRoom, say: Callable[[str], None]) -> EnrolReply:
    """Return the exchange's answer to a host that waits for a group, retrying because the exchange may come back.

    Raises the errors of `take_slot`.
    """
    since, due = time.monotonic(), 0.0
    while (silent := time.monotonic() - since) < _SECONDS_FOR_AN_EXCHANGE:
        try:
            return enrol(ticket.address, ticket.identity, request, _SECONDS_FOR_AN_ANSWER)
        except (LinkTimeout, StoreError, TooMuch) as error:
            silent = time.monotonic() - since
            if silent >= due:
                last = f"last heard after round {waiting_room.last_round} of {waiting_room.rounds}"
                found = no_answer(ticket.address, silent, _SECONDS_FOR_AN_EXCHANGE, has_answered=True, last=last)
                say(f"{ticket.run}: {found if isinstance(error, LinkTimeout) else f'{error}; retrying'}")
                due = max(1.0, min(2 * silent, silent + MOST_BETWEEN))
            if not isinstance(error, LinkTimeout):  # this error arrives at once, so a retry without a pause would spin
                time.sleep(_SECONDS_IN_WAITING_ROOM)
    raise LinkTimeout(f"the exchange at {ticket.address} did not answer within {format_seconds(silent)}")


def is_name(name: str) -> bool:
    """Return whether a text is the name of a folder, and not a path to another one."""
    return Path(name).name == name and name not in ("", ".", "..")


def _require_name(name: str, of: str) -> None:
    """Raise Refused for a name that is a path, so that no ticket and no exchange decides where this host writes."""
    if not is_name(name):
        raise Refused(f"found {name!r}, expected the name of a {of}")


def read_membership(folder: Path) -> Membership:
    """Return the membership kept in a folder. Raises Refused if it is damaged."""
    try:
        about = read_json_object(folder / _ABOUT)
        certificate, key = (read_bounded(folder / name, _PEM_BYTES_MAX).decode() for name in (_CERTIFICATE, _KEY))
        identity = Identity(certificate, key, about.pop("authority"), str(folder / _CERTIFICATE))
        return Membership(**about, identity=identity, tokenizer=kept_tokenizer(folder))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Refused(f"{folder}: cannot be read ({error}): ask for another ticket") from None


def has_joined(folder: Path) -> bool:
    """Return whether a ticket's folder has a membership: the host has joined by the ticket."""
    return (folder / _ABOUT).is_file()


def memberships_in(folder: RunFolder) -> list[Membership]:
    """Return this host's memberships in a run, newest first, and those that it has left at the end."""
    found = sorted(folder.identity("").glob(f"*/{_ABOUT}"), key=lambda path: -path.stat().st_mtime)
    return sorted((read_membership(path.parent) for path in found), key=lambda one: one.has_left)


@contextmanager
def renewed(membership: Membership, say: Callable[[str], None], every: float = math.inf) -> Iterator[None]:
    """Renew the certificate before it expires while the block runs, or each time that `every` seconds have passed."""
    over = threading.Event()
    arguments = (membership, over, say, every)
    thread = threading.Thread(target=_keep_renewing, args=arguments, name="renewal", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _keep_renewing(membership: Membership, over: threading.Event, say: Callable[[str], None], every: float) -> None:
    told = ""
    while not over.is_set():
        try:
            shown = membership.identity.latest.shown  # due once half of the validity is over
            if over.wait(min(every, max((shown.signed + shown.until) / 2 - time.time(), 0.0))):
                return
            renew_once(membership)
            shown = membership.identity.latest.shown  # a wrong clock here must not renew without a pause
            over.wait(min(_SECONDS_BETWEEN_TRIES, (shown.until - shown.signed) / 2))
        except (HeteroPPError, OSError) as error:  # a full disk may have room later
            if told != str(error):
                say(f"the certificate could not be renewed ({error}); retrying")
            told = str(error)
            over.wait(_SECONDS_BETWEEN_TRIES)


def renew_once(membership: Membership) -> None:
    """Renew the certificate once.

    Raises Refused, or LinkTimeout if the exchange does not answer.
    """
    certificate = ask(membership.address, membership.identity, "Renew").certificate
    write_whole(Path(membership.identity.kept_in), certificate.encode(), is_secret=True)


def _own_key(path: Path) -> str:
    """Return this host's private key for a ticket, which is generated once and never leaves the host."""
    if not path.is_file():
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_whole(path, as_text(new_key()).encode(), is_secret=True)
    return path.read_text(encoding="utf-8")


# ---- processes of this host, in files: a later process with the same id is not mistaken for an earlier one ----


_SECONDS_APART = 1.0  # seconds by which two readings of a process's creation time may differ


def own_process() -> str:
    """Return an identification of this process for `running_process`."""
    return f"{os.getpid()} {psutil.Process().create_time()}"


def running_process(text: str) -> psutil.Process | None:
    """Return the process that `own_process` identified; None if it has ended. Raises ValueError for any other text."""
    number, created = text.split()
    try:
        process = psutil.Process(int(number))
        return process if abs(process.create_time() - float(created)) < _SECONDS_APART else None
    except psutil.NoSuchProcess:
        return None


# ---- `hetero-pp leave`: finds this host's `join` of a run and interrupts it, which frees the slot ----


SECONDS = 30.0  # seconds to wait until an interrupted process has left
_SECONDS_BETWEEN_LOOKS = 0.02

_PROCESS = "joined-{slot}.pid"


@contextmanager
def leavable(folder: RunFolder, slot: str) -> Iterator[None]:
    """Let `leave` find this process while the block runs. Raises ConfigError if another process has the slot."""
    path = folder.path / _PROCESS.format(slot=slot)
    other = _process(path)
    if other is not None:
        raise ConfigError((), f"{slot} is already held by process {other.pid} on this host")
    write_whole(path, own_process().encode())
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def leave(runs: Path, run: str, slot: str | None) -> None:
    """Interrupt the processes that joined a run on this host, for one slot or all.

    Raises ConfigError if there are none.
    """
    folder = run_folder(runs, run)
    found = [path for path in sorted(folder.path.glob(_PROCESS.format(slot=slot or "*"))) if _process(path)]
    if not found:
        of_slot = f" for {slot}" if slot else " that has a slot; Ctrl-C ends one that waits"
        raise ConfigError((), f"{folder.path}: found no `hetero-pp join` of this run on this host{of_slot}")
    for path in found:
        process = _process(path)
        if process is not None:
            process.terminate()
            # Not for the end of the process: the interpreter takes seconds to end after its slot is free.
            until = time.monotonic() + SECONDS
            while _process(path) is not None and time.monotonic() < until:
                time.sleep(_SECONDS_BETWEEN_LOOKS)
            if _process(path) is not None:
                late = f"has not ended within {SECONDS:g} s; it may still save its state"
                announce(f"{run}: process {process.pid} {late}")
                continue
        announce(f"{run}: {path.stem.removeprefix('joined-')} has left")


def _process(path: Path) -> psutil.Process | None:
    """Return the process that wrote a file; None if it has ended, even if its id is in use again."""
    try:
        return running_process(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


# ---- the runs of this host: how to reach the exchange of each, and how one ended, from its folder alone ----


@dataclass(frozen=True)
class RunOnDisk:
    """State of a run according to its folder."""

    state: str  # `running`, `over`, `interrupted`, `failed`, or `killed` (the run ended without a record of its end)
    last_round: int
    rounds: int
    changed: float  # time of the last record, in seconds since 1970
    why: str = ""
    resume: str = ""  # command that resumes the run; empty if there is nothing to resume
    rehearsal: bool = False


def read_run_on_disk(folder: RunFolder) -> RunOnDisk:
    """Return the state of a run from its folder. Raises ConfigError for a configuration that cannot be read."""
    config = config_of(folder)
    changes = read_changes(folder.changes).settled()
    changes.require_changeable(config)
    rounds, rehearsal = changes.at(config, LAST).rounds, config.rehearsal is not None
    summary: dict[str, object] = {}
    with suppress(OSError, ValueError):
        summary = read_json_object(folder.summary)
    changed = max(path.stat().st_mtime for path in (folder.summary, folder.metrics, folder.config) if path.is_file())
    command = "serve" if folder.token.is_file() else "launch"  # as it was started
    resume = shlex.join(["hetero-pp", command, str(folder.config), "--resume", "--runs", str(folder.path.parent)])
    resume = "" if rehearsal else resume
    if is_running(folder):
        return RunOnDisk("running", last_closed(folder), rounds, changed, rehearsal=rehearsal)
    if not summary:
        return RunOnDisk("killed", last_closed(folder), rounds, changed, "", resume, rehearsal)
    said, why = summary.get("rounds"), str(summary.get("failed") or "")
    last = said if isinstance(said, int) else 0
    if not why:
        return RunOnDisk("over", last, rounds, changed, rehearsal=rehearsal)
    state = INTERRUPTED if why == INTERRUPTED else "failed"
    return RunOnDisk(state, last, rounds, changed, "" if state == INTERRUPTED else why, resume, rehearsal)


def is_running(folder: RunFolder) -> bool:
    """Return whether a launch on this host runs the exchange of the run."""
    return is_held(folder.path.parent, folder.path.name, EXCHANGE)


# ---- runs that this host serves or has joined ----


@dataclass(frozen=True)
class RunOfHost:
    """A run that this host serves or has joined."""

    folder: RunFolder
    address: str  # HOST:PORT of each host that may serve the run's exchange, with commas between them
    identity: Identity  # identity with which this host authenticates to the exchange
    serves: bool

    @property
    def name(self) -> str:
        return self.folder.path.name


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
        listen = dialled_here(config_of(folder).exchange.address)
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
