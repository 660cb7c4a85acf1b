"""Batches of token windows: pure functions of the step, seekable, disjoint between replicas, and complete."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hetero_pp.core.errors import ConfigError
from hetero_pp.data.batches import StoreBatches, permute, validation_batches
from hetero_pp.data.tokens import TokenStore


def store_of(train: int, validation: int = 100) -> TokenStore:
    """Return a store in which every token is its own position, so that a row tells where it was read."""
    tokens = np.arange(train + validation, dtype=np.uint32)
    return TokenStore(
        train=tokens[:train], validation=tokens[train:], vocabulary=train + validation, path=Path(), digest=""
    )


def batches_of(train: int, **values: Any) -> StoreBatches:
    defaults: dict[str, Any] = {
        "sequence_length": 4,
        "seed": 0,
        "replica": 0,
        "replicas": 1,
        "batch_size": 2,
    }
    return StoreBatches(store=store_of(train), **defaults | values)


@given(size=st.integers(1, 3000), key=st.integers(0, 2**63 - 1))
def test_permute_is_a_bijection(size: int, key: int) -> None:
    np.testing.assert_array_equal(np.sort(permute(np.arange(size), size, key)), np.arange(size))


@given(size=st.integers(1, 2**62), key=st.integers(0, 2**63 - 1), data=st.data())
def test_permute_needs_no_table(size: int, key: int, data: st.DataObject) -> None:
    index = np.array(data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=20, unique=True)))
    out = permute(index, size, key)
    assert out.min() >= 0
    assert out.max() < size
    assert len(set(out.tolist())) == len(index)
    np.testing.assert_array_equal(permute(index[::-1], size, key)[::-1], out)


def test_permute_looks_random() -> None:
    """Positions are uniform, and neighbours do not stay together."""
    size, keys = 50, range(2000)
    first = np.array([permute(np.arange(2), size, key) for key in keys])
    counts = np.bincount(first[:, 0], minlength=size)
    chi_squared = ((counts - 40) ** 2 / 40).sum()
    assert chi_squared < 95  # 49 degrees of freedom: p = 1e-4
    assert abs(np.mean(np.diff(first, axis=1) == 1) - 1 / size) < 0.012
    order = permute(np.arange(10_000), 10_000, 7)
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.04
    assert abs(np.corrcoef(order, np.arange(10_000))[0, 1]) < 0.04


def test_rows_are_windows_of_the_train_part() -> None:
    batch = batches_of(103, batch_size=3).train(5)
    assert batch.dtype == torch.int64
    assert batch.shape == (3, 5)
    assert torch.equal(batch - batch[:, :1], torch.arange(5).expand(3, 5))
    assert (batch[:, 0] % 5 == 0).all()
    assert batch.max() < 100


@given(
    train=st.integers(40, 400),
    length=st.integers(1, 4),
    replicas=st.integers(1, 4),
    batch_size=st.integers(1, 2),
    epoch=st.integers(0, 3),
)
def test_an_epoch_reads_every_window_once(train: int, length: int, replicas: int, batch_size: int, epoch: int) -> None:
    seen: Counter[int] = Counter()
    for replica in range(replicas):
        batches = batches_of(train, sequence_length=length, replica=replica, replicas=replicas, batch_size=batch_size)
        size = batches.shard_size
        steps = range(epoch * size // batch_size, -(-(epoch + 1) * size // batch_size))
        rows = np.concatenate([batches.windows(step) for step in steps])
        skip = epoch * size - steps[0] * batch_size
        seen.update(rows[skip : skip + size].tolist())
        assert set(rows % replicas) == {replica}
    assert seen == Counter(range(train // (length + 1)))


def test_batches_are_pure_functions_of_seed_replica_and_step() -> None:
    one, two = batches_of(1000, replicas=2), batches_of(1000, replicas=2)
    forward = [one.train(step) for step in range(200)]
    assert all(torch.equal(two.train(step), forward[step]) for step in reversed(range(200)))
    assert not torch.equal(torch.stack(forward), torch.stack([batches_of(1000).train(s) for s in range(200)]))
    assert not torch.equal(forward[0], batches_of(1000, replicas=2, seed=1).train(0))
    assert not torch.equal(forward[0] + 5, batches_of(1000, replicas=2, replica=1).train(0))


def test_epochs_have_orders_of_their_own() -> None:
    batches = batches_of(1000, batch_size=10)
    epochs = [torch.cat([batches.train(20 * epoch + step) for step in range(20)]) for epoch in range(2)]
    assert not torch.equal(*epochs)
    assert torch.equal(*(epoch.sort(0).values for epoch in epochs))


def test_one_epoch_is_one_shard() -> None:
    batches = batches_of(1000, replicas=3, replica=2)
    assert batches.shard_size == 66
    batches.require_one_epoch(33)
    with pytest.raises(
        ConfigError, match=r"data\.repeat: found false and 34 steps of 2 .* at most 33 steps: replica 2"
    ):
        batches.require_one_epoch(34)


@given(train=st.integers(60, 400), fixed=st.integers(0, 2), turns=st.integers(1, 3), epochs=st.integers(1, 4))
def test_replicas_that_come_and_go_take_turns_with_their_shards(
    train: int, fixed: int, turns: int, epochs: int
) -> None:
    """No two replicas read the same window at a step, whichever are present.

    After as many epochs as there are shards, each replica has read all of them.
    """
    replicas = fixed + turns
    rotation = tuple(range(fixed, replicas))
    everyone = [
        batches_of(
            train,
            sequence_length=2,
            replica=replica,
            replicas=replicas,
            batch_size=1,
            rotation=rotation if replica in rotation else (),
        )
        for replica in range(replicas)
    ]
    size = train // 3 // replicas
    assert {batches.shard_size for batches in everyone[fixed:]} == {size}
    read = [[int(batches.windows(step)[0]) for step in range(epochs * size)] for batches in everyone[fixed:]]
    for epoch in range(epochs):
        seen = [window for one in read for window in one[epoch * size : (epoch + 1) * size]]
        assert len(set(seen)) == len(seen)
        assert {window % replicas for window in seen} == set(rotation)
        shards = [{window % replicas for window in one[epoch * size : (epoch + 1) * size]} for one in read]
        assert shards == [{rotation[(place + epoch) % turns]} for place in range(turns)]


def test_too_small_a_corpus_to_train_on() -> None:
    assert batches_of(60, replicas=4, batch_size=3, replica=3).shard_size == 3
    message = r"found 59 tokens to train on, expected at least 60: 4 replicas x 3 sequences x 5 tokens"
    with pytest.raises(ConfigError, match=message) as caught:
        batches_of(59, replicas=4, batch_size=3, replica=0)
    assert caught.value.key == ("data", "corpus")


@given(size=st.integers(1, 500), length=st.integers(1, 9), sequences=st.integers(1, 30), batch=st.integers(1, 9))
def test_validation_rows_are_apart_and_within_the_validation_part(
    size: int, length: int, sequences: int, batch: int
) -> None:
    store = store_of(1000, size)
    if size < sequences * (length + 1):
        with pytest.raises(ConfigError, match=f"found {size} tokens to validate on, expected at least"):
            validation_batches(store, length, sequences, batch)
        return
    parts = validation_batches(store, length, sequences, batch)
    assert all(len(part) == batch for part in parts[:-1])
    rows = torch.cat(parts)
    assert rows.shape == (sequences, length + 1)
    assert rows.unique().numel() == rows.numel()
    assert rows.min() >= 1000
    starts = [*rows[:, 0].tolist(), 1000 + size]
    assert all(abs(gap - size / sequences) <= 1 for gap in np.diff(starts))
