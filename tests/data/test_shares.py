"""Text that is distributed again: the first step, disjoint shares, and the same batches wherever a replica resumes."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np
import pytest

from hetero_pp.data.batches import Batches, Share, SharedBatches, StoreBatches, load_position, save_position
from hetero_pp.data.tokens import TokenStore

TOKENS, ROWS, LENGTH = 600, 2, 5
WINDOWS = TOKENS // LENGTH


def _plain(replica: int, replicas: int, seed: int = 7) -> StoreBatches:
    tokens = np.arange(TOKENS, dtype=np.uint32)
    store = TokenStore(train=tokens, validation=tokens[:0], vocabulary=TOKENS, path=Path(), digest="")
    return StoreBatches(
        store=store, sequence_length=LENGTH - 1, seed=seed, replica=replica, replicas=replicas, batch_size=ROWS
    )


def _batches(share: Share) -> Batches:
    return _plain(share.replica, share.replicas, share.seed(7))


def _shared(replica: int, replicas: int = 2) -> SharedBatches:
    return SharedBatches(Share(replica, replicas), _batches)


def _later(replica: int, replicas: int = 3, first_step: int | None = 12) -> Share:
    return Share(replica, replicas, (), 4, first_step)


def _windows(batches: Batches, steps: range) -> list[int]:
    """Return the windows that were read. A token is its own position."""
    return [int(row[0]) // LENGTH for step in steps for row in batches.train(step)]


def test_a_share_that_nothing_changes_is_what_a_replica_always_read() -> None:
    shared, plain = _shared(1), _plain(1, 2)
    assert shared.state() == plain.state()
    for step in (0, 3, 100):
        shared.take(Share(1, 2), step)
        assert shared.train(step).equal(plain.train(step))


def test_from_its_first_step_on_all_read_another_share_and_no_two_the_same() -> None:
    shared = [_shared(0), _shared(1), SharedBatches(_later(2), _batches)]
    before = [batches.train(11) for batches in shared[:2]]
    for replica, batches in enumerate(shared):
        batches.take(_later(replica), 12)
    epoch = WINDOWS // 3 // ROWS
    for steps in (range(12, 12 + epoch), range(12 + epoch, 12 + 2 * epoch)):
        read = [_windows(batches, steps) for batches in shared]
        assert sorted(chain.from_iterable(read)) == list(range(WINDOWS))
        assert [sorted(one) for one in read] == [list(range(replica, WINDOWS, 3)) for replica in range(3)]
    assert [batches.train(11).equal(one) for batches, one in zip(shared, before, strict=False)] == [False, False]


def test_it_is_read_in_another_order_than_a_run_has_that_began_so() -> None:
    shared = SharedBatches(_later(2), _batches)
    assert not shared.train(12).equal(_shared(2, 3).train(0))
    assert sorted(_windows(shared, range(12, 32))) == sorted(_windows(_shared(2, 3), range(20)))


@pytest.mark.parametrize("first_step", [12, None], ids=["rounds of steps", "rounds of time"])
def test_a_replica_goes_on_to_the_same_batches_after_a_change(first_step: int | None, tmp_path: Path) -> None:
    """If rounds have a fixed duration, only the saved state knows the first step."""
    shared, share = _shared(1), _later(1, first_step=first_step)
    shared.take(share, 12)
    expected = [shared.train(step) for step in range(15, 20)]
    save_position(shared.state(), tmp_path)
    assert json.loads((tmp_path / "data.json").read_text())["share"]["first_step"] == 12
    again = _shared(1)
    load_position(again, tmp_path)
    again.take(share, 15)
    assert all(again.train(step).equal(one) for step, one in zip(range(15, 20), expected, strict=True))
    again.take(replace(share, round=9), 18)  # but not another distribution
    assert not again.train(18).equal(expected[3])


def test_who_hears_of_it_late_reads_what_it_would_have(tmp_path: Path) -> None:
    late, punctual = _shared(0), _shared(0)
    punctual.take(_later(0), 12)
    late.take(_later(0), 18)  # it was absent for two rounds
    assert late.train(18).equal(punctual.train(18))
