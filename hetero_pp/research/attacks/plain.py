"""Attacks that need no knowledge of others, or only what the store shows to everybody."""

from __future__ import annotations

import torch
from torch import Tensor

from hetero_pp.research.attacks.attack import Known

LARGEST = 4.0
"""How many times the honest size an attack stays at, where it means to pass `exchange.magnitudes` (5)."""

_GROWTH = 1.2
_SHARED = 0.35
"""Share of the values that a disguised copy has in common with what it copies: below the bound on overlap of 0.4."""


def no_work(known: Known) -> Tensor:
    """Contribute zeros without training (the free rider of Gauntlet, arXiv:2505.21684)."""
    return torch.zeros_like(known.own)


def stale_copy(known: Known) -> Tensor:
    """Train in the first round alone, and contribute the same again in every later round."""
    return known.first


def copy_of_another(known: Known) -> Tensor:
    """Contribute what an honest replica has contributed before in the same round (Gauntlet, section 4)."""
    return known.honest[known.place % len(known.honest)]


def noise(known: Known) -> Tensor:
    """Contribute noise; each tensor has the norm that its own honest contribution would have."""
    return _with_norms(known, known.kept(_normal(known)), [known.own[part].norm() for part in known.parts])


def sign_flip(known: Known) -> Tensor:
    """Contribute the negative of its own contribution (Karimireddy et al. 2021, arXiv:2012.10333)."""
    return -known.own


def flip_by_4(known: Known) -> Tensor:
    """Contribute the negative of its own contribution at four times the size, which bounds of sizes allow."""
    return -4 * known.own


def scaled_by_10(known: Known) -> Tensor:
    """Contribute ten times its own contribution (Bagdasaryan et al. 2020, without their model)."""
    return 10 * known.own


def drift(known: Known) -> Tensor:
    """Push along one random direction, the same for all rounds and fellows, from honest size up to just below bounds.

    The size grows by a fifth a round, so it is near to what the replica sent before, to four times the median of the
    honest ones.
    """
    fixed = torch.Generator().manual_seed(1)
    direction = known.kept(torch.randn(known.own.shape, generator=fixed))
    factor = min(_GROWTH ** (known.round - 1), LARGEST)
    return _with_norms(known, direction, [factor * known.honest[:, part].norm(dim=1).median() for part in known.parts])


def sybils(known: Known) -> Tensor:
    """One of them trains, and the others contribute disguised copies of its contribution without training.

    A disguised copy keeps a share of the values below the bound on overlap; the rest is noise of the same size.
    """
    original = known.fellows[0]
    if known.place == 0:
        return original
    stays = torch.rand(original.shape, generator=known.draw) < _SHARED
    rest = _with_norms(known, known.kept(_normal(known)), [original[part].norm() for part in known.parts])
    fills = torch.rand(original.shape, generator=known.draw) >= _SHARED
    return torch.where(stays & (original != 0), original, rest * fills)


def _normal(known: Known) -> Tensor:
    return torch.randn(known.own.shape, generator=known.draw)


def _with_norms(known: Known, vector: Tensor, norms: list[Tensor]) -> Tensor:
    """Return the vector with the norm of each tensor changed to the one given."""
    scaled = vector.clone()
    for part, norm in zip(known.parts, norms, strict=True):
        scaled[part] *= norm / vector[part].norm().clamp_min(torch.finfo(torch.float32).tiny)
    return scaled
