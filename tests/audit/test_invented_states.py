"""A state that a member invents is told as such and ends no validator; a validator without memory blames nobody."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from audited_run import STEPS, audited_spec

from hetero_pp.config.checkpoint import first_checkpoint
from hetero_pp.config.spec import RunSpec
from hetero_pp.core.errors import DamagedFile, OutOfMemory
from hetero_pp.data.sources import Source, open_source
from replica_groups.audit import recompute as module
from replica_groups.audit.commitments import CommittedState
from replica_groups.audit.recompute import RoundStart, recompute

Run = tuple[RunSpec, Source, RoundStart]


@pytest.fixture(scope="module")
def run(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    spec = audited_spec(corpus)
    checkpoint = first_checkpoint(spec)
    source = open_source(spec.config.data, tmp_path_factory.mktemp("cache"))
    yield spec, source, RoundStart(1, checkpoint.parameters, checkpoint.basis)


@pytest.mark.parametrize(
    ("tensors", "rest"),
    [
        ({}, {"steps": {"first": math.inf, "last": 1}}),
        ({}, {"data": {"share": {"rotation": [1]}}}),
        ({"moments:0.0.exp_avg": torch.zeros(())}, {}),
        ({"moments:0.0.exp_avg": torch.zeros(32, 16)}, {}),
    ],
)
def test_an_invented_state_is_told_as_such(run: Run, tensors: dict[str, torch.Tensor], rest: dict[str, Any]) -> None:
    spec, source, start = run
    again = recompute(spec, "a", start, STEPS, source)
    error = {f"error:{name}": tensor for name, tensor in again.here.outers["a"].error.items()}
    data = {"tokens": source.digest, "steps": None}
    state = CommittedState(error | tensors, {"data": data, "steps": None} | rest)
    with pytest.raises(DamagedFile, match="is not of its members"):
        recompute(spec, "a", RoundStart(1, start.theta, start.basis, {"a": state}), STEPS, source)


def test_a_validator_without_memory_blames_nobody(run: Run) -> None:
    spec, source, start = run
    full = mock.Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"))
    with mock.patch.object(module, "ReplicaHere", full), pytest.raises(OutOfMemory):
        recompute(spec, "a", start, STEPS, source)
