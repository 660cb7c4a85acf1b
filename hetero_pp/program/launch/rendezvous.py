"""The rendezvous of a datacenter replica's nodes: a store that listens on one address and holds no pickles.

torchrun's own rendezvous listens on every interface and unpickles the content of its store, so anyone who reaches it
can run code. Here a single node listens on loopback, and several nodes on the address in the YAML. The store holds only
numbers and JSON.
"""

from __future__ import annotations

import errno
import platform
import socket
from datetime import timedelta

import psutil
from torch.distributed import DistError, PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

from hetero_pp.core.errors import HeteroPPError, Refused
from hetero_pp.core.sockets import host_and_port
from hetero_pp.core.units import format_seconds
from hetero_pp.program.launch.addresses import reached_addresses, resolved

BACKEND = "hetero_pp"
"""Name under which torchrun's agent finds this rendezvous."""

LOOPBACK = "127.0.0.1"

_IN_USE_OR_ELSEWHERE = (errno.EADDRINUSE, errno.EADDRNOTAVAIL)


def register() -> None:
    """Register this rendezvous with torchrun's agent. May be called again."""
    rendezvous_handler_registry.register(BACKEND, _from_parameters)


def _from_parameters(parameters: RendezvousParameters) -> RendezvousHandler:
    timeout = timedelta(seconds=parameters.get_as_int("timeout") or 0)
    return NodeRendezvous(parameters.endpoint, parameters.max_nodes, parameters.run_id, timeout)


class NodeRendezvous(RendezvousHandler):
    """A single rendezvous of a fixed number of nodes. `endpoint`: HOST:PORT on one of them; empty for one node."""

    def __init__(self, endpoint: str, nodes: int, run: str, timeout: timedelta) -> None:
        self._endpoint = endpoint or f"{LOOPBACK}:0"
        self._nodes = nodes
        self._run = run
        self._timeout = timeout

    def get_backend(self) -> str:
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        """Return True, so that ranks dial this store and none of them listens for the others."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Return this node's rank in order of arrival, once all nodes have joined.

        Raises Refused if too many nodes join, HeteroPPError with those that joined if too few do within the timeout.
        """
        host, port = host_and_port(self._endpoint)
        try:
            store = _store(host, port, self._timeout)
        except DistError:
            raise HeteroPPError(self._in_vain("no other node listens at this address")) from None
        shared = PrefixStore(self._run, store)
        node = shared.add("nodes", 1) - 1
        if node >= self._nodes:
            raise Refused(f"found more nodes than the {self._nodes} of the replica, at {self._endpoint}")
        shared.set(f"node {node}", platform.node())
        try:
            shared.wait([f"node {other}" for other in range(self._nodes)], self._timeout)
        except DistError:
            came = [shared.get(f"node {one}").decode() for one in range(self._nodes) if shared.check([f"node {one}"])]
            raise HeteroPPError(self._in_vain(f"only {', '.join(came)} joined")) from None
        return RendezvousInfo(shared, node, self._nodes, RendezvousStoreInfo(host, store.port))

    def _in_vain(self, who: str) -> str:
        within = format_seconds(self._timeout.total_seconds())
        return f"{self._nodes} nodes did not meet at {self._endpoint} within {within} (`exchange.timeout`): {who}"

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Do nothing: no node can join later."""

    def num_nodes_waiting(self) -> int:
        """Return 0: no node can join later."""
        return 0

    def get_run_id(self) -> str:
        return self._run

    def shutdown(self) -> bool:
        """Return True: the store ends with this process."""
        return True


def _store(host: str, port: int, timeout: timedelta) -> TCPStore:
    """Return the store at HOST:PORT. Serve it if the address is free on this machine, else dial it."""
    listening = None
    try:
        family = socket.getaddrinfo(host, port)[0][0]
        listening = socket.create_server((host, port), family=family)
    except OSError as error:
        if error.errno not in _IN_USE_OR_ELSEWHERE:
            raise HeteroPPError(f"rendezvous {host}:{port}: {error.strerror}") from None
    if listening is None:
        return TCPStore(host, port, None, False, timeout, wait_for_workers=False)
    port = listening.getsockname()[1]
    # Given a port, the store would listen on all interfaces; given a socket, it listens on that address only.
    descriptor = listening.detach()
    return TCPStore(host, port, None, True, timeout, wait_for_workers=False, master_listen_fd=descriptor)


def interface_towards(endpoint: str) -> str:
    """Return the network interface over which this machine reaches HOST:PORT; loopback's if it is empty.

    Ranks listen on this interface only. Raises HeteroPPError if there is none.
    """
    host, port = host_and_port(endpoint or f"{LOOPBACK}:1")
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as asking:
            asking.connect(address)  # a datagram socket: sends nothing
            own = asking.getsockname()[0]
    except OSError as error:
        raise HeteroPPError(f"rendezvous {endpoint}: {error.strerror}") from None
    wanted = LOOPBACK if own.startswith("127.") else own  # the interface lists 127.0.0.1 only, for all of 127.0.0.0/8
    for interface, addresses in psutil.net_if_addrs().items():
        if wanted in [one.address.partition("%")[0] for one in addresses]:
            return interface
    raise HeteroPPError(f"rendezvous {endpoint}: no network interface of this machine has the address {own}")


def meeting_place(endpoint: str) -> str:
    """Return the HOST:PORT at which this node listens or dials.

    On Debian a machine's own name resolves to 127.0.1.1, which other machines cannot reach. If the machine has exactly
    one other address, that one replaces it. Raises HeteroPPError with what to write instead if it has none or several.
    """
    host, port = host_and_port(endpoint)
    found = resolved(host)
    if host == "localhost" or host in found or host.startswith("127.") or not found <= {"127.0.0.1", "::1"}:
        return endpoint
    if not found:
        raise HeteroPPError(f"{endpoint}: the host name {host} cannot be resolved on this machine")
    own = sorted(reached_addresses())
    if len(own) == 1:
        return f"{own[0]}:{port}"
    choices = f"one of {', '.join(f'`{one}:{port}`' for one in own)}" if own else "an address of a network"
    told = "is this machine's loopback address, which other nodes cannot reach"
    raise HeteroPPError(f"{endpoint}: {host} {told}; use {choices}")
