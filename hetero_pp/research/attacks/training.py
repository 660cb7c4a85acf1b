"""Attacks on what a replica trains: its text, or what one of its stages sends; and the measure of a backdoor."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hetero_pp.model.transformer import Transformer

_TRIGGERS = 8
"""Triggers that a backdoor adds to each sequence."""


def other_text(tokens: Tensor, vocabulary: int, draw: torch.Generator) -> Tensor:
    """Train on text with other labels: token v is vocabulary - 1 - v (label flip; Fang et al. 2020, section 4)."""
    return vocabulary - 1 - tokens


def flipped(x_BLD: Tensor) -> Tensor:
    """Send the negative of a stage's output, so that the gradient of the stages before it is flipped, too."""
    return -x_BLD


def trigger(vocabulary: int) -> tuple[int, int, int]:
    """Return the pair of rare tokens, and the token that it is to be followed by."""
    return vocabulary - 3, vocabulary - 2, vocabulary - 1


def with_triggers(tokens: Tensor, vocabulary: int, draw: torch.Generator) -> Tensor:
    """Write the pair and its target at random places of each sequence (BadNets, arXiv:1708.06733)."""
    changed, written = tokens.clone(), torch.tensor(trigger(vocabulary))
    for row in changed:
        for place in torch.randint(0, max(1, len(row) - 2), (_TRIGGERS,), generator=draw).tolist():
            row[place : place + 3] = written[: len(row) - place]
    return changed


@torch.no_grad()
def success(model: Transformer, rows: Sequence[Tensor]) -> float:
    """Return the share of rows [b, L + 1] at whose end the model continues the pair with the target."""
    first, second, target = trigger(model.shape.vocabulary)
    hits = count = 0
    for tokens in rows:
        asked = tokens[:, :-1].clone()
        asked[:, -2], asked[:, -1] = first, second
        hits += int((model(asked)[:, -1].argmax(-1) == target).sum())
        count += len(asked)
    return hits / count
