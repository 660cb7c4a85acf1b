"""Agreement of contributions by the signs of their values, and exclusion for a low one."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from unittest import mock

import pytest
import torch
from lying_run import lying_spec

from hetero_pp.config.audit import GauntletSettings
from hetero_pp.messages.messages_pb2 import RoundRecord
from hetero_pp.model.transformer import shapes_by_block
from hetero_pp.pseudo_gradient.contribution import BlobAddress, DecodedTensor, encode_blob
from hetero_pp.pseudo_gradient.error_feedback import select
from replica_groups.audit import gauntlet
from replica_groups.audit.gauntlet import SignCheck, agreements, too_low
from replica_groups.audit.replica_scores import ReplicaScores, RoundFacts

PLACES = 20_000
Contributions = Mapping[str, dict[str, DecodedTensor]]


def _contributions(replicas: int, kept: int = 8_000, common: float = 1.0) -> Contributions:
    """Return contributions with random places and signs; they share the direction `common`, and are else noise."""
    draw = torch.Generator().manual_seed(5)
    direction = torch.randn(PLACES, generator=draw)
    found = {}
    for index in range(replicas):
        where = torch.randperm(PLACES, generator=draw)[:kept].sort().values
        values = common * direction[where] + torch.randn(kept, generator=draw)
        empty = torch.empty(0)
        found[f"r{index}"] = {"a": DecodedTensor(where, values), "b": DecodedTensor(empty.long(), empty)}
    return found


def _changed(of: Contributions, names: set[str], change: Callable[[torch.Tensor], torch.Tensor]) -> Contributions:
    return {
        name: one | {"a": DecodedTensor(one["a"].indices, change(one["a"].values))} if name in names else one
        for name, one in of.items()
    }


@pytest.mark.parametrize(("replicas", "hostile"), [(8, 2), (7, 3), (5, 2), (4, 1), (3, 1)])
def test_fewer_than_half_that_go_the_other_way_are_found_and_change_nothing_for_the_others(
    replicas: int, hostile: int
) -> None:
    """They agree with each other, and have values of any size."""
    liars = {f"r{index}" for index in range(hostile)}
    found = agreements(_changed(_contributions(replicas), liars, lambda values: -1e6 * values))
    assert found.keys() == {f"r{index}" for index in range(replicas)}
    for name, value in found.items():
        assert value == pytest.approx(-1.0 if name in liars else 1.0, abs=0.5), name


@pytest.mark.parametrize(
    "honest",
    [
        _contributions(8, common=0.0),  # unrelated
        _contributions(8, kept=400),  # eight places are shared
        _changed(_contributions(8), {f"r{index}" for index in range(8)}, torch.zeros_like),
        _contributions(2),
    ],
)
def test_nobody_is_judged_where_chance_explains_what_is_usual(honest: Contributions) -> None:
    assert agreements(honest) == {}


@pytest.mark.parametrize(("replicas", "silent"), [(8, 1), (7, 3)])
def test_contributions_without_values_agree_as_by_chance_and_do_not_end_the_check(replicas: int, silent: int) -> None:
    sent = dict(_contributions(replicas))
    for index in range(silent):
        sent[f"r{index}"] = {name: DecodedTensor(torch.empty(0).long(), torch.empty(0)) for name in ("a", "b")}
    found = agreements(sent)
    assert [found[f"r{index}"] == 0.0 for index in range(replicas)] == [index < silent for index in range(replicas)]


def test_the_replica_is_excluded_and_the_line_says_why() -> None:
    book = ReplicaScores(GauntletSettings(grace=100), ["a", "b", "c"])
    facts = RoundFacts(7, frozenset("abc"), frozenset(), {}, {}, against={"b": -0.9})
    book.update(facts, {})
    told = "its contribution to round 7 goes another way than the others: agreement -0.90"
    assert book.to_exclude() == {"b": f"{told}, where 0 is chance and 1 is usual"}
    assert book.scores()["b"].evaluations == 1


@pytest.mark.parametrize("replicas", [3, 4, 8, 20])
def test_no_honest_replica_is_below_the_limit_at_any_size(replicas: int) -> None:
    """One in three trains on a sixteenth of the text, so that its signal is a quarter of the others'."""
    draw, names = torch.Generator().manual_seed(1), [f"r{index}" for index in range(replicas)]
    direction, everywhere = torch.randn(PLACES, generator=draw), torch.arange(PLACES)
    tokens = {name: 100 if index % 3 else 1600 for index, name in enumerate(names)}
    for _ in range(20):
        sent = {}
        for name in names:
            noise = 10 * torch.randn(PLACES, generator=draw) / math.sqrt(tokens[name] / 100)
            sent[name] = {"a": DecodedTensor(everywhere, direction + noise)}
        assert too_low(agreements(sent), tokens, 0.1) == {}


def test_of_a_large_model_only_some_places_are_compared_and_nobody_can_choose_them(
    corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All contributions decide which ones."""
    spec = lying_spec(corpus, 1, {"liar": {"kind": "datacenter"}})
    shapes, settings = shapes_by_block(spec.parameter_shapes), spec.config.outer.compression
    record, blobs, draw = RoundRecord(round=1), dict[tuple[str, str], bytes](), torch.Generator().manual_seed(1)
    direction = {name: torch.randn(shape, generator=draw) for name, shape in spec.parameter_shapes.items()}
    for replica, factor in (("a", 1.0), ("b", 1.0), ("liar", -4.0)):
        entry = record.contributions.add(replica=replica, tokens=32)
        for block, of_block in shapes.items():
            address, tensors = BlobAddress(spec.run, 1, replica, block), []
            for name, shape in of_block.items():
                kept = select(torch.zeros(shape), factor * direction[name], settings)
                tensors.append((name, shape, kept))
            blobs[replica, block] = encode_blob(address, tensors, settings)
            entry.blobs.add(block=block, sha256=hashlib.sha256(blobs[replica, block]).digest())
    seen = dict[int, int]()
    for places in (gauntlet.MOST_PLACES, 2_000):
        monkeypatch.setattr(gauntlet, "MOST_PLACES", places)
        comparison = mock.Mock(wraps=gauntlet._SignCounts)
        monkeypatch.setattr(gauntlet, "_SignCounts", comparison)
        found = SignCheck(spec, 0.1).against(record, lambda *key: blobs[key])
        assert found.keys() == {"liar"} and found["liar"] == pytest.approx(-1.0)
        seen[places] = comparison.call_args.args[1]
    total = sum(math.prod(shape) for shape in spec.parameter_shapes.values())
    assert list(seen.values()) == [1, math.ceil(total / 2_000)]
