"""Reads the reports of an earlier start of a run, so that a resumed run can apply and record them again.

The round from which a run resumes is not decided here: members report what they have, and the exchange chooses
(replica_groups.exchange.restart).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from hetero_pp.config.links import EXCHANGE
from hetero_pp.core.bounded import before_gap, parse_json
from hetero_pp.core.errors import DamagedFile
from hetero_pp.messages.messages_pb2 import Report, RoundRecord
from hetero_pp.program.report.flat import report_of
from hetero_pp.run.config import RunConfig
from hetero_pp.run.folder import RunFolder
from replica_groups.exchange.open_log import open_log

_KEPT = (
    "begun",
    "inner_step",
    "evaluation",
    "link_use",
    "member_round",
    "refusal",
    "round_verified",
    "scores",
    "judged",
)
"""Events that a resumed run reports again up to a round. Closed rounds are in the log instead."""

_LINE_CHARACTERS_MAX = 2**20
"""Most characters read as one line of metrics.jsonl.

The pieces of a longer line are not valid JSON, so they are skipped.
"""

_KEPT_UNTIL = ("joined", "computes", "activity", "standing")
"""Events without a round that a resumed run reports again, up to the close of the last round that is kept."""

_TAKING_PART = ("joined", "standing", "finished")


def reports_until(config: RunConfig, folder: RunFolder, last: int, complain: Callable[[str], None]) -> list[Report]:
    """Return the earlier reports of a run up to a round, in order of time.

    Closed rounds come from the run's log, and all else from metrics.jsonl. With overlap, the steps of the next round
    are included, because the member checkpoints contain them. `complain` is called with a line on what is missing.
    """
    until_of = {"inner_step": last + config.outer.overlap}
    reports, unplaced, closed, strange = [], [], {}, 0
    for line in _lines(folder.metrics):
        try:
            if line["event"] == "round_closed":
                closed[int(line["round"])] = float(line["time"])
            elif line["event"] in _KEPT and line.get("round", 0) <= until_of.get(line["event"], last):
                reports.append(_report(line))
            elif line["event"] in _KEPT_UNTIL:
                unplaced.append(_report(line))
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError):
            strange += 1
    if strange:
        complain(f"skipped {strange} unreadable lines of {folder.metrics.name}")
    until = max((time for round_, time in closed.items() if round_ <= last), default=0.0)
    reports += [report for report in unplaced if report.time <= until]
    log, when = open_log(config, folder), min((report.time for report in reports), default=time.time())
    for round_ in range(1, last + 1):
        try:
            record = log.read_record(round_)
        except (DamagedFile, FileNotFoundError) as error:
            complain(f"the contributions of round {round_} are missing from the summary: {error}")
            record = RoundRecord(round=round_)
        when = max(when, closed.get(round_, when))  # a close that was not recorded: assume the time of the round before
        reports.append(Report(time=when, member=EXCHANGE, round_closed=record))
    return sorted(reports, key=lambda report: report.time)


def last_closed(folder: RunFolder) -> int:
    """Return the last closed round in metrics.jsonl; 0 if there is none."""
    closed = (line for line in _lines(folder.metrics, '"round_closed"') if isinstance(line, dict))
    rounds = (line.get("round") for line in closed if line.get("event") == "round_closed")
    known = {round_ for round_ in rounds if isinstance(round_, int) and round_ > 0}
    return before_gap({0, *known})[-1]


def who_takes_part(folder: RunFolder) -> Iterator[Report]:
    """Yield the recorded reports on members that come, leave or pause. Damaged lines are left out."""
    for line in _lines(folder.metrics, *(f'"{event}"' for event in _TAKING_PART)):
        with suppress(AttributeError, KeyError, OverflowError, TypeError, ValueError):
            if line["event"] in _TAKING_PART:
                yield report_of(line)


def _lines(metrics: Path, *having: str) -> Iterator[Any]:
    """Yield the parsed lines that contain one of some texts, or all; nothing if the file does not exist."""
    if not metrics.is_file():
        return
    with metrics.open(encoding="utf-8", errors="replace") as file:
        while line := file.readline(_LINE_CHARACTERS_MAX):
            if not having or any(one in line for one in having):
                with suppress(ValueError):  # the last line may be cut off if the run was killed
                    yield parse_json(line)


def _report(line: dict[str, Any]) -> Report:
    report = report_of(line)
    if report.HasField("begun"):
        report.begun.ClearField("changes")  # the resumed run's own `begun` report has all changes
        report.begun.ClearField("note")
    return report
