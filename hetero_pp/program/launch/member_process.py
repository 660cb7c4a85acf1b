"""The main function of every process that the launcher starts.

The launcher sends one JSON object over the process's connection, with the launch's token or credentials and the
exchange's address. The process sends back the exchange's address, or the cause of its failure. A later object asks it
to stop.

The connection is also a lifeline: when the launcher is gone, however it ended, the process ends.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import torch

from hetero_pp.config.lines import EXCHANGE, exchange_link_name
from hetero_pp.config.member_inputs import stage_devices
from hetero_pp.config.shared import told_of
from hetero_pp.config.topology import DatacenterReplica
from hetero_pp.config.yaml_file import read_run
from hetero_pp.core.errors import (
    ConfigError,
    HeteroPPError,
    LinkError,
    OutOfMemory,
    Refused,
    RunFailed,
    StoreError,
    WrongToken,
)
from hetero_pp.core.files import keep_trying
from hetero_pp.link.shaping import Lines
from hetero_pp.program.launch.fork_server import begin_forked
from hetero_pp.program.launch.job import CONSEQUENCE, CRASHED, FAILED, GONE, STOP, TAKEN_OVER, ProcessJob, RankDied
from hetero_pp.rpc.connections import NetworkConnections
from hetero_pp.rpc.identities import Credentials, Secret
from hetero_pp.rpc.memory import giving_freed_memory_back
from hetero_pp.rpc.relay import MeetingPoint
from hetero_pp.store.faults import Faults
from hetero_pp.store.lease import Lease
from replica_groups.audit.commitments import audited_member
from replica_groups.audit.in_exchange import audited, followed
from replica_groups.engines.ranks import Ranks
from replica_groups.exchange.admission import RunForGuests
from replica_groups.exchange.exchange import Exchange
from replica_groups.exchange.host import UnderWay, begin_run, make_exchange
from replica_groups.exchange.log import open_log
from replica_groups.exchange.memberships import open_memberships
from replica_groups.exchange.server import MOST_OPEN, OpenHouse, serve_exchange
from replica_groups.exchange.stall_detector import watched
from replica_groups.exchange.waiting_room import WaitingRoom
from replica_groups.member.stopping import Stopping
from replica_groups.member.take_part import take_part

_SECONDS_TO_HEAR = 5.0
"""Seconds for which the exchange still answers after the run has ended, for members that have not heard of it."""
_SECONDS_TO_APPLY = 10.0
"""Seconds for which an exchange that is asked to stop still answers, for members that do not have its last round."""
_SECONDS_KEPT = 5.0
"""Seconds for which the exchange keeps freed memory: longer than the time between two frames of a round."""


def process_main(launcher: Connection, job: ProcessJob, make_faults: Callable[[], Faults] = Faults) -> NoReturn:
    """Run one member of the run until it is over, then end the process."""
    begin_forked(job.folder.output(job.member), job.again, job.open_files)
    code = CRASHED
    try:
        message = json.loads(launcher.recv_bytes())
        if message.items() >= STOP.items():
            raise EOFError
        process = _Process(launcher, job, message, make_faults())
        torch.set_num_threads(process.spec.config.threads)
        if job.member == EXCHANGE:
            with giving_freed_memory_back(_SECONDS_KEPT):
                code = _run_exchange(process)
        else:
            code = _run_member(process)
    except EOFError:
        code = CONSEQUENCE  # the launcher ended before it sent the job
    except Exception as error:  # noqa: BLE001 (a bug: the trace goes to the log, one line to the user)
        traceback.print_exc()
        _send(launcher, failure=f"{type(error).__name__}: {error}")
    finally:
        sys.stderr.flush()
        sys.stdout.flush()
        os._exit(code)


def _send(launcher: Connection, **message: str) -> None:
    with suppress(OSError):  # if the launcher is gone, the lifeline ends this process
        launcher.send_bytes(json.dumps(message).encode())


class _Process:
    """This process, as the launcher has told it. It ends with the launcher, however the launcher ended."""

    def __init__(self, launcher: Connection, job: ProcessJob, message: Mapping[str, Any], faults: Faults) -> None:
        """`message`: secrets and addresses."""
        self.job, self.message, self.faults = job, message, faults
        self.launcher = launcher
        self.stop: Callable[[int | None], int | None] = lambda closed: os.kill(os.getpid(), signal.SIGTERM)
        """Called on a request to stop, in the lifeline's thread, with the last closed round if the launcher knows it.
        The exchange returns that round. Until something trains, the process just ends.
        """
        threading.Thread(target=self._follow, name="lifeline", daemon=True).start()
        self.spec = read_run(job.folder)

    def _follow(self) -> None:
        while True:
            try:
                asked = json.loads(self.launcher.recv_bytes())
            except (EOFError, OSError):
                os._exit(CONSEQUENCE)
            closed = self.stop(int(asked["round"]) if "round" in asked else None)
            _send(self.launcher, **STOP, **({} if closed is None else {"round": str(closed)}))

    def fails(self, cause: object, code: int = FAILED) -> int:
        """Tell the launcher why this process ends, and return its exit code."""
        _send(self.launcher, failure=str(cause))
        return code


def _run_exchange(process: _Process) -> int:
    """Open the exchange's log, listen, begin or resume the run, and answer until members know that it is over."""
    spec, job, message = process.spec, process.job, process.message
    process.stop = lambda closed: os._exit(CONSEQUENCE)

    def say(line: str) -> None:
        print(f"{EXCHANGE}: {line}", file=sys.stderr, flush=True)

    def make() -> Exchange:
        if lease is not None and not lease.is_held:
            # End at once, so that no member waits here. Nothing was acknowledged that the store does not have.
            lease.fence(lambda cause: os._exit(process.fails(cause, TAKEN_OVER)))
        return audited(make_exchange(spec, job.folder, job.resume, job.again, faults=process.faults, lease=lease), spec)

    def stop(closed: int | None) -> int:
        """Close no further round. If told the last closed round, wait until members have applied it."""
        if closed is None:
            return exchange.runner.halt()
        exchange.wait_until_applied(closed, _SECONDS_TO_APPLY)
        return closed

    def open_house() -> OpenHouse:
        from hetero_pp.simulator.planner.grouping import group_spares  # only a run that admits hosts needs the planner

        guests = RunForGuests(*told_of(spec.config), spec.shape.vocabulary)
        waiting_room = WaitingRoom(spec.optional_slots, group_spares)
        memberships = open_memberships(spec.config, job.folder, message["secret"], exchange.log.store)
        return OpenHouse(memberships, guests, waiting_room, spec.unnamed_slots)

    lease = None
    if job.lease:
        lease = Lease(open_log(spec.config, job.folder).store, spec.config.exchange.takeover, job.lease)
    try:
        # A restarted exchange tries again, because the disk may be full for a while.
        exchange = keep_trying(make, say) if job.again else make()
        process.stop = stop
    except (ConfigError, StoreError) as error:
        return process.fails(error)
    listen = message.get("listen") or spec.config.exchange.listen
    try:
        # Each further node of a member keeps its own connection, under the member's name.
        further = sum(one.nodes - 1 for one in spec.config.replicas if isinstance(one, DatacenterReplica))
        house = meeting_point = None
        if message["encrypted"]:
            house = keep_trying(open_house, say) if job.again else open_house()
            meeting_point = MeetingPoint(spec.config.exchange.relays_at)
        secret, is_encrypted = Secret(message["secret"]), house is not None
        server, port = serve_exchange(exchange, secret, listen, MOST_OPEN + further, is_encrypted, house, meeting_point)
    except (OSError, StoreError) as error:
        return process.fails(error)
    _send(process.launcher, address=f"{listen.rsplit(':', 1)[0]}:{port}")
    code, grace = 0, 5  # seconds for calls that are under way
    try:
        limit = spec.config.exchange.timeout
        with watched(exchange.expected, lambda one: exchange.reports.tell_own(waiting=one), exchange.fail, limit):
            auditor = begin_run(exchange, spec, job.folder, job.resume, job.again)
            followers = followed(auditor, exchange, spec, job.folder)
            exchange.wait_until_finished()
        followers.join()
    except UnderWay as error:
        code = process.fails(error)
        server.stop(None).wait()
        return code
    except HeteroPPError as error:
        code, grace = process.fails(error, CONSEQUENCE if isinstance(error, RunFailed) else FAILED), 1
    exchange.end_watching()
    if code:
        with exchange.changed:  # members that are still there get time to learn why the run has ended
            exchange.changed.wait_for(lambda: not exchange.here, _SECONDS_TO_HEAR)
    if house is not None:  # hosts that wait for a group get time to learn that the run has ended
        house.waiting_room.wait_until_told(_SECONDS_TO_HEAR)
    server.stop(grace).wait()
    return code


def _run_member(process: _Process) -> int:
    name, message = process.job.member, process.message
    replica, credentials = process.spec.members[name].replica, Credentials.from_json(message["credentials"])
    exchange = process.faults.route(exchange_link_name(name), message["exchange"])
    try:
        is_real = process.spec.config.rehearsal is None
        if is_real and isinstance(replica, DatacenterReplica) and replica.engine != "torch":
            _run_ranks(process, replica, exchange, credentials)
        else:
            _take_part(process, exchange, credentials)
    except OSError as error:  # such as a full disk, which may pass
        print(error, file=sys.stderr)
        return process.fails(error, CRASHED)
    except HeteroPPError as error:
        cause = str(error)
        if isinstance(error, WrongToken):
            cause += f" than this host, which has the token in {message['token_file']}"
        print(cause, file=sys.stderr)
        if isinstance(error, RankDied):
            return process.fails(cause, CRASHED)
        if isinstance(error, OutOfMemory):
            return process.fails(cause, GONE)
        return process.fails(cause, CONSEQUENCE if isinstance(error, LinkError | RunFailed) else FAILED)
    return 0


def _run_ranks(process: _Process, replica: DatacenterReplica, exchange: str, credentials: Credentials) -> None:
    """Run one node of a replica. On failure, report it to the nodes that wait for this one, even if none has joined."""
    from hetero_pp.program.launch.ranks import run_ranks  # only ranks need torchrun's agent

    spec, job = process.spec, process.job
    try:
        where = (job.folder, exchange, credentials, spec.config.exchange.timeout, job.device)
        run_ranks(replica, spec.run, *where, missed=process.faults.missed, on_start=partial(setattr, process, "stop"))
    except Refused:  # a node too many must not fail the run
        raise
    except (HeteroPPError, OSError) as error:
        if replica.nodes > 1 and not isinstance(error, RunFailed | RankDied):
            member, lines = spec.members[job.member], Lines(job.folder.lines)
            with NetworkConnections(spec, member, exchange, credentials, lines) as connections:
                connections.report_failure(f"{platform.node()}: {error}")
        raise


def _take_part(process: _Process, exchange: str, credentials: Credentials) -> None:
    spec, job, faults = process.spec, process.job, process.faults
    member, listen = spec.members[job.member], process.message["listen"]

    def end() -> None:
        """End by SIGTERM with its default handler, so that the parent process sees the signal in the exit status."""
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)

    lines, stopping = Lines(job.folder.lines), Stopping(signal.SIGTERM, end)
    process.stop = stopping.ask
    with NetworkConnections(spec, member, exchange, credentials, lines, faults, listen) as connections:
        try:
            device = torch.device(job.device)
            devices = () if spec.config.rehearsal is not None else stage_devices(member, device)
            ranks = Ranks(device=device, devices=devices)
            take_part(
                spec, member, connections, job.folder, ranks, faults=faults, stopping=stopping, audited=audited_member
            )
        except HeteroPPError as error:
            # A member that was never admitted must not fail the run: another process may hold its name.
            if connections.exchange.has_joined:
                connections.report_failure(str(error), isinstance(error, LinkError | RunFailed))
            raise
