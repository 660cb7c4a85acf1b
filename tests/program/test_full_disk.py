"""The n-th disk operation fails, for every n: what each writer and reader of the program then does.

tests/exchange/test_failing_disk.py tests the exchange's log. tests/faults has a launch on a disk that is really full.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from catalogs import compute_once
from failing_disk import FailingDisk, each_operation, failing_disk
from made_up_run import made_up_reports, made_up_spec
from matplotlib.figure import Figure
from members import TIMEOUT, in_thread
from mixed_run import MIXED, QUICK, train
from typer.testing import CliRunner

from hetero_pp.config.changes import NO_CHANGES, write_changes
from hetero_pp.config.checkpoint import RunCheckpoint, initial_checkpoint, save_checkpoint
from hetero_pp.config.folder import RunFolder
from hetero_pp.config.yaml_file import save_config
from hetero_pp.core.errors import StoreError
from hetero_pp.core.files import PART, LastingLog, write_whole
from hetero_pp.data.settings import DataSettings
from hetero_pp.data.tokens import prepare_tokens
from hetero_pp.hugging_face.writing import write_weights
from hetero_pp.model.transformer import ModelShape
from hetero_pp.program import simulate
from hetero_pp.program.cli import app
from hetero_pp.program.join.membership import _own_key
from hetero_pp.program.launch.command import begin_folder
from hetero_pp.program.launch.hosts import write_token
from hetero_pp.program.report.recorder import Recorder
from hetero_pp.program.report.state import RunState
from hetero_pp.research.trainer.train import Checkpoint
from hetero_pp.simulator.charts import save_figure
from replica_groups.engines.ranks import ALONE, Ranks
from replica_groups.exchange.memberships import Memberships
from replica_groups.member.saved_states import SavedStates

SHAPE = ModelShape(width=16, layers=1, heads=2, feed_forward=24, vocabulary=64)
ERRORS = (errno.ENOSPC, errno.EROFS, errno.EIO, errno.EACCES)
NOW_AND_THEN = 1 / 50
"""Share of disk operations that fail in a run."""


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retry failed operations at once."""
    for module in ("hetero_pp.core.files", "replica_groups.exchange.runner"):
        monkeypatch.setattr(f"{module}.FIRST_PAUSE", 0.001)
        monkeypatch.setattr(f"{module}.LONGEST_PAUSE", 0.001)


def _contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# ---- files that are written in one piece ----


def _checkpoint(version: int) -> RunCheckpoint:
    return RunCheckpoint(1, initial_checkpoint(SHAPE, None, seed=version).parameters, None)


def _weights(folder: Path, version: int) -> None:
    parameters = _checkpoint(version).parameters
    shapes = {name: tuple(tensor.shape) for name, tensor in parameters.items()}
    write_weights(folder, parameters.__getitem__, shapes, SHAPE.head_size, torch.float32)


def _tokens(folder: Path, version: int) -> None:
    folder.mkdir(exist_ok=True)
    text = folder.parent.with_suffix(".txt")
    text.write_text("\n\n".join(f"document {version} {number}" for number in range(20)))
    prepare_tokens(DataSettings(corpus=str(text), validation_share=0.2), folder)


WRITERS: dict[str, Callable[[Path, int], object]] = {
    "bytes": lambda folder, version: write_whole(folder / "file", bytes(100 + version)),
    "configuration": lambda folder, version: save_config(made_up_spec(seed=version).config, folder / "config.yaml"),
    "changes": lambda folder, _: write_changes(NO_CHANGES, folder / "changes.yaml"),
    "token": lambda folder, version: write_token(RunFolder(folder), f"{version}" * 32),
    "key": lambda folder, _: _own_key(folder / "key"),
    "checkpoint": lambda folder, version: save_checkpoint(_checkpoint(version), folder / "checkpoint"),
    "weights": _weights,
    "picture": lambda folder, _: save_figure(Figure(), folder / "loss.png"),
    "tokens": _tokens,
}


@pytest.mark.parametrize("lasts", [False, True], ids=["once", "for a while"])
@pytest.mark.parametrize("name", WRITERS)
def test_a_file_is_whole_or_what_it_was_and_the_error_names_it(name: str, lasts: bool, tmp_path: Path) -> None:
    write = WRITERS[name]
    with failing_disk(tmp_path / "disk") as disk:
        for n in each_operation(disk, 7 if name == "configuration" else 1):  # its most operations are short writes
            folder = tmp_path / "disk" / str(n)
            folder.mkdir(parents=True)
            if n % 2:
                write(folder, 1)
            before = _contents(folder)
            disk.fail(n, lasts)
            try:
                write(folder, 2)
            except OSError as error:
                assert str(error.filename).startswith(str(folder)), n
                assert PART not in str(error.filename)
            disk.mend()
            after = _contents(folder)
            assert not [name for name in after if PART in name], n
            if disk.failures:
                assert not before or before.keys() <= after.keys()
                write(folder, 2)
            assert all(_contents(folder).values())


# ---- a member's states ----


def _ranks() -> list[Ranks]:
    """Return two ranks, each for a thread."""
    barrier, told = threading.Barrier(2, timeout=TIMEOUT), dict[int, bytes]()

    class Threads(Ranks):
        def gather_bytes(self, data: bytes) -> list[bytes]:
            told[self.rank] = data
            barrier.wait()
            found = [told[0], told[1]]
            barrier.wait()
            return found

        def gather(self, value: float) -> list[float]:
            return [float(one) for one in self.gather_bytes(repr(value).encode())]

        def wait(self) -> None:
            self.gather_bytes(b"")

        def broadcast_bytes(self, data: bytes | None) -> bytes:
            return self.gather_bytes(data or b"")[0]

    return [Threads(rank, 2) for rank in range(2)]


@pytest.mark.parametrize("lasts", [False, True], ids=["once", "for a while"])
@pytest.mark.parametrize("world", [1, 2])
def test_a_state_that_cannot_be_saved_is_none_and_all_ranks_go_on(world: int, lasts: bool, tmp_path: Path) -> None:
    """This holds whichever rank's disk fails. Earlier states stay, and the next one is saved."""

    def save(states: list[SavedStates], round_: int) -> list[str]:
        def write(own: SavedStates, part: Path) -> None:
            (part / f"moments-{own.ranks.rank}").write_bytes(bytes([round_]) * 1000)

        done = [in_thread(partial(own.save, round_, partial(write, own))) for own in states]
        return [one.result(TIMEOUT) for one in done]

    def sound(states: list[SavedStates]) -> list[int]:
        (found,) = {one.result(TIMEOUT).rounds for one in [in_thread(own.check) for own in states]}
        return sorted(found)

    with failing_disk(tmp_path / "disk") as disk:
        for n in each_operation(disk, 3 if world == 2 else 1):
            folder = tmp_path / "disk" / str(n)
            states = [SavedStates(folder, "run", 1, ranks) for ranks in (_ranks() if world == 2 else [ALONE])]
            assert save(states, 1) == [""] * world
            number = ERRORS[n % len(ERRORS)]
            disk.fail(n, lasts, number)
            (failure,) = set(save(states, 2))
            disk.mend()
            if failure:
                assert failure.startswith(str(folder))
                assert os.strerror(number) in failure
            assert sound(states) in ([1], [1, 2]), n
            assert save(states, 3) == [""] * world
            assert not (folder / "part").exists()
            assert max(sound(states)) == 3


# ---- row checkpoints of tables ----


@pytest.mark.parametrize("lasts", [False, True], ids=["once", "for a while"])
def test_a_checkpoint_that_cannot_be_saved_leaves_the_one_before(
    lasts: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with failing_disk(tmp_path / "disk") as disk:
        for n in each_operation(disk):
            own = Checkpoint(tmp_path / "disk" / f"{n}.pt", "run", 0.0)
            own.save(1, {"theta": torch.ones(100)})
            disk.fail(n, lasts)
            own.save(2, {"theta": torch.ones(100)})
            disk.mend()
            found = own.load()
            assert found is not None
            told = capsys.readouterr().err
            assert found["round"] == 2 or f"{n}.pt: No space left on device" in told
            assert not told or disk.failures
    assert not list((tmp_path / "disk").glob(f"*{PART}"))


# ---- a run's record ----


def _record(folder: Path, disk: FailingDisk | None = None, n: int = 0, lasts: bool = False) -> list[str]:
    told: list[str] = []
    state = RunState(made_up_spec())
    recorder = Recorder(made_up_spec(), RunFolder(folder), state, complain=told.append)
    reports = made_up_reports()
    if disk is not None:
        disk.fail(n, lasts)
    for report in reports[:-1]:
        state.apply(report)
        recorder.on_report(report)
    if disk is not None and n % 2:  # space is free again before the end, or only after it
        disk.mend()
    state.apply(reports[-1])
    recorder.on_report(reports[-1])
    recorder.close()
    return told


def _scalars(folder: Path) -> bytes:
    """Return the bytes of the TensorBoard events without the time in their header."""
    (path,) = folder.glob("tensorboard/*")
    return path.read_bytes()[60:]


@pytest.mark.parametrize("lasts", [False, True], ids=["once", "for a while"])
def test_what_is_recorded_is_whole_once_there_is_room_and_is_said_once(
    lasts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = "hetero_pp.program.report.recorder.draw_losses"  # drawing takes half a second
    monkeypatch.setattr(draw, lambda _, path: write_whole(path, b"drawn"))
    assert _record(tmp_path / "undisturbed") == []
    expected = (tmp_path / "undisturbed" / "metrics.jsonl").read_bytes()
    with failing_disk(tmp_path / "disk") as disk:
        for n in each_operation(disk, 7):
            folder = tmp_path / "disk" / str(n)
            folder.mkdir(parents=True)
            told = _record(folder, disk, n, lasts)
            disk.mend()
            assert len(told) >= bool(disk.failures) - (not lasts)  # the rest of a partial write is written at once
            assert len({line.split(" ")[0] for line in told}) == len(told), told
            assert all("No space left on device" in line for line in told)
            found = (folder / "metrics.jsonl").read_bytes()
            if not lasts or n % 2:
                assert found == expected, n
                assert _scalars(folder) == _scalars(tmp_path / "undisturbed")
            else:
                assert expected.startswith(found)
            if (folder / "summary.json").exists():
                assert json.loads((folder / "summary.json").read_text())["rounds"] == 2


def test_too_much_that_waits_is_dropped_and_known_to_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hetero_pp.core.files.MOST_WAITING", 10)
    with failing_disk(tmp_path) as disk:
        log = LastingLog(tmp_path / "log")
        disk.fail(1, lasts=True)
        for _ in range(3):
            log.write(b"0123456789")
        disk.mend()
        log.close()
    assert (tmp_path / "log").read_bytes() == b"0123456789"
    assert log.has_gaps


# ---- whole runs, in one process ----


@pytest.fixture(scope="module")
def undisturbed(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    runs = tmp_path_factory.mktemp("undisturbed")
    _train(corpus, runs)
    return runs / "mixed"


def _train(corpus: Path, runs: Path, resume: bool = False) -> dict[str, Any]:
    return train(corpus, runs, "checkpoints.every=1", *QUICK, resume=resume)


def test_a_run_on_a_disk_that_fails_again_and_again_has_the_bits_of_one_that_does_not(
    undisturbed: Path, corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Disk operations of members' states, the log, the record and the start of the run fail, by each error in turn."""
    with failing_disk(tmp_path / "mixed") as disk:
        disk.fail_by_chance(NOW_AND_THEN, *ERRORS)
        summary = _train(corpus, tmp_path)
        assert disk.failures > 5
    expected = json.loads((undisturbed / "summary.json").read_text())
    assert summary["parameters_sha256"] == expected["parameters_sha256"]
    found, wanted = (
        {path.relative_to(one).as_posix() for path in (one / "log").rglob("*") if path.is_file()}
        for one in (tmp_path / "mixed", undisturbed)
    )
    more = {name for name in found - wanted if not name.startswith("log/checkpoint-")}
    assert more == set()  # a run checkpoint stays if its removal, tried once after each later run checkpoint, failed
    said = capfd.readouterr()
    assert "retrying" in said.err
    assert "could not save its state after round" in said.out


def test_a_new_run_that_the_disk_does_not_take_leaves_the_earlier_one_where_it_was(tmp_path: Path) -> None:
    spec, refused = made_up_spec(), 0
    with failing_disk(tmp_path) as disk:
        for n in each_operation(disk):
            earlier = tmp_path / str(n) / spec.config.name
            disk.mend()
            write_whole(earlier / "config.yaml", b"earlier")
            disk.fail(n, lasts=False)
            try:
                begin_folder(spec, earlier.parent)
                disk.mend()
                left = earlier.with_name(f"{earlier.name}.1")
            except (OSError, StoreError):
                left, refused = earlier, refused + 1
                disk.mend()
                assert list(earlier.parent.glob(f"{earlier.name}.*")) == []
            assert _contents(left) == {"config.yaml": b"earlier"}, n
    assert refused > 3


def test_a_run_that_is_stopped_while_a_full_disk_pauses_it_goes_on_to_the_same_bits(
    undisturbed: Path, corpus: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "mixed"
    with failing_disk(folder) as disk:

        def fill_then_interrupt() -> None:
            deadline = time.monotonic() + TIMEOUT
            while len(list((folder / "state").glob("*/round-000001"))) < 4 and time.monotonic() < deadline:
                time.sleep(0.001)
            disk.fail(1, lasts=True)
            while disk.failures < 20 and time.monotonic() < deadline:  # the same write is retried again and again
                time.sleep(0.001)
            os.kill(os.getpid(), signal.SIGINT)

        interrupted = in_thread(fill_then_interrupt)
        with pytest.raises(KeyboardInterrupt):
            _train(corpus, tmp_path)
        interrupted.result(TIMEOUT)
        assert disk.failures >= 20
        disk.mend()
    _train(corpus, tmp_path, resume=True)
    found, expected = (json.loads((one / "summary.json").read_text()) for one in (folder, undisturbed))
    for key in ("rounds", "parameters_sha256", "validation_loss", "contributions"):
        assert found[key] == expected[key]


# ---- the command line ----


def _run(*arguments: str) -> tuple[int, str]:
    found = CliRunner().invoke(app, list(arguments))
    assert found.exception is None or isinstance(found.exception, SystemExit), found.exception
    return found.exit_code, found.stderr.strip()


def test_a_command_that_cannot_write_says_so_in_one_line_and_leaves_what_was_there(
    undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute_once(monkeypatch, (simulate, "predict"))
    folder = tmp_path / "disk"
    plan = str(MIXED.parents[2] / "configs" / "quickstart.yaml")
    commands = {
        "export": ["export", str(undisturbed), "--to", str(folder / "hf")],
        "replay": [
            "log",
            "replay",
            str(undisturbed),
            "--to",
            str(folder / "checkpoint"),
            "--json",
            str(folder / "replay.json"),
        ],
        "volume": ["log", "volume", str(undisturbed), "--json", str(folder / "volume.json")],
        "simulate": ["simulate", plan, "--json", str(folder / "simulated.json"), "--chart", str(folder / "chart.png")],
    }
    for name, command in commands.items():
        with failing_disk(folder) as disk:
            for n in each_operation(disk, 17 if name == "simulate" else 7):  # most are writes of one file
                folder.mkdir(exist_ok=True)
                (folder / "checkpoint").unlink(missing_ok=True)  # `replay` never replaces it
                before = {} if name == "export" else _contents(folder)
                disk.fail(n, lasts=True)
                code, said = _run(*command)
                disk.mend()
                assert (code, len(said.splitlines())) == ((2, 1) if disk.failures else (0, 0)), (name, n, said)
                assert not disk.failures or str(folder) in said
                assert not disk.failures or "No space left on device" in said
                if disk.failures:
                    after = _contents(folder)
                    assert not [one for one in after if one not in before and PART in one]
                    assert all(after.values())
                    if name == "export":
                        assert _contents(folder / "hf") == {}


# ---- hosts with tickets ----


def test_a_database_without_room_is_one_line_and_keeps_what_it_has(tmp_path: Path) -> None:
    members = Memberships(tmp_path / "members.sqlite")
    first = members.invite("home.0", 1000.0)
    members._writer.execute("PRAGMA max_page_count=1")
    with pytest.raises(StoreError, match=r"members\.sqlite: cannot be written \(database or disk is full\)"):
        for _ in range(1000):
            members.invite(None, 1000.0)
    members._writer.execute("PRAGMA max_page_count=1000000")
    assert members.enrol(first, b"key", ["home.0"], 1000.0).slot == "home.0"
