"""The main function of every process that the launcher starts.

Each has a connection to the launcher. Over it comes one JSON object (the launch's token, where the exchange is),
and back go the exchange's address or the cause of a failure. The connection is also a lifeline: when the launcher is
gone, however it ended, so are its processes.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn

import torch

from hetero_pp.data.tokenizers import load_tokenizer
from hetero_pp.errors import HeteroPPError, LinkError, RunFailed
from hetero_pp.link.protocol import LinkEnd
from hetero_pp.messages.messages_pb2 import Failure, Refusal, Report
from hetero_pp.program.launch.exchange_host import begin_run, make_exchange
from hetero_pp.program.launch.ranks import CONSEQUENCE, RankJob, run_ranks
from hetero_pp.program.launch.resume import states_of
from hetero_pp.rpc.channels import keep_freed_memory, make_server
from hetero_pp.rpc.exchange import ExchangeClient, serve_exchange
from hetero_pp.rpc.stage_link import StageLinkServer, open_stage_link
from hetero_pp.run.spec import MemberSpec, RunSpec
from hetero_pp.run.yaml_file import ConfigFile
from hetero_pp.topology import EXCHANGE, DatacenterReplica, ParticipantsReplica, stage_link_name
from replica_groups.exchange.restart import join_run
from replica_groups.saved_states import SavedStates
from replica_groups.take_part import train_member

FAILED = 1

CONNECT_TIMEOUT = 120.0

_SECONDS_TO_HEAR = 5.0
"""How long the exchange goes on answering after a failure."""


@dataclass(frozen=True)
class Job:
    """Which member a process is, and where the run and the encoded corpora are kept."""

    member: str
    folder: Path
    config: Path
    """The resolved configuration."""
    cache: Path
    resume: bool = False
    """Whether the exchange goes on with the run that is in the folder."""


def log_path(folder: Path, member: str) -> Path:
    """Where a member's output goes."""
    return folder / "logs" / f"{member}.log"


def process_main(launcher: Connection, job: Job) -> NoReturn:
    """Run one member of the run until it is over, then end the process."""
    os.setsid()  # Ctrl-C reaches the launcher only, which then ends the others
    _redirect_output(log_path(job.folder, job.member))
    keep_freed_memory()
    code = FAILED
    try:
        words = json.loads(launcher.recv_bytes())
        threading.Thread(target=_follow_lifeline, args=(launcher,), name="lifeline", daemon=True).start()
        config = ConfigFile(job.config).config
        torch.set_num_threads(config.threads)
        spec = RunSpec(config, load_tokenizer(config.data).vocabulary)
        if job.member == EXCHANGE:
            code = _run_exchange(spec, words["token"], job, launcher)
        else:
            code = _run_member(spec, words["token"], words["exchange"], spec.members[job.member], job, launcher)
    except EOFError:
        code = CONSEQUENCE  # the launcher ended before it gave this process anything to do
    except Exception as error:  # noqa: BLE001 (a bug: the trace goes to the log, one line to the user)
        traceback.print_exc()
        _say(launcher, failure=f"{type(error).__name__}: {error}")
    finally:
        sys.stderr.flush()
        sys.stdout.flush()
        os._exit(code)


def _redirect_output(log: Path) -> None:
    log.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


def _follow_lifeline(launcher: Connection) -> None:
    """End with the launcher, however it ended."""
    try:
        launcher.recv_bytes()
    except (EOFError, OSError):
        os._exit(CONSEQUENCE)


def _say(launcher: Connection, **words: str) -> None:
    with suppress(OSError):  # if the launcher is gone, the lifeline ends this process
        launcher.send_bytes(json.dumps(words).encode())


def _run_exchange(spec: RunSpec, token: str, job: Job, launcher: Connection) -> int:
    exchange = make_exchange(spec, job.folder)
    listen = spec.config.exchange.listen
    try:
        server, port = serve_exchange(exchange, token, listen, len(spec.members))
    except OSError as error:
        _say(launcher, failure=str(error))
        return FAILED
    _say(launcher, address=f"{listen.rsplit(':', 1)[0]}:{port}")
    try:
        auditor = begin_run(exchange, spec, job.resume)
        exchange.wait_until_finished()
        auditor.join()
    except HeteroPPError as error:
        _say(launcher, failure=str(error))
        exchange.end_watching()
        exchange.wait_until_left(_SECONDS_TO_HEAR)
        server.stop(1).wait()
        return CONSEQUENCE if isinstance(error, RunFailed) else FAILED
    exchange.end_watching()
    server.stop(5).wait()
    return 0


def _run_member(spec: RunSpec, token: str, address: str, member: MemberSpec, job: Job, launcher: Connection) -> int:
    exchange = ExchangeClient(address, token, member.name, spec.run)
    links: list[LinkEnd] = []
    try:
        if isinstance(member.replica, DatacenterReplica) and member.replica.engine != "torch":
            folder, config, cache = (str(path.absolute()) for path in (job.folder, job.config, job.cache))
            ranks = RankJob(member.name, folder, config, cache, address)
            run_ranks(member.replica, spec.run, ranks, token)
            return 0
        states = states_of(spec, job.folder, member.name)
        upstream, downstream, last_round = _open_links(spec, token, member, exchange, states)
        links = [link for link in (upstream, downstream) if link is not None]
        train_member(spec, member, exchange, upstream, downstream, job.cache, states, last_round)
        for link in links:
            link.close()
    except (HeteroPPError, OSError) as error:
        consequence = isinstance(error, LinkError | RunFailed)
        for link in links:
            link.abort(str(error))
        print(error, file=sys.stderr)
        _say(launcher, failure=str(error))
        if exchange.has_joined:  # who was never let in has no say: another process may have its name
            _tell_failure(exchange, member.name, str(error), consequence)
        return CONSEQUENCE if consequence else FAILED
    finally:
        exchange.close()
    return 0


def _tell_failure(exchange: ExchangeClient, member: str, cause: str, consequence: bool) -> None:
    with suppress(HeteroPPError):  # if the exchange is gone too, the launcher sees the exit code
        exchange.report([Report(member=member, failure=Failure(cause=cause, consequence=consequence))])


def _refusal_reporter(exchange: ExchangeClient, member: str) -> Callable[[str, str], None]:
    """Tells the exchange of messages that a stage did not let in, so that they are counted for the run."""

    def tell(sender: str, reason: str) -> None:
        exchange.report([Report(member=member, refusal=Refusal(sender=sender, reason=reason))])

    return tell


def _open_links(
    spec: RunSpec, token: str, member: MemberSpec, exchange: ExchangeClient, states: SavedStates
) -> tuple[LinkEnd | None, LinkEnd | None, int]:
    """Listen for the stage before, join, dial the stage after; and the round after which the run goes on."""
    replica, stage = member.replica, member.stage
    if stage is None or not isinstance(replica, ParticipantsReplica):
        return None, None, join_run(exchange, member.name, "", states)
    server, address = None, ""
    if not stage.is_first:
        link = spec.links[stage_link_name(replica.name, stage.index - 1)]
        server = StageLinkServer(link, token, member.name, spec.config.seed, _refusal_reporter(exchange, member.name))
        own = replica.stage_settings(stage.index)
        listen = (own and own.listen) or "127.0.0.1:0"
        _, port = make_server(listen, [server.handler()], max_workers=4)
        address = f"{listen.rsplit(':', 1)[0]}:{port}"
    last_round = join_run(exchange, member.name, address, states)
    downstream: LinkEnd | None = None
    if not stage.is_last:
        link = spec.links[stage_link_name(replica.name, stage.index)]
        target = exchange.locate(link.target)
        downstream = open_stage_link(target, link, token, member.name, spec.config.seed, CONNECT_TIMEOUT)
    return None if server is None else server.accept(CONNECT_TIMEOUT), downstream, last_round
