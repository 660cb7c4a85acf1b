"""A hostile whole replica: one whose text, or the output of whose middle stage, an attack changes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hetero_pp.core.seeds import seed_of
from hetero_pp.research.attacks.attack import Attack
from hetero_pp.research.vectorized.replica import TableReplica


class HostileReplica(TableReplica):
    """A replica that trains on changed text, or with changed activations in its own forward and backward."""

    attack = Attack()

    def turn(self, attack: Attack) -> None:
        self.attack = attack
        if attack.activations is not None:
            layers = list(self.module.layers.values())
            layers[(len(layers) - 1) // 2].register_forward_hook(self._changed)

    @property
    def trains_otherwise(self) -> bool:
        return self.attack.trains_otherwise

    def inner_step(self, tokens: Tensor, step: int) -> tuple[float, float, float]:
        if self.attack.text is not None:
            draw = torch.Generator().manual_seed(seed_of("text", self.seed, self.name, step))
            tokens = self.attack.text(tokens, self.module.shape.vocabulary, draw)
        return super().inner_step(tokens, step)

    def _changed(self, layer: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        assert self.attack.activations is not None
        return self.attack.activations(output)
