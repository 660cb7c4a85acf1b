"""The main function of every process that the launcher starts.

A process gets one line of JSON on standard input (which run, where the exchange is). Standard input then stays open
as a lifeline: when the launcher is gone, however it ended, so are its processes. The exchange answers with one line
of JSON on standard output: the port it listens on.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path

import torch

from hetero_pp.data.tokenizers import load_tokenizer
from hetero_pp.errors import HeteroPPError, LinkError, RunFailed
from hetero_pp.link.protocol import LinkEnd
from hetero_pp.program.config import MemberPlan, RunPlan
from hetero_pp.program.exchange_host import start_exchange
from hetero_pp.program.train import train_member
from hetero_pp.program.yaml_file import ConfigFile
from hetero_pp.rpc.channels import make_server
from hetero_pp.rpc.exchange import ExchangeClient, serve_exchange
from hetero_pp.rpc.messages_pb2 import Failure, Refusal, Report
from hetero_pp.rpc.stage_link import StageLinkServer, open_stage_link
from hetero_pp.topology import EXCHANGE, ParticipantsReplica, stage_link_name

FAILED = 1
CONSEQUENCE = 3
"""Exit codes: this process failed; or it only stopped because another one did."""

CONNECT_TIMEOUT = 120.0


def run_process(config_path: Path, member: str, folder: Path, cache: Path) -> int:
    """Run one member of the run until it is over; returns the exit code."""
    job = json.loads(sys.stdin.readline())
    threading.Thread(target=_follow_lifeline, name="lifeline", daemon=True).start()
    config = ConfigFile(config_path).config
    torch.set_num_threads(config.threads)
    plan = RunPlan(config, config.model.vocabulary or load_tokenizer(config.data).vocabulary)
    if member == EXCHANGE:
        return _run_exchange(plan, job["run"], folder)
    return _run_member(plan, job["run"], job["exchange"], plan.members[member], cache)


def _follow_lifeline() -> None:
    sys.stdin.read()
    os._exit(CONSEQUENCE)


def _run_exchange(plan: RunPlan, run: str, folder: Path) -> int:
    exchange, keeper = start_exchange(plan, run, folder)
    listen = plan.config.exchange.listen
    try:
        server, port = serve_exchange(exchange, listen, len(plan.members))
    except OSError as error:
        print(error, file=sys.stderr)
        return FAILED
    print(json.dumps({"address": f"{listen.rsplit(':', 1)[0]}:{port}"}), flush=True)
    try:
        exchange.wait_until_finished()
        keeper.join()
    except RunFailed as error:
        print(error, file=sys.stderr)
        exchange.end_watching()
        server.stop(1).wait()
        return CONSEQUENCE
    exchange.end_watching()
    server.stop(5).wait()
    return 0


def _run_member(plan: RunPlan, run: str, address: str, member: MemberPlan, cache: Path) -> int:
    exchange = ExchangeClient(address, run, member.name)
    links: list[LinkEnd] = []
    try:
        upstream, downstream = _open_links(plan, run, member, exchange)
        links = [link for link in (upstream, downstream) if link is not None]
        train_member(plan, run, member, exchange, upstream, downstream, cache)
        for link in links:
            link.close()
    except (HeteroPPError, OSError) as error:
        consequence = isinstance(error, LinkError | RunFailed)
        for link in links:
            link.abort(str(error))
        print(error, file=sys.stderr)
        _tell_failure(exchange, member.name, str(error), consequence)
        return CONSEQUENCE if consequence else FAILED
    except Exception as error:  # noqa: BLE001 (a bug: the trace goes to the log, one line to the user)
        traceback.print_exc()
        _tell_failure(exchange, member.name, f"{type(error).__name__}: {error}", consequence=False)
        return FAILED
    finally:
        exchange.close()
    return 0


def _tell_failure(exchange: ExchangeClient, member: str, cause: str, consequence: bool) -> None:
    try:
        exchange.report([Report(member=member, failure=Failure(cause=cause, consequence=consequence))])
    except HeteroPPError:
        pass  # the exchange is gone too; the launcher sees the exit code


def _refusal_reporter(exchange: ExchangeClient, member: str) -> Callable[[str, str], None]:
    """Tells the exchange of messages that a stage did not let in, so that they are counted for the run."""

    def tell(sender: str, reason: str) -> None:
        exchange.report([Report(member=member, refusal=Refusal(sender=sender, reason=reason))])

    return tell


def _open_links(
    plan: RunPlan, run: str, member: MemberPlan, exchange: ExchangeClient
) -> tuple[LinkEnd | None, LinkEnd | None]:
    """Listen for the stage before, join, dial the stage after."""
    replica, stage = member.replica, member.stage
    if stage is None or not isinstance(replica, ParticipantsReplica):
        exchange.join(member.name, "")
        return None, None
    server, address = None, ""
    if not stage.is_first:
        link = plan.links[stage_link_name(replica.name, stage.index - 1)]
        server = StageLinkServer(link, run, member.name, plan.config.seed, _refusal_reporter(exchange, member.name))
        own = replica.stage_settings(stage.index)
        listen = (own and own.listen) or "127.0.0.1:0"
        _, port = make_server(listen, [server.handler()], max_workers=4)
        address = f"{listen.rsplit(':', 1)[0]}:{port}"
    exchange.join(member.name, address)
    downstream: LinkEnd | None = None
    if not stage.is_last:
        link = plan.links[stage_link_name(replica.name, stage.index)]
        target = exchange.locate(link.target)
        downstream = open_stage_link(target, link, run, member.name, plan.config.seed, CONNECT_TIMEOUT)
    return None if server is None else server.accept(CONNECT_TIMEOUT), downstream
