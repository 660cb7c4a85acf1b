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
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from hetero_pp.errors import LinkError, RunFailed
from hetero_pp.messages.messages_pb2 import Report
from hetero_pp.program.launch.member_process import CONSEQUENCE, Job, log_path, process_main
from hetero_pp.rpc.exchange import ExchangeClient
from hetero_pp.run.spec import RunSpec
from hetero_pp.run.yaml_file import CONFIG
from hetero_pp.topology import EXCHANGE

PRELOADED = ["hetero_pp.program.launch.member_process", "torch._dynamo"]
"""Imported once for all processes; the first optimizer that is made imports torch._dynamo."""

_SECONDS_FOR_THE_CAUSE = 5.0
_SECONDS_TO_END = 3.0


def launch(spec: RunSpec, folder: Path, cache: Path, on_report: Callable[[Report], None], resume: bool = False) -> None:
    """Run the whole topology over gRPC, one process a member. `folder` holds the resolved configuration.

    With `resume` it goes on with the run that is in the folder.

    Raises RunFailed with the first cause if any process fails, or if reports could not be followed. However this
    function ends, its processes have.
    """
    token = secrets.token_hex(16)
    crew = Crew(folder, cache, resume)
    try:
        for name in (EXCHANGE, *spec.members):
            crew.start(name)
        crew.tell(EXCHANGE, {"token": token})
        address = crew.hear(EXCHANGE)["address"]
        watcher = Watcher(address, token, on_report)
        for name in spec.members:
            crew.tell(name, {"token": token, "exchange": address})
        crew.wait()
        watcher.join()
    finally:
        crew.end()


class Watcher:
    """A thread that hands on every report until the exchange ends."""

    def __init__(self, address: str, token: str, on_report: Callable[[Report], None]) -> None:
        self._client = ExchangeClient(address, token, "launcher")
        self._on_report = on_report
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="watcher", daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Wait for the last report. Raises RunFailed if one of them could not be handed on."""
        self._thread.join()
        if self._error is not None:
            kind = type(self._error).__name__
            raise RunFailed(f"the run's reports could not be followed to its end: {kind}: {self._error}")

    def _run(self) -> None:
        try:
            for report in self._client.watch():
                self._on_report(report)
        except (LinkError, RunFailed):
            pass  # the exchange has ended; `Crew.wait` says why, and whoever counts rounds whether it was too early
        except Exception as error:  # noqa: BLE001 (a bug: members train on, and the end of the run tells)
            self._error = error
        finally:
            self._client.close()


class Crew:
    """The processes of one run, each with a connection to it that is also its lifeline."""

    def __init__(self, folder: Path, cache: Path, resume: bool = False, config: str = CONFIG) -> None:
        self._folder = folder
        self._config = folder / config
        self._cache = cache
        self._resume = resume
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOADED)
        self._processes: dict[str, ForkServerProcess] = {}
        self._connections: dict[str, Connection] = {}

    def start(self, member: str) -> None:
        """Start a member, which then waits for its job; what it prints goes to logs/<member>.log."""
        ours, theirs = self._context.Pipe()
        job = Job(member, self._folder, self._config, self._cache, self._resume)
        process = self._context.Process(target=process_main, args=(theirs, job), name=member)
        process.start()
        theirs.close()
        self._processes[member], self._connections[member] = process, ours

    def tell(self, member: str, words: dict[str, str]) -> None:
        """Give a member what it waits for."""
        try:
            self._connections[member].send_bytes(json.dumps(words).encode())
        except (BrokenPipeError, ConnectionResetError):
            raise RunFailed(self._cause(member)) from None

    def hear(self, member: str) -> dict[str, str]:
        """What a member says once it is ready. Raises RunFailed if it ends instead."""
        words = self._last_words(member)
        if "failure" in words:
            raise RunFailed(self._cause(member, words))
        return words

    def wait(self) -> None:
        """Wait until every process has ended well. Raises RunFailed as soon as one has not."""
        left = {process.sentinel: member for member, process in self._processes.items()}
        while left:
            for sentinel in wait(list(left)):
                assert isinstance(sentinel, int)
                member = left.pop(sentinel)
                if self._exit_code(member) != 0:
                    raise RunFailed(self._cause(self._culprit(member)))

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

    def _last_words(self, member: str) -> dict[str, str]:
        try:
            return json.loads(self._connections[member].recv_bytes())
        except (EOFError, OSError):
            return {"failure": ""}

    def _cause(self, member: str, words: dict[str, str] | None = None) -> str:
        cause = (words or self._last_words(member)).get("failure", "")
        code = self._exit_code(member)
        if code < 0:
            return f"{member} was killed by {signal.Signals(-code).name}"
        return f"{member}: {cause or f'ended with code {code}'} (all it said: {log_path(self._folder, member)})"

    def end(self) -> None:
        """End whatever still runs: by closing its lifeline, then by force."""
        for connection in self._connections.values():
            connection.close()
        deadline = time.monotonic() + _SECONDS_TO_END
        for process in self._processes.values():
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
