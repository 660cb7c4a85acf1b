"""Clusters of windows: similar windows share a cluster, each is in one, and every process finds the same."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hetero_pp.config.spec import RunSpec
from hetero_pp.core.errors import ConfigError
from hetero_pp.data.settings import DataSettings
from hetero_pp.data.tokens import TokenStore, prepare_tokens
from hetero_pp.research.settings import ResearchConfig
from hetero_pp.research.trainer.clusters import Clusters, find_clusters
from hetero_pp.research.trainer.participation import ClusteredBatches, Weights, share_of, table_batches

TOPICS = ("abcdef", "ghijkl", "mnopqr")
LENGTH = 31


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of files with one topic each.

    A topic has letters that the others hardly use. The first topic has twice as many files.
    """
    folder, order = tmp_path_factory.mktemp("topics"), random.Random(1)
    for number in range(80):
        letters = TOPICS[0] if number % 4 == 3 else TOPICS[number % 4]
        (folder / f"{number}.txt").write_text("".join(order.choices(letters + "xyz", k=799)))
    return folder


@pytest.fixture
def store(text: Path, tmp_path: Path) -> TokenStore:
    return prepare_tokens(DataSettings(corpus=str(text), validation_share=0.1), tmp_path)


def _config(text: Path, **cells: Any) -> ResearchConfig:
    replicas = cells.pop("replicas", 3)
    research = {"clusters": cells.pop("clusters", 3), "pretraining": cells.pop("pretraining", 0)}
    data = {"corpus": str(text), "sequence_length": LENGTH, "validation_share": 0.1, "validation_sequences": 4}
    return ResearchConfig.model_validate(
        {
            "name": "t",
            "seed": 2,
            "model": {"width": 16, "heads": 2, "feed_forward": 24, "layers": 1},
            "data": data,
            "research": research | cells.pop("research", {}),
            "inner": {"steps": 2, "warmup_steps": 0},
            "outer": {"rounds": 6, **cells},
            "replicas": [{"name": f"r{i}", "kind": "datacenter", "batch_size": 4} for i in range(replicas)],
        }
    )


def _topic(tokens: np.ndarray) -> int:
    """Return the topic whose letters are the most frequent in a window."""
    counts = [sum(int((tokens == ord(letter)).sum()) for letter in topic) for topic in TOPICS]
    return counts.index(max(counts))


def test_windows_that_are_alike_are_together(store: TokenStore) -> None:
    clusters = find_clusters(store, LENGTH, 3, seed=1)
    rows = store.train[: len(store.train) // (LENGTH + 1) * (LENGTH + 1)].reshape(-1, LENGTH + 1)
    whole = [_topic(row) if 0 not in row else None for row in rows]
    for cluster in range(3):
        found = [whole[window] for window in clusters.windows(cluster, 3)]
        counts = [found.count(topic) for topic in range(3)]
        assert max(counts) > 0.95 * sum(counts), counts


@pytest.mark.parametrize("shares", [1, 2, 3])
def test_each_window_is_in_one_share(store: TokenStore, shares: int) -> None:
    clusters = find_clusters(store, LENGTH, 3, seed=1)
    found = np.concatenate([clusters.windows(share, shares) for share in range(shares)])
    np.testing.assert_array_equal(np.sort(found), np.arange(len(store.train) // (LENGTH + 1)))


def test_they_are_found_once_and_again_where_what_was_kept_is_damaged(store: TokenStore) -> None:
    first = find_clusters(store, LENGTH, 3, seed=1)
    [path] = store.path.parent.glob("clusters-*")
    _keep(path, 2 - first.labels)
    np.testing.assert_array_equal(find_clusters(store, LENGTH, 3, seed=1).labels, 2 - first.labels)
    whole = path.read_bytes()
    for damage in (whole[:40], whole[:-1], whole[:-2], whole[:-1] + b"x", b"PK" + whole, b""):
        path.write_bytes(damage)
        assert find_clusters(store, LENGTH, 3, seed=1).digest == first.digest
        assert path.read_bytes()[32:] == first.labels.tobytes()


def _keep(path: Path, labels: np.ndarray) -> None:
    """Store other labels, as if they had been found."""
    path.write_bytes(bytes.fromhex(Clusters(labels=labels).digest) + labels.tobytes())


@pytest.mark.starts_processes
def test_another_process_finds_the_same(text: Path, store: TokenStore, tmp_path: Path) -> None:
    """It has another number of threads, and the instructions of an old processor."""
    script = (
        "import sys; from pathlib import Path; from hetero_pp.research.trainer.clusters import find_clusters; "
        "from hetero_pp.data.settings import DataSettings; from hetero_pp.data.tokens import prepare_tokens; "
        "data = DataSettings(corpus=sys.argv[1], validation_share=0.1); "
        f"print(find_clusters(prepare_tokens(data, Path(sys.argv[2])), {LENGTH}, 3, 1).digest)"
    )
    settings = {"OPENBLAS_NUM_THREADS": "2", "OPENBLAS_CORETYPE": "Prescott"}
    arguments = [sys.executable, "-c", script, str(text), str(tmp_path / "other")]
    done = subprocess.run(arguments, env=os.environ | settings, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == find_clusters(store, LENGTH, 3, seed=1).digest


def test_an_epoch_reads_each_window_of_the_own_clusters_once(store: TokenStore) -> None:
    clusters = find_clusters(store, LENGTH, 3, seed=1)
    for replica in range(2):
        batches = ClusteredBatches(
            store=store, sequence_length=LENGTH, seed=5, replica=replica, replicas=2, batch_size=1, clusters=clusters
        )
        for epoch in range(2):
            read = [batches.windows(epoch * batches.shard_size + place) for place in range(batches.shard_size)]
            np.testing.assert_array_equal(np.sort(np.concatenate(read)), clusters.windows(replica, 2))


def test_a_shard_has_to_fill_a_batch(store: TokenStore) -> None:
    clusters = find_clusters(store, LENGTH, 3, seed=1)
    smallest = min(len(clusters.windows(share, 3)) for share in range(3))
    with pytest.raises(ConfigError, match=f"found {smallest} sequences in the clusters of replica . of 3") as error:
        for replica in range(3):
            ClusteredBatches(
                store=store,
                sequence_length=LENGTH,
                seed=5,
                replica=replica,
                replicas=3,
                batch_size=smallest + 1,
                clusters=clusters,
            )
    assert error.value.key == ("research", "clusters")


def test_examples_are_the_windows_of_the_shards(text: Path, store: TokenStore) -> None:
    spec = RunSpec(_config(text, research={"weighs_examples": True}), 256)
    clusters = find_clusters(store, LENGTH, 3, spec.config.seed)
    found = Weights(spec, store).in_round(1)
    assert found == {f"r{i}": len(clusters.windows(i, 3)) for i in range(3)}
    assert max(found.values()) > 1.5 * min(found.values())


def test_while_the_first_replica_trains_alone_it_reads_all_of_the_text(text: Path, store: TokenStore) -> None:
    spec = RunSpec(_config(text, method="diloco", pretraining=2), 256)
    clusters = find_clusters(store, LENGTH, 3, spec.config.seed)
    for index, member in enumerate(spec.members.values()):
        batches, _ = table_batches(spec, member, store)
        for round_ in range(1, 6):
            batches.take(share_of(spec, member.name, round_), (round_ - 1) * 2)
            if index == 0 or round_ > 2:
                alone = index == 0 and round_ <= 2
                share = (0, 1) if alone else (index, 3)
                rows = store.train[: len(clusters.labels) * (LENGTH + 1)].reshape(-1, LENGTH + 1)
                allowed = {rows[window].tobytes() for window in clusters.windows(*share)}
                read = batches.train((round_ - 1) * 2).numpy().astype(store.train.dtype)
                assert {row.tobytes() for row in read} <= allowed
    assert share_of(spec, "r0", 2).seed(9) == 9
    assert share_of(spec, "r0", 3).seed(9) != 9
    assert {share_of(spec, name, 3).first_step for name in spec.members} == {4}


@pytest.mark.parametrize(
    ("cells", "corpus", "key", "told"),
    [
        ({"replicas": 4}, None, "clusters", "found 3, expected at least one for each of 4 replicas"),
        ({}, "hf:a/b", "clusters", "found this key with a streamed corpus, expected only one"),
        (
            {"clusters": None, "research": {"weighs_examples": True}},
            *(None, "weighs_examples", "found this key with shards of equal size"),
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    cells: dict[str, Any], corpus: str | None, key: str, told: str, text: Path
) -> None:
    raw = _config(text, **cells).model_dump(mode="json")
    raw["data"]["corpus"] = corpus or raw["data"]["corpus"]
    with pytest.raises(ConfigError, match=told) as error:
        ResearchConfig.model_validate(raw).check()
    assert error.value.key == ("research", key)


def test_runs_with_clusters_have_another_name(text: Path) -> None:
    _config(text).check()
    assert RunSpec(_config(text), 256).run != RunSpec(_config(text, clusters=None), 256).run
