"""Loss from hidden states, computed in pieces of tokens, so that neither all logits nor their gradient ever exist.

Shapes: B sequences, L positions, D width, V vocabulary, T = B L tokens, R tokens of a piece.

The forward also computes the gradients of a piece, as Liger-Kernel does, so nothing is computed twice (Hsu et al. 2024,
arXiv 2410.10989).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hetero_pp.model.precision import product

PIECE_BYTES = 128 * 2**20
"""Largest size of a piece's logits in fp32; a piece needs up to three times this."""


def next_token_loss(logits_BLV: Tensor, targets_BL: Tensor) -> Tensor:
    """Return the mean cross entropy in nats."""
    return F.cross_entropy(logits_BLV.flatten(0, 1).float(), targets_BL.flatten())


def loss_of_hidden(x_BLD: Tensor, head_VD: Tensor, targets_BL: Tensor, piece_bytes: int = PIECE_BYTES) -> Tensor:
    """Return the mean cross entropy in nats of the logits that the head's weights give for hidden states.

    Logits that fit into one piece are computed at once, with the same bits as by `next_token_loss`.
    """
    rows = piece_rows(len(head_VD), piece_bytes)
    if targets_BL.numel() <= rows:
        return next_token_loss(product(x_BLD, head_VD), targets_BL)
    x_TD, targets_T = x_BLD.flatten(0, 1), targets_BL.flatten()
    if torch.is_grad_enabled():
        loss: Tensor = _LossInPieces.apply(x_TD, head_VD, targets_T, rows)
        return loss
    head_VD = head_VD.to(x_BLD.dtype)
    losses = [
        -_log_probabilities(x_RD, head_VD).gather(1, t_R[:, None]).sum() for x_RD, t_R in _pieces(x_TD, targets_T, rows)
    ]
    return torch.stack(losses).sum() / len(targets_T)


def piece_rows(vocabulary: int, piece_bytes: int = PIECE_BYTES) -> int:
    """Return the number of tokens of a piece, a multiple of 128 if it is larger, because GPUs like that."""
    rows = max(1, piece_bytes // (4 * vocabulary))
    return rows - rows % 128 if rows > 128 else rows


def _pieces(x_TD: Tensor, targets_T: Tensor, rows: int) -> Iterator[tuple[Tensor, Tensor]]:
    return zip(x_TD.split(rows), targets_T.split(rows), strict=True)


def _log_probabilities(x_RD: Tensor, head_VD: Tensor) -> Tensor:
    return F.log_softmax(F.linear(x_RD, head_VD).float(), dim=-1)


class _LossInPieces(torch.autograd.Function):
    """Mean cross entropy [] of hidden states [T, D]; the gradient of the head is summed over pieces in fp32."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, head_VD: Tensor, targets_T: Tensor, rows: int) -> Tensor:
        cast_VD, count = head_VD.to(x_TD.dtype), len(targets_T)
        of_x, of_head = [], torch.zeros_like(head_VD, dtype=torch.float32)
        total = torch.zeros((), device=x_TD.device)
        for x_RD, targets_R in _pieces(x_TD, targets_T, rows):
            found_RV = _log_probabilities(x_RD, cast_VD)
            total -= found_RV.gather(1, targets_R[:, None]).sum()
            ones = torch.ones_like(targets_R[:, None], dtype=torch.float32)
            found_RV = found_RV.exp_().scatter_add_(1, targets_R[:, None], -ones)
            gradient_RV = found_RV.div_(count).to(x_TD.dtype)
            of_x.append(gradient_RV @ cast_VD)
            of_head += gradient_RV.T @ x_RD
        ctx.save_for_backward(torch.cat(of_x), of_head.to(head_VD.dtype))
        return total / count

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        of_x, of_head = ctx.saved_tensors
        return of_x * gradients[0].to(of_x.dtype), of_head.mul_(gradients[0]), None, None
