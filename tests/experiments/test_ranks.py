"""The same command under torchrun: several processes train each row together, with the same results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from started import run_on_ranks

pytestmark = pytest.mark.starts_processes

SCALE = """\
name: tiny
about: a few seconds
replicas: 3
stages: 2
batch_size: 2
vocabulary: 300
hardware: cpu
base:
  model: {preset: micro, width: 16, heads: 2, feed_forward: 16, layers: 2}
  data: {corpus: CORPUS, sequence_length: 16, validation_share: 0.2, validation_sequences: 4}
  inner: {steps: 2, learning_rate: 1.0e-2, warmup_steps: 2}
  outer: {rounds: 3, compression: {density: 1/32, value_bits: 32}}
"""
EXPERIMENT = """\
name: toy/one
title: Toy
paper: nowhere
baseline: none
rows:
  - {name: none}
  - {name: some, compressed: 2/3, rank: 1/4}
  - {name: ddp, compressed: all, rank: 1/4, cells: {outer.method: adamw_ddp}}
claims: []
"""


def test_torchrun_comes_to_the_same(tmp_path: Path, corpus: Path) -> None:
    folder = tmp_path / "experiments"
    (folder / "scales").mkdir(parents=True)
    (folder / "toy").mkdir()
    (folder / "scales" / "tiny.yaml").write_text(SCALE.replace("CORPUS", str(corpus)))
    (folder / "toy" / "one.yaml").write_text(EXPERIMENT)
    losses = {}
    for name in ("alone", "together"):
        results = tmp_path / name
        options = ["--experiments", folder, "--runs", tmp_path / "runs", "--results", results, "--no-compile"]
        command = ["reproduce", "--scale", "tiny", "--seeds", "1", *map(str, options)]
        run_on_ranks(1 if name == "alone" else 2, "hetero_pp", *command)
        rows = json.loads((results / "tiny" / "toy" / "one.json").read_text())["rows"]
        losses[name] = {row["name"]: row["ours"]["mean"] for row in rows}
        assert len((results / "tiny" / "rows.jsonl").read_text().splitlines()) == 3
    assert set(losses["together"]) == {"none", "some", "ddp"}
    assert losses["together"] == pytest.approx(losses["alone"], rel=1e-4)
