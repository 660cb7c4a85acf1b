"""`hetero-pp replay`: rebuild a run's parameters from its log alone, and verify every file that this reads."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from pathlib import Path

from hetero_pp.config.checkpoint import save_checkpoint
from hetero_pp.config.member_inputs import round_optimizer
from hetero_pp.core.errors import ConfigError, HeteroPPError
from hetero_pp.core.files import write_json
from hetero_pp.program.open_run import open_run
from hetero_pp.program.report.output import announce
from replica_groups.exchange.check_log import CheckedRound, LogCheck
from replica_groups.exchange.log import ContributionLog


def replay_run(runs: Path, run: str, round_: int | None, json_path: Path | None, to: Path | None) -> None:
    """Replay a run's log up to a round, and print one line per round.

    `round_`: round to replay to; None means the last closed round. `json_path`: file for the findings, as JSON. `to`:
    file for the run checkpoint after that round.

    Raises ConfigError if the run or the round does not exist, HeteroPPError if a file is damaged, lost, or differs from
    what the log records.
    """
    if to is not None and to.exists():
        raise ConfigError((), f"--to {to}: found a file, expected a new name")
    spec, log = open_run(runs, run)
    last = _last(log, round_)
    check, found = LogCheck(log, spec.run, partial(round_optimizer, spec)), list[CheckedRound]()
    for one in check.rounds(last):
        found.append(one)
        announce(_line(one))
    write_json(json_path, {"run": spec.config.name, "rounds": [asdict(one) for one in found]})
    checkpoint = check.checkpoint(last)
    if to is not None and checkpoint is not None:
        save_checkpoint(checkpoint, to)
    damaged = sum(len(one.damaged) for one in found)
    if damaged:
        raise HeteroPPError(f"{log.store.url()}: {damaged} files are damaged, missing, or differ from the log")
    if checkpoint is None:
        raise HeteroPPError(f"{log.store.url()}: the run has removed rounds before they were read: replay it again")
    written = f", written to {to}" if to is not None else ""
    rounds = spec.latest.outer.rounds
    which = f" of {rounds}, the last closed one" if round_ is None and last < rounds else ""
    announce(f"{spec.config.name} after round {last}{which}: sha256 {found[-1].sha256}{written}")


def _last(log: ContributionLog, wanted: int | None) -> int:
    checkpoints = log.checkpoints()
    if not checkpoints:
        raise ConfigError(
            (), f"{log.store.url()}: found no run checkpoint, expected at least the first run checkpoint of the run"
        )
    newest = max(log.last_record(), min(checkpoints))
    if wanted is not None and not min(checkpoints) <= wanted <= newest:
        found = f"found a round that the log in {log.store.url()} does not have"
        raise ConfigError((), f"--round {wanted}: {found}, expected {min(checkpoints)} to {newest}")
    return newest if wanted is None else wanted


def _line(one: CheckedRound) -> str:
    parts = [f"included {', '.join(one.replicas)}"] if one.replicas else []
    parts += [f"late {', '.join(one.late)}"] if one.late else []
    parts += [f"rejected {', '.join(one.left_out)}"] if one.left_out else []
    parts += ["parameters cannot be rebuilt" if one.sha256 is None else f"sha256 {one.sha256[:16]}…"]
    parts += ["equal to the audit"] if one.is_audited else []
    parts += ["equal to the run checkpoint"] if one.has_checkpoint else []
    parts += [f"DAMAGED: {line}" for line in one.damaged]
    return f"round {one.round}: {'; '.join(parts)}"
