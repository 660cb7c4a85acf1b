"""Products in mixed precision, and the loss from hidden states.

Shapes: B sequences, L positions, D input width, F output width, V vocabulary, T = B L tokens, R tokens of a piece.

Parameters, their gradients, sums of gradients, moments and the loss are fp32, and products have the dtype of the
activations. Only copies of the parameters are cast, as in torchtitan's mixed precision (FSDP2 with bf16 parameters and
fp32 reduction). If activations have the dtype of the parameters, the modules here have the same bits as torch's.

The loss is computed in pieces of tokens, so that neither all logits nor their gradient ever exist. The forward also
computes the gradients of a piece, as Liger-Kernel does, so nothing is computed twice (Hsu et al. 2024, arXiv
2410.10989).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hetero_pp.core.errors import ConfigError
from hetero_pp.model.part_settings import Precision

PIECE_BYTES = 128 * 2**20  # largest size of a piece's logits in fp32 on a CPU; a piece needs about twice as much in all
ACCELERATOR_PIECE_BYTES = 512 * 2**20
"""The same on an accelerator. With smaller pieces, summing the head's gradient over pieces costs more than 1 % of a
step of the 512m model on an H200 (benchmarks/gpu.py)."""


def compute_dtype(precision: Precision, device: torch.device) -> torch.dtype:
    """Return the dtype of the layers' arithmetic; `auto` is bf16 on an accelerator that has it, fp32 elsewhere.

    Raises ConfigError for bf16 on a device that lacks it.
    """
    if precision == "auto":
        return torch.bfloat16 if _is_fast_in_bf16(device) else torch.float32
    if precision == "bf16" and device.type == "mps" and not _is_fast_in_bf16(device):
        raise ConfigError(("precision",), f"found `bf16` on {device}, which lacks it; expected `fp32` or `auto`")
    return torch.bfloat16 if precision == "bf16" else torch.float32


def _is_fast_in_bf16(device: torch.device) -> bool:
    match device.type:
        case "cuda":
            with torch.cuda.device(device):
                return torch.cuda.is_bf16_supported(including_emulation=False)
        case "xpu":
            return torch.xpu.is_bf16_supported(including_emulation=False)
        case "mps":
            return torch.backends.mps.is_macos_or_newer(14, 0)
    return False


class Linear(nn.Linear):
    """Product with the weights in the dtype of the input; it has no bias."""

    def __init__(self, width: int, features: int) -> None:
        super().__init__(width, features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return product(x, self.weight)


class RMSNorm(nn.RMSNorm):
    """Norm with the weights in the dtype of the input."""

    def forward(self, x: Tensor) -> Tensor:
        weight = None if self.weight is None else self.weight.to(x.dtype)
        return F.rms_norm(x, self.normalized_shape, weight, self.eps)


def product(x_BLD: Tensor, weight_FD: Tensor) -> Tensor:
    """Return x W^T [B, L, F] in the dtype of x."""
    if x_BLD.dtype == weight_FD.dtype:
        return F.linear(x_BLD, weight_FD)
    out: Tensor = _CastProduct.apply(x_BLD, weight_FD)
    return out


class _CastProduct(torch.autograd.Function):
    """Product with weights of another dtype.

    The backward casts the weights again. Autograd would keep a copy for every micro-batch in flight.
    """

    @staticmethod
    def forward(ctx: Any, x_BLD: Tensor, weight_FD: Tensor) -> Tensor:
        ctx.save_for_backward(x_BLD, weight_FD)
        return F.linear(x_BLD, weight_FD.to(x_BLD.dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None]:
        [gradient_BLF] = gradients
        x_BLD, weight_FD = ctx.saved_tensors
        of_x, of_weight = ctx.needs_input_grad
        own = gradient_BLF.flatten(0, -2).T @ x_BLD.flatten(0, -2) if of_weight else None
        return (
            gradient_BLF @ weight_FD.to(gradient_BLF.dtype) if of_x else None,
            None if own is None else own.to(weight_FD.dtype),
        )


# ---- the loss ----


def next_token_loss(logits_BLV: Tensor, targets_BL: Tensor) -> Tensor:
    """Return the mean cross entropy in nats."""
    return F.cross_entropy(logits_BLV.flatten(0, 1).float(), targets_BL.flatten())


def gradient_of_logits(logits_RV: Tensor, targets_R1: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the summed cross entropy of a piece, and the gradient of its mean over `count` tokens, as the logits."""
    found_RV = F.log_softmax(logits_RV.float(), dim=-1)
    total = -found_RV.gather(1, targets_R1).sum()
    found_RV.exp_().scatter_add_(1, targets_R1, found_RV.new_full(targets_R1.shape, -1.0))
    return total, found_RV.div_(count).to(logits_RV.dtype)


GradientOfLogits = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]  # `gradient_of_logits`, which may be compiled


def loss_of_hidden(
    x_BLD: Tensor, head_VD: Tensor, targets_BL: Tensor, of_logits: GradientOfLogits = gradient_of_logits
) -> Tensor:
    """Return the mean cross entropy in nats of the logits that a head gives for hidden states.

    If all logits fit into one piece, it has the same bits as `next_token_loss`, unless `of_logits` is compiled.
    """
    rows = piece_rows(len(head_VD), x_BLD.device.type != "cpu")
    if targets_BL.numel() <= rows and of_logits is gradient_of_logits:
        return next_token_loss(product(x_BLD, head_VD), targets_BL)
    x_TD, targets_T = x_BLD.flatten(0, 1), targets_BL.flatten()
    loss: Tensor = _LossInPieces.apply(x_TD, head_VD, targets_T, rows, torch.is_grad_enabled(), of_logits)
    return loss


def piece_rows(vocabulary: int, is_accelerated: bool = False) -> int:
    """Return the number of tokens of a piece: a multiple of 128 if possible, which suits matrix units."""
    rows = max(1, (ACCELERATOR_PIECE_BYTES if is_accelerated else PIECE_BYTES) // (4 * vocabulary))
    return rows - rows % 128 if rows > 128 else rows


class _LossInPieces(torch.autograd.Function):
    """Mean cross entropy [] of hidden states [T, D]; sums over pieces are fp32."""

    @staticmethod
    def forward(
        ctx: Any, x_TD: Tensor, head_VD: Tensor, targets_T: Tensor, rows: int, trains: bool, of_logits: GradientOfLogits
    ) -> Tensor:
        cast_VD, count = head_VD.to(x_TD.dtype), len(targets_T)
        of_x, total = torch.empty_like(x_TD if trains else x_TD[:0]), torch.zeros((), device=x_TD.device)
        of_head: Tensor | None = None
        for start in range(0, count, rows):
            x_RD, targets_R1 = x_TD[start : start + rows], targets_T[start : start + rows, None]
            part, gradient_RV = of_logits(F.linear(x_RD, cast_VD), targets_R1, count)
            total += part
            if trains:
                of_x[start : start + rows] = gradient_RV @ cast_VD
                own_VD = gradient_RV.T @ x_RD
                of_head = own_VD.float() if of_head is None else of_head.add_(own_VD)
        ctx.save_for_backward(of_x, None if of_head is None else of_head.to(head_VD.dtype))
        return total / count

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None, None, None]:
        of_x, of_head = ctx.saved_tensors
        return of_x * gradients[0].to(of_x.dtype), of_head.mul_(gradients[0]), None, None, None, None
