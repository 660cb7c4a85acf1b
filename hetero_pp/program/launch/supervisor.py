"""Supervises the processes of a run on this machine: starts and restarts them, and ends them all together.

Processes are forked from a fork server that imports PyTorch once. Otherwise each process would pay the one or two
seconds of CPU time that the import takes.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from typing import NoReturn, Self

from hetero_pp.config.changes import Values
from hetero_pp.config.folder import RunFolder
from hetero_pp.config.lines import EXCHANGE, LAUNCHER
from hetero_pp.config.member_inputs import devices_of
from hetero_pp.config.spec import RunSpec
from hetero_pp.core.errors import GivenUp, HeteroPPError, LinkError, Refused, RunFailed, TakenOver
from hetero_pp.core.files import write_whole
from hetero_pp.core.units import format_count, format_seconds
from hetero_pp.messages.messages_pb2 import GIVEN_UP, RESTARTED, SILENT, MembershipEvent, MembershipEventKind, Report
from hetero_pp.program.launch.fork_server import fork_server, unheard
from hetero_pp.program.launch.host_memory import MemoryKills
from hetero_pp.program.launch.hosts import is_reached
from hetero_pp.program.launch.job import CONSEQUENCE, CRASHED, GONE, STOP, TAKEN_OVER, ProcessJob, require_open_files
from hetero_pp.rpc.connections import reports_of
from hetero_pp.rpc.exchange_client import ExchangeClient
from hetero_pp.rpc.identities import Credentials, Keys, Secret, SecretKeys, new_secret
from hetero_pp.rpc.limits import CONNECT_TIMEOUT
from hetero_pp.store.faults import Faults

_SECONDS_FOR_THE_CAUSE = 5.0
_SECONDS_TO_END = 3.0
_SECONDS_TO_ANSWER = 4.0  # within which a process answers that it was asked to stop; a frozen one does not
_SECONDS_TO_APPLY = 12.0
"""Seconds for the exchange to answer that members on other hosts have applied its last round; longer than its limit."""
_SECONDS_UNTIL_TOLD = 8.0  # seconds after which the user is told that saved states are still being saved
_SECONDS_TO_SAVE = 60.0
"""Seconds for members to save their checkpoints after an interrupt. Another interrupt ends them at once."""
_SECONDS_TO_NOTICE = 5.0
_SECONDS_TO_LEAVE = 20.0
_SECONDS_BETWEEN_LOOKS = 1.0


def launch(
    spec: RunSpec,
    folder: RunFolder,
    on_report: Callable[[Report], None],
    resume: Values | None = None,
    make_supervisor: Callable[..., Supervisor] | None = None,
) -> None:
    """Run the whole topology over gRPC, with one process per member. `folder` holds the resolved configuration.

    `resume`: None for a new run, else the keys that change from here on as the run in the folder resumes.
    `make_supervisor`: makes another supervisor, such as one that injects faults. Processes that die are restarted, as
    often as the configuration allows.

    Raises RunFailed with the first cause if the run cannot continue, or if reports could not be followed. All processes
    have ended when this function does, however it ends.
    """
    encrypted = is_reached(spec.config) and not spec.config.exchange.insecure
    keys = SecretKeys(Secret(new_secret()), encrypted)
    with (make_supervisor or Supervisor)(spec, folder, on_report, LAUNCHER, keys, resume) as supervisor:
        supervisor.start([EXCHANGE])
        supervisor.tell_exchange()
        supervisor.start(list(spec.needed))  # while the exchange opens its log and its port
        address = supervisor.exchange_address()
        watcher = supervisor.watch(address)
        supervisor.join_exchange(list(spec.needed), address)
        supervisor.wait()
        watcher.join()


def start_job(launcher: Connection, job: ProcessJob, make_faults: Callable[[], Faults]) -> NoReturn:
    """Run one member of the run until it is over, then end the process."""
    from hetero_pp.program.launch.member_process import process_main

    process_main(launcher, job, make_faults)


class Supervisor:
    """Supervisor of the processes of one run. Its connection to each process is also the process's lifeline."""

    def __init__(
        self,
        spec: RunSpec,
        folder: RunFolder,
        on_report: Callable[[Report], None],
        name: str,
        keys: Keys,
        resume: Values | None = None,
        lease: int = 0,
    ) -> None:
        """`name`: the part of the run that it starts, or `launcher` for all of it.

        `on_report` is called with every report of the run, and with the supervisor's own reports of restarts. Give the
        run's reports to the method `on_report`, which watches for members that the exchange has given up, and passes
        them on. `lease`: number of this host's lease, if several hosts may serve the run.
        """
        self._spec, self._folder, self._tell = spec, folder, on_report
        self._keys = keys
        self.credentials = keys.of(name)  # credentials for following reports, and for reporting members that died
        self._resume, self._lease = resume, lease
        self._restarts: defaultdict[str, deque[float]] = defaultdict(deque)  # times of each process's last restarts
        self._devices: dict[str, str] = {}
        self._context = fork_server()
        self._processes: dict[str, ForkServerProcess] = {}
        self._connections: dict[str, Connection] = {}
        self._exchange: dict[str, str] = {}  # message about the exchange that every member gets
        self._given_up: set[str] = set()
        self._idle: set[str] = set()  # members with nothing left to train: the run is over, however their processes end
        self._incarnations: dict[str, int] = {}  # incarnation of each member
        self._silent: dict[str, float] = {}
        """Members whose incarnation has ended while their process still exists, with the time of that."""
        self._lock = threading.Lock()
        self._told = ""
        self._is_interrupted = False
        self._kills = MemoryKills()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """End all remaining processes: by closing their lifelines, then by force.

        After an interrupt, members first save their checkpoints.
        """
        try:
            if kind is not None and issubclass(kind, KeyboardInterrupt):
                self._have_states_saved()
        finally:
            self._let_go()
            deadline = time.monotonic() + _SECONDS_TO_END
            for process in self._processes.values():
                process.join(max(0.0, deadline - time.monotonic()))
                if process.is_alive():
                    process.kill()
                    process.join()

    def _have_states_saved(self) -> None:
        """Have members save their states after the last finished round, and wait until they have ended.

        The exchange goes first and closes no further round. Members are told the last closed one, after which all save.
        Without members on this host, the exchange answers until members of other hosts have applied that round. Hosts
        are often stopped at the same moment, and a member without the round would wait for the exchange.
        """
        self._is_interrupted = True
        members = [member for member, process in self._processes.items() if process.is_alive() and member != EXCHANGE]
        closed = self._ask_to_stop([EXCHANGE], STOP).get(EXCHANGE, {}) if EXCHANGE in self._processes else {}
        if closed and not members:  # members on other hosts may still need what the last round included
            self._ask_to_stop([EXCHANGE], {**STOP, **closed}, _SECONDS_TO_APPLY)
        asked = self._ask_to_stop(members, {**STOP, **closed})
        started = time.monotonic()
        for seconds in (_SECONDS_UNTIL_TOLD, _SECONDS_TO_SAVE):
            for process in (self._processes[member] for member in asked):
                process.join(max(0.0, started + seconds - time.monotonic()))
            left = [member for member in asked if self._processes[member].is_alive()]
            if left and seconds < _SECONDS_TO_SAVE:
                waiting = f"waiting for {format_count(len(left), 'member')}"
                line = f"{waiting} to save the state after the last finished round"
                limit = f"for up to {format_seconds(_SECONDS_TO_SAVE)}; press Ctrl-C again to stop without saving"
                print(f"{self._spec.config.name}: {line}, {limit}", file=sys.stderr, flush=True)

    def _ask_to_stop(
        self, members: Sequence[str], request: Mapping[str, str], seconds: float = _SECONDS_TO_ANSWER
    ) -> dict[str, dict[str, str]]:
        """Ask processes to stop; return the answers of those that have answered within `seconds`."""
        waiting: dict[Connection, str] = {}
        for member in members:
            with suppress(OSError):
                self._connections[member].send_bytes(json.dumps(request).encode())
                waiting[self._connections[member]] = member
        answered, until = dict[str, dict[str, str]](), time.monotonic() + seconds
        while waiting and (ready := wait(list(waiting), max(0.0, until - time.monotonic()))):
            for connection in ready:
                assert isinstance(connection, Connection)
                member = waiting.pop(connection)
                answer = self._receive(member)
                if answer.items() >= STOP.items():
                    answered[member] = answer
        return answered

    def start(self, members: Sequence[str], again: bool = False) -> None:
        """Start members, which then wait for a message. Their output goes to logs/<member>.log."""
        require_open_files(len(self._processes.keys() | set(members)))
        if not again:
            self._devices |= {name: str(device) for name, device in devices_of(self._spec, members).items()}
        open_files = resource.getrlimit(resource.RLIMIT_NOFILE)
        for member in members:
            ours, theirs = self._context.Pipe()
            resume, device = None if again else self._resume, self._devices.get(member, "cpu")
            job = ProcessJob(member, self._folder, resume, again, device, self._lease, open_files)
            process = self._context.Process(target=start_job, args=(theirs, job, self.faults_of(member)), name=member)
            self._connections[member] = ours  # set before the start, so that an interrupt during it closes the lifeline
            with unheard():
                process.start()
                self._processes[member] = process
            theirs.close()

    def faults_of(self, member: str) -> Callable[[], Faults]:
        """Return a function that a member's process calls to make its faults. This supervisor injects none."""
        return Faults

    def open_exchange(self, listen: str = "") -> str:
        """Have the exchange listen as `tell_exchange` does, and return its address as `exchange_address` does."""
        self.tell_exchange(listen)
        return self.exchange_address()

    def tell_exchange(self, listen: str = "") -> None:
        """Have the exchange listen, at `listen` or else as the configuration says. Raises RunFailed if it has ended."""
        assert isinstance(self._keys, SecretKeys)
        self._send(EXCHANGE, {"secret": self._keys.secret.text, "listen": listen, "encrypted": self._keys.encrypted})

    def exchange_address(self) -> str:
        """Return the address at which the exchange listens. Raises RunFailed if the exchange ends instead."""
        answer = self._receive(EXCHANGE)
        if "failure" in answer:
            cause = self._cause(EXCHANGE, answer)
            raise TakenOver(cause) if self._exit_code(EXCHANGE) == TAKEN_OVER else RunFailed(cause)
        self._exchange = {"exchange": answer["address"], "token_file": "", "listen": ""}
        if self._spec.config.audit.by == "validators":
            assert isinstance(self._keys, SecretKeys)
            told = {"exchange": answer["address"], "secret": self._keys.secret.text, "encrypted": self._keys.encrypted}
            write_whole(self._folder.validators, json.dumps(told).encode(), is_secret=True)
        return answer["address"]

    def watch(self, address: str) -> Watcher:
        """Follow the reports of the exchange at this address, in a thread."""
        return Watcher(partial(reports_of, address, self.credentials, self.on_silence), self.on_report)

    def join_exchange(self, members: Sequence[str], address: str, token_file: str = "", listen: str = "") -> None:
        """Send members the exchange's address and their credentials, so that they join.

        `token_file`: file of their keys. `listen`: address at which a member listens for its neighbouring stages,
        instead of the configuration's. Raises RunFailed if a member has ended.
        """
        self._exchange = {"exchange": address, "token_file": token_file, "listen": listen}
        for member in members:
            self._send_exchange(member)

    def _send_exchange(self, member: str) -> None:
        credentials = self._keys.of(member, self._spec.links.values())
        self._send(member, {**self._exchange, "credentials": credentials.to_json()})

    def _send(self, member: str, message: Mapping[str, str | bool]) -> None:
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
        """Wait until every process has ended without error or was given up. Restart processes that die.

        Raises RunFailed as soon as the run cannot continue.
        """
        left, patience = set(self._processes), self._spec.config.exchange.lease.least
        while left:
            sentinels = {self._processes[member].sentinel: member for member in left}
            for sentinel in wait(list(sentinels), timeout=_SECONDS_BETWEEN_LOOKS):
                assert isinstance(sentinel, int)
                member = sentinels[sentinel]
                left.discard(member)
                if member in self._idle:
                    continue
                code = self._exit_code(member)
                # It died for a reason of its own: a restart may help, or the run can do without it.
                if code in (CRASHED, GONE) or (code < 0 and not self._told):
                    left |= self._replace(member)
                elif code == TAKEN_OVER:
                    raise TakenOver(self._cause(member))
                elif code != 0:
                    raise RunFailed(self._cause(self._culprit(member)))
                elif member == EXCHANGE:
                    # Members that have finished end by themselves. Others would wait for an exchange that is gone.
                    deadline = time.monotonic() + _SECONDS_TO_LEAVE
                    for other in left:
                        self._processes[other].join(max(0.0, deadline - time.monotonic()))
                    return
            # Members that have been silent for too long are killed, so that they are restarted.
            with self._lock:
                due = [one for one, since in self._silent.items() if time.monotonic() - since > patience]
                for member in due:
                    del self._silent[member]
            for member in due:
                process = self._processes.get(member)
                if process is not None and process.is_alive():
                    process.kill()

    def _replace(self, member: str) -> set[str]:
        """Restart a process that died, or continue without it if its restarts are used up.

        Returns the member if it was restarted, else nothing. Raises GivenUp if no member is left on this host, else
        RunFailed if too few replicas are left for a quorum.
        """
        with self._lock:
            self._silent.pop(member, None)
        cause, settings, now = self._cause(member), self._spec.config.restarts, time.monotonic()
        is_gone = self._exit_code(member) == GONE
        recent = self._restarts[member]
        while recent and now - recent[0] > settings.within:
            recent.popleft()
        can_restart = not is_gone and len(recent) < settings.count
        if can_restart:
            recent.append(now)
            times = f"attempt {len(recent)} of {settings.count} within {settings.within / 60:.4g} min"
            self._say(RESTARTED, member, f"{cause}; restarting it ({times})")
        else:
            from replica_groups.exchange.host import rules_of  # hardly any launch needs the exchange's code

            self._given_up.add(member)
            members = self._spec.needed
            lost = {members[name].replica.name for name in self._given_up if name in members}
            if self._given_up >= self._processes.keys():
                raise GivenUp(cause)
            if member == EXCHANGE or rules_of(self._spec).is_lost_without(lost):
                raise RunFailed(cause)
            why = "" if is_gone else "; no restart is left"
            self._say(GIVEN_UP, member, f"{cause}{why}, so the run continues without it")
        if member != EXCHANGE:  # the exchange hears of the death, and need not wait for the heartbeat timeout
            incarnation = self._incarnations.get(member)
            tell = partial(tell_died, self._exchange["exchange"], self.credentials, member, cause, incarnation)
            threading.Thread(target=tell, name=f"{member} has died", daemon=True).start()
        if not can_restart:
            return set()
        self.start([member], again=True)
        try:
            if member == EXCHANGE:
                self.open_exchange(self._exchange["exchange"])
            else:
                self._send_exchange(member)
        except RunFailed:
            if self._exit_code(member) >= 0:
                raise
            # It was killed while it started. `wait` restarts it once more, or gives it up.
        return {member}

    def _say(self, what: MembershipEventKind, member: str, cause: str) -> None:
        membership_event = MembershipEvent(what=what, slot=member, cause=cause)
        self._tell(Report(time=time.time(), member=EXCHANGE, membership_event=membership_event))

    def on_report(self, report: Report) -> None:
        """Take in a report of the run.

        A member of this machine that the exchange has given up is frozen or hangs.
        """
        if self._is_interrupted and report.HasField("membership_event"):
            return  # after an interrupt, members are meant to leave
        with self._lock:
            if report.HasField("over"):
                self.end_idle(report.over.finishing)
            elif report.HasField("joined"):
                self._silent.pop(report.member, None)
                self._incarnations[report.member] = report.joined.incarnation
            elif report.HasField("membership_event") and report.membership_event.what == SILENT:
                self._silent.setdefault(report.membership_event.slot, time.monotonic())
        self._tell(report)

    def on_silence(self, is_silent: bool) -> None:
        """Note that the exchange does not answer, or answers again. Its process may exist and be frozen."""
        with self._lock:
            if is_silent:
                self._silent.setdefault(EXCHANGE, time.monotonic())
            else:
                self._silent.pop(EXCHANGE, None)

    def end_soon(self, cause: str) -> None:
        """End processes that do not notice in a moment that the run failed elsewhere, because they wait for others."""
        self._told = self._told or cause
        self._let_go_soon()

    def end_idle(self, finishing: Collection[str] = ()) -> None:
        """After the last round closed, end the members of all replicas but `finishing`, unless they end by themselves.

        They may be fetching a run checkpoint, or waiting for a group or for the exchange.
        """
        members = self._spec.members
        self._idle |= {one for one in self._processes if one in members and members[one].replica.name not in finishing}
        self._let_go_soon(self._idle.copy())

    def _let_go_soon(self, members: Collection[str] | None = None) -> None:
        timer = threading.Timer(_SECONDS_TO_NOTICE, self._let_go, [members])
        timer.daemon = True
        timer.start()

    def _let_go(self, members: Collection[str] | None = None) -> None:
        for member, connection in list(self._connections.items()):
            if members is None or member in members:
                connection.close()

    def _culprit(self, first: str) -> str:
        """Return the first process that failed on its own account, among those that end within a moment.

        If all of them ended because of another process, return `first`.
        """
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
        for_memory = self._kills.explain(self._processes[member].pid or 0, code)
        if code < 0:
            return f"{member} was killed by {signal.Signals(-code).name}{for_memory}"
        return f"{member}: {cause or f'exited with code {code}'} (output: {self._folder.output(member)})"


def tell_died(address: str, credentials: Credentials, member: str, cause: str, incarnation: int | None) -> None:
    """Report to the exchange that a member's process has ended. Does nothing if the exchange is gone, too."""
    client = ExchangeClient(address, credentials, timeout=CONNECT_TIMEOUT)
    with closing(client) as exchange, suppress(HeteroPPError):
        exchange.wait_until_ready(CONNECT_TIMEOUT)
        exchange.died(member, cause, incarnation)


# ---- the reports of a run ----


class Watcher:
    """A thread that hands on every report until there are no more."""

    def __init__(
        self,
        watch: Callable[[], Iterator[Report]],
        on_report: Callable[[Report], None],
        on_lost: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Start the thread. `on_lost` is called with the cause if no further report can arrive."""
        self._watch, self._on_report, self._on_lost = watch, on_report, on_lost
        self._error: Exception | None = None
        self._changed = threading.Condition()
        self._handed_on = 0
        self._is_over = False
        self._thread = threading.Thread(target=self._run, name="watcher", daemon=True)
        self._thread.start()

    def catch_up(self, reports: int) -> None:
        """Wait until this many reports were handed on, or there are no more."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_over or self._handed_on >= reports)

    def wait(self) -> None:
        """Wait for the last report."""
        self._thread.join()

    def join(self) -> None:
        """Wait for the last report. Raises RunFailed if a report could not be handed on."""
        self.wait()
        self.raise_error()

    def raise_error(self) -> None:
        """Raise RunFailed if a report could not be handed on."""
        if self._error is not None:
            told = "the launcher stopped receiving the run's reports before the run was over"
            raise RunFailed(f"{told} ({type(self._error).__name__}: {self._error})")

    def _run(self) -> None:
        try:
            for report in self._watch():
                self._on_report(report)
                with self._changed:
                    self._handed_on += 1
                    self._changed.notify_all()
        except (LinkError, Refused, RunFailed) as error:
            # The supervisor reports the cause, and the record shows whether the run ended early.
            self._on_lost(str(error))
        except Exception as error:  # noqa: BLE001 (a bug: members train on, and the end of the run reports it)
            self._error = error
        finally:
            with self._changed:
                self._is_over = True
                self._changed.notify_all()
