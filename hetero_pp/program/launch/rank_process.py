"""The main function of every rank that torchrun's agent starts for a datacenter replica."""

from __future__ import annotations

import os
import platform
import select
import signal
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import NoReturn

import torch

from hetero_pp.config.folder import RunFolder
from hetero_pp.config.yaml_file import read_run
from hetero_pp.core.errors import HeteroPPError, LinkError, RunFailed
from hetero_pp.link.shaping import Lines
from hetero_pp.program.launch.fork_server import begin_forked
from hetero_pp.program.launch.job import CONSEQUENCE
from hetero_pp.rpc.connections import NetworkConnections
from hetero_pp.rpc.identities import Credentials
from hetero_pp.store.faults import Missed
from replica_groups.engines.ranks import Ranks, init_ranks
from replica_groups.member.stopping import Stopping
from replica_groups.member.take_part import take_part

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
    interface: str
    """Network interface on which ranks listen for each other."""
    missed: Sequence[int]
    """Rounds whose contributions are held back by injected faults."""


def rank_main(job: RankJob, lifeline: Connection) -> None:
    """Train as one rank of a member, until the other end of `lifeline` is gone."""
    begin_forked(job.folder.output(job.member), True)
    stopping = Stopping(_STOP, _leave)
    threading.Thread(target=_follow_member, args=[lifeline, stopping], name="lifeline", daemon=True).start()
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
            require_one_run(ranks, spec.run, job.member)
            if not ranks.is_first and os.environ["LOCAL_RANK"] == "0":
                connections.exchange.stay(platform.node())
            take_part(spec, member, connections, folder, ranks, faults=Missed(job.missed), stopping=stopping)
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


def require_one_run(ranks: Ranks, run: str, member: str) -> None:
    """Raise HeteroPPError on every rank if one of them has read another configuration than rank 0."""
    runs = ranks.gather_bytes(run.encode())
    for rank, other in enumerate(runs):
        if other != runs[0]:
            mend = "compare the YAML files of their hosts"
            raise HeteroPPError(f"rank {rank} of {member} has another configuration than rank 0; {mend}")


def _follow_member(lifeline: Connection, stopping: Stopping) -> None:
    """End this rank when the member's process ends.

    On a message from that process, the first rank of this node stops, and all other ranks with it.
    """
    if os.environ["LOCAL_RANK"] == "0":
        with suppress(EOFError):
            stopping.ask(lifeline.recv())
    hung_up = select.poll()
    hung_up.register(lifeline, 0)  # without POLLIN only the end of the pipe wakes it: a message is for the first rank
    hung_up.poll()
    _leave()


def _leave() -> NoReturn:
    os._exit(CONSEQUENCE)
