"""`hetero-pp launch`: the whole topology on this machine, or the part of it that this host runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hetero_pp.config.changes import Values
from hetero_pp.config.folder import RunFolder
from hetero_pp.config.lines import EXCHANGE
from hetero_pp.config.member_inputs import in_words
from hetero_pp.config.overrides import Given
from hetero_pp.config.spec import RunSpec
from hetero_pp.config.topology import DatacenterReplica
from hetero_pp.config.yaml_file import ConfigFile, save_config
from hetero_pp.core.errors import ConfigError
from hetero_pp.core.files import print_without_fail
from hetero_pp.program.defences import defence_lines
from hetero_pp.program.launch.addresses import RELAY_KEY, fixed_addresses
from hetero_pp.program.launch.claim import claim, claim_store
from hetero_pp.program.launch.hosts import (
    ReachedExchange,
    commands,
    launch_exchange,
    launch_members,
    listens,
    notes,
    read_token,
    write_token,
)
from hetero_pp.program.launch.inputs import Prepared, prepare, require_same_ranks
from hetero_pp.program.launch.mode import AS_A_RUN, Invocation, Mode
from hetero_pp.program.launch.over import read_over
from hetero_pp.program.launch.recorded import OnReport, Start, run_and_record
from hetero_pp.program.launch.supervisor import launch
from hetero_pp.program.launch.unfinished import ResumeHint, decide_to_resume
from hetero_pp.program.operate.operations import Operations
from hetero_pp.program.report.lines import OwnRoundLines
from hetero_pp.program.report.output import announce, name_run, shown_reading, standard_output, tell
from hetero_pp.rpc.identities import Secret, SecretKeys, new_secret


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
    new: bool = False,
    start: Start | None = None,
    invocation: Invocation | None = None,
) -> None:
    """Train the topology of a YAML in a new folder under `runs`, or resume the run that is there.

    `new`: start a new run even if one of this name is unfinished. `start`: another function that starts the members,
    such as one that injects faults.

    Raises ConfigError if a run of this name is unfinished, and neither `resume` nor `new` is given.
    """
    print_without_fail()
    invocation = invocation or Invocation()
    mode = invocation.mode
    file = mode.of(ConfigFile(path, overrides))
    resume = _resumes(file, runs, resume, new, invocation)
    prepared = _prepare(file, runs, None, resume)
    mode.begin(prepared.spec)
    name, start = prepared.spec.config.name, start or (_run_in_process if in_process else launch)
    with claim(runs.absolute(), name, prepared.names):
        _run_and_record(prepared, runs, start, resume, invocation)


def _resumes(file: ConfigFile, runs: Path, resume: bool, new: bool, invocation: Invocation) -> bool:
    """Return whether the command resumes a run. Raises ConfigError as `decide_to_resume` does."""
    config, mode = file.config.with_absolute_paths(), invocation.mode
    return mode.resumes and decide_to_resume(config, runs, resume, new, invocation.typed)


def _run_and_record(prepared: Prepared, runs: Path, start: Start, resume: bool, invocation: Invocation) -> None:
    folder = RunFolder(runs.absolute() / prepared.spec.config.name)
    with claim_store(prepared.spec.config, folder), _hint(prepared, runs, invocation) as hint:
        run_and_record(prepared, runs, start, resume, invocation, hint.print_once)


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
    new: bool = False,
    invocation: Invocation | None = None,
) -> None:
    """Run a part of a run: the exchange, which records and shows the run, or members that join it.

    `new` is as in `run_topology`. Raises ConfigError if this host cannot reach the rest.
    """
    if in_process:
        found = f"--only {host.only}: found --in-process, which needs the whole run on this machine"
        raise ConfigError((), f"{found}; leave out one of them")
    print_without_fail()
    invocation = invocation or Invocation()
    mode = invocation.mode
    file = mode.of(ConfigFile(path, overrides))
    if host.only == EXCHANGE:
        resume = _resumes(file, runs, resume, new, invocation)
    elif new:
        raise ConfigError((), f"--only {host.only}: found --new, which only the exchange's host needs; leave it out")
    elif invocation.operations.needs_all:
        raise ConfigError((), f"--only {host.only}: found --otlp or --board, which only the exchange's host takes")
    prepared = _prepare(file, runs, host.only, resume)
    mode.begin(prepared.spec)
    if host.only == EXCHANGE:
        _serve(prepared, runs, host, resume, invocation)
        return
    if host.exchange is None or host.token is None:
        raise ConfigError((), f"--only {host.only}: expected --exchange HOST:PORT and --token-file FILE, too")
    if resume:
        raise ConfigError((), f"--only {host.only}: found --resume, which only the exchange's host needs; leave it out")
    own = prepared.spec.config.exchange
    keys = SecretKeys(Secret(read_token(host.token)), encrypted=not own.insecure)
    listen = listens(prepared.spec.config, prepared.names)
    exchange = ReachedExchange(host.exchange, keys, host.token, own.timeout, listen)
    with _hint(prepared, runs, invocation):
        run_members(prepared, runs.absolute(), host.only, exchange, invocation.operations)


def _serve(prepared: Prepared, runs: Path, host: Host, resume: bool, invocation: Invocation) -> None:
    """Run the exchange, which records and shows the run."""
    name = prepared.spec.config.name
    token = _token(host.token, RunFolder(runs.absolute() / name), resume)

    def start(spec: RunSpec, folder: RunFolder, on_report: OnReport, resume: Values | None) -> None:
        needed = f"Members need --exchange HOST:{_port(spec)}, and the token in {write_token(folder, token)}"
        announce(f"{needed}; or one ticket for each member, from: hetero-pp invite {name}")
        for one in fixed_addresses(spec.config):
            if one.key == RELAY_KEY:
                announce(
                    f"Stages dial port {one.address.rpartition(':')[2]}, too, to reach each other through this host"
                )
        launch_exchange(spec, folder, Secret(token), resume, on_report)

    with claim(runs.absolute(), name, [EXCHANGE]):
        _run_and_record(prepared, runs, start, resume, invocation)


def _hint(prepared: Prepared, runs: Path, invocation: Invocation) -> ResumeHint:
    folder = RunFolder(runs / prepared.spec.config.name)
    return ResumeHint(prepared, folder, invocation.typed, invocation.mode.resumes)


def _token(path: Path | None, folder: RunFolder, resume: bool) -> str:
    """Return the run's token: from the file, from the folder of a resumed run, or a new one.

    A resumed run keeps its token, because the certificates of admitted hosts depend on it.
    """
    if path is not None:
        return read_token(path)
    return read_token(folder.token) if resume and folder.token.is_file() else new_secret()


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
    with claim(runs, name, [one for one in prepared.names if not _is_shared(prepared.spec, one)]):
        save_config(prepared.spec.config, folder.config)
        announce(f"{name}: {', '.join(prepared.names)} (their output: {folder.path}/logs)")
        rounds = OwnRoundLines(prepared.spec, prepared.names, announce)
        operations.observed.follow(rounds.state, prepared.names)
        launch_members(prepared.spec, only, prepared.names, folder, exchange, rounds, operations, mode)
    if (over := read_over(folder)) is not None:
        announce(f"{name}: {over.told}")
    if farewell := rounds.farewell():
        announce(f"{name}: {farewell}")


def _is_shared(spec: RunSpec, member: str) -> bool:
    """Return whether several nodes run a member together, with one shared folder."""
    replica = spec.members[member].replica
    return isinstance(replica, DatacenterReplica) and replica.nodes > 1


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


def _prepare(file: ConfigFile, runs: Path, only: str | None, resume: bool) -> Prepared:
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
    return prepared


def _port(spec: RunSpec) -> str:
    return spec.config.exchange.listen.rpartition(":")[2]
