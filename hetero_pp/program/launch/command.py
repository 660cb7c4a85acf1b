"""`hetero-pp launch`: the whole topology on this machine, or the part of it that this host runs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from hetero_pp.config.changed_keys import Values
from hetero_pp.config.links import EXCHANGE
from hetero_pp.config.topology import DatacenterReplica
from hetero_pp.core.errors import ConfigError
from hetero_pp.core.files import print_without_fail
from hetero_pp.program.audit_cost import audit_lines
from hetero_pp.program.launch.claim import claim, claim_store
from hetero_pp.program.launch.hosts import (
    Exchange,
    commands,
    launch_exchange,
    launch_members,
    listens,
    notes,
    read_token,
    write_token,
)
from hetero_pp.program.launch.inputs import Prepared, prepare
from hetero_pp.program.launch.interrupted import ResumeHint
from hetero_pp.program.launch.mode import AS_A_RUN, Mode
from hetero_pp.program.launch.recorded import OnReport, Start, run_and_record
from hetero_pp.program.launch.supervisor import launch
from hetero_pp.program.launch.unfinished import decide_to_resume
from hetero_pp.program.operate.operations import Operations
from hetero_pp.program.report.json_lines import name_run
from hetero_pp.program.report.output import standard_output, tell
from hetero_pp.program.report.own_rounds import OwnRounds
from hetero_pp.program.report.reading import shown_reading
from hetero_pp.rpc.credentials import Secret, SecretKeys, new_secret
from hetero_pp.run.changes import Given
from hetero_pp.run.devices import in_words
from hetero_pp.run.folder import RunFolder
from hetero_pp.run.spec import RunSpec
from hetero_pp.run.yaml_file import ConfigFile, save_config


@dataclass(frozen=True)
class Host:
    """The part of a run that this host starts, and how it reaches the rest."""

    only: str
    exchange: str | None = None
    """HOST:PORT of the exchange."""
    token: Path | None = None


def run_topology(
    path: Path,
    overrides: Sequence[Given],
    runs: Path,
    in_process: bool,
    resume: bool = False,
    typed: Sequence[str] = (),
    new: bool = False,
    since: float | None = None,
    start: Start | None = None,
    operations: Operations | None = None,
    mode: Mode = AS_A_RUN,
) -> None:
    """Train the topology of a YAML in a new folder under `runs`, or resume the run that is there.

    `typed`: the command as the user typed it, to print how to resume. `since`: when the user typed it, in seconds since
    1970; by default now. `new`: start a new run even if one of this name is unfinished. `start`: another function that
    starts the members, such as one that injects faults. `operations`: follows the run for an operator. `mode`: what to
    start of the YAML, if not the run itself.

    Raises ConfigError if a run of this name is unfinished, and neither `resume` nor `new` is given.
    """
    print_without_fail()
    since, file = time.time() if since is None else since, mode.of(ConfigFile(path, overrides))
    resume = mode.resumes and decide_to_resume(file.config.with_absolute_paths(), runs, resume, new, typed)
    prepared = _prepare(file, runs, None, resume)
    mode.begin(prepared.spec)
    name, start = prepared.spec.config.name, start or (_run_in_process if in_process else launch)
    folder = RunFolder(runs.absolute() / name)
    with (
        claim(runs.absolute(), name, prepared.names),
        claim_store(prepared.spec.config, folder),
        _hint(prepared, runs, typed, mode) as hint,
    ):
        run_and_record(prepared, runs, start, resume, since, hint.print_once, operations, mode)


def _run_in_process(spec: RunSpec, folder: RunFolder, on_report: OnReport, resume: Values | None = None) -> None:
    from hetero_pp.program.launch.in_process import run_in_process  # with all that members need

    run_in_process(spec, folder, on_report, resume)


def run_on_this_host(
    path: Path,
    overrides: Sequence[Given],
    runs: Path,
    host: Host,
    in_process: bool,
    resume: bool,
    typed: Sequence[str] = (),
    new: bool = False,
    since: float | None = None,
    operations: Operations | None = None,
    mode: Mode = AS_A_RUN,
) -> None:
    """Run a part of a run: the exchange, which records and shows the run, or members that join it.

    `typed`, `new`, `since`, `operations` and `mode` are as in `run_topology`. Raises ConfigError if this host cannot
    reach the rest.
    """
    if in_process:
        raise ConfigError(
            (),
            f"--only {host.only}: found --in-process, which needs the whole run on this machine; leave out one of them",
        )
    print_without_fail()
    since, file = time.time() if since is None else since, mode.of(ConfigFile(path, overrides))
    if host.only == EXCHANGE:
        resume = mode.resumes and decide_to_resume(file.config.with_absolute_paths(), runs, resume, new, typed)
    elif new:
        raise ConfigError((), f"--only {host.only}: found --new, which only the exchange's host needs; leave it out")
    elif operations is not None and operations.needs_all:
        raise ConfigError((), f"--only {host.only}: found --otlp or --board, which only the exchange's host takes")
    prepared = _prepare(file, runs, host.only, resume)
    mode.begin(prepared.spec)
    hint = _hint(prepared, runs, typed, mode)
    if host.only == EXCHANGE:
        config = prepared.spec.config
        folder = RunFolder(runs.absolute() / config.name)
        token = _token(host.token, folder, resume)

        def start(spec: RunSpec, folder: RunFolder, on_report: OnReport, resume: Values | None) -> None:
            needed = f"Members need --exchange HOST:{_port(spec)}, and the token in {write_token(folder, token)}"
            tell(
                standard_output(), f"{needed}; or one ticket for each member, from: hetero-pp invite {spec.config.name}"
            )
            launch_exchange(spec, folder, Secret(token), resume, on_report)

        with claim(runs.absolute(), config.name, [EXCHANGE]), claim_store(config, folder), hint:
            run_and_record(prepared, runs, start, resume, since, hint.print_once, operations, mode)
        return
    if host.exchange is None or host.token is None:
        raise ConfigError((), f"--only {host.only}: expected --exchange HOST:PORT and --token-file FILE, too")
    if resume:
        raise ConfigError((), f"--only {host.only}: found --resume, which only the exchange's host needs; leave it out")
    own = prepared.spec.config.exchange
    keys = SecretKeys(Secret(read_token(host.token)), encrypted=not own.insecure)
    listen = listens(prepared.spec.config, prepared.names)
    with hint:
        exchange = Exchange(host.exchange, keys, host.token, own.timeout, listen)
        run_members(prepared, runs.absolute(), host.only, exchange, operations)


def _hint(prepared: Prepared, runs: Path, typed: Sequence[str], mode: Mode) -> ResumeHint:
    return ResumeHint(prepared, RunFolder(runs / prepared.spec.config.name), typed, mode.resumes)


def _token(path: Path | None, folder: RunFolder, resume: bool) -> str:
    """Return the run's token: from the file, from the folder of a resumed run, or a new one.

    A resumed run keeps its token, because the certificates of admitted hosts depend on it.
    """
    if path is not None:
        return read_token(path)
    return read_token(folder.token) if resume and folder.token.is_file() else new_secret()


def run_members(
    prepared: Prepared,
    runs: Path,
    only: str,
    exchange: Exchange,
    operations: Operations | None = None,
    mode: Mode = AS_A_RUN,
) -> None:
    """Run members of a run. Its exchange is elsewhere.

    Their configuration has its own file, because config.yaml belongs to the exchange if it is on this host. `mode` gets
    the reports that this host gets.
    """
    name, say, operations = prepared.spec.config.name, partial(tell, standard_output()), operations or Operations()
    folder = RunFolder(runs / name, f"config-{only}.yaml")
    with claim(runs, name, [one for one in prepared.names if not _is_shared(prepared.spec, one)]):
        save_config(prepared.spec.config, folder.config)
        say(f"{name}: {', '.join(prepared.names)} (their output: {folder.path}/logs)")
        rounds = OwnRounds(prepared.spec, prepared.names, say, since=time.time())
        operations.follow(rounds.state, prepared.names)
        launch_members(prepared.spec, only, prepared.names, folder, exchange, rounds, say, operations, mode=mode)


def _is_shared(spec: RunSpec, member: str) -> bool:
    """Return whether several nodes run a member together, with one shared folder."""
    replica = spec.members[member].replica
    return isinstance(replica, DatacenterReplica) and replica.nodes > 1


def print_commands(path: Path, overrides: Sequence[Given]) -> None:
    """Print the command for each host."""
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


def _prepare(file: ConfigFile, runs: Path, only: str | None, resume: bool) -> Prepared:
    name_run(file.config.name)
    with shown_reading(standard_output(), "reading the corpus") as on_progress:
        prepared = prepare(file, runs.absolute(), only, resume, on_progress=on_progress)
    for limit in prepared.limits:
        tell(standard_output(), f"{file.config.name}: {limit.message}")
    if prepared.devices:
        tell(standard_output(), f"{file.config.name}: devices: {in_words(prepared.devices)}")
    for note in prepared.notes:
        tell(standard_output(), note)
    for line in audit_lines(prepared.spec):
        tell(standard_output(), f"{file.config.name}: {line}")
    return prepared


def _port(spec: RunSpec) -> str:
    return spec.config.exchange.listen.rpartition(":")[2]
