"""Runs on a streamed corpus: replicas read disjoint documents, and resumed runs have the same bits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hetero_pp.config.member_inputs import replica_batches
from hetero_pp.config.run_config import RunConfig
from hetero_pp.config.spec import RunSpec
from hetero_pp.core.errors import ConfigError
from hetero_pp.data.sources import StreamedCorpus
from hetero_pp.research.trainer.train import train_fast


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return documents of one letter each, so that a batch tells which documents it holds."""
    folder = tmp_path_factory.mktemp("shards")
    for i in range(3):
        texts = [chr(ord("A") + 16 * i + number) * 37 for number in range(16)]
        (folder / f"{i}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return folder


def spec_of(shards: Path, replicas: int = 2) -> RunSpec:
    torch.set_num_threads(1)
    stream = {"validation_documents": 4, "shuffle_buffer": 5}
    names = [f"dc{i}" for i in range(replicas)]
    config = RunConfig.model_validate(
        {
            "name": "t",
            "model": {"width": 16, "heads": 2, "feed_forward": 24, "layers": 1},
            "data": {"corpus": f"hf:{shards}", "stream": stream, "sequence_length": 16, "validation_sequences": 4},
            "inner": {"steps": 4, "warmup_steps": 3, "learning_rate": 0.01},
            "outer": {"rounds": 4},
            "replicas": [{"name": name, "kind": "datacenter", "batch_size": 4} for name in names],
        }
    )
    return RunSpec(config, 256)


def test_replicas_read_disjoint_documents(shards: Path) -> None:
    spec = spec_of(shards, 3)
    source = StreamedCorpus(spec.config.data)
    seen: list[set[int]] = []
    for member in spec.members.values():
        batches, validation = replica_batches(spec, member, source)
        seen.append({index for step in range(6) for index in batches.train(step).unique().tolist()} - {0})
        assert torch.cat(validation).unique().tolist() == [0, *range(ord("A"), ord("C"))]
    assert all(len(own) > 8 for own in seen)
    assert len(set.union(*seen)) == sum(map(len, seen))
    assert min(set.union(*seen)) >= ord("A") + 4


def once_of(shards: Path) -> tuple[RunSpec, RunSpec]:
    """Return a run that reaches the end of its text and may not repeat it, and the same run that may."""
    config = spec_of(shards).config.model_copy(update={"seed": 3})
    data = config.data.model_copy(update={"repeat": False})
    return RunSpec(config.model_copy(update={"data": data}), 256), RunSpec(config, 256)


def test_where_a_stream_ends_the_state_is_kept_and_goes_on_if_it_may_be_repeated(shards: Path, tmp_path: Path) -> None:
    (once, again), path = once_of(shards), tmp_path / "checkpoint"
    rounds: list[Any] = []
    with pytest.raises(ConfigError, match=r"stream of replica \d of 2 has ended.*; the state after round 2 is kept"):
        train_fast(once, StreamedCorpus(once.config.data), lambda *told: rounds.append(told), checkpoint=path)
    assert [number for number, _ in rounds] == [1, 2]
    result = train_fast(again, StreamedCorpus(again.config.data), lambda *told: rounds.append(told), checkpoint=path)
    assert [number for number, _ in rounds] == [1, 2, 3, 4]
    assert result.validation_loss == train_fast(again, StreamedCorpus(again.config.data)).validation_loss
    assert not path.exists()


def test_reading_ahead_changes_no_batch(shards: Path) -> None:
    """Nor does it change the saved position, which is that of the last batch used."""
    spec = spec_of(shards)
    source = StreamedCorpus(spec.config.data)
    plain, ahead = (source.batches(16, 1, 0, 2, 4) for _ in range(2))
    for round_ in range(3):
        steps = range(round_ * 4, round_ * 4 + 4)
        ahead.read_ahead(steps)
        for step in steps:
            assert ahead.state() == plain.state()
            assert torch.equal(ahead.train(step), plain.train(step))
    assert torch.equal(ahead.train(2), plain.train(2))
    ahead.read_ahead(range(3, 5))
    assert torch.equal(ahead.train(3), plain.train(3))
