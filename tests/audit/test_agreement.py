"""Agreement of contributions by the signs of their values, and exclusion for a low one."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch

from hetero_pp.config.audit import GauntletSettings
from hetero_pp.pseudo_gradient.contribution import DecodedTensor
from replica_groups.audit.gauntlet.agreement import agreements
from replica_groups.audit.gauntlet.book import RoundFacts, ScoreBook

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
    for name, agreement in found.items():
        assert agreement == pytest.approx(-1.0 if name in liars else 1.0, abs=0.5), name


def test_noise_agrees_as_by_chance() -> None:
    draw = torch.Generator().manual_seed(1)
    found = agreements(_changed(_contributions(8), {"r3"}, lambda values: torch.randn(len(values), generator=draw)))
    assert found["r3"] == pytest.approx(0.0, abs=0.2)
    assert min(one for name, one in found.items() if name != "r3") > 0.8


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
    book = ScoreBook(GauntletSettings(grace=100), ["a", "b", "c"])
    facts = RoundFacts(7, frozenset("abc"), frozenset(), {}, {}, against={"b": -0.9})
    book.update(facts, {})
    told = "its contribution to round 7 goes another way than the others: agreement -0.90"
    assert book.to_exclude() == {"b": f"{told}, where 0 is chance and 1 is usual"}
    assert book.scores()["b"].evaluations == 1
