"""`hetero-pp scores`: the scores of a run's replicas, as the newest judged round in its log has them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from hetero_pp.config.spec import RunSpec
from hetero_pp.core.errors import DamagedFile
from hetero_pp.core.files import write_json
from hetero_pp.messages.messages_pb2 import Score, Scores
from hetero_pp.program.open_run import open_run
from hetero_pp.program.report.output import standard_output, tell
from hetero_pp.program.report.tables import PlainTable
from replica_groups.exchange.audits import KeptScores, newest_scores
from replica_groups.exchange.log import ContributionLog

LOOKED_BACK = 256
"""Rounds that are read to find a replica's last contribution."""


def print_scores(runs: Path, run: str, json_path: Path | None) -> None:
    """Print the scores of a run, named by its name, its folder or the URL of its log.

    Raises ConfigError if there is no such run, DamagedFile if its scores were altered.
    """
    spec, log = open_run(runs, run)
    kept, name, console = newest_scores(log.store), spec.config.name, standard_output()
    if kept is None:
        tell(console, f"{name}: {_why_none(spec, log)}")
        found: dict[str, Any] = {"run": name, "round": None, "replicas": []}
    else:
        console.print(table_of(kept.scores))
        tell(console, f"{name}: scores after round {kept.round}")
        for line in _absent(log, kept):
            tell(console, f"{name}: {line}")
        found = {"run": name, "round": kept.round, "replicas": [_as_json(one, kept) for one in kept.scores.scores]}
    write_json(json_path, found)


def table_of(scores: Scores) -> PlainTable:
    """Return the table of all scores, the best first."""
    numbers = ["rating", "average", "synchronisation", "final", "evaluations"]
    table = PlainTable(["replica"], numbers, ["excluded"])
    for one in sorted(scores.scores, key=lambda one: (-one.final, one.replica)):
        table.add_row(
            one.replica,
            *(f"{value:.3f}" for value in (one.rating, one.average, one.synchronisation, one.final)),
            f"{one.evaluations}",
            one.excluded or "–",
        )
    return table


def _as_json(one: Score, kept: KeptScores) -> dict[str, Any]:
    told = {field.name: getattr(one, field.name) for field in Score.DESCRIPTOR.fields}
    excluded = kept.excluded.get(one.replica) if one.excluded else None
    return told | {"excluded": one.excluded or None, "excluded_until": None if excluded is None else excluded.until}


def _why_none(spec: RunSpec, log: ContributionLog) -> str:
    if spec.config.audit.scores is None:
        return "its contributions are not scored; `audit: {gauntlet: {}}` in the YAML turns scores on"
    return f"no round has been judged yet; {log.last_record()} rounds are closed"


def _absent(log: ContributionLog, kept: KeptScores) -> Iterator[str]:
    """Yield a line for each replica that took no part in the last round: its score stays as it was."""
    last = log.last_record()
    missing = {one.replica for one in kept.scores.scores if not one.excluded}
    found: dict[str, int] = {}
    for round_ in range(last, max(0, last - LOOKED_BACK), -1):
        if missing <= found.keys():
            break
        with suppress(DamagedFile, FileNotFoundError):
            record = log.read_record(round_)
            for name in [*(one.replica for one in record.contributions), *record.left_out]:
                found.setdefault(name, round_)
    for name in sorted(missing):
        if found.get(name) != last:
            when = f"its last contribution is in round {found[name]}" if name in found else "it has not contributed"
            yield f"{name} took no part in round {last}; {when}, and its score stays as it was"
