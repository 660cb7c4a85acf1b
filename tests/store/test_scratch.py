"""Tensors that a process keeps on disk: they return with their bits, also from a disk that takes nothing or little."""

from __future__ import annotations

import errno
import gc
import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hetero_pp.core.tensor_files import Scratch


def _tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(40, 30, generator=generator)
    return {
        "matrix": rows,
        "transposed": rows.T,
        "scalar": torch.tensor(3.0),
        "none": torch.empty(0, 7),
        "steps": torch.arange(5),
        "half": rows[0].to(torch.bfloat16),
    }


def _assert_same(scratch: Scratch, expected: dict[str, Tensor]) -> None:
    for name, tensor in expected.items():
        found = scratch.read(name)
        assert found.dtype == tensor.dtype
        assert found.equal(tensor), name


def test_tensors_return_and_are_replaced(tmp_path: Path) -> None:
    """The file has no name, so that nothing is left of a process that is killed."""
    scratch, tensors = Scratch(tmp_path), _tensors()
    for name, tensor in tensors.items():
        scratch.keep(name, tensor)
    _assert_same(scratch, tensors)
    scratch.read("matrix").zero_()
    tensors |= {"matrix": tensors["matrix"] + 1, "scalar": torch.zeros(9, 9)}
    for name in ("matrix", "scalar"):
        scratch.keep(name, tensors[name])
    _assert_same(scratch, tensors)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("fails_after", [0, 3])
def test_what_the_disk_does_not_take_stays_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails_after: int
) -> None:
    """The first of two writes of a tensor may succeed; the next round's copy goes to the disk again.

    A folder that is not there is a disk that takes nothing.
    """
    nowhere, tensors = Scratch(tmp_path / "missing"), _tensors()
    for name, tensor in tensors.items():
        nowhere.keep(name, tensor)
    _assert_same(nowhere, tensors)
    scratch, tensors, real, writes = Scratch(tmp_path), _tensors(), os.pwrite, 0

    def full(descriptor: int, data: memoryview, offset: int) -> int:
        nonlocal writes
        writes += 1
        if writes > fails_after:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(descriptor, data[:1000], offset)

    for name, tensor in tensors.items():
        scratch.keep(name, torch.full_like(tensor, 7))
    monkeypatch.setattr(os, "pwrite", full)
    for name, tensor in tensors.items():
        changed = tensor.clone()
        scratch.keep(name, changed)
        changed.zero_()
    _assert_same(scratch, tensors)
    monkeypatch.setattr(os, "pwrite", real)
    for name, tensor in tensors.items():
        scratch.keep(name, tensor)
    monkeypatch.setattr(scratch, "_in_memory", {})
    _assert_same(scratch, tensors)


def test_parts_of_a_write_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system moves at most 2 GiB at once, here 700 bytes."""
    write, read = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda descriptor, data, offset: write(descriptor, data[:700], offset))
    monkeypatch.setattr(os, "preadv", lambda descriptor, parts, offset: read(descriptor, [parts[0][:700]], offset))
    scratch, tensors = Scratch(tmp_path), _tensors()
    for name, tensor in tensors.items():
        scratch.keep(name, tensor)
    _assert_same(scratch, tensors)


def test_the_file_is_closed_with_its_owner_also_in_a_cycle(tmp_path: Path) -> None:
    kept = Scratch(tmp_path)
    kept.keep("t", torch.ones(3))
    assert kept.read("t").equal(torch.ones(3))
    file = kept._file
    assert file is not None and not file.closed
    kept.__dict__["owner"] = kept
    del kept
    gc.collect()
    assert file.closed
    assert list(tmp_path.iterdir()) == []
