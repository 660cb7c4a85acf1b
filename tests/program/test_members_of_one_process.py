"""A rehearsal whose members share processes, each with its own connections."""

from __future__ import annotations

import multiprocessing
import os
import signal
from pathlib import Path

import pytest

from hetero_pp.config.folder import RunFolder
from hetero_pp.config.run_config import RunConfig
from hetero_pp.config.spec import RunSpec
from hetero_pp.config.yaml_file import save_config
from hetero_pp.core.errors import RunFailed
from hetero_pp.messages.messages_pb2 import Report
from hetero_pp.program.launch.launch_rehearsal import launch_rehearsal

pytestmark = pytest.mark.starts_processes


def _spec(folder: RunFolder, rounds: int, **top: object) -> RunSpec:
    """Return a rehearsal of five members, kept in the folder."""
    few = {"name": "few", "kind": "participants", "stages": 3, "batch_size": 2, "micro_batches": 2}
    alone = [{"name": name, "kind": "datacenter", "batch_size": 1} for name in ("one", "two")]
    base = {
        "name": "together",
        "model": {"preset": "micro", "width": 32, "heads": 2, "feed_forward": 64},
        "data": {"sequence_length": 32, "validation_sequences": 2},
        "inner": {"steps": 2},
        "outer": {"rounds": rounds},
        "replicas": [few, *alone],
    }
    config = RunConfig.model_validate(base | top).as_rehearsal(rounds, 2)
    folder.path.mkdir(parents=True)
    save_config(config, folder.config)
    return RunSpec(config, 256)


def test_members_that_share_processes_take_part_in_every_round(tmp_path: Path) -> None:
    """The group's stages are divided: two are in one process, and the third in another."""
    folder, reports = RunFolder(tmp_path / "run"), list[Report]()
    launch_rehearsal(_spec(folder, rounds=2), folder, reports.append, most_alone=4, most_in_all=2)
    closed = [report.round_closed for report in reports if report.HasField("round_closed")]
    assert [one.round for one in closed] == [1, 2]
    verified = [
        (one.round_verified.round, one.round_verified.replica) for one in reports if one.HasField("round_verified")
    ]
    assert sorted(verified) == [(round_, name) for round_ in (1, 2) for name in ("few", "one", "two")]
    written = {path.name for path in folder.output("few.0").parent.iterdir()}
    assert written == {"exchange.log", "few.0-and-others.log", "few.2-and-others.log", "two-and-others.log"}


def test_a_process_of_several_members_that_dies_ends_the_rehearsal(tmp_path: Path) -> None:
    folder, ended = RunFolder(tmp_path / "run"), list[str]()
    spec = _spec(folder, rounds=1000, exchange={"quorum": 1.0})  # far more than pass before a report arrives

    def on_report(report: Report) -> None:
        if report.HasField("inner_step") and not ended:
            [crowd] = (one for one in multiprocessing.active_children() if one.name == "few.0 and 2 others")
            ended.append(crowd.name)
            os.kill(crowd.pid or 0, signal.SIGKILL)

    with pytest.raises(RunFailed, match=r"the process of few\.0 and 2 others ended with code -9"):
        launch_rehearsal(spec, folder, on_report, most_alone=3, most_in_all=3)
    assert not multiprocessing.active_children()
