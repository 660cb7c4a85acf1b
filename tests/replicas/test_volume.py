"""Bytes of contributions on the wires: by hand, in the trainer of tables, from a run's log, and by formula."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from table_config import table_config
from torch import Tensor
from typer.testing import CliRunner

from hetero_pp.config.folder import RunFolder
from hetero_pp.config.spec import RunSpec
from hetero_pp.config.yaml_file import save_config
from hetero_pp.core.errors import ConfigError
from hetero_pp.data.tokens import prepare_tokens
from hetero_pp.messages.messages_pb2 import Report
from hetero_pp.program.cli import app
from hetero_pp.program.launch.in_process import run_in_process
from hetero_pp.pseudo_gradient.contribution import DecodedTensor
from hetero_pp.pseudo_gradient.volume import RoundVolume, Volume, bytes_of_sum
from hetero_pp.research.settings import Every
from hetero_pp.research.trainer.measurements import Measured
from hetero_pp.research.trainer.train import AllReplicas, train_fast
from hetero_pp.simulator.traffic import expected_volume

ROUNDS = 3
SPARSE: dict[str, Any] = {"compression": {"density": "1/16", "value_bits": 2, "quantiser": "levels"}}
DENSE: dict[str, Any] = {"method": "diloco", "compression": {"value_bits": 8}}
KINDS: dict[str, dict[str, Any]] = {"codes": SPARSE, "dense": DENSE, "signs": {}}
"""Settings of the outer rounds by kind of contribution."""
Logged = Callable[[str], tuple[Path, list[float]]]
"""The type of the fixture `logged`."""


def _spec(corpus: Path, outer: dict[str, Any], rounds: int = ROUNDS) -> RunSpec:
    torch.set_num_threads(1)
    config = table_config(
        {
            "name": "t",
            "model": {"width": 64, "heads": 2, "feed_forward": 128, "layers": 2},
            "data": {"corpus": str(corpus), "sequence_length": 32, "validation_share": 0.2, "validation_sequences": 8},
            "inner": {"steps": 2, "warmup_steps": 2, "learning_rate": 0.01},
            "outer": {"rounds": rounds, **outer},
            "exchange": {"quorum": 1.0},
            "replicas": [{"name": f"r{index}", "kind": "datacenter", "batch_size": 2} for index in range(3)],
        }
    )
    return RunSpec(config, 256)


def _sparse(size: int, has: list[int]) -> DecodedTensor:
    return DecodedTensor(torch.tensor(has), torch.arange(1.0, len(has) + 1))


def _written(size: int, has: set[int], values: Tensor) -> int:
    mask = torch.zeros(size, dtype=torch.bool)
    mask[sorted(has)] = True
    return bytes_of_sum(values, mask)


def test_a_sparse_ring_sums_each_part_on_its_way() -> None:
    """The parts are [0, 4), [4, 8) and [8, 12). The sum of the i-th part starts at the replica after the i-th."""
    has = [[0, 1, 5, 9], [1, 4, 5, 10], [2, 5, 9, 10, 11]]
    sent = [_sparse(12, one) for one in has]
    dense = []
    for one in sent:
        full = torch.zeros(12)
        full[one.indices] = one.values
        dense.append(full)
    expected = 0
    for part in range(3):
        start = 4 * part
        order = [(part + hop) % 3 for hop in (1, 2, 3)]
        for hops in (1, 2, 3):
            held = {one - start for index in order[:hops] for one in has[index] if start <= one < start + 4}
            total = sum((dense[index][start : start + 4] for index in order[:hops]), torch.zeros(4))
            expected += (2 if hops == 3 else 1) * _written(4, held, total)
    volume = RoundVolume()
    for size in (10, 20, 30):
        volume.contribute(size)
    volume.add((3, 4), sent)
    assert volume.volume() == Volume(20.0, 40.0, None, expected / 3)


def test_a_sum_is_written_as_positions_and_values() -> None:
    has = torch.tensor([True, False, False, True])
    assert bytes_of_sum(torch.zeros(4), torch.zeros(4, dtype=torch.bool)) == 0
    two = bytes_of_sum(torch.tensor([1.5, 0.0, 0.0, -2.25]), has)
    assert 8 < two <= 8 + 5 + 8  # values, the heads of two streams, positions
    every = bytes_of_sum(torch.tensor([1.5, 3.0, 0.5, -2.25]), torch.ones(4, dtype=torch.bool))
    assert every == 16 + 5  # no positions


def test_of_dense_ones_a_ring_sends_all_twice_but_for_its_own_parts() -> None:
    generator = torch.Generator().manual_seed(1)
    values = [torch.randn(3000, generator=generator) for _ in range(4)]
    volume = RoundVolume()
    for _ in values:
        volume.contribute(12_000)
    volume.add((3000,), [DecodedTensor(torch.arange(3000), one) for one in values])
    found = volume.volume()
    assert found is not None
    assert (found.gather, found.ring_all_gather, found.ring_all_reduce) == (12_000, 36_000, 2 * 3 / 4 * 12_000)
    assert found.sparse_ring == pytest.approx(2 * 3 / 4 * 12_000, rel=0.1)  # fp32, through an entropy coder


@pytest.fixture(scope="module")
def logged(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Logged:
    """Return a function that trains a run with a kind of contributions, once.

    It returns the run's folder and the mean bytes that a replica sends in each round, from the records.
    """

    @functools.cache
    def train(kind: str) -> tuple[Path, list[float]]:
        spec, folder = _spec(corpus, KINDS[kind]), RunFolder(tmp_path_factory.mktemp(kind) / "run")
        reports: list[Report] = []
        run_in_process(spec, folder, reports.append)
        save_config(spec.config, folder.config)
        closed = [one.round_closed for one in reports if one.HasField("round_closed")]
        sizes = [[sum(blob.size for blob in entry.blobs) for entry in record.contributions] for record in closed]
        return folder.path, [sum(own) / len(own) for own in sizes]

    return train


@pytest.fixture
def finished(logged: Logged, tmp_path: Path) -> Path:
    """Return a copy of the folder of a finished run."""
    return shutil.copytree(logged("codes")[0], tmp_path / "run")


@pytest.mark.parametrize("kind", KINDS)
def test_the_fast_path_a_log_and_its_command_count_the_same(
    kind: str, logged: Logged, corpus: Path, tmp_path: Path
) -> None:
    """The bytes are equal, because contributions have the same bits. Formulas come close."""
    spec = _spec(corpus, KINDS[kind])
    fast = train_fast(spec, prepare_tokens(spec.config.data, tmp_path / "cache"), every=Every(volume=1))
    folder, sizes = logged(kind)
    assert [one[1] for one in fast.volume] == sizes
    done = CliRunner().invoke(app, ["log", "volume", str(folder), "--json", str(tmp_path / "volume.json")])
    assert done.exit_code == 0, done.output
    rounds = json.loads((tmp_path / "volume.json").read_text())["rounds"]
    assert [(one["round"], *one["measured"].values()) for one in rounds] == fast.volume
    assert [one["replicas"] for one in rounds] == ROUNDS * [["r0", "r1", "r2"]]
    formula = expected_volume(spec, 3)
    assert [Volume(**one["by_formula"]) for one in rounds] == ROUNDS * [formula]
    assert fast.volume[-1][1] == pytest.approx(formula.gather, rel=0.1)
    assert (fast.volume[-1][3] is None) == (formula.ring_all_reduce is None) == (kind != "dense")
    assert fast.volume[-1][4] < 1.05 * formula.sparse_ring
    assert "one of 3, mean over 3 rounds" in done.output


def test_who_is_dropped_sends_nothing(corpus: Path, tmp_path: Path) -> None:
    spec = _spec(corpus, {**SPARSE, "missed": 0.5, "keep_local": True})
    group = AllReplicas(spec, prepare_tokens(spec.config.data, tmp_path), every=Every(volume=1))
    for round_ in range(1, ROUNDS + 1):
        assert group.round(round_)
    assert [one[0] for one in group.measured.volume] == [1, 2, 3]
    counts = [round(ring / gather) + 1 for _, gather, ring, *_ in group.measured.volume]
    assert min(counts) < 3


@pytest.mark.parametrize("kind", ["similarity", "volume", "outer"])
def test_contributions_that_are_not_seen_are_not_measured(kind: str, corpus: Path) -> None:
    every = Every(**{kind: 1})
    with pytest.raises(ConfigError, match=f"found adamw_ddp with `{kind}_every`, expected one that contributes diff"):
        Measured(_spec(corpus, {"method": "adamw_ddp"}), every)


def test_what_a_gpu_holds_is_not_encoded(corpus: Path) -> None:
    with pytest.raises(ConfigError, match="found cuda, expected --device cpu"):
        Measured(_spec(corpus, SPARSE), every=Every(volume=1), device=torch.device("cuda"))


def test_a_contribution_that_is_lost_is_damage_unless_history_may_go(finished: Path) -> None:
    next((finished / "log" / "round-000002").rglob("*.blobs")).unlink()
    done = CliRunner().invoke(app, ["log", "volume", str(finished)])
    assert done.exit_code == 1
    assert "a contribution to round 2 is missing" in " ".join(done.output.split())
    config = RunFolder(finished).config
    config.write_text(config.read_text().replace("history: whole", "history: recent"))
    done = CliRunner().invoke(app, ["log", "volume", str(finished)])
    assert done.exit_code == 0
    assert "mean over 2 rounds of 3 (other contributions were removed)" in " ".join(done.output.split())


@pytest.mark.parametrize("command", ["volume", "replay"])
def test_a_folder_is_no_file_to_write(command: str, finished: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["log", command, str(finished), "--json", str(tmp_path)])
    assert done.exit_code == 2
    assert "found a folder, expected a file" in done.output


def test_a_run_that_is_not_there_is_told(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["log", "volume", str(tmp_path)])
    assert done.exit_code == 2
    assert f"found no run {tmp_path}" in done.output.replace("\n", " ")
