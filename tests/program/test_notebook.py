"""A run in a notebook has the bits of a launched one, round by round.

Failures and interrupts end it and are reported.
"""

from __future__ import annotations

import gc
import json
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from mixed_run import MIXED, summary_in

from hetero_pp import Run
from hetero_pp.config.checkpoint import open_checkpoint
from hetero_pp.core.errors import ConfigError, HeteroPPError, RunFailed, StoreError
from hetero_pp.messages.messages_pb2 import Report
from hetero_pp.outer.step import parameter_sha256, parameters_sha256
from hetero_pp.program.launch import in_process
from hetero_pp.program.launch.command import run_topology
from hetero_pp.program.report.state import RunState
from hetero_pp.program.simulate import Outputs, simulate
from replica_groups.exchange.auditor import Auditor
from replica_groups.member.outer_round import OuterRound

MEMBERS = {"dc", "home.0", "home.1", "home.2"}


@pytest.fixture(scope="module")
def launched(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the run as `launch --in-process` trains it."""
    runs = tmp_path_factory.mktemp("launched")
    run_topology(MIXED, [f"data.corpus={corpus}"], runs, in_process=True)
    return runs / "mixed"


@contextmanager
def _run(corpus: Path, runs: Path | None = None, **changes: Any) -> Iterator[Run]:
    data = {"corpus": corpus, **changes.pop("data", {})}
    with Run.from_yaml(MIXED, runs=runs, data=data, **changes) as run:
        yield run


def _sha256(run: Run) -> str:
    return parameters_sha256({name: parameter_sha256(tensor) for name, tensor in run.parameters().items()}).hex()


def _reported_rounds(run: Run) -> set[int]:
    lines = map(json.loads, run.folder.metrics.read_text().splitlines())
    return {line["round"] for line in lines if line["event"] == "inner_step"}


_EARLIER: set[threading.Thread] = set()


@pytest.fixture(autouse=True)
def _threads_of_other_tests() -> None:
    """Note the threads of earlier tests' in-process runs, which may still be ending."""
    _EARLIER.clear()
    _EARLIER.update(threading.enumerate())


def _member_threads() -> set[str]:
    """Return the names of the member threads of this test's runs."""
    return {thread.name for thread in set(threading.enumerate()) - _EARLIER} & MEMBERS


# ---- training ----


@pytest.fixture(scope="module")
def trained(corpus: Path) -> Iterator[tuple[float, Run]]:
    """Train the same run in three ways, in a notebook with defaults of its own. Yield its initial loss and the run."""
    with _run(corpus) as run:
        torch.set_default_dtype(torch.bfloat16)
        torch.set_default_device("meta")
        try:
            initial = run.validation_loss
            run.round()
            next(iter(run))
            run.train()
            assert torch.empty(1).is_meta  # the notebook's defaults are as they were
            assert torch.empty(1).dtype == torch.bfloat16
        finally:
            torch.set_default_dtype(torch.float32)
            torch.set_default_device(None)
        yield initial, run


def test_it_has_the_bits_of_a_launched_run(launched: Path, trained: tuple[float, Run]) -> None:
    expected, (initial, run) = summary_in(launched), trained
    assert initial == expected["initial_validation_loss"]
    assert "diverged" not in expected
    assert [one.round for one in run.results] == [1, 2, 3]
    assert [one.validation_loss for one in run.results] == expected["validation_loss"]
    assert run.validation_loss == expected["validation_loss"][-1]
    for replica in expected["replicas"]:
        assert [one.validation_losses[replica["name"]] for one in run.results] == replica["validation_loss"]
        assert run.results[-1].training_losses[replica["name"]] == replica["loss"]
    for tensor in run.parameters().values():
        tensor.zero_()  # this changes a copy of the run checkpoint
    assert {run.results[-1].parameters_sha256} == set(expected["parameters_sha256"].values()) == {_sha256(run)}
    contributions = [one["bytes"] for one in expected["contributions"]["per_round"]]
    assert [one.contribution_bytes for one in run.results] == contributions
    last = open_checkpoint(launched / "log" / "checkpoint-000003.safetensors").checkpoint().parameters
    assert all(last[name].equal(tensor) for name, tensor in run.parameters().items())


def test_what_cannot_begin_leaves_no_member_behind(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: object) -> Auditor:
        raise StoreError("nothing can be read")

    monkeypatch.setattr(in_process, "begin_run", failing)
    with pytest.raises(StoreError, match="nothing can be read"):
        run_topology(MIXED, [f"data.corpus={corpus}"], tmp_path, in_process=True)
    for thread in set(threading.enumerate()) - _EARLIER:
        if thread.name in MEMBERS:
            thread.join(60)
    assert not _member_threads()


def test_a_run_that_is_over_trains_no_more(trained: tuple[float, Run]) -> None:
    assert trained[1].is_over
    assert list(trained[1]) == []
    with pytest.raises(HeteroPPError, match=r"3 of 3 rounds.*: all rounds are trained"):
        trained[1].round()


def test_between_two_rounds_nothing_is_trained(corpus: Path) -> None:
    before = torch.get_num_threads()
    with _run(corpus, threads=before + 1) as run:
        begun = run.parameters()
        assert _reported_rounds(run) == set()
        first = run.round()
        assert _reported_rounds(run) == {1}
        assert _member_threads() == MEMBERS
        assert first.validation_loss == run.validation_loss
        assert first.parameters_sha256 == _sha256(run)
        assert not all(begun[name].equal(tensor) for name, tensor in run.parameters().items())
        for tensor in run.parameters().values():
            tensor.zero_()  # this changes a copy of the replayed parameters
        assert first.parameters_sha256 == _sha256(run)
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before
    assert not _member_threads()


def test_nothing_starts_before_it_is_asked_for(corpus: Path) -> None:
    # Nothing starts before it is asked for.
    with _run(corpus) as run:
        assert run.predict().members == len(MEMBERS)
        assert not _member_threads()
        assert not run.folder.path.exists()

    # Replicas that need processes are refused when they would start.
    with _run(corpus, replicas={0: {"engine": "torchtitan"}}) as run:
        assert run.predict().members == len(MEMBERS)
        with pytest.raises(ConfigError, match="expected `torch` with --in-process"):
            run.round()


# ---- what the run leaves ----


def test_what_a_notebook_began_a_launch_goes_on_with(launched: Path, corpus: Path, tmp_path: Path) -> None:
    with _run(corpus, tmp_path, checkpoints={"every": 1}) as run:
        run.round()
    assert summary_in(tmp_path / "mixed")["failed"] == "closed"
    assert summary_in(tmp_path / "mixed")["rounds"] == 1
    run_topology(MIXED, [f"data.corpus={corpus}", "checkpoints.every=1"], tmp_path, in_process=True, resume=True)
    expected, found = summary_in(launched), summary_in(tmp_path / "mixed")
    assert found["parameters_sha256"] == expected["parameters_sha256"]
    assert found["validation_loss"] == expected["validation_loss"]


def test_folders_hold_what_a_launch_leaves_or_go_with_the_run(launched: Path, corpus: Path, tmp_path: Path) -> None:
    # A folder that is given holds what a launch leaves.
    with _run(corpus, tmp_path, outer={"rounds": 2}) as run:
        run.train()
    assert {path.name for path in (tmp_path / "mixed").iterdir()} == {path.name for path in launched.iterdir()}
    assert "failed" not in summary_in(tmp_path / "mixed")
    assert run.validation_loss == run.results[1].validation_loss
    assert run.parameters()

    # A temporary folder goes with the run.
    with _run(corpus) as run:
        assert run.validation_loss > 0
        assert run.folder.log.is_dir()
    assert not run.folder.path.parent.exists()


# ---- predictions ----


def test_it_predicts_what_simulate_does(corpus: Path, tmp_path: Path) -> None:
    simulate(MIXED, ["links.home.bandwidth=1Mbit/s", "replicas.1.link=home"], None, None, Outputs(tmp_path / "p.json"))
    with _run(corpus, links={"home": {"bandwidth": "1 Mbit/s"}}, replicas={1: {"link": "home"}}) as run:
        simulated = json.loads((tmp_path / "p.json").read_text())
        del simulated["waiting"]  # predictions of changed runs
        assert json.loads(json.dumps(run.predict().as_json())) == simulated


# ---- errors ----


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"outer": {"ruonds": 3}}, r"mixed\.yaml with outer\.ruonds=3: found an unknown .*did you mean `rounds`\?"),
        ({"outer": 3}, r"mixed\.yaml with outer=3: found `3`, expected keys and values"),
        ({"replicas": {2: {"batch_size": 8}}}, r"no entry `2` in `replicas`, expected one of 0 \(dc\), 1 \(home\)"),
        ({"data": {"corpus": Path("/nowhere")}}, r"mixed\.yaml with data\.corpus='/nowhere': .*/nowhere"),
    ],
)
def test_changes_that_cannot_be_are_refused_as_on_the_command_line(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint), Run.from_yaml(MIXED, **changes) as run:
        run.round()


def test_changes_are_merged() -> None:
    with Run.from_yaml(MIXED, seed=8, outer={"compression": {"density": "1/16"}}, replicas={0: {"name": "x"}}) as run:
        config = run.spec.config
    assert (config.seed, config.rounds, config.outer.compression.density) == (8, 3, 1 / 16)
    assert [replica.name for replica in config.replicas] == ["x", "home"]
    one = [{"name": "dc", "kind": "datacenter"}]
    with Run.from_yaml(MIXED, replicas=one, links={"dsl": {"bandwidth": "1 Mbit/s"}}) as run:
        assert [replica.name for replica in run.spec.config.replicas] == ["dc"]
        assert run.spec.config.links["dsl"].bandwidth == 1e6


def test_the_error_of_a_member_is_raised_and_ends_the_run(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    contribute = OuterRound.contribute

    def failing(self: OuterRound, round_: int, *more: Any) -> Mapping[str, bytes]:
        if (self.session.member, round_) == ("home.1", 2):
            raise ZeroDivisionError("as a bug would")
        return contribute(self, round_, *more)

    monkeypatch.setattr(OuterRound, "contribute", failing)
    with _run(corpus) as run:
        first = run.round()
        with pytest.raises(ZeroDivisionError, match="as a bug would"):
            run.round()
        assert not _member_threads()
        with pytest.raises(RunFailed, match=r"1 of 3 rounds.* has ended: as a bug would"):
            run.round()
        assert run.results == [first]
        assert run.validation_loss == first.validation_loss
        assert _sha256(run) == first.parameters_sha256


@pytest.fixture
def _interrupts() -> Iterator[None]:
    """Make SIGINT raise KeyboardInterrupt, although background jobs ignore it and callbacks may swallow it."""
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    gc.disable()  # Hypothesis registers a callback, in which exceptions are ignored
    yield
    gc.enable()
    signal.signal(signal.SIGINT, handler)


@pytest.mark.usefixtures("_interrupts")
def test_an_interrupt_ends_the_run_at_the_next_step(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The round would last for hours."""
    apply, main = RunState.apply, threading.main_thread().ident
    assert main is not None
    interrupted = threading.Event()

    def interrupting(self: RunState, report: Report) -> None:
        apply(self, report)
        if report.HasField("inner_step") and not interrupted.is_set():
            interrupted.set()
            signal.pthread_kill(main, signal.SIGINT)

    monkeypatch.setattr(RunState, "apply", interrupting)
    with _run(corpus, inner={"steps": 1_000_000}) as run:
        initial = run.validation_loss
        with pytest.raises(KeyboardInterrupt):
            run.round()
        assert not _member_threads()
        with pytest.raises(RunFailed, match=r"0 of 3 rounds.* has ended: interrupted"):
            run.round()
        assert run.validation_loss == initial
