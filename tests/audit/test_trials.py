"""Losses before and after one contribution is applied alone, and copies among contributions."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from hetero_pp.config.audit import GauntletSettings
from hetero_pp.messages.messages_pb2 import Judgement
from hetero_pp.model.transformer import ModelShape, Transformer, build_filled, initialise, parameters_of
from hetero_pp.outer.methods import OuterSettings
from hetero_pp.outer.step import OuterOptimizer, mean_of
from hetero_pp.pseudo_gradient.compression import CompressionSettings
from hetero_pp.pseudo_gradient.contribution import DecodedTensor
from hetero_pp.pseudo_gradient.error_feedback import select
from replica_groups.audit.gauntlet import copy_of, losses_of, overlap, overlapping
from replica_groups.audit.judgements import complaint
from replica_groups.audit.replica_scores import ReplicaScores, RoundFacts

SHAPE = ModelShape(width=32, layers=1, heads=2, feed_forward=48, vocabulary=64)
SPARSE = OuterSettings(rounds=1)


def _theta() -> dict[str, Tensor]:
    model = Transformer(SHAPE)
    initialise(model, 3)
    return {name: parameter.detach() for name, parameter in parameters_of(model).items()}


def _tokens(seed: int, sequences: int = 4) -> Tensor:
    return torch.randint(SHAPE.vocabulary, (sequences, 17), generator=torch.Generator().manual_seed(seed))


def _trained(theta: Mapping[str, Tensor], tokens: Tensor, outer: OuterSettings) -> dict[str, DecodedTensor]:
    """Return what a replica sends after one step of gradient descent on the tokens."""
    module = build_filled(SHAPE, theta)
    module.loss(tokens[:, :-1], tokens[:, 1:]).backward()
    sent = {}
    for name, parameter in parameters_of(module).items():
        assert parameter.grad is not None
        selection = select(torch.zeros_like(parameter), parameter.grad, outer.compression)
        sent[name] = DecodedTensor(selection.indices, selection.values)
    return sent


@pytest.mark.parametrize(
    "outer",
    [SPARSE, OuterSettings(rounds=1, method="demo", compression=CompressionSettings(transform="dct", density=0.25))],
)
def test_the_losses_are_those_of_the_outer_step_on_this_contribution_alone(outer: OuterSettings) -> None:
    theta, assigned, other, rate = _theta(), _tokens(1), _tokens(2), 0.05
    kept = {name: tensor.clone() for name, tensor in theta.items()}
    sent = _trained(theta, assigned, outer)
    found = losses_of(theta, sent, SHAPE, assigned, other, rate, outer)
    assert all(torch.equal(theta[name], tensor) for name, tensor in kept.items())

    optimizer = OuterOptimizer(outer.model_copy(update={"learning_rate": rate}))
    optimizer.begin(1, {"r0": 1.0})
    for name, tensor in kept.items():
        optimizer.take(kept, name, mean_of(tuple(tensor.shape), [(1.0, sent[name])]))
    before, after = build_filled(SHAPE, theta), build_filled(SHAPE, kept)
    for tokens, one, then in (
        (assigned, found.assigned_before, found.assigned_after),
        (other, found.other_before, found.other_after),
    ):
        assert one == pytest.approx(before.loss(tokens[:, :-1], tokens[:, 1:]).item(), rel=1e-6)
        assert then == pytest.approx(after.loss(tokens[:, :-1], tokens[:, 1:]).item(), rel=1e-6)


def test_assigned_text_improves_clearly_more_than_other_text() -> None:
    theta, assigned, other = _theta(), _tokens(1, 8), _tokens(2, 8)
    found = losses_of(theta, _trained(theta, assigned, SPARSE), SHAPE, assigned, other, 1.0, SPARSE)
    gains = found.assigned_before - found.assigned_after, found.other_before - found.other_after
    assert gains[0] > gains[1]
    assert (gains[0] / found.assigned_before - gains[1] / found.other_before) > 2 * found.error > 0
    swapped = losses_of(theta, _trained(theta, assigned, SPARSE), SHAPE, other, assigned, 1.0, SPARSE)
    assert swapped.error == pytest.approx(found.error)


@pytest.mark.parametrize("size", [1e3, 1e10])
def test_a_contribution_that_breaks_the_model_has_losses_that_the_exchange_takes(size: float) -> None:
    theta, tokens = _theta(), _tokens(1)
    noise, sent = torch.Generator().manual_seed(5), {}
    for name, one in theta.items():
        sent[name] = DecodedTensor(torch.arange(one.numel()), size * torch.randn(one.numel(), generator=noise))
    losses = losses_of(theta, sent, SHAPE, tokens, tokens, 1.0, SPARSE)
    assert complaint(Judgement(round=1, replica="r", losses=losses), {"r.0": "r"}) is None
    book = ReplicaScores(GauntletSettings(), ["r"])
    book.update(RoundFacts(1, frozenset("r"), frozenset(), {}, {}), {"r": losses})
    assert book.scores()["r"].average == 0


def _contributions(outer: OuterSettings) -> dict[str, dict[str, DecodedTensor]]:
    """Return contributions of three honest replicas, whose text is partly the same."""
    common = _tokens(9, 6)
    return {f"r{index}": _trained(_theta(), torch.cat([common, _tokens(index, 6)]), outer) for index in range(3)}


DENSE = OuterSettings(rounds=1, method="diloco")


@pytest.mark.parametrize("outer", [SPARSE, DENSE])
def test_a_copy_is_found_with_noise_and_if_all_values_are_sent(outer: OuterSettings) -> None:
    sent = _contributions(outer)
    assert overlap(sent["r0"], sent["r0"]) == pytest.approx(1)
    assert overlapping(sent, 0.4) == []
    noisy = {name: _disguised(one, 0.3) for name, one in sent["r1"].items()}
    assert overlapping({**sent, "late": noisy}, 0.4) == [("late", "r1")]


@pytest.mark.parametrize("pair", [("honest", "twin"), ("twin", "honest")])
@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_the_copy_is_the_one_whose_text_the_contributions_do_not_show(pair: tuple[str, str], noise: float) -> None:
    theta, texts = _theta(), {"honest": _tokens(1, 16), "twin": _tokens(2, 16)}
    sent = {"honest": _trained(theta, texts["honest"], SPARSE)}
    sent["twin"] = {name: _disguised(one, noise) for name, one in sent["honest"].items()}

    def found(assigned: Mapping[str, Tensor]) -> str | None:
        return copy_of(pair, sent, theta, SHAPE, (assigned[pair[0]], assigned[pair[1]]), 1.0, SPARSE)

    assert found(texts) == "twin"
    unclear = {name: torch.cat([_tokens(9, 30), tokens[:2]]) for name, tokens in texts.items()}
    assert found(unclear) is None, "the two texts are nearly the same"
    assert found(dict.fromkeys(texts, texts["honest"])) is None
    assert found({"honest": _tokens(3, 16), "twin": texts["twin"]}) is None, "it was trained on neither"


def _disguised(one: DecodedTensor, noise: float) -> DecodedTensor:
    generator = torch.Generator().manual_seed(4)
    drawn = torch.randn(one.values.shape, generator=generator)
    return DecodedTensor(one.indices, one.values + noise * one.values.abs().mean() * drawn)


def _noisy(batches: Mapping[str, float]) -> dict[str, dict[str, DecodedTensor]]:
    """Return contributions of a common signal and of noise that falls with the batch, over 20,000 values."""
    generator, indices = torch.Generator().manual_seed(1), torch.arange(20_000)
    signal = torch.randn(20_000, generator=generator)
    return {
        name: {"w": DecodedTensor(indices, signal + batch**-0.5 * torch.randn(20_000, generator=generator))}
        for name, batch in batches.items()
    }


@pytest.mark.parametrize("small", [2, 1, 6])
def test_two_replicas_with_large_batches_are_no_copies_of_each_other(small: int) -> None:
    sent = _noisy({"a": 8.0, "b": 8.0} | {f"s{number}": 1.0 for number in range(small)})
    assert overlap(sent["a"], sent["b"]) > 0.85 > 0.7 > overlap(sent["a"], sent["s0"])
    assert overlapping(sent, 0.4) == []
    assert overlapping({**sent, "late": sent["s0"]}, 0.4) == [("late", "s0")]


@pytest.mark.parametrize("honest", [3, 6])
def test_a_replica_that_sends_the_opposite_makes_no_copies_of_others(honest: int) -> None:
    sent = _noisy({f"h{number}": 4.0 for number in range(honest)} | {"flips": 4.0})
    sent["flips"]["w"] = sent["flips"]["w"].scaled(-1.0)
    assert overlap(sent["h0"], sent["h1"]) > 0.75 > -0.75 > overlap(sent["h0"], sent["flips"])
    assert overlapping(sent, 0.4) == []
