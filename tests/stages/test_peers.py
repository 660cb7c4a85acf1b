"""Published boundaries of others: their formulas, gradients as by autograd, and their costs."""

from __future__ import annotations

import pytest
import torch
from scipy.linalg import hadamard
from torch import Tensor

from hetero_pp.core.errors import ConfigError
from hetero_pp.model.inner import InnerSettings
from hetero_pp.model.part_settings import BoundarySettings
from hetero_pp.model.transformer import ModelSettings
from hetero_pp.pipeline.coefficients import noise_key
from hetero_pp.research.settings import PeerSettings
from hetero_pp.research.trainer.peers import Mapl, Peer, ResBM, TahQuant, bytes_per_token, peer_of

SHAPE = ModelSettings(width=64, heads=2, feed_forward=64, layers=3).resolve(50)
INNER = InnerSettings(learning_rate=0.01, warmup_steps=0, final_learning_rate_share=1.0)
KEY = noise_key(1, "home", 0, 0, 0)


def _asked(method: str, **more: object) -> PeerSettings:
    return PeerSettings.model_validate({"method": method, **more})


def _boundary(**cells: object) -> BoundarySettings:
    return BoundarySettings.model_validate({"dtype": "fp32", **cells})


def _peer(method: str, **cells: object) -> Peer:
    found = peer_of(_asked(method), _boundary(**cells), SHAPE, 2, INNER, 100, 7)
    assert found is not None
    return found


def _batch(seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, 5, 64, generator=generator), torch.randint(50, (2, 5), generator=generator)


def test_resbm_starts_at_the_identity_of_its_first_dimensions_and_learns_more() -> None:
    peer, (x, tokens) = _peer("resbm", rank=8), _batch()
    assert isinstance(peer, ResBM)
    expected = torch.cat([x[..., :8], torch.zeros(2, 5, 56)], -1)
    torch.testing.assert_close(peer.cross(0, x, tokens, KEY), expected, atol=0.05, rtol=0)
    before = (peer.cross(0, x, tokens, KEY) - x).square().mean().item()
    for step in range(50):
        (peer.cross(0, x, tokens, KEY) - x).square().mean().backward()
        peer.step(step)
    assert (peer.cross(0, x, tokens, KEY) - x).square().mean().item() < 0.9 * before
    torch.testing.assert_close(peer.cross(1, x, tokens, KEY), expected, atol=0.05, rtol=0)  # it had no gradient


def test_what_crosses_is_rounded_both_ways() -> None:
    """With one number in bf16, the output and its gradient have at most eight bits."""
    peer, (x, tokens) = _peer("mapl", rank=1, dtype="bf16"), _batch()
    assert isinstance(peer, Mapl)
    x.requires_grad_()
    projection = peer.projections["projection.0"].detach()
    out = peer.cross(0, x, tokens, KEY)
    z = (x @ projection).bfloat16().float()
    torch.testing.assert_close(out, z @ projection.T)
    gradient = torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(3))
    out.backward(gradient)
    assert x.grad is not None
    torch.testing.assert_close(x.grad, (gradient @ projection).bfloat16().float() @ projection.T)


def test_mapl_subtracts_the_senders_table_and_adds_the_receivers() -> None:
    peer, (x, tokens) = _peer("mapl", rank=4), _batch()
    assert isinstance(peer, Mapl)
    with torch.no_grad():
        for stage in range(3):
            peer.parameters[f"table.{stage}"].normal_(generator=torch.Generator().manual_seed(stage))
    projection, tables = peer.projections["projection.1"], [peer.parameters[f"table.{stage}"] for stage in range(3)]
    sent = tables[1][tokens] @ peer.expansions[1]
    expected = (x - sent) @ projection @ projection.T + tables[2][tokens] @ peer.expansions[2]
    torch.testing.assert_close(peer.cross(1, x, tokens, KEY), expected)


def test_mapl_learns_and_its_projections_stay_orthonormal() -> None:
    """Activations have four dimensions, and the projections turn towards these."""
    inner = INNER.model_copy(update={"learning_rate": 0.1})
    peer = peer_of(_asked("mapl"), _boundary(rank=4), SHAPE, 2, inner, 400, 7)
    assert isinstance(peer, Mapl)
    generator = torch.Generator().manual_seed(2)
    within, (_, tokens) = torch.randn(4, 64, generator=generator) / 8, _batch()
    losses = []
    for step in range(400):
        x = torch.randn(2, 5, 4, generator=generator) @ within
        loss = (peer.cross(0, x, tokens, KEY) - x).square().mean()
        loss.backward()
        losses.append(loss.item())
        peer.step(step)
    assert sum(losses[-20:]) < 0.3 * sum(losses[:20])
    projection = peer.projections["projection.0"].detach()
    torch.testing.assert_close(projection.T @ projection, torch.eye(4), atol=1e-5, rtol=0)
    assert all(parameter.grad is None for parameter in peer.parameters.values())


def test_tah_quant_rounds_to_3_or_4_bits_and_rotates_what_stands_out() -> None:
    x, quantiser = _batch()[0], TahQuant(share=0.6)
    x[0, 0, 17] = 40.0  # it also has the lowest entropy
    found = quantiser.activation(x)
    levels = [len(found[b, t].unique()) for b in range(2) for t in range(5) if (b, t) != (0, 0)]
    assert (
        sorted(level > 8 for level in levels).count(True) == 2 * 3
    )  # three of five tokens in each sequence have 4 bits
    assert all(level <= 16 for level in levels)
    matrix = torch.tensor(hadamard(64), dtype=torch.float32) / 8
    moved = x[0, 0].clone()
    moved[[0, 17]] = moved[[17, 0]]
    rotated = moved @ matrix
    scale = (rotated.max() - rotated.min()) / 7
    rounded = ((rotated - rotated.min()) / scale).round() * scale + rotated.min()
    expected = rounded @ matrix
    expected[[0, 17]] = expected[[17, 0]]
    torch.testing.assert_close(found[0, 0], expected, atol=2e-2, rtol=0)  # scale and least value are fp16
    assert (found[0, 0] - x[0, 0]).abs().max() < 2.5


def test_tah_quants_gradients_are_fixed_point() -> None:
    x = _batch()[0].requires_grad_()
    gradient = _batch(5)[0] * 1e-7
    peer = _peer("tah_quant")
    peer.cross(0, x, _batch()[1], KEY).backward(gradient)
    assert x.grad is not None
    tiles = gradient.unflatten(-1, (-1, 32))
    scale = tiles.abs().amax(-1, keepdim=True).bfloat16().float()
    found = x.grad.unflatten(-1, (-1, 32))
    torch.testing.assert_close(found / scale, tiles / scale, atol=0.04, rtol=0)  # the largest has no level of its own
    assert len((x.grad[0, 0, :32] / scale[0, 0, 0]).unique()) <= 64


def test_what_they_cost() -> None:
    def cost(method: str, **cells: object) -> tuple[float, float]:
        return bytes_per_token(_asked(method), _boundary(**cells), 64, 512)

    assert cost("resbm", rank=8, dtype="bf16") == (16.0, 16.0)
    assert cost("mapl", rank=7, dtype="bf16") == (15.75, 15.75)  # A [64, 7] in bf16 once in 512 tokens: 1.75
    assert cost("tah_quant") == (64 * 3.8 / 8 + 5, 52.0)
    few = _asked("tah_quant", four_bits=0.375, gradient_bits=3)
    assert bytes_per_token(few, _boundary(), 64, 512) == (32.0, 28.0)


def test_ranks_that_cannot_be_are_told() -> None:
    with pytest.raises(ConfigError, match="found 4, expected `full`"):
        _peer("tah_quant", rank=4)
    with pytest.raises(ConfigError, match="found `full`, expected a number"):
        _peer("mapl")
    assert peer_of(None, BoundarySettings(), SHAPE, 2, INNER, 100, 7) is None
