"""The runs of this host: how to reach the exchange of each, and how one ended, from its folder alone."""

from __future__ import annotations

import shlex
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hetero_pp.config.changes import LAST, read_changes
from hetero_pp.config.folder import RunFolder, own_parts
from hetero_pp.config.lines import EXCHANGE, LAUNCHER
from hetero_pp.config.yaml_file import config_of
from hetero_pp.core.bounded import read_json_object
from hetero_pp.core.errors import ConfigError, HeteroPPError
from hetero_pp.program.join.membership import memberships_in
from hetero_pp.program.launch.earlier import is_held
from hetero_pp.program.launch.hosts import dialled_here, read_token
from hetero_pp.program.report.recorder import INTERRUPTED, last_closed
from hetero_pp.rpc.identities import Authority, Identity
from replica_groups.exchange.stall_detector import listed


@dataclass(frozen=True)
class RunOnDisk:
    """State of a run according to its folder."""

    state: str  # `running`, `over`, `interrupted`, `failed`, or `killed` (the run ended without a record of its end)
    last_round: int
    rounds: int
    changed: float  # time of the last record, in seconds since 1970
    why: str = ""
    resume: str = ""  # command that resumes the run; empty if there is nothing to resume
    rehearsal: bool = False


def read_run_on_disk(folder: RunFolder) -> RunOnDisk:
    """Return the state of a run from its folder. Raises ConfigError for a configuration that cannot be read."""
    config = config_of(folder)
    changes = read_changes(folder.changes).settled()
    changes.require_changeable(config)
    rounds, rehearsal = changes.at(config, LAST).outer.rounds, config.rehearsal is not None
    summary: dict[str, object] = {}
    with suppress(OSError, ValueError):
        summary = read_json_object(folder.summary)
    changed = max(path.stat().st_mtime for path in (folder.summary, folder.metrics, folder.config) if path.is_file())
    command = "serve" if folder.token.is_file() else "launch"  # as it was started
    resume = shlex.join(["hetero-pp", command, str(folder.config), "--resume", "--runs", str(folder.path.parent)])
    resume = "" if rehearsal else resume
    if is_running(folder):
        return RunOnDisk("running", last_closed(folder), rounds, changed, rehearsal=rehearsal)
    if not summary:
        return RunOnDisk("killed", last_closed(folder), rounds, changed, "", resume, rehearsal)
    said, why = summary.get("rounds"), str(summary.get("failed") or "")
    last = said if isinstance(said, int) else 0
    if not why:
        return RunOnDisk("over", last, rounds, changed, rehearsal=rehearsal)
    state = INTERRUPTED if why == INTERRUPTED else "failed"
    return RunOnDisk(state, last, rounds, changed, "" if state == INTERRUPTED else why, resume, rehearsal)


def is_running(folder: RunFolder) -> bool:
    """Return whether a launch on this host runs the exchange of the run."""
    return is_held(folder.path.parent, folder.path.name, EXCHANGE)


# ---- runs that this host serves or has joined ----


@dataclass(frozen=True)
class RunOfHost:
    """A run that this host serves or has joined."""

    folder: RunFolder
    address: str  # HOST:PORT of the run's exchange
    identity: Identity  # identity with which this host authenticates to the exchange
    serves: bool

    @property
    def name(self) -> str:
        return self.folder.path.name


def runs_at(runs: Path, address: str) -> list[RunOfHost]:
    """Return the runs of this host that were at an address, newest first. Raises ConfigError if there are none."""
    found = []
    for path in sorted(runs.glob("*/"), key=lambda path: -path.stat().st_mtime):
        with suppress(HeteroPPError):
            found.append(known_run(RunFolder(path)))
    here = [one for one in found if one.address == address]
    if not here:
        addresses = sorted({one.address for one in found})
        known = f": known addresses: {listed(addresses)}" if addresses else ""
        raise ConfigError((), f"{runs}: found no run at {address} that this host serves or joined{known}")
    return here


def known_run(folder: RunFolder) -> RunOfHost:
    """Return the run of a folder. Raises ConfigError if this host is no part of it, Refused for a damaged folder."""
    if folder.token.is_file() and folder.config.is_file():
        listen = dialled_here(config_of(folder).exchange.listen)
        return RunOfHost(folder, listen, Authority(read_token(folder.token)).identity(LAUNCHER), serves=True)
    found = memberships_in(folder)
    if not found:
        own = f": it runs {', '.join(parts)} with the run's token" if (parts := own_parts(folder)) else ""
        what = f"found no run that this host serves or joined with a ticket{own}"
        raise ConfigError((), f"{folder.path}: {what}; run `status` on the host of the exchange")
    newest = found[0]
    if newest.has_left:
        told = f"{newest.slot} has left the run; the same `join` command returns to it"
        raise ConfigError((), f"{folder.path.name}: {told}")
    return RunOfHost(folder, newest.address, newest.identity.latest, serves=False)
