"""Reads the state of a run from its folder, without its exchange: how, when and after which round it ended."""

from __future__ import annotations

import shlex
from contextlib import suppress
from dataclasses import dataclass

from hetero_pp.config.changes import LAST, read_changes
from hetero_pp.config.folder import RunFolder
from hetero_pp.config.lines import EXCHANGE
from hetero_pp.config.yaml_file import config_of
from hetero_pp.core.bounded import read_json_object
from hetero_pp.program.launch.claim import is_held
from hetero_pp.program.report.recorder import INTERRUPTED, last_closed


@dataclass(frozen=True)
class RunOnDisk:
    """State of a run according to its folder."""

    state: str
    """`running`, `over`, `interrupted`, `failed`, or `killed` (the run ended without a record of its end)."""
    last_round: int
    rounds: int
    changed: float
    """Time of the last record, in seconds since 1970."""
    why: str = ""
    resume: str = ""
    """Command that resumes the run; empty if there is nothing to resume."""
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
    resume = "" if rehearsal else _resume(folder)
    if is_running(folder):
        return RunOnDisk("running", last_closed(folder), rounds, changed, rehearsal=rehearsal)
    last, why = _number(summary.get("rounds")), str(summary.get("failed") or "")
    if not summary:
        return RunOnDisk("killed", last_closed(folder), rounds, changed, "", resume, rehearsal)
    if not why:
        return RunOnDisk("over", last, rounds, changed, rehearsal=rehearsal)
    state = INTERRUPTED if why == INTERRUPTED else "failed"
    return RunOnDisk(state, last, rounds, changed, "" if state == INTERRUPTED else why, resume, rehearsal)


def is_running(folder: RunFolder) -> bool:
    """Return whether a launch on this host runs the exchange of the run."""
    return is_held(folder.path.parent, folder.path.name, EXCHANGE)


def _number(found: object) -> int:
    return found if isinstance(found, int) else 0


def _resume(folder: RunFolder) -> str:
    """Return the command that resumes a run, with `serve` or `launch` as it was started."""
    command = "serve" if folder.token.is_file() else "launch"
    return shlex.join(["hetero-pp", command, str(folder.config), "--resume", "--runs", str(folder.path.parent)])
