"""The outer step: theta <- theta_start - eta mean_m(D_m), to the bit the same on every machine.

Contributions are added in replica-name order in fp32, divided by the counted weight, and every operation is a
separate elementwise one (no fused multiply-add), so CPU and GPU agree. Source: SparseLoCo, equation 2 of Het-PP.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

import torch
from pydantic import Field
from torch import Tensor

from hetero_pp.pseudo_gradient.contribution import DecodedTensor
from hetero_pp.pseudo_gradient.error_feedback import CompressionSettings
from hetero_pp.settings import Settings


class OuterSettings(Settings):
    """The outer rounds."""

    rounds: int = Field(ge=1)
    learning_rate: float = Field(1.0, gt=0, description="eta in the paper")
    compression: CompressionSettings = CompressionSettings()


def mean_of(shape: tuple[int, ...], weighted: Iterable[tuple[float, DecodedTensor]]) -> Tensor:
    """The weighted mean of contributions to one tensor, in the order given, as a dense fp32 tensor."""
    total, weights = torch.zeros(shape), 0.0
    for weight, decoded in weighted:
        decoded.add_to(total, weight)
        weights += weight
    return total.div_(weights)


def outer_step(start: Tensor, mean: Tensor, learning_rate: float) -> Tensor:
    """theta_start - eta mean."""
    return start - mean.mul(learning_rate)


def parameter_sha256(parameter: Tensor) -> bytes:
    """sha256 of a parameter's little-endian fp32 values."""
    values = parameter.detach().to(device="cpu", dtype=torch.float32).contiguous()
    return hashlib.sha256(values.numpy().astype("<f4", copy=False).data).digest()


def parameters_sha256(hashes: Mapping[str, bytes]) -> bytes:
    """sha256 over sorted (name, sha256 of the parameter): the hash of a replica."""
    digest = hashlib.sha256()
    for name, value in sorted(hashes.items()):
        digest.update(name.encode() + b"\0" + value)
    return digest.digest()
