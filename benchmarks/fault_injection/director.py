"""Injects the faults of a schedule into the processes that a launch started on this machine, and reports each one."""

from __future__ import annotations

import json
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

import psutil

from fault_injection.file import ranks_of
from fault_injection.injected import InjectedFaults, Orders
from fault_injection.schedule import Injection, Point, Schedule, missed
from fault_injection.settings import Kind
from hetero_pp.config.folder import RunFolder
from hetero_pp.config.lines import EXCHANGE
from hetero_pp.messages.messages_pb2 import INJECTED, MembershipEvent, Report
from hetero_pp.store.faults import FaultPhase, Faults


class Director:
    """Injects the faults of one launch.

    Thread-safe: the launcher, the thread that follows its reports, and one thread per process call it.
    """

    def __init__(self, schedule: Schedule, folder: RunFolder, tell: Callable[[Report], None]) -> None:
        """Start the thread of the timed faults. `tell` is called with a report of each injected fault."""
        self._schedule, self._folder, self._tell = schedule, folder, tell
        self._left = {key: list(injections) for key, injections in schedule.at.items()}
        """Faults still to be injected at points of rounds."""
        self._missed = missed(schedule.file)
        self._lock = threading.Lock()
        self._processes: dict[str, psutil.Process] = {}
        self._connections: dict[str, Connection] = {}
        self._handed_over: dict[str, Connection] = {}
        """Ends of the connections that processes get at their start."""
        self._points: defaultdict[str, tuple[int, str]] = defaultdict(lambda: (0, "starting"))
        """Last reported point of each member."""
        self._begun = threading.Event()
        self._over = threading.Event()
        threading.Thread(target=self._keep_time, name="timed faults", daemon=True).start()

    # ---- called by the supervisor ----

    def faults_of(self, member: str) -> Callable[[], Faults]:
        """Return the function that makes the faults of a member in its process, which is about to start."""
        ours, theirs = Pipe()
        with self._lock:
            self._connections[member], self._handed_over[member] = ours, theirs
            points = frozenset(point for name, point in self._left if name in (member, EXCHANGE))
        replica = "" if member == EXCHANGE else self._schedule.spec.members[member].replica.name
        late = self._missed.get(replica, frozenset())
        orders = Orders(theirs, points, late, self._schedule.has_links, self._schedule.fills(member))
        return partial(InjectedFaults, orders)

    def started(self, member: str, pid: int) -> None:
        """Note that a member's process has started, and follow what it reports."""
        self._handed_over.pop(member).close()
        with self._lock, suppress(psutil.NoSuchProcess):
            self._processes[member] = psutil.Process(pid)
        threading.Thread(target=self._follow, args=(member, self._connections[member]), daemon=True).start()

    def on_report(self, report: Report) -> None:
        """Take in one report of the run.

        The `begun` report starts the clock. `inner_step` reports of replicas with several ranks stand for their phases,
        because ranks report no phases themselves.
        """
        if report.HasField("begun"):
            self._begun.set()
        if report.HasField("inner_step") and ranks_of(report.member, self._schedule.spec):
            self._come_to(report.member, (report.inner_step.round, FaultPhase.TRAINING))

    def close(self) -> None:
        """Inject no more faults, and resume every frozen process."""
        self._over.set()
        with self._lock:
            processes = list(self._processes.values())
        _wake(processes)

    # ---- when a fault is due ----

    def _keep_time(self) -> None:
        while not self._begun.wait(1.0):
            if self._over.is_set():
                return
        start = time.monotonic()
        for after, injection in self._schedule.timed():
            if self._over.wait(max(0.0, start + after - time.monotonic())):
                return
            self._do(injection)

    def _follow(self, member: str, connection: Connection) -> None:
        """Read the phases that one process reaches, until it ends. After the faults of a phase, let it continue."""
        with suppress(EOFError, OSError):
            while True:
                told = json.loads(connection.recv_bytes())
                point = (told["round"], told["phase"])
                self._come_to(member, point)
                if told["waits"]:
                    go = {"do": "go", "round": point[0], "phase": point[1]}
                    connection.send_bytes(json.dumps(go).encode())

    def _come_to(self, member: str, point: Point) -> None:
        with self._lock:
            self._points[member] = point
            due = [*self._left.pop((member, point), []), *self._left.pop((EXCHANGE, point), [])]
        for injection in due:
            self._do(injection, point)

    # ---- injection ----

    def _do(self, injection: Injection, point: Point | None = None) -> None:
        member = injection.member
        with self._lock:
            process, connection = self._processes.get(member), self._connections.get(member)
            round_, phase = point or self._points[self._newest() if member == EXCHANGE else member]
        if process is None or connection is None or self._over.is_set():
            return
        with suppress(OSError, psutil.Error):  # the process has ended: nothing to report
            self._inject(injection, process, connection)
            membership_event = MembershipEvent(what=INJECTED, slot=member, round=round_, cause=f"{injection} ({phase})")
            self._tell(Report(time=time.time(), member=EXCHANGE, membership_event=membership_event))

    def _newest(self) -> str:
        """Return the member in the highest round.

        The exchange has no phases of its own, so this member's point stands for it.
        """
        return max(self._points, key=lambda name: self._points[name][0], default=EXCHANGE)

    def _inject(self, injection: Injection, process: psutil.Process, connection: Connection) -> None:
        match injection:
            case Injection(Kind.KILL, rank=None):
                process.kill()
            case Injection(Kind.KILL, member, rank=int(rank)):
                if rank >= len(ranks := self._ranks(process, member)):
                    raise ProcessLookupError(f"no rank {rank}")
                ranks[rank].kill()
            case Injection(Kind.FREEZE, member, seconds=seconds):
                self._freeze([process, *self._ranks(process, member)], seconds)
            case Injection(Kind.CORRUPT, member, what="state"):
                flip_bit_of(_largest(_newest_of(self._folder.state(member).glob("round-*"))))
            case Injection(Kind.CORRUPT, what="checkpoint"):
                flip_bit_of(_newest_of(self._folder.log.glob("checkpoint-*")))
            case Injection(kind, _, link, seconds, by):
                message = {"do": kind, "link": link, "seconds": seconds, "by": by}
                connection.send_bytes(json.dumps(message).encode())

    def _ranks(self, process: psutil.Process, member: str) -> list[psutil.Process]:
        """Return the ranks that a member's process started, in their order. They write to the same log."""
        log, server = self._folder.output(member).resolve(), process.parent()
        others = [one for one in server.children(recursive=True) if one != process] if server is not None else []
        return sorted((one for one in others if _writes(one, log)), key=lambda one: (one.create_time(), one.pid))

    def _freeze(self, processes: Sequence[psutil.Process], seconds: float) -> None:
        for one in processes:
            one.suspend()
        timer = threading.Timer(seconds, _wake, [processes])
        timer.daemon = True
        timer.start()


def _wake(frozen: Iterable[psutil.Process]) -> None:
    for one in frozen:
        with suppress(psutil.Error):
            one.resume()


def _writes(process: psutil.Process, log: Path) -> bool:
    """Return whether a process's standard error is this file."""
    try:
        return any(one.fd == 2 and Path(one.path) == log for one in process.open_files())
    except psutil.Error:  # it has ended
        return False


def _newest_of(paths: Iterable[Path]) -> Path:
    """Return the last path in sorted order, which has the highest number. Raises OSError if there is none."""
    found = sorted(paths)
    if not found:
        raise FileNotFoundError("no data in which a bit can be flipped")
    return found[-1]


def _largest(folder: Path) -> Path:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return max(files, key=lambda path: path.stat().st_size)


def flip_bit_of(path: Path) -> None:
    """Flip one bit in the middle of a file."""
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
