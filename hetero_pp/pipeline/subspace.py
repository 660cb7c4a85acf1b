"""Subspace: the basis U, projection and reconstruction at a boundary, the split of the token embedding.

Shapes: B sequences, L positions, D width d, K rank k, V vocabulary. Source: Het-PP sections 2.2 and 2.4.

With P = U U^T, the token embedding TE splits into T_S = TE P (inside the subspace) and T_perp = TE (I - P). As T_perp U
= 0 in fp32, the paper's (X - T_perp[x]) U is X U, so a sender needs no table; the receiver adds T_perp[x].
"""

from __future__ import annotations

import torch
from torch import Tensor

from hetero_pp.core.seeds import seed_of

_ROWS = 512  # rows of a table that are split at once


def random_basis(width: int, rank: int, seed: int) -> Tensor:
    """Return U [D, K] with orthonormal columns: QR of a Gaussian matrix.

    The first k columns are the basis of rank k, so replicas and runs of different ranks share one U. It is drawn only
    once, for the first run checkpoint, because random numbers and QR may differ between machines.
    """
    generator = torch.Generator().manual_seed(seed_of(seed, "subspace"))
    directions = torch.randn(rank, width, generator=generator, dtype=torch.float64)  # rows: a larger rank adds some
    basis, _ = torch.linalg.qr(directions.T)
    return basis.to(torch.float32).contiguous()


def columns_of(basis: Tensor | None, rank: int | None) -> Tensor | None:
    """Return the columns of a run's basis [D, K'] that one boundary uses; None if the boundary is not compressed."""
    return None if rank is None or basis is None else basis[:, :rank].contiguous()


def project(x_BLD: Tensor, basis_DK: Tensor) -> Tensor:
    """Return the coefficients X U [B, L, K] of activations, or of their gradient."""
    return x_BLD @ basis_DK


def reconstruct(coefficients_BLK: Tensor, basis_DK: Tensor, perpendicular_VD: Tensor, tokens_BL: Tensor) -> Tensor:
    """Return C U^T + T_perp[x] [B, L, D]; its gradient with respect to C is G U."""
    rows = perpendicular_VD[tokens_BL.flatten()]
    flat = torch.addmm(rows, coefficients_BLK.flatten(0, 1), basis_DK.T)
    return flat.view(*tokens_BL.shape, -1)


def expand_gradient(gradient_BLK: Tensor, basis_DK: Tensor) -> Tensor:
    """Return the sender's gradient (G U) U^T [B, L, D] from its coefficients."""
    return gradient_BLK @ basis_DK.T


def perpendicular(embedding_VD: Tensor, basis_DK: Tensor, room_VD: Tensor | None = None) -> Tensor:
    """Return T_perp = TE - TE U U^T, [V, D] in fp32, from the synchronized TE (equations 3 and 4, solved for it).

    `room_VD` is overwritten and returned, if given. Some rows at a time stay in the cache.
    """
    table = embedding_VD.float()
    found = torch.empty_like(table) if room_VD is None else room_VD
    for start in range(0, len(table), _ROWS):
        rows = table[start : start + _ROWS]
        found[start : start + _ROWS] = rows - (rows @ basis_DK) @ basis_DK.T
    return found
