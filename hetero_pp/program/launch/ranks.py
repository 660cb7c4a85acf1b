"""Starts the ranks of a datacenter replica with torchrun's agent, inside the member's process.

They are forked from the launch's fork server, which has imported PyTorch. They share a pipe from the member's process,
and end when that process does, however it ends. A message in the pipe asks them to save a saved state and end; it
is the last closed round, or None if that is not known.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Iterable
from multiprocessing import Pipe
from tempfile import TemporaryDirectory

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from hetero_pp.config.folder import RunFolder
from hetero_pp.config.topology import DatacenterReplica
from hetero_pp.core.errors import HeteroPPError, RunFailed
from hetero_pp.program.launch.fork_server import share_fork_server
from hetero_pp.program.launch.host_memory import MemoryKills
from hetero_pp.program.launch.job import CONSEQUENCE, RankDied
from hetero_pp.program.launch.rank_process import RankJob, rank_main
from hetero_pp.program.launch.rendezvous import BACKEND, interface_towards, meeting_place, register
from hetero_pp.rpc.identities import Credentials


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
    register()
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
            rank, failure = _first_failure(error)
            if failure.exitcode == CONSEQUENCE:
                raise RunFailed(_cause(failure.message)) from None
            if failure.exitcode < 0:
                how = f"killed by {failure.signal_name()}{kills.explain(failure.pid, failure.exitcode)}"
                raise RankDied(f"rank {rank} of {replica.name}: {how}") from None
            raise HeteroPPError(f"rank {rank} of {replica.name}: {_cause(failure.message)}") from None


def _first_failure(error: ChildFailedError) -> tuple[int, ProcessFailure]:
    """Return the rank that failed first, and its failure.

    Torch's timestamps are whole seconds, and the agent ends the other ranks by SIGTERM. Ranks that ended by SIGTERM are
    therefore considered only if there are no others.
    """
    own = {rank: one for rank, one in error.failures.items() if one.exitcode != -signal.SIGTERM}
    return min((own or error.failures).items(), key=lambda item: item[1].timestamp)


def _cause(message: object) -> str:
    """Return the last line of the exception that torch recorded for a rank."""
    text = message.get("message", "") if isinstance(message, dict) else str(message)
    lines = [line for line in str(text).splitlines() if line.strip()]
    return lines[-1] if lines else "it printed nothing"
