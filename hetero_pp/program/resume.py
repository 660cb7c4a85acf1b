"""Going on with a run that ended early: from which round, and what it had reported until then."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from hetero_pp.errors import ConfigError
from hetero_pp.program.config import RunPlan
from hetero_pp.program.recorder import METRICS
from hetero_pp.program.yaml_file import ConfigFile
from hetero_pp.rpc.messages_pb2 import Report
from replica_groups.log import ContributionLog
from replica_groups.saved_states import SavedStates


def log_of(folder: Path) -> ContributionLog:
    """The log of the run in a folder."""
    return ContributionLog(folder / "log")


def states_of(plan: RunPlan, folder: Path, member: str) -> SavedStates:
    """Where a member of the run in a folder keeps its state."""
    return SavedStates(folder / "state" / member, plan.config.snapshots.every)


def last_round(plan: RunPlan, folder: Path, members: Sequence[str]) -> int:
    """The newest round after which the run has a snapshot, these members their state, and every replica told its loss.

    Raises ConfigError if there is no such run, it was another configuration's, or it has no such round.
    """
    config = folder / "config.yaml"
    if not config.is_file():
        raise ConfigError((), f"--resume: found no run in {folder}")
    if RunPlan(ConfigFile(config).config, plan.shape.vocabulary).run != plan.run:
        raise ConfigError((), f"--resume: the run in {folder} has another configuration, see {config}")
    rounds = log_of(folder).snapshots() & _evaluated(plan, folder) - {0}
    for member in members:
        rounds &= states_of(plan, folder, member).rounds()
    if not rounds:
        raise ConfigError(
            (), f"--resume: the run in {folder} ended before all members saved a round (snapshots.every); start it anew"
        )
    return max(rounds)


def reports_until(folder: Path, round_: int) -> list[Report]:
    """What was reported of a run's rounds up to this one."""
    return list(_reports(_lines(folder), log_of(folder), round_))


def _evaluated(plan: RunPlan, folder: Path) -> set[int]:
    """Rounds of which every replica's loss was reported: reports come some time after what they tell."""
    told: dict[str, set[int]] = {replica.name: set() for replica in plan.config.replicas}
    for line in _lines(folder):
        if line.get("event") == "evaluation" and line["replica"] in told:
            told[line["replica"]].add(line["round"])
    return set.intersection(*told.values())


def _lines(folder: Path) -> Iterator[dict[str, Any]]:
    metrics = folder / METRICS
    for line in metrics.read_text().splitlines() if metrics.is_file() else ():
        with suppress(json.JSONDecodeError):  # the last line of a run that was killed as it wrote
            yield json.loads(line)


def _reports(lines: Iterator[dict[str, Any]], log: ContributionLog, last: int) -> Iterator[Report]:
    for line in lines:
        event = line.get("event")
        if event not in ("inner_step", "evaluation", "link_use", "round_closed", "round_verified"):
            continue
        if line["round"] > last:
            continue
        report = Report(time=line["time"], member=line["member"])
        if event == "round_closed":
            report.round_closed.CopyFrom(log.read_record(line["round"]))
        else:
            _fill(getattr(report, event), line)
        yield report


def _fill(message: Message, line: dict[str, Any]) -> None:
    message.SetInParent()
    for field in message.DESCRIPTOR.fields:
        value = line.get(field.name)
        if value is not None:
            is_bytes = field.type == FieldDescriptor.TYPE_BYTES
            setattr(message, field.name, bytes.fromhex(value) if is_bytes else value)
