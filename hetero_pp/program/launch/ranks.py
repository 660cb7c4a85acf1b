"""The ranks of a datacenter replica, started by torchrun's agent inside the member's process and watched over by it.

Their standard input is a pipe that the member's process holds: when that process ends, however it does, so do they.
A byte in it asks them to save their state and end.
Their credentials go through the environment, so that no list of processes shows it.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from hetero_pp.errors import HeteroPPError, RunFailed
from hetero_pp.program.launch.job import CONSEQUENCE
from hetero_pp.program.launch.rendezvous import BACKEND, interface_towards, meeting_place, register
from hetero_pp.rpc.credentials import Credentials
from hetero_pp.run.folder import RunFolder
from hetero_pp.topology import DatacenterReplica

CREDENTIALS = "HETERO_PP_CREDENTIALS"
"""The environment variable that carries the member's credentials to its ranks."""

_LISTENING = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""The only way to tell gloo and NCCL on which interface ranks listen for each other; by default it is a public one."""


@dataclass(frozen=True)
class RankJob:
    """What every rank of a member is told, as its only argument in JSON; see Job."""

    member: str
    folder: str
    config_name: str
    exchange: str
    missed: list[int]
    """Rounds whose contributions are held back; see Faults."""


class RankDied(HeteroPPError):
    """A rank was killed: started again, it may go on."""


def run_ranks(
    replica: DatacenterReplica,
    run: str,
    folder: RunFolder,
    exchange: str,
    credentials: Credentials,
    timeout: float,
    missed: Iterable[int] = (),
    on_start: Callable[[Callable[[], object]], object] = lambda _: None,
) -> None:
    """Run all of this node's ranks to their end; other nodes are waited for `timeout` seconds.

    `on_start` is given a function that asks the ranks to save their state and end, for another thread to call.

    Raises HeteroPPError with the first rank that failed and its cause; RankDied if it was killed; RunFailed if it
    failed because of another member.
    """
    endpoint = meeting_place(replica.rendezvous) if replica.nodes > 1 and replica.rendezvous is not None else ""
    job = RankJob(replica.name, str(folder.path.absolute()), folder.config_name, exchange, sorted(missed))
    register()
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
    )
    os.environ[CREDENTIALS] = credentials.to_json()
    os.environ |= dict.fromkeys(_LISTENING, interface_towards(endpoint))
    with _lifeline() as stop:
        on_start(stop)
        try:
            elastic_launch(config, sys.executable)(
                "-m", "hetero_pp.program.launch.rank_process", json.dumps(asdict(job))
            )
        except ChildFailedError as error:
            rank, failure = _first_failure(error)
            if failure.exitcode == CONSEQUENCE:
                raise RunFailed(_cause(failure.message)) from None
            if failure.exitcode < 0:
                raise RankDied(f"rank {rank} of {replica.name}: killed by {failure.signal_name()}") from None
            raise HeteroPPError(f"rank {rank} of {replica.name}: {_cause(failure.message)}") from None


def _first_failure(error: ChildFailedError) -> tuple[int, ProcessFailure]:
    """The agent ends the other ranks by SIGTERM, and torch knows whole seconds only: such a rank was not the first."""
    own = {rank: one for rank, one in error.failures.items() if one.exitcode != -signal.SIGTERM}
    return min((own or error.failures).items(), key=lambda item: item[1].timestamp)


def _cause(message: object) -> str:
    """The last line of what torch noted of a rank's exception."""
    text = message.get("message", "") if isinstance(message, dict) else str(message)
    lines = [line for line in str(text).splitlines() if line.strip()]
    return lines[-1] if lines else "it printed nothing"


@contextmanager
def _lifeline() -> Iterator[Callable[[], object]]:
    """Make a pipe this process's standard input, for its children: it ends when this process does.

    Yields a function that asks the children to stop. One of them, the first rank here, reads the byte.
    """
    reading, writing = os.pipe()
    kept = os.dup(0)
    os.dup2(reading, 0)
    os.close(reading)
    try:
        yield partial(os.write, writing, b"s")
    finally:
        os.close(writing)
        os.dup2(kept, 0)
        os.close(kept)
