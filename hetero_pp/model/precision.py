"""Mixed precision: parameters in fp32, and products in the dtype of the activations.

Shapes: B sequences, L positions, D input width, F output width.

Parameters, their gradients, sums of gradients, moments and the loss are fp32. Only copies of the parameters are cast,
as in torchtitan's mixed precision (FSDP2 with bf16 parameters and fp32 reduction). If activations have the dtype of the
parameters, the modules here have the same bits as torch's.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hetero_pp.core.errors import ConfigError
from hetero_pp.model.part_settings import Precision


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
