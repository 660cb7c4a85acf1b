"""Starts every process of a run on this machine and watches over them: all end together, none is left behind."""

from __future__ import annotations

import json
import os
import queue
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hetero_pp.errors import LinkError, RunFailed
from hetero_pp.program.config import RunPlan
from hetero_pp.rpc.exchange import ExchangeClient
from hetero_pp.rpc.messages_pb2 import Report
from hetero_pp.topology import EXCHANGE

CONSEQUENCE = 3
"""Exit code of a process that only stopped because another one did (see member_process)."""

_SECONDS_FOR_THE_CAUSE = 2.0
_SECONDS_TO_END = 3.0


def launch(plan: RunPlan, folder: Path, cache: Path, on_report: Callable[[Report], None]) -> None:
    """Run the whole topology over gRPC, one process a member. `folder` holds the resolved config.yaml.

    Raises RunFailed with the first cause if any process fails. However this function ends, its processes have.
    """
    run = secrets.token_hex(16)
    crew = Crew(folder, cache)
    try:
        crew.start(EXCHANGE, {"run": run})
        address = crew.first_line(EXCHANGE)["address"]
        client = ExchangeClient(address, run, "launcher")
        watcher = threading.Thread(target=_watch, args=(client, on_report), name="watcher", daemon=True)
        watcher.start()
        for name in plan.members:
            crew.start(name, {"run": run, "exchange": address})
        crew.wait()
        watcher.join()
    finally:
        crew.end()


def _watch(client: ExchangeClient, on_report: Callable[[Report], None]) -> None:
    try:
        for report in client.watch():
            on_report(report)
    except (LinkError, RunFailed):
        pass  # the exchange has ended; `Crew.wait` says why
    finally:
        client.close()


class Crew:
    """The processes of one run."""

    def __init__(self, folder: Path, cache: Path) -> None:
        self._folder = folder
        self._cache = cache
        self._logs = folder / "logs"
        self._logs.mkdir(exist_ok=True)
        self._processes: dict[str, subprocess.Popen[str]] = {}
        self._ended: queue.SimpleQueue[str] = queue.SimpleQueue()

    def start(self, member: str, job: dict[str, str]) -> None:
        """Start a member; what it prints goes to logs/<member>.log."""
        command = [sys.executable, "-m", "hetero_pp", "member", str(self._folder / "config.yaml"), member]
        command += ["--folder", str(self._folder), "--cache", str(self._cache)]
        with (self._logs / f"{member}.log").open("w") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE if member == EXCHANGE else log,
                stderr=log,
                text=True,
                start_new_session=True,  # Ctrl-C reaches the launcher only, which then ends the others
                env={**os.environ, "GRPC_VERBOSITY": "NONE"},
            )
        self._processes[member] = process
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps(job) + "\n")
            process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended already; `wait` says why
        threading.Thread(target=self._await_end, args=(member, process), daemon=True).start()

    def _await_end(self, member: str, process: subprocess.Popen[str]) -> None:
        process.wait()
        self._ended.put(member)

    def first_line(self, member: str) -> dict[str, Any]:
        """The line of JSON that a member prints once it is ready. Raises RunFailed if it ends before."""
        process = self._processes[member]
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            process.wait()
            raise RunFailed(self._cause(member))
        return json.loads(line)

    def wait(self) -> None:
        """Wait until every process has ended well. Raises RunFailed as soon as one has not."""
        left = set(self._processes)
        while left:
            member = self._ended.get()
            left.discard(member)
            if self._processes[member].returncode != 0:
                raise RunFailed(self._cause(self._culprit(member)))

    def _culprit(self, first: str) -> str:
        """Of the processes that end within a moment, the first that did not end because of another."""
        failed, deadline = first, time.monotonic() + _SECONDS_FOR_THE_CAUSE
        while self._processes[failed].returncode == CONSEQUENCE:
            try:
                failed = self._ended.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                return first
            if self._processes[failed].returncode == 0:
                failed = first
        return failed

    def _cause(self, member: str) -> str:
        log = self._logs / f"{member}.log"
        code = self._processes[member].returncode
        if code < 0:
            return f"{member} was killed by {signal.Signals(-code).name}"
        lines = log.read_text(errors="replace").strip().splitlines()
        return f"{member}: {lines[-1] if lines else f'ended with code {code}'} (all it said: {log})"

    def end(self) -> None:
        """End whatever still runs: by closing its lifeline, then by force."""
        for process in self._processes.values():
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    try:
                        pipe.close()
                    except BrokenPipeError:
                        pass
        deadline = time.monotonic() + _SECONDS_TO_END
        for process in self._processes.values():
            try:
                process.wait(timeout=max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
