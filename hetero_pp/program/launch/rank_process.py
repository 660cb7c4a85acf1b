"""The main function of every rank that torchrun starts for a datacenter replica."""

from __future__ import annotations

import json
import os
import sys
import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch
from torch.distributed.elastic.multiprocessing.errors import record

from hetero_pp.data.tokenizers import load_tokenizer
from hetero_pp.errors import HeteroPPError, LinkError, RunFailed
from hetero_pp.messages.messages_pb2 import Failure, Report
from hetero_pp.program.launch.ranks import CONSEQUENCE, TOKEN, RankJob
from hetero_pp.program.launch.resume import states_of
from hetero_pp.rpc.channels import keep_freed_memory
from hetero_pp.rpc.exchange import ExchangeClient
from hetero_pp.run.spec import RunSpec
from hetero_pp.run.yaml_file import ConfigFile
from hetero_pp.topology import DatacenterReplica
from replica_groups.exchange.restart import join_run
from replica_groups.exchange.shared import SharedExchange
from replica_groups.ranks import Ranks, init_ranks
from replica_groups.take_part import device_of, train_member


@record
def main() -> None:
    """Train as one rank of the member that its argument names, until its standard input ends."""
    job = RankJob(**json.loads(sys.argv[1]))
    threading.Thread(target=_follow_parent, name="lifeline", daemon=True).start()
    keep_freed_memory()
    config = ConfigFile(Path(job.config)).config
    torch.set_num_threads(config.threads)
    spec = RunSpec(config, load_tokenizer(config.data).vocabulary)
    member = spec.members[job.member]
    assert isinstance(member.replica, DatacenterReplica)
    ranks = init_ranks(device_of(member.replica))
    exchange = ExchangeClient(job.exchange, os.environ[TOKEN], job.member, spec.run)
    try:
        require_one_run(ranks, spec.run, job.member)
        states = replace(states_of(spec, Path(job.folder), job.member), ranks=ranks)
        shared = SharedExchange(exchange if ranks.is_first else None, ranks)
        last_round = join_run(shared, job.member, "", states)
        train_member(spec, member, exchange, None, None, Path(job.cache), states, last_round, ranks)
    except (LinkError, RunFailed) as error:
        print(error, file=sys.stderr, flush=True)
        os._exit(CONSEQUENCE)
    except HeteroPPError as error:
        if exchange.has_joined or not ranks.is_first:  # who was never let in has no say
            _tell(exchange, job.member, f"rank {ranks.rank}: {error}")
        raise
    finally:
        exchange.close()
    ranks.close()


def _tell(exchange: ExchangeClient, member: str, cause: str) -> None:
    """Say why, before the connection's end says only that this member is gone."""
    with suppress(HeteroPPError):
        exchange.report([Report(member=member, failure=Failure(cause=cause))])


def require_one_run(ranks: Ranks, run: str, member: str) -> None:
    """Raise HeteroPPError on every rank if one of them has read another configuration than the first."""
    runs = ranks.gather_bytes(run.encode())
    for rank, other in enumerate(runs):
        if other != runs[0]:
            raise HeteroPPError(f"rank {rank} of {member} was started with another configuration than rank 0")


def _follow_parent() -> None:
    os.read(0, 1)
    os._exit(CONSEQUENCE)


if __name__ == "__main__":
    main()
