"""The run that a folder already holds: locks on it, whether it is over or unfinished, and what may change on resume."""

from __future__ import annotations

import fcntl
import json
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from rich.prompt import Prompt

from hetero_pp.config.changes import (
    REPLICAS,
    Agreement,
    Changes,
    changed_entries,
    differences,
    read_changes,
    replicas_of,
    shown,
    values_of,
    wanted_replicas,
    with_values,
)
from hetero_pp.config.folder import RunFolder
from hetero_pp.config.lines import EXCHANGE
from hetero_pp.config.overrides import Key
from hetero_pp.config.run_config import RunConfig
from hetero_pp.config.yaml_file import config_of, require_trained
from hetero_pp.core.bounded import read_json_object
from hetero_pp.core.errors import ConfigError, RunOver, dotted
from hetero_pp.core.files import write_whole
from hetero_pp.core.settings import NotPartOf, meaning
from hetero_pp.core.units import format_count
from hetero_pp.outer.methods import OuterSettings
from hetero_pp.program.launch.inputs import Prepared
from hetero_pp.program.report.output import SafeConsole, announce, standard_output, tell
from hetero_pp.store.lease import Lease, acting_for
from replica_groups.exchange.log import fetch_configuration, open_log
from replica_groups.exchange.memberships import Memberships
from replica_groups.member.saved_states import SavedStates

# ---- locks: two launches cannot run the same part of a run, or move its folder away from each other ----

LOCKS = ".locks"  # folder of the locks, beside the runs, because a run's folder may be moved and its locks may not


@contextmanager
def claim(runs: Path, name: str, parts: Sequence[str] | None = None) -> Iterator[None]:
    """Lock these parts of runs/<name> while the block runs; None: all that any launch ever locked, to move the folder.

    The operating system releases them however the process ends.

    Raises ConfigError if another launch holds one of them, even in this process. To move the folder, locks that this
    process holds do not conflict.
    """
    folder, part = runs / LOCKS / name, ""
    with ExitStack() as held:
        try:
            for part in sorted(path.name for path in folder.glob("*")) if parts is None else parts:
                folder.mkdir(parents=True, exist_ok=True)
                lock = FileLock(folder / part, timeout=0, is_singleton=True)
                if parts is not None and lock.is_locked:
                    raise Timeout(lock.lock_file)
                held.enter_context(lock)
        except Timeout:
            mend = "wait until it has ended, or give this run another `name`"
            raise ConfigError((), f"{runs / name}: another launch is using this folder ({part}); {mend}") from None
        except OSError as error:
            raise ConfigError((), f"{folder / part}: cannot be locked ({error.strerror})") from None
        yield


@contextmanager
def claim_store(config: RunConfig, folder: RunFolder, waits: bool = False) -> Iterator[Lease | None]:
    """Hold the lease on a run's log in a store of its own while the block runs; without `store.url` do nothing.

    `waits`: wait until no other host serves the run and the store has one. Yields the lease of a run that several hosts
    may serve, else None. Raises ConfigError if another process holds it.
    """
    if config.store.url is None:
        yield None
        return
    store, own = config.store.open(config.name, folder.log), config.exchange
    begun = (lambda: folder.config.name in store.names()) if waits else None
    with acting_for(store, announce, announce, own.takeover, len(own.hosts), begun) as lease:
        yield lease if len(own.hosts) > 1 else None


def held_parts(runs: Path, name: str) -> list[str]:
    """Return the parts of runs/<name> that a launch on this host runs now."""
    return [path.name for path in sorted((runs / LOCKS / name).glob("*")) if is_held(runs, name, path.name)]


def is_held(runs: Path, name: str, part: str) -> bool:
    """Return whether a launch on this host runs this part of runs/<name>.

    The lock that tries it is shared, so that two processes or threads that ask at the same time do not see each other.
    """
    path = runs / LOCKS / name / part
    if not path.exists():
        return False
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False


# ---- the record that a run is over, kept by a host without the run's exchange ----


@dataclass(frozen=True)
class RunEnd:
    """The end of a run, as the exchange told this host."""

    told: str  # message of the exchange, such as `the run is over (round 100 of 100)`
    heard: float  # time of the message, in seconds since 1970


def over_on_disk(folder: RunFolder, outer: OuterSettings | None = None) -> str:
    """Return that the run of a folder with its exchange is over, and how to extend it; empty if it is not over.

    `outer`: its settings, if they differ from what the folder says because it is being extended.
    """
    config = config_of(folder)
    log = open_log(config, folder)
    outer = outer or end_of(config, read_changes(folder.changes))
    last = log.last_record()
    if not outer.is_over(last, log.tokens_after(last)) or last not in log.checkpoints():
        return ""
    key, end = ("rounds", last) if outer.tokens is None else ("tokens", outer.tokens)
    return f"the run is over (round {last} of {last}); extend it with `--resume --set outer.{key}=N`, N > {end}"


def end_of(config: RunConfig, changes: Changes) -> OuterSettings:
    """Return the settings of a run with the newest number of rounds, or of tokens."""
    ends = {key: changes.had(f"outer.{key}", getattr(config.outer, key))[-1] for key in ("rounds", "tokens")}
    return config.outer.model_copy(update=ends)


def keep_over(folder: RunFolder, over: RunOver) -> None:
    """Record that the run of a folder is over. A failed write is ignored."""
    with suppress(OSError):
        write_whole(folder.over, json.dumps(asdict(RunEnd(str(over).partition(";")[0], time.time()))).encode())


def read_over(folder: RunFolder) -> RunEnd | None:
    """Return the record; None if the run is not known to be over."""
    try:
        return RunEnd(**read_json_object(folder.over))
    except (OSError, ValueError, TypeError):
        return None


# ---- unfinished runs: no command replaces one by accident ----

CONTINUE, NEW, QUIT = "continue", "new", "quit"


@dataclass(frozen=True)
class Unfinished:
    """An unfinished run that a new run of its name would move aside."""

    where: str  # the run's folder, or the URL of its log in a store
    name: str
    last_round: int  # number of the last closed round; 0 if none has closed
    rounds: int  # number of planned rounds
    tickets: int  # number of tickets in use by members or still valid
    is_in_store: bool
    """Whether its log is in a store. A new run then needs another name, because nothing is moved aside there."""

    def __str__(self) -> str:
        if self.last_round:
            return f"{self.where}: run {self.name} stopped after round {self.last_round} of {self.rounds}"
        tickets = f"{format_count(self.tickets, 'ticket')} {'is' if self.tickets == 1 else 'are'}"
        stopped = f"stopped before round 1 of {self.rounds} closed, and {tickets} still valid"
        return f"{self.where}: run {self.name} {stopped}"


def decide_to_resume(config: RunConfig, runs: Path, resume: bool, new: bool, typed: Sequence[str] = ()) -> bool:
    """Return whether the command resumes the run of this name instead of starting a new one.

    `resume` and `new`: options that the user gave. `typed`: the command. With neither option and an unfinished run, the
    user is asked on a terminal. Raises ConfigError if there is no terminal, if the user quits, or if another launch
    uses the run.
    """
    if resume and new:
        raise ConfigError((), "--new: found --resume, too, expected only one of them")
    if resume or new:
        return resume
    with claim(runs.absolute(), config.name):
        found = find_unfinished(config, runs)
    if found is None:
        return False
    console = standard_output()
    if not (console.is_terminal and sys.stdin.isatty()):
        raise ConfigError((), _refusal(found, typed))
    tell(console, f"{found}.")
    choices = [CONTINUE, QUIT] if found.is_in_store else [CONTINUE, NEW, QUIT]
    try:
        answer = Prompt.ask("Resume it, or start a new run?", console=console, choices=choices, default=CONTINUE)
    except EOFError:
        answer = QUIT
    if answer == QUIT:
        raise ConfigError((), _refusal(found, typed))
    return answer == CONTINUE


def _refusal(found: Unfinished, typed: Sequence[str]) -> str:
    other = "use another `name` for a new run" if found.is_in_store else "start a new run with --new"
    command = f" (to resume: {shlex.join([*typed, '--resume'])})" if typed else ""
    return f"{found}; resume it with --resume, or {other}{command}"


def find_unfinished(config: RunConfig, runs: Path) -> Unfinished | None:
    """Return the unfinished run of this name in the folder `runs`, or in the store of `config`; None if there is none.

    A run is unfinished if it has closed a round, but not its last one. It is also unfinished if it has closed none and
    members may hold tickets to it, because a new run would not accept them. Raises StoreError if its log cannot be
    read.
    """
    folder = RunFolder(runs.absolute() / config.name)
    if folder.config.is_file():
        return _unfinished(folder, str(runs / config.name), config)
    if config.store.url is None:
        return None
    with tempfile.TemporaryDirectory() as scratch:
        fetched = RunFolder(Path(scratch) / config.name)
        fetched.path.mkdir()
        fetch_configuration(config, fetched)
        return _unfinished(fetched, "", config) if fetched.config.is_file() else None


def _unfinished(folder: RunFolder, where: str, config: RunConfig) -> Unfinished | None:
    """Return the run of a folder if it is unfinished, else None. A rehearsal is never resumed.

    If its configuration cannot be read, `config` says where the log is.
    """
    try:
        earlier, changes = config_of(folder), read_changes(folder.changes).settled()
    except ConfigError:  # written by another version
        earlier, changes = config, Changes({})
    log = open_log(earlier, folder)
    last, outer, tickets = log.last_record(), end_of(earlier, changes), 0
    tokens = log.tokens_after(last)
    if folder.memberships.is_file():
        with closing(Memberships(folder.memberships)) as memberships:
            tickets = memberships.valid_tickets()
    if earlier.rehearsal is not None or outer.is_over(last, tokens) or (last == 0 and tickets == 0):
        return None
    rounds = outer.planned(last, tokens) if last else earlier.rounds
    is_in_store = config.store.url is not None and open_log(config, folder).store.url() == log.store.url()
    return Unfinished(where or log.store.url(), config.name, last, rounds, tickets, is_in_store)


class ResumeHint:
    """Prints how to resume the run, once, if the block is interrupted."""

    def __init__(self, prepared: Prepared, folder: RunFolder, command: Sequence[str], resumes: bool = True) -> None:
        """`command`: the command as the user typed it. `resumes`: whether there is something to resume."""
        self._prepared, self._folder, self._command = prepared, folder, command
        self._is_printed = not resumes

    def print_once(self) -> None:
        """Print how to resume the run, if it is not printed yet. Call it once the saved states are saved."""
        if not self._is_printed:
            name = self._prepared.spec.config.name
            line = f"{name}: {how_to_go_on(self._prepared, self._folder, self._command)}"
            SafeConsole().print(line, soft_wrap=True, highlight=False, markup=False)
        self._is_printed = True

    def __enter__(self) -> ResumeHint:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and issubclass(kind, KeyboardInterrupt):
            self.print_once()


def how_to_go_on(prepared: Prepared, folder: RunFolder, command: Sequence[str]) -> str:
    """Return one line that ends with the command to type."""
    command = [part for part in command if part != "--new"]
    has_exchange = EXCHANGE in prepared.names
    members = [name for name in prepared.names if name != EXCHANGE]
    if not has_exchange:
        return f"after the exchange has been resumed, rejoin it with: {shlex.join(command)}"
    resuming = [*command, *(() if "--resume" in command else ("--resume",))]
    if not members:
        token = () if "--token-file" in resuming else ("--token-file", str(folder.token))
        return f"resume with (on other hosts, repeat their commands): {shlex.join([*resuming, *token])}"
    every = prepared.spec.latest.states_every
    if all(SavedStates(folder.state(member), prepared.spec.run, every).rounds() for member in members):
        return f"resume with: {shlex.join(resuming)}"
    saved = f"no state has been saved yet (states are saved every {format_count(every, 'round')})"
    if open_log(prepared.spec.config, folder).last_record() == 0:
        return f"{saved}; start the run again with: {shlex.join(command)}"
    return f"{saved}; resume from the log, with new optimizer moments, with: {shlex.join(resuming)}"


# ---- whether a configuration can resume the run in a folder, and which keys may change ----


def require_same_run(config: RunConfig, given: Sequence[Key] | None, folder: RunFolder) -> Agreement:
    """Return the agreement between a configuration and the run in a folder.

    It has the run's first configuration with this host's replicas, the changes so far, and the changes that are wanted
    now. `given`: keys given beside the YAML; None: nothing changes, not even the replicas.

    Raises ConfigError if the folder has no run, or one that this configuration cannot resume.
    """
    path = folder.config
    if not path.is_file():
        raise ConfigError((), f"--resume: found no run in {folder.path}; leave out --resume to start one")
    changes = read_changes(folder.changes).settled()
    before = changes.at(config_of(folder), 1)
    require_trained(before, f"--resume: {folder.path}")
    began, had = values_of(before), changes.had(REPLICAS, replicas_of(before))
    # Keys that must not change; replicas may join and leave.
    now, was = (
        {key: value for key, value in meaning(one, NotPartOf.RUN).items() if key != REPLICAS}
        | {"weights": one.model.weights}
        for one in (config, before)
    )
    refused = [
        shown(("model", *key) if key == ("weights",) else key, found, expected)
        for key, found, expected in [*differences(now, was), *changed_entries(config, had)]
        if dotted(key) not in began
    ]
    if refused:
        told = "these keys cannot change when a run is resumed"
        raise ConfigError((), f"--resume: {'; '.join(refused)}, as in {path}: {told}")
    # The YAML alone changes nothing, because the run may have been started or resumed with other given values.
    wanted = dict[str, Any]()
    for key, value in values_of(config).items():
        is_given = any(tuple(key.split("."))[: len(one)] == tuple(one) for one in given or ())
        if is_given and value != changes.had(key, began[key])[-1]:
            wanted[key] = value
    if (replicas := had[-1] if given is None else wanted_replicas(config, had[-1])) != had[-1]:
        wanted |= {REPLICAS: replicas}
        changes = Changes({REPLICAS: {1: replicas_of(before)}, **changes.history})
    return Agreement(with_values(config, began | {REPLICAS: replicas}), changes, wanted)


def unheeded(config: RunConfig, agreement: Agreement) -> Iterator[str]:
    """Yield a line for each key that the YAML sets to a value that the run never had. It says how to change the key."""
    began = values_of(agreement.first)
    for key, value in values_of(config).items():
        had = [*agreement.changes.had(key, began[key]), *([agreement.wanted[key]] if key in agreement.wanted else [])]
        if value not in had:
            told = json.dumps(value)
            change = f"to change it, use --set {key}={told}"
            yield f"{key} stays {json.dumps(had[-1])}: a resumed run ignores {told} in the YAML; {change}"
