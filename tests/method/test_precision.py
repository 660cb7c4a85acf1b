"""Products in bf16: what is bf16, what stays fp32, and what autograd keeps of it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hetero_pp.config.member_inputs import devices_of
from hetero_pp.config.run_config import RunConfig
from hetero_pp.config.spec import RunSpec
from hetero_pp.core import device
from hetero_pp.core.errors import ConfigError
from hetero_pp.model.arithmetic import Linear, compute_dtype
from hetero_pp.model.inner import InnerSettings
from hetero_pp.model.part_settings import Precision
from hetero_pp.model.transformer import ModelShape, Transformer, build_filled, initialise
from replica_groups.engines.plain import WholeReplica

SHAPE = ModelShape(width=32, layers=3, heads=2, feed_forward=48, vocabulary=64)
INNER = InnerSettings(learning_rate=0.01, warmup_steps=0)
TOKENS = torch.randint(SHAPE.vocabulary, (4, 17), generator=torch.Generator().manual_seed(1))


def _replica(dtype: torch.dtype | None, micro_batches: int = 1, recomputes: bool = False) -> WholeReplica:
    start = Transformer(SHAPE)
    initialise(start, 3)
    module = build_filled(SHAPE, start.state_dict(), compute_dtype=dtype, recomputes=recomputes)
    return WholeReplica("one", module, INNER, 10, micro_batches)


def _gradients(replica: WholeReplica, tokens: Tensor = TOKENS) -> dict[str, Tensor]:
    replica.backward(tokens, 0)
    return {name: p.grad for name, p in replica.parameters.items() if p.grad is not None}


def _kept_bytes(replica: WholeReplica) -> int:
    """Return the bytes that autograd keeps for a backward, without parameters."""
    sizes: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, nn.Parameter):
            sizes[tensor.data_ptr()] = tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda one: one):
        replica.loss(TOKENS)
    return sum(sizes.values())


def _bf16_outputs(module: nn.Module) -> set[str]:
    """Return the names of modules with outputs in bf16, filled by the next forward."""
    found: set[str] = set()
    for name, part in module.named_modules():
        if name:
            part.register_forward_hook(
                lambda _, __, output, name=name: found.add(name) if output.dtype == torch.bfloat16 else None
            )
    return found


def test_products_are_bf16_and_all_that_lasts_is_fp32() -> None:
    replica = _replica(torch.bfloat16)
    found = _bf16_outputs(replica.module)
    loss = replica.loss(TOKENS)
    parts = {name for name, part in replica.module.named_modules() if name and list(part.parameters())}
    assert found == parts - {"tok_embeddings", "layers", "lm_head"}, "the loss takes the head's weights"
    assert loss.dtype == torch.float32
    replica.inner_step(TOKENS, 0)
    [optimizer] = replica.optimizer.optimizers
    lasting = [*replica.parameters.values(), *(one for state in optimizer.state.values() for one in state.values())]
    assert len(lasting) == 4 * len(replica.parameters)
    assert {tensor.dtype for tensor in lasting} == {torch.float32}
    for state in optimizer.state.values():
        assert any(not one.equal(one.bfloat16().float()) for name, one in state.items() if name != "step")


def test_the_loss_is_that_of_logits_in_fp32() -> None:
    replica = _replica(torch.bfloat16)
    logits = replica.module(TOKENS[:, :-1])
    assert logits.dtype == torch.bfloat16
    loss = replica.loss(TOKENS)
    assert loss.item() == F.cross_entropy(logits.float().flatten(0, 1), TOKENS[:, 1:].flatten()).item()
    assert loss.item() != loss.bfloat16().item()


def test_gradients_of_micro_batches_are_summed_in_fp32() -> None:
    whole = _gradients(_replica(torch.bfloat16, micro_batches=4))
    sums = {name: torch.zeros_like(one) for name, one in whole.items()}
    for row in TOKENS:
        single = _replica(torch.bfloat16)
        (single.loss(row[None]) / 4).backward()
        for name, p in single.parameters.items():
            assert p.grad is not None
            sums[name] += p.grad
    for name, expected in sums.items():
        assert whole[name].equal(expected), name
        assert not expected.equal(expected.bfloat16().float()), name


def test_a_product_in_bf16_has_autograds_gradients_and_keeps_no_copy_of_the_weights() -> None:
    layer = Linear(8, 6)
    x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1)).bfloat16().requires_grad_()
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda one: one):
        y = layer(x)
    assert {one.dtype for one in kept if one.shape == layer.weight.shape} == {torch.float32}
    other = x.detach().clone().requires_grad_()
    weight = layer.weight.detach().clone().requires_grad_()
    expected = F.linear(other, weight.to(torch.bfloat16))
    assert y.equal(expected)
    for out in (y, expected):
        out.float().square().sum().backward()
    for one, as_autograd in ((x, other), (layer.weight, weight)):
        assert one.grad is not None and as_autograd.grad is not None
        torch.testing.assert_close(one.grad, as_autograd.grad, rtol=0.01, atol=1e-3)
        assert one.grad.dtype == one.dtype


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_recomputed_layers_have_the_same_bits_and_keep_only_their_inputs(dtype: torch.dtype | None) -> None:
    kept = {recomputes: _kept_bytes(_replica(dtype, recomputes=recomputes)) for recomputes in (False, True)}
    tokens, size = TOKENS[:, 1:].numel(), 4 if dtype is None else 2
    inputs = SHAPE.layers * tokens * SHAPE.width * size
    assert inputs < kept[True] < inputs + tokens * (3 * SHAPE.width * size + 8 * SHAPE.vocabulary), "beside the loss"
    assert kept[False] > 3 * kept[True]
    plain, again = _gradients(_replica(dtype)), _gradients(_replica(dtype, recomputes=True))
    for name, gradient in plain.items():
        assert again[name].equal(gradient), name


@pytest.mark.parametrize(
    ("precision", "kind", "has", "expected"),
    [
        ("auto", "cpu", True, torch.float32),
        ("bf16", "cpu", False, torch.bfloat16),
        ("auto", "mps", True, torch.bfloat16),
        ("auto", "mps", False, torch.float32),
        ("fp32", "mps", True, torch.float32),
        ("bf16", "mps", True, torch.bfloat16),
    ],
)
def test_a_device_decides_what_auto_is(
    precision: Precision, kind: str, has: bool, expected: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_macos_or_newer", lambda *_: has)
    assert compute_dtype(precision, torch.device(kind)) == expected


def test_bf16_on_a_device_without_it_is_refused_with_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_macos_or_newer", lambda *_: False)
    monkeypatch.setattr(device, "accelerators", lambda: [torch.device("mps", 0)])
    replicas = [{"name": name, "kind": "datacenter", "precision": "bf16"} for name in ("a", "b")]
    replicas[0]["device"] = "cpu"
    spec = RunSpec(RunConfig.model_validate({"name": "r", "outer": {"rounds": 1}, "replicas": replicas}), 256)
    assert devices_of(spec, ["a"]) == {"a": torch.device("cpu")}
    with pytest.raises(ConfigError) as refused:
        devices_of(spec, ["a", "b"])
    assert refused.value.key == ("replicas", 1, "precision")
    assert refused.value.message == "found `bf16` on mps:0, which lacks it; expected `fp32` or `auto`"
