"""Compilation of the model's layers where possible: needs a C++ compiler for the CPU, Triton for a GPU."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

import torch

from hetero_pp.model.transformer import Transformer


@lru_cache(maxsize=4)
def can_compile(device: torch.device) -> bool:
    """Return whether torch.compile works here, by compiling one operation (takes seconds; torch caches it on disk)."""
    try:
        torch.compile(torch.sin, dynamic=False)(torch.ones(2, device=device))
    except RuntimeError:  # the base of all compiler errors
        return False
    return True


def compile_layers(models: Iterable[Transformer]) -> None:
    """Compile the layers of models of one shape; one compilation serves all of them.

    Compiling the whole model would take longer for no further gain. Boundaries lie between layers and are not compiled.
    """
    for model in models:
        for block in model.layers.values():
            block.compile(dynamic=False)
