"""Replicas with different shards, weighted by the amount of text."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from hetero_pp.config.spec import RunSpec
from hetero_pp.data.tokens import TokenStore, prepare_tokens
from hetero_pp.research.settings import ResearchConfig
from hetero_pp.research.trainer.clusters import find_clusters
from hetero_pp.research.trainer.train import AllReplicas, train_fast

NAMES = ["a", "b", "c"]
STEPS, ROUNDS = 2, 4


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return files of two kinds. One kind has twice as many."""
    folder, order = tmp_path_factory.mktemp("kinds"), random.Random(1)
    for number in range(60):
        letters = "abcdefgh" if number % 3 else "stuvwxyz"
        (folder / f"{number}.txt").write_text("".join(order.choices(letters + " .", k=400)))
    return folder


def _config(text: Path, pretraining: int = 0, **outer: Any) -> ResearchConfig:
    data = {"corpus": str(text), "sequence_length": 15, "validation_share": 0.2, "validation_sequences": 4}
    return ResearchConfig.model_validate(
        {
            "name": "t",
            "seed": 3,
            "model": {"width": 16, "heads": 2, "feed_forward": 24, "layers": 1},
            "data": data,
            "research": {"clusters": 3, "weighs_examples": True, "pretraining": pretraining},
            "inner": {"steps": STEPS, "warmup_steps": 0, "learning_rate": 0.01},
            "outer": {"rounds": ROUNDS, "method": "diloco", **outer},
            "replicas": [{"name": name, "kind": "datacenter", "batch_size": 2} for name in NAMES],
        }
    )


def _store(config: ResearchConfig, folder: Path) -> TokenStore:
    return prepare_tokens(config.data, folder)


def test_a_mean_weighs_by_examples(text: Path, tmp_path: Path) -> None:
    """If everything is sent without momentum, theta is the replicas' mean, weighted by the sizes of their shards."""
    torch.set_num_threads(1)
    config = _config(text, learning_rate=1.0, momentum=0.0, nesterov=False)
    spec = RunSpec(config, 256)
    store = _store(config, tmp_path)
    clusters = find_clusters(store, 15, 3, config.seed)
    examples = {name: len(clusters.windows(share, 3)) for share, name in enumerate(NAMES)}
    assert len(set(examples.values())) > 1
    group = AllReplicas(spec, store)
    assert group.weights == examples
    before = {name: tensor.clone() for name, tensor in group.theta.items()}
    ends: list[dict[str, torch.Tensor]] = []
    synchronise = group._synchronise

    def remembering(round_: int) -> None:
        ends.extend({name: own.detach().clone() for name, own in one.parameters.items()} for one in group.replicas)
        synchronise(round_)

    group._synchronise = remembering  # type: ignore[method-assign]
    assert group.round(1)
    for name, found in group.theta.items():
        own = [examples[replica] * (end[name] - before[name]) for replica, end in zip(NAMES, ends, strict=True)]
        torch.testing.assert_close(found, before[name] + sum(own) / sum(examples.values()), rtol=0, atol=1e-6)


def test_it_goes_on_from_a_checkpoint_to_the_same_bits(text: Path, tmp_path: Path) -> None:
    """The first replica reads all of the text in the first half, and its own shard in the second."""
    config = _config(text, pretraining=2)
    spec, store = RunSpec(config, 256), _store(config, tmp_path)
    whole = train_fast(spec, store)

    def stop(round_: int, loss: float) -> None:
        if round_ == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_fast(spec, store, stop, checkpoint=tmp_path / "kept", checkpoint_seconds=0.0)
    assert train_fast(spec, store, checkpoint=tmp_path / "kept").validation_loss == whole.validation_loss


def test_the_first_replica_reads_its_own_shard_once_the_others_join(text: Path, tmp_path: Path) -> None:
    config = _config(text, pretraining=1)
    group = AllReplicas(RunSpec(config, 256), _store(config, tmp_path))
    shares = []
    for round_ in (1, 2):
        assert group.round(round_)
        shares.append(group.batches[0].state().get("share", {"replicas": 1})["replicas"])
    assert shares == [1, len(NAMES)]
