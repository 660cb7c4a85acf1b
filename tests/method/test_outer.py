"""The outer step, and the hashes that replicas compare, by hand."""

from __future__ import annotations

import hashlib
import math
import struct
from typing import Any, get_args

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from hetero_pp.model.inner import InnerSettings
from hetero_pp.outer.gradient import GradientOptimizer
from hetero_pp.outer.methods import METHODS, OuterSettings, change_method
from hetero_pp.outer.step import OuterOptimizer, mean_of, outer_step, parameter_of, parameter_sha256, parameters_sha256
from hetero_pp.pseudo_gradient.compression import CompressionSettings
from hetero_pp.pseudo_gradient.contribution import DecodedTensor
from hetero_pp.pseudo_gradient.error_feedback import select
from hetero_pp.research.trainer.contributions import drop_largest


def _sparse(*pairs: tuple[int, float]) -> DecodedTensor:
    indices, values = zip(*pairs, strict=True)
    return DecodedTensor(torch.tensor(indices), torch.tensor(values, dtype=torch.float32))


def test_the_mean_over_all_replicas_or_over_those_that_sent_a_coordinate() -> None:
    """A sent zero says that the coordinate should stay, which differs from sending nothing for it."""
    equal = [(1.0, _sparse((0, 3.0), (3, 1.0))), (1.0, _sparse((3, 5.0))), (1.0, _sparse((5, -6.0)))]
    assert mean_of((2, 3), equal).tolist() == [[1, 0, 0], [2, 0, -2]]
    weighted = [(1.0, _sparse((0, 3.0), (2, 1.0))), (3.0, _sparse((0, 7.0)))]
    assert mean_of((4,), weighted, "senders").tolist() == [6.0, 0.0, 1.0, 0.0]
    assert mean_of((4,), weighted, "replicas").tolist() == [6.0, 0.0, 0.25, 0.0]
    for zero in (0.0, -0.0):
        zeros = [(1.0, _sparse((0, zero), (1, 4.0), (2, zero))), (3.0, _sparse((0, 8.0))), (1.0, _sparse((1, zero)))]
        assert mean_of((4,), zeros, "senders").tolist() == [6.0, 2.0, 0.0, 0.0]


@pytest.mark.parametrize("replicas", [1, 3, 7])
def test_the_mean_of_many_in_the_order_given(replicas: int) -> None:
    """Compares bits with numpy float32, one contribution after another."""
    generator = torch.Generator().manual_seed(replicas)
    parts = []
    for index in range(replicas):
        where = torch.randperm(60, generator=generator)[:40]
        values = torch.randn(40, generator=generator) * 10 ** (index % 3)
        parts.append((1.0 + index / 3, DecodedTensor(where, values)))
    for order in (parts, parts[::-1]):
        total, weights = np.zeros(60, dtype=np.float32), 0.0
        for weight, decoded in order:
            dense = np.zeros(60, dtype=np.float32)
            dense[decoded.indices.numpy()] = decoded.values.numpy() * np.float32(weight)
            total, weights = total + dense, weights + weight
        assert mean_of((6, 10), order).flatten().tolist() == (total / np.float32(weights)).tolist()


def test_the_outer_step_is_two_rounded_operations() -> None:
    generator = torch.Generator().manual_seed(0)
    start, mean = torch.randn(1000, generator=generator), torch.randn(1000, generator=generator)
    expected = start.numpy() - mean.numpy() * np.float32(0.7)
    stepped = start.clone()
    outer_step(stepped, mean.clone(), 0.7)
    assert stepped.tolist() == expected.tolist()
    once = (start.double() - mean.double() * float(np.float32(0.7))).float()
    assert not torch.equal(stepped, once)  # as a fused multiply-add would give


@pytest.mark.parametrize(("momentum", "nesterov"), [(0.0, False), (0.9, False), (0.9, True)])
def test_outer_momentum_is_torchs(momentum: float, nesterov: bool) -> None:
    """The reference is in float64. Results agree to float32's error, because torch fuses multiply and add."""
    settings = OuterSettings(rounds=1, learning_rate=0.7, momentum=momentum, nesterov=nesterov)
    optimizer = OuterOptimizer(settings)
    generator = torch.Generator().manual_seed(0)
    ours = {name: torch.randn(30, generator=generator) for name in ("a", "b")}
    plain = {name: torch.nn.Parameter(tensor.double()) for name, tensor in ours.items()}
    sgd = torch.optim.SGD(plain.values(), lr=0.7, momentum=momentum, nesterov=nesterov)
    for _ in range(4):
        for name in ours:
            mean = torch.randn(30, generator=generator)
            plain[name].grad = mean.double()
            optimizer.take(ours, name, mean)
        sgd.step()
        for name, tensor in ours.items():
            torch.testing.assert_close(tensor.double(), plain[name].detach(), atol=2e-6, rtol=0)
    assert optimizer.momentum.keys() == (ours.keys() if momentum else set())


def test_outer_adam_is_torchs() -> None:
    settings = OuterSettings(rounds=4, learning_rate=0.3, optimizer="adam", betas=(0.9, 0.95), epsilon=0.1)
    optimizer = OuterOptimizer(settings)
    generator = torch.Generator().manual_seed(0)
    ours = {name: torch.randn(30, generator=generator) for name in ("a", "b")}
    plain = {name: torch.nn.Parameter(tensor.double()) for name, tensor in ours.items()}
    adam = torch.optim.Adam(plain.values(), lr=0.3, betas=(0.9, 0.95), eps=0.1)
    for round_ in range(1, 5):
        if round_ == 3:  # as from a run checkpoint
            state, optimizer = optimizer.state, OuterOptimizer(settings)
            optimizer.load(state, 2)
        optimizer.begin(round_, {})
        for name in ours:
            mean = torch.randn(30, generator=generator)
            plain[name].grad = mean.double()
            optimizer.take(ours, name, mean)
        adam.step()
        for name, tensor in ours.items():
            torch.testing.assert_close(tensor.double(), plain[name].detach(), atol=2e-6, rtol=0)
    assert {parameter_of(name) for name in optimizer.state} == {"a", "b"}
    assert len(optimizer.state) == 4


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_signs_are_taken_of_the_mean(momentum: float) -> None:
    optimizer = OuterOptimizer(OuterSettings(rounds=1, learning_rate=0.25, aggregation="sign", momentum=momentum))
    theta, mean = {"a": torch.zeros(4)}, torch.tensor([3.0, -1e-9, 0.0, 1e9])
    optimizer.take(theta, "a", mean.clone())
    first = theta["a"].tolist()
    assert first == [-0.25, 0.25, 0.0, -0.25]
    optimizer.take(theta, "a", mean.clone())
    assert theta["a"].tolist() == [x * (2 + momentum) for x in first]


def _rounds(
    method: str, deltas: torch.Tensor, drops: float = 0.0, **cells: Any
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return theta, and what each replica keeps, for these differences of shape [rounds, replicas, 8, 8].

    `drops`: share of the largest values that replicas drop from their momentum after each round.
    """
    settings = OuterSettings.model_validate({"rounds": len(deltas), "method": method, **cells})
    optimizer, theta = OuterOptimizer(settings), {"a": torch.zeros(8, 8)}
    kept = [torch.zeros(8, 8) for _ in deltas[0]]
    for round_, own in enumerate(deltas, 1):
        optimizer.begin(round_, {})
        sent = [select(memory, delta, settings.compression) for memory, delta in zip(kept, own, strict=True)]
        for memory in kept if drops else ():
            drop_largest(memory, drops, settings.compression)
        told = [(1.0, DecodedTensor(one.indices, one.values)) for one in sent]
        optimizer.take(theta, "a", mean_of((8, 8), told, settings.divides_by))
    return theta["a"], kept


DELTAS = torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def test_a_momentum_of_each_replica_is_the_papers() -> None:
    """SparseLoCo, section 2.2, in float64: with all of the momentum kept, and without its largest quarter."""
    for drops, selection in ((0.0, "top_k"), (0.25, "top_k"), (0.25, "random_k")):
        sends = {"selection": selection}  # selects all of it
        cells = {"compression": {"error_feedback_decay": 0.8, **sends}}
        theta, kept = _rounds("diloco_lom", DELTAS, drops, **cells)
        momenta, expected = [np.zeros(64) for _ in range(3)], np.zeros(64)
        for own in DELTAS.double().numpy().reshape(6, 3, 64):
            sent = []
            for index, delta in enumerate(own):
                momenta[index] = 0.8 * momenta[index] + delta
                sent.append(delta + 0.8 * momenta[index])
                largest = np.argsort(-np.abs(momenta[index]))[: int(64 * drops)]
                momenta[index][largest] = 0.0
            expected -= 0.6 * np.mean(sent, axis=0)
        np.testing.assert_allclose(theta.flatten().numpy(), expected, atol=1e-5)
        for ours, theirs in zip(kept, momenta, strict=True):
            np.testing.assert_allclose(ours.flatten().numpy(), theirs, atol=1e-5)
        assert sum(int((one == 0).sum()) for one in kept) == 3 * 64 * drops


def test_local_momenta_of_replicas_that_are_all_counted_are_the_global_one() -> None:
    """Both are linear, so SparseLoCo's Table 3 must have them equal."""
    theirs, _ = _rounds("diloco", DELTAS, learning_rate=0.6)
    ours, _ = _rounds("diloco_lom", DELTAS)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
    dropping, _ = _rounds("diloco_lom", DELTAS, drops=0.25)
    assert (dropping - theirs).abs().max() > 0.1


def test_sparseloco_that_sends_all_and_forgets_is_diloco_without_momentum() -> None:
    all_of_it = {"density": 1.0, "value_bits": 32, "error_feedback_decay": 0.0}
    ours, _ = _rounds("sparseloco", DELTAS, learning_rate=0.7, compression=all_of_it)
    theirs, _ = _rounds("diloco", DELTAS, momentum=0.0, nesterov=False)
    assert torch.equal(ours, theirs)


def test_the_outer_learning_rate_falls_as_a_cosine() -> None:
    settings = OuterSettings(rounds=12, learning_rate=0.5, warmup_rounds=2, final_learning_rate_share=0.2)
    falling = [0.5 * (0.2 + 0.8 * (1 + math.cos(math.pi * i / 10)) / 2) for i in range(10)]
    rates = [settings.learning_rate_in(round_) for round_ in range(1, 13)]
    assert rates == pytest.approx([0.25, 0.5, *falling], rel=1e-5)
    assert OuterSettings(rounds=12, learning_rate=1 / 3).learning_rate_in(7) == 1 / 3
    theta, optimizer = {"a": torch.zeros(1)}, OuterOptimizer(settings)
    optimizer.begin(7, {})
    optimizer.take(theta, "a", torch.ones(1))
    assert theta["a"].item() == pytest.approx(-rates[6], rel=1e-6)


@pytest.mark.parametrize(
    ("cells", "told"),
    [
        ({"method": "diloco", "optimizer": "adam"}, "diloco: found momentum 0.9 with `optimizer: adam`, .*expected 0"),
        ({"method": "adamw_ddp", "aggregation": "sign"}, "adamw_ddp: found `aggregation: sign` with averaged grad"),
        ({"method": "adamw_ddp", "optimizer": "adam"}, "adamw_ddp: found `optimizer: adam` with averaged gradients"),
        ({"method": "adamw_ddp", "compression": {"memory": "momentum"}}, "adamw_ddp: found `memory: momentum` with"),
        ({"method": "adamw_ddp", "overlap": 1}, "adamw_ddp: found overlap 1 with averaged gradients, .*expected 0"),
        (
            {"method": "diloco_lom", "momentum": 0.5},
            "diloco_lom: found momentum 0.5 beside .*expected only one momentum",
        ),
        ({"method": "diloco_lom", "optimizer": "adam"}, "diloco_lom: found `optimizer: adam` beside `compression.mem"),
        (
            {"method": "diloco_lom", "compression": {"density": 0.5}},
            "diloco_lom: found density 0.5 with .*expected density 1",
        ),
    ],
)
def test_parts_that_do_not_fit(cells: dict[str, Any], told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        OuterSettings.model_validate({"rounds": 1, **cells})


def test_a_round_has_the_outer_learning_rate_of_its_own() -> None:
    rates = [1.0, 0.5]
    ours = OuterOptimizer(
        OuterSettings(rounds=2), lambda round_: OuterSettings(rounds=2, learning_rate=rates[round_ - 1])
    )
    theta = {"a": torch.zeros(2)}
    for round_ in (1, 2):
        ours.begin(round_, {})
        ours.take(theta, "a", torch.tensor([1.0, -4.0]))
    assert theta["a"].tolist() == [-1.5, 6.0]


def test_averaged_gradients_are_adamws() -> None:
    """Compares warm-up, cosine, clipping and decay with torch.optim.AdamW over a run that changes on the way."""
    steps, inner = 6, InnerSettings(learning_rate=0.1, warmup_steps=3, clip_norm=1.0, weight_decay=0.2)
    later = inner.model_copy(update={"learning_rate": 0.3})
    planned = [(inner, steps)] * 4 + [(later, 2 * steps)] * 2  # a run that was extended, at another rate
    generator = torch.Generator().manual_seed(0)
    theta = {
        name: torch.randn(shape, generator=generator) for name, shape in (("a.weight", (4, 3)), ("b.weight", (5,)))
    }
    plain = {name: torch.nn.Parameter(tensor.clone()) for name, tensor in theta.items()}
    groups = [
        {"params": [plain["a.weight"]], "weight_decay": 0.2},
        {"params": [plain["b.weight"]], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, betas=inner.betas, eps=inner.epsilon)
    shapes = {name: tuple(tensor.shape) for name, tensor in theta.items()}
    settings = OuterSettings(rounds=steps, method="adamw_ddp")
    rates = [settings_then.rates(total) for settings_then, total in planned]
    ours = GradientOptimizer(settings, inner, steps, shapes, {}, lambda round_: rates[round_ - 1])
    for step in range(steps):
        for group in adamw.param_groups:
            group["lr"] = planned[step][0].rates(planned[step][1]).at(step)
        ours.begin(step + 1, {})
        for name, parameter in plain.items():
            mean = torch.randn(parameter.shape, generator=generator)
            parameter.grad = mean.clone()
            ours.take(theta, name, mean)
        torch.nn.utils.clip_grad_norm_(plain.values(), 1.0)
        adamw.step()
        ours.finish(theta)
        for name, parameter in plain.items():
            torch.testing.assert_close(theta[name], parameter.detach(), atol=1e-6, rtol=1e-5)


def test_a_method_fills_in_what_is_not_set() -> None:
    plain, diloco = OuterSettings(rounds=1), OuterSettings(rounds=1, method="diloco")
    assert (plain.learning_rate, plain.momentum, plain.compression.density) == (1.0, 0.0, 1 / 32)
    assert (diloco.learning_rate, diloco.momentum, diloco.nesterov) == (0.7, 0.9, True)
    assert (diloco.compression.density, diloco.compression.value_bits) == (1.0, 32)
    changed = OuterSettings(rounds=1, method="diloco", momentum=0.0, compression={"value_bits": 4})
    assert (changed.learning_rate, changed.momentum) == (0.7, 0.0)
    assert (changed.compression.density, changed.compression.value_bits) == (1.0, 4)


def test_hashes_by_hand() -> None:
    tensor = torch.tensor([[1.0, -2.5], [0.0, 3e-3]])
    by_hand = hashlib.sha256(struct.pack("<4f", 1.0, -2.5, 0.0, 3e-3)).digest()
    assert parameter_sha256(tensor) == by_hand
    assert parameter_sha256(torch.nn.Parameter(tensor)) == by_hand
    assert parameter_sha256(tensor.T.contiguous().T) == by_hand  # values in logical order, whatever their memory layout
    assert parameter_sha256(tensor.double()) == by_hand
    known = "df3f619804a92fdb4057192dc43dd748ea778adc52bc498ce80524c014b81119"
    assert parameter_sha256(torch.zeros(1)).hex() == known  # of four zero bytes
    negative_zero = torch.tensor([-0.0])
    assert parameter_sha256(negative_zero) != parameter_sha256(torch.zeros(1))


def test_the_hash_of_a_replica_by_hand() -> None:
    hashes = {"b": b"\1" * 32, "a": b"\2" * 32}
    expected = hashlib.sha256(b"a\0" + b"\2" * 32 + b"b\0" + b"\1" * 32).digest()
    assert parameters_sha256(hashes) == parameters_sha256(dict(sorted(hashes.items()))) == expected
    assert parameters_sha256({"a": b"\1" * 32, "b": b"\2" * 32}) != expected


def test_another_method_brings_its_own_cells() -> None:
    """The former method's cells of a section, such as a density, are replaced."""
    outer = {"rounds": 3, "learning_rate": 0.9, "compression": {"density": 1 / 32, "tile": [8, 8]}}
    change_method(outer, "diloco")
    found = OuterSettings.model_validate(outer)
    assert (found.rounds, found.learning_rate, found.compression.density) == (3, 0.7, 1.0)
    assert (found.compression.error_feedback_decay, found.compression.tile) == (0.0, (8, 8))
    outer["momentum"] = 0.3
    change_method(outer, "sparseloco_signs")
    assert OuterSettings.model_validate(outer) == OuterSettings(rounds=3, compression=CompressionSettings(tile=(8, 8)))
    same = {"method": "diloco", "momentum": 0.3}
    change_method(same, "diloco")
    assert same == {"method": "diloco", "momentum": 0.3}
    change_method(outer, "made up")
    assert outer["method"] == "made up"


def test_every_method_sets_the_cells_of_its_table() -> None:
    names = get_args(OuterSettings.model_fields["method"].annotation)
    assert list(METHODS) == list(names)
    for name, method in METHODS.items():
        told = OuterSettings.model_validate({"rounds": 3, "method": name, **method.cells})
        assert told == OuterSettings(rounds=3, method=name)


def test_methods_of_papers_have_the_papers_values() -> None:
    """Numbers are typed from Het-PP, section 3 and table 9, and from SparseLoCo, section 3 and tables 1 and 9."""
    found = {}
    for name in ("het_pp", "sparseloco", "sparseloco_signs"):
        outer = OuterSettings(rounds=1, method=name)
        own = outer.compression
        kept = own.density * own.tile[0] * own.tile[1]
        assert (own.tile, outer.optimizer, outer.aggregation) == ((64, 64), "sgd", "mean")
        found[name] = (
            kept,
            own.quantiser,
            own.value_bits,
            own.error_feedback_decay,
            outer.learning_rate,
            outer.momentum,
        )
    assert found == {
        "het_pp": (32, "levels", 32, 0.95, 1.0, 0.0),
        "sparseloco": (32, "levels", 2, 0.95, 1.0, 0.0),
        "sparseloco_signs": (128, "signs", 1, 0.95, 1.0, 0.0),
    }
    denser = OuterSettings.model_validate({"rounds": 1, "method": "sparseloco", "compression": {"density": "1/32"}})
    assert (denser.compression.density, denser.compression.value_bits) == (1 / 32, 2)
    assert OuterSettings(rounds=1) == OuterSettings(rounds=1, method="sparseloco_signs")
    assert {name for name in METHODS if OuterSettings(rounds=1, method=name).is_sparse} == found.keys()
