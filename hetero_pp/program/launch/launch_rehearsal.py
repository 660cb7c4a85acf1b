"""Launches a rehearsal of many members: threads of few processes, each with its own connections, on this machine."""

from __future__ import annotations

import json
import math
import os
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import NoReturn

import torch

from hetero_pp.config.changes import Values
from hetero_pp.config.folder import RunFolder
from hetero_pp.config.lines import EXCHANGE, LAUNCHER
from hetero_pp.config.spec import RunSpec
from hetero_pp.config.yaml_file import read_run
from hetero_pp.core.errors import HeteroPPError, LinkError, RunFailed
from hetero_pp.link.shaping import Lines
from hetero_pp.messages.messages_pb2 import Report
from hetero_pp.program.launch.fork_server import begin_forked, fork_server, unheard
from hetero_pp.program.launch.hosts import is_reached
from hetero_pp.program.launch.job import CONSEQUENCE, CRASHED, require_open_files
from hetero_pp.program.launch.supervisor import Supervisor, launch
from hetero_pp.rpc.connections import NetworkConnections
from hetero_pp.rpc.identities import Credentials, Secret, SecretKeys, new_secret
from replica_groups.member.take_part import take_part

MOST_ALONE = 8
"""Most members of a rehearsal that have a process each, of about 70 MB and its messages. A thread takes about 3 MB."""

MOST_TOGETHER = 64  # most members of one process, if this machine has not processors enough for fewer

_OPEN_FILES_OF_A_MEMBER = 16
_SECONDS_TO_LEAVE, _SECONDS_TO_END = 20.0, 3.0


def launch_rehearsal(
    spec: RunSpec,
    folder: RunFolder,
    on_report: Callable[[Report], None],
    resume: Values | None = None,
    most_alone: int = MOST_ALONE,
    most_in_all: int = MOST_TOGETHER,
) -> None:
    """Run a rehearsal as `launch` runs a run, or with members that share processes if they are more than `most_alone`.

    Members that share a process are not restarted. Raises RunFailed as `launch` does.
    """
    names = list(spec.needed)
    if len(names) <= most_alone:
        launch(spec, folder, on_report, resume)
        return
    keys = SecretKeys(Secret(new_secret()), is_reached(spec.config) and not spec.config.exchange.insecure)
    size = min(most_in_all, max(most_alone, math.ceil(len(names) / (os.cpu_count() or 1))))
    crowds = list[_Crowd]()
    try:
        with Supervisor(spec, folder, on_report, LAUNCHER, keys) as supervisor:
            supervisor.start([EXCHANGE])
            address = supervisor.open_exchange()
            watcher = supervisor.watch(address)
            for first in range(0, len(names), size):
                own = {name: keys.of(name, spec.links.values()) for name in names[first : first + size]}
                crowds.append(_Crowd(folder, own, address, supervisor.end_soon))
            supervisor.wait()
            watcher.join()
            for crowd in crowds:
                crowd.wait()
    finally:
        for crowd in crowds:
            crowd.end()


class _Crowd:
    """One process with several members."""

    def __init__(
        self, folder: RunFolder, credentials: dict[str, Credentials], address: str, on_death: Callable[[str], None]
    ) -> None:
        """Start the members, by name. `on_death` is called with the cause if the process ends with an error."""
        first, *others = credentials
        context, output = fork_server(), f"{first}-and-others"
        self._name, self._on_death = f"{first} and {len(others)} others", on_death
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_crowd_main, args=(theirs, folder, output), name=self._name)
        with unheard():
            self._process.start()
        theirs.close()
        told = {name: one.to_json() for name, one in credentials.items()}
        with suppress(BrokenPipeError, ConnectionResetError):  # `on_death` hears of it
            self._connection.send_bytes(json.dumps({"exchange": address, "credentials": told}).encode())
        threading.Thread(target=self._watch, name=f"watches {self._name}", daemon=True).start()

    def _watch(self) -> None:
        self._process.join()
        if self._process.exitcode not in (0, CONSEQUENCE):
            self._on_death(f"the process of {self._name} ended with code {self._process.exitcode}")

    def wait(self) -> None:
        """Wait until the members have left a run that is over."""
        self._process.join(_SECONDS_TO_LEAVE)

    def end(self) -> None:
        """End the process, whatever its members do."""
        self._connection.close()
        self._process.join(_SECONDS_TO_END)
        self._process.kill()


def _crowd_main(launcher: Connection, folder: RunFolder, output: str) -> NoReturn:
    """Run the members that the launcher sends credentials for, until the run is over or the launcher is gone."""
    begin_forked(folder.output(output), False)
    code = CRASHED
    try:
        message = json.loads(launcher.recv_bytes())
        threading.Thread(target=_end_with, args=(launcher,), name="lifeline", daemon=True).start()
        spec, lines = read_run(folder), Lines(folder.lines)
        require_open_files(_OPEN_FILES_OF_A_MEMBER * len(message["credentials"]))
        torch.set_num_threads(spec.config.threads)
        members = [
            threading.Thread(
                target=_take_part,
                args=(spec, folder, message["exchange"], Credentials.from_json(own), lines),
                name=name,
                daemon=True,
            )
            for name, own in message["credentials"].items()
        ]
        for member in members:
            member.start()
        for member in members:
            member.join()
        code = 0
    except EOFError:
        code = CONSEQUENCE
    except Exception:  # noqa: BLE001 (a bug: the trace goes to the log)
        traceback.print_exc()
    os._exit(code)


def _end_with(launcher: Connection) -> NoReturn:
    with suppress(EOFError, OSError):
        launcher.recv_bytes()
    os._exit(CONSEQUENCE)


def _take_part(spec: RunSpec, folder: RunFolder, address: str, credentials: Credentials, lines: Lines) -> None:
    """Take part as one member. A failure fails the run, as it cannot be restarted."""
    member = spec.members[credentials.name]
    try:
        with NetworkConnections(spec, member, address, credentials, lines) as connections:
            try:
                take_part(spec, member, connections, folder)
            except HeteroPPError as error:
                connections.report_failure(str(error), isinstance(error, LinkError | RunFailed))
                raise
    except HeteroPPError as error:
        traceback.print_exception(error, limit=0)
    except Exception:  # noqa: BLE001 (a bug must not leave the others waiting)
        traceback.print_exc()
        os._exit(CRASHED)
