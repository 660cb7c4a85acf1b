"""`hetero-pp invite` and `hetero-pp revoke`: tickets to a run that is served here."""

from __future__ import annotations

import sys
import time
from contextlib import closing
from pathlib import Path

from hetero_pp.errors import ConfigError, HeteroPPError
from hetero_pp.program.launch.hosts import read_token
from hetero_pp.program.report.output import standard_output, tell
from hetero_pp.rpc.certificates import Authority
from hetero_pp.rpc.tickets import make_ticket
from hetero_pp.run.config import RunConfig
from hetero_pp.run.folder import RunFolder
from hetero_pp.run.yaml_file import ConfigFile
from hetero_pp.units import SECONDS, parse_quantity
from replica_groups.exchange.memberships import Memberships

_EVERYWHERE = ("0.0.0.0", "[::]")


def invite(runs: Path, run: str, place: str | None, seconds: float, address: str | None) -> None:
    """Print a ticket that lets one process in: to this place, or one that is free then.

    Raises ConfigError for a run that is not served here, or a place that it has not, or that is taken.
    """
    folder, config = _served(runs, run)
    _require_place(config, place)
    reached = address or _reached(config)
    authority = Authority(read_token(folder.token))
    with closing(Memberships(folder.memberships)) as memberships:
        try:
            ticket = memberships.invite(place, seconds)
        except HeteroPPError as error:
            raise ConfigError((), f"--place: {error}") from None
    sys.stdout.write(make_ticket(run, reached, authority, ticket, time.time() + seconds).to_text() + "\n")


def revoke(runs: Path, run: str, what: str) -> None:
    """Take a place back from who holds it by a ticket, or a ticket. Raises ConfigError if there is nothing."""
    folder, _ = _served(runs, run)
    with closing(Memberships(folder.memberships)) as memberships:
        try:
            taken = memberships.revoke(what)
        except HeteroPPError as error:
            raise ConfigError((), str(error)) from None
    for one in taken:
        tell(standard_output(), f"{run}: took back {one}")


def seconds_of(text: str) -> float:
    """Of a duration as `24h`. Raises ConfigError for another text."""
    try:
        return parse_quantity(text, SECONDS, "24h")
    except ValueError as error:
        raise ConfigError((), f"--expires: {error}") from None


def _served(runs: Path, run: str) -> tuple[RunFolder, RunConfig]:
    """The folder of a run that is served on this host, and its configuration. Raises ConfigError for another."""
    folder = RunFolder(runs.absolute() / run)
    if not folder.config.is_file() or not folder.token.is_file():
        raise ConfigError(
            (), f"{runs / run}: found no run that this host serves; start one with: hetero-pp serve CONFIG"
        )
    config = ConfigFile(folder.config).config
    if config.exchange.insecure:
        raise ConfigError((), f"{folder.config}: exchange.insecure: found true, expected false: tickets need TLS")
    return folder, config


def _require_place(config: RunConfig, place: str | None) -> None:
    places = [member for replica in config.replicas for member in replica.members]
    if place is not None and place not in places:
        raise ConfigError((), f"--place {place}: expected one of {', '.join(places)}")


def _reached(config: RunConfig) -> str:
    """Where others dial the exchange, as far as its YAML says."""
    listen = config.exchange.listen
    if listen.rpartition(":")[0] in _EVERYWHERE:
        raise ConfigError(
            (),
            f"the exchange listens at {listen}, which other hosts cannot dial; give its address with --address "
            "HOST:PORT",
        )
    return listen
