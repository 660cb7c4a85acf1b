"""The subject of `hetero-pp check`: this machine, and a YAML, a ticket, or a run of this host."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, TimeoutError
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hetero_pp.config.folder import RunFolder, run_folder
from hetero_pp.config.lines import EXCHANGE
from hetero_pp.config.shared import own_configuration
from hetero_pp.config.spec import RunSpec
from hetero_pp.config.yaml_file import ConfigFile
from hetero_pp.core.bounded import parse_json
from hetero_pp.core.errors import ConfigError, HeteroPPError, LinkTimeout, Refused
from hetero_pp.core.shipped import shipped_runs, shipped_yaml
from hetero_pp.core.text import is_ticket
from hetero_pp.core.units import format_seconds
from hetero_pp.messages.messages_pb2 import PreviewReply
from hetero_pp.program.check.findings import NotChecked, in_background
from hetero_pp.program.join.membership import (
    Membership,
    RunOfHost,
    has_joined,
    is_name,
    is_running,
    known_run,
    memberships_in,
    read_membership,
)
from hetero_pp.program.launch.inputs import Prepared, prepare, settled
from hetero_pp.program.report.output import SafeConsole, shown_reading
from hetero_pp.rpc.admission_client import ask, present_host
from hetero_pp.rpc.channels import PROTOCOL_VERSION, version_complaint
from hetero_pp.rpc.identities import MOST_TIME, Identity, Ticket

SECONDS_TO_ASK = 3.0  # seconds within which the exchange has to answer
_SECONDS_TO_EXPLAIN = 1.0

_YAML = (".yaml", ".yml")


@dataclass(frozen=True)
class CheckedPart:
    """The part of a run that this host would run."""

    spec: RunSpec
    choices: Sequence[Sequence[str]]
    """Members to start here. A ticket may admit to one of several slots: one entry for each."""
    located: Callable[[ConfigError], ConfigError] = lambda error: error  # adds file and line to an error about a key
    has_tokenizer: bool = True  # whether this host has the run's tokenizer

    @property
    def names(self) -> Sequence[str]:
        """The members to start here, or those of the first slot."""
        return self.choices[0]


@dataclass(frozen=True)
class Answer:
    """Answer of the exchange to this host."""

    reply: PreviewReply
    ahead: float  # seconds by which the clock of the exchange is ahead of this host's, give or take `within`
    within: float


@dataclass(frozen=True, kw_only=True)
class Subject:
    """Subject of the checks. Everything is None or empty if only the machine is checked."""

    runs: Path
    name: str = ""
    kind: str = "machine"  # `machine`, `yaml`, `ticket`, or `run`
    told: str = ""  # the subject in words
    peer: RunOfHost | None = None  # whose exchange is asked
    part_: Future[CheckedPart] | None = None
    answer_: Future[Answer] | None = None
    until: tuple[str, float] | None = None
    """Name of the ticket or certificate that admits this host, and its expiry in seconds since 1970."""
    data: str | None = None  # path of the run's text on this host
    prepared: Prepared | None = None  # the run of a YAML, with its corpus
    problem: str = ""  # why the argument cannot be used

    @property
    def folder(self) -> RunFolder:
        """The run's folder on this host, which may not exist."""
        return RunFolder(self.runs.absolute() / self.name)

    @property
    def part(self) -> CheckedPart:
        """The part of the run. Raises NotChecked if there is none."""
        if self.part_ is None:
            raise NotChecked(self._lacks("a YAML, a ticket or a run"))
        try:
            return self.part_.result()
        except (HeteroPPError, OSError):
            raise NotChecked("the settings cannot be used") from None

    @property
    def answer(self) -> Answer:
        """The answer of the exchange. Raises NotChecked without one."""
        if self.answer_ is None:
            raise NotChecked(self._lacks("a ticket, or a run whose exchange answers"))
        try:
            return self.answer_.result()
        except HeteroPPError:
            raise NotChecked("the exchange did not answer, or refused this host") from None

    def _lacks(self, what: str) -> str:
        return "the argument cannot be used" if self.problem else f"needs {what}"


def subject_of(named: str | None, overrides: Sequence[str], runs: Path, data: str | None) -> Subject:
    """Return the subject that an argument names. A ticket or run that cannot be used is its `problem`.

    A run of this host comes before a shipped YAML of the same name. Raises ConfigError for a YAML that cannot run.
    """
    if named is None:
        return Subject(runs=runs)
    path = Path(named)
    if not is_ticket(named) and not (path.is_dir() or (path.suffix == "" and (runs / named).is_dir())):
        path = shipped_yaml(path) or path
        if path.suffix in _YAML or path.is_file():
            return _of_yaml(path, overrides, runs)
    try:
        if overrides:
            raise ConfigError((), "--set: found a ticket or a run, expected a YAML")
        return _of_ticket(Ticket.from_text(named), runs, data) if is_ticket(named) else _of_run(run_folder(runs, named))
    except (ConfigError, Refused) as error:
        shipped = "" if is_ticket(named) or path.exists() else f"; shipped YAMLs: {shipped_runs()}"
        return Subject(runs=runs, problem=f"{error}{shipped}")


def _of_yaml(path: Path, overrides: Sequence[str], runs: Path) -> Subject:
    file = ConfigFile(path, overrides)
    with shown_reading(SafeConsole(stderr=True), "reading the corpus") as on_progress:
        prepared = prepare(file, runs.absolute(), checks=True, on_progress=on_progress)
    # A replica of several nodes is all that one of their machines starts.
    nodes = next((one.name for one in file.config.replicas if one.kind == "datacenter" and one.nodes > 1), None)
    part = CheckedPart(prepared.spec, [prepared.names if nodes is None else [nodes]], file.located)
    return Subject(
        runs=runs,
        name=file.config.name,
        kind="yaml",
        told=f"{path}: the run {file.config.name}",
        part_=in_background(lambda: part),
        prepared=prepared,
    )


def _part(file: ConfigFile, only: str | None) -> CheckedPart:
    """Return the part of a run that this host resumes."""
    if only is None:
        only = next((one.name for one in file.config.replicas if one.kind == "datacenter" and one.nodes > 1), None)
    try:
        spec, names, _ = settled(file.config, only, resume=True)
    except ConfigError as error:
        raise file.located(error) from None
    return CheckedPart(spec, [names], file.located)


def _of_ticket(ticket: Ticket, runs: Path, data: str | None) -> Subject:
    name = ticket.run if is_name(ticket.run) else ""  # no ticket decides which folder is read
    folder = RunFolder(runs.absolute() / name)
    earlier = folder.identity(ticket.id)
    if name and has_joined(earlier):
        return _of_membership(read_membership(earlier), runs.absolute())
    asked = in_background(lambda: _asked(ticket.address, ticket.identity))
    return Subject(
        runs=runs,
        name=name,
        kind="ticket",
        told=f"ticket {ticket.id} to the run {ticket.run}, for {ticket.good_for}",
        peer=RunOfHost(folder, present_host(ticket.address, ticket.identity), ticket.identity, serves=False),
        part_=in_background(lambda: _part_of_guest(asked, data)),
        answer_=asked,
        until=("the ticket", ticket.until),
        data=data,
    )


def _of_run(folder: RunFolder) -> Subject:
    """Return the subject of a run that this host launched, serves or joined. Raises ConfigError for any other."""
    name, found = folder.path.name, memberships_in(folder)
    if folder.config.is_file():
        file, serves = ConfigFile(folder.config, kept=True), folder.token.is_file()
        known = known_run(folder) if serves and is_running(folder) and not file.config.exchange.insecure else None
        return Subject(
            runs=folder.path.parent,
            name=name,
            kind="run",
            told=f"the run {name}, which this host {'serves' if serves else 'launched'}",
            peer=None if known is None else replace(known, address=present_host(known.address, known.identity)),
            part_=in_background(lambda: _part(file, EXCHANGE if serves else None)),
            answer_=None if known is None else in_background(lambda: _asked(known.address, known.identity)),
        )
    if not found:
        raise ConfigError((), f"{folder.path}: found a part of a run that another host records; give its YAML")
    return _of_membership(found[0], folder.path.parent)


def _of_membership(own: Membership, runs: Path) -> Subject:
    """Return the subject of a run that this host joined. Raises ConfigError if its settings were not kept."""
    identity, file = own.shown, ConfigFile(runs / own.run / f"config-{own.slot}.yaml", kept=True)
    return Subject(
        runs=runs,
        name=own.run,
        kind="run",
        told=f"the run {own.run}, which this host {'left' if own.has_left else 'joined'} as {own.slot}",
        peer=RunOfHost(RunFolder(runs / own.run), present_host(own.address, identity), identity, serves=False),
        part_=in_background(lambda: _part(file, own.slot)),
        answer_=in_background(lambda: _asked(own.address, identity)),
        until=("the ticket" if own.has_left else f"the certificate of {own.slot}", identity.shown.until),
    )


def _asked(address: str, identity: Identity) -> Answer:
    """Return the exchange's answer. Raises Refused for an exchange with another protocol, LinkTimeout without one.

    To learn why an address is silent may take longer than the checks, so it is not waited for.
    """
    begun, limit = time.time(), SECONDS_TO_ASK + _SECONDS_TO_EXPLAIN
    try:
        reply = in_background(lambda: ask(address, identity, "Preview", seconds=SECONDS_TO_ASK)).result(limit)
    except TimeoutError:
        raise LinkTimeout(f"the exchange at {address} did not answer within {format_seconds(limit)}") from None
    took = time.time() - begun
    if complaint := version_complaint(PROTOCOL_VERSION, reply.version):
        raise Refused(complaint)
    if not 0 < reply.clock < MOST_TIME:
        raise Refused(f"the exchange at {address} sent {reply.clock:g} as its time, expected seconds since 1970")
    return Answer(reply, reply.clock - (begun + took / 2), took / 2)


def _part_of_guest(asked: Future[Answer], data: str | None) -> CheckedPart:
    """Return the part that a ticket admits to, one choice for each open slot. Raises Refused if no slot is open."""
    answer = asked.result()
    if not answer.reply.slots:
        raise Refused("no slot is open")
    reply = answer.reply
    try:
        told: dict[str, Any] = parse_json(reply.configuration)
        has_tokenizer = told["data"]["tokenizer"] == "bytes"
        told["data"]["tokenizer"], told["model"]["vocabulary"] = "bytes", reply.vocabulary
    except (ValueError, KeyError, TypeError):
        raise Refused("the exchange sent settings that this version of hetero-pp cannot read") from None
    spec = RunSpec(own_configuration(json.dumps(told), reply.slots[0], data, None), reply.vocabulary)
    if not spec.members.keys() >= set(reply.slots):
        raise Refused("the exchange offers slots that its run does not have")
    return CheckedPart(spec, [[slot] for slot in reply.slots], has_tokenizer=has_tokenizer)
