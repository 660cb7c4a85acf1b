"""The addresses that a YAML fixes: on which host each can be listened to, and whether its port is free."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import psutil

from hetero_pp.config.lines import EXCHANGE, RELAYED
from hetero_pp.config.run_config import RunConfig
from hetero_pp.config.topology import DatacenterReplica, ParticipantsReplica
from hetero_pp.core.errors import ConfigError
from hetero_pp.core.sockets import host_and_port

RELAY_KEY = ("exchange", "relay")


@dataclass(frozen=True)
class FixedAddress:
    """Address at which a member listens, as the YAML says."""

    key: tuple[str | int, ...]
    member: str
    address: str
    """HOST:PORT"""

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
        return not own_addresses().isdisjoint(resolved(self.host))

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


def own_addresses() -> set[str]:
    """Return the addresses of all interfaces of this machine, and the wildcard addresses."""
    found = {one.address.partition("%")[0] for some in psutil.net_if_addrs().values() for one in some}
    return found | {"0.0.0.0", "::"}


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
