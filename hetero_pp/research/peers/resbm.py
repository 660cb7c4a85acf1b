"""ResBM: a learned encoder and decoder, around an identity of the first K dimensions.

    sender    z = W2 silu(W1 x) + x[:K]
    receiver  x_hat = V2 silu(V1 z) + [z, 0]

Source: Residual Bottleneck Models (arXiv 2604.11947). Its code and learning rates are not published; widths and initial
weights are those of a port. Differences from the source: AdamW with the inner loop's settings (theirs is Muon), and
replicas average encoders and decoders in each outer round, like the model. Shapes: B, L, D width, K rank.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hetero_pp.model.inner import InnerSettings
from stages.boundary import Boundary
from stages.own_parameters import OwnParameters

INITIAL_SPREAD = 0.01


class ResBM(OwnParameters):
    """The encoders and decoders of all hops of a replica; hidden width max(4 K, 64), no biases."""

    def __init__(
        self, wire: Boundary, width: int, hops: int, inner: InnerSettings, total_steps: int | None, seed: int
    ) -> None:
        """Create the parameters. `wire` sets how K numbers cross, in both directions."""
        self.wire, self.width = wire, width
        rank = wire.dimensions
        hidden = max(4 * rank, 64)
        generator = torch.Generator().manual_seed(seed)
        parameters: dict[str, nn.Parameter] = {}
        for hop in range(hops):
            for name, shape in (
                ("encoder.in", (width, hidden)),
                ("encoder.out", (hidden, rank)),
                ("decoder.in", (rank, hidden)),
                ("decoder.out", (hidden, width)),
            ):
                random = nn.init.trunc_normal_(torch.empty(shape), std=INITIAL_SPREAD, generator=generator)
                parameters[f"{hop}.{name}"] = nn.Parameter(random)
        super().__init__(parameters, inner, total_steps)

    def cross(self, hop: int, x_BLD: Tensor, tokens_BL: Tensor, key: Tensor) -> Tensor:
        encoded = F.silu(x_BLD @ self.parameters[f"{hop}.encoder.in"]) @ self.parameters[f"{hop}.encoder.out"]
        z_BLK = self.wire.cross(encoded + x_BLD[..., : self.wire.dimensions], tokens_BL, key)
        decoded = F.silu(z_BLK @ self.parameters[f"{hop}.decoder.in"]) @ self.parameters[f"{hop}.decoder.out"]
        return decoded + F.pad(z_BLK, (0, self.width - self.wire.dimensions))

    def averaged(self) -> None:
        """Do nothing: parameters stay valid when they are averaged with other replicas'."""
