"""A member whose device has too little memory ends with one line, is not started again, and the run goes on."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from grpc_threads import run_over_grpc
from torch import Tensor

from hetero_pp.config.folder import RunFolder
from hetero_pp.config.lines import LAUNCHER
from hetero_pp.config.run_config import RunConfig
from hetero_pp.config.spec import RunSpec
from hetero_pp.core.device import CPU, computing
from hetero_pp.core.errors import GivenUp, OutOfMemory, RunFailed
from hetero_pp.messages.messages_pb2 import GIVEN_UP, Report
from hetero_pp.model.inner import InnerOptimizer
from hetero_pp.program.join import command
from hetero_pp.program.launch import supervisor as supervisor_module
from hetero_pp.program.launch.in_process import run_in_process
from hetero_pp.program.launch.job import GONE
from hetero_pp.program.launch.supervisor import Supervisor
from hetero_pp.rpc.identities import Secret, SecretKeys
from replica_groups.engines.plain import WholeReplica

TOLD = "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 23.5 GiB. See also a manual."
CAUSE = (
    "cpu is out of memory in the forward, which needs 2.50 GiB more; this would need less: "
    "more `micro_batches`, `recompute: layers`, or `precision: bf16` if it is fp32"
)


def _spec(corpus: str = "text", quorum: float = 0.5, stages: int = 0) -> RunSpec:
    kinds: dict[str, dict[str, Any]] = {"a": {"kind": "datacenter"}, "b": {"kind": "participants", "stages": stages}}
    config: dict[str, Any] = {
        "name": "t",
        "model": {"preset": "micro", "width": 16, "heads": 2, "feed_forward": 24, "layers": max(1, stages)},
        "data": {"corpus": corpus, "sequence_length": 16, "validation_sequences": 2},
        "inner": {"steps": 1, "warmup_steps": 1},
        "outer": {"rounds": 3},
        "exchange": {"quorum": quorum, "grace": {"least": "60 s"}},
        "replicas": [{"name": name, "batch_size": 2, **kinds[name if stages else "a"]} for name in ("a", "b")],
    }
    return RunSpec(RunConfig.model_validate(config), 256)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError(TOLD), CAUSE),
        (
            RuntimeError("MPS backend out of memory (MPS allocated: 9 GB)"),
            CAUSE.replace(", which needs 2.50 GiB more", ""),
        ),
    ],
)
def test_it_is_told_in_one_line(error: RuntimeError, expected: str) -> None:
    with pytest.raises(OutOfMemory) as found, computing("forward", CPU):
        raise error
    assert str(found.value) == expected


def test_an_allocation_of_the_cpu_fails_in_the_same_way() -> None:
    with (
        pytest.raises(
            OutOfMemory, match=r"^cpu is out of memory in the outer round, which needs 4000000000000000 bytes"
        ),
        computing("outer round", CPU),
    ):
        torch.empty(10**15)


def test_other_errors_stay_what_they_are() -> None:
    with pytest.raises(RuntimeError, match="a bug"), computing("forward", CPU):
        raise RuntimeError("a bug")


def test_the_run_goes_on_without_the_member(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole_loss = WholeReplica.loss

    def loss(replica: WholeReplica, tokens: Tensor, step: int = 0, micro_batch: int = 0) -> Tensor:
        if replica.name == "b" and step == 1:
            raise torch.OutOfMemoryError(TOLD)
        return whole_loss(replica, tokens, step, micro_batch)

    monkeypatch.setattr(WholeReplica, "loss", loss)
    ran = run_over_grpc(_spec(str(corpus)), tmp_path, {"a": CPU, "b": CPU})
    assert {name: str(error) for name, error in ran.errors.items()} == {"b": CAUSE}
    closed = [one.round_closed for one in ran.reports if one.HasField("round_closed")]
    assert [[entry.replica for entry in one.contributions] for one in closed] == [["a", "b"], ["a"], ["a"]]


@pytest.mark.parametrize("stages", [0, 2])
def test_a_run_in_one_process_goes_on_without_the_member(
    stages: int, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the member is a stage, whose neighbour then waits until the run is over."""
    step = InnerOptimizer.step

    def fail(own: InnerOptimizer, number: int, norm: Tensor) -> float:
        if threading.current_thread().name == ("b.1" if stages else "b") and number == 1:
            raise torch.OutOfMemoryError(TOLD)
        return step(own, number, norm)

    monkeypatch.setattr(InnerOptimizer, "step", fail)
    reports: list[Report] = []
    run_in_process(_spec(str(corpus), stages=stages), RunFolder(tmp_path), reports.append)
    closed = [one.round_closed for one in reports if one.HasField("round_closed")]
    assert [[entry.replica for entry in one.contributions] for one in closed] == [["a", "b"], ["a"], ["a"]]
    [told] = [
        one.membership_event
        for one in reports
        if one.HasField("membership_event") and one.membership_event.what == GIVEN_UP
    ]
    assert told.cause.endswith(", so the run continues without it")
    with pytest.raises(OutOfMemory, match="out of memory in the optimizer step"):
        run_in_process(_spec(str(corpus), 1.0, stages), RunFolder(tmp_path / "all"), reports.append)


class _Ended:
    """A process that has ended because its device has too little memory, and its connection."""

    exitcode, pid = GONE, None

    def __init__(self) -> None:
        self.sentinel, writing = os.pipe()
        os.close(writing)

    def join(self, seconds: float = 0.0) -> None:
        pass

    def is_alive(self) -> bool:
        return False

    def recv_bytes(self) -> bytes:
        return json.dumps({"failure": CAUSE}).encode()

    def close(self) -> None:
        os.close(self.sentinel)


def _ends(
    members: list[str], spec: RunSpec, folder: Path, monkeypatch: pytest.MonkeyPatch, beside: Sequence[str] = ("a",)
) -> list[Report]:
    """Let a supervisor find that the processes of these members have ended; return its reports."""
    monkeypatch.setattr(supervisor_module, "tell_died", lambda *_: None)
    reports: list[Report] = []
    keys = SecretKeys(Secret("s" * 32), encrypted=False)
    with Supervisor(spec, RunFolder(folder), reports.append, LAUNCHER, keys) as supervisor:
        supervisor.join_exchange([], "127.0.0.1:1")
        ended: dict[str, Any] = {member: _Ended() for member in members}
        supervisor._processes |= ended
        supervisor._connections |= ended
        supervisor.start(list(beside))
        supervisor._replace("b")
    return reports


@pytest.mark.starts_processes
def test_its_process_is_not_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [report] = _ends(["b"], _spec(), tmp_path, monkeypatch)
    assert (report.membership_event.what, report.membership_event.slot) == (GIVEN_UP, "b")
    assert report.membership_event.cause.startswith(f"b: {CAUSE} (output: ")
    assert report.membership_event.cause.endswith(", so the run continues without it")


@pytest.mark.starts_processes
def test_the_last_process_of_a_host_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the run has a quorum without it or not."""
    for quorum in (0.5, 1.0):
        with pytest.raises(GivenUp, match="b: cpu is out of memory in the forward"):
            _ends(["b"], _spec(quorum=quorum), tmp_path, monkeypatch, beside=[])


def test_a_join_that_is_given_up_frees_its_slot(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A join that fails for another reason does not: its members may come back."""
    freed: list[object] = []
    config = SimpleNamespace(exchange=SimpleNamespace(timeout=1.0))
    prepared = SimpleNamespace(spec=SimpleNamespace(config=config), devices={}, notes=(), source=None)
    monkeypatch.setattr(command, "prepare", lambda *_, **__: prepared)
    for name in ("_configure", "ConfigFile", "tokens_digest", "note_left"):
        monkeypatch.setattr(command, name, lambda *_, **__: None)
    for name in ("leavable", "renewed"):
        monkeypatch.setattr(command, name, lambda *_: nullcontext())
    monkeypatch.setattr(command, "ask", lambda address, identity, call: freed.append(address))
    identity = SimpleNamespace(latest=None, kept_in="kept")
    membership = SimpleNamespace(run="t", slot="b", address="b", identity=identity, credentials=None)
    here = SimpleNamespace(runs=tmp_path, rehearses=False, listen="127.0.0.1:0")
    for error in (RunFailed("the exchange is gone"), GivenUp(CAUSE)):

        def fail(*_: object, error: RunFailed = error) -> None:
            raise error

        monkeypatch.setattr(command, "run_members", fail)
        with pytest.raises(RunFailed):
            command._train(cast(Any, membership), cast(Any, here))
    assert freed == ["b"]


@pytest.mark.starts_processes
def test_without_a_quorum_the_run_fails_with_that_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RunFailed, match="b: cpu is out of memory in the forward"):
        _ends(["b"], _spec(quorum=1.0), tmp_path, monkeypatch)
