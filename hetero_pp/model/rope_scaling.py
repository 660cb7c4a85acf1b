"""Scaling of rotary frequencies, with which a model reads longer texts than it was first trained on."""

from __future__ import annotations

import math

from pydantic import Field
from torch import Tensor

from hetero_pp.core.settings import Settings


class RopeScaling(Settings):
    """Llama 3's scaling of rotary frequencies, for texts longer than those of the first training.

    The rule depends on the number of turns of a frequency in `original_length` positions. Numbers between the two
    limits are interpolated. Source: Meta's llama-models, `apply_scaling`.
    """

    factor: float = Field(ge=1, description="divides slow frequencies")
    low_frequency_factor: float = Field(gt=0, description="frequencies with fewer turns are slow")
    high_frequency_factor: float = Field(gt=0, description="frequencies with more turns stay")
    original_length: int = Field(ge=1, description="positions of the first training")

    def scaled(self, frequencies: Tensor) -> Tensor:
        """Return the scaled frequencies, in radians per position."""
        turns = frequencies * (self.original_length / (2 * math.pi))
        kept = (turns - self.low_frequency_factor) / (self.high_frequency_factor - self.low_frequency_factor)
        kept = kept.clamp(0, 1)
        return frequencies * (kept + (1 - kept) / self.factor)
