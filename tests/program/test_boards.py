"""Places beside TensorBoard that get the curves of a run: W&B and trackio, and what happens if one of them fails."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from made_up_run import made_up_round
from test_recorder import made_up_reports, made_up_spec

from hetero_pp.config.folder import RunFolder
from hetero_pp.core.errors import ConfigError
from hetero_pp.messages.messages_pb2 import Report
from hetero_pp.program.report.boards import MakeSink, Scalar, makers_of
from hetero_pp.program.report.recorder import Recorder
from hetero_pp.program.report.state import RunState


class Noted:
    """A sink that keeps what it gets. It fails at its n-th scalar, and at its end if n is 0."""

    def __init__(self, fails_at: float = math.inf) -> None:
        self.scalars: list[Scalar] = []
        self._fails_at = fails_at
        self.is_closed = False

    def write(self, scalar: Scalar) -> None:
        if len(self.scalars) + 1 == self._fails_at:
            raise RuntimeError("the service\nis gone")
        self.scalars.append(scalar)

    def close(self) -> None:
        self.is_closed = True
        if self._fails_at == 0:
            raise RuntimeError("the service\nis gone")


def record(
    folder: Path, boards: dict[str, MakeSink], reports: Sequence[Report] = (), again: Sequence[Report] | None = None
) -> list[str]:
    """Record reports, by default made-up ones; return the complaints. `again`: earlier reports of a resumed run."""
    complaints: list[str] = []
    state = RunState(made_up_spec())
    resume = again is not None
    recorder = Recorder(made_up_spec(), RunFolder(folder), state, resume, complaints.append, boards)
    for report in again or ():
        state.apply(report)
        recorder.on_report(report)
    if resume:
        recorder.go_on()
    for report in reports or made_up_reports():
        state.apply(report)
        recorder.on_report(report)
    recorder.close()
    return complaints


def expected(folder: Path) -> dict[str, list[tuple[int, Any]]]:
    """Return the curves of TensorBoard: tag -> (step, value)."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return {
        tag: [(event.step, pytest.approx(event.value)) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


def curves(scalars: list[Scalar]) -> dict[str, list[tuple[int, float]]]:
    found: dict[str, list[tuple[int, float]]] = {}
    for one in scalars:
        found.setdefault(one.tag, []).append((one.step, one.value))
    return found


def test_every_sink_gets_what_tensorboard_gets(tmp_path: Path) -> None:
    kept = Noted()
    assert record(tmp_path, {"kept": lambda *told: kept}) == []
    assert curves(kept.scalars) == expected(tmp_path)
    assert kept.is_closed
    assert b"name: made-up" in next((tmp_path / "tensorboard").iterdir()).read_bytes()  # its configuration


def test_a_step_that_is_trained_again_is_one_point(tmp_path: Path) -> None:
    kept = Noted()
    record(tmp_path, {"kept": lambda *told: kept}, [*made_up_reports(), *made_up_reports()])
    assert curves(kept.scalars) == expected(tmp_path)
    assert [step for step, _ in curves(kept.scalars)["training_loss/dc"]] == [0, 1, 2, 3]


@pytest.mark.parametrize("fails_at", [0, 1, 5])
def test_a_sink_that_fails_is_one_line_and_the_run_continues(fails_at: int, tmp_path: Path) -> None:
    fails, kept = Noted(fails_at), Noted()
    complaints = record(tmp_path, {"fails": lambda *told: fails, "kept": lambda *told: kept})
    assert complaints == ["fails gets no more curves, but the run continues: the service is gone"]
    assert curves(kept.scalars) == expected(tmp_path)
    assert (tmp_path / "summary.json").is_file()


def test_a_resumed_run_continues_its_run_of_a_service(tmp_path: Path) -> None:
    """The service gets each point once. A board that is new gets the earlier points, too."""
    reports = made_up_reports()
    half = len(reports) - len([*made_up_round(2)]) - 3  # of two rounds, and of three members that finish
    sinks, given = [Noted(), Noted(), Noted()], list[tuple[Path, str, bool]]()

    def make(state: RunState, folder: Path, identifier: str, goes_on: bool) -> Noted:
        given.append((folder, identifier, goes_on))
        return sinks[len(given) - 1]

    record(tmp_path, {"service": make}, reports[:half])
    record(tmp_path, {"service": make, "new": make}, reports[half:], again=reports[:half])
    assert curves(sinks[0].scalars + sinks[1].scalars) == curves(sinks[2].scalars) == expected(tmp_path)
    service, first, other = tmp_path / "boards" / "service", given[0][1], given[2][1]
    assert given == [(service, first, False), (service, first, True), (tmp_path / "boards" / "new", other, False)]
    assert first != other


def test_a_sink_that_is_not_installed_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hetero_pp.program.report.boards.find_spec", lambda name: None)
    with pytest.raises(
        ConfigError, match=r"^--board wandb: the package is not installed; install it with: pip install 'hetero-pp"
    ):
        makers_of(["wandb"])


def test_trackio_keeps_the_curves_on_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    import trackio.sqlite_storage as storage

    monkeypatch.setattr(storage, "TRACKIO_DIR", tmp_path / "trackio")
    reports = made_up_reports()
    half = len(reports) - len([*made_up_round(2)]) - 3  # of two rounds, and of three members that finish
    assert record(tmp_path, makers_of(["trackio"]), reports[:half]) == []
    assert record(tmp_path, makers_of(["trackio"]), reports[half:], again=reports[:half]) == []
    assert len(storage.SQLiteStorage.get_runs("hetero-pp")) == 1
    found: dict[str, list[tuple[int, float]]] = {}
    for line in storage.SQLiteStorage.get_logs("hetero-pp", f"made-up-{_id(tmp_path, 'trackio')}"):
        for tag in line.keys() - {"step", "timestamp"}:
            found.setdefault(tag, []).append((line["step"], line[tag]))
    assert found == expected(tmp_path)


def _id(folder: Path, board: str) -> str:
    return (folder / "boards" / board / "id").read_text()


def wandb_records(path: Path) -> Iterator[bytes]:
    """Yield the records of an offline run: a log of LevelDB after a header of 7 bytes, in blocks of 32 kB."""
    data, at, whole = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        size, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        left = 32768 - at % 32768
        if left < 7 or kind == 0:
            at += left
            continue
        whole += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # a whole record, or the last part of one
            yield whole
            whole = b""


@pytest.mark.starts_processes
def test_wandb_keeps_the_curves_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb
    from wandb.proto import wandb_internal_pb2

    monkeypatch.setenv("WANDB_MODE", "offline")
    assert record(tmp_path, makers_of(["wandb"])) == []
    wandb.teardown()  # as at exit: its process may write the file after the run is finished
    (path,) = tmp_path.glob(f"boards/wandb/wandb/offline-run-*/run-{_id(tmp_path, 'wandb')}.wandb")
    axes: dict[str, str] = {}
    found: dict[str, list[tuple[int, float]]] = {}
    for data in wandb_records(path):
        told = getattr(wandb_internal_pb2, "Record").FromString(data)  # noqa: B009 (its stub has no messages)
        if told.metric.step_metric:
            axes[told.metric.name] = told.metric.step_metric
        values = {item.key or item.nested_key[0]: float(item.value_json) for item in told.history.item}
        for tag in values.keys() & axes.keys():
            found.setdefault(tag, []).append((int(values[axes[tag]]), values[tag]))
    assert found == expected(tmp_path)
