"""A run on another device than the CPU, over gRPC: torch's lazy backend, which refuses to mix with CPU tensors."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._lazy
import torch._lazy.ts_backend
from grpc_threads import Ran, run_over_grpc
from torch import Tensor
from torch.utils._pytree import tree_map_only

from hetero_pp.config.run_config import RunConfig
from hetero_pp.config.spec import RunSpec
from hetero_pp.core.device import CPU
from hetero_pp.core.tensor_files import save_object
from hetero_pp.model.transformer import Transformer, build_filled
from replica_groups.engines import build, plain
from replica_groups.member import trainers
from stages import worker

torch._lazy.ts_backend.init()

MEMBERS = ("dc", "home.0", "home.1", "home.2")
ROUNDS = 2
SECOND = {member: torch.device("lazy", number) for number, member in enumerate(MEMBERS)} | {"home.1": CPU}
"""The middle stage is on the CPU, so that links join devices of both kinds."""
KEPT = "all of it on the second device"
"""The run with `keep_on_device`."""
SEVERAL = "the layers of a stage on two devices"
LAYERS = {"home.1": (CPU, torch.device("lazy", MEMBERS.index("home.1")))}
"""Devices of the layers of that stage. No member of another run uses the second one."""
RUNS: Mapping[str, Mapping[str, torch.device]] = {
    "cpu": dict.fromkeys(MEMBERS, CPU),
    SEVERAL: dict.fromkeys(MEMBERS, CPU),
    "second device": SECOND,
    KEPT: SECOND,
}


@contextmanager
def _computed(phase: str, device: torch.device) -> Iterator[None]:
    """Compute at the end of a block. The backend otherwise computes only what is asked for, and all before it again."""
    yield
    if device.type == "lazy":
        torch._lazy.mark_step(str(device))
    if device == CPU and threading.current_thread().name in LAYERS:  # the thread of a member has its name
        torch._lazy.mark_step(str(LAYERS["home.1"][1]))


_BUILDING = threading.Lock()


def _built(*arguments: Any, **settings: Any) -> Transformer:
    """Build a module alone: the backend crashes now and then as several threads copy their first tensors to it."""
    with _BUILDING:
        return build_filled(*arguments, **settings)


def _saved(content: Any, path: Path) -> None:
    """Write an object whose tensors are copied to the host first, which torch.save does for every other device."""
    save_object(tree_map_only(torch.Tensor, Tensor.cpu, content), path)


def _spec(corpus: Path, keep_on_device: bool) -> RunSpec:
    home = {"stages": [{"layers": 1}, {"layers": 2}, {"layers": 1}], "batch_size": 4, "micro_batches": 4}
    boundary = {"rank": "1/4", "bits": 4, "anchors": {"rank": 4}}
    config: dict[str, Any] = {
        "name": "t",
        "seed": 3,
        "model": {"preset": "micro", "width": 32, "heads": 2, "feed_forward": 48},
        "data": {"corpus": str(corpus), "sequence_length": 32, "validation_share": 0.2, "validation_sequences": 6},
        "inner": {"steps": 2, "warmup_steps": 2, "learning_rate": 0.01},
        "outer": {"rounds": ROUNDS, "compression": {"density": "1/8"}, "keep_on_device": keep_on_device},
        "exchange": {"quorum": 1.0},  # nobody is late, however busy the machine is
        "replicas": [
            {"name": "dc", "kind": "datacenter", "batch_size": 4, "micro_batches": 2},
            {"name": "home", "kind": "participants", "boundary": boundary, **home},
        ],
    }
    return RunSpec(RunConfig.model_validate(config), 256)


@dataclass(frozen=True)
class Outcome:
    losses: dict[tuple[str, str, int, int], float]
    hashes: dict[int, set[bytes]]
    """Round -> hashes of the replicas."""
    devices: dict[str, str]
    """Member -> device, as `status` reports it."""


def _outcome(ran: Ran) -> Outcome:
    losses, hashes = {}, {round_: set[bytes]() for round_ in range(1, ROUNDS + 1)}
    for one in ran.reports:
        if one.HasField("inner_step") and one.inner_step.HasField("loss"):
            step = one.inner_step
            losses["step", step.replica, step.round, step.step] = step.loss
        if one.HasField("evaluation"):
            losses["evaluation", one.evaluation.replica, one.evaluation.round, 0] = one.evaluation.loss
        if one.HasField("round_verified"):
            hashes[one.round_verified.round].add(one.round_verified.parameters_sha256)
    assert not ran.errors
    return Outcome(losses, hashes, ran.devices)


@pytest.fixture(scope="module")
def outcomes(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    specs = {name: _spec(corpus, name == KEPT) for name in RUNS}
    assert len({spec.run for spec in specs.values()}) == 1
    with pytest.MonkeyPatch.context() as patch:
        for module in (worker, plain):
            patch.setattr(module, "computing", _computed)
        patch.setattr(build, "build_filled", _built)
        for module in (trainers, plain):
            patch.setattr(module, "save_object", _saved)
        layers = {SEVERAL: LAYERS}
        return {
            name: _outcome(run_over_grpc(specs[name], tmp_path_factory.mktemp("run"), RUNS[name], layers.get(name, {})))
            for name in RUNS
        }


def test_losses_are_those_of_the_cpu(outcomes: dict[str, Outcome]) -> None:
    """Compares the loss of each inner step and evaluation of each replica."""
    expected = outcomes["cpu"].losses
    assert len(expected) == 2 * (ROUNDS * 2 + ROUNDS + 1)
    for name in ("second device", SEVERAL):
        found = outcomes[name].losses
        assert found == pytest.approx(expected, abs=1e-4)
        assert found != expected


@pytest.mark.parametrize("name", RUNS)
def test_all_replicas_hold_the_same_bits(name: str, outcomes: dict[str, Outcome]) -> None:
    assert [len(hashes) for hashes in outcomes[name].hashes.values()] == [1] * ROUNDS


def test_the_outer_round_has_the_same_bits_wherever_its_values_lie(outcomes: dict[str, Outcome]) -> None:
    assert outcomes[KEPT] == outcomes["second device"]


@pytest.mark.parametrize("name", RUNS)
def test_each_member_reports_its_device(name: str, outcomes: dict[str, Outcome]) -> None:
    assert outcomes[name].devices == {member: str(device) for member, device in RUNS[name].items()}
