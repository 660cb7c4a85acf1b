"""A host's membership in a run: key, certificate and slot. They are kept in a folder, and renewed while in use."""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from hetero_pp.config.folder import RunFolder, run_folder
from hetero_pp.config.shared import keep_tokenizer, kept_tokenizer
from hetero_pp.core.bounded import read_bounded, read_json_object
from hetero_pp.core.errors import ConfigError, HeteroPPError, LinkTimeout, Refused, StoreError, TooMuch
from hetero_pp.core.files import write_whole
from hetero_pp.core.units import format_seconds
from hetero_pp.messages.messages_pb2 import EnrolReply, InWaitingRoom
from hetero_pp.program.launch.earlier import forget_over
from hetero_pp.program.launch.hosts import no_answer
from hetero_pp.program.report.output import announce
from hetero_pp.rpc.admission_client import be_probed, enrol, renew
from hetero_pp.rpc.exchange_service import MOST_BETWEEN
from hetero_pp.rpc.identities import Credentials, Identity, Ticket, as_text, key_from_text, new_key, signing_request

_KEY, _CERTIFICATE, _ABOUT, _WAITING = "key.pem", "certificate.pem", "about.json", "waiting.json"
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
    address: str  # HOST:PORT of the exchange
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
    if ticket.is_over and has_joined(folder):
        return read_membership(folder)
    ticket.require_good()
    key = _own_key(folder / _KEY)
    reply = _enrolled(ticket, signing_request(key_from_text(key)), folder, say)
    forget_over(RunFolder(runs / ticket.run))
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


def _enrolled(ticket: Ticket, request: bytes, folder: Path, say: Callable[[str], None]) -> EnrolReply:
    """Enrol with the ticket, and wait for a group to form if no slot is free. Raises the errors of `take_slot`."""

    def on_wait(seconds: float, limit: float) -> None:
        say(f"{ticket.run}: {no_answer(ticket.address, seconds, limit, has_answered=False)}")

    reply, told = enrol(ticket.address, ticket.identity, request, on_wait=on_wait), ""
    with _shown_as_waiting(folder) as show:
        while reply.HasField("in_waiting_room"):
            waiting_room, why = reply.in_waiting_room, ""
            show(waiting_room)
            if not waiting_room.probed:
                why = be_probed(ticket.address, ticket.identity)
            why = why or waiting_room.why
            said = (
                why
                or f"waiting for a group to form: {max(waiting_room.here, 1)} of {waiting_room.needed} hosts "
                "are waiting"
            )
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


@contextmanager
def _shown_as_waiting(folder: Path) -> Iterator[Callable[[InWaitingRoom], None]]:
    """Keep the exchange's last answer in a file while the block runs, for `status` on this host."""
    since, path = time.time(), folder / _WAITING

    def show(waiting_room: InWaitingRoom) -> None:
        told = {"here": max(waiting_room.here, 1), "needed": waiting_room.needed, "last_round": waiting_room.last_round}
        about = {"process": own_process(), "since": since, "asked": time.time(), "rounds": waiting_room.rounds}
        with suppress(OSError):  # a full disk must not end the wait
            write_whole(path, json.dumps(told | about).encode())

    try:
        yield show
    finally:
        with suppress(OSError):
            path.unlink()


@dataclass(frozen=True)
class Wait:
    """The wait of one process of this host for a group to form, as the exchange last answered."""

    process: str
    since: float
    asked: float  # time of that answer, in seconds since 1970
    here: int
    needed: int
    last_round: int
    rounds: int


def waits_in(folder: RunFolder) -> list[Wait]:
    """Return the waits of the processes on this host that wait for a group of a run now."""
    found = []
    for path in folder.identity("").glob(f"*/{_WAITING}"):
        with suppress(OSError, ValueError, TypeError):
            wait = Wait(**read_json_object(path))
            if running_process(wait.process) is not None:
                found.append(wait)
    return found


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
            if over.wait(min(every, _due_in(membership.identity))):
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
    certificate = renew(membership.address, membership.identity)
    write_whole(Path(membership.identity.kept_in), certificate.encode(), is_secret=True)


def _due_in(identity: Identity) -> float:
    """Return the seconds until half of the certificate's validity is over."""
    shown = identity.latest.shown
    return max((shown.signed + shown.until) / 2 - time.time(), 0.0)


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


# `hetero-pp leave`: finds this host's `join` of a run and interrupts it, which frees the slot.


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
        of_slot = f" for {slot}" if slot else ""
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
