"""Projection, reconstruction and the split of the embedding, compared with closed formulas in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hetero_pp.pipeline.subspace import expand_gradient, perpendicular, project, random_basis, reconstruct

B, L, D, V = 2, 16, 32, 64


def _randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _tokens() -> Tensor:
    return torch.randint(V, (B, L), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("rank", [1, 5, 8, D])
def test_the_basis_is_orthonormal(rank: int) -> None:
    basis = random_basis(D, rank, seed=5)
    assert basis.shape == (D, rank) and basis.dtype == torch.float32
    gram = basis.double().T @ basis.double()
    torch.testing.assert_close(gram, torch.eye(rank, dtype=torch.float64), atol=1e-6, rtol=0)


def test_the_first_columns_are_a_basis_of_lower_rank() -> None:
    basis = random_basis(D, 8, seed=5)
    for rank in (1, 3, 8):
        narrow = basis[:, :rank].double()
        torch.testing.assert_close(narrow.T @ narrow, torch.eye(rank, dtype=torch.float64), atol=1e-6, rtol=0)
        # Subspaces are nested: the higher rank keeps what the lower rank keeps of x.
        x = _randn(10, D).double()
        kept = x @ narrow @ narrow.T
        torch.testing.assert_close(kept @ basis.double() @ basis.double().T, kept, atol=1e-6, rtol=0)


@pytest.mark.parametrize("rank", [1, 8, D])
def test_the_split_of_the_embedding(rank: int) -> None:
    embedding, basis = _randn(V, D), random_basis(D, rank, seed=5)
    rest = perpendicular(embedding, basis)
    within = embedding.double() @ basis.double() @ basis.double().T
    torch.testing.assert_close(rest.double(), embedding.double() - within, atol=2e-6, rtol=0)
    torch.testing.assert_close(within + rest.double(), embedding.double(), atol=2e-6, rtol=0)
    assert (rest.double() @ basis.double()).abs().max() < 2e-6
    assert rest.dtype == torch.float32


@pytest.mark.parametrize("rank", [1, 8])
def test_a_boundary_and_its_gradient_are_the_papers(rank: int) -> None:
    """Forward is (X - T_perp[x]) U U^T + T_perp[x]. Its gradient is compared with autograd in float64."""
    embedding, basis, tokens, upstream = _randn(V, D), random_basis(D, rank, seed=5), _tokens(), _randn(B, L, D, seed=4)
    x = _randn(B, L, D, seed=3)
    u = basis.double()
    rest = (embedding.double() - embedding.double() @ u @ u.T)[tokens]
    x64 = x.double().requires_grad_()
    expected = (x64 - rest) @ u @ u.T + rest
    (expected_gradient,) = torch.autograd.grad(expected, x64, upstream.double())

    table = perpendicular(embedding, basis)
    leaf = x.clone().requires_grad_()
    crossed = reconstruct(project(leaf, basis), basis, table, tokens)
    torch.testing.assert_close(crossed.double(), expected, atol=1e-5, rtol=0)
    (gradient,) = torch.autograd.grad(crossed, leaf, upstream)
    torch.testing.assert_close(gradient.double(), expected_gradient, atol=1e-5, rtol=0)
    by_hand = expand_gradient(project(upstream, basis), basis)
    torch.testing.assert_close(by_hand.double(), expected_gradient, atol=1e-5, rtol=0)


def test_what_the_receiver_differentiates_is_the_gradient_of_the_coefficients() -> None:
    basis, tokens, upstream = random_basis(D, 8, seed=5), _tokens(), _randn(B, L, D, seed=4)
    table = perpendicular(_randn(V, D), basis)
    coefficients = _randn(B, L, 8, seed=6).requires_grad_()
    (gradient,) = torch.autograd.grad(reconstruct(coefficients, basis, table, tokens), coefficients, upstream)
    torch.testing.assert_close(gradient, project(upstream, basis), atol=1e-5, rtol=0)
