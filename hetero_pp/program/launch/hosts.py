"""Distribution of a run over hosts: parts by name, addresses that a YAML fixes, the token, and the commands."""

from __future__ import annotations

import ipaddress
import shlex
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import psutil

from hetero_pp.config.folder import RunFolder
from hetero_pp.config.lines import EXCHANGE, RELAYED
from hetero_pp.config.overrides import Given
from hetero_pp.config.run_config import RunConfig
from hetero_pp.config.topology import DatacenterReplica, ParticipantsReplica, ReplicaSettings
from hetero_pp.config.yaml_file import ConfigFile
from hetero_pp.core.errors import ConfigError
from hetero_pp.core.files import write_whole
from hetero_pp.core.sockets import host_and_port
from hetero_pp.core.units import format_seconds

TOKEN_FILE = "token"  # name of the token's file in the commands for all hosts

SHORTEST_TOKEN = 32


def members_named(config: RunConfig, name: str) -> list[str]:
    """Return the members that `--only NAME` starts: the exchange, all of a replica, or one stage.

    Raises ConfigError with the valid names.
    """
    if name == EXCHANGE:
        return [EXCHANGE]
    found = {replica.name: replica.members for replica in config.replicas}
    found |= {member: [member] for replica in config.replicas for member in replica.members}
    if name not in found:
        raise ConfigError((), f"--only {name}: expected one of {', '.join([EXCHANGE, *found])}")
    return found[name]


def listens(config: RunConfig, members: Sequence[str]) -> str:
    """Return RELAYED for a later stage that starts alone on its host and has no address in the YAML, else "".

    Without TLS there is no relay, and the result is empty.
    """
    for replica in config.replicas:
        if isinstance(replica, ParticipantsReplica) and len(members) == 1 and members[0] in replica.members[1:]:
            own = replica.listen_of(replica.members.index(members[0]))
            if own is None and not config.exchange.insecure:
                return RELAYED
    return ""


def require_reachable(config: RunConfig, members: Sequence[str]) -> None:
    """Raise ConfigError for an address that no other host can dial."""
    if EXCHANGE in members and config.exchange.listen.endswith(":0"):
        expected = "expected a fixed port that other hosts can dial, such as `0.0.0.0:47600`"
        raise ConfigError(("exchange", "listen"), f"found `{config.exchange.listen}`, {expected}")
    for index, replica in enumerate(config.replicas):
        if not isinstance(replica, ParticipantsReplica):
            continue
        for stage, member in enumerate(replica.members):
            host = (replica.listen_of(stage) or "").rpartition(":")[0]
            if member in members and host in ("0.0.0.0", "[::]"):
                neighbour = replica.members[stage - 1 if stage > 0 else min(1, replica.stage_count - 1)]
                expected = f"expected the address at which {neighbour} can dial this host"
                raise ConfigError(("replicas", index, "stages", stage, "listen"), f"found `{host}`, {expected}")


def read_token(path: Path) -> str:
    """Return the token in a file. Raises ConfigError if there is none."""
    try:
        token = path.read_text(encoding="utf-8").strip()
    except OSError as error:
        found = f"--token-file {path}: cannot be read ({error.strerror})"
        raise ConfigError((), f"{found}; make one token for all hosts: openssl rand -hex 16 > {path}") from None
    if len(token) < SHORTEST_TOKEN:
        found = f"found {len(token)} characters, expected at least {SHORTEST_TOKEN} random ones"
        raise ConfigError((), f"--token-file {path}: {found}; make one with: openssl rand -hex 16 > {path}")
    return token


def write_token(folder: RunFolder, token: str) -> Path:
    """Write the run's token to its folder, readable by its owner only."""
    write_whole(folder.token, f"{token}\n".encode(), is_secret=True)
    return folder.token


def no_answer(address: str, seconds: float, limit: float, has_answered: bool, last: str = "") -> str:
    """Describe to the user that the exchange does not answer. `last`: what it said in its last answer."""
    since = format_seconds(seconds)
    until = f"waiting up to {format_seconds(limit)} (Ctrl-C ends this)"
    if has_answered:
        found = f"the exchange at {address} answered before, but not for the last {since}{last and f' ({last})'}"
        return f"{found}: the run is over, was stopped, or is being restarted; {until}"
    found = f"the exchange at {address} has not answered for {since}"
    return f"{found}: it is not started yet, the run is over, or the address is wrong; {until}"


def commands(config: RunConfig, path: Path, overrides: Sequence[Given]) -> list[str]:
    """Return the command for each host: the exchange, every replica, and every stage of a group on several hosts.

    Raises ConfigError if other hosts could not reach a listener.
    """
    require_reachable(config, [EXCHANGE, *(name for replica in config.replicas for name in replica.members)])
    sets = [part for one in overrides for part in (("--set", one) if isinstance(one, str) else shlex.split(one.shown))]
    start = ["hetero-pp", "launch", str(path), *sets]
    port = config.exchange.listen.rpartition(":")[2]
    token = ["--token-file", TOKEN_FILE]
    reach = token if config.exchange.hosts else ["--exchange", f"EXCHANGE_HOST:{port}", *token]
    found = [shlex.join([*start, "--only", EXCHANGE, *token])]
    standby = ["hetero-pp", "serve", str(path), *sets, "--standby", *token]
    found += [shlex.join(standby) for _ in config.exchange.hosts[1:]]
    for replica in config.replicas:
        copies = 1 if isinstance(replica, ParticipantsReplica) else replica.nodes
        names = replica.members if _is_on_several_hosts(replica) else [replica.name]
        found += [shlex.join([*start, "--only", name, *reach]) for name in names for _ in range(copies)]
    return found


def _is_on_several_hosts(replica: ReplicaSettings) -> bool:
    """Return whether a group's stages may be on several hosts: the YAML gives an address for one of them."""
    return isinstance(replica, ParticipantsReplica) and any(
        replica.listen_of(stage) is not None for stage in range(replica.stage_count)
    )


def notes(file: ConfigFile) -> list[str]:
    """Return notes on the commands: the token to make, and the addresses to replace, with file and line."""
    found = [f"make one token, and copy it to every host: openssl rand -hex 16 > {TOKEN_FILE}"]
    exchange, *others = fixed_addresses(file.config)

    def add(key: Sequence[str | int], note: str) -> None:
        found.append(str(file.located(ConfigError(key, note))))

    replace = "replace EXCHANGE_HOST with an address that other hosts can reach"
    if file.config.exchange.hosts:
        replace = f"its hosts are {', '.join(file.config.exchange.hosts)}"
    add(exchange.key, f"the exchange listens at `{exchange.address}`; {replace}")
    for one in others:
        if one.key == RELAY_KEY:
            add(one.key, f"its relay listens at `{one.address}`, which other hosts dial, too")
    for one in (exchange, *others):
        if one.is_loopback and one.key != RELAY_KEY:
            expected = "expected an address that other hosts can reach, unless they use a tunnel"
            add(one.key, f"found `{one.address}`, {expected}")
    for index, replica in enumerate(file.config.replicas):
        if _is_on_several_hosts(replica) and isinstance(replica, ParticipantsReplica):
            for stage in range(1, replica.stage_count):
                if replica.listen_of(stage) is None:
                    before = replica.listen_of(stage - 1) not in (None, RELAYED)
                    found_by = f"dials {replica.members[stage - 1]}" if before else "is reached through the exchange"
                    beside = "must run on the host of the previous stage"
                    how = beside if file.config.exchange.insecure else found_by
                    key = ("replicas", index, "stages", stage, "listen")
                    add(key, f"found no address, so {replica.members[stage]} {how}")
    return found


# ---- the addresses that a YAML fixes: on which host each can be listened to, and whether its port is free ----

RELAY_KEY = ("exchange", "relay")


@dataclass(frozen=True)
class FixedAddress:
    """Address at which a member listens, as the YAML says."""

    key: tuple[str | int, ...]
    member: str
    address: str  # HOST:PORT

    @property
    def name(self) -> str:
        """Name for messages."""
        return f"{self.member}'s relay" if self.key == RELAY_KEY else self.member

    @property
    def host(self) -> str:
        return host_and_port(self.address)[0]

    @cached_property
    def is_of_this_host(self) -> bool:
        """Whether this machine can listen at the address: it is one of the machine's own, or stands for all of them."""
        found = {one.address.partition("%")[0] for some in psutil.net_if_addrs().values() for one in some}
        return not {"0.0.0.0", "::", *found}.isdisjoint(resolved(self.host))

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach the address."""
        found = resolved(self.host)
        return bool(found) and all(ipaddress.ip_address(one).is_loopback for one in found)

    def try_to_listen(self) -> None:
        """Raise ConfigError if this machine cannot listen at the address."""
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        try:
            with socket.create_server(host_and_port(self.address), family=family):
                pass
        except OSError as error:
            expected = f"found `{self.address}`, expected a free port of this machine ({error.strerror})"
            if not self.is_of_this_host:
                expected += "; `launch --print-commands` prints the commands for several hosts"
            raise ConfigError(self.key, expected) from None


def fixed_addresses(config: RunConfig) -> Iterator[FixedAddress]:
    """Yield every address with a fixed port in the YAML."""
    yield from (one for one in _addresses(config) if not one.address.endswith(":0"))


def meeting_places(config: RunConfig) -> Iterator[FixedAddress]:
    """Yield the address at which the nodes of each replica of several nodes meet: one of them listens there."""
    for index, replica in enumerate(config.replicas):
        if isinstance(replica, DatacenterReplica) and replica.nodes > 1 and replica.rendezvous is not None:
            yield FixedAddress(("replicas", index, "rendezvous"), replica.name, replica.rendezvous)


def is_reached(config: RunConfig) -> bool:
    """Return whether other machines can reach a listener of the run, directly or through the exchange's relay."""
    relayed = any(listen == RELAYED for _, _, listen in _stages(config))
    return relayed or not all(one.is_loopback for one in _addresses(config))


def require_relay(config: RunConfig) -> None:
    """Raise ConfigError for a relayed stage without TLS, because the exchange could then read what it relays."""
    complaint = f"found `{RELAYED}`, expected an address: `exchange.insecure: true` has no relay"
    for key, _, listen in _stages(config):
        if listen == RELAYED and config.exchange.insecure:
            raise ConfigError(key, complaint)


def _addresses(config: RunConfig) -> Iterator[FixedAddress]:
    yield FixedAddress(("exchange", "listen"), EXCHANGE, config.exchange.listen)
    if not config.exchange.insecure:
        yield FixedAddress(RELAY_KEY, EXCHANGE, config.exchange.relays_at)
    yield from (FixedAddress(*found) for found in _stages(config) if found[2] != RELAYED)


def _stages(config: RunConfig) -> Iterator[tuple[tuple[str | int, ...], str, str]]:
    """Yield (key, member, address) of every stage that has an address in the YAML."""
    for index, replica in enumerate(config.replicas):
        if isinstance(replica, ParticipantsReplica) and isinstance(replica.stages, list):
            for stage, own in enumerate(replica.stages):
                if own.listen is not None:
                    yield ("replicas", index, "stages", stage, "listen"), replica.members[stage], own.listen


def dialled_here(listen: str) -> str:
    """Return the address at which this host itself dials a listener of its own."""
    return listen.replace("0.0.0.0", "127.0.0.1")


def reached_addresses() -> set[str]:
    """Return the IPv4 addresses of the interfaces that are up, without loopback and link-local ones."""
    up = {name for name, status in psutil.net_if_stats().items() if status.isup}
    found = [
        ipaddress.ip_address(one.address)
        for name, some in psutil.net_if_addrs().items()
        for one in some
        if name in up and one.family == socket.AF_INET
    ]
    return {str(one) for one in found if not one.is_loopback and not one.is_link_local}


def resolved(host: str) -> set[str]:
    """Return the addresses of a host as this machine resolves it; empty if it cannot.

    All of 127.0.0.0/8 is 127.0.0.1.
    """
    try:
        found = {str(info[4][0]).partition("%")[0] for info in socket.getaddrinfo(host, None)}
    except OSError:
        return set()
    return {"127.0.0.1" if one.startswith("127.") else one for one in found}
