"""Runs the topology of a YAML, or the part of it on this host: the way of `launch` from the YAML to the result.

Top to bottom: how a command starts, the whole topology, one part of it, the reports, and the folder of the run.
"""

from __future__ import annotations

import json
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from rich.console import Console

from hetero_pp.config.changes import (
    PENDING,
    REPLICAS,
    Changes,
    Values,
    described,
    read_changes,
    write_changes,
)
from hetero_pp.config.folder import RunFolder
from hetero_pp.config.lines import EXCHANGE
from hetero_pp.config.member_inputs import in_words
from hetero_pp.config.overrides import Given
from hetero_pp.config.spec import RunSpec, require_known_basis
from hetero_pp.config.topology import DatacenterReplica
from hetero_pp.config.yaml_file import ConfigFile, save_config
from hetero_pp.core.errors import ConfigError, HeteroPPError, LinkTimeout, RunFailed, RunOver, StoreError, TakenOver
from hetero_pp.core.files import FIRST_PAUSE, keep_trying, print_without_fail
from hetero_pp.core.units import format_count, format_seconds
from hetero_pp.messages.messages_pb2 import Begun, Report
from hetero_pp.program.defences import defence_lines
from hetero_pp.program.launch.earlier import (
    ResumeHint,
    claim,
    claim_store,
    decide_to_resume,
    keep_over,
    over_on_disk,
    read_over,
    require_same_run,
    unheeded,
)
from hetero_pp.program.launch.fork_server import start_fork_server
from hetero_pp.program.launch.hosts import (
    commands,
    listens,
    no_answer,
    notes,
    read_token,
    write_token,
)
from hetero_pp.program.launch.inputs import Prepared, new_run_folder, prepare, require_same_ranks
from hetero_pp.program.launch.supervisor import Supervisor, Watcher, launch
from hetero_pp.program.operate.operations import Operations
from hetero_pp.program.report.display import LiveDisplay
from hetero_pp.program.report.lines import OwnRoundLines, earlier_line, words_of
from hetero_pp.program.report.output import (
    about,
    about_report,
    announce,
    name_run,
    shown_reading,
    standard_output,
    tell,
)
from hetero_pp.program.report.recorder import INTERRUPTED, Recorder, reports_until
from hetero_pp.program.report.state import RunState
from hetero_pp.program.report.summary import print_result, summary_of
from hetero_pp.rpc.connections import reports_to_members
from hetero_pp.rpc.identities import Keys, Secret, SecretKeys, new_secret
from hetero_pp.store.folder import storing
from replica_groups.exchange.log import fetch_configuration, keep_configuration, open_log, require_unused
from replica_groups.exchange.memberships import require_token

# ---- how a command starts a YAML ----


class Mode:
    """A run: it trains what the YAML says, and can be resumed. Subclasses start something else."""

    resumes = True  # whether it leaves something to resume from

    def of(self, file: ConfigFile) -> ConfigFile:
        """Return what starts. Raises ConfigError if it cannot."""
        return file

    def begin(self, spec: RunSpec) -> None:
        """Take in what begins, before its members start. Raises ConfigError if it cannot."""

    def watched(self, spec: RunSpec, members: Sequence[str]) -> Sequence[str]:
        """Return the members that a host needs reports of, beside its own `members`: its group's last stage."""
        last = (spec.members[member].replica.members[-1] for member in members)
        return [member for member in dict.fromkeys(last) if member not in members]

    def on_report(self, report: Report) -> None:
        """Take in a report."""

    def conclude(self, console: Console, state: RunState, folder: RunFolder) -> None:
        """Print what the end leaves. Raises RunFailed if that is nothing."""
        print_result(console, summary_of(state), folder.path)


AS_A_RUN = Mode()


@dataclass(frozen=True, kw_only=True)
class Invocation:
    """A command that starts a run, as the user typed it."""

    typed: Sequence[str] = ()  # the command, to print how to resume
    since: float = field(default_factory=time.time)  # time at which the user typed it, in seconds since 1970
    operations: Operations = field(default_factory=Operations)  # follows the run for an operator
    mode: Mode = AS_A_RUN  # whether the YAML starts as a run or, for example, as a rehearsal


@dataclass(frozen=True)
class Host:
    """The part of a run that this host starts, and how it reaches the rest."""

    only: str
    exchange: str | None = None  # HOST:PORT of the exchange, or several with commas; by default the YAML's hosts
    token: Path | None = None
    standby: bool = False  # whether it waits to serve the exchange until no other host does


def run_topology(
    path: Path,
    overrides: Sequence[Given],
    runs: Path,
    in_process: bool,
    resume: bool = False,
    new: bool = False,
    start: Start | None = None,
    invocation: Invocation | None = None,
) -> None:
    """Train the topology of a YAML in a new folder under `runs`, or resume the run that is there.

    `new`: start a new run even if one of this name is unfinished. `start`: another function that starts the members,
    such as one that injects faults.

    Raises ConfigError if a run of this name is unfinished, and neither `resume` nor `new` is given.
    """
    invocation = invocation or Invocation()
    prepared, resume = _prepare(path, overrides, runs, None, resume, new, invocation)
    if in_process and start is None:
        from hetero_pp.program.launch.in_process import run_in_process  # with all that members need

        start = run_in_process
    config = prepared.spec.config
    with (
        claim(runs.absolute(), config.name, prepared.names),
        claim_store(config, RunFolder(runs.absolute() / config.name)),
    ):
        _run_and_record(prepared, runs, start or launch, resume, invocation)


def run_on_this_host(
    path: Path,
    overrides: Sequence[Given],
    runs: Path,
    host: Host,
    in_process: bool,
    resume: bool,
    new: bool = False,
    invocation: Invocation | None = None,
) -> None:
    """Run a part of a run: the exchange, which records and shows the run, or members that join it.

    `new` is as in `run_topology`. A host whose run another host has taken over becomes its standby. Raises ConfigError
    if this host cannot reach the rest.
    """
    if in_process:
        found = f"--only {host.only}: found --in-process, which needs the whole run on this machine"
        raise ConfigError((), f"{found}; leave out one of them")
    invocation = invocation or Invocation()
    if host.only != EXCHANGE and new:
        raise ConfigError((), f"--only {host.only}: found --new, which only the exchange's host needs; leave it out")
    if host.only != EXCHANGE and invocation.operations.needs_all:
        raise ConfigError((), f"--only {host.only}: found --otlp or --board, which only the exchange's host takes")
    prepared, resume = _prepare(path, overrides, runs, host.only, resume or host.standby, new, invocation)
    config = prepared.spec.config
    if host.only != EXCHANGE:
        address = host.exchange or ",".join(config.exchange.hosts)
        if not address or host.token is None:
            raise ConfigError((), f"--only {host.only}: expected --exchange HOST:PORT and --token-file FILE, too")
        if resume:
            found = f"--only {host.only}: found --resume, which only the exchange's host needs"
            raise ConfigError((), f"{found}; leave it out")
        keys = SecretKeys(Secret(read_token(host.token)), encrypted=not config.exchange.insecure)
        listen = listens(config, prepared.names)
        exchange = ReachedExchange(address, keys, host.token, config.exchange.timeout, listen)
        with ResumeHint(prepared, RunFolder(runs / config.name), invocation.typed, invocation.mode.resumes):
            run_members(prepared, runs.absolute(), host.only, exchange, invocation.operations)
        return
    # A resumed run keeps its token, because the certificates of admitted hosts depend on it.
    folder, standby = RunFolder(runs.absolute() / config.name), host.standby
    if standby and len(config.exchange.hosts) < 2:
        found = f"found {format_count(len(config.exchange.hosts), 'host')} with --standby"
        raise prepared.located(ConfigError(("exchange", "hosts"), f"{found}, expected every host that may serve it"))
    if standby and host.token is None and not folder.token.is_file():
        raise ConfigError((), f"--standby: expected --token-file FILE, too: {folder.token} of the host that serves now")
    token = (
        read_token(host.token or folder.token) if host.token or (resume and folder.token.is_file()) else new_secret()
    )

    def start(spec: RunSpec, folder: RunFolder, on_report: OnReport, resume: Values | None) -> None:
        port = spec.config.exchange.listen.rpartition(":")[2]
        needed = f"Members need --exchange HOST:{port}, and the token in {write_token(folder, token)}"
        announce(f"{needed}; or one ticket for each member, from: hetero-pp invite {config.name}")
        relay = spec.config.exchange.relays_at.rpartition(":")[2]
        if relay != "0" and not spec.config.exchange.insecure:
            announce(f"Stages dial port {relay}, too, to reach each other through this host")
        keys = SecretKeys(Secret(token), encrypted=not spec.config.exchange.insecure)
        with Supervisor(spec, folder, on_report, EXCHANGE, keys, resume, lease.number if lease else 0) as supervisor:
            # A standby takes the place of an exchange of which members may be there, and undoes no round.
            supervisor.start([EXCHANGE], again=standby)
            watcher = supervisor.watch(supervisor.open_exchange())
            supervisor.wait()
            watcher.join()

    if standby:  # its exchange then starts seconds sooner
        start_fork_server()
    with claim(runs.absolute(), config.name, [EXCHANGE]):
        while True:
            try:
                if standby and config.store.url is not None:
                    with suppress(StoreError):  # it is waited for
                        require_token(config.store.open(config.name, folder.log), token)
                with claim_store(config, folder, standby) as lease:
                    if resume and config.store.url is not None:
                        require_token(config.store.open(config.name, folder.log), token)
                    if standby and lease is not None and lease.was_released:
                        fetch_configuration(config, folder)
                        if over := over_on_disk(folder):  # and all members have heard it
                            announce(f"{config.name}: {over}")
                            return
                    with storing("written", folder.path) if standby else nullcontext():  # a standby tries again
                        _run_and_record(prepared, runs, start, resume, invocation, takes_over=standby)
                return
            except (TakenOver, StoreError) as error:
                if not standby and isinstance(error, StoreError):
                    raise
                announce(f"{config.name}: {error}; this host is a standby now")
                standby = resume = True
                time.sleep(FIRST_PAUSE)  # if it is the store of this host, the other one may be quicker


def _prepare(
    path: Path,
    overrides: Sequence[Given],
    runs: Path,
    only: str | None,
    resume: bool,
    new: bool,
    invocation: Invocation,
) -> tuple[Prepared, bool]:
    """Return the checked run, and whether the command resumes one; announce what the user has to know of it."""
    print_without_fail()
    mode = invocation.mode
    file = mode.of(ConfigFile(path, overrides))
    if only in (None, EXCHANGE):  # members elsewhere are not asked: the exchange's host decides
        config = file.config.with_absolute_paths()
        resume = mode.resumes and decide_to_resume(config, runs, resume, new, invocation.typed)
    name_run(file.config.name)
    with shown_reading(standard_output(), "reading the corpus") as on_progress:
        prepared = prepare(file, runs.absolute(), only, resume, on_progress=on_progress)
    for limit in prepared.limits:
        announce(f"{file.config.name}: {limit.message}")
    if prepared.devices:
        announce(f"{file.config.name}: devices: {in_words(prepared.devices)}")
    for note in prepared.notes:
        announce(note)
    for line in defence_lines(prepared.spec):
        announce(f"{file.config.name}: {line}")
    mode.begin(prepared.spec)
    return prepared, resume


def run_members(
    prepared: Prepared, runs: Path, only: str, exchange: ReachedExchange, operations: Operations, mode: Mode = AS_A_RUN
) -> None:
    """Run members of a run. Its exchange is elsewhere.

    Their configuration has its own file, because config.yaml belongs to the exchange if it is on this host. `mode` gets
    the reports that this host gets.
    """
    name = prepared.spec.config.name
    folder = RunFolder(runs / name, f"config-{only}.yaml")
    try:
        require_same_ranks(prepared.spec, prepared.spec.config, prepared.names, folder)
    except ConfigError as error:
        raise prepared.located(error) from None
    # Several nodes run the ranks of a datacenter replica together, with one shared folder.
    replicas = {member: prepared.spec.members[member].replica for member in prepared.names}
    unshared = [name for name, own in replicas.items() if not isinstance(own, DatacenterReplica) or own.nodes == 1]
    with claim(runs, name, unshared):
        save_config(prepared.spec.config, folder.config)
        announce(f"{name}: {', '.join(prepared.names)} (their output: {folder.path}/logs)")
        rounds = OwnRoundLines(prepared.spec, prepared.names, announce)
        operations.observed.follow(rounds.state, prepared.names)
        launch_members(prepared.spec, only, prepared.names, folder, exchange, rounds, operations, mode)
    if (over := read_over(folder)) is not None:
        announce(f"{name}: {over.told}")
    if farewell := rounds.farewell():
        announce(f"{name}: {farewell}")


def print_commands(path: Path, overrides: Sequence[Given]) -> None:
    file = ConfigFile(path, overrides)
    try:
        file.config.require_grouped()
        lines = commands(file.config, path, overrides)
        told = notes(file)
    except ConfigError as error:
        raise file.located(error) from None
    for note in told:
        tell(standard_output(), f"# {note}", hanging="#   ")
    print("\n".join(lines))


# ---- members of a run whose exchange is elsewhere ----


@dataclass(frozen=True)
class ReachedExchange:
    """The exchange as other hosts reach it."""

    address: str  # HOST:PORT of each host that may serve it, with commas between them
    keys: Keys
    keys_from: Path  # file of the keys: the token, or the certificate that was issued for a ticket
    timeout: float  # seconds to wait for the exchange
    listen: str = ""  # address at which a member listens for its neighbouring stages, if it differs from the YAML's
    has_answered: bool = False  # whether the exchange has already answered this command


def launch_members(
    spec: RunSpec,
    only: str,
    members: Sequence[str],
    folder: RunFolder,
    exchange: ReachedExchange,
    rounds: OwnRoundLines,
    operations: Operations,
    mode: Mode = AS_A_RUN,
) -> None:
    """Run some members, all that `only` names, until they have finished, and show their rounds.

    `mode` gets their reports, and those of the members that it watches beside them.

    Raises RunFailed with the cause if one of them ends early. Raises ConfigError instead if another run serves at the
    exchange's address, and this host's run does not return within `exchange.timeout`.
    """
    refused, have_ended = "", threading.Event()

    def on_refused(cause: str) -> None:
        nonlocal refused
        refused = cause
        waits = f"waiting for the exchange of this run, for up to {format_seconds(exchange.timeout)}"
        rounds.say(f"{cause} (not verified, because its certificate is not of this run; {waits})")

    def on_wait(seconds: float, has_answered: bool) -> None:
        # If the last reports came from a host that froze, its successor may have ended, too.
        if have_ended.is_set() and seconds >= SECONDS_FOR_LAST_REPORTS:
            raise LinkTimeout("no exchange answers, and all members of this host have ended")
        rounds.say(no_answer(exchange.address, seconds, exchange.timeout, has_answered or exchange.has_answered))

    def on_report(report: Report) -> None:
        with about_report(report):
            rounds.on_report(report)
            mode.on_report(report)
        operations.on_report(report)
        if report.HasField("over"):
            keep_over(folder, RunOver.after(report.over.round, report.over.rounds))
        if rounds.state.failed is not None:
            supervisor.end_soon(rounds.state.failed)

    with Supervisor(spec, folder, on_report, only, exchange.keys) as supervisor:
        supervisor.start(members)
        supervisor.join_exchange(members, exchange.address, str(exchange.keys_from), exchange.listen)

        def told() -> Iterator[Report]:
            how, waiting = (exchange.address, supervisor.credentials, members), (exchange.timeout, on_wait, on_refused)
            try:
                yield from reports_to_members(*how, *waiting, beside=mode.watched(spec, members))
            except RunOver:
                supervisor.end_idle()

        watcher = Watcher(told, supervisor.on_report, supervisor.end_soon)
        try:
            supervisor.wait()
        except RunFailed as error:
            if refused and refused in str(error):  # by the exchange of another run
                raise ConfigError((), refused) from None
            failed = rounds.state.failed
            if failed is None or failed in str(error):
                raise
            raise RunFailed(f"{error}; the run ended because {failed}") from None
        have_ended.set()
        watcher.join()


# ---- the record of a run, and its folder ----

SECONDS_FOR_LAST_REPORTS = 30.0
"""Seconds without an exchange after which a host whose members have ended stops waiting for the last reports.

A standby takes over sooner.
"""

MOST_REFUSALS = 20  # number of the exchange's refusals that are shown; metrics.jsonl has all of them
MOST_REFUSALS_OF_A_MEMBER = 5

OnReport = Callable[[Report], None]
Start = Callable[[RunSpec, RunFolder, OnReport, Values | None], None]
"""(spec, folder, on_report, changed keys if the run is resumed, else None); returns when the run is over."""


def _run_and_record(
    prepared: Prepared, runs: Path, start: Start, resume: bool, invocation: Invocation, takes_over: bool = False
) -> None:
    """Run a topology with metrics, summary, picture and a live view. The mode prints the result.

    If it `takes_over`, no key of the run changes. Raises RunFailed if the run ended early without a reason.
    """
    name, is_stopped = prepared.spec.config.name, False
    folder = RunFolder(runs.absolute() / name)
    hint = ResumeHint(prepared, RunFolder(runs / name), invocation.typed, invocation.mode.resumes)
    with hint:
        spec, changed = _going_on(prepared, folder, takes_over) if resume else (prepared.spec, None)
        if not resume:
            begin_folder(spec, runs.absolute())
        elif over := over_on_disk(folder, spec.latest.outer):
            announce(f"{name}: {over}")
            # Nothing of the record of a finished run is missing, so no member has to tell it again.
            with suppress(OSError, ValueError, KeyError):
                summary = json.loads(folder.summary.read_bytes())
                if (
                    summary["rounds"] == open_log(spec.config, folder).last_record()
                    and "failed" not in summary
                    and (folder.path / "loss.png").is_file()
                ):
                    return
        recording = _Recording(spec, folder, resume, invocation)
        state, console = recording.state, recording.console
        try:
            page = invocation.operations.page
            shown = nullcontext(recording.show) if page is None else page(state, recording.say)
            with shown as recording.show, LiveDisplay(state, console, since=invocation.since):
                start(spec, folder, recording.on_report, changed)
            if not state.is_over:
                found = f"the run ended after round {state.rounds} of {state.rounds_planned} without a reason"
                raise RunFailed(f"{found}; see the members' output in logs/")
        except (HeteroPPError, KeyboardInterrupt) as error:
            state.fail(str(error) or INTERRUPTED)
            is_stopped = isinstance(error, KeyboardInterrupt)
            raise
        except Exception as error:
            state.fail(f"{type(error).__name__}: {error}")
            raise
        finally:
            # After an interrupt the hint is printed once everything but the picture is saved.
            recording.recorder.close(hint.print_once if is_stopped else None)
        with about("result"):
            invocation.mode.conclude(console, state, folder)


class _Recording:
    """Prints, shows and records the reports of a run, those of an earlier start included."""

    def __init__(self, spec: RunSpec, folder: RunFolder, resume: bool, invocation: Invocation) -> None:
        self._spec, self._folder, self._resume = spec, folder, resume
        self._operations, self._mode = invocation.operations, invocation.mode
        self.console = standard_output()
        self.state = RunState(spec)
        self._operations.observed.follow(self.state)
        self.recorder = Recorder(spec, folder, self.state, resume, self.say, self._operations.boards)
        self.show: OnReport = lambda report: None  # shows a report on the page of the run
        self._refusals: defaultdict[str, set[str]] = defaultdict(set)  # lines about refusals, by sender
        self._has_begun = False

    def say(self, line: str) -> None:
        tell(self.console, f"{self._spec.config.name}: {line}")

    def on_report(self, report: Report) -> None:
        """Take in a report of this start of the run."""
        with about_report(report):
            self._take_in(report)
        self._operations.on_report(report)

    def _take_in(self, report: Report) -> None:
        if report.HasField("begun") and report.member == EXCHANGE:
            had_begun, self._has_begun = self._has_begun, True
            if had_begun or (report.begun.last_round > 0 and not self._resume):
                # The exchange was restarted during the run. Its first report may have been missed, and rounds may have
                # been recorded, but not reported before the earlier exchange ended.
                log, last_round = open_log(self._spec.config, self._folder), report.begun.last_round
                for round_ in (one for one in range(1, last_round + 1) if one not in self.state.closed):
                    record = keep_trying(partial(log.read_record, round_), self.say)
                    self._take(Report(time=report.time, member=EXCHANGE, round_closed=record))
                return
            if self._resume:
                self._go_on(report.begun)
                self.recorder.go_on()
        if report.HasField("refusal"):
            # Each refusal is printed once, regardless of the sender's port. Each process that refuses has its own limit
            # of lines, so that no member can hide the refusals of others.
            refusal, own, lines = report.refusal, report.member in ("", EXCHANGE), self._refusals[report.member]
            refused = f"refused {refusal.sender.rpartition(':')[0] or refusal.sender}: {refusal.reason}"
            line = refused if own else f"{report.member} reports that it {refused}"
            if line not in lines and len(lines) < (MOST_REFUSALS if own else MOST_REFUSALS_OF_A_MEMBER):
                lines.add(line)
                self.say(line)
        if self._take(report) and self.state.news is not None and self.state.news.is_line:
            self.say(words_of(self.state.news, self._spec))

    def _take(self, report: Report) -> bool:
        is_possible = self.state.apply(report)
        if is_possible:
            self.show(report)
            self._mode.on_report(report)
        self.recorder.on_report(report)
        return is_possible

    def _go_on(self, begun: Begun) -> None:
        """Take the reports of earlier rounds again, and print a line about them."""
        last_round = begun.last_round
        for damaged in begun.damaged:
            self.say(f"skipping a damaged file: {damaged}")
        self.say(f"resuming after round {last_round}")
        if begun.note:
            self.say(begun.note)
        for key, values in Changes.from_json(begun.changes).history.items():
            for round_ in (since for since in values if since > max(last_round, 1)):
                before, now = values[max(since for since in values if since < round_)], values[round_]
                if key == REPLICAS:
                    self.say(f"from round {round_} on {described(before, now)}")
                else:
                    self.say(f"{key}: {json.dumps(now)} from round {round_} on (before: {json.dumps(before)})")
        earlier = reports_until(self._spec.config, self._folder, last_round, self.say)
        with self.state.lock:  # the display then shows these rounds as one line only
            self.state.closed_earlier = last_round
            for one in earlier:
                self._take(one)
        if last_round:
            self.say(earlier_line(self.state))


def begin_folder(spec: RunSpec, runs: Path) -> RunFolder:
    """Make a new folder for the run, with its configuration.

    Raises OSError if the disk does not take it; an earlier run that was moved aside is then moved back.
    """
    folder = RunFolder(runs / spec.config.name)
    with claim(runs, spec.config.name):
        if spec.config.store.url is not None:
            require_unused(open_log(spec.config, folder))
        with new_run_folder(runs, spec.config.name):
            save_config(spec.config, folder.config)
            keep_configuration(spec.config, folder, open_log(spec.config, folder))
    return folder


def _going_on(prepared: Prepared, folder: RunFolder, takes_over: bool) -> tuple[RunSpec, Values]:
    """Return the run in the folder as far as it is known before it resumes, and the keys that change from then on.

    Its configuration is written to the folder again.
    """
    fetch_configuration(prepared.spec.config, folder)
    try:
        agreement = require_same_run(prepared.spec.config, None if takes_over else prepared.given, folder)
        last_round = open_log(prepared.spec.config, folder).last_record()
        changes = agreement.changes.changed(agreement.first, last_round + 1, agreement.wanted)
        spec = RunSpec(agreement.first, prepared.spec.shape.vocabulary, changes)
        require_known_basis(spec)
        if complaint := open_log(prepared.spec.config, folder).over_before(spec.latest.outer, last_round):
            key, _, found = complaint.partition(": ")
            raise ConfigError(("outer", key), found)
        require_same_ranks(spec, prepared.spec.config, prepared.names, folder)
    except ConfigError as error:
        raise prepared.located(error) if error.key else error from None
    for line in unheeded(prepared.spec.config, agreement):
        announce(f"{prepared.spec.config.name}: {line}")
    # The run's processes read the wanted replicas in the folder, and `begin_run` decides from which round they hold.
    # Leftovers of an earlier attempt that failed are removed.
    changes = agreement.changes
    if REPLICAS in agreement.wanted:
        changes = changes.changed(agreement.first, PENDING, {REPLICAS: agreement.wanted[REPLICAS]})
    if changes != read_changes(folder.changes):
        write_changes(changes, folder.changes)
    save_config(spec.config, folder.config)
    return spec, agreement.wanted
