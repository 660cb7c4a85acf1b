"""Published boundary methods that `beyond/boundaries` compares with ours; only tables have them.

Shapes: B sequences, L positions, D width, K rank, V vocabulary, T tiles, G dimensions of a tile.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hetero_pp.core.errors import ConfigError
from hetero_pp.model.inner import InnerSettings
from hetero_pp.model.part_settings import BoundarySettings
from hetero_pp.model.transformer import ModelShape
from hetero_pp.pipeline.coefficients import format_of
from hetero_pp.research.settings import PeerSettings
from stages.anchors import OwnParameters
from stages.boundary import Boundary

INITIAL_SPREAD = 0.01  # standard deviation of ResBM's initial weights
MOMENTUM = 0.95  # beta of MAPL
STEP_SHARE = 0.1  # alpha of MAPL, as a share of the learning rate
TILE = 64  # G of TAH-Quant's activations
GRADIENT_TILE = 32
_MOMENTUM = "momentum."  # prefix of the names of MAPL's momenta among its tensors
_STANDS_OUT = 2.0
_TINY = 1e-30


class ResBM(OwnParameters):
    """ResBM: learned encoders and decoders of all hops of a replica, around an identity of the first K dimensions.

        sender    z = W2 silu(W1 x) + x[:K]
        receiver  x_hat = V2 silu(V1 z) + [z, 0]

    The hidden width is max(4 K, 64), without biases. Source: Residual Bottleneck Models (arXiv 2604.11947). Its code
    and learning rates are not published; widths and initial weights are those of a port. Differences from the source:
    AdamW with the inner loop's settings (theirs is Muon), and replicas average encoders and decoders in each outer
    round, like the model.
    """

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


class Mapl(OwnParameters):
    """MAPL: projections of all hops that stay orthogonal while they learn, and factorized tables by token of stages.

        sender    Z = (X - E_p[t] W_p) A_p                receiver  X_hat = Z A_p^T + E_(p+1)[t] W_(p+1)

    E [V, K] is trained, one for each stage. W [K, D] is fixed, with orthonormal rows. A [D, K] has orthonormal columns
    and takes a SPEL step in each inner step:

        g <- g - A sym(A^T g),   m <- beta m + (1 - beta) g,   A <- polar(A - alpha polar(m))

    Source: MAPL (arXiv 2606.05484). Its code, beta and initial values are not published. Differences from the source:

    - beta is 0.95, E starts at zero and is trained by AdamW (theirs is Muon for the model), and polar factors use SVD.
    - Replicas average A and E in each outer round, after which A gets orthonormal columns again.
    - Vector quantisation is left out, because its sizes are not known.

    A_p crosses in each step, and the receiver's half of its gradient comes back; both count as bytes.
    """

    def __init__(
        self, wire: Boundary, shape: ModelShape, hops: int, inner: InnerSettings, total_steps: int | None, seed: int
    ) -> None:
        """Create the parameters. `wire` sets how K numbers cross, in both directions."""
        self.wire = wire
        rank, generator = wire.dimensions, torch.Generator().manual_seed(seed)
        self.projections = {f"projection.{hop}": _orthonormal(shape.width, rank, generator) for hop in range(hops)}
        self.expansions = [_orthonormal(shape.width, rank, generator).detach().T for _ in range(hops + 1)]
        self.momenta = {name: torch.zeros_like(one) for name, one in self.projections.items()}
        tables = {f"table.{stage}": nn.Parameter(torch.zeros(shape.vocabulary, rank)) for stage in range(hops + 1)}
        super().__init__(tables, inner.model_copy(update={"weight_decay": 0.0}), total_steps)
        self.parameters = {**tables, **self.projections}

    def to(self, device: torch.device) -> None:
        super().to(device)
        self.expansions = [one.to(device) for one in self.expansions]
        self.momenta = {name: one.to(device) for name, one in self.momenta.items()}

    def cross(self, hop: int, x_BLD: Tensor, tokens_BL: Tensor, key: Tensor) -> Tensor:
        projection_DK = self.projections[f"projection.{hop}"]
        z_BLK = self.wire.cross((x_BLD - self._told(hop, tokens_BL)) @ projection_DK, tokens_BL, key)
        return z_BLK @ projection_DK.T + self._told(hop + 1, tokens_BL)

    def _told(self, stage: int, tokens_BL: Tensor) -> Tensor:
        return F.embedding(tokens_BL, self.parameters[f"table.{stage}"]) @ self.expansions[stage]

    @torch.no_grad()
    def step(self, step: int) -> None:
        """Step the tables with AdamW, and the projections with SPEL."""
        super().step(step)
        alpha = STEP_SHARE * self.optimizer.rates.at(step)
        for name, projection in self.projections.items():
            if projection.grad is None:
                continue
            inner = projection.T @ projection.grad
            tangent = projection.grad - projection @ (inner + inner.T) / 2
            self.momenta[name].lerp_(tangent, 1 - MOMENTUM)
            projection.copy_(polar(projection - alpha * polar(self.momenta[name])))
            projection.grad = None

    def tensors(self) -> dict[str, Tensor]:
        return super().tensors() | {f"{_MOMENTUM}{name}": one for name, one in self.momenta.items()}

    @torch.no_grad()
    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        super().load_tensors({name: one for name, one in tensors.items() if not name.startswith(_MOMENTUM)})
        for name, momentum in self.momenta.items():
            momentum.copy_(tensors[f"{_MOMENTUM}{name}"])


def polar(matrix_DK: Tensor) -> Tensor:
    """Return the nearest matrix with orthonormal columns; zero stays zero."""
    if not bool(matrix_DK.any()):
        return matrix_DK
    left, _, right = torch.linalg.svd(matrix_DK.double(), full_matrices=False)
    return (left @ right).to(matrix_DK)


def _orthonormal(width: int, rank: int, generator: torch.Generator) -> nn.Parameter:
    random = torch.randn(width, rank, generator=generator, dtype=torch.float64)
    return nn.Parameter(torch.linalg.qr(random)[0].float().contiguous())


@dataclass(frozen=True)
class TahQuant:
    """TAH-Quant: activations of all dimensions in 3 or 4 bits, tile by tile, rotated if one number stands out.

    A tile is G neighbouring dimensions of a token. A share of a sequence's tiles, those with the highest entropy of
    |a|, gets 4 bits, the rest 3. A tile is rotated if its largest magnitude is at least twice the next. That number is
    moved to the front, and the tile is multiplied by a Hadamard matrix, which spreads it. The tile is then rounded to
    the nearest of evenly spaced levels between its least and its largest value, and the rotation undone. Gradients use
    fixed point in tiles of 32, without rotation.

    Source: TAH-Quant (arXiv 2506.01352) and its authors' code. It has nothing to learn, and fine-tunes models that were
    trained without it; here it is used from the start of training. Difference: scales of gradients are bf16 (theirs are
    fp16, with a scaled loss), so that small gradients are not lost.
    """

    share: float = 0.8  # share of the tiles that get 4 bits
    gradient_bits: int = 6

    def cross(self, hop: int, x_BLD: Tensor, tokens_BL: Tensor, key: Tensor) -> Tensor:
        """Return the receiver's input. The backward pass treats rounding as identity, and quantises the gradient."""
        crossed: Tensor = _TahCrossing.apply(x_BLD, self)
        return crossed

    def activation(self, x_BLD: Tensor) -> Tensor:
        """Return activations after quantisation."""
        tiles = x_BLD.unflatten(-1, (-1, min(TILE, x_BLD.shape[-1])))  # [B, L, T, G]
        hadamard = _hadamard(tiles.shape[-1]).to(tiles)
        # indices that swap the largest magnitude of each tile with its first number; they also undo the swap
        front = torch.arange(tiles.shape[-1], device=tiles.device).expand(tiles.shape).clone()
        largest = tiles.abs().argmax(-1, keepdim=True)
        front.scatter_(-1, largest, 0)
        front[..., :1] = largest
        first, second = tiles.abs().topk(2, -1).values.unbind(-1)
        stands_out = (first >= _STANDS_OUT * second)[..., None]
        rotated = torch.where(stands_out, tiles.gather(-1, front) @ hadamard, tiles)
        # levels are evenly spaced; scale and least value cross as fp16, but the codes are computed with the exact ones
        steps = self._levels(tiles)[..., None]
        least, most = rotated.amin(-1, keepdim=True), rotated.amax(-1, keepdim=True)
        scale = (most - least) / steps
        codes = ((rotated - least) / (scale + _TINY)).round().clamp(torch.zeros_like(steps), steps)
        rounded = codes * scale.half().float() + least.half().float()
        return torch.where(stands_out, (rounded @ hadamard).gather(-1, front), rounded).flatten(-2)

    def _levels(self, tiles: Tensor) -> Tensor:
        """Return the number of steps between the lowest and the highest level of each tile [B, L, T]: 15 or 7."""
        shares = tiles.abs() / (tiles.abs().sum(-1, keepdim=True) + _TINY)
        entropy = -(shares * (shares + _TINY).log()).sum(-1).flatten(1)
        low = int(entropy.shape[1] * (1 - self.share))
        ranks = entropy.argsort(dim=-1, stable=True).argsort(dim=-1, stable=True)
        return torch.where(ranks < low, 7.0, 15.0).unflatten(-1, tiles.shape[1:3])

    def gradient(self, gradient_BLD: Tensor) -> Tensor:
        """Return gradients after quantisation."""
        tiles = gradient_BLD.unflatten(-1, (-1, min(GRADIENT_TILE, gradient_BLD.shape[-1])))
        scale = tiles.abs().amax(-1, keepdim=True).bfloat16().float()
        half = 2.0 ** (self.gradient_bits - 1)
        codes = (tiles / (scale + _TINY) * half).round().clamp(-half, half - 1)
        return (codes / half * scale).flatten(-2)

    def bytes_per_token(self, width: int) -> tuple[float, float]:
        """Return the bytes per token, forward and backward.

        Beside its values a tile has two fp16 numbers, its bit width, whether it is rotated, and the position that stood
        out.
        """
        tile = min(TILE, width)
        beside = 16 + 16 + 1 + 1 + (tile - 1).bit_length()
        forward = width * (3 + self.share) + width / tile * beside
        back = width * self.gradient_bits + width / min(GRADIENT_TILE, width) * 16
        return forward / 8, back / 8


class _TahCrossing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BLD: Tensor, quantiser: TahQuant) -> Tensor:
        ctx.quantiser = quantiser
        return quantiser.activation(x_BLD)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        quantiser: TahQuant = ctx.quantiser
        return quantiser.gradient(gradients[0]), None


@cache
def _hadamard(size: int) -> Tensor:
    """Return Sylvester's Hadamard matrix, scaled to be orthogonal; it is symmetric. `size` is a power of two."""
    matrix = torch.ones(1, 1)
    while matrix.shape[0] < size:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), matrix)
    return matrix / size**0.5


class Peer(Protocol):
    """Boundaries of a whole replica. Those that learn are also OwnParameters."""

    def cross(self, hop: int, x_BLD: Tensor, tokens_BL: Tensor, key: Tensor) -> Tensor:
        """Return the receiver's input for a sender's output at a hop; `key` selects the noise of rounding gradients."""


def peer_of(
    asked: PeerSettings | None,
    settings: BoundarySettings,
    shape: ModelShape,
    hops: int,
    inner: InnerSettings,
    total_steps: int | None,
    seed: int,
) -> Peer | None:
    """Return the boundary method in the settings; None for the subspace. Raises ConfigError for an invalid rank."""
    if asked is None:
        return None
    rank = settings.dimensions(shape.width)
    if asked.method == "tah_quant":
        if rank is not None:
            raise ConfigError(("boundary", "rank"), f"found {rank}, expected `full`: tah_quant sends all dimensions")
        return TahQuant(asked.four_bits, asked.gradient_bits)
    if rank is None:
        raise ConfigError(("boundary", "rank"), f"found `full`, expected a number: {asked.method} learns what crosses")
    wire = Boundary(rank, format_of(settings))
    if asked.method == "resbm":
        return ResBM(wire, shape.width, hops, inner, total_steps, seed)
    return Mapl(wire, shape, hops, inner, total_steps, seed)


@torch.no_grad()
def average_peers(peers: Sequence[Peer | None]) -> None:
    """Average the parameters that boundaries have learned, in all of them, because they belong to the model."""
    learned = [peer for peer in peers if isinstance(peer, ResBM | Mapl)]
    for name in learned[0].parameters if learned else ():
        mean = torch.stack([peer.parameters[name] for peer in learned]).mean(0)
        for peer in learned:
            peer.parameters[name].copy_(mean)
    for peer in learned:
        if isinstance(peer, Mapl):
            for projection in peer.projections.values():  # the mean of orthonormal columns is not orthonormal
                projection.copy_(polar(projection))


def bytes_per_token(
    asked: PeerSettings, settings: BoundarySettings, width: int, tokens_per_step: int
) -> tuple[float, float]:
    """Return the bytes per token at one hop, forward and backward.

    Bytes that do not depend on the token are divided by `tokens_per_step`, the tokens of a replica in an inner step.
    """
    rank = settings.dimensions(width)
    if asked.method == "tah_quant":
        return TahQuant(asked.four_bits, asked.gradient_bits).bytes_per_token(width)
    assert rank is not None
    wire = format_of(settings).wire_bytes((1, 1024, rank)) / 1024
    beside = 2 * width * rank / tokens_per_step if asked.method == "mapl" else 0.0  # A in bf16, once a step
    return wire + beside, wire + beside
