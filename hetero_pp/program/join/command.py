"""`hetero-pp join TICKET`: takes a slot of a running run, and trains in it until the run ends."""

from __future__ import annotations

import socket
import time
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

from hetero_pp.config.folder import RunFolder
from hetero_pp.config.lines import RELAYED, Way
from hetero_pp.config.member_inputs import in_words
from hetero_pp.config.shared import listen_told, own_configuration, require_data
from hetero_pp.config.spec import RunSpec
from hetero_pp.config.yaml_file import ConfigFile, save_config
from hetero_pp.core.device import resolved
from hetero_pp.core.errors import (
    ConfigError,
    GivenUp,
    HeteroPPError,
    LinkError,
    LinkTimeout,
    NewRun,
    Refused,
    RunFailed,
    RunOver,
    TooMuch,
)
from hetero_pp.core.files import print_without_fail
from hetero_pp.core.sockets import host_and_port
from hetero_pp.data.sources import tokens_digest
from hetero_pp.messages.messages_pb2 import MeasuredLine, Report
from hetero_pp.program.join.membership import Membership, leavable, note_left, renewed, take_slot, unanswered
from hetero_pp.program.launch.command import AS_A_RUN, ReachedExchange, run_members
from hetero_pp.program.launch.earlier import keep_over, read_over
from hetero_pp.program.launch.hosts import listens
from hetero_pp.program.launch.inputs import prepare
from hetero_pp.program.operate.operations import Operations
from hetero_pp.program.rehearse import OwnLine
from hetero_pp.program.report.output import announce, name_run, shown_reading, standard_output
from hetero_pp.rpc.admission_client import Rate, ask, measure
from hetero_pp.rpc.exchange_client import ExchangeClient
from hetero_pp.rpc.identities import Ticket
from hetero_pp.store.opening import parsed
from hetero_pp.store.settings import StoreSettings
from replica_groups.exchange.memberships import RESERVED_SECONDS

_SECONDS_TO_ASK = 10.0


@dataclass(frozen=True)
class JoiningHost:
    """Settings of this host for a run that it joins."""

    runs: Path
    data: str | None = None  # path of the run's text, for a slot that reads it
    tokenizer: Path | None = None  # the run's tokenizer.json, if it is too large for the exchange to send
    listen: str | None = None  # HOST:PORT at which the neighbouring stages dial this one
    device: str = "auto"
    rehearses: bool = False  # whether the user wants to rehearse


def join(text: str, here: JoiningHost, operations: Operations | None = None) -> None:
    """Take a slot with a ticket, and train in it until the run ends.

    An interrupt frees the slot. Raises ConfigError if the ticket is refused, or if this host lacks something that the
    slot needs. `operations`: follows this host's member for an operator.
    """
    try:
        resolved(here.device)
    except ConfigError as error:
        raise ConfigError((), f"--device: {error.message}") from None
    print_without_fail()
    try:
        ticket = Ticket.from_text(text)
    except Refused as error:
        raise ConfigError((), str(error)) from None
    _require_wanted(ticket.rehearsal, here)
    name_run(ticket.run)
    while (membership := _slot_of(ticket, here)) is not None:
        try:
            _train(membership, here, operations)
            return
        except RunFailed as error:
            try:
                lost = ask(ticket.address, ticket.identity, "Preview", seconds=_SECONDS_TO_ASK).lost
            except HeteroPPError:
                raise error from None
            if not lost:
                raise
            announce(f"{ticket.run}: {membership.slot} {lost}: this host takes another slot")


def _slot_of(ticket: Ticket, here: JoiningHost) -> Membership | None:
    """Take a slot; return None if the run is over. Raises ConfigError if the ticket is refused."""
    folder = RunFolder(here.runs.absolute() / ticket.run)
    over = read_over(folder)
    if over is not None:
        hosts = ticket.address.split(",")
        for host in hosts:
            with suppress(OSError):
                socket.create_connection(host_and_port(host), _SECONDS_TO_ASK / len(hosts)).close()
                break
        else:
            announce(f"{ticket.run}: {over.told}, and nothing answers at {ticket.address} any more")
            return None
    try:
        return take_slot(ticket, here.runs.absolute(), announce)
    except LinkTimeout as error:
        raise ConfigError((), unanswered(error, ticket.run)) from None
    except (Refused, TooMuch) as error:
        raise ConfigError((), str(error)) from None
    except RunOver as error:
        announce(f"{ticket.run}: {error}")
        keep_over(folder, error)
        return None


def _require_wanted(is_rehearsal: bool, here: JoiningHost) -> None:
    """Raise ConfigError for a rehearsal that the user did not ask for, and for a run that the user will not train."""
    if is_rehearsal and not here.rehearses:
        raise ConfigError((), "the ticket is for a rehearsal, which trains nothing: join it with --rehearse")
    if here.rehearses and not is_rehearsal:
        raise ConfigError((), "--rehearse: found the ticket of a run, expected that of `hetero-pp serve --rehearse`")


def _train(membership: Membership, here: JoiningHost, operations: Operations | None = None) -> None:
    """Train in a slot until the run ends; free the slot if this host gives up before."""
    run, slot, runs = membership.run, membership.slot, here.runs.absolute()
    folder = RunFolder(runs / run, f"config-{slot}.yaml")
    with leavable(folder, slot):  # outside the `try`: a refused second join frees no slot
        try:
            with renewed(membership, announce, RESERVED_SECONDS / 3):  # to read a large corpus takes longer
                _configure(membership, here, folder)
                announce(f"{run}: this host has joined as {slot}")
                announce(f"{run}: to see the run on a page: hetero-pp view {run}")
                file = ConfigFile(folder.config, kept=True)
                with shown_reading(standard_output(), "reading the corpus") as on_progress:
                    prepared = prepare(file, runs, slot, on_progress=on_progress)
                if prepared.devices:
                    announce(f"{run}: devices: {in_words(prepared.devices)}")
                for note in prepared.notes:
                    announce(note)
                # Another text than the run's is refused before other members wait for this one. An exchange that does
                # not answer now is no error: the member's process asks it again.
                if tokens := tokens_digest(prepared.source):
                    try:
                        with _client(membership) as client:
                            client.agree(slot, prepared.spec.agreed, tokens)
                    except Refused as error:
                        raise ConfigError((), str(error)) from None
                    except LinkError:
                        pass
            with renewed(membership, announce):
                config, identity = prepared.spec.config, membership.identity
                listen = here.listen or listens(config, [slot])
                keys, kept_in = membership.credentials, Path(identity.kept_in)
                timeout = config.exchange.timeout
                exchange = ReachedExchange(membership.address, keys, kept_in, timeout, listen, has_answered=True)
                own = None
                if here.rehearses:
                    own = OwnLine(prepared.spec, slot, _measured_line(membership, prepared.spec))
                run_members(prepared, runs, slot, exchange, operations or Operations(), own or AS_A_RUN)
                for line in own.lines() if own is not None else ():
                    announce(f"{run}: {line}")
        except (ConfigError, GivenUp, OSError, KeyboardInterrupt) as error:
            try:
                ask(membership.address, membership.identity.latest, "Give")
                note_left(membership)
                announce(f"{run}: {slot} is free again")
            except NewRun:
                pass  # the run no longer exists
            except (HeteroPPError, OSError) as why:
                if isinstance(error, ConfigError) and isinstance(why, Refused):  # another host got the slot meanwhile
                    raise RunFailed(str(error)) from None
                announce(f"{run}: {slot} could not be freed: {why}")
            raise


def _measured_line(membership: Membership, spec: RunSpec) -> dict[Way, Rate]:
    """Measure this host's line to the exchange, and report it; empty if that is not possible now."""
    try:
        with _client(membership) as client:
            up, down = measure(membership.address, membership.identity.latest)
            client.agree(membership.slot, spec.agreed, "")
            told = MeasuredLine(up=up.bits_per_second, down=down.bits_per_second)
            if told.up and told.down:  # nothing crosses a line of some hundred kbit/s in the time of a measurement
                client.report([Report(time=time.time(), member=membership.slot, measured_line=told)])
    except (Refused, LinkError) as error:
        announce(f"{membership.run}: the line was not measured: {error}")
        return {}
    return {"up": up, "down": down}


def _client(membership: Membership) -> closing[ExchangeClient]:
    return closing(ExchangeClient(membership.address, membership.credentials, timeout=_SECONDS_TO_ASK))


def _configure(membership: Membership, here: JoiningHost, folder: RunFolder) -> None:
    """Write this host's configuration of the run. Raises ConfigError if the slot needs something that is missing."""
    tokenizer = here.tokenizer or membership.tokenizer
    told, slot = membership.configuration, membership.slot
    config = own_configuration(told, slot, here.data, tokenizer, here.device)
    config = config.model_copy(update={"store": _store(membership)})
    _require_wanted(config.rehearsal is not None, here)
    if config.name != membership.run:
        found = f"found the configuration of the run {config.name}, expected that of {membership.run}"
        raise ConfigError((), f"{found}; ask for another ticket")
    if config.rehearsal is None:
        require_data(config, slot, here.data)
    address = listen_told(told, slot)
    if address not in (None, RELAYED) and here.listen is None:
        told = f"the run's YAML lets {slot} listen at {address}"
        instead = "This host dials its neighbours instead, through the exchange if necessary"
        announce(f"{membership.run}: {told}. {instead}; add --listen {address} to listen there")
    save_config(config, folder.config)


def _store(membership: Membership) -> StoreSettings:
    """Return the store named in the ticket, and print where the exchange may send this host. Raises ConfigError."""
    if not membership.store:
        return StoreSettings()
    try:
        store = StoreSettings(url=membership.store)
    except ValueError:
        told = "the ticket names a store of an unknown kind; install the hetero-pp version of the run"
        raise ConfigError((), told) from None
    if origins := store.origins():
        where = f"{parsed(membership.store)[0]} at {' or '.join(origins)}"
        told = f"contributions go to {where}, with URLs that the exchange signs"
        announce(f"{membership.run}: {told}; the exchange cannot direct this host to any other address")
    return store
