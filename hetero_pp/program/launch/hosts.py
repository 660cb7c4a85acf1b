"""`launch --only NAME`: the part of a run on one host, and the commands for all hosts.

One host runs the exchange, and records and shows the run. The others run replicas or stages. They share the YAML, the
exchange's address, and a token that admits them.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hetero_pp.config.changes import Values
from hetero_pp.config.folder import RunFolder
from hetero_pp.config.lines import EXCHANGE, RELAYED
from hetero_pp.config.overrides import Given
from hetero_pp.config.run_config import RunConfig
from hetero_pp.config.spec import RunSpec
from hetero_pp.config.topology import ParticipantsReplica, ReplicaSettings
from hetero_pp.config.yaml_file import ConfigFile
from hetero_pp.core.errors import ConfigError, RunFailed, RunOver
from hetero_pp.core.files import write_whole
from hetero_pp.core.units import format_seconds
from hetero_pp.messages.messages_pb2 import Report
from hetero_pp.program.launch.addresses import RELAY_KEY, fixed_addresses
from hetero_pp.program.launch.mode import AS_A_RUN, Mode
from hetero_pp.program.launch.over import keep_over
from hetero_pp.program.launch.supervisor import Supervisor
from hetero_pp.program.launch.watcher import Watcher
from hetero_pp.program.operate.operations import Operations
from hetero_pp.program.report.lines import OwnRoundLines
from hetero_pp.program.report.output import about_report
from hetero_pp.rpc.connections import reports_to_members
from hetero_pp.rpc.identities import Keys, Secret, SecretKeys

TOKEN_FILE = "token"
"""Name of the token's file in the commands for all hosts."""

SHORTEST_TOKEN = 32


def members_named(config: RunConfig, name: str) -> list[str]:
    """Return the members that `--only NAME` starts: the exchange, all of a replica, or one stage.

    Raises ConfigError with the valid names.
    """
    if name == EXCHANGE:
        return [EXCHANGE]
    found = {replica.name: replica.members for replica in config.replicas}
    found |= {member: [member] for replica in config.replicas for member in replica.members}
    if name not in found:
        raise ConfigError((), f"--only {name}: expected one of {', '.join([EXCHANGE, *found])}")
    return found[name]


def listens(config: RunConfig, members: Sequence[str]) -> str:
    """Return RELAYED for a later stage that starts alone on its host and has no address in the YAML, else "".

    Without TLS there is no relay, and the result is empty.
    """
    for replica in config.replicas:
        if isinstance(replica, ParticipantsReplica) and len(members) == 1 and members[0] in replica.members[1:]:
            own = replica.stage_settings(replica.members.index(members[0]))
            if (own is None or own.listen is None) and not config.exchange.insecure:
                return RELAYED
    return ""


def require_reachable(config: RunConfig, members: Sequence[str]) -> None:
    """Raise ConfigError for an address that no other host can dial."""
    if EXCHANGE in members and config.exchange.listen.endswith(":0"):
        expected = "expected a fixed port that other hosts can dial, such as `0.0.0.0:47600`"
        raise ConfigError(("exchange", "listen"), f"found `{config.exchange.listen}`, {expected}")
    for index, replica in enumerate(config.replicas):
        if not isinstance(replica, ParticipantsReplica):
            continue
        for stage, member in enumerate(replica.members):
            own = replica.stage_settings(stage)
            host = "" if own is None or own.listen is None else own.listen.rpartition(":")[0]
            if member in members and host in ("0.0.0.0", "[::]"):
                neighbour = replica.members[stage - 1 if stage > 0 else min(1, replica.stage_count - 1)]
                expected = f"expected the address at which {neighbour} can dial this host"
                raise ConfigError(("replicas", index, "stages", stage, "listen"), f"found `{host}`, {expected}")


def read_token(path: Path) -> str:
    """Return the token in a file. Raises ConfigError if there is none."""
    try:
        token = path.read_text(encoding="utf-8").strip()
    except OSError as error:
        found = f"--token-file {path}: cannot be read ({error.strerror})"
        raise ConfigError((), f"{found}; make one token for all hosts: openssl rand -hex 16 > {path}") from None
    if len(token) < SHORTEST_TOKEN:
        found = f"found {len(token)} characters, expected at least {SHORTEST_TOKEN} random ones"
        raise ConfigError((), f"--token-file {path}: {found}; make one with: openssl rand -hex 16 > {path}")
    return token


def write_token(folder: RunFolder, token: str) -> Path:
    """Write the run's token to its folder, readable by its owner only."""
    write_whole(folder.token, f"{token}\n".encode(), is_secret=True)
    return folder.token


def launch_exchange(
    spec: RunSpec, folder: RunFolder, secret: Secret, resume: Values | None, on_report: Callable[[Report], None]
) -> None:
    """Run the exchange until the run is over. Raises RunFailed with the first cause on any host if the run fails."""
    keys = SecretKeys(secret, encrypted=not spec.config.exchange.insecure)
    with Supervisor(spec, folder, on_report, EXCHANGE, keys, resume) as supervisor:
        supervisor.start([EXCHANGE])
        watcher = supervisor.watch(supervisor.open_exchange())
        supervisor.wait()
        watcher.join()


@dataclass(frozen=True)
class ReachedExchange:
    """The exchange as other hosts reach it."""

    address: str
    """HOST:PORT"""
    keys: Keys
    keys_from: Path
    """File of the keys: the token, or the certificate that was issued for a ticket."""
    timeout: float
    """Seconds to wait for the exchange."""
    listen: str = ""
    """Address at which a member listens for its neighbouring stages, if it differs from the YAML's."""
    has_answered: bool = False
    """Whether the exchange has already answered this command."""


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
    refused = ""

    def on_refused(cause: str) -> None:
        nonlocal refused
        refused = cause
        waits = f"waiting for the exchange of this run, for up to {format_seconds(exchange.timeout)}"
        rounds.say(f"{cause} (not verified, because its certificate is not of this run; {waits})")

    def on_wait(seconds: float, has_answered: bool) -> None:
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
            raise _cause(error, refused, rounds.state.failed) from None
        watcher.join()


def _cause(error: RunFailed, refused: str, failed: str | None) -> ConfigError | RunFailed:
    """Return the cause of an error: a refusal by another run's exchange, or also why the run has `failed` elsewhere."""
    if refused and refused in str(error):
        return ConfigError((), refused)
    if failed is None or failed in str(error):
        return error
    return RunFailed(f"{error}; the run ended because {failed}")


def no_answer(address: str, seconds: float, limit: float, has_answered: bool, last: str = "") -> str:
    """Describe to the user that the exchange does not answer. `last`: what it said in its last answer."""
    since = format_seconds(seconds)
    until = f"waiting up to {format_seconds(limit)} (Ctrl-C ends this)"
    if has_answered:
        found = f"the exchange at {address} answered before, but not for the last {since}{last and f' ({last})'}"
        return f"{found}: the run is over, was stopped, or is being restarted; {until}"
    found = f"the exchange at {address} has not answered for {since}"
    return f"{found}: it is not started yet, the run is over, or the address is wrong; {until}"


def commands(config: RunConfig, path: Path, overrides: Sequence[Given]) -> list[str]:
    """Return the command for each host: the exchange, every replica, and every stage of a group on several hosts.

    Raises ConfigError if other hosts could not reach a listener.
    """
    require_reachable(config, [EXCHANGE, *(name for replica in config.replicas for name in replica.members)])
    sets = [part for one in overrides for part in (("--set", one) if isinstance(one, str) else shlex.split(one.shown))]
    start = ["hetero-pp", "launch", str(path), *sets]
    port = config.exchange.listen.rpartition(":")[2]
    token = ["--token-file", TOKEN_FILE]
    reach = ["--exchange", f"EXCHANGE_HOST:{port}", *token]
    found = [shlex.join([*start, "--only", EXCHANGE, *token])]
    for replica in config.replicas:
        copies = 1 if isinstance(replica, ParticipantsReplica) else replica.nodes
        names = replica.members if _is_on_several_hosts(replica) else [replica.name]
        found += [shlex.join([*start, "--only", name, *reach]) for name in names for _ in range(copies)]
    return found


def _is_on_several_hosts(replica: ReplicaSettings) -> bool:
    """Return whether a group's stages may be on several hosts: the YAML gives an address for one of them."""
    return isinstance(replica, ParticipantsReplica) and any(
        replica.listen_of(stage) is not None for stage in range(replica.stage_count)
    )


def notes(file: ConfigFile) -> list[str]:
    """Return notes on the commands: the token to make, and the addresses to replace, with file and line."""
    found = [f"make one token, and copy it to every host: openssl rand -hex 16 > {TOKEN_FILE}"]
    exchange, *others = fixed_addresses(file.config)

    def add(key: Sequence[str | int], note: str) -> None:
        found.append(str(file.located(ConfigError(key, note))))

    replace = "replace EXCHANGE_HOST with an address that other hosts can reach"
    add(exchange.key, f"the exchange listens at `{exchange.address}`; {replace}")
    for one in others:
        if one.key == RELAY_KEY:
            add(one.key, f"its relay listens at `{one.address}`, which other hosts dial, too")
    for one in (exchange, *others):
        if one.is_loopback and one.key != RELAY_KEY:
            expected = "expected an address that other hosts can reach, unless they use a tunnel"
            add(one.key, f"found `{one.address}`, {expected}")
    for index, replica in enumerate(file.config.replicas):
        if _is_on_several_hosts(replica) and isinstance(replica, ParticipantsReplica):
            for stage in range(1, replica.stage_count):
                if replica.listen_of(stage) is None:
                    before = replica.listen_of(stage - 1) not in (None, RELAYED)
                    found_by = f"dials {replica.members[stage - 1]}" if before else "is reached through the exchange"
                    beside = "must run on the host of the previous stage"
                    how = beside if file.config.exchange.insecure else found_by
                    key = ("replicas", index, "stages", stage, "listen")
                    add(key, f"found no address, so {replica.members[stage]} {how}")
    return found
