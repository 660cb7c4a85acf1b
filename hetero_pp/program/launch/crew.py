"""Starts every process of a run on this machine and watches over them: all end together, none is left behind.

Processes are forked from a fork server that has imported PyTorch once: that takes a second or two of CPU, which six
processes on two cores would otherwise each pay.
"""

from __future__ import annotations

import json
import multiprocessing
import secrets
import signal
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess

from hetero_pp.changed_keys import Values
from hetero_pp.errors import RunFailed
from hetero_pp.links import EXCHANGE
from hetero_pp.messages.messages_pb2 import Report
from hetero_pp.program.launch.job import CONSEQUENCE, Job
from hetero_pp.program.launch.member_process import process_main
from hetero_pp.program.launch.watcher import Watcher
from hetero_pp.rpc.connections import reports_of
from hetero_pp.run.folder import RunFolder
from hetero_pp.run.spec import RunSpec

PRELOADED = ["hetero_pp.program.launch.member_process", "torch._dynamo"]
"""Imported once for all processes; the first optimizer that is made imports torch._dynamo."""

_SECONDS_FOR_THE_CAUSE = 5.0
_SECONDS_TO_END = 3.0
_SECONDS_TO_NOTICE = 5.0


def launch(spec: RunSpec, folder: RunFolder, on_report: Callable[[Report], None], resume: Values | None = None) -> None:
    """Run the whole topology over gRPC, one process a member. `folder` holds the resolved configuration.

    If `resume` is not None it goes on with the run that is in the folder, and from there on changes these keys.

    Raises RunFailed with the first cause if any process fails, or if reports could not be followed. However this
    function ends, its processes have.
    """
    token = secrets.token_hex(16)
    with Crew(folder, resume) as crew:
        crew.start([EXCHANGE, *spec.members])
        address = crew.open_exchange(token)
        watcher = Watcher(partial(reports_of, address, token), on_report)
        crew.join_exchange(list(spec.members), address, token)
        crew.wait()
        watcher.join()


class Crew:
    """The processes of one run, each with a connection to it that is also its lifeline."""

    def __init__(self, folder: RunFolder, resume: Values | None = None) -> None:
        self._folder = folder
        self._resume = resume
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOADED)
        self._processes: dict[str, ForkServerProcess] = {}
        self._connections: dict[str, Connection] = {}
        self._told = ""

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_: object) -> None:
        """End whatever still runs: by closing its lifeline, then by force."""
        self._let_go()
        deadline = time.monotonic() + _SECONDS_TO_END
        for process in self._processes.values():
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()

    def start(self, members: Sequence[str]) -> None:
        """Start members, which then wait for a message; what they print goes to logs/<member>.log."""
        for member in members:
            ours, theirs = self._context.Pipe()
            job = Job(member, self._folder, self._resume)
            process = self._context.Process(target=process_main, args=(theirs, job), name=member)
            process.start()
            theirs.close()
            self._processes[member], self._connections[member] = process, ours

    def open_exchange(self, token: str) -> str:
        """Have the exchange listen; its address. Raises RunFailed if it ends instead."""
        self._send(EXCHANGE, {"token": token})
        answer = self._receive(EXCHANGE)
        if "failure" in answer:
            raise RunFailed(self._cause(EXCHANGE, answer))
        return answer["address"]

    def join_exchange(self, members: Sequence[str], address: str, token: str, token_file: str = "") -> None:
        """Have members take part, with a token that may be from a file. Raises RunFailed if one of them has ended."""
        for member in members:
            self._send(member, {"token": token, "exchange": address, "token_file": token_file})

    def _send(self, member: str, message: dict[str, str]) -> None:
        try:
            self._connections[member].send_bytes(json.dumps(message).encode())
        except (BrokenPipeError, ConnectionResetError):
            raise RunFailed(self._cause(member)) from None

    def _receive(self, member: str) -> dict[str, str]:
        try:
            return json.loads(self._connections[member].recv_bytes())
        except (EOFError, OSError):
            return {"failure": ""}

    def wait(self) -> None:
        """Wait until every process has ended well. Raises RunFailed as soon as one has not."""
        left = {process.sentinel: member for member, process in self._processes.items()}
        while left:
            for sentinel in wait(list(left)):
                assert isinstance(sentinel, int)
                member = left.pop(sentinel)
                if self._exit_code(member) != 0:
                    raise RunFailed(self._cause(self._culprit(member)))

    def end_soon(self, cause: str) -> None:
        """The run has failed elsewhere: whoever does not notice in a moment, as it waits for others, is ended."""
        self._told = self._told or cause
        timer = threading.Timer(_SECONDS_TO_NOTICE, self._let_go)
        timer.daemon = True
        timer.start()

    def _let_go(self) -> None:
        for connection in self._connections.values():
            connection.close()

    def _culprit(self, first: str) -> str:
        """Of the processes that end within a moment, the first that did not end because of another."""
        deadline = time.monotonic() + _SECONDS_FOR_THE_CAUSE
        left = {process.sentinel: member for member, process in self._processes.items() if member != first}
        ended = [first]
        while True:
            guilty = [member for member in ended if self._exit_code(member) not in (0, CONSEQUENCE)]
            if guilty:
                return guilty[0]
            ready = wait(list(left), timeout=max(0.0, deadline - time.monotonic())) if left else []
            if not ready:
                return first
            ended = [left.pop(sentinel) for sentinel in ready if isinstance(sentinel, int)]

    def _exit_code(self, member: str) -> int:
        process = self._processes[member]
        process.join()
        assert process.exitcode is not None
        return process.exitcode

    def _cause(self, member: str, answer: dict[str, str] | None = None) -> str:
        cause = (answer or self._receive(member)).get("failure", "") or self._told
        code = self._exit_code(member)
        if code < 0:
            return f"{member} was killed by {signal.Signals(-code).name}"
        return f"{member}: {cause or f'ended with code {code}'} (all it said: {self._folder.output(member)})"
