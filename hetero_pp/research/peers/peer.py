"""Interface of the published boundary methods, and their selection by settings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from hetero_pp.config.topology import BoundarySettings
from hetero_pp.core.errors import ConfigError
from hetero_pp.model.inner import InnerSettings
from hetero_pp.model.transformer import ModelShape
from hetero_pp.pipeline.coefficients import format_of
from hetero_pp.research.peers.mapl import Mapl
from hetero_pp.research.peers.resbm import ResBM
from hetero_pp.research.peers.tah_quant import TahQuant
from hetero_pp.research.settings import PeerSettings
from stages.boundary import Boundary


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
        peer.averaged()


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
