"""The loss in pieces of tokens, compared with that of all logits at once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hetero_pp.model import arithmetic
from hetero_pp.model.arithmetic import gradient_of_logits, loss_of_hidden, next_token_loss, piece_rows

ROWS, LENGTH, WIDTH, VOCABULARY = 3, 50, 16, 70
TOKENS = ROWS * LENGTH
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a piece have 13 tokens, of which the last has fewer."""
    monkeypatch.setattr(arithmetic, "PIECE_BYTES", 4 * VOCABULARY * 13 + 7)
    assert piece_rows(VOCABULARY) == 13


def _inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS, LENGTH, WIDTH, generator=generator).to(dtype).requires_grad_()
    head = torch.randn(VOCABULARY, WIDTH, generator=generator).requires_grad_()
    return x, head, torch.randint(VOCABULARY, (ROWS, LENGTH), generator=generator)


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_piece_has_the_bits_of_all_logits_at_once(dtype: torch.dtype) -> None:
    for_pieces, for_all = _inputs(dtype), _inputs(dtype)
    one = loss_of_hidden(*for_pieces)
    x, head, targets = for_all
    other = next_token_loss(x @ head.to(dtype).T, targets)
    assert one.equal(other)
    one.backward()
    other.backward()
    for ours, theirs in zip(for_pieces[:2], for_all[:2], strict=True):
        assert ours.grad is not None and theirs.grad is not None
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=0 if dtype == torch.float32 else 1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_pieces_agree_with_all_logits_at_once(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient of the head is summed in fp32 over pieces of bf16 products."""
    at_once = _inputs(dtype)
    expected = loss_of_hidden(*at_once)
    (expected / 4).backward()
    monkeypatch.setattr(arithmetic, "PIECE_BYTES", 4 * VOCABULARY * 13)
    in_pieces = _inputs(dtype)
    found = loss_of_hidden(*in_pieces)
    (found / 4).backward()
    assert found.dtype == torch.float32
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)
    with torch.no_grad():
        assert loss_of_hidden(*in_pieces).equal(found)
    for ours, theirs in zip(in_pieces[:2], at_once[:2], strict=True):
        assert ours.grad is not None and theirs.grad is not None
        assert ours.grad.dtype == ours.dtype
        error = (ours.grad - theirs.grad).abs().max() / theirs.grad.abs().max()
        assert error < (1e-6 if dtype == torch.float32 else 4e-3)


@pytest.mark.usefixtures("small_pieces")
def test_the_sum_over_pieces_is_rounded_to_fp32_only() -> None:
    """In bf16, a sum over 12 pieces would lose 3 of 8 bits."""
    x, head, targets = _inputs(torch.bfloat16)
    loss_of_hidden(x, head, targets).backward()
    assert head.grad is not None
    parts = torch.zeros(VOCABULARY, WIDTH)
    for x_RD, targets_R in zip(x.flatten(0, 1).split(13), targets.flatten().split(13), strict=True):
        logits = (x_RD @ head.bfloat16().T).detach().float().requires_grad_()
        (next_token_loss(logits[None], targets_R[None]) * len(targets_R) / TOKENS).backward()
        assert logits.grad is not None
        parts += logits.grad.bfloat16().T @ x_RD.detach()
    torch.testing.assert_close(head.grad, parts, rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_of_the_size_of_all_logits_is_kept(dtype: torch.dtype) -> None:
    kept: list[int] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda one: one):
        loss_of_hidden(*_inputs(dtype))
    assert sorted(kept) == [VOCABULARY * WIDTH, TOKENS * WIDTH], "the gradients of the head and of hidden states"


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_compiled_gradient_serves_a_single_piece_too(dtype: torch.dtype) -> None:
    """The fused loss is faster than torch's even if all logits fit into one piece."""
    pieces: list[int] = []

    def compiled(logits_RV: Tensor, targets_R1: Tensor, count: int) -> tuple[Tensor, Tensor]:
        pieces.append(len(logits_RV))
        return gradient_of_logits(logits_RV, targets_R1, count)

    ours, theirs = _inputs(dtype), _inputs(dtype)
    found, expected = loss_of_hidden(*ours, compiled), loss_of_hidden(*theirs)
    assert pieces == [TOKENS]
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)
    found.backward()
    expected.backward()
    for mine, other in zip(ours[:2], theirs[:2], strict=True):
        assert mine.grad is not None and other.grad is not None
        error = (mine.grad - other.grad).abs().max() / other.grad.abs().max()
        assert error < (1e-6 if dtype == torch.float32 else 4e-3)


def test_pieces_are_multiples_of_128_tokens() -> None:
    assert piece_rows(32000) % 128 == 0
    assert 4 * 32000 * piece_rows(32000) <= arithmetic.PIECE_BYTES < 4 * 32000 * (piece_rows(32000) + 128)
    assert piece_rows(2**40) == 1
    assert 4 * 32000 * piece_rows(32000, True) <= arithmetic.ACCELERATOR_PIECE_BYTES
    assert piece_rows(32000, True) > 3.9 * piece_rows(32000)
