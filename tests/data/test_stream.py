"""Streams: every document once per epoch, the same order after resuming, complete for any number of replicas."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hetero_pp.core.errors import ConfigError
from hetero_pp.data.batches import Share, SharedBatches, load_position
from hetero_pp.data.stream import HeldOut, Order, Position, ShardPart, StreamBatches, TokenStream, deal, epoch_of

SEPARATOR = 0


class Numbers:
    """A tokenizer of texts that are numbers."""

    vocabulary = 1 << 20
    separator = SEPARATOR
    identity = "numbers"
    notes = ()

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        return [np.array(text.split(), dtype=np.int64) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(map(str, ids))


class Lists:
    """Shards of documents in memory. Every token is a different number. A length of 0 gives a blank document."""

    def __init__(self, lengths: list[list[int]]) -> None:
        numbers = iter(range(1, 1 << 20))
        self.texts = [[" ".join(str(next(numbers)) for _ in range(n)) for n in shard] for shard in lengths]
        self.count = len(lengths)

    def documents(self, shard: int, start: int) -> Iterator[str]:
        yield from self.texts[shard][start:]

    def tokens(self, held_out: int = 0) -> Counter[int]:
        """Return the tokens of an epoch."""
        texts = [text for number, shard in enumerate(self.texts) for text in shard[held_out if number == 0 else 0 :]]
        return Counter(number for text in texts for number in [*map(int, text.split()), SEPARATOR] if text)


def stream_of(shards: Lists, replica: int = 0, replicas: int = 1, repeat: bool = True, **values: Any) -> TokenStream:
    settings: dict[str, Any] = {"seed": 1, "shuffle_buffer": 3, "replica": replica, "replicas": replicas}
    order = Order(shards=shards, **settings | values)
    return TokenStream(order, Numbers(), repeat)


def rest_of(stream: TokenStream) -> list[int]:
    """Return all tokens up to the end of the epoch."""
    stream.repeat = False
    tokens = []
    with pytest.raises(ConfigError, match="has ended"):
        while True:
            tokens.append(int(stream.take(1)[0]))
    return tokens


LENGTHS = st.lists(st.lists(st.integers(0, 4), max_size=9), min_size=1, max_size=7)


@given(count=st.integers(0, 20), replicas=st.integers(1, 9))
def test_parts_are_dealt_once_and_evenly(count: int, replicas: int) -> None:
    parts = [ShardPart(0, shard, 0, 1) for shard in range(count)]
    hands = [deal(parts, replicas, replica) for replica in range(replicas)]
    for shard in range(count):
        for document in range(40):
            assert sum(part.holds(0, shard, document) for hand in hands for part in hand) == 1
    shares = [sum(1 / part.step for part in hand) for hand in hands]
    assert shares == pytest.approx([count / replicas] * replicas)
    assert sum(part.step > 1 for part in hands[0]) == count % replicas


@given(lengths=LENGTHS, replicas=st.integers(1, 5), buffer=st.integers(1, 12), held_out=st.integers(0, 3))
def test_an_epoch_holds_every_document_once(
    lengths: list[list[int]], replicas: int, buffer: int, held_out: int
) -> None:
    shards = Lists(lengths)
    streams = [
        stream_of(shards, i, replicas, shuffle_buffer=buffer, held_out=HeldOut(0, held_out)) for i in range(replicas)
    ]
    assert Counter(token for stream in streams for token in rest_of(stream)) == shards.tokens(held_out)


def test_documents_stay_whole_and_are_separated() -> None:
    shards = Lists([[3, 2, 0, 4], [1, 5]])
    text = " ".join(map(str, rest_of(stream_of(shards))))
    documents = [document for shard in shards.texts for document in shard if document]
    assert sorted(document.strip() for document in text.split(f" {SEPARATOR}") if document) == sorted(documents)


def test_the_order_is_another_in_every_epoch_and_for_every_seed() -> None:
    shards = Lists([[1] * 50] * 8)
    count = sum(shards.tokens().values())
    stream = stream_of(shards, shuffle_buffer=20)
    orders = [stream.take(count).tolist() for _ in range(2)]
    orders.append(stream_of(shards, shuffle_buffer=20, seed=2).take(count).tolist())
    assert all(Counter(order) == shards.tokens() for order in orders)
    assert len(set(map(tuple, orders))) == 3
    shards_first = [[part.shard for part in epoch_of(8, epoch, 1, HeldOut())] for epoch in range(4)]
    assert len(set(map(tuple, shards_first))) == 4


def test_a_block_is_shuffled_through_and_through() -> None:
    """The position of each document in a block is uniform over seeds."""
    shards = Lists([[1] * 10])
    firsts = Counter(int(stream_of(shards, shuffle_buffer=10, seed=seed).take(1)[0]) for seed in range(1000))
    chi_squared = sum((firsts[token] - 100) ** 2 / 100 for token in range(1, 11))
    assert chi_squared < 34  # 9 degrees of freedom: p = 1e-4


@given(lengths=LENGTHS, replicas=st.integers(1, 3), before=st.integers(0, 60), buffer=st.integers(1, 12))
def test_it_goes_on_exactly(lengths: list[list[int]], replicas: int, before: int, buffer: int) -> None:
    shards = Lists([[*shard, *[2] * 3] for shard in lengths])
    unbroken = stream_of(shards, replicas=replicas, shuffle_buffer=buffer)
    first = unbroken.take(before)
    saved = json.loads(json.dumps(unbroken.position.as_json()))
    fresh = stream_of(shards, replicas=replicas, shuffle_buffer=buffer)
    fresh.seek(Position.from_json(saved))
    expected = unbroken.take(50)
    np.testing.assert_array_equal(fresh.take(50), expected)
    whole = stream_of(shards, replicas=replicas, shuffle_buffer=buffer).take(before + 50)
    np.testing.assert_array_equal(whole, [*first, *expected])


def batches_of(shards: Lists, replica: int = 0, replicas: int = 1) -> StreamBatches:
    return StreamBatches(stream_of(shards, replica, replicas), sequence_length=4, batch_size=2)


SHARDS = Lists([[5] * 10, [3] * 14, [7, 1] * 5])


def test_batches_are_the_stream_cut_into_rows() -> None:
    batches = batches_of(SHARDS)
    rows = torch.cat([batches.train(step) for step in range(9)])
    assert rows.shape == (18, 5)
    assert rows.dtype == torch.int64
    np.testing.assert_array_equal(rows.flatten(), stream_of(SHARDS).take(90))


def test_a_batch_is_a_function_of_its_step() -> None:
    """Steps may be repeated and read backwards or ahead, as a measurement before the first step does."""
    expected = [batches_of(SHARDS).train(step) for step in range(40)]
    batches = batches_of(SHARDS)
    for step in [0, 1, 2, 0, 1, 5, 30, 3, 39, 38, 12, 13, 0]:
        assert torch.equal(batches.train(step), expected[step]), step


def test_going_on_reads_one_block() -> None:
    """Resuming reads no earlier shards, and only the part of the current shard from the start of the block."""

    class Counting(Lists):
        read = 0

        def documents(self, shard: int, start: int) -> Iterator[str]:
            for text in super().documents(shard, start):
                self.read += 1
                yield text

    shards = Counting([[4] * 100] * 5)
    batches = StreamBatches(stream_of(shards, shuffle_buffer=10), sequence_length=4, batch_size=2)
    for step in range(150):
        batches.train(step)
    fresh = StreamBatches(stream_of(shards, shuffle_buffer=10), sequence_length=4, batch_size=2)
    fresh.load(batches.state())
    before = shards.read
    fresh.train(150)
    assert 0 < shards.read - before <= 20


@pytest.mark.parametrize("undone", [False, True], ids=["from a saved state", "undone"])
def test_a_round_that_was_trained_ahead_can_be_read_again(undone: bool, tmp_path: Path) -> None:
    """Rounds have three steps. The saved state is from before round 2. Undoing returns to before both rounds."""
    whole = batches_of(SHARDS)
    expected = [whole.train(step) for step in range(6)]
    batches = SharedBatches(Share(0, 1), lambda share: batches_of(SHARDS))
    for round_ in range(2):
        batches.remember(ahead=round_ > 0)
        for step in range(3 * round_, 3 * round_ + 3):
            batches.train(step)
    if undone:
        batches.undo()
    else:
        batches.save(tmp_path)
        batches = SharedBatches(Share(0, 1), lambda share: batches_of(SHARDS))
        load_position(batches, tmp_path)
    for step in range(0 if undone else 3, 6):
        assert batches.train(step).equal(expected[step])


def test_no_text_is_one_line() -> None:
    with pytest.raises(ConfigError, match="found no text for replica 1 of 2, expected more documents"):
        stream_of(Lists([[3]]), 1, 2).take(1)
    all_of_it = stream_of(Lists([[3, 3]]), held_out=HeldOut(0, 2))
    for reads in (lambda: all_of_it.take(1), all_of_it.order.require_text):
        with pytest.raises(ConfigError, match="validation_documents: found 2, which leaves no text for replica 0 of 1"):
            reads()
    stream_of(Lists([[3, 3]]), held_out=HeldOut(0, 1)).order.require_text()
