"""The ranks of a datacenter replica: torchrun's agent inside the member's process, and the main function of each rank.

Ranks are forked from the launch's fork server, which has imported PyTorch. They share a pipe from the member's process,
and end when that process does, however it ends. A message in the pipe asks them to save a saved state and end; it
is the last closed round, or None if that is not known.
"""

from __future__ import annotations

import errno
import math
import os
import platform
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from tempfile import TemporaryDirectory
from typing import NoReturn

import psutil
import torch
from torch.distributed import DistError, PrefixStore, TCPStore
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from hetero_pp.config.folder import RunFolder
from hetero_pp.config.topology import DatacenterReplica
from hetero_pp.config.yaml_file import read_run
from hetero_pp.core.errors import HeteroPPError, LinkError, Refused, RunFailed
from hetero_pp.core.sockets import host_and_port
from hetero_pp.core.units import format_seconds
from hetero_pp.link.shaping import Lines
from hetero_pp.program.launch.fork_server import begin_forked, share_fork_server
from hetero_pp.program.launch.host_memory import MemoryKills
from hetero_pp.program.launch.hosts import reached_addresses, resolved
from hetero_pp.program.launch.job import CONSEQUENCE, RankDied
from hetero_pp.rpc.connections import NetworkConnections
from hetero_pp.rpc.identities import Credentials
from hetero_pp.store.faults import Missed
from replica_groups.audit.commitments import audited_member
from replica_groups.engines.ranks import init_ranks
from replica_groups.member.stopping import Stopping
from replica_groups.member.take_part import take_part


def run_ranks(
    replica: DatacenterReplica,
    run: str,
    folder: RunFolder,
    exchange: str,
    credentials: Credentials,
    timeout: float,
    device: str,
    missed: Iterable[int] = (),
    on_start: Callable[[Callable[[int | None], None]], object] = lambda _: None,
) -> None:
    """Run all ranks of this node to their end.

    `timeout`: seconds to wait for the other nodes. `device`: a device of their kind; each rank takes its own.
    `on_start` is called with a function that asks the ranks to save a saved state and end; any thread may call
    it, with the last closed round or None.

    Raises HeteroPPError with the first failed rank and its cause: RankDied if it was killed, RunFailed if it failed
    because of another member.
    """
    endpoint = meeting_place(replica.rendezvous) if replica.nodes > 1 and replica.rendezvous is not None else ""
    where = (device, interface_towards(endpoint))
    job = RankJob(replica.name, folder, exchange, credentials, *where, sorted(missed))
    rendezvous_handler_registry.register(BACKEND, _from_parameters)  # for torchrun's agent; may be repeated
    share_fork_server()
    (lifeline, ours), kills = Pipe(duplex=False), MemoryKills()
    # torch would leave behind the folder in which failed ranks note their causes
    with lifeline, ours, TemporaryDirectory(prefix="hetero-pp-", ignore_cleanup_errors=True) as causes:
        on_start(ours.send)
        config = LaunchConfig(
            min_nodes=replica.nodes,
            max_nodes=replica.nodes,
            nproc_per_node=replica.ranks,
            run_id=f"{run}-{replica.name}",
            rdzv_backend=BACKEND,
            rdzv_endpoint=endpoint,
            rdzv_configs={"timeout": math.ceil(timeout)},
            max_restarts=0,
            monitor_interval=0.1,
            start_method="forkserver",
            logs_specs=DefaultLogsSpecs(log_dir=causes),
        )
        try:
            elastic_launch(config, rank_main)(job, lifeline)
        except ChildFailedError as error:
            # Torch's timestamps are whole seconds, and the agent ends the other ranks by SIGTERM. Ranks that ended by
            # SIGTERM are therefore considered only if there are no others.
            own = {rank: one for rank, one in error.failures.items() if one.exitcode != -signal.SIGTERM}
            rank, failure = min((own or error.failures).items(), key=lambda item: item[1].timestamp)
            if failure.exitcode == CONSEQUENCE:
                raise RunFailed(_cause(failure.message)) from None
            if failure.exitcode < 0:
                how = f"killed by {failure.signal_name()}{kills.explain(failure.pid, failure.exitcode)}"
                raise RankDied(f"rank {rank} of {replica.name}: {how}") from None
            raise HeteroPPError(f"rank {rank} of {replica.name}: {_cause(failure.message)}") from None


def _cause(message: object) -> str:
    """Return the last line of the exception that torch recorded for a rank."""
    text = message.get("message", "") if isinstance(message, dict) else str(message)
    lines = [line for line in str(text).splitlines() if line.strip()]
    return lines[-1] if lines else "it printed nothing"


# ---- the process of a rank ----

_COLLECTIVE_TIMEOUT = timedelta(days=7)
"""Timeout of collectives. It is long because ranks wait in one while the first rank waits for other replicas.

The exchange notices a member that is gone or silent, and the launcher ends the ranks of its node.
"""

_LISTENING = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Environment variables with the interface on which ranks listen for each other.

Gloo and NCCL take it in no other way, and by default choose a public interface.
"""

_SECONDS_FOR_THE_CAUSE = 1.0
"""Seconds that a rank waits before it fails with an error that another rank's death may have caused.

torchrun's agent looks ten times as often, and reports only one failed rank: the killed rank, while this one waits.
"""

_STOP = signal.SIGUSR2
"""Signal that a rank sends to itself. SIGTERM is taken: torchrun's agent sends it when another rank has failed."""


@dataclass(frozen=True)
class RankJob:
    """Arguments of every rank of a member."""

    member: str
    folder: RunFolder
    exchange: str
    credentials: Credentials
    device: str
    interface: str  # network interface on which ranks listen for each other
    missed: Sequence[int]  # rounds whose contributions are held back by injected faults


def rank_main(job: RankJob, lifeline: Connection) -> None:
    """Train as one rank of a member, until the other end of `lifeline` is gone."""
    begin_forked(job.folder.output(job.member), True)
    stopping = Stopping(_STOP, _leave)

    def follow_member() -> None:
        """End with the member's process. On its message, the first rank of this node stops, and all others with it."""
        if os.environ["LOCAL_RANK"] == "0":
            with suppress(EOFError):
                stopping.ask(lifeline.recv())
        hung_up = select.poll()
        hung_up.register(lifeline, 0)  # without POLLIN only the end of the pipe wakes it: a message is for that rank
        hung_up.poll()
        _leave()

    threading.Thread(target=follow_member, name="lifeline", daemon=True).start()
    os.environ |= dict.fromkeys(_LISTENING, job.interface)
    try:
        _train(job, stopping)
    except RuntimeError:  # as torch.distributed and its back ends raise
        time.sleep(_SECONDS_FOR_THE_CAUSE)
        raise


def _train(job: RankJob, stopping: Stopping) -> None:
    folder = job.folder
    spec = read_run(folder)
    torch.set_num_threads(spec.config.threads)
    member = spec.members[job.member]
    ranks = init_ranks(torch.device(job.device), _COLLECTIVE_TIMEOUT)
    with NetworkConnections(spec, member, job.exchange, job.credentials, Lines(folder.lines)) as connections:
        try:
            runs = ranks.gather_bytes(spec.run.encode())
            for rank, other in enumerate(runs):  # every rank raises the error, so that none waits for the others
                if other != runs[0]:
                    found = f"rank {rank} of {job.member} has another configuration than rank 0"
                    raise HeteroPPError(f"{found}; compare the YAML files of their hosts")
            if not ranks.is_first and os.environ["LOCAL_RANK"] == "0":
                connections.exchange.stay(platform.node())
            faults = Missed(job.missed)
            take_part(
                spec, member, connections, folder, ranks, faults=faults, stopping=stopping, audited=audited_member
            )
            ranks.wait()  # rank 0 has reported the end of the member: no rank leaves before
        except (LinkError, RunFailed) as error:
            print(error, file=sys.stderr, flush=True)
            os._exit(CONSEQUENCE)
        except HeteroPPError as error:
            # A member that was never admitted must not fail the run.
            if connections.exchange.has_joined or not ranks.is_first:
                connections.report_failure(f"rank {ranks.rank}: {error}")
            raise
    ranks.close()


def _leave() -> NoReturn:
    os._exit(CONSEQUENCE)


# ---- the rendezvous of the nodes ----

BACKEND = "hetero_pp"  # name under which torchrun's agent finds this rendezvous

LOOPBACK = "127.0.0.1"

_IN_USE_OR_ELSEWHERE = (errno.EADDRINUSE, errno.EADDRNOTAVAIL)


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
