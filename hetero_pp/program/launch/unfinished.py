"""Finds an unfinished run of the same name, so that no command replaces it by accident, and says how to resume one."""

from __future__ import annotations

import shlex
import sys
import tempfile
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from rich.prompt import Prompt

from hetero_pp.config.changes import Changes, read_changes
from hetero_pp.config.folder import RunFolder
from hetero_pp.config.lines import EXCHANGE
from hetero_pp.config.run_config import RunConfig
from hetero_pp.config.yaml_file import config_of
from hetero_pp.core.errors import ConfigError
from hetero_pp.core.units import format_count
from hetero_pp.program.launch.claim import claim_all
from hetero_pp.program.launch.inputs import Prepared
from hetero_pp.program.report.output import SafeConsole, standard_output, tell
from replica_groups.exchange.log import fetch_configuration, open_log
from replica_groups.exchange.memberships import Memberships
from replica_groups.member.saved_states import SavedStates

CONTINUE, NEW, QUIT = "continue", "new", "quit"


@dataclass(frozen=True)
class Unfinished:
    """An unfinished run that a new run of its name would move aside."""

    where: str
    """The run's folder, or the URL of its log in a store."""
    name: str
    last_round: int
    """Number of the last closed round; 0 if none has closed."""
    rounds: int
    """Number of planned rounds."""
    tickets: int
    """Number of tickets in use by members or still valid."""
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
    with claim_all(runs.absolute(), config.name):
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
    last, rounds = log.last_record(), changes.had("outer.rounds", earlier.outer.rounds)[-1]
    tickets = _valid_tickets(folder)
    if earlier.rehearsal is not None or last >= rounds or (last == 0 and tickets == 0):
        return None
    is_in_store = config.store.url is not None and open_log(config, folder).store.url() == log.store.url()
    return Unfinished(where or log.store.url(), config.name, last, rounds, tickets, is_in_store)


def _valid_tickets(folder: RunFolder) -> int:
    if not folder.memberships.is_file():
        return 0
    with closing(Memberships(folder.memberships)) as memberships:
        return memberships.valid_tickets()


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
    if all(_states(prepared, folder, member) for member in members):
        return f"resume with: {shlex.join(resuming)}"
    every = format_count(prepared.spec.latest.states_every, "round")
    saved = f"no state has been saved yet (states are saved every {every})"
    if open_log(prepared.spec.config, folder).last_record() == 0:
        return f"{saved}; start the run again with: {shlex.join(command)}"
    return f"{saved}; resume from the log, with new optimizer moments, with: {shlex.join(resuming)}"


def _states(prepared: Prepared, folder: RunFolder, member: str) -> list[int]:
    return SavedStates(folder.state(member), prepared.spec.run, prepared.spec.latest.states_every).rounds()
