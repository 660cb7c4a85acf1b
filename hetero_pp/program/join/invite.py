"""`hetero-pp invite` and `hetero-pp revoke`: tickets to a run that this host serves."""

from __future__ import annotations

import re
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from datetime import datetime
from difflib import get_close_matches
from pathlib import Path

from hetero_pp.config.folder import RunFolder, run_folder
from hetero_pp.config.lines import LAUNCHER
from hetero_pp.config.run_config import RunConfig
from hetero_pp.config.topology import DatacenterReplica, ParticipantsReplica
from hetero_pp.config.yaml_file import config_of
from hetero_pp.core.errors import ConfigError, HeteroPPError
from hetero_pp.core.units import SECONDS, parse_quantity
from hetero_pp.program.join.membership import is_running, read_run_on_disk
from hetero_pp.program.launch.earlier import over_on_disk
from hetero_pp.program.launch.hosts import dialled_here, read_token
from hetero_pp.program.report.output import announce, complain
from hetero_pp.rpc.admission_client import ask
from hetero_pp.rpc.identities import Authority, Identity, Secret, make_ticket
from replica_groups.exchange.memberships import Memberships, open_memberships
from replica_groups.exchange.stall_detector import NAMED, listed

_SECONDS_TO_ASK = 3.0
_NUMBERED = re.compile(r"-\d+$")


def invite(runs: Path, run: str, slot: str | None, seconds: float, address: str | None) -> None:
    """Print a ticket that admits one process to a slot, or with `slot` None to any free stage of a group.

    The slots of the ticket go to standard error, so that a script reads the ticket alone. Raises ConfigError for
    a run that this host does not serve, and for a slot that does not exist or is taken.
    """
    folder, config = _served(runs, run)
    if over := over_on_disk(folder):
        raise ConfigError((), f"{folder.path}: {over}")
    slots = [member for replica in config.replicas for member in replica.members]
    if slot is not None and slot not in slots:
        groups = [replica.name for replica in config.replicas if isinstance(replica, ParticipantsReplica)]
        if slot in [*groups, *_entries(groups)]:
            stage = next(one for one in slots if one.startswith(slot))
            any_stage = "leave out --slot for a ticket to any free stage of a group"
            told = f"found the name of a group: {any_stage}, or name a stage, such as {stage}"
            raise ConfigError((), f"--slot {slot}: {told}")
        near = get_close_matches(slot, slots, n=NAMED) if len(slots) > NAMED else []
        raise ConfigError((), f"--slot {slot}: expected one of {listed(list(dict.fromkeys([*near, *slots])))}")
    reached = _address(config, address)
    authority = Authority(read_token(folder.token))
    with closing(open_memberships(config, folder, read_token(folder.token))) as memberships:
        try:
            ticket = memberships.invite(slot, seconds)
        except HeteroPPError as error:
            raise ConfigError((), f"--slot: {error}") from None
    until, admits_to, store = time.time() + seconds, good_for(config, slot), config.store.as_one_url()
    is_rehearsal = config.rehearsal is not None
    made = make_ticket(config.name, reached, authority, ticket, until, admits_to, store, is_rehearsal)
    sys.stdout.write(made.to_text() + "\n")
    how = "; it is of a rehearsal, so `join` needs --rehearse" if is_rehearsal else ""
    valid = f"it admits one host until {datetime.fromtimestamp(until):%Y-%m-%d %H:%M}"
    complain(f"{run}: this ticket is for {admits_to}; {valid}{how}")
    if not is_running(folder) and (resume := read_run_on_disk(folder).resume):
        complain(f"{run}: its exchange does not run now, so no host can join; resume it with: {resume}")
    if slot is None and (open_slots := _open_datacenters(config, folder, authority.identity(LAUNCHER))):
        commands = " or ".join(f"`hetero-pp invite {run} --slot {name}`" for name in open_slots)
        names = ", ".join(open_slots)
        complain(f"{run}: {names} is still free; a datacenter replica needs a ticket with its name: {commands}")


def invite_validator(runs: Path, run: str, name: str, address: str | None) -> None:
    """Print the pass of a validator. It judges in this name only, however many hosts use it. Raises as `invite`."""
    from hetero_pp.program.audits import Access, require_name  # a ticket does not need PyTorch

    folder, config = _served(runs, run)
    if config.audit.by != "validators":
        raise ConfigError((), f"{folder.config}: audit.by: found `exchange`, expected `validators`")
    secret = Secret(read_token(folder.token))
    given = Access.by_secret(require_name(name), _address(config, address), secret, encrypted=True)
    sys.stdout.write(given.to_json() + "\n")
    complain(f"{run}: this pass is for the validator {name}; on its host: hetero-pp audit validate LOG --pass FILE")


def good_for(config: RunConfig, slot: str | None) -> str:
    """Describe the slots that a ticket admits to: `a stage of group home`, `the datacenter replica dc`."""
    replicas = {member: replica for replica in config.replicas for member in replica.members}
    if slot in replicas:
        is_whole = isinstance(replicas[slot], DatacenterReplica)
        return f"the datacenter replica {slot}" if is_whole else f"{slot}, a stage of group {replicas[slot].name}"
    groups = [replica.name for replica in config.replicas if isinstance(replica, ParticipantsReplica)]
    if not groups:
        return f"the first of {', '.join(replica.name for replica in config.replicas)} with a free slot"
    return f"a stage of group {' or '.join(_entries(groups))}"


def _entries(groups: Sequence[str]) -> list[str]:
    """Return the YAML entries behind the names of groups: `home` for home-1, home-2 and so on."""
    stems = {name: _NUMBERED.sub("", name) for name in groups}
    counts = Counter(stems.values())
    return list(dict.fromkeys(stem if counts[stem] > 1 else name for name, stem in stems.items()))


def _open_datacenters(config: RunConfig, folder: RunFolder, identity: Identity) -> list[str]:
    """Return the datacenter replicas without a host or a valid ticket, if the run also has groups of stages."""
    if not any(isinstance(replica, ParticipantsReplica) for replica in config.replicas):
        return []
    with closing(Memberships(folder.memberships)) as memberships:
        invited = {one.slot for one in memberships.tickets() if not one.is_used and one.until > time.time()}
        names = [replica.name for replica in config.replicas if isinstance(replica, DatacenterReplica)]
        found = [name for name in names if name not in invited and memberships.held_by(name) is None]
    if not found or config.exchange.listen.endswith(":0") or not is_running(folder):
        return found
    try:  # hosts started with the run's token have no ticket, so only the exchange knows of them
        reply = ask(dialled_here(config.exchange.address), identity, "Status", seconds=_SECONDS_TO_ASK)
    except HeteroPPError:
        return found
    return [name for name in found if name not in {slot.name for slot in reply.slots if slot.held}]


def revoke(runs: Path, run: str, what: str) -> None:
    """Revoke a ticket, or the slot that a host holds by one. Raises ConfigError if there is none."""
    folder, config = _served(runs, run)
    with closing(open_memberships(config, folder, read_token(folder.token))) as memberships:
        try:
            taken = memberships.revoke(what)
        except HeteroPPError as error:
            raise ConfigError((), str(error)) from None
    for one in taken:
        announce(f"{run}: revoked {one}")


def seconds_of(text: str) -> float:
    """Return the seconds of a duration such as `24h`. Raises ConfigError for any other text."""
    try:
        return parse_quantity(text, SECONDS, "24h")
    except ValueError as error:
        raise ConfigError((), f"--expires: {error}") from None


def _served(runs: Path, run: str) -> tuple[RunFolder, RunConfig]:
    """Return the folder and the configuration of a run that this host serves. Raises ConfigError for any other run."""
    folder = run_folder(runs, run)
    if not folder.config.is_file() or not folder.token.is_file():
        found = "found no run that this host serves; start one with: hetero-pp serve CONFIG"
        raise ConfigError((), f"{folder.path}: {found}")
    config = config_of(folder)
    if config.exchange.insecure:
        raise ConfigError((), f"{folder.config}: exchange.insecure: found true, expected false: tickets need TLS")
    if len(config.exchange.hosts) > 1:  # another host would not hear of a change made here
        here, identity = dialled_here(config.exchange.listen), Authority(read_token(folder.token)).identity(LAUNCHER)
        try:
            ask(here, identity, "Status", seconds=_SECONDS_TO_ASK)
        except HeteroPPError:
            told = "this host does not serve the run now; use the one of `exchange.hosts` that does"
            raise ConfigError((), f"{folder.path}: {told}") from None
    return folder, config


def _address(config: RunConfig, given: str | None) -> str:
    """Return the address at which other hosts dial the exchange: the given one, or the YAML's, which may be several.

    Raises ConfigError if none can.
    """
    if given is not None:
        if any(one.endswith(":0") for one in given.split(",")):
            raise ConfigError((), f"--address: found {given}, expected the port at which hosts dial the exchange")
        return given
    listen = config.exchange.address
    if listen.endswith(":0"):
        told = "so its port is not known here; give its address with --address HOST:PORT"
        raise ConfigError((), f"the exchange listens at a free port ({listen}), {told}")
    if listen.rpartition(":")[0] in ("0.0.0.0", "[::]"):
        told = "which other hosts cannot dial; give its address with --address HOST:PORT"
        raise ConfigError((), f"the exchange listens at {listen}, {told}")
    return listen
